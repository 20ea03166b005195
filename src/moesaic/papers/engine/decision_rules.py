"""Rules that turn an estimate with its interval into a verdict: the interval, not the value, decides.

A verdict is "undecided" if the interval lies on both sides of the limit: more trials could move it either way. It is
"partly" if a rule has several parts, of which some are met and others are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.intervals import Estimate, Sample, welch_difference

__all__ = [
    "AHEAD_RULE",
    "MEAN_RULE",
    "CheckResult",
    "above_zero",
    "ahead_everywhere",
    "at_least",
    "at_least_published",
    "at_most",
    "below",
    "same_mean",
]

AHEAD_RULE = (
    "Holds if the interval is above 0 everywhere, fails if it is below 0 somewhere and above 0 nowhere, partly if it "
    "is above 0 at some and below 0 at others, else undecided."
)
"""Text of the rule of `ahead_everywhere`."""

_SAME, _NEAR = 2.0, 1.0

MEAN_RULE = (
    "Welch's 95 % interval of the difference from the published mean, in points, from the published standard deviation "
    "of ten runs and that of our trials. Holds if it contains 0 and lies within "
    f"±{_SAME:g} points, undecided if it contains 0 and is longer, partly if it does not contain 0 and lies within "
    f"±{_NEAR:g} point, else fails. Shown: our mean."
)
"""Text of the rule of `same_mean`."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on a claim and the measurement that it follows from."""

    verdict: str
    """One of `VERDICTS`, optionally with ": " and a reason."""
    measured: float | None = None
    interval: tuple[float, float] | None = None


def at_least(estimate: Estimate, limit: float, limit_text: str = "") -> CheckResult:
    """Holds if the whole interval is at or above the limit, fails if it is all below, undecided in between.

    ``limit_text`` follows the limit in the reason of an undecided verdict.
    """
    verdict = "holds" if estimate.low >= limit else "fails" if estimate.high < limit else _undecided(limit, limit_text)
    return CheckResult(verdict, estimate.value, estimate.interval)


def at_least_published(estimate: Estimate, published: float, margin: float) -> CheckResult:
    """`at_least` with the published value minus a margin as the limit."""
    return at_least(estimate, published - margin, f", {published:g} less {margin:g}")


def at_most(estimate: Estimate, limit: float) -> CheckResult:
    """Holds if the whole interval is at or below the limit, fails if it is all above, undecided in between."""
    verdict = "holds" if estimate.high <= limit else "fails" if estimate.low > limit else _undecided(limit)
    return CheckResult(verdict, estimate.value, estimate.interval)


def below(estimate: Estimate, limit: float) -> CheckResult:
    """Holds if the whole interval is below the limit, fails if it is all above, undecided in between."""
    verdict = "holds" if estimate.high < limit else "fails" if estimate.low > limit else _undecided(limit)
    return CheckResult(verdict, estimate.value, estimate.interval)


def above_zero(estimate: Estimate) -> CheckResult:
    """Holds if the whole interval is above 0, fails if it is below, undecided in between."""
    return ahead_everywhere([estimate])


def ahead_everywhere(leads: Sequence[Estimate], positions: str = "positions") -> CheckResult:
    """Decides by `AHEAD_RULE` whether all leads are positive.

    The result reports the smallest lead. ``positions`` names what the leads were measured at, such as "sizes".

    >>> from moesaic.intervals import Estimate
    >>> ahead_everywhere([Estimate(2.0, 1.0, 3.0), Estimate(1.0, -1.0, 3.0)], "sizes").verdict
    'undecided: clearly ahead at 1 of 2 sizes'
    """
    least = min(leads, key=lambda lead: lead.value)
    above, behind, many = sum(lead.low > 0 for lead in leads), sum(lead.high < 0 for lead in leads), len(leads)
    if above == many:
        verdict = "holds"
    elif many == 1:
        verdict = "fails" if behind else "undecided: 0 is in the interval"
    elif behind:
        counts = f"clearly ahead at {above} of {many} {positions}, clearly behind at {behind}"
        verdict = f"{'partly' if above else 'fails'}: {counts}"
    else:
        verdict = f"undecided: clearly ahead at {above} of {many} {positions}"
    return CheckResult(verdict, least.value, least.interval)


def same_mean(ours: Sample, published: Sample, measured: Estimate) -> CheckResult:
    """Decides by `MEAN_RULE` whether two means are the same; the result reports ``measured``.

    >>> from moesaic.intervals import Estimate, Sample
    >>> same_mean(Sample(97.2, 0.72, 10), Sample(92.99, 2.11, 10), Estimate(97.2, 96.7, 97.7)).verdict
    'fails: 4.21 points [2.66, 5.76] more accurate than published'
    """
    difference = welch_difference(ours, published)
    if difference.low <= 0 <= difference.high:
        narrow = difference.low >= -_SAME and difference.high <= _SAME
        verdict = (
            "holds" if narrow else f"undecided: the difference may be {difference.low:.1f} to {difference.high:.1f}"
        )
    else:
        near = difference.low >= -_NEAR and difference.high <= _NEAR
        low, high = sorted(abs(end) for end in difference.interval)
        verdict = (
            f"{'partly' if near else 'fails'}: {abs(difference.value):.2f} points [{low:.2f}, {high:.2f}] "
            f"{'more' if difference.value > 0 else 'less'} accurate than published"
        )
    return CheckResult(verdict, measured.value, measured.interval)


def _undecided(limit: float, limit_text: str = "") -> str:
    return f"undecided: the interval lies on both sides of {limit:g}{limit_text}"
