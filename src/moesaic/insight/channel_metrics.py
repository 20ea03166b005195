"""Metrics of channel gates: dead, always-on and dynamic channels, and how gates depend on the class.

A gate is open or closed for an image (Wang et al. 2019). Over many images a channel is dead, always on or
dynamic. Only dynamic channels make the network input-dependent; without them it is a static, narrower
network. The distance of two images is the Hamming distance of their gates: the share of gates that are
open for one of them alone. If gates depend on the class, it is smaller within a class than between
classes.

Shapes, beyond the legend of `routing_record`: K classes, E gates. A gate belongs to one channel or to a block
of neighbouring channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.insight.class_routing import MIN_CLASS_IMAGES, check_labels, probe_accuracy
from moesaic.keyed_random import keys, permutations
from moesaic.routing_record import Routing

__all__ = [
    "ChannelUsage",
    "GateDependence",
    "GateDistances",
    "SpecificGate",
    "channel_usage",
    "class_shares",
    "gate_dependence",
    "gate_distances",
    "open_gates",
    "specific_gates",
]

SHUFFLES = 100
"""Shuffles of the labels for the chance level."""


@dataclass(frozen=True)
class ChannelUsage:
    """Usage of a layer's gates over a set of images; made by `channel_usage`."""

    images: int
    gates: int
    dead: tuple[int, ...]
    """Gates that are open for no image."""
    always_on: tuple[int, ...]
    """Gates that are open for every image."""
    dynamic: tuple[int, ...]
    """All others."""
    open_share: float
    """Mean share of gates that an image opens."""
    spread: float
    """Standard deviation of that share over images."""
    patterns: int
    """Number of distinct patterns of open gates."""


@dataclass(frozen=True)
class GateDependence:
    """How much gates depend on the image; made by `gate_dependence`. All are 0 if every image opens the same gates."""

    differing: float
    """Share of gates in which two different images differ, mean over all pairs of images."""
    entropy: float
    """Mean over gates of the entropy, in bits, of being open for a random image."""
    class_information: float
    """Mean over gates of the mutual information, in bits, of being open and the class of the image. With n images of K
    classes, gates that do not depend on the class come to about (K − 1) / (2 n ln 2)."""


@dataclass(frozen=True)
class GateDistances:
    """Distances of the gates of two images, by class; made by `gate_distances`.

    Distances are shares of gates: 0 if two images open the same gates.
    """

    distance: tuple[tuple[float | None, ...], ...]
    """(K, K): mean over pairs of images of two classes; None if there is no pair."""
    within: float | None
    """Mean over all pairs of the same class."""
    between: float | None
    """Mean over all pairs of different classes."""
    by_chance: float | None
    """95 % quantile of ``between − within`` for shuffled labels."""
    probe_accuracy: float | None
    """Cross-validated accuracy of a naive Bayes classifier that sees the gates alone; None with too few images."""
    majority_share: float
    """Share of the most frequent class."""

    @property
    def significant(self) -> bool:
        """Whether gates are more alike within classes than by chance."""
        if self.within is None or self.between is None or self.by_chance is None:
            return False
        return self.between - self.within > self.by_chance


@dataclass(frozen=True)
class SpecificGate:
    """A gate that is open more often for one class than for the others."""

    layer: str
    gate: int
    label: int
    """Index of the class."""
    own: float
    """Share of the images of this class for which it is open."""
    others: float
    """The same for the other classes, mean over classes."""


def open_gates(routing: Routing | Mapping[str, Routing]) -> Tensor:
    """(B, E) bool on the CPU: whether a gate is open for an image; several layers are concatenated.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> routing = ChannelGate(1, channels=3).choose(torch.tensor([[2.0, -1.0, 0.5], [-1.0, -1.0, 0.5]]))
    >>> open_gates({"conv1": routing, "conv2": routing}).int().tolist()
    [[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 1]]
    """
    several = {"": routing} if isinstance(routing, Routing) else routing
    if not several:
        raise ValueError("open_gates: there is no layer; give the routing of at least one")
    for name, each in several.items():
        if each.unit != "channel":
            raise ValueError(
                f"open_gates: {name or 'this layer'} routes by {each.unit}, and only channels have gates that open and "
                "close; moesaic.insight.summary takes the others"
            )
    return torch.cat([each.mask.detach().flatten(1).cpu() for each in several.values()], 1)


