"""How kernels of convolutions lie in memory, and how others are made to lie alike.

Beside torch's formats, stacked kernels (E, O, C, ks, ks) may have their taps first: an expert's memory is then the
matrix (ks²·O, C) that pixels are multiplied with, and so is its gradient's, without a copy either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channels_last", "laid_out", "put_taps_first", "taps_first"]


def channels_last(kernels: Tensor) -> bool:
    """Whether kernels (…, C, ks, ks) lie in memory with their channels together.

    >>> kernels = torch.zeros(6, 4, 3, 3)
    >>> channels_last(kernels), channels_last(kernels.contiguous(memory_format=torch.channels_last))
    (False, True)
    """
    return not kernels.is_contiguous() and kernels.movedim(-3, -1).is_contiguous()


def taps_first(kernels: Tensor) -> bool:
    """Whether stacked kernels (E, O, C, ks, ks) lie in memory tap by tap: as (E, ks, ks, O, C).

    >>> kernels = torch.zeros(2, 6, 4, 3, 3)
    >>> taps_first(kernels), taps_first(put_taps_first(kernels))
    (False, True)
    """
    return kernels.ndim == 5 and not kernels.is_contiguous() and kernels.permute(0, 3, 4, 1, 2).is_contiguous()


def put_taps_first(kernels: Tensor) -> Tensor:
    """The same kernels (E, O, C, ks, ks), tap by tap in memory."""
    return kernels.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)


def laid_out(kernels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for others, laid out as these kernels are: their gradient need not be copied then.

    >>> kernels = put_taps_first(torch.zeros(2, 6, 4, 3, 3))
    >>> laid_out(kernels).stride() == kernels.stride()
    True
    """
    known = channels_last(kernels) or taps_first(kernels)
    layout = torch.preserve_format if known else torch.contiguous_format
    return torch.empty_like(kernels, dtype=dtype, memory_format=layout)
