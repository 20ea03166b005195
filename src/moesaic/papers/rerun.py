"""Re-run what papers claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from moesaic.checks import one_of
from moesaic.ledger import Chart, Fidelity, Finding
from moesaic.papers import chowdhury2023
from moesaic.papers.claims import Judgement, Paper, Plan, Study, Test
from moesaic.papers.lab import Lab
from moesaic.training import Cells, Progress, Silent

__all__ = ["PAPERS", "Outcome", "reproduce"]

R = TypeVar("R")

PAPERS: Mapping[str, Paper[Any]] = MappingProxyType({chowdhury2023.PAPER.id: chowdhury2023.PAPER})

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
    progress = progress or Silent()
    lab = Lab(Cells(out / "cells", progress.log), data_dir, device=device, seed=seed, progress=progress)
    findings: list[Finding] = []
    charts: list[Chart] = []
    notes: list[str] = []
    for paper in chosen:
        tests = [test for test in paper.tests if test.claim.id in wanted]
        if not tests:
            continue
        studies = _studies(paper, tests, preset, fidelities, lab)
        findings += [
            _judged(test, studies[fidelity], fidelity, preset)
            for test in tests
            for fidelity in fidelities
            if fidelity in test.fidelities
        ]
        places = {test.claim.where for test in tests}
        charts += [chart for chart in paper.charts(studies) if chart.where in places]
        notes += paper.notes(preset, lab)
    return Outcome(tuple(findings), tuple(charts), tuple(notes))


def _studies(
    paper: Paper[R], tests: Sequence[Test[R]], preset: str, fidelities: Sequence[Fidelity], lab: Lab
) -> dict[Fidelity, Study[R]]:
    """All cells that the tests need, carried out in one go, so that one bar tells how far everything is."""
    plans: dict[Fidelity, Plan[R]] = {}
    obstacles: dict[Fidelity, dict[str, str]] = {}
    for fidelity in fidelities:
        plan = paper.plan(preset, fidelity)
        needed: set[str] = set()
        for test in tests:
            if fidelity in test.fidelities and test.can_run(plan):
                needed |= test.cells(plan).keys()
        reasons = {name: lab.obstacle(f"{fidelity} {name}", plan[name]) for name in plan if name in needed}
        obstacles[fidelity] = {name: reason for name, reason in reasons.items() if reason is not None}
        plans[fidelity] = {name: plan[name] for name, reason in reasons.items() if reason is None}
    everything = {f"{fidelity} {name}": cell for fidelity, plan in plans.items() for name, cell in plan.items()}
    done = lab.carry_out(everything)
    return {
        fidelity: Study(
            plan,
            {name: done[f"{fidelity} {name}"].result for name in plan},
            lab,
            {name: done[f"{fidelity} {name}"].seconds for name in plan},
            obstacles[fidelity],
            fidelity,
        )
        for fidelity, plan in plans.items()
    }


def _judged(test: Test[R], study: Study[R], fidelity: Fidelity, preset: str) -> Finding:
    reasons = [reason for name, reason in study.obstacles.items() if name.startswith(test.needs)]
    if reasons:
        return test.finding(Judgement(f"not run here: {reasons[0]}"), fidelity, preset, 0.0)
    if not test.can_run(study.plan):
        return test.finding(Judgement(test.missing), fidelity, preset, 0.0)
    seconds = sum(study.seconds[name] for name in test.cells(study.plan))
    return test.finding(test.judge(study), fidelity, preset, round(seconds, 3))
