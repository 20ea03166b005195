"""Runs the papers' experiments and checks their claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from moesaic.checks import check_choice
from moesaic.fidelity import Fidelity
from moesaic.papers.chen2022.paper import PAPER as CHEN2022
from moesaic.papers.chowdhury2023.paper import PAPER as CHOWDHURY2023
from moesaic.papers.engine.cells import Cell, CompletedCell
from moesaic.papers.engine.claims import ClaimCheck, ExperimentResults, Paper, Plan
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Finding
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019.paper import PAPER as WANG2019
from moesaic.report.chart import Chart
from moesaic.training import NoProgress, Progress, ResultCache

__all__ = ["PAPERS", "PRESETS", "ReproduceResult", "reproduce"]

PAPERS: Mapping[str, Paper[Any]] = MappingProxyType({paper.id: paper for paper in (CHOWDHURY2023, CHEN2022, WANG2019)})

PRESETS = ("quick", "full")


@dataclass(frozen=True)
class ReproduceResult:
    """The findings, charts and notes of a run."""

    findings: tuple[Finding, ...]
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]


def reproduce(
    *,
    papers: Sequence[str] | None = None,
    claims: Sequence[str] | None = None,
    preset: str = "quick",
    fidelities: Sequence[Fidelity] = get_args(Fidelity),
    data_dir: Path | None = None,
    out: Path,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> ReproduceResult:
    """Runs the experiments that the claims need and checks the claims.

    Results of finished cells are cached under ``out``/cells and reused, so that an interrupted run resumes.

    Args:
        papers: Ids of the papers to check; None for all.
        claims: Ids of the claims to check; None for all.
        preset: "quick" (minutes on two cores) or "full" (the papers' sizes).
        fidelities: Which forms of the models to run: as printed, as released, our own.
        data_dir: Directory with the datasets that are not part of the package.
        out: Directory of the run.
        device: torch device.
        seed: Base seed of all random numbers.
        progress: Receives progress; None for none.

    Returns:
        The findings in the order of the papers' claims, the charts and the notes.
    """
    check_choice("reproduce", "preset", preset, PRESETS)
    for fidelity in fidelities:
        check_choice("reproduce", "fidelity", fidelity, get_args(Fidelity))
    chosen = [PAPERS[check_choice("reproduce", "paper", paper, PAPERS)] for paper in papers or PAPERS]
    known = [claim.id for paper in chosen for claim in paper.claims]
    wanted = {check_choice("reproduce", "claim", claim, known) for claim in claims or known}
    progress = progress or NoProgress()
    runner = Runner(ResultCache(out / "cells", progress.log), data_dir, device=device, seed=seed, progress=progress)
    paper_runs = [
        _PaperRun(paper, checks, preset, fidelities, runner)
        for paper in chosen
        if (checks := [check for check in paper.checks if check.claim.id in wanted])
    ]
    # all cells of all papers in one call, so that one progress bar covers everything
    completed = runner.run({name: cell for paper_run in paper_runs for name, cell in paper_run.cells.items()})
    findings: list[Finding] = []
    charts: list[Chart] = []
    notes: list[str] = []
    for paper_run in paper_runs:
        experiments = paper_run.experiments(completed)
        findings += [
            _check(check, experiments[fidelity], fidelity, preset)
            for check in paper_run.checks
            for fidelity in fidelities
            if fidelity in check.fidelities
        ]
        places = {check.claim.where for check in paper_run.checks}
        charts += [chart for chart in paper_run.paper.charts(experiments) if chart.where in places]
        notes += paper_run.paper.notes(preset, runner)
    return ReproduceResult(tuple(findings), tuple(charts), tuple(notes))


class _PaperRun:
    """The cells that a paper's checks need: those that can run here, and why the others cannot."""

    def __init__(
        self,
        paper: Paper[Any],
        checks: Sequence[ClaimCheck[Any]],
        preset: str,
        fidelities: Sequence[Fidelity],
        runner: Runner,
    ) -> None:
        self.paper, self.checks, self._runner = paper, checks, runner
        self._plans: dict[Fidelity, Plan[Any]] = {}
        self._missing_requirements: dict[Fidelity, dict[str, str]] = {}
        for fidelity in fidelities:
            plan = paper.plan(preset, fidelity)
            needed: set[str] = set()
            for check in checks:
                if fidelity in check.fidelities and check.can_run(plan, preset):
                    needed |= check.cells(plan).keys()
            reasons = {name: runner.missing_requirement(name, plan[name]) for name in plan if name in needed}
            self._missing_requirements[fidelity] = {
                name: reason for name, reason in reasons.items() if reason is not None
            }
            self._plans[fidelity] = {name: plan[name] for name, reason in reasons.items() if reason is None}

    @property
    def cells(self) -> dict[str, Cell[Any]]:
        """The cells by names that are unique among all papers."""
        return {
            self._name(fidelity, name): cell for fidelity, plan in self._plans.items() for name, cell in plan.items()
        }

    def experiments(self, completed: Mapping[str, CompletedCell[Any]]) -> dict[Fidelity, ExperimentResults[Any]]:
        """Returns the results of the completed cells by fidelity."""
        return {
            fidelity: ExperimentResults(
                plan,
                {name: completed[self._name(fidelity, name)].result for name in plan},
                self._runner,
                {name: completed[self._name(fidelity, name)].seconds for name in plan},
                self._missing_requirements[fidelity],
                fidelity,
            )
            for fidelity, plan in self._plans.items()
        }

    def _name(self, fidelity: Fidelity, name: str) -> str:
        return f"{self.paper.id} {fidelity} {name}"


def _check(check: ClaimCheck[Any], experiment: ExperimentResults[Any], fidelity: Fidelity, preset: str) -> Finding:
    reasons = [
        reason for name, reason in experiment.missing_requirements.items() if name.startswith(check.cell_prefixes)
    ]
    if reasons:
        return check.finding(CheckResult(f"not run here: {reasons[0]}"), fidelity, preset, 0.0)
    if not check.can_run(experiment.plan, preset):
        return check.finding(CheckResult(check.missing), fidelity, preset, 0.0)
    seconds = sum(experiment.seconds[name] for name in check.cells(experiment.plan))
    return check.finding(check.evaluate(experiment), fidelity, preset, round(seconds, 3))
