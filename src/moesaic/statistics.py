"""Estimates with 95 % intervals, for verdicts.

Arrays end in an axis of trials. Means have Student's interval; what is no mean of trials, such as a
ratio of sample sizes read off two curves, is bootstrapped over trials with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["Estimate", "bootstrap", "mean", "percentage", "power", "samples_at", "slopes"]

Array = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2000


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


def samples_at(level: float, sizes: Sequence[float], curve: Array) -> float:
    """Where a curve of means first reaches the level, by linear interpolation; infinite if it never does.

    >>> samples_at(95.0, [100, 300, 500], np.array([90.0, 94.0, 96.0]))
    400.0
    """
    reached = np.flatnonzero(curve >= level)
    if not reached.size:
        return float("inf")
    at = int(reached[0])
    if at == 0:
        return float(sizes[0])
    low, high = float(curve[at - 1]), float(curve[at])
    return sizes[at - 1] + (level - low) / (high - low) * (sizes[at] - sizes[at - 1])


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
