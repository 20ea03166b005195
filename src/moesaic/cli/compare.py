"""`moesaic compare`: which network needs fewer labelled images, and how many fewer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import arg

from moesaic.checks import check_choice
from moesaic.cli.shared import (
    CommandError,
    DatasetOptions,
    TrainableOption,
    file_name,
    log,
    program,
    resolve_device,
    user_errors,
    write_config,
)

if TYPE_CHECKING:
    from moesaic.data.datasets import ImageDataset
    from moesaic.training.compare import Grid
    from moesaic.training.recipe import Recipe

__all__ = ["Compare"]


@dataclass(frozen=True)
class Compare(DatasetOptions):
    """Train networks with different numbers of labelled images, and report which one needs fewer.

    Finished runs are stored in --out: the same command resumes where an interrupted one stopped, and with more
    models, samples or trials it runs only what is missing.
    """

    models: Annotated[str, arg(metavar="A,B,…")] = "wrn10_2,wrn10_2_pmoe"
    """Networks, the first the baseline; options follow colons: timm/resnet18:convert=layer4.1.conv2:experts=8."""
    samples: Annotated[str, arg(metavar="N,N,…")] = "250,500,1000"
    """Numbers of labelled training images, separated by commas."""
    trials: int = 3
    """Runs of each network and number of samples, with other images each; at least 2, more narrow the intervals."""
    epochs: int = 50
    """Passes over the training images."""
    batch_size: int = 32
    """Samples per step."""
    optimizer: Annotated[str, arg(metavar="adamw|sgd|normalized_gd")] = "adamw"
    """Optimizer of all networks; normalized_gd: steps of equal length for each expert, SGD for all other weights."""
    lr: Annotated[float | None, arg(metavar="LR", help_behavior_hint="(default: the optimizer's)")] = None
    """Peak learning rate of the cosine schedule; a tenth for fine-tuning; each head has its own."""
    trainable: TrainableOption = None
    """Layers of pretrained networks to train: all, the head alone, or the head and the N layers before it."""
    layer_decay: Annotated[float | None, arg(metavar="FACTOR", help_behavior_hint="(default: none)")] = None
    """Layer-wise learning-rate decay of pretrained networks: each layer has FACTOR times the rate of the next one."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/compare-DATA)")] = None
    """Output folder."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments, which are repeated in the hint how to resume."""
        with user_errors("compare"):
            grid, recipe, device = self._checked()
            dataset = self._load(grid, recipe)
            out = self.out or Path("runs") / f"compare-{file_name(dataset.name)}"
            command, machine = write_config(out, self, given, device)
        try:
            self._compare(dataset, grid, recipe, out, device, command, machine)
        except KeyboardInterrupt:
            again = shlex.join([*program(), *given])
            log(f"\nInterrupted. Finished runs are in {out}. To resume:\n  {again}")
            return 130
        return 0

    def _checked(self) -> tuple[Grid, Recipe, str]:
        """Checks the options that do not depend on the images."""
        from moesaic.models.registry import ModelSpec
        from moesaic.training.compare import Grid
        from moesaic.training.freezing import default_trainable
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe

        names = tuple(name.strip() for name in self.models.split(",") if name.strip())
        grid = Grid(names, _whole_numbers("--samples", self.samples), self.trials)
        grid.check_names()
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"compare: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        check_choice("compare", "--optimizer", self.optimizer, OPTIMIZER_DEFAULTS)
        defaults = OPTIMIZER_DEFAULTS[cast("Any", self.optimizer)]
        specs = [ModelSpec.parse(name) for name in names]
        trainable = self.trainable or default_trainable(specs, grid.samples[-1])
        tuned = trainable != "head" and all(spec.is_pretrained for spec in specs)
        recipe = Recipe(
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=cast("Any", self.optimizer),
            lr=(defaults.lr / 10 if tuned else defaults.lr) if self.lr is None else self.lr,
            weight_decay=defaults.weight_decay,
            trainable=trainable,
            layer_decay=self.layer_decay,
        )
        return grid, recipe, resolve_device("compare", self.device)

    def _load(self, grid: Grid, recipe: Recipe) -> ImageDataset:
        from moesaic.training.freezing import frozen_parameters

        dataset = self.load(None if self.img_size else grid.image_size())
        grid.check(dataset)
        for each in grid.contenders(dataset):  # refuses a network that does not fit the images
            if each.spec.is_pretrained:
                frozen_parameters(each.spec.without_weights().build(), recipe.trainable)
        return dataset

    def _compare(
        self, dataset: ImageDataset, grid: Grid, recipe: Recipe, out: Path, device: str, command: str, machine: str
    ) -> None:
        import torch
        from rich.console import Console

        from moesaic import report
        from moesaic.cache_dir import default_cache_dir
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
                    cache_dir=self.cache_dir or default_cache_dir(),
                    head_lrs=self.lr is None,
                )
        except torch.OutOfMemoryError as error:
            raise CommandError(
                f"moesaic compare: {device} has too little memory for --batch-size {self.batch_size}; use a smaller "
                f"one. Finished runs are in {out}"
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