def channel_usage(routing: Routing) -> ChannelUsage:
    """Returns which channels of a layer are dead, always on and dynamic over the images of a routing.

    Over few images many channels appear dead or always on: use some hundreds.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> scores = torch.tensor([[2.0, -1.0, 0.5, 1.0], [1.0, -1.0, -0.5, 1.0]])
    >>> usage = channel_usage(ChannelGate(1, channels=4).choose(scores))
    >>> usage.dead, usage.always_on, usage.dynamic, usage.open_share
    ((1,), (0, 3), (2,), 0.625)
    """
    open_BE = open_gates(routing)
    B, E = open_BE.shape
    if not B:
        raise ValueError("channel_usage: the routing has no image; give at least one")
    count_E = open_BE.sum(0)
    share_B = open_BE.double().mean(1)
    return ChannelUsage(
        images=B,
        gates=E,
        dead=_which(count_E == 0),
        always_on=_which(count_E == B),
        dynamic=_which((count_E > 0) & (count_E < B)),
        open_share=float(share_B.mean()),
        spread=float(share_B.std(correction=0)),
        patterns=len(cast("Tensor", torch.unique(open_BE, dim=0))),
    )


def class_shares(routing: Routing | Mapping[str, Routing], labels: Tensor, classes: int) -> Tensor:
    """(K, E) float64: share of the images of a class for which the gate is open.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> routing = ChannelGate(1, channels=2).choose(torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]))
    >>> class_shares(routing, torch.tensor([0, 0, 1]), classes=2).tolist()
    [[1.0, 0.5], [0.0, 1.0]]
    """
    open_BE = open_gates(routing).double()
    own_KB = _members(check_labels("class_shares", labels, len(open_BE), classes), classes).double()
    return own_KB @ open_BE / own_KB.sum(1, keepdim=True).clamp(min=1)


def gate_dependence(routing: Routing | Mapping[str, Routing], labels: Tensor, classes: int) -> GateDependence:
    """Returns how much the open gates of a layer, or of several layers together, depend on the image.

    ``labels`` (B,) are from 0 to ``classes`` − 1.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> labels = torch.arange(4) % 2
    >>> scores = torch.stack([2.0 * labels - 1, torch.ones(4)], 1)          # the first gate is open for class 1 alone
    >>> gate_dependence(ChannelGate(1, channels=2).choose(scores), labels, classes=2)
    GateDependence(differing=0.333..., entropy=0.5, class_information=0.5)
    """
    open_BE = open_gates(routing)
    B = len(open_BE)
    if B < 2:
        raise ValueError(f"gate_dependence: {B} images do not differ; give at least two")
    labels = check_labels("gate_dependence", labels, B, classes)
    share_E = open_BE.double().mean(0)
    share_KE = class_shares(routing, labels, classes)
    class_share_K = labels.bincount(minlength=classes).double() / B
    entropy = float(_bits(share_E).mean())
    return GateDependence(
        differing=float((2 * share_E * (1 - share_E)).mean()) * B / (B - 1),
        entropy=entropy,
        class_information=max(entropy - float((class_share_K @ _bits(share_KE)).mean()), 0.0),
    )


def _bits(share: Tensor) -> Tensor:
    """The entropy, in bits, of what happens with this probability."""
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)) / math.log(2)


def gate_distances(
    routing: Routing | Mapping[str, Routing], labels: Tensor, classes: int, *, seed: int = 0
) -> GateDistances:
    """Compares open gates within and between classes, of one layer or of several layers together.

    ``labels`` (B,) are from 0 to ``classes`` − 1.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> labels = torch.arange(40) % 2
    >>> scores = torch.stack([2.0 * labels - 1, torch.ones(40)], 1)         # the first gate is open for class 1 alone
    >>> found = gate_distances(ChannelGate(1, channels=2).choose(scores), labels, classes=2)
    >>> found.within, found.between, found.significant, found.probe_accuracy
    (0.0, 0.5, True, 1.0)
    """
    open_BE = open_gates(routing)
    B, E = open_BE.shape
    if not B:
        raise ValueError("gate_distances: the routing has no image; give at least one")
    labels = check_labels("gate_distances", labels, B, classes)
    open_BE = open_BE.float()  # exact for counts of images
    differing_KK, pairs_KK = _pairs(_members(labels, classes).float() @ open_BE, labels.bincount(minlength=classes), E)
    same = torch.eye(classes, dtype=torch.bool)
    other = torch.ones_like(same).triu(1)
    within, between = (_mean(differing_KK[part], pairs_KK[part]) for part in (same, other))
    mean_KK = torch.where(pairs_KK > 0, differing_KK / pairs_KK.clamp(min=1), torch.nan)
    return GateDistances(
        distance=tuple(
            tuple(None if value != value else round(value, 5) for value in row)
            for row in cast("list[list[float]]", mean_KK.tolist())
        ),
        within=within,
        between=between,
        by_chance=None if within is None or between is None else _chance(open_BE, labels, seed),
        probe_accuracy=probe_accuracy(open_BE, labels, classes, seed=seed),
        majority_share=float(labels.bincount().max()) / B,
    )


