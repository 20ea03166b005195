"""How a paper is checked: its experiments as plans of cells, and a check for each of its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.cells import Cell
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Cause, Claim, Finding, GlossaryEntry, Source
from moesaic.papers.engine.runner import Runner
from moesaic.report.chart import Chart

__all__ = ["NEEDS_SHORT_PRESET", "ClaimCheck", "ExperimentResults", "Paper", "Plan"]

R = TypeVar("R")

NEEDS_SHORT_PRESET = "not run here: needs --preset short"

Plan: TypeAlias = Mapping[str, Cell[R]]
"""The cells of a preset and a fidelity, by names such as "fig4/joint/300"."""


@dataclass(frozen=True)
class ExperimentResults(Generic[R]):
    """The results of a plan, from which claims are checked and charts are drawn."""

    plan: Plan[R]
    results: Mapping[str, R]
    """Result of each cell, by its name in the plan."""
    runner: Runner
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Duration of each cell when it ran."""
    missing_requirements: Mapping[str, str] = field(default_factory=dict[str, str])
    """The cells that could not run on this machine, with the reason."""
    fidelity: Fidelity = "print"
    """Fidelity of the plan."""

    def has_results(self, *prefixes: str) -> bool:
        """Whether each prefix is the name of a cell with a result, or such a name without the trial at its end."""
        return all(any(name == prefix or name.startswith(f"{prefix}/") for name in self.results) for prefix in prefixes)

    def series_prefixes(self, figure: str) -> dict[int, str]:
        """Returns the name prefixes of a figure's series by the number at their end: {4: "fig5/l=4"}."""
        prefixes = {name.rpartition("/")[0] for name in self.plan if name.startswith(f"{figure}/")}
        return dict(sorted((int(prefix.rpartition("=")[2]), prefix) for prefix in prefixes))

    def series(self, prefix: str) -> tuple[list[float], list[R]]:
        """Returns the x values and the results of the cells named "prefix/x", ordered by x."""
        found = {float(name.removeprefix(f"{prefix}/")): name for name in self.plan if name.startswith(f"{prefix}/")}
        return sorted(found), [self.results[found[x]] for x in sorted(found)]


@dataclass(frozen=True)
class ClaimCheck(Generic[R]):
    """A claim and the function that decides whether it holds."""

    claim: Claim
    cell_prefixes: tuple[str, ...]
    """Name prefixes of the cells that ``evaluate`` reads."""
    evaluate: Callable[[ExperimentResults[R]], CheckResult]
    fidelities: tuple[Fidelity, ...] = ("print", "released")
    missing: str = NEEDS_SHORT_PRESET
    """The verdict if the plan lacks the cells."""
    not_quick: bool = False
    """Whether the check needs more than the quick sizes because published numbers depend on them."""
    chart_prefixes: tuple[str, ...] = ()
    """Name prefixes of cells that run with the claim for a chart alone; the verdict does not wait for them."""

    def cells(self, plan: Plan[R]) -> dict[str, Cell[R]]:
        """Returns the cells of the plan that the check reads."""
        return {name: cell for name, cell in plan.items() if name.startswith(self.cell_prefixes)}

    def chart_cells(self, plan: Plan[R]) -> dict[str, Cell[R]]:
        """Returns the cells of the plan that run with the check for a chart."""
        return {name: cell for name, cell in plan.items() if name.startswith(self.chart_prefixes)}

    def can_run(self, plan: Plan[R], preset: str = "short") -> bool:
        """Whether the preset's plan has cells for every prefix."""
        return (preset != "quick" or not self.not_quick) and all(
            any(name.startswith(prefix) for name in plan) for prefix in self.cell_prefixes
        )

    def finding(self, result: CheckResult, fidelity: Fidelity, preset: str, seconds: float) -> Finding:
        """Returns the claim with the result of its check, as an entry of claims.json."""
        claim = self.claim
        return Finding(
            claim.id,
            claim.paper,
            claim.where,
            claim.statement,
            fidelity,
            preset,
            claim.published,
            result.measured,
            result.interval,
            claim.rule,
            result.verdict,
            seconds,
        )


@dataclass(frozen=True)
class Paper(Generic[R]):
    """A paper's experiments, claims and figures."""

    id: str
    title: str
    about: str
    """Summary of the experiments for readers who do not know the paper."""
    checks: tuple[ClaimCheck[R], ...]
    plan: Callable[[str, Fidelity], Plan[R]]
    """Maps preset and fidelity to the cells to run."""
    charts: Callable[[Mapping[Fidelity, ExperimentResults[R]]], list[Chart]]
    notes: Callable[[str, Runner], list[str]]
    """Maps preset and runner to remarks for the report."""
    check_data: Callable[[Path | None], None]
    """Raises if a dataset in the data directory is damaged or a package is missing, before any cell runs."""
    glossary: tuple[GlossaryEntry, ...] = ()
    """The paper's own definitions of terms, for the report."""
    headline: str = ""
    """Id of the main claim: its cells run first."""
    letters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The paper's letters of parameters of its cells, by which variants may name them: {"k": "experts"}."""
    compact: Callable[[str, Mapping[str, Any]], Mapping[str, Any]] = lambda name, result: result
    """Reduces the stored result of a cell to what claims read, for the file of raw trials."""
    causes: tuple[Cause, ...] = ()
    """Why claims do not hold in the recorded run."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple(check.claim for check in self.checks)

    @property
    def source(self) -> Source:
        """The paper as reports introduce it."""
        return Source(self.id, self.title, self.about, self.glossary, self.headline, self.causes)
