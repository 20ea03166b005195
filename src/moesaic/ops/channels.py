"""Convolutions whose channels are gated: as masks over the dense result, and with the open channels alone.

    y = g ⊙ activation(BatchNorm(conv(x)))

The gate comes after BatchNorm, whose shift would open a closed channel again; as g ≥ 0 it may stand
on either side of ReLU. Masked, that is the dense convolution. Without gradients and with fixed
statistics BatchNorm and gate are one scale and one shift for a sample and channel, and a convolution
needs only the rows of its weights that are open on the outside and the columns that are open on the
inside: active_in × active_out of them. Three ways to run it:

    dense     the library's convolution over everything, then scale and shift
    gathered  copy the open rows and columns into a narrow kernel, and run the library's convolution
    in place  one GEMM for each pair of runs of open channels, on slices of the weights as they lie

A batch is cut into groups of samples that open the same channels, or runs as one group with every
channel that any of its samples opens. What is done is what costs least by the prices below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ChannelConv
from moesaic.record import Routing

__all__ = [
    "channel_gates",
    "channel_macs",
    "check_closed",
    "masked_dense",
    "may_skip",
    "open_channels",
    "open_channels_alone",
]

Bools = NDArray[np.bool_]
Range = tuple[int, int]


@dataclass(frozen=True)
class Prices:
    """Nanoseconds on one core; a price of a device that is no CPU stands for the whole device."""

    mac: float
    """A multiply-add inside a convolution that has enough of them."""
    read: float
    """A weight that a convolution reads; on small maps this, and not arithmetic, is what a layer costs."""
    copy: float
    """A weight that is gathered into a narrow kernel."""
    slice_mac: float
    """A multiply-add inside a GEMM on slices of the weights."""
    slice_read: float
    """A weight that such a GEMM reads."""
    unfold: float
    """A value laid out for a GEMM."""
    call: float
    """A GEMM on a slice."""
    group: float
    """What skipping costs a group of samples besides: index lists, calls, writing its channels into the result."""


# Measured with 3×3 kernels of 64 to 512 channels on maps of 2×2 to 32×32 in float32, torch 2.13, with other
# layers' weights in the caches, as inside a network. Those of CUDA are rough: there every group waits for
# launches, which leaves little to skip unless convolutions are large.
PRICES = {
    "cpu": Prices(mac=0.025, read=0.55, copy=3.0, slice_mac=0.04, slice_read=1.6, unfold=3.0, call=1.5e4, group=3e5),
    "cuda": Prices(mac=4e-5, read=2e-3, copy=5e-3, slice_mac=4e-5, slice_read=5e-3, unfold=2e-2, call=1e4, group=2e5),
}


def channel_macs(
    active_in: int | Tensor, active_out: int | Tensor, kernel_size: int, map_size: tuple[int, int]
) -> int | Tensor:
    """Multiply-adds of a gated convolution for a sample: active_in × active_out × ks² × the pixels of its result.

    Counts may be tensors (B,), one for each sample.

    >>> channel_macs(32, 16, 3, (8, 8))
    294912
    """
    return active_in * active_out * (kernel_size**2 * map_size[0] * map_size[1])


def channel_gates(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): the gate of every channel, 0 where it is closed."""
    return _over_channels(routing.weights[:, 0], channels, block)


