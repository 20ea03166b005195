"""Gated convolutions with their open channels alone.

Without gradients and with fixed statistics BatchNorm and gate are one scale and one shift for a sample and channel,
behind a convolution of the open channels (`narrow_conv`).

A layer by itself looks at its gates when it runs, and cuts a batch into groups of samples that open the same channels,
or runs it as one group with every channel that any of its samples opens: whichever costs less. The layers of a network
can look at all gates before the first of them runs (`open_together`): the host looks once and not once a layer, and
the scales and shifts of all layers are a few operations. Then a layer can also hand on its open channels alone, as a
map that has no others. Who reads such a map knows from the gates which they are.

All of this is for CPUs. On a GPU nothing is left out, for a reason that was measured (VGG-16 of 32×32 images in
batches of 256, bfloat16, H200: ``benchmarks/results/channel-cuda.json``). The dense network takes 1.28 ms, at 126
TFLOP/s. With every sample's own blocks of 64 channels gathered, unfolded, sorted by pairs of blocks and multiplied in
one grouped product it takes 8 to 14 times as long: unfolding writes nine times the bytes of the map, which a dense
convolution never does, and the groups are small. What any sample of a batch opens is soon everything, so sharing a
pattern does not help either. Less than dense would take a kernel that gathers as it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.ops.channel.gated_conv import channel_gates, masked_dense, norm_as_scale_and_shift
from moesaic.ops.channel.narrow_conv import (
    PRICES,
    Channels,
    Way,
    cheapest_way,
    memory_format,
    narrow_conv,
    output_size,
    pieces_of_a_filter,
)
from moesaic.ops.dispatch import ChannelConv, Norm
from moesaic.routing_record import Routing

__all__ = [
    "BlockLayout",
    "Opened",
    "OpenedGates",
    "block_layout",
    "open_channels_alone",
    "open_together",
    "opened_of",
    "run_opened",
    "scale_and_shift_of",
    "split",
]

Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]


@dataclass(eq=False, slots=True)
class Opened:
    """The channels of a layer that any sample of the batch opens, and what becomes of them."""

    conv: ChannelConv
    channels: Channels
    scale: Tensor
    """(B, open channels, 1, 1): what BatchNorm and gate multiply the bare convolution with."""
    shift: Tensor
    """(B, open channels, 1, 1): and what they add."""
    hand_on: bool
    """Whether whoever reads the map takes one of these channels alone."""


@dataclass(frozen=True, eq=False)
class OpenedGates(Routing):
    """Gates of a layer that were looked at together with those of others."""

    opened: Opened | None = None

    @staticmethod
    def of(routing: Routing, opened: Opened) -> OpenedGates:
        gates = object.__new__(OpenedGates)  # what was checked once need not be again, a dozen times an image
        vars(gates).update({name: vars(routing)[name] for name in _ROUTING}, opened=opened)
        return gates

    def detach(self) -> Routing:
        return Routing(**{name: vars(self)[name] for name in _ROUTING}).detach()


_ROUTING = tuple(field.name for field in fields(Routing))


def opened_of(gates: Routing | None) -> Opened | None:
    """What is known of gates that were looked at together with others."""
    return gates.opened if isinstance(gates, OpenedGates) else None


def open_channels_alone(x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
    """The same numbers as the definition from the open channels alone, the cheapest way."""
    opened, before = opened_of(gate_out), opened_of(gate_in)
    if opened is not None:
        return run_opened(x, opened, before)
    return _by_itself(x if before is None else before.channels.put(x, memory_format(x)), gate_out, gate_in, conv)


def run_opened(x: Tensor, opened: Opened, before: Opened | None) -> Tensor:
    """A layer whose gates were looked at with those of others, on a map of all channels or of the open ones alone."""
    conv, outs = opened.conv, opened.channels
    C = conv.weight.shape[1]
    ins = Channels(torch.arange(C, device=x.device), C) if before is None else before.channels
    pixels = x.shape[0] * output_size(x.shape[2], conv) * output_size(x.shape[3], conv)
    way, _ = cheapest_way(conv, len(ins), len(outs), pixels)
    y = _run(x, conv, ins, outs, way, opened.scale, opened.shift)
    return y if opened.hand_on else outs.put(y, memory_format(x))


def open_together(
    convs: Sequence[ChannelConv],
    gates: Sequence[Routing],
    hand_on: Sequence[bool],
    scale_and_shift: tuple[Tensor, Tensor] | None = None,
) -> tuple[OpenedGates, ...]:
    """The gates of several layers, looked at once: each layer then runs the channels that any sample opens.

    ``hand_on`` says of each layer whether its map may be one of its open channels alone. Its readers must then be gated
    convolutions that get these gates as ``gate_in``, with nothing in between that counts channels. ``scale_and_shift``
    is `scale_and_shift_of` the convolutions, for those who keep it.

    >>> from moesaic.layers import ChannelMoE
    >>> from moesaic.routing import ChannelGate
    >>> first, second = ChannelMoE(3, 8, 3).eval(), ChannelMoE(8, 4, 3).eval()
    >>> gates = [ChannelGate(1, n).choose(torch.linspace(-1, 1, n)[None]) for n in (8, 4)]
    >>> with torch.no_grad():
    ...     opened = open_together([first.weights(), second.weights()], gates, [True, False])
    ...     y = first(torch.randn(1, 3, 5, 5), opened[0])
    ...     z = second(y, opened[1], opened[0])
    >>> y.shape, z.shape                                                       # four of eight channels are open
    (torch.Size([1, 4, 5, 5]), torch.Size([1, 4, 5, 5]))
    """
    if scale_and_shift is None:
        scale_and_shift = scale_and_shift_of(convs)
    layout = block_layout(convs)
    device = convs[0].weight.device
    chosen = torch.cat([routing.gate for routing in gates], 2)[:, 0]
    index = torch.cat([_index(routing) for routing in gates], 2)[:, 0]
    first = np.repeat(layout.first_block, [routing.gate.shape[2] for routing in gates])
    columns = index.cpu().numpy() + first
    columns[columns < first] = layout.nowhere  # UNASSIGNED
    is_open = np.zeros(layout.nowhere + 1, bool)
    is_open[columns] = True
    numbers, counts, blocks, block_counts = layout.opened(is_open)
    # in one go to the device: number and block among those of all layers, number in the layer, and filter
    local = numbers - layout.start[numbers]
    where = torch.from_numpy(np.stack([numbers, layout.block[numbers], local, local * layout.pieces[numbers]])).to(
        device
    )
    pieces = split(torch.from_numpy(blocks).to(device), block_counts)
    gates_BE = chosen.new_zeros(len(columns), layout.nowhere + 1)
    gates_BE.scatter_(1, torch.from_numpy(columns).to(device), chosen)
    gates_Bn = gates_BE.index_select(1, where[1])
    scale_n, shift_n = (values.index_select(0, where[0]) for values in scale_and_shift)
    scales, shifts = (split((gates_Bn * each)[:, :, None, None], counts, 1) for each in (scale_n, shift_n))
    locals_, filters = split(where[2], counts), split(where[3].unsqueeze(1), counts)
    opened: list[OpenedGates] = []
    for number, (conv, routing, alone) in enumerate(zip(convs, gates, hand_on, strict=True)):
        O = conv.weight.shape[0]
        whole = pieces[number] if O % conv.block_out == 0 else None
        channels = Channels(locals_[number], O, whole, filters[number])
        opened.append(OpenedGates.of(routing, Opened(conv, channels, scales[number], shifts[number], alone)))
    return tuple(opened)


def split(values: Tensor, counts: list[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Parts of so many values each."""
    return cast("tuple[Tensor, ...]", values.split(counts, axis))


