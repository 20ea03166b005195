"""A convolution of the channels that are open, and what it costs.

A convolution needs only the rows of its weights that are open on the outside and the columns that are open on the
inside: active_in × active_out of them. Two ways to run it:

    dense     the library's convolution over everything, of whose result the open channels are kept
    gathered  copy the open rows and columns into a narrow kernel, and run that

Neighbouring input channels of a filter lie together in memory, so channels that are gated in blocks are copied in
pieces of a block: weights are stored by block as they are, and no second copy of them is needed. For one image the
narrow kernel is a matrix that is multiplied with the unfolded map wherever a convolution would do worse: where
it spends its time on bringing many weights into an order of its own, on large maps of few channels, and for channels
gated one by one, since it prepares itself anew for every number of channels. Products on slices of the weights,
without copying, were never faster.

Which way is cheaper is told by prices that ``benchmarks/channel.py --prices`` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ChannelConv

__all__ = [
    "FEW_PIXELS",
    "MANY_WEIGHTS",
    "PRICES",
    "Channels",
    "Prices",
    "Rates",
    "Way",
    "cheapest_way",
    "memory_format",
    "narrow_conv",
    "narrow_image",
    "output_size",
    "pieces_of_a_filter",
]

Way = Literal["dense", "gathered"]

FEW_PIXELS = 16
"""Maps with so many pixels or fewer are small: there weights are what a product reads."""
MANY_WEIGHTS = 2**18
"""From so many weights on a convolution of very few pixels takes long to bring them into its order."""
MANY_PIXELS = 512
"""From so many pixels on a product is faster than a convolution of few channels."""
FEW_SHAPES = 16
"""Channels in blocks of so many or more make few shapes, for which convolutions are prepared soon."""
UNFOLDED = 2**23
"""An image whose unfolded map has more values than this runs as a convolution in any case."""


@dataclass(frozen=True)
class Prices:
    """Nanoseconds on one core."""

    mac: float
    """A multiply-add inside a convolution that has enough of them."""
    read: float
    """A weight that a convolution reads; on small maps this, and not arithmetic, is what a layer costs."""
    copy: float
    """A weight that is copied into a narrow kernel."""
    piece: float
    """A piece of neighbouring weights that is copied, on top of its weights."""
    column: float
    """A weight that is copied by itself."""
    call: float
    """What skipping costs a convolution besides, however small it is."""
    group: float
    """What it costs a layer by itself: its look at the gates, and its channels' way into a map of all channels."""


# For 3×3 kernels of 64 to 512 channels on maps of 2×2 to 32×32 in float32, with other layers' weights in the caches, as
# inside a network; a copy is read again, and costs there what it costs in all.
PRICES = {"cpu": Prices(mac=0.029, read=0.63, copy=0.8, piece=12.0, column=3.0, call=3e4, group=1e5)}


