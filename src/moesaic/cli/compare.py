"""`moesaic compare`: trains networks on numbers of labelled images and reports which needs fewer."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import arg

from moesaic.argument_checks import check_choice
from moesaic.cli.shared import (
    CommandError,
    DataArgument,
    DatasetOptions,
    JobsOption,
    TrainableOption,
    check_folder,
    file_name,
    invocation,
    log,
    resolve_device,
    use_threads,
    user_errors,
    write_config,
)
from moesaic.cli.workers import WorkerProgress, is_worker, job_count, run_workers

if TYPE_CHECKING:
    from moesaic.data.image_dataset import ImageDataset
    from moesaic.training.compare import Grid
    from moesaic.training.comparison_budget import SharedTimeBudget
    from moesaic.training.comparison_plan import ComparisonPlan
    from moesaic.training.comparison_result import Comparison
    from moesaic.training.progress import Progress
    from moesaic.training.recipe import Recipe

__all__ = ["Compare"]

MAX_TRIALS = 12
"""Maximum number of trials of ``--trials auto`` without --max-trials."""
_REPORT_SECONDS = 5.0
"""Time of figures and report."""


@dataclass(frozen=True)
class _CompareOptions(DataArgument):
    """The most used options first."""

    models: Annotated[str, arg(metavar="A,B,…")] = "wrn10_2,wrn10_2_pmoe"
    """Networks, the first the baseline; options follow colons. One pretrained network: two heads on its backbone."""
    minutes: Annotated[float | None, arg(metavar="MINUTES", help_behavior_hint="(default: no limit)")] = None
    """Time limit: reduces trials, numbers of samples and epochs to fit, and adds trials while time is left."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/compare-DATA)")] = None
    """Output folder."""
    samples: Annotated[str | None, arg(metavar="N,N,…", help_behavior_hint="(default: three that fit the images)")] = (
        None
    )
    """Numbers of labelled training images, separated by commas."""
    router: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: expert-choice)")] = None
    """Router of networks that name none: expert-choice, token-choice, soft, or module:Class of your own."""
    trials: Annotated[str, arg(metavar="N|auto")] = "auto"
    """Runs of each network with each number of samples; auto: 3, then more until the comparison is decided."""
    max_trials: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 12)")] = None
    """Maximum number of trials with --trials auto, 24 at most."""
    dry_run: bool = False
    """Print the planned runs and their estimated time, and exit."""
    epochs: int = 50
    """Passes over the training images."""
    batch_size: int = 32
    """Samples per step."""
    optimizer: Annotated[str, arg(metavar="adamw|sgd|normalized_gd")] = "adamw"
    """Optimizer of all networks; normalized_gd: steps of equal length for each expert, SGD for all other weights."""
    lr: Annotated[float | None, arg(metavar="LR", help_behavior_hint="(default: the optimizer's)")] = None
    """Peak learning rate. Fine-tuning divides the optimizer's default by 10; each head has a default of its own."""
    trainable: TrainableOption = None
    """Layers of pretrained networks to train: all, the head alone, or the head and the N layers before it."""
    layer_decay: Annotated[float | None, arg(metavar="FACTOR", help_behavior_hint="(default: none)")] = None
    """Layer-wise learning-rate decay of pretrained networks: each layer has FACTOR times the rate of the next one."""
    jobs: JobsOption = "1"
    """Worker processes; auto: one for each GPU or core. The same command on any machine that shares --out adds more."""