@dataclass(frozen=True)
class BlockLayout:
    """The channels and blocks of several layers, numbered through."""

    first_block: Ints
    """Of each layer."""
    first_channel: Ints
    """Of each layer."""
    layer_start: Ints
    """Of each block, the first block of its layer."""
    block: Ints
    """Of each channel."""
    start: Ints
    """Of each channel, the first channel of its layer."""
    pieces: Ints
    """Of each channel, how many pieces its filter has."""
    nowhere: int
    """The number behind the last block."""

    def opened(self, is_open: Bools) -> tuple[Ints, list[int], Ints, list[int]]:
        """The channels of the open blocks and how many each layer has, the blocks' numbers and how many each layer has.

        A layer in which all are closed gets its first block, since what follows may refuse maps without channels. Its
        gate is 0.
        """
        blocks = is_open[: self.nowhere]
        block_counts = np.add.reduceat(blocks, self.first_block, dtype=np.intp)
        if not block_counts.all():
            blocks[self.first_block[block_counts == 0]] = True
            block_counts = np.maximum(block_counts, 1)
        channels = blocks[self.block]
        counts = np.add.reduceat(channels, self.first_channel, dtype=np.intp)
        some = np.flatnonzero(blocks)
        return np.flatnonzero(channels), counts.tolist(), some - self.layer_start[some], block_counts.tolist()


