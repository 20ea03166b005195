"""Explains the channel gates of a network over a set of images, as plain numbers for JSON.

For each gated layer: which channels are dead, always on or dynamic, and how gates differ between classes.
For the whole network: a map of its embeddings and the cost of each image. `explain` adds it to an
`Explanation`, `report.write_explanation` draws it.
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

__all__ = ["ChannelExplanation", "ChannelLayer", "GatedNetwork", "GatedOutputs", "explain_channels"]


@runtime_checkable
class GatedNetwork(Protocol):
    """A network with embeddings and costs per image, such as `moesaic.models.deepmoe.network.DeepMoE`."""

    dense_macs: int
    fixed_macs: int

    def forward_with_routing(self, x: Tensor) -> Any:
        """Returns an object with ``logits``, ``embedding`` and ``routing``."""
        ...

    def macs(self, routing: Mapping[str, Routing]) -> Tensor:
        """(B,): multiply-adds per image."""
        ...


@dataclass(frozen=True, eq=False)
class GatedOutputs:
    """Outputs of a `GatedNetwork` beside its logits, on the CPU."""

    embedding: Tensor
    """(B, D)"""
    macs: Tensor
    """(B,)"""
    dense_macs: int
    fixed_macs: int


@dataclass(frozen=True)
class ChannelLayer:
    """The gates of one layer."""

    name: str
    block: int
    """Channels per gate."""
    usage: ChannelUsage
    share: tuple[tuple[float, ...], ...]
    """(K, E): share of the images of a class for which the gate is open."""
    distances: GateDistances


@dataclass(frozen=True)
class ChannelExplanation:
    """All gates of a network; made by `explain_channels`."""

    layers: tuple[ChannelLayer, ...]
    """In the order of the network."""
    distances: GateDistances
    """Over the gates of all layers."""
    specific: tuple[SpecificGate, ...]
    """The gates of all layers that are most specific to a class."""
    map: EmbeddingMap | None
    """None if the network has no embedding."""
    costs: Costs | None
    """None if the network does not report costs."""

    @property
    def gates(self) -> int:
        return sum(layer.usage.gates for layer in self.layers)

    @property
    def dead(self) -> int:
        """Number of gates that are open for no image."""
        return sum(len(layer.usage.dead) for layer in self.layers)

    @property
    def always_on(self) -> int:
        """Number of gates that are open for every image."""
        return sum(len(layer.usage.always_on) for layer in self.layers)

    @property
    def dynamic(self) -> int:
        """Number of gates that are open for some images and closed for others."""
        return sum(len(layer.usage.dynamic) for layer in self.layers)

    @property
    def open_share(self) -> float:
        """Mean share of all gates that an image opens."""
        return sum(layer.usage.gates * layer.usage.open_share for layer in self.layers) / self.gates


def explain_channels(
    routing: Mapping[str, Routing],
    blocks: Mapping[str, int],
    gated: GatedOutputs | None,
    *,
    classes: Tensor,
    class_names: Sequence[str],
    probabilities: Tensor,
    correct: Tensor | None = None,
    seed: int = 0,
) -> ChannelExplanation:
    """Explains the gates of layers.

    Args:
        routing: routing of each gated layer, by name.
        blocks: channels per gate of each layer; 1 by default.
        gated: embeddings and costs, if the network has them.
        classes: class (B,) of each image, true or predicted.
        class_names: one name for each class.
        probabilities: predictions (B, K) of the network.
        correct: whether each prediction is correct (B,), if labels are known.
        seed: seed of shuffles, folds and the map.

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
            correct=correct,
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
