"""`moesaic compare`: which network needs fewer of one's labels, and by how many."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import Positional, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import (
    CommandError,
    file_name,
    is_plain,
    load_task,
    log,
    make_folder,
    program,
    resolve_device,
    user_errors,
    versions,
)

if TYPE_CHECKING:
    from moesaic.data.datasets import ImageDataset
    from moesaic.training.compare import Grid
    from moesaic.training.recipe import Recipe

__all__ = ["Compare"]


@dataclass(frozen=True)
class Compare:
    """Train networks with different numbers of labelled images, and say which needs fewer of them.

    Finished runs are kept under --out: the same command continues where an interrupted one stopped, and with more
    models, samples or trials it only runs what is missing.
    """

    data: Positional[Annotated[str, arg(metavar="DATA")]]
    """A folder of images with a folder for each class, a zip file of one, or a name such as cifar10."""
    models: Annotated[str, arg(metavar="A,B,…")] = "wrn10_2,wrn10_2_pmoe"
    """Networks, separated by commas; the others are compared with the first. Options follow colons:
    wrn10_2_pmoe:patches_per_expert=8."""
    samples: Annotated[str, arg(metavar="N,N,…")] = "250,500,1000"
    """Numbers of labelled images to train with, separated by commas."""
    trials: int = 3
    """How often each is trained, with other images each time; 2 at least, and the more the narrower the intervals."""
    epochs: int = 50
    """How often a network sees each image."""
    batch: int = 32
    """Images in a step, at most."""
    optimizer: Annotated[str, arg(metavar="adamw|sgd|normalized_gd")] = "adamw"
    """By which all networks learn; normalized_gd: each expert moves by steps of one length, all else by SGD."""
    learning_rate: Annotated[float | None, arg(metavar="RATE", help_behavior_hint="(default: the optimizer's)")] = None
    """At its peak; it falls to 0 along half a cosine."""
    augment: Annotated[str, arg(metavar="none|flip|flip-crop")] = "none"
    """How images to train on are varied: not at all, mirrored at random, or mirrored and shifted."""
    size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint="(default: that of the set, else 64)")] = None
    """The side that images are brought to."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Where the files of a set that is given by name lie."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: that of the user)")] = None
    """Where decoded images are kept."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/compare-DATA)")] = None
    """Where results go."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    seed: int = 0
    """Random numbers depend on it; on one machine the same seed gives the same result.json but for `seconds`."""

    def run(self, given: Sequence[str]) -> int:
        """Do it; ``given`` are the words of the command, to be repeated where the user is told how to continue."""
        from moesaic.files import write_json
        from moesaic.report import describe_machine

        with user_errors("compare"):
            grid, recipe, device = self._checked()
            dataset = self._load(grid)
            out = self.out or Path("runs") / f"compare-{file_name(dataset.name)}"
            machine = describe_machine(device)
            command = shlex.join(["moesaic", *given])
            make_folder(out)
            arguments = {name: value if is_plain(value) else str(value) for name, value in asdict(self).items()}
            content = {"command": command, "arguments": arguments, "versions": versions(), "machine": machine}
            write_json(out / "config.json", content)
        try:
            self._compare(dataset, grid, recipe, out, device, command, machine)
        except KeyboardInterrupt:
            again = shlex.join([*program(), *given])
            log(f"\nInterrupted. What is finished is kept in {out}. To continue:\n  {again}")
            return 130
        return 0

    def _checked(self) -> tuple[Grid, Recipe, str]:
        """Everything that can be looked at before there are images."""
        from moesaic.training.compare import Grid
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe

        names = tuple(name.strip() for name in self.models.split(",") if name.strip())
        grid = Grid(names, _whole_numbers("--samples", self.samples), self.trials)
        grid.check_names()
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"compare: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        usual = OPTIMIZER_DEFAULTS[
            cast("Any", check_choice("compare", "--optimizer", self.optimizer, OPTIMIZER_DEFAULTS))
        ]
        recipe = Recipe(
            epochs=self.epochs,
            batch=self.batch,
            optimizer=cast("Any", self.optimizer),
            learning_rate=usual.learning_rate if self.learning_rate is None else self.learning_rate,
            weight_decay=usual.weight_decay,
        )
        return grid, recipe, resolve_device("compare", self.device)

    def _load(self, grid: Grid) -> ImageDataset:
        dataset = load_task(self)
        grid.check(dataset)
        grid.contenders(dataset)  # a network that does not fit the images is told now
        return dataset

    def _compare(
        self, dataset: ImageDataset, grid: Grid, recipe: Recipe, out: Path, device: str, command: str, machine: str
    ) -> None:
        import torch
        from rich.console import Console

        from moesaic import report
        from moesaic.report.chart import read_charts, write_charts
        from moesaic.report.comparison import derived_from, print_comparison, write_comparison_report
        from moesaic.report.comparison_charts import comparison_charts
        from moesaic.training.checkpoint import CheckpointError
        from moesaic.training.compare import compare
        from moesaic.training.comparison_result import read_comparison, write_comparison
        from moesaic.training.fit import Diverged
        from moesaic.training.paired_comparison import paired_comparisons

        try:
            with report.watch_progress(Console(stderr=True)) as progress:
                measured = compare(
                    dataset,
                    grid,
                    recipe,
                    out=out,
                    seed=self.seed,
                    device=device,
                    machine=machine,
                    settings={"augment": self.augment},
                    progress=progress,
                )
        except torch.OutOfMemoryError as error:
            raise CommandError(
                f"moesaic compare: {device} has too little memory for batches of {self.batch}; use a smaller --batch. "
                f"What is finished is kept in {out}"
            ) from error
        except (Diverged, CheckpointError, OSError) as error:
            raise CommandError(f"moesaic compare: {' '.join(str(error).split())}") from error
        write_comparison(out / "result.json", measured, derived_from(measured))
        # from the files, so that the report cannot say anything that they do not
        found = read_comparison(out / "result.json")
        write_charts(out / "charts.json", comparison_charts(found, paired_comparisons(found)))
        charts = read_charts(out / "charts.json")
        report.write_figures(out / "figures", charts)
        write_comparison_report(out / "report.html", found, charts, command=command)
        console = Console()
        print_comparison(found, console)
        for note in found.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        console.print(f"\nReport: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            numbers.append(int(part))
        except ValueError:
            raise ValueError(
                f"compare: {option}={text!r}, of which {part!r} is no whole number; give some such as 250,500,1000"
            ) from None
        if numbers[-1] < 1:
            raise ValueError(f"compare: {option}={text!r}, of which {part} is below 1; it must be at least 1")
    return tuple(numbers)
