"""Convolutions with BatchNorm and ReLU in one go, for networks that have learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops.kept import Held, Kept
from moesaic.ops.listeners import Listeners
from moesaic.ops.narrow_conv import FEW_PIXELS, MANY_WEIGHTS

__all__ = ["FoldedConvs"]

Weights = list[tuple[Tensor, Tensor, Tensor]]


class FoldedConvs:
    """ReLU(BatchNorm(conv(x))) of one convolution after the other, with BatchNorm's scale multiplied into the weights.

    Convolutions pad with zeros. It is right where BatchNorm's statistics are fixed and nobody wants gradients; whether
    that is so is up to the caller. The folded weights are kept until those of the layers change, see
    `moesaic.ops.kept.Kept`. Layers that have hooks are called one by one.

    >>> conv, norm, x = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8).eval(), torch.randn(1, 3, 8, 8)
    >>> with torch.no_grad():
    ...     torch.allclose(FoldedConvs([(conv, norm)])(x), norm(conv(x)).relu(), atol=1e-6)
    True
    """

    def __init__(self, layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> None:
        self.layers = list(layers)
        self._folded = Kept[Weights]()
        # torch does not count how often BatchNorm changes its statistics, but BatchNorm does, in a buffer
        self._held = Held(module for layer in self.layers for module in layer)
        self._listeners = Listeners(module for layer in self.layers for module in layer)

    def __call__(self, x: Tensor) -> Tensor:
        if self._listeners:
            for conv, norm in self.layers:
                x = norm(conv(x)).relu_()
            return x
        folded = self._folded.of(self._held.now(), lambda: [_fold(*layer) for layer in self.layers])
        for (conv, _), weights in zip(self.layers, folded, strict=True):
            x = _conv(x, conv, *weights).relu_()
        return x


def _conv(x: Tensor, conv: nn.Conv2d, weight: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    stride, padding = cast("tuple[int, int]", conv.stride), cast("tuple[int, int]", conv.padding)
    if x.shape[0] == 1 and x.device.type == "cpu" and weight.numel() >= MANY_WEIGHTS and conv.groups == 1:
        rows, columns = (
            (x.shape[2 + axis] + 2 * padding[axis] - conv.kernel_size[axis]) // stride[axis] + 1 for axis in (0, 1)
        )
        # as a product, since a convolution would bring the weights into another order first
        if rows * columns <= FEW_PIXELS and conv.dilation == (1, 1):
            values = F.unfold(x, conv.kernel_size, padding=padding, stride=stride)[0].T.contiguous()
            return torch.addmm(bias, values, matrix).T.view(1, -1, rows, columns)
    return F.conv2d(x, weight, bias, stride, padding, conv.dilation, conv.groups)


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, the same as a matrix with a column for each filter, and the bias."""
    assert norm.running_mean is not None and norm.running_var is not None
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    scale = norm.weight.to(wide) * torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    mean = norm.running_mean.to(wide)
    if conv.bias is not None:
        mean = mean - conv.bias.to(wide)
    bias = torch.addcmul(norm.bias.to(wide), mean, scale, value=-1)
    weight = (conv.weight.to(wide) * scale[:, None, None, None]).to(conv.weight.dtype)
    return weight, weight.flatten(1).T.contiguous(), bias.to(conv.weight.dtype)
