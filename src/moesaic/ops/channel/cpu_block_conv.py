"""Gated convolutions of one image on a CPU, as GEMMs of the open blocks.

A library's convolution reorders its weights at every call. For one image that takes longer than the arithmetic: with
256 channels on a 2×2 map four times as long as a GEMM, on 8×8 twice. So a frozen network stores the weights in the
order that a GEMM reads, and maps with the channels of a block contiguous (`moesaic.ops.channel.workspace`). Unfolding a
map and gathering the weights of the open blocks then copy contiguous pieces: all weights from one block to another.
Gates are multiplied in during the unfolding. Large maps are unfolded for one row of the kernel and shifted from row to
row, which copies a third. Max pooling in this layout takes a tenth of the time.

Channels gated one by one, in small blocks, or with a shorter last block are treated as one block of the open channels.
The rows of their weights that read open channels are copied, or of these rows the open columns, or nothing: whichever
costs least by `moesaic.ops.channel.costs`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.ops.channel import costs
from moesaic.ops.channel.costs import ConvCosts
from moesaic.ops.channel.workspace import KernelShape, PaddedMap, Workspace
from moesaic.ops.dispatch import ChannelConv

__all__ = ["WHOLE_BLOCK", "BlockConv", "BlockMap", "OpenBlocks"]

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.intp]
Copied = Literal["nothing", "rows", "pairs"]

WHOLE_BLOCK = 8
"""Blocks of at least this many channels are copied and multiplied as blocks."""
LARGE_MAP = 256
"""Maps of at least this many pixels are unfolded for one row of the kernel."""
MANY_WEIGHTS = 2**20
"""Layers with at least this many weights, whose channels are gated one by one, have their columns in ``COLUMN_BLOCKS``
blocks: several cores share the GEMM of few pixels better, which saves a tenth of the time."""
COLUMN_BLOCKS = 2
MAX_UNFOLDED = 2**21
"""At most this many unfolded values are computed at a time."""


@dataclass(eq=False, slots=True)
class OpenBlocks:
    """The open blocks of a layer; at least one.

    >>> some = OpenBlocks(np.array([0, 2]), torch.ones(2, 1, 1), channels=7, size=3)
    >>> some.channel_numbers().tolist(), some.count()
    ([0, 1, 2, 6], 4)
    """

    blocks: Ints
    gates: Tensor | None
    """(open blocks, 1, 1), in the dtype of the map; None where all are 1."""
    channels: int
    """Channels of the layer."""
    size: int
    """Channels of a block; the last may have fewer."""

    def channel_numbers(self) -> Ints:
        """The numbers of the open channels."""
        if self.size == 1:
            return self.blocks
        numbers = (self.blocks[:, None] * self.size + np.arange(self.size)).ravel()
        return numbers[numbers < self.channels]

    def count(self) -> int:
        """The number of open channels."""
        count = self.blocks.size * self.size
        short = self.channels % self.size
        return count + short - self.size if short and self.blocks[-1] == self.channels // self.size else count

    def all_gates(self) -> Tensor | None:
        """(blocks, 1, 1): the gates of all blocks, 0 where closed."""
        if self.gates is None:
            return None
        some: Floats = self.gates.numpy()
        gates = np.zeros((-(-self.channels // self.size), 1, 1), some.dtype)
        gates[self.blocks] = some
        return torch.from_numpy(gates)

    def per_channel(self, gates: Tensor) -> Floats:
        """(channels,): gates (blocks, 1, 1), of the open blocks or of all, repeated for each channel."""
        each: Floats = gates.numpy().ravel()
        if self.size == 1:
            return each
        return each.repeat(self.size)[: self.count() if each.size == self.blocks.size else self.channels]


@dataclass(eq=False, slots=True)
class BlockMap:
    """A map of one image in block layout, before its ReLU and gates.

    >>> some = OpenBlocks(np.array([1, 2]), torch.tensor([1.0, 3.0]).view(2, 1, 1), channels=3, size=1)
    >>> found = BlockMap(torch.tensor([2.0, 4.0, -1.0, 5.0]).view(1, 1, 2, 2), some, relu=True)
    >>> found.compact().flatten().tolist(), found.full().shape
    ([2.0, 0.0, 12.0, 15.0], torch.Size([1, 3, 1, 2]))
    """

    values: Tensor
    """(blocks, H, W, channels of a block), or all channels as one block; a buffer that later layers overwrite."""
    some: OpenBlocks
    relu: bool
    has_closed: bool = False
    """Whether closed channels are included; their values are meaningless."""

    def opened(self) -> Tensor:
        """The values of the open channels."""
        if not self.has_closed:
            return self.values
        if self.values.shape[3] == self.some.channels:
            return self.values.index_select(3, torch.from_numpy(self.some.channel_numbers()))
        return self.values.index_select(0, torch.from_numpy(self.some.blocks))

    def write_to(self, place: Tensor, *, all_channels: bool = False) -> Tensor | None:
        """Apply ReLU and write the map to ``place``, (blocks, H, W, channels of a block).

        Returns the gates (blocks, 1, 1) that have yet to be multiplied in, or None. With ``all_channels``, closed
        channels are zeros or have a gate of 0.
        """
        some, b = self.some, place.shape[3]
        if all_channels and not self.has_closed:
            place.zero_()
            values = self._gated(self.values, some.gates)
            if place.shape[0] > 1:
                place.index_copy_(0, torch.from_numpy(some.blocks), _in_blocks(values, b))
            else:
                values = _in_blocks(values, values.shape[0] * values.shape[3])
                place.index_copy_(3, torch.from_numpy(some.channel_numbers()), values)
            return None
        values = _in_blocks(self.values if all_channels else self.opened(), b)
        if self.relu:
            torch.clamp_min(values, 0, out=place)
        else:
            place.copy_(values)
        return some.all_gates() if all_channels else some.gates

    def compact(self) -> Tensor:
        """(1, open channels, H, W): the compact map, after ReLU and gates."""
        values = self._gated(self.opened(), self.some.gates)
        return _in_blocks(values, values.shape[0] * values.shape[3]).permute(0, 3, 1, 2).contiguous()

    def _gated(self, values: Tensor, gates: Tensor | None) -> Tensor:
        """A copy of values after ReLU and gates."""
        values = values.clamp_min(0) if self.relu else values.clone()
        if gates is None:
            return values
        if values.shape[0] > 1:
            return values.mul_(gates.unsqueeze(3))
        return values.mul_(torch.from_numpy(self.some.per_channel(gates)))

    def mean(self, workspace: Workspace) -> Tensor:
        """(1, channels): the mean over all pixels, for gates that are all 1. Applies ReLU in place."""
        values = self.values.clamp_min_(0) if self.relu else self.values
        blocks, H, W, b = values.shape
        each: Tensor | None = workspace.plans.get(("mean", blocks, H, W))
        if each is None:
            each = values.new_full((1, 1, H * W), 1 / (H * W)).expand(blocks, -1, -1)
            workspace.add_plan(("mean", blocks, H, W), each)
        return torch.bmm(each, values.view(blocks, -1, b)).view(1, -1)  # a third of the time of a reduction

    def full(self) -> Tensor:
        """(1, all channels, H, W): the map after ReLU and gates, zero in closed channels."""
        some, (H, W) = self.some, self.values.shape[1:3]
        if self.has_closed:
            values = self._gated(self.values, some.all_gates())
            return _in_blocks(values, some.channels).permute(0, 3, 1, 2).contiguous()
        values = self._gated(self.values, some.gates)
        blocks, b = values.shape[0], values.shape[3]
        if blocks > 1:
            y = values.new_zeros(some.channels // b, b, H, W)
            return y.index_copy_(0, torch.from_numpy(some.blocks), values.permute(0, 3, 1, 2)).view(1, -1, H, W)
        y = values.new_zeros(1, some.channels, H, W)
        return y.index_copy_(1, torch.from_numpy(some.channel_numbers()), values.permute(0, 3, 1, 2))


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """(blocks, H, W, size) from channels in blocks of another size."""
    if values.shape[3] == size:
        return values
    H, W = values.shape[1:3]
    return values.permute(1, 2, 0, 3).reshape(H, W, -1, size).permute(2, 0, 1, 3)


@dataclass(eq=False, slots=True)
class _Part:
    """Some output rows, or all."""

    windows: Tensor
    """The kernel's windows, as a view of the padded map."""
    unfolded: Tensor
    """A buffer for their copy."""
    matrices: list[Tensor]
    """(output blocks, pixels, values): the copy as one matrix, or as one for each row of the kernel."""
    output: Tensor
    """(output blocks, pixels, channels of a block)"""


