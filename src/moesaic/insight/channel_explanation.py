"""What a network with gated channels does with a set of images, as plain numbers that JSON takes.

`explain` puts it beside what it tells of layers that route patches or samples: for each gated layer which
channels are dead, always on and dynamic, and how their gates differ between classes; and for the
network as a whole what its embedding holds and what each image costs. `report.write_explanation`
draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from moesaic.insight.channel_metrics import (
    ChannelUsage,
    GateDistances,
    SpecificGate,
    channel_usage,
    class_shares,
    gate_distances,
    specific_gates,
)
from moesaic.insight.embedding_map import EmbeddingMap, embedding_map
from moesaic.insight.image_cost import Costs, image_costs
from moesaic.routing_record import Routing

__all__ = ["ChannelExplanation", "ChannelLayer", "Gated", "GatedNetwork", "explain_channels"]


@runtime_checkable
class GatedNetwork(Protocol):
    """A network that tells its embedding and its costs, as `moesaic.models.deepmoe.network.DeepMoE` does."""

    dense_macs: int
    fixed_macs: int

    def forward_with_routing(self, x: Tensor) -> Any:
        """With ``logits``, ``embedding`` and ``routing``."""
        ...

    def macs(self, routing: Mapping[str, Routing]) -> Tensor:
        """(B,): the multiply-adds of each image."""
        ...


@dataclass(frozen=True, eq=False)
class Gated:
    """What a `GatedNetwork` tells of images, beside its answers; on the CPU."""

    embedding: Tensor
    """(B, D)"""
    macs: Tensor
    """(B,)"""
    dense_macs: int
    fixed_macs: int


@dataclass(frozen=True)
class ChannelLayer:
    """What the gates of one layer did."""

    name: str
    block: int
    """Channels that share a gate."""
    usage: ChannelUsage
    share: tuple[tuple[float, ...], ...]
    """(K, E): for which share of a class's images a gate is open."""
    distances: GateDistances


@dataclass(frozen=True)
class ChannelExplanation:
    """What all gates of a network did; made by `explain_channels`."""

    layers: tuple[ChannelLayer, ...]
    """In the order in which they are in the network."""
    distances: GateDistances
    """Over the gates of all layers."""
    specific: tuple[SpecificGate, ...]
    """The gates most specific to a class, of all layers."""
    map: EmbeddingMap | None
    """None: the network tells no embedding."""
    costs: Costs | None
    """None: the network tells no costs."""

    @property
    def gates(self) -> int:
        return sum(layer.usage.gates for layer in self.layers)

    @property
    def dead(self) -> int:
        """How many gates are open for no image."""
        return sum(len(layer.usage.dead) for layer in self.layers)

    @property
    def always_on(self) -> int:
        """How many gates are open for every image."""
        return sum(len(layer.usage.always_on) for layer in self.layers)

    @property
    def dynamic(self) -> int:
        """How many gates are open for some images."""
        return sum(len(layer.usage.dynamic) for layer in self.layers)

    @property
    def open_share(self) -> float:
        """The share of all gates that an image opens, mean over images."""
        return sum(layer.usage.gates * layer.usage.open_share for layer in self.layers) / self.gates


def explain_channels(
    routing: Mapping[str, Routing],
    blocks: Mapping[str, int],
    gated: Gated | None,
    *,
    classes: Tensor,
    class_names: Sequence[str],
    probabilities: Tensor,
    right: Tensor | None = None,
    show: int = 10,
    seed: int = 0,
) -> ChannelExplanation:
    """Explain the gates of layers, by their names; ``blocks`` tells how many channels share a gate of each.

    ``classes`` (B,) are the images' classes, true or predicted, ``probabilities`` (B, K) the network's answers, and
    ``right`` (B,) whether these are right, where that is known.

    >>> import torch
    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> routing = ChannelGate(1, channels=2).choose(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    >>> found = explain_channels(
    ...     {"conv1": routing}, {}, None, classes=torch.tensor([0, 1]), class_names=["cat", "dog"],
    ...     probabilities=torch.eye(2))
    >>> found.dynamic, found.always_on, found.distances.between
    (1, 1, 0.5)
    """
    K = len(class_names)
    costs = None
    if gated is not None:
        costs = image_costs(
            gated.macs,
            dense_macs=gated.dense_macs,
            fixed_macs=gated.fixed_macs,
            classes=classes,
            class_names=class_names,
            probabilities=probabilities,
            right=right,
            show=show,
        )
    return ChannelExplanation(
        layers=tuple(
            ChannelLayer(
                name,
                blocks.get(name, 1),
                channel_usage(each),
                _rounded(class_shares(each, classes, K)),
                gate_distances(each, classes, K, seed=seed),
            )
            for name, each in routing.items()
        ),
        distances=gate_distances(routing, classes, K, seed=seed),
        specific=specific_gates(routing, classes, K, seed=seed),
        map=None if gated is None else embedding_map(gated.embedding, classes, seed=seed),
        costs=costs,
    )


def _rounded(values: Tensor) -> tuple[tuple[float, ...], ...]:
    rows = cast("list[list[float]]", values.tolist())
    return tuple(tuple(round(value, 4) for value in row) for row in rows)
