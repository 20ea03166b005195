"""Rules that turn an estimate with its interval into a verdict: the interval, not the value, decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.intervals import Estimate

__all__ = ["CheckResult", "above_zero", "ahead_everywhere", "at_least", "at_least_published", "at_most", "below"]

_ZERO_INSIDE = "partly: undecided, 0 is in the interval"


@dataclass(frozen=True)
class CheckResult:
    """The verdict on a claim and the measurement that it follows from."""

    verdict: str
    """ "holds", "partly", "fails" or "not run here", optionally with ": " and a reason."""
    measured: float | None = None
    interval: tuple[float, float] | None = None


def at_least(estimate: Estimate, limit: float, limit_text: str = "") -> CheckResult:
    """Holds if the whole interval is at or above the limit, fails if it is all below, partly in between.

    ``limit_text`` follows the limit in the reason of an undecided verdict.
    """
    verdict = "holds" if estimate.low >= limit else "fails" if estimate.high < limit else _undecided(limit, limit_text)
    return CheckResult(verdict, estimate.value, estimate.interval)


def at_least_published(estimate: Estimate, published: float, margin: float) -> CheckResult:
    """`at_least` with the published value minus a margin as the limit."""
    return at_least(estimate, published - margin, f", {published:g} less {margin:g}")


def at_most(estimate: Estimate, limit: float) -> CheckResult:
    """Holds if the whole interval is at or below the limit, fails if it is all above, partly in between."""
    verdict = "holds" if estimate.high <= limit else "fails" if estimate.low > limit else _undecided(limit)
    return CheckResult(verdict, estimate.value, estimate.interval)


def below(estimate: Estimate, limit: float) -> CheckResult:
    """Holds if the whole interval is below the limit, fails if it is all above, partly in between."""
    verdict = "holds" if estimate.high < limit else "fails" if estimate.low > limit else _undecided(limit)
    return CheckResult(verdict, estimate.value, estimate.interval)


def above_zero(estimate: Estimate) -> CheckResult:
    """Holds if the whole interval is above 0, fails if it is below, partly in between."""
    if estimate.low > 0:
        verdict = "holds"
    else:
        verdict = "fails" if estimate.high < 0 else _ZERO_INSIDE
    return CheckResult(verdict, estimate.value, estimate.interval)


def ahead_everywhere(leads: Sequence[Estimate], positions: str) -> CheckResult:
    """Holds if every lead's interval is above 0, fails if half of the leads or more are not positive.

    The result reports the smallest lead. ``positions`` names what the leads were measured at, such as "sizes".
    """
    least = min(leads, key=lambda lead: lead.value)
    above = sum(lead.low > 0 for lead in leads)
    behind = sum(lead.value <= 0 for lead in leads)
    if above == len(leads):
        verdict = "holds"
    elif 2 * behind >= len(leads):
        verdict = "fails"
    elif len(leads) == 1:
        verdict = _ZERO_INSIDE
    else:
        verdict = f"partly: clearly ahead at {above} of {len(leads)} {positions}"
    return CheckResult(verdict, least.value, least.interval)


def _undecided(limit: float, limit_text: str = "") -> str:
    return f"partly: undecided, the interval lies on both sides of {limit:g}{limit_text}"
