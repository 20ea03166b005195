"""The gated layers of a network, run together.

All gates of a DeepMoE are known before its first convolution runs. So the host looks at them once, each layer hands on
its open channels alone, and a batch on a CPU is cut into samples that open the same channels wherever that costs less
than to run every channel that any sample opens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.layers.channel_chain import Chain
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.ops import TorchBackend, autocast_dtype, select_backend
from moesaic.ops.channel.gated_conv import may_skip
from moesaic.ops.channel.narrow_conv import PRICES, cheapest_way
from moesaic.ops.channel.open_channels import open_together, scale_and_shift_of
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.weight_cache import CachedValue, TensorRefs
from moesaic.routing.channel_heads import JointGates
from moesaic.routing_record import Routing

__all__ = ["GatedLayers"]

Gates = Mapping[str, Routing]


class GatedLayers:
    """The gated layers of a network in the order in which they run, by name.

    What BatchNorm makes of their channels is kept until their weights change, see `moesaic.ops.weight_cache`.

    Args:
        layers: the layers.
        sources: of each layer, the one whose channels it reads; None where it reads something else.
        hand_on: layers whose maps may have their open channels alone: all who read them have them as their source, and
            nothing in between counts channels.
        pixels: of each layer's result for one sample. With them a batch may be cut into groups.
        network: what holds the layers under their names. If it is one chain of layers, one image at a time takes the
            short way through it (`moesaic.layers.channel_chain`).

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> first, second = ChannelMoE(3, 8, 3).eval(), ChannelMoE(8, 4, 3).eval()
    >>> layers = GatedLayers({"a": first, "b": second}, {"a": None, "b": "a"}, hand_on=["a"], pixels={"a": 36, "b": 36})
    >>> def network(x, gates):
    ...     return second(first(x, gates["a"]).relu(), gates["b"], gates["a"]).mean((2, 3))
    >>> gates = {"a": ChannelGate(2, 8)(torch.randn(5, 2)), "b": ChannelGate(2, 4)(torch.randn(5, 2))}
    >>> with torch.no_grad():
    ...     layers.run(network, torch.randn(5, 3, 6, 6), gates).shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        layers: Mapping[str, ChannelMoE],
        sources: Mapping[str, str | None],
        *,
        hand_on: Collection[str] = (),
        pixels: Mapping[str, int] | None = None,
        network: nn.Module | None = None,
    ) -> None:
        self.layers = dict(layers)
        self.sources = dict(sources)
        self.hand_on = frozenset(hand_on)
        self.pixels = None if pixels is None else dict(pixels)
        self.chain = None if network is None else Chain.of(network, self.layers, self.sources, self.hand_on)
        """The short way, if there is one."""
        self._scale_and_shift = CachedValue[tuple[Tensor, Tensor]]()
        # torch does not count how often BatchNorm changes its statistics, but BatchNorm does, in a buffer. Where there
        # is none, the weights tell dtype and device.
        self._held = TensorRefs(
            module
            for layer in self.layers.values()
            for module in (layer.norm, layer.conv if _decides(layer) else None)
            if module
        )

    def run(self, network: Callable[[Tensor, Gates], Tensor], x: Tensor, gates: Gates) -> Tensor:
        """``network(x, gates)``, with closed channels left out wherever they may be.

        The network gives every layer the gates under its name, and as ``gate_in`` those under its source's. It makes
        one row for each sample. Where closed channels may not be left out (in training, with gradients, under
        autocast, on another backend), it is called as it is.
        """
        if not len(x) or not self.may_leave_out(x):
            return network(x, gates)
        if self.chain is not None and isinstance(gates, JointGates):
            products = self.chain.ready(x)
            if products is not None:
                with torch.inference_mode():  # where operations take a tenth less time
                    y = self.chain.run(x, gates.opened(), products)
                return y.clone()  # a tensor like any other
        convs = [layer.weights() for layer in self.layers.values()]
        if not may_skip(x, _learned(gates), convs):
            return network(x, gates)
        if x.device.type != "cpu":
            return network(x, gates)  # `moesaic.ops.channel.open_channels` says why

        def run(x: Tensor, gates: Gates) -> Tensor:
            return network(x, self._opened(convs, gates))

        groups = self._groups(x, convs, gates)
        if len(groups) < 2:
            return run(x, gates)
        y = torch.cat([run(x[some], {name: _some(gates[name], some) for name in gates}) for some in groups])
        order = torch.tensor([sample for some in groups for sample in some])
        return torch.empty_like(y).index_copy_(0, order, y)

    def may_leave_out(self, x: Tensor) -> bool:
        """Whether autocast is off and the backend is one that leaves out channels."""
        return autocast_dtype(x) is None and isinstance(select_backend(x, _ANY), TorchBackend)

    def _opened(self, convs: Sequence[ChannelConv], gates: Gates) -> dict[str, Routing]:
        hand_on = [name in self.hand_on for name in self.layers]
        opened = open_together(convs, [gates[name] for name in self.layers], hand_on, self._kept(convs))
        return {**gates, **dict(zip(self.layers, opened, strict=True))}

    def _kept(self, convs: Sequence[ChannelConv]) -> tuple[Tensor, Tensor]:
        return self._scale_and_shift.of(self._held.now(), lambda: scale_and_shift_of(convs))

    def _groups(self, x: Tensor, convs: Sequence[ChannelConv], gates: Gates) -> list[list[int]]:
        """Samples that open the same channels, if they had better run apart; else none."""
        # who observes a layer is told of a batch, not of its parts
        if len(x) == 1 or self.pixels is None or any(map(_observed, self.layers.values())):
            return []
        is_open = {name: gates[name].mask[:, 0].numpy() for name in self.layers}
        alike: dict[bytes, list[int]] = {}
        for sample, pattern in enumerate(np.packbits(np.concatenate(list(is_open.values()), 1), axis=1)):
            alike.setdefault(pattern.tobytes(), []).append(sample)
        if len(alike) == 1:
            return []

        def price(samples: list[int]) -> float:
            total, opened = 0.0, dict[str | None, int]()
            for (name, blocks), conv in zip(is_open.items(), convs, strict=True):
                opened[name] = int(_sizes(conv)[blocks[samples].any(0)].sum())
                ins = opened.get(self.sources[name], conv.weight.shape[1])
                pixels = len(samples) * (self.pixels or {})[name]
                total += cheapest_way(conv, ins, opened[name], pixels)[1] + PRICES["cpu"].call
            return total

        together, apart = price(list(range(len(x)))), 0.0
        for samples in alike.values():
            apart += price(samples)
            if apart >= together:
                return []
        return list(alike.values())


_ANY = Routing("channel", torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1, 1), "unit")


def _decides(layer: ChannelMoE) -> bool:
    """Whether its convolution has a say in what becomes of its result."""
    return layer.norm is None or layer.bias


def _learned(gates: Gates) -> list[Tensor]:
    return [gates.scores] if isinstance(gates, JointGates) else [routing.gate for routing in gates.values()]


def _observed(layer: ChannelMoE) -> bool:
    return bool(layer._routing_hooks)  # pyright: ignore[reportPrivateUsage]


def _sizes(conv: ChannelConv) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """How many channels each of its blocks has."""
    O, block = conv.weight.shape[0], conv.block_out
    starts = np.arange(0, O, block)
    return np.minimum(O - starts, block)


def _some(routing: Routing, samples: list[int]) -> Routing:
    assert routing.index is not None
    return replace(routing, scores=routing.scores[samples], index=routing.index[samples], gate=routing.gate[samples])