def open_channels(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): whether a channel is open."""
    return _over_channels(routing.mask[:, 0], channels, block)


def masked_dense(x: Tensor, gate_out: Routing, conv: ChannelConv) -> Tensor:
    """The definition: everything is computed, and the gates close what they close."""
    y = F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)
    if conv.norm is not None:
        norm = conv.norm
        y = F.batch_norm(
            y,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            training=norm.training,
            momentum=norm.momentum,
            eps=norm.eps,
        )
    y = y * channel_gates(gate_out, y.shape[1], conv.block_out).to(y.dtype)[:, :, None, None]
    return F.relu(y) if conv.activation == "relu" else y


def check_closed(x: Tensor, gate_in: Routing, conv: ChannelConv) -> None:
    """Refuse a map that is not zero where the gates of its channels are closed: whoever skips them would err."""
    if x.is_meta or torch.compiler.is_compiling():
        return
    there = (x.detach() != 0).flatten(2).any(2)
    wrong = there & ~open_channels(gate_in, x.shape[1], conv.block_in)
    if wrong.any():
        sample, channel = (int(place) for place in wrong.nonzero()[0])
        raise ValueError(
            f"ChannelMoE: channel {channel} of sample {sample} is not zero, but gate_in says that it is closed; "
            "give the gates of the layer that made this map, or gate_in=None where something was added to it"
        )


def may_skip(x: Tensor, gate_out: Routing, conv: ChannelConv) -> bool:
    """Whether closed channels may be left out: nobody learns from them, and the host can read the gates."""
    if x.is_meta or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return False
    if conv.norm is not None and conv.norm.training:
        return False
    learned = [x, conv.weight, gate_out.gate, *([] if conv.bias is None else [conv.bias])]
    learned += [] if conv.norm is None else [conv.norm.weight, conv.norm.bias]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned))


def open_channels_alone(x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
    """The same numbers from the open channels alone, the cheapest way."""
    job = _Job.of(x, gate_out, conv)
    if job.dense_price() <= job.prices.group:
        return masked_dense(x, gate_out, conv)  # too little to be worth a look at the gates
    # an ungated map is one open block
    open_in = np.ones((x.shape[0], 1), bool) if gate_in is None else _open_blocks(gate_in)
    groups = job.plan(_open_blocks(gate_out), open_in)
    if len(groups) == 1 and groups[0].way == "dense":
        return masked_dense(x, gate_out, conv)
    memory_format = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    y = torch.zeros(job.shape, dtype=x.dtype, device=x.device).contiguous(memory_format=memory_format)
    for group in groups:
        if group.way == "closed":
            continue
        part, outs = job.run(group), job.index(group.outs)
        if group.samples is None:
            y.index_copy_(1, outs, part)
        elif len(group.samples) == 1:
            y[group.samples[0]].index_copy_(0, outs, part[0])
        else:
            y[job.index(group.samples)[:, None], outs] = part
    return y


@dataclass(frozen=True)
class _Group:
    """Samples that run together, None for all, with the channels that any of them opens."""

    samples: NDArray[np.intp] | None
    ins: NDArray[np.intp]
    outs: NDArray[np.intp]
    way: Literal["closed", "dense", "gathered", "in place"]
    price: float


@dataclass(frozen=True)
class _Job:
    """One layer on one batch."""

    x: Tensor
    gate_out: Routing
    conv: ChannelConv
    shape: tuple[int, int, int, int]
    prices: Prices

    @staticmethod
    def of(x: Tensor, gate_out: Routing, conv: ChannelConv) -> _Job:
        (B, _, H, W), (O, _, ks, _) = x.shape, conv.weight.shape
        rows, columns = ((size + 2 * conv.padding - ks) // conv.stride + 1 for size in (H, W))
        return _Job(x, gate_out, conv, (B, O, rows, columns), PRICES.get(x.device.type, PRICES["cuda"]))

    @cached_property
    def scale_and_shift_BO(self) -> tuple[Tensor, Tensor]:
        return _scale_and_shift(channel_gates(self.gate_out, self.shape[1], self.conv.block_out), self.conv)

    def index(self, channels: NDArray[np.intp]) -> Tensor:
        return torch.from_numpy(channels).to(self.x.device)

    def plan(self, open_out: Bools, open_in: Bools) -> list[_Group]:
        """All samples at once, or those that open the same blocks together: whichever is cheaper."""
        if len(open_out) == 1:
            return [self.group(None, open_out[0], open_in[0])]
        together = self.group(None, np.asarray(open_out.any(0)), np.asarray(open_in.any(0)))
        alike: dict[bytes, list[int]] = {}
        for b, (outs, ins) in enumerate(zip(open_out, open_in, strict=True)):
            alike.setdefault(outs.tobytes() + ins.tobytes(), []).append(b)
        if len(alike) == 1 or len(alike) * self.prices.group > together.price:
            return [together]
        apart = [self.group(np.array(samples), open_out[samples[0]], open_in[samples[0]]) for samples in alike.values()]
        return apart if sum(group.price for group in apart) < together.price else [together]

    def group(self, samples: NDArray[np.intp] | None, out_blocks: Bools, in_blocks: Bools) -> _Group:
        """The cheapest way to run samples that open these blocks."""
        O, C, ks, _ = self.conv.weight.shape
        outs = _channels(out_blocks, self.conv.block_out, O)
        ins = _channels(in_blocks, self.conv.block_in if len(in_blocks) > 1 else C, C)
        pixels = self._pixels(samples)
        if not len(outs) or not pixels:
            return _Group(samples, ins, outs, "closed", 0.0)
        dense = _Group(samples, np.arange(C), np.arange(O), "dense", self.dense_price(samples))
        if len(ins) == C and len(outs) == O:
            return dense
        cost, weights = self.prices, len(ins) * len(outs) * ks * ks
        work = weights * (max(pixels * cost.mac, cost.read) + cost.copy)
        best = _Group(samples, ins, outs, "gathered", work / self._cores() + cost.group)
        if self._sliceable():
            work = weights * max(pixels * cost.slice_mac, cost.slice_read) + len(ins) * ks * ks * pixels * cost.unfold
            calls = _runs(in_blocks) * _runs(out_blocks) * cost.call
            price = work / self._cores() + calls + cost.group
            if price < best.price:
                best = _Group(samples, ins, outs, "in place", price)
        return best if best.price < dense.price else dense

    def dense_price(self, samples: NDArray[np.intp] | None = None) -> float:
        work = self.conv.weight.numel() * max(self._pixels(samples) * self.prices.mac, self.prices.read)
        price = work / self._cores()
        return price if samples is None else price + self.prices.group

    def run(self, group: _Group) -> Tensor:
        """(n, open channels, H', W') of the group's n samples."""
        x, (scale, shift) = self.x, self.scale_and_shift_BO
        if group.samples is not None:
            samples = self.index(group.samples)
            x, scale, shift = x.index_select(0, samples), scale.index_select(0, samples), shift.index_select(0, samples)
        if group.way != "dense":
            outs = self.index(group.outs)
            scale, shift = scale.index_select(1, outs), shift.index_select(1, outs)
            if len(group.ins) < x.shape[1]:
                x = x.index_select(1, self.index(group.ins))
        if not len(group.ins):
            z = x.new_zeros(x.shape[0], len(group.outs), *self.shape[2:])
        elif group.way == "in place":
            z = self._in_place(x, group)
        else:
            weight = self.conv.weight if group.way == "dense" else self._narrow(group)
            z = F.conv2d(x, weight, None, self.conv.stride, self.conv.padding)
        y = torch.addcmul(shift[:, :, None, None], z.to(scale.dtype), scale[:, :, None, None]).to(x.dtype)
        return y.relu_() if self.conv.activation == "relu" else y

    def _narrow(self, group: _Group) -> Tensor:
        """The kernel of the open channels: (open out, open in, ks, ks)."""
        weight = self.conv.weight
        O, C, ks, _ = weight.shape
        if not weight.is_contiguous():
            return weight.index_select(0, self.index(group.outs)).index_select(1, self.index(group.ins))
        # one list of pairs, so that nothing is copied twice
        pairs = self.index((group.outs[:, None] * C + group.ins).ravel())
        return weight.view(O * C, ks * ks).index_select(0, pairs).view(len(group.outs), len(group.ins), ks, ks)

    def _in_place(self, x: Tensor, group: _Group) -> Tensor:
        ks = self.conv.weight.shape[2]
        taps = ks * ks
        columns = F.unfold(x, ks, padding=self.conv.padding, stride=self.conv.stride)
        n, _, pixels = columns.shape
        columns = columns[0] if n == 1 else columns.movedim(1, 0).flatten(1)
        y, weight, row = columns.new_empty(len(group.outs), n * pixels), self.conv.weight.flatten(1), 0
        for out_from, out_to in _ranges(group.outs):
            part, column = y[row : row + out_to - out_from], 0
            for in_from, in_to in _ranges(group.ins):
                slice_ = weight[out_from:out_to, in_from * taps : in_to * taps]
                values = columns[column : column + slice_.shape[1]]
                # beta=0 does not even read what is there
                torch.addmm(part, slice_, values, beta=int(column > 0), out=part)
                column += slice_.shape[1]
            row += out_to - out_from
        return y.view(-1, n, pixels).movedim(1, 0).reshape(n, -1, *self.shape[2:])

    def _pixels(self, samples: NDArray[np.intp] | None) -> int:
        return (self.shape[0] if samples is None else len(samples)) * self.shape[2] * self.shape[3]

    def _cores(self) -> int:
        return torch.get_num_threads() if self.x.device.type == "cpu" else 1

    def _sliceable(self) -> bool:
        """Whether neighbouring channels lie together in the weights, and a GEMM takes them as they lie."""
        weight = self.conv.weight
        return weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype in (torch.float32, torch.float64)