@dataclass(eq=False, slots=True)
class _Plan:
    """Views of buffers, for all images of one size that open the same number of blocks."""

    copied: Copied
    """The part of the weights that is copied."""
    whole: bool
    """Whether all channels are open."""
    all_outs: bool
    """Whether all output channels are computed."""
    outs: int
    """All output blocks, or channels where these are not in blocks."""
    inside: Tensor
    """Where the input map is written."""
    memory: tuple[Hashable, int, Tensor] | None
    """Name, number of channels and memory of the buffer, where the place of the padding depends on that number."""
    gathered: Tensor | None
    """The buffer of the copied weights."""
    columns: Tensor | None
    """The buffer of their open columns."""
    weights: list[Tensor]
    """(output blocks, values, channels of a block), for each matrix of a part."""
    parts: list[_Part]
    output: Tensor
    """(blocks, H, W, channels of a block)"""


class BlockConv:
    """A folded convolution of one image with ReLU, gates and max pooling, as GEMMs of the open blocks.

    Args:
        conv: the convolution, without BatchNorm (`moesaic.ops.channel.bn_folding.fold_norm`).
        gated_input: whether its input channels are gated; else it reads a map (1, C, H, W).
        relu: whether a ReLU follows.
        pool: the max pooling that follows, if any.

    >>> from moesaic.layers import ChannelMoE
    >>> from moesaic.ops.channel.bn_folding import fold_norm
    >>> conv, x = fold_norm(ChannelMoE(3, 16, 3, norm=False, block=8).weights()), torch.randn(1, 3, 5, 5)
    >>> some = OpenBlocks(np.array([1]), None, channels=16, size=8)
    >>> y = BlockConv(conv, gated_input=False).run(x, None, some, Workspace(torch.float32)).compact()
    >>> torch.allclose(y, torch.conv2d(x, conv.weight, padding=1)[:, 8:], atol=1e-5)
    True
    """

    def __init__(
        self, conv: ChannelConv, *, gated_input: bool, relu: bool = False, pool: nn.MaxPool2d | None = None
    ) -> None:
        self.conv = conv
        self.outs, self.ins, ks, _ = conv.weight.shape
        self.kernel = KernelShape(ks, conv.stride, conv.padding)
        self.gated_input = gated_input
        self.relu = relu
        self.pool = pool
        out, in_ = conv.block_out, conv.block_in
        whole_in = not gated_input or (in_ >= WHOLE_BLOCK and self.ins % in_ == 0)
        self.by_block = out >= WHOLE_BLOCK and self.outs % out == 0 and whole_in
        """Whether its output is in blocks; else all channels are one block."""
        self._block_out = out if self.by_block else self.outs
        self._block_in = in_ if self.by_block and gated_input else self.ins
        self._blocks_in = self.ins // self._block_in
        self._kernel_rows = np.arange(ks)[:, None]
        self._taps = np.arange(ks * ks)[:, None] * self.ins
        large = conv.weight.numel() >= MANY_WEIGHTS and self.outs % COLUMN_BLOCKS == 0
        self._column_blocks = COLUMN_BLOCKS if large and gated_input and not self.by_block else 1
        """The number of column blocks of the weights."""
        assert conv.bias is not None
        self._pieces = self._weight_pieces(conv.weight.contiguous())
        self._shift: Floats = conv.bias.view(-1, 1, self._block_out).numpy()
        self._all_shifts = torch.from_numpy(self._shift).view(max(len(self._shift), self._column_blocks), 1, -1)
        self._id = next(_IDS)

    def run(self, x: BlockMap | Tensor, ins: OpenBlocks | None, outs: OpenBlocks, workspace: Workspace) -> BlockMap:
        """The open output channels, computed from the open input channels."""
        if not self.gated_input:
            x = x.compact() if isinstance(x, BlockMap) else x
            open_in = self.ins
        else:
            assert ins is not None
            open_in = ins.blocks.size if self.by_block else ins.count()
        open_out = outs.blocks.size if self.by_block else outs.count()
        height, width = x.values.shape[1:3] if isinstance(x, BlockMap) else x.shape[2:]
        key = (self._id, open_in, open_out, height, width)
        plan: _Plan | None = workspace.plans.get(key)
        if plan is None:
            plan = self._plan(key, workspace)
            workspace.add_plan(key, plan)
        gates = self._write_input(plan, x, ins, workspace)
        shift = self._gather_weights(plan, ins, outs)
        for part in plan.parts:
            if gates is None:
                part.unfolded.copy_(part.windows)
            else:
                torch.mul(part.windows, gates, out=part.unfolded)
            total = shift
            for matrix, weight in zip(part.matrices, plan.weights, strict=True):
                total = torch.baddbmm(total, matrix, weight, out=part.output)
        z = plan.output
        if len(plan.parts) > 1:
            torch.cat([part.output for part in plan.parts], 1, out=z.view(z.shape[0], -1, z.shape[3]))
        pool = self.pool
        if pool is not None:  # before ReLU and gates, which are monotonic, so that these have fewer values to process
            z = torch.max_pool2d(
                z.permute(0, 3, 1, 2), pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
            ).permute(0, 2, 3, 1)
        if self._column_blocks > 1:
            z = _in_blocks(z, z.shape[0] * z.shape[3])
        return BlockMap(z, outs, self.relu, has_closed=plan.all_outs and open_out < plan.outs)

    def _weight_pieces(self, weight: Tensor) -> Tensor:
        """The weights with each contiguous piece as a row."""
        (O, _, ks, _), b = weight.shape, self._block_out
        if not self.gated_input:
            return weight.view(O // b, b, -1).transpose(1, 2).reshape(O // b, -1)
        if self.by_block:
            pieces = weight.view(O // b, b, self._blocks_in, self._block_in, ks, ks).permute(0, 2, 4, 5, 3, 1)
            return pieces.reshape(-1, ks * ks * self._block_in * b)
        columns = O // self._column_blocks
        return weight.permute(2, 3, 1, 0).reshape(-1, self._column_blocks, columns).transpose(0, 1).reshape(-1, columns)

    def _part_to_copy(self, ins: int, outs: int, pixels: int) -> Copied:
        """The part of the weights that is cheapest to copy, for this number of open channels."""
        if (ins, outs) == (self.ins, self.outs):
            return "nothing"
        if not self.gated_input:
            return "pairs"
        if self.by_block:
            return "nothing" if ConvCosts.of(self.conv, pixels).cheapest(ins, outs)[0] == "dense" else "pairs"
        unit, taps = costs.CPU_COSTS, self.kernel.size**2
        each = taps * max(pixels * unit.mac, unit.read)
        rows = 0.0 if ins == self.ins else taps * ins * self.outs * unit.copy
        by_copy: dict[Copied, float] = {
            "nothing": self.ins * self.outs * each + pixels * (self.ins + outs) * unit.column,
            "rows": rows + ins * self.outs * each + pixels * outs * unit.column,
            "pairs": rows + ins * outs * (taps * unit.column + each),
        }
        if ins == self.ins:
            del by_copy["rows"]
        if self._column_blocks > 1:
            del by_copy["pairs"]
        return min(by_copy, key=by_copy.__getitem__)

    def _plan(self, key: tuple[int, int, int, int, int], workspace: Workspace) -> _Plan:
        """The plan for this number of open blocks, or of channels where these are not in blocks."""
        _, open_in, open_out, height, width = key
        (ks, stride, _), (rows, columns) = self.kernel, self.kernel.output_size(height, width)
        each_in, each_out = (self._block_in, self._block_out) if self.by_block else (1, 1)
        ins = open_in * each_in if self.gated_input else self.ins
        outs = open_out * each_out
        copied = self._part_to_copy(ins, outs, rows * columns)
        # plans that copy nothing, or whole rows, do not depend on the number of open channels
        used = (ins if copied != "nothing" else -1, outs if copied == "pairs" else -1)
        same: _Plan | None = workspace.plans.get((self._id, *used, height, width))
        if same is not None and (ins, outs) != (self.ins, self.outs):
            return same
        whole = (ins, outs) == (self.ins, self.outs)
        # number and size of the blocks that are read and computed
        C = self.ins if copied == "nothing" else ins
        blocks, size = (C // self._block_in, self._block_in) if self.by_block else (1, C)
        if not self.gated_input:
            blocks, size = C, 1
        O = outs if copied == "pairs" else self.outs
        out_blocks = O // self._block_out if self.by_block else self._column_blocks
        b = O // out_blocks

        K = C * ks * ks
        gathered = columns_of = None
        weight = self._pieces
        if self.by_block or not self.gated_input:
            if copied == "pairs" and self.by_block:
                weight = gathered = workspace.buffer("weights", out_blocks * K * b // weight.shape[1], weight.shape[1])
        elif copied != "nothing" and ins < self.ins:
            weight = gathered = workspace.buffer("weights", out_blocks * K, self.outs // out_blocks)
        if copied == "pairs" and not self.by_block:
            weight = columns_of = workspace.buffer("columns", K, O)

        name = ("padded map", self._id, height, width)
        memory = workspace.buffer(name, PaddedMap.values_per_channel(height, width, self.kernel) * self.ins)
        padded = PaddedMap(memory, blocks, height, width, size, self.kernel)
        in_strips = self.gated_input and stride == 1 and ks > 1 and rows * columns >= LARGE_MAP
        if self.by_block and blocks > 1 and gathered is None:
            in_strips = False  # the weights are not stored row by row of the kernel
        if in_strips and self.by_block and gathered is not None:
            gathered = gathered.view(len(gathered) * ks, -1)
        weights = list(weight.view(out_blocks, ks, -1, b).unbind(1)) if in_strips else [weight.view(out_blocks, -1, b)]
        at_a_time = max(MAX_UNFOLDED // (columns * K // (ks if in_strips else 1)), 1)
        starts = range(0, rows, at_a_time)
        output = workspace.buffer("output", out_blocks, rows, columns, b)
        everywhere = padded.strips() if in_strips else padded.windows()
        parts: list[_Part] = []
        for number, start in enumerate(starts):
            some = min(at_a_time, rows - start)
            pixels = some * columns
            flat = (
                output.view(out_blocks, -1, b)
                if len(starts) == 1
                else workspace.buffer(("part", number), out_blocks, pixels, b)
            )
            if in_strips:
                windows = everywhere[start : start + some + ks - 1]
                unfolded = workspace.buffer("unfolded", *windows.shape)
                lines = unfolded.view(-1, K // ks)
                matrices = [lines[row * columns : row * columns + pixels] for row in range(ks)]
            elif self.gated_input:
                windows = everywhere[start : start + some]
                unfolded = workspace.buffer("unfolded", *windows.shape)
                matrices = [unfolded.view(pixels, K)]
            else:  # a plain map is stored channel by channel
                windows = everywhere[start : start + some].permute(2, 3, 4, 0, 1)
                unfolded = workspace.buffer("unfolded", *windows.shape)
                matrices = [unfolded.view(K, pixels).T]
            parts.append(_Part(windows, unfolded, [matrix.expand(out_blocks, -1, -1) for matrix in matrices], flat))
        plan = _Plan(
            copied=copied,
            whole=whole,
            all_outs=self.outs == O,
            outs=self.outs // each_out,
            inside=padded.inside,
            memory=None if self.by_block or not self.gated_input else (name, size, memory),
            gathered=gathered,
            columns=columns_of,
            weights=weights,
            parts=parts,
            output=output,
        )
        if not whole:
            workspace.add_plan((self._id, *used, height, width), plan)
        return plan

    def _write_input(
        self, plan: _Plan, x: BlockMap | Tensor, ins: OpenBlocks | None, workspace: Workspace
    ) -> Tensor | None:
        """Write the map into the padded buffer; returns the gates that have yet to be multiplied in."""
        place = plan.inside
        if not self.gated_input:
            assert isinstance(x, Tensor)
            place.copy_(x[0].unsqueeze(3))
            return None
        assert ins is not None
        if plan.memory is not None:
            name, size, memory = plan.memory
            if workspace.sizes.get(name) != size:  # the former padding is in another place
                memory.zero_()
                workspace.sizes[name] = size
        all_channels = plan.copied == "nothing" and not plan.whole  # closed channels are zeros
        if isinstance(x, Tensor):
            size = self._block_in if self.by_block else x.shape[1]
            blocks = x.view(-1, size, *x.shape[2:]).permute(0, 2, 3, 1)
            if all_channels:
                place.zero_()
                numbers = torch.from_numpy(ins.blocks if self.by_block else ins.channel_numbers())
                place.index_copy_(0 if self.by_block else 3, numbers, blocks)
            else:
                place.copy_(blocks)
            return None
        gates = x.write_to(place, all_channels=all_channels)
        if gates is None or self.by_block:
            return gates
        return torch.from_numpy(np.tile(ins.per_channel(gates), self.kernel.size))

    def _gather_weights(self, plan: _Plan, ins: OpenBlocks | None, outs: OpenBlocks) -> Tensor:
        """Copy the open weights; returns the shifts."""
        if self.by_block:
            if plan.gathered is None:
                return self._all_shifts
            blocks = outs.blocks
            pieces, numbers = self._pieces, blocks
            if self.gated_input:
                assert ins is not None
                numbers = (blocks * self._blocks_in)[:, None] + ins.blocks
                if len(plan.weights) > 1:  # row by row of the kernel
                    pieces = pieces.view(len(pieces) * len(plan.weights), -1)
                    numbers = numbers[:, None] * len(plan.weights) + self._kernel_rows
                numbers = numbers.ravel()
            torch.index_select(pieces, 0, torch.from_numpy(numbers), out=plan.gathered)
            return torch.from_numpy(self._shift[blocks])
        weight = self._pieces.view(-1, self.outs // self._column_blocks)
        if plan.gathered is not None:
            assert ins is not None
            rows = (self._taps + ins.channel_numbers()).ravel()
            if self._column_blocks > 1:
                rows = (np.arange(0, len(weight), len(weight) // self._column_blocks)[:, None] + rows).ravel()
            weight = torch.index_select(weight, 0, torch.from_numpy(rows), out=plan.gathered)
        if plan.columns is None:
            return self._all_shifts
        numbers = outs.channel_numbers()
        torch.index_select(weight, 1, torch.from_numpy(numbers), out=plan.columns)
        return torch.from_numpy(self._shift[:, :, numbers])


_IDS = count()