@dataclass(eq=False, slots=True)
class Channels:
    """Some channels of a map that has ``total`` of them.

    >>> x = torch.arange(3.0).view(1, 3, 1, 1)
    >>> some = Channels(torch.tensor([0, 2]), total=3)
    >>> some.take(x).flatten().tolist(), some.put(torch.ones(1, 2, 1, 1)).flatten().tolist()
    ([0.0, 2.0], [1.0, 0.0, 1.0])
    """

    index: Tensor
    """Their numbers in rising order, on the map's device."""
    total: int
    pieces: Tensor | None = None
    """The numbers of their pieces, where a filter that reads them lies in pieces of a block (`pieces_of_a_filter`)."""
    filters: Tensor | None = None
    """(…, 1): where the filters that make them begin, counted in pieces."""

    def __len__(self) -> int:
        return self.index.shape[0]

    @property
    def all(self) -> bool:
        return len(self) == self.total

    def take(self, x: Tensor) -> Tensor:
        """These channels of a map, which may have them alone already."""
        if x.shape[1] == self.index.shape[0]:
            return x
        return x.index_select(1, self.index).contiguous(memory_format=memory_format(x))

    def put(self, x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """A map of all channels with these in their places and zeros elsewhere, if it is not one already."""
        if x.shape[1] == self.total:
            return x.contiguous(memory_format=memory_format)
        shape = (x.shape[0], self.total, *x.shape[2:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format).zero_()
        return y.index_copy_(1, self.index, x)


def memory_format(x: Tensor) -> torch.memory_format:
    """That of a map; contiguous where it is in no other."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def output_size(size: int, conv: ChannelConv) -> int:
    """Rows of the result for a map of so many rows; likewise columns."""
    return (size + 2 * conv.padding - conv.weight.shape[2]) // conv.stride + 1


def pieces_of_a_filter(conv: ChannelConv) -> int:
    """In how many pieces a filter's weights are copied: neighbouring channels that share a gate are one."""
    C = conv.weight.shape[1]
    return C // math.gcd(C, conv.block_in)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a convolution costs for so many pixels of its result, by how many of its channels are open."""

    ins: int
    outs: int
    dense: float
    """Of all channels."""
    pair: float
    """Of a pair of open channels, with the copy of its weights."""
    piece: float
    """Of its pieces, for each open output and each open input."""
    filter: float
    """Of an open output whose filter is copied whole."""
    call: float

    @staticmethod
    def of(conv: ChannelConv, pixels: int) -> Rates:
        weight = conv.weight
        O, C, ks, _ = weight.shape
        prices, cores = PRICES["cpu"], torch.get_num_threads()
        each = max(pixels * prices.mac, prices.read)
        taps = ks * ks
        copied = prices.piece / cores * (1 if weight.is_contiguous() else taps)
        return Rates(
            ins=C,
            outs=O,
            dense=O * C * taps * each / cores,
            pair=taps * (each + prices.copy) / cores,
            piece=copied * pieces_of_a_filter(conv) / C,
            filter=copied,
            call=prices.call,
        )

    def way(self, ins: int, outs: int) -> tuple[Way, float]:
        """The cheaper way for so many open channels, and its price."""
        if ins == self.ins and outs == self.outs:
            return "dense", self.dense
        dense = self.dense + self.call  # the map gets its closed channels back, and the result loses them
        gathered = outs * (ins * self.pair + (self.filter if ins == self.ins else ins * self.piece)) + self.call
        return ("gathered", gathered) if gathered < dense else ("dense", dense)


def cheapest_way(conv: ChannelConv, ins: int, outs: int, pixels: int) -> tuple[Way, float]:
    """How to run a convolution of so many open channels for so many pixels of its result, and the price."""
    return Rates.of(conv, pixels).way(ins, outs)


def narrow_conv(x: Tensor, conv: ChannelConv, ins: Channels, outs: Channels, way: Way) -> Tensor:
    """(B, open outs, H', W'): the bare convolution, without bias, of a map with all channels or the open ones alone.

    Its memory format is what comes out.
    """
    if not len(ins):
        return x.new_zeros(x.shape[0], len(outs), *(output_size(size, conv) for size in x.shape[2:]))
    if way == "dense":
        return outs.take(F.conv2d(ins.put(x, memory_format(x)), conv.weight, None, conv.stride, conv.padding))
    x, weight = ins.take(x), _gathered(conv, ins, outs)
    if x.shape[0] == 1 and x.device.type == "cpu" and weight.is_contiguous():
        rows, columns = output_size(x.shape[2], conv), output_size(x.shape[3], conv)
        return narrow_image(x, weight.flatten(1), conv, rows, columns)
    return F.conv2d(x, weight, None, conv.stride, conv.padding)


def narrow_image(x: Tensor, weight: Tensor, conv: ChannelConv, rows: int, columns: int) -> Tensor:
    """(1, outs, rows, columns) of one image with open channels alone, the narrow kernel being (outs, ins · ks²)."""
    ks, pixels = conv.weight.shape[2], rows * columns
    many_shapes = conv.block_in < FEW_SHAPES
    if pixels <= FEW_PIXELS and (many_shapes or (2 * pixels <= FEW_PIXELS and weight.numel() >= MANY_WEIGHTS)):
        values = F.unfold(x, ks, padding=conv.padding, stride=conv.stride)[0]
        return _small_product(weight, values).view(1, -1, rows, columns)
    large = pixels > FEW_PIXELS and weight.shape[1] * pixels <= UNFOLDED
    if large and (many_shapes or (pixels >= MANY_PIXELS and weight.shape[1] >= 64)):
        return (weight @ _unfolded(x, conv, rows, columns)).view(1, -1, rows, columns)
    return F.conv2d(x, weight.view(len(weight), -1, ks, ks), None, conv.stride, conv.padding)


def _small_product(weight_OK: Tensor, values_KP: Tensor) -> Tensor:
    """(O, P) for few pixels. MKL is slow where they are the columns, and on one core where rows are more than a few."""
    if values_KP.shape[1] > 8 and torch.get_num_threads() == 1:
        return weight_OK @ values_KP
    return (values_KP.T.contiguous() @ weight_OK.T).T


def _unfolded(x: Tensor, conv: ChannelConv, rows: int, columns: int) -> Tensor:
    """(C · ks², pixels): what a kernel sees at each pixel, as a copy of windows that overlap, in several threads."""
    ks, stride, padding = conv.weight.shape[2], conv.stride, conv.padding
    C = x.shape[1]
    padded = F.pad(x[0], (padding,) * 4).contiguous()
    H, W = padded.shape[1:]
    windows = padded.as_strided((C, ks, ks, rows, columns), (H * W, W, 1, W * stride, stride))
    return windows.reshape(C * ks * ks, rows * columns)


def _gathered(conv: ChannelConv, ins: Channels, outs: Channels) -> Tensor:
    """The kernel of the open channels: (open outs, open ins, ks, ks), in the memory format of the weights."""
    weight = conv.weight
    C, ks = weight.shape[1:3]
    if ins.all:
        return weight if outs.all else weight.index_select(0, outs.index)
    in_all = pieces_of_a_filter(conv)
    size = C // in_all
    pieces = ins.pieces
    if pieces is None:
        pieces = ins.index if size == 1 else ins.index[::size] // size
    if weight.is_contiguous():
        filters = (outs.index * in_all).unsqueeze(1) if outs.filters is None else outs.filters
        # one list of pairs, so that nothing is copied twice
        pairs = (filters + pieces).view(-1)
        return weight.view(-1, size * ks * ks).index_select(0, pairs).view(len(outs), -1, ks, ks)
    if not weight.is_contiguous(memory_format=torch.channels_last):
        return weight.index_select(0, outs.index).index_select(1, ins.index)
    taps = torch.arange(ks * ks, device=weight.device)
    filters = ((outs.index * (ks * ks)).unsqueeze(1) + taps).view(-1)
    pairs = ((filters * in_all).unsqueeze(1) + pieces).view(-1)
    narrow = weight.permute(0, 2, 3, 1).reshape(-1, size).index_select(0, pairs)
    return narrow.view(len(outs), ks, ks, -1).permute(0, 3, 1, 2)
