"""Verdicts from stored raw trials, without training.

Each paper has a file of raw trials in moesaic/papers/trials. A claim whose cells are all in it is checked again by its
rule; the others have no raw trials, and their recorded verdicts rest on summaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, get_args

from moesaic.argument_checks import check_choice
from moesaic.files import json_digest
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.findings import RECORDED_PRESET, Finding
from moesaic.papers.engine.paper import ClaimCheck, ExperimentResults, Paper
from moesaic.papers.engine.raw_trials import StoredCell, Trials, read_trials
from moesaic.papers.engine.runner import Runner
from moesaic.papers.reproduce import PAPERS
from moesaic.training import NoProgress, ResultCache

__all__ = ["Recomputed", "merge_findings", "pack_trials", "recompute", "stored_trials", "without_trials"]


@dataclass(frozen=True)
class Recomputed:
    """Findings from stored trials, and the claims that have none."""

    findings: tuple[Finding, ...]
    without_trials: tuple[tuple[str, str, Fidelity], ...]
    """Paper, claim and fidelity."""


def stored_trials(paper: str) -> Trials:
    """Returns the stored trials of a paper."""
    with as_file(files("moesaic.papers").joinpath("trials", f"{paper}.json.gz")) as path:
        return read_trials(path)


def recompute(papers: Sequence[str] | None = None, claims: Sequence[str] | None = None) -> Recomputed:
    """Checks the claims again from the stored trials.

    Args:
        papers: Ids of the papers; None for all.
        claims: Ids of the claims; None for all.

    >>> recompute(["wang2019"], ["rank-dense"]).findings[0].verdict[:6]
    'partly'
    """
    findings: list[Finding] = []
    missing: list[tuple[str, str, Fidelity]] = []
    for id in papers or PAPERS:
        paper, trials = PAPERS[check_choice("recompute", "paper", id, PAPERS)], stored_trials(id)
        findings += _findings(paper, trials, claims)
        for check, fidelity, cells in _checks(paper, trials):
            if cells is None and (claims is None or check.claim.id in claims):
                missing.append((id, check.claim.id, fidelity))
    return Recomputed(tuple(findings), tuple(missing))


def merge_findings(
    paper: Paper[Any], known: Iterable[Finding], run: Iterable[Finding], trials: Trials
) -> list[Finding]:
    """Returns the findings of a paper after a run, in the order of its claims.

    A finding comes from the trials where they have all of its cells. Another one stays as it was known; what the run
    found counts only where nothing was known.

    Args:
        paper: The paper.
        known: Findings before the run.
        run: Findings of the run.
        trials: Trials that were stored before, merged with those of the run.
    """
    found = {(each.id, each.fidelity): each for each in run}
    found |= {(each.id, each.fidelity): each for each in known}
    found |= {(each.id, each.fidelity): each for each in _findings(paper, trials)}
    order = [(check.claim.id, fidelity) for check in paper.checks for fidelity in check.fidelities]
    place = {key: number for number, key in enumerate(order)}
    return sorted(found.values(), key=lambda each: place.get((each.id, each.fidelity), len(place)))


def _findings(paper: Paper[Any], trials: Trials, claims: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yields the findings of the claims that have all of their cells."""
    experiments = {fidelity: _experiment(paper, trials, fidelity) for fidelity in get_args(Fidelity)}
    for check, fidelity, cells in _checks(paper, trials):
        if cells is not None and (claims is None or check.claim.id in claims):
            experiment = experiments[fidelity]
            seconds = round(sum(experiment.seconds[name] for name in cells), 3)
            yield check.finding(check.evaluate(experiment), fidelity, trials.preset, seconds)


def without_trials(paper: str) -> list[tuple[str, Fidelity]]:
    """Returns the claims of a paper, with the fidelity, that the stored trials do not have all cells of."""
    checks = _checks(PAPERS[paper], stored_trials(paper))
    return [(check.claim.id, fidelity) for check, fidelity, cells in checks if cells is None]


def _checks(paper: Paper[Any], trials: Trials) -> Iterator[tuple[ClaimCheck[Any], Fidelity, Sequence[str] | None]]:
    """Yields each check and fidelity with the names of its cells; None if some are not stored."""
    plans = {fidelity: paper.plan(trials.preset, fidelity) for fidelity in get_args(Fidelity)}
    stored = {fidelity: trials.of(fidelity) for fidelity in get_args(Fidelity)}
    for check in paper.checks:
        for fidelity, plan in plans.items():
            if fidelity in check.fidelities:
                names = list(check.cells(plan))
                whole = check.can_run(plan, trials.preset) and set(names) <= stored[fidelity].keys()
                yield check, fidelity, names if whole else None


def _experiment(paper: Paper[Any], trials: Trials, fidelity: Fidelity) -> ExperimentResults[Any]:
    stored = trials.of(fidelity)
    plan = {name: cell for name, cell in paper.plan(trials.preset, fidelity).items() if name in stored}
    return ExperimentResults(
        plan,
        {name: cell.result(dict(stored[name].result)) for name, cell in plan.items()},
        Runner(ResultCache(Path()), None, device="cpu", seed=0, progress=NoProgress()),
        {name: stored[name].seconds for name in plan},
        fidelity=fidelity,
    )


def pack_trials(
    paper: Paper[Any],
    run: Path,
    data_dir: Path | None,
    device: str = "cpu",
    seed: int = 0,
    preset: str = RECORDED_PRESET,
) -> Trials:
    """Returns the finished cells of a run of `reproduce`, reduced to what claims read.

    Cells that cannot run on the device are left out without reading their data.

    Args:
        paper: The paper.
        run: Directory of the run.
        data_dir: Directory of the datasets with which it ran; specifications have their digests.
        device: Device with which it ran.
        seed: Seed of the run.
        preset: Preset of the run.
    """
    cache = ResultCache(run / "cells")
    runner = Runner(cache, data_dir, device=device, seed=seed, progress=NoProgress())
    cells: list[StoredCell] = []
    for fidelity in get_args(Fidelity):
        for name, cell in paper.plan(preset, fidelity).items():
            if cell.missing_requirement(runner) is not None:
                continue
            spec = cell.spec(runner)
            found = cache.find(name, spec)
            if found is not None:
                digest, seconds = json_digest(spec)[:16], round(found.seconds, 3)
                cells.append(StoredCell(fidelity, name, digest, seconds, paper.compact(name, found.result)))
    return Trials(preset, tuple(cells))
