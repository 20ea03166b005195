"""Claims and the judging of them: an estimate, compared with a limit by a rule that was written before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from moesaic.fidelity import Fidelity
from moesaic.intervals import Estimate
from moesaic.papers.engine.findings import Claim, Finding
from moesaic.papers.engine.runner import Cell, Lab
from moesaic.report.chart import Chart

__all__ = [
    "Judgement",
    "Paper",
    "Plan",
    "Study",
    "Test",
    "ahead_at_all",
    "at_least",
    "at_most",
    "below",
    "positive",
    "reaches",
]

R = TypeVar("R")

NOT_QUICK = "not run here: needs --preset full"

_ZERO_INSIDE = "partly: undecided, 0 is in the interval"


@dataclass(frozen=True)
class Judgement:
    """What was measured for a claim, and what follows from it."""

    verdict: str
    measured: float | None = None
    interval: tuple[float, float] | None = None


def at_least(estimate: Estimate, limit: float, named: str = "") -> Judgement:
    """Holds if the whole interval is at or above the limit, fails if it is all below, partly in between."""
    verdict = "holds" if estimate.low >= limit else "fails" if estimate.high < limit else _undecided(limit, named)
    return Judgement(verdict, estimate.value, estimate.interval)


def positive(estimate: Estimate) -> Judgement:
    """Holds if the whole interval is above 0, fails if it is below, partly in between."""
    if estimate.low > 0:
        verdict = "holds"
    else:
        verdict = "fails" if estimate.high < 0 else _ZERO_INSIDE
    return Judgement(verdict, estimate.value, estimate.interval)


def ahead_at_all(leads: Sequence[Estimate], places: str) -> Judgement:
    """Holds if every lead is clear, fails if there is none at half of the places or more; shown is the smallest."""
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
        verdict = f"partly: clearly ahead at {above} of {len(leads)} {places}"
    return Judgement(verdict, least.value, least.interval)


def at_most(estimate: Estimate, limit: float) -> Judgement:
    """Holds if the whole interval is at or below the limit, fails if it is all above, partly in between."""
    verdict = "holds" if estimate.high <= limit else "fails" if estimate.low > limit else _undecided(limit)
    return Judgement(verdict, estimate.value, estimate.interval)


def below(estimate: Estimate, limit: float) -> Judgement:
    """Holds if the whole interval is below the limit, fails if it is all above, partly in between."""
    verdict = "holds" if estimate.high < limit else "fails" if estimate.low > limit else _undecided(limit)
    return Judgement(verdict, estimate.value, estimate.interval)


def _undecided(limit: float, named: str = "") -> str:
    return f"partly: undecided, the interval lies on both sides of {limit:g}{named}"


def reaches(estimate: Estimate, published: float, margin: float) -> Judgement:
    """`at_least` the published value less a margin."""
    return at_least(estimate, published - margin, f", {published:g} less {margin:g}")


Plan: TypeAlias = Mapping[str, Cell[R]]
"""The cells of a preset and a fidelity, by names such as "fig4/joint/300"."""


@dataclass(frozen=True)
class Study(Generic[R]):
    """The results of a plan, for judges and charts."""

    plan: Plan[R]
    results: Mapping[str, R]
    lab: Lab
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """How long each cell took when it was carried out."""
    obstacles: Mapping[str, str] = field(default_factory=dict[str, str])
    """The cells that could not be carried out here, and why."""
    fidelity: Fidelity = "print"
    """Of the plan."""

    def lines(self, figure: str) -> dict[int, str]:
        """The prefixes of a figure's lines by the number that tells them apart: {4: "fig5/l=4"}."""
        prefixes = {name.rpartition("/")[0] for name in self.plan if name.startswith(f"{figure}/")}
        return dict(sorted((int(prefix.rpartition("=")[2]), prefix) for prefix in prefixes))

    def line(self, prefix: str) -> tuple[list[float], list[R]]:
        """The cells "prefix/x" in the order of x."""
        found = {float(name.removeprefix(f"{prefix}/")): name for name in self.plan if name.startswith(f"{prefix}/")}
        return sorted(found), [self.results[found[x]] for x in sorted(found)]


@dataclass(frozen=True)
class Test(Generic[R]):
    """A claim and the way to decide on it."""

    claim: Claim
    needs: tuple[str, ...]
    """Beginnings of the names of the cells it looks at."""
    judge: Callable[[Study[R]], Judgement]
    fidelities: tuple[Fidelity, ...] = ("print", "released")
    missing: str = NOT_QUICK
    """The verdict where a plan has none of the cells."""
    full_only: bool = False
    """Whether it needs the paper's sizes, because it compares with published numbers that depend on them."""

    __test__ = False  # not pytest's

    def cells(self, plan: Plan[R]) -> dict[str, Cell[R]]:
        """The cells of the plan that it looks at."""
        return {name: cell for name, cell in plan.items() if name.startswith(self.needs)}

    def can_run(self, plan: Plan[R], preset: str = "full") -> bool:
        """Whether the preset's plan has cells for all it needs."""
        return (preset == "full" or not self.full_only) and all(
            any(name.startswith(need) for name in plan) for need in self.needs
        )

    def finding(self, judgement: Judgement, fidelity: Fidelity, preset: str, seconds: float) -> Finding:
        """The claim with its judgement, as claims.json has it."""
        claim = self.claim
        return Finding(
            claim.id,
            claim.paper,
            claim.where,
            claim.statement,
            fidelity,
            preset,
            claim.published,
            judgement.measured,
            judgement.interval,
            claim.rule,
            judgement.verdict,
            seconds,
        )


@dataclass(frozen=True)
class Paper(Generic[R]):
    """A paper's experiments and claims."""

    id: str
    title: str
    about: str
    """The experiments in a few sentences, for someone who has not read it."""
    tests: tuple[Test[R], ...]
    plan: Callable[[str, Fidelity], Plan[R]]
    """Preset and fidelity → the cells there are."""
    charts: Callable[[Mapping[Fidelity, Study[R]]], list[Chart]]
    notes: Callable[[str, Lab], list[str]]
    """What a reader should know about a run with this preset."""
    check_data: Callable[[Path], None]
    """Raises where files in a data folder cannot be used, so that this is found before anything runs."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple(test.claim for test in self.tests)
