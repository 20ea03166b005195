"""Estimates with 95 % intervals, for verdicts.

Arrays end in an axis of trials. Means have Student's interval; what is no mean of trials, such as a
ratio of sample sizes read off two curves, is bootstrapped over trials with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Curve",
    "Estimate",
    "bootstrap",
    "mean",
    "percentage",
    "power",
    "sample_ratio",
    "samples_at",
    "samples_to_reach",
    "saved_labels",
    "shared_level",
    "slopes",
]

Array = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2000

Curve: TypeAlias = tuple[Sequence[float], Array]
"""Numbers of samples, S of them and rising, and what each of T trials reached with them: (S, T)."""


@dataclass(frozen=True)
class Estimate:
    """A value and the interval it is known to."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


def mean(values: Sequence[float] | Array) -> Estimate:
    """The mean with Student's 95 % interval.

    >>> mean([1.0, 2.0, 3.0, 4.0, 5.0])
    Estimate(value=3.0, low=1.0..., high=4.9...)
    """
    several = np.asarray(values, dtype=np.float64)
    if several.size < 2:
        raise ValueError(f"mean: {several.size} trials tell nothing about their spread; give at least 2")
    center = float(several.mean())
    half = _student(several.size - 1) * float(several.std(ddof=1)) / several.size**0.5
    return Estimate(center, center - half, center + half)


def percentage(values: Sequence[float] | Array) -> Estimate:
    """`mean` of percentages: no interval goes below 0 or above 100.

    >>> percentage([100.0, 100.0, 97.0])
    Estimate(value=99.0, low=94.6..., high=100.0)
    """
    found = mean(values)
    return Estimate(found.value, max(found.low, 0.0), min(found.high, 100.0))


