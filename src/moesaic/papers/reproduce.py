"""Runs the papers' experiments and checks their claims."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from moesaic.argument_checks import check_choice
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.paper import PAPER as CHEN2022
from moesaic.papers.chowdhury2023.paper import PAPER as CHOWDHURY2023
from moesaic.papers.engine.cells import Cell, CompletedCell
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Claim, Finding
from moesaic.papers.engine.paper import ClaimCheck, ExperimentResults, Paper, Plan
from moesaic.papers.engine.run_order import CellGroup, run_order
from moesaic.papers.engine.runner import Runner
from moesaic.papers.engine.time_budget import TimeBudget
from moesaic.papers.engine.variant_findings import VariantFinding, variant_finding
from moesaic.papers.engine.variants import (
    Experiment,
    Variant,
    VariedCell,
    cell_parameters,
    check_known,
    check_values,
    make_variants,
    parse_variation,
)
from moesaic.papers.token_routing.paper import PAPER as TOKEN_ROUTING
from moesaic.papers.wang2019.paper import PAPER as WANG2019
from moesaic.report.chart import Chart
from moesaic.training import NoProgress, Progress, ResultCache
from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan
from moesaic.training.result_cache import cell_digest

__all__ = ["FULL_ORDER", "PAPERS", "PRESETS", "ReproduceResult", "check_variations", "claim_parameters", "reproduce"]

PAPERS: Mapping[str, Paper[Any]] = MappingProxyType(
    {paper.id: paper for paper in (CHOWDHURY2023, CHEN2022, WANG2019, TOKEN_ROUTING)}
)
"""By id: the papers, and ``token_routing``, claims of our own."""

PRESETS = ("quick", "short", "full")


@dataclass(frozen=True)
class ReproduceResult:
    """The findings, charts and notes of a run."""

    findings: tuple[Finding, ...]
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]
    variants: tuple[VariantFinding, ...] = ()
    """Claims measured with other parameters than the paper's, next to which ``findings`` stand."""


