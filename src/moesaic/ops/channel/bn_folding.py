"""Convolutions with BatchNorm and ReLU in one go, for networks that have learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.ops.channel.block_gemm import WHOLE_BLOCK, BlockMap, BlockProduct, OpenBlocks
from moesaic.ops.channel.gated_conv import norm_as_scale_and_shift
from moesaic.ops.channel.padded_buffers import SpareScratch
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.hooks import Listeners
from moesaic.ops.weight_cache import CachedValue, TensorRefs

__all__ = ["FoldedConvs", "SmallConvs"]

FEW_PIXELS = 1024
"""On maps with so many pixels or fewer a convolution of one image is a product, which takes two thirds of the time."""


class _Folded(NamedTuple):
    conv: nn.Conv2d
    weight: Tensor
    bias: Tensor


class SmallConvs(NamedTuple):
    """Folded convolutions as products, for one small image, and memory for them."""

    products: list[BlockProduct]
    opened: list[OpenBlocks]
    """Of each: all channels."""
    scratch: SpareScratch

    def run(self, x: Tensor, mean: bool) -> Tensor:
        """What comes out of the last, or its mean over the map; in inference mode."""
        scratch = self.scratch.take(x)
        now: BlockMap | Tensor = x
        before = None
        for product, here in zip(self.products, self.opened, strict=True):
            now = product.run(now, before, here, scratch)
            before = here
        assert isinstance(now, BlockMap)
        y = now.mean(scratch) if mean else now.map()
        self.scratch.give_back(x, scratch)
        return y


class FoldedConvs:
    """ReLU(BatchNorm(conv(x))) of one convolution after the other, with BatchNorm's scale multiplied into the weights.

    Convolutions pad with zeros. It is right where BatchNorm's statistics are fixed and nobody wants gradients; whether
    that is so is up to the caller. The folded weights are kept until those of the layers change, see
    `moesaic.ops.weight_cache`. Layers that have hooks are called one by one. Of one image on a CPU convolutions
    are
    products (`moesaic.ops.channel.block_gemm`) as soon as its map is small.

    >>> conv, norm, x = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8).eval(), torch.randn(1, 3, 8, 8)
    >>> with torch.no_grad():
    ...     torch.allclose(FoldedConvs([(conv, norm)])(x), norm(conv(x)).relu(), atol=1e-6)
    True
    """

    def __init__(self, layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> None:
        self.layers = list(layers)
        self._folded = CachedValue[list[_Folded]]()
        self._products = [CachedValue[SmallConvs]() for _ in self.layers]
        """Of the layers from each on."""
        self._square = all(_is_product(conv) for conv, _ in self.layers)
        # torch does not count how often BatchNorm changes its statistics, but BatchNorm does, in a buffer
        self._held = TensorRefs(module for layer in self.layers for module in layer)
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
        if self.is_small(x):
            return self._run_small(x, 0, mean)
        for number, (conv, weight, bias) in enumerate(self._folded.of(self._held.now(), self._fold)):
            if self.is_small(x):
                return self._run_small(x, number, mean)
            x = F.conv2d(x, weight, bias, *_steps(conv), conv.dilation, conv.groups).relu_()
        return x.mean((2, 3)) if mean else x

    def is_small(self, x: Tensor) -> bool:
        """Whether this is one image on a CPU so small that convolutions had better be products."""
        one = self._square and x.shape[0] == 1 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        return one and x.shape[2] * x.shape[3] <= FEW_PIXELS

    def small(self, first: int = 0) -> SmallConvs:
        """The convolutions from one on as products."""
        return self._products[first].of(self._held.now(), lambda: _as_products(self.layers[first:]))

    def _run_small(self, x: Tensor, first: int, mean: bool) -> Tensor:
        small = self.small(first)
        with torch.inference_mode():  # where operations take a tenth less time
            y = small.run(x, mean)
        return y.clone()

    def _fold(self) -> list[_Folded]:
        folded: list[_Folded] = []
        for conv, norm in self.layers:
            scale, shift = _scale_and_shift(conv, norm)
            weight = (conv.weight.to(scale.dtype) * scale[:, None, None, None]).to(conv.weight.dtype)
            folded.append(_Folded(conv, weight, shift.to(conv.weight.dtype)))
        return folded


def _as_products(layers: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> SmallConvs:
    products: list[BlockProduct] = []
    opened: list[OpenBlocks] = []
    for conv, norm in layers:
        (stride, _), (padding, _) = _steps(conv)
        O, C = conv.weight.shape[:2]
        # in halves, one for each of two cores: on small maps a product by itself makes little use of several
        block = O // 2 if O % 2 == 0 and O // 2 >= WHOLE_BLOCK else O
        bare = ChannelConv(conv.weight, None, None, stride, padding, "relu", block, opened[-1].size if opened else C)
        products.append(BlockProduct(bare, *_scale_and_shift(conv, norm), reads_gated=bool(opened), relu=True))
        opened.append(OpenBlocks(np.arange(O // block), None, O, block))
    return SmallConvs(products, opened, SpareScratch())


def _is_product(conv: nn.Conv2d) -> bool:
    square = all(len({*sides}) == 1 for sides in (conv.kernel_size, *_steps(conv)))
    return square and conv.groups == 1 and conv.dilation == (1, 1)


def _steps(conv: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    return cast("tuple[int, int]", conv.stride), cast("tuple[int, int]", conv.padding)


def _scale_and_shift(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    return norm_as_scale_and_shift(
        norm.weight.to(wide),
        norm.bias.to(wide),
        norm.running_mean.to(wide),
        norm.running_var.to(wide),
        norm.eps,
        None if conv.bias is None else conv.bias.to(wide),
    )
