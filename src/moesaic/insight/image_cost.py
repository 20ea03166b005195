"""Cost of each image for a network with gated channels: by class, and for correct and wrong predictions.

Costs are executed multiply-adds in percent of the dense network; the network that computes the gates is
included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import torch
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.insight.class_routing import check_labels
from moesaic.intervals import Estimate, mean

__all__ = ["Costs", "MeanCost", "image_costs"]

MIN_IMAGES = 10
"""Correlations and differences are not computed over fewer images."""


@dataclass(frozen=True)
class MeanCost:
    """The mean cost of some images, in percent of the dense network."""

    name: str
    images: int
    mean: float
    interval: tuple[float, float] | None
    """95 % confidence interval; None for a single image."""
    least: float
    most: float


@dataclass(frozen=True)
class Costs:
    """Costs of images, in percent of the dense network; made by `image_costs`."""

    dense_macs: int
    """Multiply-adds of the network without gates."""
    fixed_macs: int
    """Multiply-adds that gates cannot save: the network that computes the gates, and ungated layers."""
    cost: tuple[float, ...]
    """Cost of each image."""
    is_correct: tuple[bool, ...] | None
    """Whether each prediction is correct; None without labels."""
    all: MeanCost
    classes: tuple[MeanCost, ...]
    """Classes that have images, by ascending cost."""
    right: MeanCost | None
    """Images with a correct prediction; None if there is none, or without labels."""
    wrong: MeanCost | None
    extra_cost_when_wrong: Estimate | None
    """Percentage points by which images with a wrong prediction cost more; None with fewer than two of either."""
    extra_cost_within_classes: Estimate | None
    """The same within classes, as a class may be both expensive and hard; over classes with at least
    `MIN_IMAGES` of both, None if there is none."""
    certainty: Estimate | None
    """Correlation of cost and the probability of the predicted class; None if one of them is constant."""
    least_expensive: tuple[int, ...]
    """Indices of images, by ascending cost."""
    most_expensive: tuple[int, ...]
    """Indices of images, by descending cost; disjoint from ``least_expensive``."""

    @property
    def constant(self) -> bool:
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
    correct: Tensor | None = None,
    show: int = 10,
) -> Costs:
    """Summarises the multiply-adds (B,) of images.

    ``classes`` (B,) are true or predicted classes, ``probabilities`` (B, K) the predictions, ``correct`` (B,) is
    whether they are correct, if labels are known; ``show`` images are listed as least and as most expensive.

    >>> labels, predictions = torch.tensor([0, 0, 1, 1]), torch.eye(2).repeat(2, 1)
    >>> costs = image_costs(torch.tensor([30, 20, 50, 60]), dense_macs=100, fixed_macs=5, classes=labels,
    ...     class_names=["cat", "dog"], probabilities=predictions, correct=predictions.argmax(1) == labels, show=1)
    >>> costs.all.mean, costs.least_expensive, costs.most_expensive, [(each.name, each.mean) for each in costs.classes]
    (40.0, (1,), (3,), [('cat', 25.0), ('dog', 55.0)])
    >>> costs.extra_cost_when_wrong.value
    -10.0
    """
    check_positive("image_costs", show=show, dense_macs=dense_macs)
    if not len(macs):
        raise ValueError("image_costs: there is no image; give the multiply-adds of at least one")
    cost_B = 100 * macs.detach().cpu().double() / dense_macs
    classes = check_labels("image_costs", classes, len(cost_B), len(class_names))
    by_class = [_mean(name, cost_B[classes == k]) for k, name in enumerate(class_names)]
    correct_B = None if correct is None else correct.cpu().bool()
    right, wrong = (
        (None, None) if correct_B is None else (_mean("right", cost_B[correct_B]), _mean("wrong", cost_B[~correct_B]))
    )
    order = cast("list[int]", cost_B.sort(stable=True).indices.tolist())
    show = min(show, max(1, len(order) // 2))
    over_all = _mean("all", cost_B)
    assert over_all is not None
    return Costs(
        dense_macs=dense_macs,
        fixed_macs=fixed_macs,
        cost=tuple(round(value, 4) for value in cast("list[float]", cost_B.tolist())),
        is_correct=None if correct_B is None else tuple(bool(each) for each in correct_B),
        all=over_all,
        classes=tuple(sorted((each for each in by_class if each is not None), key=lambda each: each.mean)),
        right=right,
        wrong=wrong,
        extra_cost_when_wrong=None if right is None or wrong is None else _difference(wrong, right),
        extra_cost_within_classes=None if correct_B is None else _within_classes(cost_B, correct_B, classes),
        certainty=_correlation(cost_B, probabilities.detach().cpu().double().max(1).values),
        least_expensive=tuple(order[:show]),
        most_expensive=tuple(b for b in order[::-1][:show] if b not in order[:show]),
    )


def _mean(name: str, cost: Tensor) -> MeanCost | None:
    if not len(cost):
        return None
    interval = mean(cost.numpy()).interval if len(cost) > 1 else None
    return MeanCost(name, len(cost), float(cost.mean()), interval, float(cost.min()), float(cost.max()))


def _difference(one: MeanCost, other: MeanCost) -> Estimate | None:
    """The difference of two means; their errors are independent, so the squares of half the intervals add up."""
    if one.interval is None or other.interval is None:
        return None
    half = math.hypot(one.interval[1] - one.mean, other.interval[1] - other.mean)
    value = one.mean - other.mean
    return Estimate(value, value - half, value + half)


def _within_classes(cost_B: Tensor, correct_B: Tensor, classes_B: Tensor) -> Estimate | None:
    """Mean of the differences within classes, weighted by their numbers of right and wrong images."""
    found: list[tuple[float, Estimate]] = []
    for k in cast("list[int]", torch.unique(classes_B).tolist()):
        wrong, right = (_mean("", cost_B[(classes_B == k) & of]) for of in (~correct_B, correct_B))
        if wrong is not None and right is not None and min(wrong.images, right.images) >= MIN_IMAGES:
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
    """Correlation with Fisher's interval; None for few images, or if one of the two is constant or not finite."""
    if len(cost) < MIN_IMAGES or not bool(cost.isfinite().all() and certainty.isfinite().all()):
        return None
    if min(float(cost.std()), float(certainty.std())) < 1e-9:
        return None
    value = float(torch.corrcoef(torch.stack([cost, certainty]))[0, 1])
    middle = math.atanh(max(-0.999999, min(0.999999, value)))
    half = NormalDist().inv_cdf(0.975) / math.sqrt(len(cost) - 3)
    return Estimate(value, math.tanh(middle - half), math.tanh(middle + half))