def reproduce(
    *,
    papers: Sequence[str] | None = None,
    claims: Sequence[str | tuple[str, Fidelity]] | None = None,
    preset: str = "quick",
    fidelities: Sequence[Fidelity] = get_args(Fidelity),
    data_dir: Path | None = None,
    out: Path,
    device: str = "cpu",
    seed: int = 0,
    vary: Sequence[str] = (),
    progress: Progress | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    budget: TimeBudget | None = None,
) -> ReproduceResult:
    """Runs the experiments that the claims need and checks the claims.

    Results of finished cells are cached under ``out``/cells and reused, so that an interrupted run resumes.

    Args:
        papers: Ids of the papers to check; None for all.
        claims: Ids of the claims to check, or pairs of an id and the only form to check; None for all.
        preset: "quick" (minutes on two cores), "short" (the papers' sizes, but images and sentences for fewer epochs,
            trials and samples) or "full" (the papers' own sizes, as far as data are at hand).
        fidelities: Which forms of the models to run: as printed, as released, our own.
        data_dir: Directory with the datasets that are not part of the package.
        out: Directory of the run.
        device: torch device.
        seed: Base seed of all random numbers.
        vary: Parameters to run with other values, too, such as ``"k=4,8,16"`` (see `moesaic.papers.engine.variants`).
            What they measure are variants beside the findings, never the paper's verdict.
        progress: Receives progress; None for none.
        on_finding: Is called with each verdict as soon as the cells that it needs are complete. Cells run in an order
            that gives the verdicts on main claims first, then those that need the least work; with ``"full"`` in that
            of `FULL_ORDER`.
        budget: Time that the run may take. Cells that do not fit are left for the next run, and the claims that need
            them are not run here, with the time that they would take.

    Returns:
        The findings in the order of the papers' claims, the charts, the notes and the variants.
    """
    check_choice("reproduce", "preset", preset, PRESETS)
    for fidelity in fidelities:
        check_choice("reproduce", "fidelity", fidelity, get_args(Fidelity))
    chosen = [PAPERS[check_choice("reproduce", "paper", paper, PAPERS)] for paper in papers or PAPERS]
    wanted = _wanted(chosen, claims, fidelities)
    if vary:
        check_variations(vary, papers=papers, claims=[*wanted], preset=preset, fidelities=fidelities)
    progress = progress or NoProgress()
    runner = Runner(ResultCache(out / "cells", progress.log), data_dir, device=device, seed=seed, progress=progress)
    paper_runs = [
        _PaperRun(paper, checks, preset, fidelities, runner)
        for paper in chosen
        if (checks := _restricted(paper.checks, wanted))
    ]
    # all cells of all papers and variants in one call, so that one progress bar covers everything
    varied = [each for paper_run in paper_runs for each in paper_run.variants(vary)]
    cells = {name: cell for part in (*paper_runs, *varied) for name, cell in part.cells.items()}
    asked: list[Any] = [[paper.id for paper in chosen], sorted(wanted), preset, list(fidelities), list(vary), seed]
    if any(forms != set(fidelities) for forms in wanted.values()):
        asked.append(sorted((id, *sorted(forms)) for id, forms in wanted.items()))
    title = f"reproduce {', '.join(paper.id for paper in chosen)}, {preset}"
    planned = [PlannedCell(name, cell_digest(cell.spec(runner))) for name, cell in cells.items()]
    planned += [each for part in paper_runs for each in part.cells_for_others()]
    add_to_plan(out, asked, SweepPlan(title, tuple(planned)))
    completed = _run(runner, paper_runs, cells, preset, on_finding, budget)
    left = {name: cell.steps for name, cell in cells.items() if name not in completed}
    if budget is not None:
        for part in (*paper_runs, *varied):
            part.leave_out(left, f"did not fit in the time limit of {budget.seconds / 60:g} min")
    findings: list[Finding] = []
    charts: list[Chart] = []
    notes: list[str] = []
    for paper_run in paper_runs:
        experiments = paper_run.experiments(completed)
        findings += paper_run.findings(experiments)
        places = {check.claim.where for check in paper_run.checks}
        charts += [chart for chart in paper_run.paper.charts(experiments) if chart.where in places]
        notes += paper_run.paper.notes(preset, runner)
    if budget is not None and left:
        notes.insert(0, f"{budget.describe(left)}. The same command goes on with them.")
    return ReproduceResult(
        tuple(findings), tuple(charts), tuple(notes), tuple(each.finding(completed, findings) for each in varied)
    )


def _wanted(
    papers: Sequence[Paper[Any]], claims: Sequence[str | tuple[str, Fidelity]] | None, fidelities: Sequence[Fidelity]
) -> dict[str, set[Fidelity]]:
    """The fidelities in which to check each claim, by its id."""
    known = [claim.id for paper in papers for claim in paper.claims]
    wanted: dict[str, set[Fidelity]] = {}
    for each in known if claims is None else claims:
        id, forms = (each, fidelities) if isinstance(each, str) else (each[0], each[1:])
        wanted.setdefault(check_choice("reproduce", "claim", id, known), set()).update(forms)
    return wanted


def _run(
    runner: Runner,
    paper_runs: Sequence[_PaperRun],
    cells: Mapping[str, Cell[Any]],
    preset: str,
    on_finding: Callable[[Finding], None] | None,
    budget: TimeBudget | None,
) -> dict[str, CompletedCell[Any]]:
    """Runs the cells, those first of which verdicts are due early, and reports verdicts as soon as they are known."""
    pending = [each for paper_run in paper_runs for each in paper_run.pending()]
    order = run_order([CellGroup(each.cells, each.headline, _rank(each, preset)) for each in pending])
    early = _EarlyFindings(pending, on_finding)
    completed = runner.run({name: cells[name] for name in dict.fromkeys([*order, *cells])}, early.add, budget)
    early.end()
    return completed


