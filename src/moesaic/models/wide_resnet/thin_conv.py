"""Convolutions of few input channels: on a GPU by Triton kernels, elsewhere and for other shapes by torch.

3×3 convolutions stand alone; 1×1 ones are added to another map in the same pass. The kernels are in
`moesaic.models.wide_resnet.triton.thin_conv` and `moesaic.models.wide_resnet.triton.shortcut` and are imported when the
first map needs them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops import autocast_dtype, kernels_available

__all__ = ["fits_thin", "fits_thin_add", "plus_thin_conv2d", "thin_conv2d"]

_MAX_CHANNELS = 16
_MAX_OUT_CHANNELS = 320  # of a sum: a program of its backward kernel holds them all at once
_DTYPES = (torch.bfloat16, torch.float16)


def thin_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """``F.conv2d(x, weight, padding=1)`` for kernels (O, C, 3, 3), fast where C is 16 or less and 16 divides O.

    By kernels in 16-bit dtypes on CUDA devices, where maps or kernels are in channels_last. These have no second
    derivatives: use ``moesaic.backend("torch")`` where they are needed.
    """
    dtype = autocast_dtype(x) or x.dtype
    if not _kernels_fit(x, weight, dtype):
        return F.conv2d(x, weight, padding=1)
    from moesaic.models.wide_resnet.triton.thin_conv import thin_conv

    return thin_conv(x.to(dtype).contiguous(memory_format=torch.channels_last), weight.to(dtype))


def plus_thin_conv2d(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``y + F.conv2d(x, weight)`` for kernels (O, C, 1, 1), in one pass where C is 16 or less and 16 divides O.

    By kernels as those of `thin_conv2d`, where ``y`` is in channels_last and has the dtype of the convolution.
    """
    dtype = autocast_dtype(x) or x.dtype
    O, size = weight.shape[0], (x.shape[0], weight.shape[0], *x.shape[2:])
    last = y.shape == size and y.is_contiguous(memory_format=torch.channels_last)
    if not last or y.dtype != dtype or O > _MAX_OUT_CHANNELS or not _kernels_fit(x, weight, dtype, side=1):
        return y + F.conv2d(x, weight)
    from moesaic.models.wide_resnet.triton.shortcut import thin_add

    return thin_add(y, x.to(dtype).contiguous(memory_format=torch.channels_last), weight.to(dtype))


def fits_thin(conv: nn.Conv2d) -> bool:
    """Whether `thin_conv2d` can replace a convolution."""
    return _replaceable(conv, side=3)


def fits_thin_add(conv: nn.Conv2d) -> bool:
    """Whether `plus_thin_conv2d` can replace a convolution whose output is added to a map."""
    return _replaceable(conv, side=1)


def _replaceable(conv: nn.Conv2d, side: int) -> bool:
    plain = conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    square = conv.kernel_size == (side, side) and conv.padding == (side // 2, side // 2)
    return plain and square and conv.bias is None and conv.in_channels <= _MAX_CHANNELS


def _kernels_fit(x: Tensor, weight: Tensor, dtype: torch.dtype, side: int = 3) -> bool:
    """Whether the kernels support this. Not in float32, where cuDNN is faster."""
    if x.dim() != 4 or not kernels_available(x):
        return False
    if dtype not in _DTYPES or weight.dtype not in (x.dtype, dtype, torch.float32):
        return False
    O, C, *sides = weight.shape
    last = any(each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight))
    return last and sides == [side, side] and x.shape[1] == C <= _MAX_CHANNELS and O % 16 == 0 and x.numel() > 0
