"""Re-run what papers claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from moesaic.checks import one_of
from moesaic.fidelity import Fidelity
from moesaic.papers.chen2022.paper import PAPER as CHEN2022
from moesaic.papers.chowdhury2023.paper import PAPER as CHOWDHURY2023
from moesaic.papers.engine.claims import Judgement, Paper, Plan, Study, Test
from moesaic.papers.engine.findings import Finding
from moesaic.papers.engine.runner import Cell, Done, Lab
from moesaic.papers.wang2019.paper import PAPER as WANG2019
from moesaic.report.chart import Chart
from moesaic.training import NoProgress, Progress, ResultCache

__all__ = ["PAPERS", "Outcome", "reproduce"]

PAPERS: Mapping[str, Paper[Any]] = MappingProxyType({paper.id: paper for paper in (CHOWDHURY2023, CHEN2022, WANG2019)})

PRESETS = ("quick", "full")


@dataclass(frozen=True)
class Outcome:
    """What a run found."""

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
) -> Outcome:
    """Carry out the experiments that the claims need, and judge them.

    Finished cells are kept under ``out``/cells and never run again, so an interrupted call continues
    where it stopped. Claims and papers are given by id; None is all of them.
    """
    one_of("reproduce", "preset", preset, PRESETS)
    for fidelity in fidelities:
        one_of("reproduce", "fidelity", fidelity, get_args(Fidelity))
    chosen = [PAPERS[one_of("reproduce", "paper", paper, PAPERS)] for paper in papers or PAPERS]
    known = [claim.id for paper in chosen for claim in paper.claims]
    wanted = {one_of("reproduce", "claim", claim, known) for claim in claims or known}
    progress = progress or NoProgress()
    lab = Lab(ResultCache(out / "cells", progress.log), data_dir, device=device, seed=seed, progress=progress)
    works = [
        _Work(paper, tests, preset, fidelities, lab)
        for paper in chosen
        if (tests := [test for test in paper.tests if test.claim.id in wanted])
    ]
    # all cells of all papers in one go, so that one bar tells how far everything is
    done = lab.carry_out({name: cell for work in works for name, cell in work.cells.items()})
    findings: list[Finding] = []
    charts: list[Chart] = []
    notes: list[str] = []
    for work in works:
        studies = work.studies(done)
        findings += [
            _judged(test, studies[fidelity], fidelity, preset)
            for test in work.tests
            for fidelity in fidelities
            if fidelity in test.fidelities
        ]
        places = {test.claim.where for test in work.tests}
        charts += [chart for chart in work.paper.charts(studies) if chart.where in places]
        notes += work.paper.notes(preset, lab)
    return Outcome(tuple(findings), tuple(charts), tuple(notes))


class _Work:
    """What a paper's tests need of it: cells that can be carried out here, and what is in the way of others."""

    def __init__(
        self, paper: Paper[Any], tests: Sequence[Test[Any]], preset: str, fidelities: Sequence[Fidelity], lab: Lab
    ) -> None:
        self.paper, self.tests, self._lab = paper, tests, lab
        self._plans: dict[Fidelity, Plan[Any]] = {}
        self._obstacles: dict[Fidelity, dict[str, str]] = {}
        for fidelity in fidelities:
            plan = paper.plan(preset, fidelity)
            needed: set[str] = set()
            for test in tests:
                if fidelity in test.fidelities and test.can_run(plan, preset):
                    needed |= test.cells(plan).keys()
            reasons = {name: lab.obstacle(name, plan[name]) for name in plan if name in needed}
            self._obstacles[fidelity] = {name: reason for name, reason in reasons.items() if reason is not None}
            self._plans[fidelity] = {name: plan[name] for name, reason in reasons.items() if reason is None}

    @property
    def cells(self) -> dict[str, Cell[Any]]:
        """By names that no other paper has."""
        return {
            self._name(fidelity, name): cell for fidelity, plan in self._plans.items() for name, cell in plan.items()
        }

    def studies(self, done: Mapping[str, Done[Any]]) -> dict[Fidelity, Study[Any]]:
        """By fidelity, once the cells are carried out."""
        return {
            fidelity: Study(
                plan,
                {name: done[self._name(fidelity, name)].result for name in plan},
                self._lab,
                {name: done[self._name(fidelity, name)].seconds for name in plan},
                self._obstacles[fidelity],
                fidelity,
            )
            for fidelity, plan in self._plans.items()
        }

    def _name(self, fidelity: Fidelity, name: str) -> str:
        return f"{self.paper.id} {fidelity} {name}"


def _judged(test: Test[Any], study: Study[Any], fidelity: Fidelity, preset: str) -> Finding:
    reasons = [reason for name, reason in study.obstacles.items() if name.startswith(test.needs)]
    if reasons:
        return test.finding(Judgement(f"not run here: {reasons[0]}"), fidelity, preset, 0.0)
    if not test.can_run(study.plan, preset):
        return test.finding(Judgement(test.missing), fidelity, preset, 0.0)
    seconds = sum(study.seconds[name] for name in test.cells(study.plan))
    return test.finding(test.judge(study), fidelity, preset, round(seconds, 3))