FULL_ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("chowdhury2023", ("fig10-", "fig11-", "fig12-", "table2-")),
    ("chowdhury2023", ("fig16-",)),
    ("chowdhury2023", ("fig14-", "fig15-")),
    ("chen2022", ("table2-released-resnet18",)),
    ("chen2022", ("table2-cifar10-cnn",)),
    ("wang2019", ("equal-cost-",)),
)
"""Paper and beginnings of ids of the claims whose cells run first with the preset full, one group after the other."""
_FULL_LAST = "mobilenetv2"
"""Part of the ids of claims whose cells run last with the preset full: they take the longest."""


def _rank(pending: _Pending, preset: str) -> int:
    """The place of a verdict's cells in `FULL_ORDER`."""
    if preset != "full":
        return 0
    id, paper = pending.check.claim.id, pending.paper_run.paper.id
    if _FULL_LAST in id:
        return len(FULL_ORDER) + 1
    places = (place for place, (of, starts) in enumerate(FULL_ORDER) if of == paper and id.startswith(starts))
    return next(places, len(FULL_ORDER))


def _restricted(checks: Sequence[ClaimCheck[Any]], wanted: Mapping[str, Collection[Fidelity]]) -> list[ClaimCheck[Any]]:
    """The checks of some claims, in some of their forms."""
    return [
        replace(check, fidelities=tuple(each for each in check.fidelities if each in wanted[check.claim.id]))
        for check in checks
        if check.claim.id in wanted
    ]


def claim_parameters(paper: Paper[Any], claims: Sequence[Claim]) -> dict[str, str]:
    """Returns the parameters of each claim's experiments with their values, as text by the claim's id."""
    by_letter = {name: letter for letter, name in paper.letters.items()}
    plans = {fidelity: paper.plan("short", fidelity) for fidelity in get_args(Fidelity)}
    listed: dict[str, str] = {}
    for check in paper.checks:
        if check.claim in claims:
            cells = [cell for fidelity in check.fidelities for cell in check.cells(plans[fidelity]).values()]
            listed[check.claim.id] = ", ".join(
                f"{name}{f' ({by_letter[name]})' if name in by_letter else ''}={','.join(values)}"
                for name, values in cell_parameters(cells).items()
            )
    return {id: text for id, text in listed.items() if text}