def block_layout(convs: Sequence[ChannelConv]) -> BlockLayout:
    """That of the channels of layers."""
    return _layout(tuple((conv.weight.shape[0], conv.block_out, pieces_of_a_filter(conv)) for conv in convs))


@lru_cache(maxsize=64)
def _layout(layers: tuple[tuple[int, int, int], ...]) -> BlockLayout:
    """Of layers with so many channels in blocks of that size, and filters of so many pieces."""
    widths, sizes, pieces = (np.array(column) for column in zip(*layers, strict=True))
    blocks = -(-widths // sizes)
    first_channel, first_block = np.cumsum(widths) - widths, np.cumsum(blocks) - blocks
    start = np.repeat(first_channel, widths)
    block = (np.arange(len(start)) - start) // np.repeat(sizes, widths) + np.repeat(first_block, widths)
    return BlockLayout(
        first_block=first_block,
        first_channel=first_channel,
        layer_start=np.repeat(first_block, blocks),
        block=block,
        start=start,
        pieces=np.repeat(pieces, widths),
        nowhere=int(blocks.sum()),
    )


def _run(x: Tensor, conv: ChannelConv, ins: Channels, outs: Channels, way: Way, scale: Tensor, shift: Tensor) -> Tensor:
    """(B, open outs, H', W') of a map with all channels or the open ones alone."""
    z = narrow_conv(x, conv, ins, outs, way)
    y = torch.addcmul(shift, z.to(scale.dtype), scale).to(x.dtype)
    return y.relu_() if conv.activation == "relu" else y


@dataclass(frozen=True)
class _Group:
    """Samples that run together, None for all, with the channels that any of them opens."""

    samples: Ints | None
    ins: Ints
    outs: Ints
    way: Way
    price: float


def _by_itself(x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
    """A layer that looks at its own gates."""
    (B, C), O = x.shape[:2], conv.weight.shape[0]
    rows, columns = (output_size(size, conv) for size in x.shape[2:])
    _, dense = cheapest_way(conv, C, O, B * rows * columns)
    if x.device.type != "cpu" or dense <= PRICES["cpu"].group:
        return masked_dense(x, gate_out, conv)  # or too little to be worth a look at the gates
    open_in = np.ones((B, C), bool) if gate_in is None else _open_channels(gate_in, C, conv.block_in)
    groups = _groups(conv, _open_channels(gate_out, O, conv.block_out), open_in, rows * columns)
    if len(groups) == 1 and groups[0].way == "dense":
        return masked_dense(x, gate_out, conv)
    scale_O, shift_O = scale_and_shift_of([conv])
    gates_BO = channel_gates(gate_out, O, conv.block_out)
    scale, shift = ((gates_BO * each)[:, :, None, None] for each in (scale_O, shift_O))
    y = torch.empty((B, O, rows, columns), dtype=x.dtype, device=x.device, memory_format=memory_format(x)).zero_()
    for group in groups:
        if not len(group.outs):
            continue
        ins, outs = (
            Channels(torch.from_numpy(some).to(x.device), total) for some, total in ((group.ins, C), (group.outs, O))
        )
        if group.samples is None:
            some = scale.index_select(1, outs.index), shift.index_select(1, outs.index)
            y.index_copy_(1, outs.index, _run(x, conv, ins, outs, group.way, *some))
        else:
            samples = torch.from_numpy(group.samples).to(x.device)
            picked = (each.index_select(0, samples).index_select(1, outs.index) for each in (scale, shift))
            part = _run(x.index_select(0, samples), conv, ins, outs, group.way, *picked)
            y[samples[:, None], outs.index] = part
    return y


def _groups(conv: ChannelConv, open_out: Bools, open_in: Bools, pixels: int) -> list[_Group]:
    """All samples at once, or those that open the same channels together: whichever is cheaper."""
    cost = PRICES["cpu"].group

    def group(samples: Ints | None, outs: Bools, ins: Bools) -> _Group:
        opened_in, opened_out = np.flatnonzero(ins), np.flatnonzero(outs)
        number = len(open_out) if samples is None else len(samples)
        way, price = cheapest_way(conv, len(opened_in), len(opened_out), number * pixels)
        return _Group(
            samples, opened_in, opened_out, way, price if way == "dense" and samples is None else price + cost
        )

    together = group(None, np.asarray(open_out.any(0)), np.asarray(open_in.any(0)))
    alike: dict[bytes, list[int]] = {}
    for b, (outs, ins) in enumerate(zip(open_out, open_in, strict=True)):
        alike.setdefault(outs.tobytes() + ins.tobytes(), []).append(b)
    if len(alike) <= 1 or len(alike) * cost > together.price:
        return [together]
    apart = [group(np.array(samples), open_out[samples[0]], open_in[samples[0]]) for samples in alike.values()]
    return apart if sum(each.price for each in apart) < together.price else [together]


def scale_and_shift_of(convs: Sequence[ChannelConv]) -> tuple[Tensor, Tensor]:
    """What bias and BatchNorm make of the bare convolution's result: scale · z + shift, for the channels of all."""
    wide = torch.promote_types(convs[0].weight.dtype, torch.float32)
    norms = [_norm_of(conv) for conv in convs]
    weight, bias, mean, var = (
        torch.cat(values).to(wide)
        for values in zip(
            *((norm.weight, norm.bias, norm.running_mean, norm.running_var) for norm in norms), strict=True
        )
    )
    added: Tensor | None = None
    if any(conv.bias is not None for conv in convs):
        biases = [
            torch.zeros_like(norm.bias) if conv.bias is None else conv.bias
            for conv, norm in zip(convs, norms, strict=True)
        ]
        added = torch.cat(biases).to(wide)
    eps: float | Tensor = norms[0].eps
    if len({norm.eps for norm in norms}) > 1:
        several = np.repeat([norm.eps for norm in norms], [len(norm.bias) for norm in norms])
        eps = torch.tensor(several, dtype=wide).to(var.device)
    return norm_as_scale_and_shift(weight, bias, mean, var, eps, added)


def _norm_of(conv: ChannelConv) -> Norm:
    """Its BatchNorm, or one that changes nothing."""
    if conv.norm is not None:
        return conv.norm
    zeros = conv.weight.new_zeros(conv.weight.shape[0])
    return Norm(zeros + 1, zeros, zeros, zeros + 1, momentum=0.0, eps=0.0, training=False)


def _open_channels(routing: Routing, channels: int, block: int) -> Bools:
    """(B, channels): which are open, on the host."""
    index = _index(routing)[:, 0].cpu().numpy()
    blocks = np.zeros((len(index), routing.experts + 1), bool)
    blocks[np.arange(len(index))[:, None], index] = True  # UNASSIGNED is the last column
    return np.repeat(blocks[:, :-1], block, 1)[:, :channels]


def _index(routing: Routing) -> Tensor:
    """(B, 1, K): the open blocks of each sample."""
    assert routing.index is not None
    return routing.index
