"""Gated convolutions of one image on a CPU, as products of the blocks that are open.

A library's convolution brings weights into an order of its own at every call. For one image that takes longer than
to multiply: of 256 channels on a map of 2×2 it is four times a product, on 8×8 twice. So the weights are kept once
more in the order that products want, BatchNorm's scale multiplied in, and an image is a row of values for each pixel,
in which the channels of a block lie together. What a kernel sees is then a copy of such pieces, and so are the weights
of the open blocks: a piece is all weights from one block to another. Maps are halved where channels lie together as
well, which takes a tenth of the time.

Channels that are gated one by one, or in blocks of a few, or whose last block is shorter, are one block of those that
are open, whose weights are copied filter by filter.

Which way is cheaper is told by the prices of `moesaic.ops.narrow_conv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.narrow_conv import Rates, output_size

__all__ = ["BlockProduct", "OpenBlocks", "PixelRows", "neighbours"]

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.intp]

WHOLE_BLOCK = 8
"""Blocks of so many channels or more are copied and multiplied as blocks."""
BY_TAP = 256
"""On maps with so many pixels or more it pays to copy single weights, so that a pixel's channels are copied at once."""
FEW_WEIGHTS = 2**18
"""Layers with more weights than this are not kept in that order as well."""
SEEN = 2**21
"""So many values that kernels see are made at a time."""
REMEMBERED = 2**15
"""Index lists up to this length are kept."""
PLANS = 1024
"""So many plans are kept of a layer."""


