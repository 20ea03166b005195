"""Convolutions with BatchNorm and ReLU in one go, for networks that have learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops.block_products import PixelRows, neighbours
from moesaic.ops.channels import norm_as_scale_and_shift
from moesaic.ops.kept import Held, Kept
from moesaic.ops.listeners import Listeners

__all__ = ["FoldedConvs"]

FEW_PIXELS = 1024
"""On maps with so many pixels or fewer a convolution of one image is a product, which takes two thirds of the time."""


class _Folded(NamedTuple):
    conv: nn.Conv2d
    weight: Tensor
    bias: Tensor
    matrix: Tensor
    """(ks² · C, O): the weights for a product of rows."""


class FoldedConvs:
    """ReLU(BatchNorm(conv(x))) of one convolution after the other, with BatchNorm's scale multiplied into the weights.

    Convolutions pad with zeros. It is right where BatchNorm's statistics are fixed and nobody wants gradients; whether
    that is so is up to the caller. The folded weights are kept until those of the layers change, see
    `moesaic.ops.kept.Kept`. Layers that have hooks are called one by one. One image on a CPU becomes rows of pixels
    (`moesaic.ops.block_products.PixelRows`) as soon as its map is small.

    >>> conv, norm, x = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8).eval(), torch.randn(1, 3, 8, 8)
    >>> with torch.no_grad():
    ...     torch.allclose(FoldedConvs([(conv, norm)])(x), norm(conv(x)).relu(), atol=1e-6)
    True
    """

    def __init__(self, layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> None:
        self.layers = list(layers)
        self._products = all(_is_product(conv) for conv, _ in self.layers)
        self._folded = Kept[list[_Folded]]()
        # torch does not count how often BatchNorm changes its statistics, but BatchNorm does, in a buffer
        self._held = Held(module for layer in self.layers for module in layer)
        self._listeners = Listeners(module for layer in self.layers for module in layer)

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, mean=False)

    def mean(self, x: Tensor) -> Tensor:
        """(B, channels): the mean over the map that comes out."""
        return self._run(x, mean=True)

    def _run(self, x: Tensor, mean: bool) -> Tensor:
        if self._listeners:
            for conv, norm in self.layers:
                x = norm(conv(x)).relu_()
            return x.mean((2, 3)) if mean else x
        folded = self._folded.of(self._held.now(), lambda: [_fold(*layer) for layer in self.layers])
        one = self._products and x.shape[0] == 1 and x.device.type == "cpu"
        for number, (conv, weight, bias, _) in enumerate(folded):
            if one and x.shape[2] * x.shape[3] <= FEW_PIXELS:
                with torch.inference_mode():  # where operations take a tenth less time
                    y = _small(x, folded[number:], mean)
                return y.clone()
            x = F.conv2d(x, weight, bias, *_steps(conv), conv.dilation, conv.groups).relu_()
        return x.mean((2, 3)) if mean else x


def _small(x: Tensor, folded: list[_Folded], mean: bool) -> Tensor:
    """Products of the rows of a small map, one after the other."""
    rows = PixelRows.of(x)
    values, height, width = rows.values[0], rows.height, rows.width
    for number, (conv, _, bias, matrix) in enumerate(folded, 1):
        ((stride, _), (padding, _)), ks = _steps(conv), conv.kernel_size[0]
        index = neighbours(height, width, ks, stride, padding)
        height, width = ((side + 2 * padding - ks) // stride + 1 for side in (height, width))
        seen = values.index_select(0, index).view(height * width, -1)
        values = torch.addmm(bias, seen, matrix).relu_()
        if number < len(folded):
            values = torch.constant_pad_nd(values, (0, 0, 0, 1))
    return values.mean(0, keepdim=True) if mean else values.T.reshape(1, -1, height, width)


def _is_product(conv: nn.Conv2d) -> bool:
    square = all(len({*sides}) == 1 for sides in (conv.kernel_size, *_steps(conv)))
    return square and conv.groups == 1 and conv.dilation == (1, 1)


def _steps(conv: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    return cast("tuple[int, int]", conv.stride), cast("tuple[int, int]", conv.padding)


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> _Folded:
    assert norm.running_mean is not None and norm.running_var is not None
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    scale, bias = norm_as_scale_and_shift(
        norm.weight.to(wide),
        norm.bias.to(wide),
        norm.running_mean.to(wide),
        norm.running_var.to(wide),
        norm.eps,
        None if conv.bias is None else conv.bias.to(wide),
    )
    weight = (conv.weight.to(wide) * scale[:, None, None, None]).to(conv.weight.dtype)
    matrix = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
    return _Folded(conv, weight, bias.to(conv.weight.dtype), matrix)