def _student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else by
    the expansion of Cornish and Fisher, which is right to 0.2 % from 3 on.
    """  # noqa: D205
    if freedom == 1:
        return float(np.tan(np.pi * (LEVEL / 2)))
    if freedom == 2:
        return float(LEVEL * np.sqrt(2 / (1 - LEVEL**2)))
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**order for order, term in enumerate(terms))


def bootstrap(statistic: Callable[..., float], *groups: Array) -> Estimate:
    """The statistic of the groups (…, T), with the percentile interval over resampled trials.

    Groups of equally many trials are resampled together, since their trials share data. Percentiles of
    few resampled trials lie too close together; they are taken further out by as much as Student's interval
    is wider than the normal one (Hesterberg 2015, "expanded percentile").
    """
    rng = np.random.default_rng(0)
    counts = sorted({group.shape[-1] for group in groups})
    drawn: list[float] = []
    for _ in range(RESAMPLES):
        picks: dict[int, NDArray[np.int64]] = {count: rng.integers(count, size=count) for count in counts}
        drawn.append(statistic(*(group[..., picks[group.shape[-1]]] for group in groups)))
    few = min(counts)
    tail = NormalDist().cdf(-((few / (few - 1)) ** 0.5) * _student(few - 1))
    low, high = np.quantile(drawn, [tail, 1 - tail], method="inverted_cdf")  # some may be infinite
    return Estimate(statistic(*groups), float(low), float(high))


def samples_at(level: float, sizes: Sequence[float], curve: Array, *, logarithmic: bool = False) -> float:
    """Where a curve of means first reaches the level, interpolated linearly; infinite if it never does.

    ``logarithmic`` interpolates over the logarithm of the sizes, in which the curves of networks are straighter:
    better where sizes are far apart.

    >>> samples_at(95.0, [100, 300, 500], np.array([90.0, 94.0, 96.0]))
    400.0
    >>> round(samples_at(85.0, [100, 400], np.array([80.0, 90.0]), logarithmic=True), 6)
    200.0
    """
    reached = np.flatnonzero(curve >= level)
    if not reached.size:
        return float("inf")
    at = int(reached[0])
    if at == 0:
        return float(sizes[0])
    before, there = float(sizes[at - 1]), float(sizes[at])
    low, high = float(curve[at - 1]), float(curve[at])
    way = (level - low) / (high - low)
    return before * (there / before) ** way if logarithmic else before + way * (there - before)


def samples_to_reach(level: float, curve: Curve, *, logarithmic: bool = True) -> Estimate:
    """How many samples the mean over trials needs to reach the level, bootstrapped over trials.

    A curve that is there from the start counts with its smallest size, of which it may need fewer; one that never
    gets there with infinity.

    >>> sizes, accuracies = [100, 200, 400], np.array([[70.0, 72.0], [80.0, 82.0], [90.0, 92.0]])
    >>> found = samples_to_reach(81.0, (sizes, accuracies))
    >>> found.value, found.low < 200 < found.high
    (200.0, True)
    """
    sizes, accuracies = _known(curve)

    def needed(a: Array) -> float:
        return samples_at(level, sizes, a.mean(axis=1), logarithmic=logarithmic)

    return bootstrap(needed, accuracies)


def sample_ratio(level: float, ours: Curve, theirs: Curve, *, logarithmic: bool = False) -> Estimate:
    """How many times their samples we need to reach the level, bootstrapped over trials.

    Curves of equally many trials share their data trial by trial, and are resampled together. Where they never
    reach the level they count with their largest size, which favours them; where we never do, the ratio is infinite.

    >>> sizes = [100, 200, 400]
    >>> ours, theirs = np.array([[80.0], [90.0], [95.0]]), np.array([[70.0], [80.0], [90.0]])
    >>> sample_ratio(90.0, (sizes, ours.repeat(3, axis=1)), (sizes, theirs.repeat(3, axis=1))).value
    0.5
    """
    (our_sizes, our_accuracies), (their_sizes, their_accuracies) = _known(ours), _known(theirs)

    def ratio(a: Array, b: Array) -> float:
        there = samples_at(level, their_sizes, b.mean(axis=1), logarithmic=logarithmic)
        here = samples_at(level, our_sizes, a.mean(axis=1), logarithmic=logarithmic)
        return here / min(there, float(their_sizes[-1]))

    return bootstrap(ratio, our_accuracies, their_accuracies)


def saved_labels(level: float, ours: Curve, theirs: Curve, *, logarithmic: bool = True) -> Estimate:
    """The share of their labels that we do without at the same accuracy: 1 less `sample_ratio`.

    0.6 means that 40 labels do what they need 100 for; below 0 we need more than they do, and at minus infinity we
    never get there.

    >>> sizes = [100, 200, 400]
    >>> ours, theirs = np.array([[80.0], [90.0], [95.0]]), np.array([[70.0], [80.0], [90.0]])
    >>> saved_labels(90.0, (sizes, ours.repeat(3, axis=1)), (sizes, theirs.repeat(3, axis=1))).value
    0.5
    """
    ratio = sample_ratio(level, ours, theirs, logarithmic=logarithmic)
    return Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)


def shared_level(*curves: Curve) -> float | None:
    """The highest accuracy that every curve reaches in the mean; None where one begins above another's end.

    >>> weak, strong = np.array([[60.0, 62.0], [70.0, 72.0]]), np.array([[65.0, 67.0], [90.0, 92.0]])
    >>> shared_level(([100, 200], weak), ([100, 200], strong))
    71.0
    """
    means = [_known(curve)[1].mean(axis=1) for curve in curves]
    level = min(float(each.max()) for each in means)
    return level if all(float(each[0]) <= level for each in means) else None


def _known(curve: Curve) -> Curve:
    """The curve, if it is one."""
    sizes, accuracies = curve
    rising = all(a < b for a, b in pairwise(sizes))
    if accuracies.ndim != 2 or accuracies.shape[0] != len(sizes) or accuracies.shape[1] < 2 or not rising:
        raise ValueError(
            f"statistics: a curve of sizes {list(sizes)} has values of shape {tuple(accuracies.shape)}; give rising "
            "sizes, and for each of them one value for each of at least 2 trials, shape (sizes, trials)"
        )
    return curve


def slopes(x: Sequence[float], values: Array) -> Array:
    """(T,): the slope of each trial's values (S, T) over x, by least squares."""
    centred = np.asarray(x, dtype=np.float64) - np.mean(x)
    return centred @ values / float(centred @ centred)


def power(x: Sequence[float], values: Array) -> float:
    """The exponent of x that the mean of the values (S, T) follows: a slope of logarithms.

    >>> power([1, 2, 4], np.array([[3.0], [6.0], [12.0]]))
    1.0
    """
    means = np.maximum(values.mean(axis=-1), 1e-9)
    return float(slopes(np.log(x).tolist(), np.log(means)))