def _scale_and_shift(gates_BO: Tensor, conv: ChannelConv) -> tuple[Tensor, Tensor]:
    """What bias, BatchNorm and gate make of the bare convolution's result: scale · z + shift, (B, O) each."""
    wide = torch.promote_types(conv.weight.dtype, torch.float32)
    gates_BO = gates_BO.to(wide)
    if conv.norm is None:
        return gates_BO, torch.zeros_like(gates_BO) if conv.bias is None else gates_BO * conv.bias.to(wide)
    norm = conv.norm
    scale_O = norm.weight.to(wide) * torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    mean_O = norm.running_mean.to(wide)
    if conv.bias is not None:
        mean_O = mean_O - conv.bias.to(wide)
    shift_O = torch.addcmul(norm.bias.to(wide), mean_O, scale_O, value=-1)
    return gates_BO * scale_O, gates_BO * shift_O


def _over_channels(values_BE: Tensor, channels: int, block: int) -> Tensor:
    return values_BE if block == 1 else values_BE.repeat_interleave(block, 1)[:, :channels]


def _channels(blocks: Bools, block: int, channels: int) -> NDArray[np.intp]:
    """The channels of the open blocks."""
    return np.flatnonzero(np.repeat(blocks, block)[:channels])


def _open_blocks(routing: Routing) -> Bools:
    """(B, E): which blocks are open, on the host."""
    assert routing.index is not None
    index = routing.index[:, 0].cpu().numpy()
    blocks = np.zeros((len(index), routing.experts + 1), bool)
    blocks[np.arange(len(index))[:, None], index] = True  # NOBODY is the last column
    return blocks[:, :-1]


def _runs(blocks: Bools) -> int:
    """How many runs of neighbours the open blocks form."""
    return int(blocks[0]) + int(np.count_nonzero(blocks[1:] & ~blocks[:-1]))


def _ranges(channels: NDArray[np.intp]) -> list[Range]:
    """Channels in rising order as ranges [from, to) of neighbours.

    >>> _ranges(np.array([0, 1, 2, 5, 6, 9]))
    [(0, 3), (5, 7), (9, 10)]
    """
    cuts = [0, *(np.flatnonzero(np.diff(channels) != 1) + 1).tolist(), len(channels)]
    return [(int(channels[first]), int(channels[last - 1]) + 1) for first, last in pairwise(cuts) if last > first]
