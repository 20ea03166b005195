"""Gated convolutions inside somebody else's network, which calls them with a map and knows of no gates.

The gates of the batch that is running lie in one `ActiveGates`, which the network's layers share: `DeepMoE` puts them
there before it calls the network and takes them away behind it. So the network's own ``forward`` stays as it was
written, modes of training and evaluation included, which a traced copy of it would have fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.layers import ChannelMoE
from moesaic.ops.dispatch import ChannelConv, run_channels
from moesaic.routing_record import Routing

__all__ = ["ActiveGates", "ConsumerConv", "GatedConv", "conv_refusal", "norm_refusal"]


class ActiveGates:
    """The gates of the batch that is running, by the name of the layer whose channels they gate."""

    def __init__(self) -> None:
        self.routing: Mapping[str, Routing] | None = None

    def of(self, name: str) -> Routing:
        if self.routing is None:
            raise RuntimeError(
                f"DeepMoE: {name} has no gates, since its network runs by itself; call the DeepMoE that it is part of"
            )
        return self.routing[name]


class GatedConv(ChannelMoE):
    """A `ChannelMoE` that finds its gates by itself; it takes over a convolution and its BatchNorm.

    Args:
        conv: the convolution.
        norm: the BatchNorm right behind it, if there is one.
        running: where the gates are while a batch runs.
        name: under which its own gates are there.
        source: under which those of the map's channels are there; None where they have none.
        block: how many neighbouring channels share a gate.
        block_in: the same of the map's channels.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        norm: nn.BatchNorm2d | None,
        running: ActiveGates,
        name: str,
        *,
        source: str | None = None,
        block: int = 1,
        block_in: int = 1,
    ) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[0],
            stride=conv.stride[0],
            padding=cast("tuple[int, int]", conv.padding)[0],
            norm=norm is not None,
            activation="identity",  # whatever follows in the network follows still
            block=block,
            block_in=block_in,
            bias=conv.bias is not None,
            device="meta",
        )
        self.conv = conv
        self.norm = norm
        self.source = source
        self._name = name
        self._running = running
        self.train(conv.training)

    def gates(self) -> tuple[Routing, Routing | None]:
        """Those of its channels and of the map's, while a batch runs."""
        return self._running.of(self._name), None if self.source is None else self._running.of(self.source)

    def forward(self, x: Tensor, gate_out: Routing | None = None, gate_in: Routing | None = None) -> Tensor:
        if gate_out is None:
            gate_out, gate_in = self.gates()
        return super().forward(x, gate_out, gate_in)


class ConsumerConv(nn.Conv2d):
    """A convolution without gates of its own that reads gated channels; without gradients it leaves out closed ones.

    It takes over the weights of ``conv``. ``source`` is the name under which the gates of the map's channels are.
    """

    def __init__(self, conv: nn.Conv2d, running: ActiveGates, source: str, *, block_in: int = 1) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            cast("tuple[int, int]", conv.kernel_size),
            cast("tuple[int, int]", conv.stride),
            cast("tuple[int, int]", conv.padding),
            bias=conv.bias is not None,
            device="meta",
        )
        self.weight = conv.weight
        self.bias = conv.bias
        self.source = source
        self.block_in = block_in
        self._running = running
        self.train(conv.training)

    def gate_in(self) -> Routing:
        """The gates of the map's channels, while a batch runs."""
        return self._running.of(self.source)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        padding = cast("tuple[int, int]", self.padding)[0]
        conv = ChannelConv(
            self.weight, self.bias, None, self.stride[0], padding, "identity", self.out_channels, self.block_in
        )
        return run_channels(input, _one_open_block(input), self.gate_in(), conv)


def _one_open_block(x: Tensor) -> Routing:
    gate = torch.ones(x.shape[0], 1, 1, device=x.device)
    return Routing("channel", gate, torch.zeros_like(gate, dtype=torch.long), gate, chooser="unit", may_drop=False)


def conv_refusal(conv: nn.Conv2d) -> str | None:
    """Why a convolution's channels cannot be left out, as the end of a sentence that begins with its name, or None.

    >>> conv_refusal(nn.Conv2d(3, 8, (1, 3)))
    'has kernel_size=(1, 3), which is not square'
    """
    if conv.groups > 1:
        return f"is grouped (groups={conv.groups})"
    for name in ("kernel_size", "stride", "padding"):
        sides = getattr(conv, name)
        if isinstance(sides, str):
            return f"has {name}={sides!r}; it must be a number"
        if sides[0] != sides[1]:
            return f"has {name}={sides}, which is not square"
    if conv.dilation != (1, 1):
        return f"has dilation={conv.dilation}; it must be 1"
    if conv.padding_mode != "zeros":
        return f"has padding_mode={conv.padding_mode!r}; it must be 'zeros'"
    return None


def norm_refusal(norm: nn.BatchNorm2d) -> str | None:
    """Why a BatchNorm cannot be taken into a gated layer, as the end of a sentence, or None."""
    if not norm.affine or not norm.track_running_stats:
        return "has a BatchNorm without weights or running statistics"
    return "has a BatchNorm with momentum=None, which averages over all batches" if norm.momentum is None else None