@dataclass(eq=False, slots=True)
class PixelRows:
    """One image: a row for each pixel and one of zeros behind them, which stands for all that lies outside.

    >>> rows = PixelRows.of(torch.arange(8.0).view(1, 2, 2, 2))
    >>> rows.values.tolist()
    [[[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [0.0, 0.0]]]
    >>> rows.in_blocks(1).values.shape, rows.map().flatten().tolist()
    (torch.Size([2, 5, 1]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    """

    values: Tensor
    """(blocks, H · W + 1, channels of a block)"""
    height: int
    width: int

    @staticmethod
    def of(x: Tensor) -> PixelRows:
        """Of a map (1, C, H, W), whose channels become one block."""
        values = torch.constant_pad_nd(x.flatten(2).transpose(1, 2), (0, 0, 0, 1))
        return PixelRows(values, x.shape[2], x.shape[3])

    def map(self) -> Tensor:
        """The map (1, C, H, W) that it is."""
        return self.values[:, :-1].transpose(1, 2).reshape(1, -1, self.height, self.width)

    def full(self, some: OpenBlocks) -> Tensor:
        """(1, all channels, H, W) of rows that have the open channels alone, with zeros in the others."""
        rows, b = self.values.shape[1:]
        if b != some.size or some.channels % b:
            y = self.values.new_zeros(1, some.channels, self.height, self.width)
            return y.index_copy_(1, torch.from_numpy(some.numbers()), self.map())
        values = self.values.new_zeros(some.channels // b, rows, b)
        values.index_copy_(0, torch.from_numpy(some.blocks), self.values)
        return PixelRows(values, self.height, self.width).map()

    def in_blocks(self, size: int) -> PixelRows:
        """The same in blocks of so many channels; in one block for 0."""
        G, rows, b = self.values.shape
        size = size or G * b
        if size == b:
            return self
        values = self.values.transpose(0, 1).reshape(rows, -1, size).transpose(0, 1).contiguous()
        return PixelRows(values, self.height, self.width)


@dataclass(eq=False, slots=True)
class OpenBlocks:
    """The open blocks of a layer, one at least.

    >>> some = OpenBlocks(np.array([0, 2]), np.ones(2), channels=7, size=3)
    >>> some.numbers().tolist(), some.count()
    ([0, 1, 2, 6], 4)
    """

    blocks: Ints
    gates: Floats
    """(open blocks,), in the dtype of the map."""
    channels: int
    """Of the layer."""
    size: int
    """Channels of a block; the last may have fewer."""

    def numbers(self) -> Ints:
        """Of the open channels."""
        if self.size == 1:
            return self.blocks
        numbers = (self.blocks[:, None] * self.size + np.arange(self.size)).ravel()
        return numbers[numbers < self.channels]

    def count(self) -> int:
        """Of the open channels."""
        count = self.blocks.size * self.size
        short = self.channels % self.size
        return count + short - self.size if short and self.blocks[-1] == self.channels // self.size else count


@dataclass(eq=False, slots=True)
class _Plan:
    """What is the same for all images of a size that open equally many blocks."""

    height: int
    width: int
    """Of the result, before it is pooled."""
    dense: bool
    """Whether all channels had better run."""
    whole: bool
    """Whether all are open."""
    index: tuple[Tensor, ...]
    """Of the pieces that kernels see, pixel by pixel; in parts, so that they are not too much at once."""


class BlockProduct:
    """activation(scale · conv(x) + shift), gated and pooled, as a product of open blocks.

    Args:
        conv: the convolution.
        scale: of each output channel, such as BatchNorm's.
        shift: of each output channel.
        reads_gated: whether gates say which of its input channels are open; else it reads a map (1, C, H, W).
        relu: whether there is a ReLU.
        pool: the pooling behind it, if there is one.

    >>> from moesaic.layers import ChannelMoE
    >>> conv = ChannelMoE(3, 16, 3, norm=False, block=8).weights()
    >>> product, x = BlockProduct(conv, torch.ones(16), torch.zeros(16), reads_gated=False), torch.randn(1, 3, 5, 5)
    >>> some = OpenBlocks(np.array([1]), np.ones(1, np.float32), channels=16, size=8)
    >>> with torch.no_grad():
    ...     y = product.run(x, None, some).map()
    ...     torch.allclose(y, torch.conv2d(x, conv.weight, padding=1)[:, 8:], atol=1e-5)
    True
    """

    def __init__(
        self,
        conv: ChannelConv,
        scale: Tensor,
        shift: Tensor,
        *,
        reads_gated: bool,
        relu: bool = False,
        pool: nn.MaxPool2d | None = None,
    ) -> None:
        self.conv = conv
        self.outs, self.ins, self._ks, _ = conv.weight.shape
        self.reads_gated = reads_gated
        self.relu = relu
        self.pool = pool
        out, in_ = conv.block_out, conv.block_in
        whole_in = not reads_gated or (in_ >= WHOLE_BLOCK and self.ins % in_ == 0)
        self.by_block = out >= WHOLE_BLOCK and self.outs % out == 0 and whole_in
        """Whether its result comes in blocks; else in one."""
        self._block_out, self._block_in = (out, in_) if self.by_block else (1, 1)
        self._blocks_in = self.ins // self._block_in
        weight = (conv.weight.to(scale.dtype) * scale[:, None, None, None]).to(conv.weight.dtype).contiguous()
        self._pieces, self._by_tap = self._ordered(weight)
        self._shift: Floats = shift.to(weight.dtype).view(-1, 1, self._block_out).numpy()
        self._plans: dict[tuple[int, int, int, int], _Plan] = {}

    def run(self, x: PixelRows | Tensor, ins: OpenBlocks | None, outs: OpenBlocks) -> PixelRows:
        """The open channels of the result, from the open channels of the map alone."""
        if not self.reads_gated:
            z, height, width = self._of_map(x.map() if isinstance(x, PixelRows) else x, outs)
        else:
            assert ins is not None
            rows = x if isinstance(x, PixelRows) else PixelRows.of(x)
            if not self.by_block or rows.values.shape[2] != self._block_in:
                rows = rows.in_blocks(self._block_in if self.by_block else 0)
            opened = (ins.blocks.size, outs.blocks.size) if self.by_block else (ins.count(), outs.count())
            key = (*opened, rows.height, rows.width)
            plan = self._plans.get(key) or self._plan(key)
            z = (self._by_pairs if self.by_block else self._by_channel)(rows, ins, outs, plan)
            height, width = plan.height, plan.width
        pool = self.pool
        if pool is not None:  # ReLU and gates come behind it, where values are fewer: neither changes their order
            z = torch.max_pool2d(
                z.reshape(-1, height, width, z.shape[2]).permute(0, 3, 1, 2),
                pool.kernel_size,
                pool.stride,
                pool.padding,
                pool.dilation,
                pool.ceil_mode,
            ).permute(0, 2, 3, 1)
            G, height, width, b = z.shape
            z = z.reshape(G, height * width, b)
        gates = outs.gates
        if self.by_block:
            gates = gates[:, None, None]
        elif outs.size > 1:
            gates = gates.repeat(outs.size)[: z.shape[2]]
        if self.relu:
            z = z.relu_()
        if z.shape[1] == height * width:
            z = torch.constant_pad_nd(z, (0, 0, 0, 1))
        else:
            z.select(1, height * width).zero_()
        return PixelRows(z.mul_(torch.from_numpy(gates)), height, width)

    def _ordered(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights piece by piece, and those of single channels tap by tap as well, if they are few."""
        (O, C), T = weight.shape[:2], self._ks**2
        if not self.reads_gated:
            return weight.view(O // self._block_out, -1), None
        if self.by_block:
            b_out, b_in = self._block_out, self._block_in
            pairs = weight.view(O // b_out, b_out, C // b_in, b_in, T).permute(0, 2, 4, 3, 1)
            return pairs.reshape(-1, T * b_in * b_out), None
        by_tap = weight.view(O, C, T).transpose(1, 2).reshape(-1) if weight.numel() <= FEW_WEIGHTS else None
        return weight.view(O * C, T), by_tap

    def _plan(self, key: tuple[int, int, int, int]) -> _Plan:
        blocks_in, blocks_out, rows, columns = key
        ins, outs = blocks_in * self._block_in, blocks_out * self._block_out
        height, width = output_size(rows, self.conv), output_size(columns, self.conv)
        whole = (ins, outs) == (self.ins, self.outs)
        dense = Rates.of(self.conv, height * width).way(ins, outs)[0] == "dense"
        taps = (rows, columns, self._ks, self.conv.stride, self.conv.padding)
        index = _blocks_seen(self._blocks_in if dense else blocks_in, *taps) if self.by_block else neighbours(*taps)
        pieces = index.numel() // (height * width)
        if self.pool is None:  # one pixel more, which becomes the row of zeros: that is less than to copy all others
            index = torch.cat([index, index.new_full((pieces,), rows * columns)])
        seen = self._ks**2 * (self.ins if dense else ins)
        at_a_time = max(SEEN // seen, 1) * pieces
        plan = _Plan(height, width, dense, whole, cast("tuple[Tensor, ...]", index.split(at_a_time)))
        if index.numel() <= REMEMBERED and len(self._plans) < PLANS:
            self._plans[key] = plan
        return plan

    def _of_map(self, x: Tensor, outs: OpenBlocks) -> tuple[Tensor, int, int]:
        blocks, conv = outs.blocks if self.by_block else outs.numbers(), self.conv
        weight = self._pieces.index_select(0, torch.from_numpy(blocks)).view(-1, self.ins, self._ks, self._ks)
        z = torch.conv2d(x, weight, torch.from_numpy(self._shift[blocks].ravel()), conv.stride, conv.padding)
        height, width = z.shape[2:]
        z = z.reshape(blocks.size if self.by_block else 1, -1, height * width)
        return z.transpose(1, 2), height, width

    def _by_pairs(self, rows: PixelRows, ins: OpenBlocks, outs: OpenBlocks, plan: _Plan) -> Tensor:
        values, weight, blocks = rows.values, self._pieces, outs.blocks
        if plan.dense and not plan.whole:  # copies no weights: what is closed is zeros, and its results are left out
            full = values.new_zeros(self._blocks_in, *values.shape[1:])
            values = full.index_copy_(0, torch.from_numpy(ins.blocks), values)
            blocks = np.arange(self.outs // self._block_out)
        elif not plan.whole:
            pairs = (blocks * self._blocks_in)[:, None] + ins.blocks
            weight = weight.index_select(0, torch.from_numpy(pairs.ravel()))
        G = blocks.size
        weight, shift = weight.view(G, -1, self._block_out), torch.from_numpy(self._shift[blocks])
        K, pixels = weight.shape[1], values.view(-1, self._block_in)
        parts = [
            torch.baddbmm(shift, pixels.index_select(0, index).view(1, -1, K).expand(G, -1, -1), weight)
            for index in plan.index
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return y if blocks is outs.blocks else y.index_select(0, torch.from_numpy(outs.blocks))

    def _by_channel(self, rows: PixelRows, ins: OpenBlocks, outs: OpenBlocks, plan: _Plan) -> Tensor:
        conv, T, O, C = self.conv, self._ks**2, self.outs, self.ins
        numbers_in, numbers_out = ins.numbers(), outs.numbers()
        shift = torch.from_numpy(self._shift[:, 0, 0] if plan.dense else self._shift[numbers_out, 0, 0])
        if plan.dense:
            x = rows.map()
            if not plan.whole:
                x = x.new_zeros(1, C, *x.shape[2:]).index_copy_(1, torch.from_numpy(numbers_in), x)
            z = torch.conv2d(x, self._pieces.view(O, C, self._ks, self._ks), shift, conv.stride, conv.padding)
            z = z.flatten(2)
            return (z if plan.whole else z.index_select(1, torch.from_numpy(numbers_out))).transpose(1, 2)
        by_tap = self._by_tap if plan.height * plan.width >= BY_TAP else None
        if by_tap is not None:
            filters = (numbers_out[:, None] * T + np.arange(T)).ravel()
            weight = by_tap.index_select(0, torch.from_numpy((filters[:, None] * C + numbers_in).ravel()))
        elif numbers_in.size == C:
            weight = self._pieces.view(O, -1).index_select(0, torch.from_numpy(numbers_out))
        else:
            pairs = (numbers_out[:, None] * C + numbers_in).ravel()
            weight = self._pieces.index_select(0, torch.from_numpy(pairs))
        K, pixels = numbers_in.size * T, rows.values[0]
        weight = weight.view(-1, K).T

        parts: list[Tensor] = []
        for index in plan.index:
            seen = pixels.index_select(0, index)
            if by_tap is None:
                seen = seen.view(-1, T, numbers_in.size).transpose(1, 2).reshape(-1, K)
            parts.append(torch.addmm(shift, seen.view(-1, K), weight).unsqueeze(0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@lru_cache(maxsize=128)
def neighbours(height: int, width: int, kernel_size: int, stride: int, padding: int) -> Tensor:
    """(pixels of the result · kernel_size²,): the rows of `PixelRows` that a kernel sees at each pixel.

    >>> neighbours(2, 2, 3, 2, 1).tolist()
    [4, 4, 4, 4, 0, 1, 4, 2, 3]
    """

    def seen(size: int) -> Ints:
        starts = np.arange((size + 2 * padding - kernel_size) // stride + 1) * stride - padding
        return starts[:, None] + np.arange(kernel_size)

    rows, columns = seen(height)[:, None, :, None], seen(width)[None, :, None, :]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    with torch.inference_mode(False):
        return torch.from_numpy(np.where(inside, rows * width + columns, height * width).ravel())


def _blocks_seen(blocks: int, height: int, width: int, ks: int, stride: int, padding: int) -> Tensor:
    """(pixels of the result · blocks · ks²,): the same of pixels in blocks, all that a kernel sees of one together."""
    taps = neighbours(height, width, ks, stride, padding).view(-1, 1, ks * ks)
    with torch.inference_mode(False):
        return (taps + torch.arange(blocks).unsqueeze(1) * (height * width + 1)).flatten()