def check_variations(
    vary: Sequence[str],
    *,
    papers: Sequence[str] | None,
    claims: Sequence[str] | None,
    preset: str,
    fidelities: Sequence[Fidelity],
) -> None:
    """Raises unless each parameter of ``vary`` is one of the claims' experiments, and its values can be tried."""
    variations = [parse_variation(text) for text in vary]
    checks = [
        (PAPERS[paper], check)
        for paper in papers or PAPERS
        for check in PAPERS[paper].checks
        if claims is None or check.claim.id in claims
    ]
    known: dict[str, Experiment] = {}
    runnable: list[Experiment] = []
    for paper, check in checks:
        plans = {(of, fidelity): paper.plan(of, fidelity) for of in PRESETS for fidelity in check.fidelities}
        everything = {f"{key} {name}": cell for key, plan in plans.items() for name, cell in check.cells(plan).items()}
        known[check.claim.id] = (everything, paper.letters)
        for fidelity in fidelities:
            plan = plans.get((preset, fidelity))
            if plan is not None and check.can_run(plan, preset):
                runnable.append((check.cells(plan), paper.letters))
    check_known(variations, known)
    for each in variations:
        if not any(letters.get(each.name, each.name) in cell_parameters(cells.values()) for cells, letters in runnable):
            other = next(of for of in PRESETS if of != preset)
            raise ValueError(
                f"--vary {each}: the experiments that have it do not run with --preset {preset} and this --fidelity; "
                f"use --preset {other} or another --fidelity"
            )
    check_values(variations, runnable)


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
        self.paper, self.checks, self._preset, self._runner = paper, checks, preset, runner
        self._whole_plans: dict[Fidelity, Plan[Any]] = {}
        self._plans: dict[Fidelity, Plan[Any]] = {}
        self._missing_requirements: dict[Fidelity, dict[str, str]] = {}
        for fidelity in fidelities:
            plan = self._whole_plans[fidelity] = paper.plan(preset, fidelity)
            needed: set[str] = set()
            for check in checks:
                if fidelity in check.fidelities and check.can_run(plan, preset):
                    needed |= check.cells(plan).keys() | check.chart_cells(plan).keys()
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

    def leave_out(self, left: Collection[str], reason: str) -> None:
        """Takes the cells of these names, which did not run, out of the plans."""
        for fidelity, plan in self._plans.items():
            missing = [name for name in plan if self._name(fidelity, name) in left]
            self._plans[fidelity] = {name: cell for name, cell in plan.items() if name not in missing}
            self._missing_requirements[fidelity] |= dict.fromkeys(missing, reason)

    def cells_for_others(self) -> Iterator[PlannedCell]:
        """Yields the cells that this machine cannot run."""
        for fidelity, missing in self._missing_requirements.items():
            for name, reason in missing.items():
                spec = self._whole_plans[fidelity][name].spec(self._runner)
                yield PlannedCell(self._name(fidelity, name), cell_digest(spec), reason)

    def experiments(self, completed: Mapping[str, CompletedCell[Any]]) -> dict[Fidelity, ExperimentResults[Any]]:
        """Returns the results of the completed cells by fidelity."""
        return {fidelity: self._experiment(fidelity, plan, completed) for fidelity, plan in self._plans.items()}

    def findings(self, experiments: Mapping[Fidelity, ExperimentResults[Any]]) -> list[Finding]:
        """Returns the verdicts on all claims, in their order."""
        return [
            _check(check, experiment, fidelity, self._preset)
            for check in self.checks
            for fidelity, experiment in experiments.items()
            if fidelity in check.fidelities
        ]

    def pending(self) -> list[_Pending]:
        """Returns the verdicts that cells of this run decide."""
        found: list[_Pending] = []
        for check in self.checks:
            for fidelity, plan in self._plans.items():
                cells = check.cells(self._whole_plans[fidelity])
                runs = fidelity in check.fidelities and check.can_run(self._whole_plans[fidelity], self._preset)
                if runs and cells.keys() <= plan.keys():
                    named = {self._name(fidelity, name): cell for name, cell in cells.items()}
                    headline = check.claim.id == self.paper.headline
                    found.append(_Pending(self, check, fidelity, named, headline))
        return found

    def finding(
        self, check: ClaimCheck[Any], fidelity: Fidelity, completed: Mapping[str, CompletedCell[Any]]
    ) -> Finding:
        """Returns the verdict on a claim from its own cells, while others may be missing."""
        experiment = self._experiment(fidelity, check.cells(self._plans[fidelity]), completed)
        return _check(check, experiment, fidelity, self._preset)

    def variants(self, vary: Sequence[str]) -> list[_VariantRun]:
        """Returns the variants of each check that can run."""
        variations = [parse_variation(text) for text in vary]
        return [
            _VariantRun(self.paper, check, fidelity, variant, self._runner)
            for check in self.checks
            for fidelity, plan in self._whole_plans.items()
            if variations and fidelity in check.fidelities and check.can_run(plan, self._preset)
            for variant in make_variants(check.cells(plan), variations, self.paper.letters)
        ]

    def _experiment(
        self, fidelity: Fidelity, names: Iterable[str], completed: Mapping[str, CompletedCell[Any]]
    ) -> ExperimentResults[Any]:
        """The results of some cells of a fidelity."""
        own = {name: completed[self._name(fidelity, name)] for name in names}
        return _results(self._plans[fidelity], own, self._runner, self._missing_requirements[fidelity], fidelity)

    def _name(self, fidelity: Fidelity, name: str) -> str:
        return f"{self.paper.id} {fidelity} {name}"


