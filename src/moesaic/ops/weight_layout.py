"""Memory layouts of convolution kernels.

Besides torch's formats, stacked kernels (E, O, C, ks, ks) may be stored taps first: an expert's memory is then the
matrix (ks²·O, C) that pixels are multiplied with, and its gradient is the matmul's result, without a copy either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channels_last", "empty_weight_like", "is_taps_first", "to_taps_first"]


def channels_last(kernels: Tensor) -> bool:
    """Whether kernels (…, C, ks, ks) are in channels_last: channels adjacent in memory.

    >>> kernels = torch.zeros(6, 4, 3, 3)
    >>> channels_last(kernels), channels_last(kernels.contiguous(memory_format=torch.channels_last))
    (False, True)
    """
    return not kernels.is_contiguous() and kernels.movedim(-3, -1).is_contiguous()


def is_taps_first(kernels: Tensor) -> bool:
    """Whether stacked kernels (E, O, C, ks, ks) are stored taps first: as (E, ks, ks, O, C).

    >>> kernels = torch.zeros(2, 6, 4, 3, 3)
    >>> is_taps_first(kernels), is_taps_first(to_taps_first(kernels))
    (False, True)
    """
    return kernels.ndim == 5 and not kernels.is_contiguous() and kernels.permute(0, 3, 4, 1, 2).is_contiguous()


def to_taps_first(kernels: Tensor) -> Tensor:
    """Returns kernels (E, O, C, ks, ks) with their memory laid out taps first."""
    return kernels.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)


def empty_weight_like(kernels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory with the layout of these kernels, so that a gradient need not be copied.

    >>> kernels = to_taps_first(torch.zeros(2, 6, 4, 3, 3))
    >>> empty_weight_like(kernels).stride() == kernels.stride()
    True
    """
    known = channels_last(kernels) or is_taps_first(kernels)
    layout = torch.preserve_format if known else torch.contiguous_format
    return torch.empty_like(kernels, dtype=dtype, memory_format=layout)