@dataclass(frozen=True)
class Compare(DatasetOptions, _CompareOptions):
    """Train networks with different numbers of labelled images, and report which one needs fewer.

    Finished runs are stored in --out: the same command resumes where an interrupted one stopped, and with more
    models, samples or trials it runs only what is missing.
    """

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments, which are repeated in the hint how to resume."""
        start = time.monotonic()
        with user_errors("compare"):
            models, device = self._checked()
            jobs = 1 if is_worker() else job_count("compare", self.jobs, device)
            check_folder(self.out)
            dataset, grid, recipe = self._load(models)
            out = self.out or Path("runs") / f"compare-{file_name(dataset.name)}"
            threads = use_threads(out, jobs, device)
        if self.dry_run:
            self._print_plan(dataset, grid, recipe, out, device, start, jobs)
            return 0
        budget = None if self.minutes is None else self._budget(out, dataset)
        try:
            with _run_errors(self.batch_size, device, out):
                grid, recipe = self._chosen(dataset, grid, recipe, out, device, start, jobs, budget)
            with user_errors("compare"):
                command, machine = ("", "") if is_worker() else write_config(out, self, given, device)
            with _run_errors(self.batch_size, device, out):
                if jobs > 1:
                    self._run_workers(given, jobs, threads, device)
                found = self._compare(dataset, grid, recipe, out, device, machine, budget)
        except KeyboardInterrupt:
            again = shlex.join([*invocation(), *given])
            log(f"\nInterrupted. Finished runs are in {out}. To resume:\n  {again}")
            return 130
        finally:
            if budget is not None:
                budget.close()
        if not is_worker():
            _write(found, out, command)
            self._print_next(found, models)
        return 0

    def _print_next(self, found: Comparison, models: Sequence[str]) -> None:
        """Prints the command that trains the recommended network on all images."""
        from moesaic.report.comparison_sentences import answers
        from moesaic.training.paired_comparison import paired_comparisons

        best = answers(found, paired_comparisons(found))[0].model
        if best is None:
            return
        spelled = next(name for name, model in zip(models, found.models, strict=True) if model.name == best)
        options = {"--data-dir": self.data_dir, "--img-size": self.img_size}
        given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        command = shlex.join(["moesaic", "train", self.data, "--model", spelled, *given])
        sys.stdout.write(f"Next:\n  {command}  # {best}, trained on all images\n")

    def _run_workers(self, given: Sequence[str], jobs: int, threads: int, device: str) -> None:
        from rich.console import Console

        from moesaic import report

        with report.watch_progress(Console(stderr=True)) as progress:
            run_workers(given, jobs, threads, device, progress)

    def _budget(self, out: Path, dataset: ImageDataset) -> SharedTimeBudget:
        from moesaic.leases import Leases
        from moesaic.training.comparison_budget import SharedTimeBudget

        elsewhere = ("out", "device", "data", "data_dir", "cache_dir", "jobs", "dry_run")
        options = {name: value for name, value in asdict(self).items() if name not in elsewhere}
        return SharedTimeBudget(out, [dataset.digest, options], Leases(out / "cells"))

    def _print_plan(
        self, dataset: ImageDataset, grid: Grid, recipe: Recipe, out: Path, device: str, start: float, jobs: int
    ) -> None:
        from moesaic.report.comparison_plan_text import describe_plan

        with _run_errors(self.batch_size, device, out):
            plan = self._plan(dataset, grid, recipe, out, device, start, jobs)
        sys.stdout.write("".join(f"{line}\n" for line in describe_plan(plan, self.minutes)))

    def _chosen(
        self,
        dataset: ImageDataset,
        grid: Grid,
        recipe: Recipe,
        out: Path,
        device: str,
        start: float,
        jobs: int,
        budget: SharedTimeBudget | None,
    ) -> tuple[Grid, Recipe]:
        """The grid and the recipe: as asked for, or what fits the budget; measured by the first worker alone."""
        from moesaic.leases import Leases
        from moesaic.report.comparison_plan_text import describe_plan

        if budget is not None:
            found = budget.join()
            if found is not None:
                log(f"joining the workers in {out}: {found.trials} trials, {found.epochs} epochs, as the first planned")
                return replace(grid, samples=found.samples, trials=found.trials), replace(recipe, epochs=found.epochs)
        elif is_worker() or Leases(out / "cells").has_live():
            log(f"joining the workers in {out}")
            return grid, recipe
        plan = self._plan(dataset, grid, recipe, out, device, start, jobs)
        for line in describe_plan(plan, self.minutes):
            log(line)
        if budget is not None:
            seconds = self._seconds_left(start)
            assert seconds is not None
            budget.publish(plan.grid.samples, plan.grid.trials, plan.recipe.epochs, jobs, seconds)
        return plan.grid, plan.recipe

    def _checked(self) -> tuple[tuple[str, ...], str]:
        """Checks the options that do not depend on the images; the networks and the device."""
        from moesaic.training.compared_models import check_models, expand_models
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS

        named = self._with_router(tuple(name.strip() for name in self.models.split(",") if name.strip()))
        check_models(named)
        models = expand_models(named)
        check_models(models)
        self._grid(models, _whole_numbers("--samples", "2" if self.samples is None else self.samples))
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"compare: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        check_choice("compare", "--optimizer", self.optimizer, OPTIMIZER_DEFAULTS)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"compare: --minutes={self.minutes:g}; it must be above 0")
        self._recipe(models, 1)
        return models, resolve_device("compare", self.device)

    def _grid(self, models: tuple[str, ...], samples: tuple[int, ...]) -> Grid:
        from moesaic.training.compare import Grid
        from moesaic.training.group_sequential import FIRST_LOOK

        if self.trials == "auto":
            return Grid(models, samples, FIRST_LOOK, MAX_TRIALS if self.max_trials is None else self.max_trials)
        if self.max_trials is not None:
            raise ValueError(
                f"compare: --max-trials={self.max_trials} with --trials={self.trials}; it is for --trials auto: leave "
                "one out"
            )
        if not self.trials.lstrip("-").isdecimal():
            raise ValueError(f"compare: --trials={self.trials!r} is not a whole number; give one such as 5, or auto")
        return Grid(models, samples, int(self.trials))

    def _recipe(self, models: tuple[str, ...], images: int) -> Recipe:
        """The recipe for so many training images."""
        from moesaic.models.registry import ModelSpec
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe
        from moesaic.training.trainable_layers import default_trainable

        defaults = OPTIMIZER_DEFAULTS[cast("Any", self.optimizer)]
        specs = [ModelSpec.parse(name) for name in models]
        trainable = self.trainable or default_trainable(specs, images)
        tuned = trainable != "head" and all(spec.is_pretrained for spec in specs)
        return Recipe(
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer=cast("Any", self.optimizer),
            lr=(defaults.lr / 10 if tuned else defaults.lr) if self.lr is None else self.lr,
            weight_decay=defaults.weight_decay,
            trainable=trainable,
            layer_decay=self.layer_decay,
        )

    def _with_router(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The model strings of the networks, with --router."""
        from moesaic.models.model_string import insert_router
        from moesaic.models.registry import ModelSpec, model_options

        if self.router is None:
            return names
        specs = [ModelSpec.parse(name) for name in names]
        takes = ["router" in model_options(spec.name) for spec in specs]
        made = tuple(insert_router(name, self.router, in_network=own) for name, own in zip(names, takes, strict=True))
        if made == names:
            raise ValueError(
                f"compare: --router={self.router!r}, but none of {', '.join(names)} lacks one; use a network such as "
                "wrn10_2_pmoe, or convert=LAYER:experts=8"
            )
        return made

    def _load(self, models: tuple[str, ...]) -> tuple[ImageDataset, Grid, Recipe]:
        from moesaic.training.compared_models import default_samples, shared_image_size
        from moesaic.training.trainable_layers import frozen_parameters

        dataset = self.load(shared_image_size(models) if self.img_size is None else None)
        samples = (
            default_samples(len(dataset.train), dataset.num_classes)
            if self.samples is None
            else _whole_numbers("--samples", self.samples)
        )
        grid = self._grid(models, samples)
        grid.check(dataset)
        recipe = self._recipe(models, grid.samples[-1])
        for each in grid.contenders(dataset):  # refuses a network that does not fit the images
            if each.spec.is_pretrained:
                frozen_parameters(each.spec.without_weights().build(), recipe.trainable)
        return dataset, grid, recipe

    def _plan(
        self, dataset: ImageDataset, grid: Grid, recipe: Recipe, out: Path, device: str, start: float, jobs: int
    ) -> ComparisonPlan:
        from moesaic.cache_dir import default_cache_dir
        from moesaic.training.comparison_plan import OverBudget, measure_costs, plan_comparison
        from moesaic.training.comparison_runs import ComparisonRuns

        cache_dir = self.cache_dir or default_cache_dir()
        settings = {"augment": self.augment}
        runs = ComparisonRuns.of(dataset, recipe, out, self.seed, device, settings, cache_dir, log, self.lr is None)
        contenders = grid.contenders(dataset)
        costs = measure_costs(runs, contenders, grid, log)
        left = self._seconds_left(start)
        spent = 0.0 if self.minutes is None or left is None else 60 * self.minutes - left
        try:
            return plan_comparison(runs, contenders, grid, costs, left, jobs, spent)
        except OverBudget as error:
            raise CommandError(f"moesaic compare: --minutes {self.minutes:g} is too little: {error}") from error

    def _seconds_left(self, start: float) -> float | None:
        """Of the budget, without the time that the report takes."""
        return None if self.minutes is None else 60 * self.minutes - (time.monotonic() - start) - _REPORT_SECONDS

    def _compare(
        self,
        dataset: ImageDataset,
        grid: Grid,
        recipe: Recipe,
        out: Path,
        device: str,
        machine: str,
        budget: SharedTimeBudget | None,
    ) -> Comparison:
        from moesaic.cache_dir import default_cache_dir
        from moesaic.training.compare import compare

        with _progress() as progress:
            return compare(
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
                seconds_left=None if budget is None else budget.seconds_left,
                head_lrs=self.lr is None,
            )