@dataclass(frozen=True)
class _Pending:
    """A verdict that waits for its cells."""

    paper_run: _PaperRun
    check: ClaimCheck[Any]
    fidelity: Fidelity
    cells: Mapping[str, Cell[Any]]
    """By names that are unique among all papers."""
    headline: bool


class _EarlyFindings:
    """Reports findings while other cells still run."""

    def __init__(self, pending: Sequence[_Pending], on_finding: Callable[[Finding], None] | None) -> None:
        self._pending = sorted(pending, key=lambda each: not each.headline)
        self._on_finding = on_finding
        self._completed: dict[str, CompletedCell[Any]] = {}

    def add(self, name: str, cell: CompletedCell[Any]) -> None:
        """Reports the verdicts for which this was the last cell."""
        self._completed[name] = cell
        self._report(lambda each: name in each.cells)

    def end(self) -> None:
        """Reports the verdicts that need no cells."""
        self._report(lambda each: True)

    def _report(self, may_be_ready: Callable[[_Pending], bool]) -> None:
        if self._on_finding is None:
            return
        waiting: list[_Pending] = []
        for each in self._pending:
            if may_be_ready(each) and each.cells.keys() <= self._completed.keys():
                self._on_finding(each.paper_run.finding(each.check, each.fidelity, self._completed))
            else:
                waiting.append(each)
        self._pending = waiting


class _VariantRun:
    """The cells of a variant of a claim's experiment: those that can run here, and why the others cannot."""

    def __init__(
        self, paper: Paper[Any], check: ClaimCheck[Any], fidelity: Fidelity, variant: Variant, runner: Runner
    ) -> None:
        self._check, self._variant, self._runner = check, variant, runner
        self._fidelity: Fidelity = fidelity
        self._paper = paper.id
        self._names = {
            name: f"{paper.id} {fidelity} {f'{variant.label} ' if name in variant.changed else ''}{name}"
            for name in variant.cells
        }
        reasons = {name: runner.missing_requirement(name, cell) for name, cell in variant.cells.items()}
        self._missing = {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def cells(self) -> dict[str, Cell[Any]]:
        """The cells by name; the paper's own are under the name that they have there."""
        return {
            self._names[name]: VariedCell(cell, self._variant.label) if name in self._variant.changed else cell
            for name, cell in self._variant.cells.items()
            if name not in self._missing
        }

    def leave_out(self, left: Collection[str], reason: str) -> None:
        """Notes the cells of these names, which did not run."""
        self._missing |= {name: reason for name, known in self._names.items() if known in left}

    def finding(self, completed: Mapping[str, CompletedCell[Any]], findings: Sequence[Finding]) -> VariantFinding:
        """Returns what the variant measured, beside the finding in the paper's own setting."""
        claim = self._check.claim
        own = next(
            each for each in findings if (each.paper, each.id, each.fidelity) == (self._paper, claim.id, self._fidelity)
        )
        cells = {name: completed[self._names[name]] for name in self._variant.cells if name not in self._missing}
        experiment = _results(self._variant.cells, cells, self._runner, self._missing, self._fidelity)
        return variant_finding(self._check, self._variant, experiment, own)


def _results(
    plan: Plan[Any],
    completed: Mapping[str, CompletedCell[Any]],
    runner: Runner,
    missing: Mapping[str, str],
    fidelity: Fidelity,
) -> ExperimentResults[Any]:
    results = {name: cell.result for name, cell in completed.items()}
    seconds = {name: cell.seconds for name, cell in completed.items()}
    return ExperimentResults(plan, results, runner, seconds, missing, fidelity)


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