def specific_gates(
    routing: Mapping[str, Routing], labels: Tensor, classes: int, *, count: int = 12, seed: int = 0
) -> tuple[SpecificGate, ...]:
    """Returns the gates that are most specific to a class: open for it, closed for others.

    The largest of thousands of differences is biased upwards. Gates are therefore selected on one half of the images,
    drawn by ``seed``, and measured on the other half. Classes with fewer than `MIN_CLASS_IMAGES` images are ignored
    unless all are so small. Empty if the halves are too small.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> labels = torch.arange(40) % 2
    >>> scores = torch.stack([2.0 * labels - 1, torch.ones(40)], 1)
    >>> specific_gates({"conv1": ChannelGate(1, channels=2).choose(scores)}, labels, classes=2, count=1)
    (SpecificGate(layer='conv1', gate=0, label=1, own=1.0, others=0.0),)
    """
    check_positive("specific_gates", count=count)
    open_BE = open_gates(routing).double()
    labels = check_labels("specific_gates", labels, len(open_BE), classes)
    order = permutations(keys(seed, [0]), "halves", len(labels))[0]
    halves = [order[: len(order) // 2], order[len(order) // 2 :]]
    images_K = labels.bincount(minlength=classes)
    enough_K = images_K >= MIN_CLASS_IMAGES
    if int(enough_K.sum()) < 2:
        enough_K = images_K > 0
    for half in halves:
        enough_K = enough_K & (labels[half].bincount(minlength=classes) > 0)
    large = cast("list[int]", enough_K.nonzero().flatten().tolist())
    if len(large) < 2:
        return ()
    (own_KE, others_KE), (test_own_KE, test_others_KE) = (_own_and_others(open_BE[h], labels[h], large) for h in halves)
    best_E, class_E = (own_KE - others_KE).max(0)
    picked = cast("list[int]", best_E.sort(descending=True, stable=True).indices[:count].tolist())
    places = [(name, gate) for name, each in routing.items() for gate in range(each.experts)]
    return tuple(
        SpecificGate(
            *places[e],
            label=large[int(class_E[e])],
            own=float(test_own_KE[class_E[e], e]),
            others=float(test_others_KE[class_E[e], e]),
        )
        for e in picked
        if best_E[e] > 0
    )


def _own_and_others(open_BE: Tensor, labels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(K, E) each: the share of a class's images with an open gate, and the mean share of the other classes."""
    share_KE = torch.stack([open_BE[labels == k].mean(0) for k in classes])
    return share_KE, (share_KE.sum(0) - share_KE) / (len(classes) - 1)


def _pairs(open_KE: Tensor, images_K: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """(K, K) each: the sum of the distances of all pairs, and the number of pairs.

    If c of n images of one class and d of m images of another open a gate, c (m − d) + d (n − c) pairs differ in it;
    within one class c (n − c).
    """
    open_KE, n_K = open_KE.double(), images_K.double()
    one_way_KK = open_KE @ (n_K[:, None] - open_KE).T
    differing_KK, pairs_KK = one_way_KK + one_way_KK.T, n_K[:, None] * n_K
    differing_KK.diagonal().copy_(one_way_KK.diagonal())
    pairs_KK.diagonal().copy_(n_K * (n_K - 1) / 2)
    return differing_KK / gates, pairs_KK


def _chance(open_BE: Tensor, labels: Tensor, seed: int) -> float:
    """The 95 % quantile of between − within over shuffles of the labels."""
    # without empty classes, to save time
    _, labels = cast("tuple[Tensor, Tensor]", torch.unique(labels, return_inverse=True))
    images_K = labels.bincount()
    own_KB = _members(labels, len(images_K)).float()
    pairs = images_K.double() * (images_K.double() - 1) / 2
    B, E = open_BE.shape
    count_E = open_BE.double().sum(0)
    all_differing, all_pairs = float((count_E * (B - count_E)).sum()), B * (B - 1) / 2
    gaps: list[float] = []
    for order in permutations(keys(seed, range(SHUFFLES)), "labels", B):
        open_KE = (own_KB[:, order] @ open_BE).double()
        differing = float((open_KE * (images_K[:, None] - open_KE)).sum())
        same_pairs = float(pairs.sum())
        gaps.append((all_differing - differing) / (all_pairs - same_pairs) - differing / same_pairs)
    return sorted(gaps)[int(0.95 * SHUFFLES)] / E


def _members(labels: Tensor, classes: int) -> Tensor:
    """(K, B): 1 where the image belongs to the class."""
    return torch.nn.functional.one_hot(labels, classes).T


def _mean(differing: Tensor, pairs: Tensor) -> float | None:
    total = float(pairs.sum())
    return float(differing.sum()) / total if total else None


def _which(mask_E: Tensor) -> tuple[int, ...]:
    return tuple(cast("list[int]", mask_E.nonzero().flatten().tolist()))
