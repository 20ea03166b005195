"""Cost model of gated convolutions on a CPU: gathering the open channels against computing all of them.

A convolution of the open channels needs active_in × active_out of its weights. To use only these, they have to be
copied out of the full kernel; on small maps a copy costs as much as the arithmetic that it saves. The unit costs are
measured by ``benchmarks/channel.py --costs``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from moesaic.ops.dispatch import ChannelConv

__all__ = ["CPU_COSTS", "ConvCosts", "Execution", "UnitCosts", "pieces_per_filter"]

Execution = Literal["dense", "gathered"]
"""``"dense"``: compute all channels and select the open ones; ``"gathered"``: copy the open weights, compute these."""


@dataclass(frozen=True)
class UnitCosts:
    """Nanoseconds on one core."""

    mac: float
    """A multiply-add of a large convolution."""
    read: float
    """A weight that is read; on small maps this, not arithmetic, dominates."""
    copy: float
    """A weight that is copied into a gathered kernel."""
    piece: float
    """A contiguous piece of weights that is copied, on top of its weights."""
    column: float
    """A weight that is copied on its own."""
    call: float
    """Fixed overhead of a gathered convolution."""


# For 3×3 kernels of 64 to 512 channels on maps of 2×2 to 32×32 in float32, with other layers' weights in the caches, as
# inside a network. A copied weight is read again, so `copy` includes that.
CPU_COSTS = UnitCosts(mac=0.029, read=0.63, copy=0.8, piece=12.0, column=3.0, call=3e4)


def pieces_per_filter(conv: ChannelConv) -> int:
    """The number of contiguous pieces in which a filter is copied: channels that share a gate are one piece."""
    C = conv.weight.shape[1]
    return C // math.gcd(C, conv.block_in)


@dataclass(frozen=True, slots=True)
class ConvCosts:
    """Costs of a convolution for a fixed number of output pixels, as a function of its open channels."""

    ins: int
    outs: int
    dense: float
    """All channels."""
    pair: float
    """Per pair of open input and output channel, the copy of its weights included."""
    piece: float
    """Copying pieces, per pair of open input and output channel."""
    filter: float
    """Copying a whole filter, per open output channel."""
    call: float

    @staticmethod
    def of(conv: ChannelConv, pixels: int) -> ConvCosts:
        O, C, ks, _ = conv.weight.shape
        unit, cores, taps = CPU_COSTS, torch.get_num_threads(), ks * ks
        weight = max(pixels * unit.mac, unit.read)
        return ConvCosts(
            ins=C,
            outs=O,
            dense=O * C * taps * weight / cores,
            pair=taps * (weight + unit.copy) / cores,
            piece=unit.piece / cores * pieces_per_filter(conv) / C,
            filter=unit.piece / cores,
            call=unit.call,
        )

    def cheapest(self, ins: int, outs: int) -> tuple[Execution, float]:
        """The cheaper execution for this number of open channels, and its cost in nanoseconds."""
        if ins == self.ins and outs == self.outs:
            return "dense", self.dense
        dense = self.dense + self.call  # scatter the input to all channels, select open channels of the output
        gathered = outs * (ins * self.pair + (self.filter if ins == self.ins else ins * self.piece)) + self.call
        return ("gathered", gathered) if gathered < dense else ("dense", dense)