@contextmanager
def _progress() -> Generator[Progress]:
    """Progress for the user, or for the parent of a worker."""
    from rich.console import Console

    from moesaic import report

    if is_worker():
        yield WorkerProgress()
        return
    with report.watch_progress(Console(stderr=True)) as progress:
        yield progress


@contextmanager
def _run_errors(batch_size: int, device: str, out: Path) -> Generator[None]:
    """Turns errors of training runs into a `CommandError`."""
    import torch

    from moesaic.training.checkpoint import CheckpointError
    from moesaic.training.fit import Diverged

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CommandError(
            f"moesaic compare: {device} has too little memory for --batch-size {batch_size}; use a smaller "
            f"one. Finished runs are in {out}"
        ) from error
    except (Diverged, CheckpointError, OSError) as error:
        raise CommandError(f"moesaic compare: {' '.join(str(error).split())}") from error


def _write(measured: Comparison, out: Path, command: str) -> None:
    from rich.console import Console

    from moesaic.leases import Leases
    from moesaic.report.comparison_report import print_comparison

    with Leases(out).hold("report"):  # of workers that end together, one writes at a time
        found = _write_files(measured, out, command)
    console = Console()
    print_comparison(found, console)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"\nReport: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def _write_files(measured: Comparison, out: Path, command: str) -> Comparison:
    from moesaic import report
    from moesaic.report.chart import read_charts, write_charts
    from moesaic.report.comparison_charts import comparison_charts
    from moesaic.report.comparison_report import derived_from, write_comparison_report
    from moesaic.training.comparison_result import read_comparison, write_comparison
    from moesaic.training.paired_comparison import paired_comparisons

    write_comparison(out / "result.json", measured, derived_from(measured))
    # from the files, so that the report cannot say anything that they do not
    found = read_comparison(out / "result.json")
    write_charts(out / "charts.json", comparison_charts(found, paired_comparisons(found)))
    charts = read_charts(out / "charts.json")
    report.write_figures(out / "figures", charts)
    write_comparison_report(out / "report.html", found, charts, command=command)
    return found


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            numbers.append(int(part))
        except ValueError:
            raise ValueError(
                f"compare: {option}={text!r}, of which {part!r} is not a whole number; give for example 250,500,1000"
            ) from None
        if numbers[-1] < 1:
            raise ValueError(f"compare: {option}={text!r}, of which {part} is below 1; it must be at least 1")
    return tuple(numbers)
