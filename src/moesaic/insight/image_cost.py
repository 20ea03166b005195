"""What each image costs a network with gated channels, and which images are cheap.

Costs are multiply-adds as executed, the network that sets the gates included, in percent of those of
the dense network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import torch
from torch import Tensor

from moesaic.checks import check_positive
from moesaic.insight.class_routing import check_labels
from moesaic.intervals import Estimate, mean

__all__ = ["Costs", "MeanCost", "image_costs"]

FEWEST = 10
"""Over fewer images neither a correlation nor a class's difference says anything."""


@dataclass(frozen=True)
class MeanCost:
    """The mean cost of some images, in percent of the dense network."""

    name: str
    images: int
    mean: float
    interval: tuple[float, float] | None
    """With 95 % confidence; None for a single image."""
    least: float
    most: float


@dataclass(frozen=True)
class Costs:
    """Made by `image_costs`; all but the counts of multiply-adds in percent of the dense network."""

    dense_macs: int
    """Multiply-adds of the network without gates."""
    fixed_macs: int
    """What no gate can save: the network that sets the gates, and ungated layers."""
    cost: tuple[float, ...]
    """Of each image."""
    was_right: tuple[bool, ...] | None
    """Whether the network's answer to each image is right; None where true classes are not known."""
    all: MeanCost
    classes: tuple[MeanCost, ...]
    """Of classes that have images, cheapest first."""
    right: MeanCost | None
    """Of images that the network gets right; None: there are none, or true classes are not known."""
    wrong: MeanCost | None
    dearer_when_wrong: Estimate | None
    """Points by which wrong ones cost more than right ones; None with fewer than two of either."""
    dearer_within_classes: Estimate | None
    """The same with each class compared in itself, for a class may be both dear and hard; over classes with `FEWEST`
    of either at least, None where there are none."""
    certainty: Estimate | None
    """Correlation of cost and the probability of the predicted class; None where one of them does not vary."""
    cheapest: tuple[int, ...]
    """Which images, cheapest first."""
    dearest: tuple[int, ...]
    """Which images, dearest first; none that is among the cheapest."""

    @property
    def alike(self) -> bool:
        """Whether all images cost the same."""
        return self.all.least == self.all.most


def image_costs(
    macs: Tensor,
    *,
    dense_macs: int,
    fixed_macs: int,
    classes: Tensor,
    class_names: Sequence[str],
    probabilities: Tensor,
    right: Tensor | None = None,
    show: int = 10,
) -> Costs:
    """Make of the multiply-adds (B,) of images what a reader wants to know.

    ``classes`` (B,) are their classes, true or predicted, ``probabilities`` (B, K) the network's answers, ``right``
    (B,) whether these are right, where that is known; ``show`` of the cheapest and of the dearest are picked out.

    >>> labels, answers = torch.tensor([0, 0, 1, 1]), torch.eye(2).repeat(2, 1)
    >>> costs = image_costs(torch.tensor([30, 20, 50, 60]), dense_macs=100, fixed_macs=5, classes=labels,
    ...     class_names=["cat", "dog"], probabilities=answers, right=answers.argmax(1) == labels, show=1)
    >>> costs.all.mean, costs.cheapest, costs.dearest, [(each.name, each.mean) for each in costs.classes]
    (40.0, (1,), (3,), [('cat', 25.0), ('dog', 55.0)])
    >>> costs.dearer_when_wrong.value
    -10.0
    """
    check_positive("image_costs", show=show, dense_macs=dense_macs)
    if not len(macs):
        raise ValueError("image_costs: there is no image; give the multiply-adds of at least one")
    cost_B = 100 * macs.detach().cpu().double() / dense_macs
    classes = check_labels("image_costs", classes, len(cost_B), len(class_names))
    by_class = [_mean(name, cost_B[classes == k]) for k, name in enumerate(class_names)]
    right_B = None if right is None else right.cpu().bool()
    ok, not_ok = (
        (None, None) if right_B is None else (_mean("right", cost_B[right_B]), _mean("wrong", cost_B[~right_B]))
    )
    order = cast("list[int]", cost_B.sort(stable=True).indices.tolist())
    show = min(show, max(1, len(order) // 2))
    over_all = _mean("all", cost_B)
    assert over_all is not None
    return Costs(
        dense_macs=dense_macs,
        fixed_macs=fixed_macs,
        cost=tuple(round(value, 4) for value in cast("list[float]", cost_B.tolist())),
        was_right=None if right_B is None else tuple(bool(each) for each in right_B),
        all=over_all,
        classes=tuple(sorted((each for each in by_class if each is not None), key=lambda each: each.mean)),
        right=ok,
        wrong=not_ok,
        dearer_when_wrong=None if ok is None or not_ok is None else _difference(not_ok, ok),
        dearer_within_classes=None if right_B is None else _within_classes(cost_B, right_B, classes),
        certainty=_correlation(cost_B, probabilities.detach().cpu().double().max(1).values),
        cheapest=tuple(order[:show]),
        dearest=tuple(b for b in order[::-1][:show] if b not in order[:show]),
    )


def _mean(name: str, cost: Tensor) -> MeanCost | None:
    if not len(cost):
        return None
    interval = mean(cost.numpy()).interval if len(cost) > 1 else None
    return MeanCost(name, len(cost), float(cost.mean()), interval, float(cost.min()), float(cost.max()))


def _difference(one: MeanCost, other: MeanCost) -> Estimate | None:
    """Their errors are independent, so that squares of half the intervals add up."""
    if one.interval is None or other.interval is None:
        return None
    half = math.hypot(one.interval[1] - one.mean, other.interval[1] - other.mean)
    value = one.mean - other.mean
    return Estimate(value, value - half, value + half)


def _within_classes(cost_B: Tensor, right_B: Tensor, classes_B: Tensor) -> Estimate | None:
    """The classes' differences, each with the weight that its numbers of right and wrong images give it."""
    found: list[tuple[float, Estimate]] = []
    for k in cast("list[int]", torch.unique(classes_B).tolist()):
        wrong, right = (_mean("", cost_B[(classes_B == k) & of]) for of in (~right_B, right_B))
        if wrong is not None and right is not None and min(wrong.images, right.images) >= FEWEST:
            difference = _difference(wrong, right)
            assert difference is not None
            found.append((wrong.images * right.images / (wrong.images + right.images), difference))
    if not found:
        return None
    total = sum(weight for weight, _ in found)
    value = sum(weight * each.value for weight, each in found) / total
    half = math.hypot(*(weight * (each.high - each.value) for weight, each in found)) / total
    return Estimate(value, value - half, value + half)


def _correlation(cost: Tensor, certainty: Tensor) -> Estimate | None:
    """With Fisher's interval."""
    if len(cost) < FEWEST or not bool(cost.isfinite().all() and certainty.isfinite().all()):
        return None
    if min(float(cost.std()), float(certainty.std())) < 1e-9:
        return None
    value = float(torch.corrcoef(torch.stack([cost, certainty]))[0, 1])
    middle = math.atanh(max(-0.999999, min(0.999999, value)))
    half = NormalDist().inv_cdf(0.975) / math.sqrt(len(cost) - 3)
    return Estimate(value, math.tanh(middle - half), math.tanh(middle + half))
