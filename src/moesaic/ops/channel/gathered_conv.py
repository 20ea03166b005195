"""Convolutions of batches with only their open channels, for frozen networks.

The kernel of the open channels is copied out of the full one (``"gathered"``), or the full convolution runs and its
open channels are selected (``"dense"``), whichever `ConvCosts` estimates to be cheaper. Input channels of a filter are
contiguous in memory, so channels that are gated in blocks are copied block by block.

A gathered convolution of one image is a GEMM with the unfolded map wherever the library's convolution is slower: for
very few pixels and many weights, which it reorders at every call; for large maps of few channels; and for channels
gated one by one, since it prepares itself for every new number of channels.

All of this is for CPUs. On a GPU gathering is slower than masked execution, which was measured (VGG-16 of 32×32 images
in batches of 256, bfloat16, H200: ``benchmarks/results/channel-cuda.json``): the dense network takes 1.28 ms, at 126
TFLOP/s. With every sample's own blocks of 64 channels gathered, unfolded, sorted by pairs of blocks and multiplied in
one grouped GEMM it takes 8 to 14 times as long: unfolding writes nine times the bytes of the map, which a dense
convolution never does, and the groups are small. The channels that any sample of a batch opens are soon all channels.
So on a GPU a kernel reads open blocks where they lie (`moesaic.ops.triton.channel_conv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.costs import ConvCosts, Execution, pieces_per_filter
from moesaic.ops.dispatch import ChannelConv

__all__ = ["BlockLayout", "OpenChannels", "gathered_conv", "group_samples", "memory_format", "open_conv", "split"]

Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]

FEW_PIXELS = 16
"""Maps of at most this many pixels are small: a GEMM is then bound by reading the weights."""
MANY_WEIGHTS = 2**18
"""From this number of weights on, a convolution of very few pixels spends its time on reordering them."""
MANY_PIXELS = 512
"""From this number of pixels on, a GEMM is faster than a convolution of few channels."""
LARGE_BLOCK = 16
"""Blocks of this many channels or more give few distinct kernel shapes, which convolutions have prepared soon."""
MAX_UNFOLDED = 2**23
"""Above this number of unfolded values an image runs as a convolution in any case."""


@dataclass(eq=False, slots=True)
class OpenChannels:
    """The channels of a layer that any sample of a batch opens, out of ``total``.

    >>> x = torch.arange(3.0).view(1, 3, 1, 1)
    >>> some = OpenChannels(torch.tensor([0, 2]), total=3)
    >>> some.select(x).flatten().tolist(), some.scatter(torch.ones(1, 2, 1, 1)).flatten().tolist()
    ([0.0, 2.0], [1.0, 0.0, 1.0])
    """

    index: Tensor
    """Channel numbers in ascending order."""
    total: int
    pieces: Tensor | None = None
    """Block numbers, where the filters of consumers are copied block by block (`pieces_per_filter`)."""
    filters: Tensor | None = None
    """(…, 1): offsets of the channels' own filters in the weights, counted in pieces."""
    gates: Tensor | None = None
    """(B, open channels, 1, 1)"""
    shift: Tensor | None = None
    """(B, open channels, 1, 1): gate · bias"""

    def __len__(self) -> int:
        return self.index.shape[0]

    @staticmethod
    def all(total: int) -> OpenChannels:
        return OpenChannels(torch.arange(total, device="cpu"), total)

    def select(self, x: Tensor) -> Tensor:
        """The open channels of a map, which may be compact (have only these) already."""
        if x.shape[1] == self.index.shape[0]:
            return x
        return x.index_select(1, self.index).contiguous(memory_format=memory_format(x))

    def scatter(self, x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """A map of all channels from a compact one, zero in closed channels."""
        if x.shape[1] == self.total:
            return x.contiguous(memory_format=memory_format)
        shape = (x.shape[0], self.total, *x.shape[2:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format).zero_()
        return y.index_copy_(1, self.index, x)


class BlockLayout:
    """The channels and blocks of several layers, numbered consecutively.

    Args:
        layers: of each layer the number of channels, the block size, and the pieces of its filters.
        bias: (all channels,), that of all layers.

    >>> layout = BlockLayout([(4, 2, 1), (3, 1, 4)], torch.zeros(7))
    >>> first, second = layout.open(torch.tensor([[1.0, 0.0, 0.0, 0.5, 0.0]]))
    >>> first.index.tolist(), second.index.tolist()
    ([0, 1], [1])
    """

    def __init__(self, layers: Sequence[tuple[int, int, int]], bias: Tensor) -> None:
        widths, sizes, pieces = (np.array(column) for column in zip(*layers, strict=True))
        blocks = -(-widths // sizes)
        self.widths: list[int] = widths.tolist()
        self.blocks: list[int] = blocks.tolist()
        self._whole_blocks = [width % size == 0 for width, size, _ in layers]
        self._bias = bias
        self._first_channel, self._first_block = np.cumsum(widths) - widths, np.cumsum(blocks) - blocks
        self._layer_start = np.repeat(self._first_block, blocks)  # of each block, the first block of its layer
        self._channel_start = np.repeat(self._first_channel, widths)  # of each channel, the first of its layer
        block_in_layer = (np.arange(len(self._channel_start)) - self._channel_start) // np.repeat(sizes, widths)
        self._block = block_in_layer + np.repeat(self._first_block, widths)
        self._pieces = np.repeat(pieces, widths)
        self._block_sizes = np.bincount(self._block)

    @staticmethod
    def of(convs: Iterable[ChannelConv]) -> BlockLayout:
        """The layout of the output channels of folded convolutions."""
        convs = list(convs)
        layers = [(conv.weight.shape[0], conv.block_out, pieces_per_filter(conv)) for conv in convs]
        return BlockLayout(layers, torch.cat([cast("Tensor", conv.bias) for conv in convs]))

    def count_open(self, is_open: Bools) -> list[int]:
        """The number of open channels of each layer, from which blocks are open (all blocks,)."""
        return np.add.reduceat(self._block_sizes * is_open, self._first_block).tolist()

    def open(self, gates_BE: Tensor, *, at_least_one: bool = True) -> list[OpenChannels]:
        """The open channels of each layer, from the gates (B, all blocks).

        With ``at_least_one``, a layer whose blocks are all closed gets its first block, with a gate of 0, since the
        operations after it may refuse maps without channels.
        """
        is_open: Bools = (gates_BE != 0).any(0).numpy()
        block_counts = np.add.reduceat(is_open, self._first_block, dtype=np.intp)
        if at_least_one and not block_counts.all():
            is_open[self._first_block[block_counts == 0]] = True
            block_counts = np.maximum(block_counts, 1)
        channel_open = is_open[self._block]
        counts: list[int] = np.add.reduceat(channel_open, self._first_channel, dtype=np.intp).tolist()
        blocks, channels = np.flatnonzero(is_open), np.flatnonzero(channel_open)
        local = channels - self._channel_start[channels]
        index = torch.from_numpy(np.stack([channels, self._block[channels], local, local * self._pieces[channels]]))
        pieces = split(torch.from_numpy(blocks - self._layer_start[blocks]), block_counts.tolist())
        gates_Bn = gates_BE.index_select(1, index[1])
        shifts = split((gates_Bn * self._bias.index_select(0, index[0]))[:, :, None, None], counts, 1)
        gates = split(gates_Bn[:, :, None, None], counts, 1)
        channels_of, filters = split(index[2], counts), split(index[3].unsqueeze(1), counts)
        return [
            OpenChannels(
                channels_of[layer],
                width,
                pieces[layer] if self._whole_blocks[layer] else None,
                filters[layer],
                gates[layer],
                shifts[layer],
            )
            for layer, width in enumerate(self.widths)
        ]


def open_conv(x: Tensor, conv: ChannelConv, ins: OpenChannels, outs: OpenChannels) -> Tensor:
    """(B, open outs, H', W'): activation(gate ⊙ (conv(x) + bias)) of a folded convolution, open channels only.

    ``x`` has all channels or is compact. Without gates in ``outs`` all of its channels are open.
    """
    rows, columns = (output_size(size, conv) for size in x.shape[2:])
    execution, _ = ConvCosts.of(conv, x.shape[0] * rows * columns).cheapest(len(ins), len(outs))
    y = gathered_conv(x, conv, ins, outs, execution)
    if outs.gates is None:
        assert conv.bias is not None
        y = y + conv.bias[:, None, None]
    else:
        assert outs.shift is not None
        y = torch.addcmul(outs.shift, y, outs.gates)
    return y.relu_() if conv.activation == "relu" else y


def group_samples(is_open: Bools, cost: Callable[[int, Bools], float]) -> list[list[int]]:
    """Samples that open the same blocks, where running them apart costs less than all at once; else one group.

    ``is_open`` is (B, blocks); ``cost(batch_size, is_open)`` estimates a run with these open blocks.
    """
    together = list(range(len(is_open)))
    by_pattern: dict[bytes, list[int]] = {}
    for sample, pattern in enumerate(np.packbits(is_open, axis=1)):
        by_pattern.setdefault(pattern.tobytes(), []).append(sample)
    if len(by_pattern) <= 1:
        return [together]
    limit, total = cost(len(is_open), np.asarray(is_open.any(0))), 0.0
    for samples in by_pattern.values():
        total += cost(len(samples), is_open[samples[0]])
        if total >= limit:
            return [together]
    return list(by_pattern.values())


def split(values: Tensor, counts: list[int], axis: int = 0) -> tuple[Tensor, ...]:
    """`torch.split`, typed."""
    return cast("tuple[Tensor, ...]", values.split(counts, axis))


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format of a map; contiguous unless it is channels_last."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def output_size(size: int, conv: ChannelConv) -> int:
    """Rows of the output for a map of ``size`` rows; likewise columns."""
    return (size + 2 * conv.padding - conv.weight.shape[2]) // conv.stride + 1


def gathered_conv(x: Tensor, conv: ChannelConv, ins: OpenChannels, outs: OpenChannels, execution: Execution) -> Tensor:
    """(B, open outs, H', W'): the convolution without bias, of a map with all channels or a compact one."""
    if not len(ins):
        return x.new_zeros(x.shape[0], len(outs), *(output_size(size, conv) for size in x.shape[2:]))
    if execution == "dense":
        return outs.select(F.conv2d(ins.scatter(x, memory_format(x)), conv.weight, None, conv.stride, conv.padding))
    x, weight = ins.select(x), _gathered_kernel(conv, ins, outs)
    if x.shape[0] == 1:
        return _one_image(x, weight.flatten(1), conv)
    return F.conv2d(x, weight, None, conv.stride, conv.padding)


def _one_image(x: Tensor, weight: Tensor, conv: ChannelConv) -> Tensor:
    """(1, outs, H', W') from a compact image and a gathered kernel (outs, ins · ks²)."""
    rows, columns = (output_size(size, conv) for size in x.shape[2:])
    ks, pixels = conv.weight.shape[2], rows * columns
    many_shapes = conv.block_in < LARGE_BLOCK
    if pixels <= FEW_PIXELS and (many_shapes or (2 * pixels <= FEW_PIXELS and weight.numel() >= MANY_WEIGHTS)):
        values = F.unfold(x, ks, padding=conv.padding, stride=conv.stride)[0]
        return _small_gemm(weight, values).view(1, -1, rows, columns)
    large = pixels > FEW_PIXELS and weight.shape[1] * pixels <= MAX_UNFOLDED
    if large and (many_shapes or (pixels >= MANY_PIXELS and weight.shape[1] >= 64)):
        return (weight @ _unfolded(x, conv, rows, columns)).view(1, -1, rows, columns)
    return F.conv2d(x, weight.view(len(weight), -1, ks, ks), None, conv.stride, conv.padding)


def _small_gemm(weight_OK: Tensor, values_KP: Tensor) -> Tensor:
    """(O, P) for few pixels. MKL is slow where pixels are the columns, and on one core with more than a few rows."""
    if values_KP.shape[1] > 8 and torch.get_num_threads() == 1:
        return weight_OK @ values_KP
    return (values_KP.T.contiguous() @ weight_OK.T).T


def _unfolded(x: Tensor, conv: ChannelConv, rows: int, columns: int) -> Tensor:
    """(C · ks², pixels): the kernel's window at each pixel; unlike `F.unfold` it copies in several threads."""
    ks, stride, padding = conv.weight.shape[2], conv.stride, conv.padding
    C = x.shape[1]
    padded = F.pad(x[0], (padding,) * 4).contiguous()
    H, W = padded.shape[1:]
    windows = padded.as_strided((C, ks, ks, rows, columns), (H * W, W, 1, W * stride, stride))
    return windows.reshape(C * ks * ks, rows * columns)


def _gathered_kernel(conv: ChannelConv, ins: OpenChannels, outs: OpenChannels) -> Tensor:
    """The kernel of the open channels, (open outs, open ins, ks, ks)."""
    weight = conv.weight
    C, ks = weight.shape[1:3]
    if len(ins) == ins.total:
        return weight if len(outs) == outs.total else weight.index_select(0, outs.index)
    per_filter = pieces_per_filter(conv)
    size = C // per_filter
    pieces = ins.pieces
    if pieces is None:
        pieces = ins.index if size == 1 else ins.index[::size] // size
    filters = (outs.index * per_filter).unsqueeze(1) if outs.filters is None else outs.filters
    # one list of (filter, piece) pairs, so that every weight is copied once
    pairs = (filters + pieces).view(-1)
    return weight.view(-1, size * ks * ks).index_select(0, pairs).view(len(outs), -1, ks, ks)
