"""3×3 convolutions of few input channels: on a GPU by kernels of their own, elsewhere and for other shapes torch's.

Kernels are in `moesaic.ops.triton.thin` and are imported when the first map asks for them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops.dispatch import pools
from moesaic.ops.precision import autocast_dtype

__all__ = ["fits_thin", "thin_conv2d"]

_MOST_CHANNELS = 16
_SIDE = (3, 3)
_DTYPES = (torch.bfloat16, torch.float16)


def thin_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """``F.conv2d(x, weight, padding=1)`` for kernels (O, C, 3, 3), fast where C is 16 or less and 16 divides O.

    By kernels in 16-bit dtypes on CUDA devices, where maps or kernels are in channels_last. These have no second
    derivatives: ask for ``moesaic.backend("torch")`` where they are needed.
    """
    dtype = autocast_dtype(x) or x.dtype
    if not _suits(x, weight, dtype):
        return F.conv2d(x, weight, padding=1)
    from moesaic.ops.triton.thin import thin_conv

    return thin_conv(x.to(dtype), weight.to(dtype))


def fits_thin(conv: nn.Conv2d) -> bool:
    """Whether `thin_conv2d` computes what a convolution does, and has a reason to."""
    plain = conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    side = conv.kernel_size == _SIDE and conv.padding == (1, 1)
    return plain and side and conv.bias is None and conv.in_channels <= _MOST_CHANNELS


def _suits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels are for this. Not in float32: libraries know better how that is to be multiplied."""
    if x.dim() != 4 or not pools(x) or dtype not in _DTYPES or weight.dtype not in (x.dtype, dtype, torch.float32):
        return False
    O, C, *side = weight.shape
    last = any(each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight))
    return last and tuple(side) == _SIDE and x.shape[1] == C <= _MOST_CHANNELS and O % 16 == 0 and x.numel() > 0
