"""A sequential test of the paired differences of two models, which decides when to stop adding trials.

After each trial from `FIRST_LOOK` to `LAST_LOOK` the mean of the differences gets Student's interval at the confidence
1 − `LOOK_ERROR`. Pocock's boundary: one nominal error for all looks, so small that the probability that any of them
excludes 0 while there is no difference is at most 5 %, for each pair of models and normal differences. All intervals
together therefore cover the true difference with 95 %, whenever one stops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import CONFIDENCE, Estimate, difference, student_quantile

__all__ = [
    "FIRST_LOOK",
    "LAST_LOOK",
    "LEVEL_MARGIN",
    "LOOK_ERROR",
    "MANY_TRIALS",
    "is_clear",
    "more_trials",
    "sequential_difference",
    "trials_to_width",
]

Array = NDArray[np.float64]

FIRST_LOOK = 3
LAST_LOOK = 24
LOOK_ERROR = 0.0068
"""Nominal error of one look. All 22 together err in 4.9 % of simulated comparisons without a difference."""
LEVEL_MARGIN = 1.0
"""Points of accuracy: models whose interval lies within this margin of 0 are level, and no trial is added."""
MANY_TRIALS = 100
"""Larger numbers of further trials are not reported."""
_FUTILE_FROM = 6
"""Trials before which the observed difference is too uncertain to stop for futility."""


def sequential_difference(values: Sequence[float] | Array, quantum: float) -> Estimate:
    """Returns the mean difference in points of accuracy, with the interval of the look after these trials.

    ``quantum`` is the change of a value by one test image. Differences that agree exactly would have no spread at
    all, by chance if test images are few: the standard deviation counts as at least that of trials of which one has one
    test image more.

    >>> sequential_difference([2.0, 2.5, 3.0, 2.2, 2.8], quantum=0.1)
    Estimate(value=2.5, low=1.5..., high=3.4...)
    """
    trials = np.asarray(values, dtype=np.float64)
    return difference(trials, 1 - LOOK_ERROR, quantum / trials.size**0.5)


def is_clear(found: Estimate, trials: int, spread: float) -> bool:
    """Whether no trial should be added: one model is ahead, both are level, or hardly any number would tell."""
    if trials < FIRST_LOOK:
        return False
    ahead = found.low > 0 or found.high < 0
    level = max(-found.low, found.high) <= LEVEL_MARGIN
    futile = trials >= _FUTILE_FROM and more_trials(found.value, spread, trials, sequential=True) is None
    return ahead or level or futile


def more_trials(value: float, spread: float, trials: int, *, sequential: bool) -> int | None:
    """Returns how many more trials exclude 0 if mean and standard deviation stay; None: more than `MANY_TRIALS`.

    >>> more_trials(2.0, 3.0, 3, sequential=False), more_trials(0.1, 3.0, 3, sequential=False)
    (9, None)
    """
    return trials_to_width(abs(value), spread, trials, sequential=sequential) if value else None


def trials_to_width(half: float, spread: float, trials: int, *, sequential: bool) -> int | None:
    """Returns how many more trials make half of the interval shorter than ``half``; None: more than `MANY_TRIALS`."""
    confidence = 1 - LOOK_ERROR if sequential else CONFIDENCE
    for more in range(1, MANY_TRIALS + 1):
        count = trials + more
        if student_quantile(count - 1, confidence) * spread / count**0.5 < half:
            return more
    return None
