"""Estimates with 95 % confidence intervals.

The last axis of arrays is the trial. Means have Student's interval. Statistics that are not a mean over trials, such
as the ratio of sample sizes at which two curves reach a level, are bootstrapped over trials with a fixed seed. A
bootstrap over fewer than five trials covers too little (74 % in place of 95 % with three); a ratio then has Student's
interval of the mean logarithm of its value in each trial.
"""

from __future__ import annotations

import math
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
    "Sample",
    "bootstrap",
    "difference",
    "mean",
    "percentage",
    "ratio_estimate",
    "sample_ratio",
    "samples_at",
    "samples_to_reach",
    "saved_labels",
    "shared_level",
    "student_quantile",
    "welch_difference",
]

Array = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
FEW_TRIALS = 5
"""Trials below which a bootstrap interval over trials is too narrow."""

Curve: TypeAlias = tuple[Sequence[float], Array]
"""Increasing sample sizes (S,) and the accuracy of each trial at each size (S, T)."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Sample:
    """Mean, standard deviation and number of trials."""

    mean: float
    deviation: float
    trials: int

    @classmethod
    def of(cls, values: Sequence[float] | Array) -> Sample:
        """Returns the sample's statistics.

        >>> Sample.of([1.0, 2.0, 3.0])
        Sample(mean=2.0, deviation=1.0, trials=3)
        """
        trials = np.asarray(values, dtype=np.float64)
        return cls(float(trials.mean()), float(trials.std(ddof=1)), trials.size)

    @property
    def squared_error(self) -> float:
        """Squared standard error of the mean."""
        return self.deviation**2 / self.trials


def welch_difference(ours: Sample, theirs: Sample) -> Estimate:
    """Returns the difference of two means with Welch's interval, which allows for unequal variances.

    >>> welch_difference(Sample(3.0, 1.0, 10), Sample(2.0, 1.0, 10))
    Estimate(value=1.0, low=0.060..., high=1.939...)
    """
    difference, variance = ours.mean - theirs.mean, ours.squared_error + theirs.squared_error
    if variance == 0:
        return Estimate(difference, difference, difference)
    degrees = variance**2 / sum(each.squared_error**2 / (each.trials - 1) for each in (ours, theirs))
    half = student_quantile(degrees) * variance**0.5
    return Estimate(difference, difference - half, difference + half)


def mean(values: Sequence[float] | Array) -> Estimate:
    """Returns the mean with Student's 95 % interval.

    >>> mean([1.0, 2.0, 3.0, 4.0, 5.0])
    Estimate(value=3.0, low=1.0..., high=4.9...)
    """
    trials = np.asarray(values, dtype=np.float64)
    if trials.size < 2:
        raise ValueError(f"mean: an interval needs at least 2 trials, got {trials.size}")
    center, half = _student(trials, CONFIDENCE, 0.0)
    return Estimate(center, center - half, center + half)


def difference(values: Sequence[float] | Array, confidence: float = CONFIDENCE, least_spread: float = 0.0) -> Estimate:
    """Returns the mean of differences of percentages, with Student's interval clipped to -100 and 100.

    The standard deviation counts as at least ``least_spread``.

    >>> difference([10.0, 30.0])
    Estimate(value=20.0, low=-100.0, high=100.0)
    >>> difference([1.0, 1.0, 1.0], least_spread=0.1)
    Estimate(value=1.0, low=0.75..., high=1.24...)
    """
    center, half = _student(np.asarray(values, dtype=np.float64), confidence, least_spread)
    return Estimate(center, max(center - half, -100.0), min(center + half, 100.0))


def percentage(values: Sequence[float] | Array) -> Estimate:
    """Returns the `mean` of percentages, with the interval clipped to 0 and 100.

    >>> percentage([100.0, 100.0, 97.0])
    Estimate(value=99.0, low=94.6..., high=100.0)
    """
    estimate = mean(values)
    return Estimate(estimate.value, max(estimate.low, 0.0), min(estimate.high, 100.0))


def _student(trials: Array, confidence: float, least_spread: float) -> tuple[float, float]:
    """The mean, and half of its interval."""
    spread = max(float(trials.std(ddof=1)), least_spread)
    return float(trials.mean()), student_quantile(trials.size - 1, confidence) * spread / trials.size**0.5


def student_quantile(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """Returns the two-sided quantile of Student's t distribution.

    >>> round(student_quantile(2), 3), round(student_quantile(2, 0.99), 3)
    (4.303, 9.925)
    """
    from scipy.special import stdtrit  # here, because the core imports without scipy

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))


def bootstrap(statistic: Callable[..., float], *groups: Array) -> Estimate:
    """Returns the statistic of the groups (…, T) with a percentile interval over resampled trials.

    Groups with equally many trials are resampled together, since their trials share data. The percentile interval of
    few trials is too narrow; it is widened by the ratio of Student's interval to the normal one (Hesterberg 2015,
    "expanded percentile").
    """
    rng = np.random.default_rng(0)
    counts = sorted({group.shape[-1] for group in groups})
    resampled: list[float] = []
    for _ in range(RESAMPLES):
        trials: dict[int, NDArray[np.int64]] = {count: rng.integers(count, size=count) for count in counts}
        resampled.append(statistic(*(group[..., trials[group.shape[-1]]] for group in groups)))
    fewest = min(counts)
    tail = NormalDist().cdf(-((fewest / (fewest - 1)) ** 0.5) * student_quantile(fewest - 1))
    # no interpolation between quantiles, since some values may be infinite
    low, high = np.quantile(resampled, [tail, 1 - tail], method="inverted_cdf")
    return Estimate(statistic(*groups), float(low), float(high))


def ratio_estimate(statistic: Callable[..., float], *groups: Array) -> Estimate:
    """Returns a positive ratio of the groups (…, T) with an interval over trials.

    Five trials or more are resampled (`bootstrap`). Of fewer, each trial alone gives a ratio, and the interval is
    Student's of their mean logarithm. Groups of unequal sizes, whose trials are not paired, add their variances, each
    with the others at their means. Where a trial's ratio is infinite the interval has no upper limit.

    >>> ours, theirs = np.array([1.0, 2.0, 4.0]), np.array([4.0, 8.0, 16.0])
    >>> ratio_estimate(lambda a, b: float(a.mean() / b.mean()), ours, theirs)
    Estimate(value=0.25, low=0.25, high=0.25)
    """
    counts = sorted({group.shape[-1] for group in groups})
    if counts[0] >= FEW_TRIALS:
        return bootstrap(statistic, *groups)
    value = statistic(*groups)
    variance = 0.0
    for count in counts:
        # a trial of the groups of this size, with the other groups whole
        each = [
            statistic(*(group[..., [t]] if group.shape[-1] == count else group for group in groups))
            for t in range(count)
        ]
        if not all(map(math.isfinite, (value, *each))) or min(each) <= 0:
            return Estimate(value, 0.0, math.inf)
        variance += float(np.var(np.log(each), ddof=1)) / count
    half = student_quantile(counts[0] - 1) * variance**0.5
    return Estimate(value, value * math.exp(-half), value * math.exp(min(half, 700.0)))


def samples_at(level: float, sizes: Sequence[float], curve: Array, *, logarithmic: bool = False) -> float:
    """Returns the sample size at which a curve of means (S,) first reaches the level; infinity if it never does.

    Sizes are interpolated linearly, or with ``logarithmic`` over their logarithm. The latter is better if sizes are
    far apart, because learning curves are straighter there.

    >>> samples_at(95.0, [100, 300, 500], np.array([90.0, 94.0, 96.0]))
    400.0
    >>> round(samples_at(85.0, [100, 400], np.array([80.0, 90.0]), logarithmic=True), 6)
    200.0
    """
    reached = np.flatnonzero(curve >= level)
    if not reached.size:
        return float("inf")
    first = int(reached[0])
    if first == 0:
        return float(sizes[0])
    below, above = float(sizes[first - 1]), float(sizes[first])
    low, high = float(curve[first - 1]), float(curve[first])
    weight = (level - low) / (high - low)
    return below * (above / below) ** weight if logarithmic else below + weight * (above - below)


def samples_to_reach(level: float, curve: Curve) -> Estimate:
    """Returns the sample size at which the mean over trials reaches the level, bootstrapped over trials.

    Sizes are interpolated over their logarithm. The result is the smallest size if the curve starts above the level,
    and infinity if it never reaches it.

    >>> sizes, accuracies = [100, 200, 400], np.array([[70.0, 72.0], [80.0, 82.0], [90.0, 92.0]])
    >>> found = samples_to_reach(81.0, (sizes, accuracies))
    >>> found.value, found.low < 200 < found.high
    (200.0, True)
    """
    sizes, accuracies = _checked(curve)

    def needed(a: Array) -> float:
        return samples_at(level, sizes, a.mean(axis=1), logarithmic=True)

    return bootstrap(needed, accuracies)


def sample_ratio(level: float, ours: Curve, theirs: Curve, *, logarithmic: bool = False) -> Estimate:
    """Returns the samples that ``ours`` needs to reach the level over those that ``theirs`` needs.

    The interval is bootstrapped over trials; fewer than five give the geometric mean of the ratios in each trial, with
    Student's interval of its logarithm. Curves with equally many trials share their data trial by trial and are
    resampled together. If ``theirs`` never reaches the level it counts with its largest size, which favours it; if
    ``ours`` never does, the ratio is infinite.

    >>> sizes = [100, 200, 400]
    >>> ours, theirs = np.array([[80.0], [90.0], [95.0]]), np.array([[70.0], [80.0], [90.0]])
    >>> sample_ratio(90.0, (sizes, ours.repeat(3, axis=1)), (sizes, theirs.repeat(3, axis=1))).value
    0.5
    """
    (our_sizes, our_accuracies), (their_sizes, their_accuracies) = _checked(ours), _checked(theirs)

    def ratio(a: Array, b: Array) -> float:
        their_samples = samples_at(level, their_sizes, b.mean(axis=1), logarithmic=logarithmic)
        our_samples = samples_at(level, our_sizes, a.mean(axis=1), logarithmic=logarithmic)
        return our_samples / min(their_samples, float(their_sizes[-1]))

    if our_accuracies.shape[1] == their_accuracies.shape[1] < FEW_TRIALS:
        return _ratio_of_few(level, ours, theirs, logarithmic=logarithmic)
    return bootstrap(ratio, our_accuracies, their_accuracies)


def saved_labels(level: float, ours: Curve, theirs: Curve) -> Estimate:
    """Returns the fraction of labels that ``ours`` saves at equal accuracy: 1 minus `sample_ratio`.

    0.6 means that 40 labels suffice in place of 100. The result is negative if ``ours`` needs more labels, and minus
    infinity if it never reaches the level. The curves have equally many trials.

    >>> sizes = [100, 200, 400]
    >>> ours, theirs = np.array([[80.0], [90.0], [95.0]]), np.array([[70.0], [80.0], [90.0]])
    >>> saved_labels(90.0, (sizes, ours.repeat(3, axis=1)), (sizes, theirs.repeat(3, axis=1))).value
    0.5
    """
    ratio = sample_ratio(level, ours, theirs, logarithmic=True)
    return Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)


def _ratio_of_few(level: float, ours: Curve, theirs: Curve, *, logarithmic: bool) -> Estimate:
    """`sample_ratio` by the geometric mean over trials; without limit where a trial of ``ours`` never gets there."""
    (our_sizes, our_accuracies), (their_sizes, their_accuracies) = ours, theirs
    logs: list[float] = []
    for ours_T, theirs_T in zip(our_accuracies.T, their_accuracies.T, strict=True):
        needed = samples_at(level, our_sizes, ours_T, logarithmic=logarithmic)
        in_place_of = samples_at(level, their_sizes, theirs_T, logarithmic=logarithmic)
        logs.append(math.log(needed / min(in_place_of, float(their_sizes[-1]))))
    if math.inf not in logs:
        estimate = mean(logs)
        return Estimate(*(math.exp(min(bound, 700.0)) for bound in (estimate.value, estimate.low, estimate.high)))
    if all(map(math.isinf, logs)):
        return Estimate(math.inf, math.inf, math.inf)
    # trials that never get there leave all but the mean curve open
    needed = samples_at(level, our_sizes, our_accuracies.mean(axis=1), logarithmic=logarithmic)
    in_place_of = samples_at(level, their_sizes, their_accuracies.mean(axis=1), logarithmic=logarithmic)
    return Estimate(needed / min(in_place_of, float(their_sizes[-1])), 0.0, math.inf)


def shared_level(*curves: Curve) -> float | None:
    """Returns the highest mean accuracy that every curve reaches; None if one starts above the end of another.

    >>> weak, strong = np.array([[60.0, 62.0], [70.0, 72.0]]), np.array([[65.0, 67.0], [90.0, 92.0]])
    >>> shared_level(([100, 200], weak), ([100, 200], strong))
    71.0
    """
    means = [_checked(curve)[1].mean(axis=1) for curve in curves]
    level = min(float(curve.max()) for curve in means)
    return level if all(float(curve[0]) <= level for curve in means) else None


def _checked(curve: Curve) -> Curve:
    """Returns the curve if its shapes are valid, else raises."""
    sizes, accuracies = curve
    increasing = all(a < b for a, b in pairwise(sizes))
    if accuracies.ndim != 2 or accuracies.shape[0] != len(sizes) or accuracies.shape[1] < 2 or not increasing:
        raise ValueError(
            f"intervals: a curve has sizes {list(sizes)} and values of shape {tuple(accuracies.shape)}; sizes must "
            "increase, and values must have the shape (sizes, trials) with at least 2 trials"
        )
    return curve
