"""Estimates the time of a comparison on this machine, and plans the part that fits a time budget.

A few steps and a test of each network are measured at the batch size, and the features of a block of images where heads
train on features. Finished runs take no time. Where everything does not fit, a plan has fewer trials (at least
`MIN_TRIALS`), then the smallest and the largest number of samples alone, then half and a quarter of the epochs (at
least `MIN_EPOCHS`), then the smallest number of samples alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.bench.timing import synchronize
from moesaic.data.image_dataset import ImageDataset, LabelledImages
from moesaic.training.backbone_features import add_features, backbone_digest, has_cached_features
from moesaic.training.callbacks import Callback
from moesaic.training.compare import Grid
from moesaic.training.comparison_runs import ComparisonRuns, Contender, eval_every
from moesaic.training.fit import fit
from moesaic.training.recipe import Recipe
from moesaic.training.trainer import Trainer

__all__ = ["MIN_TRIALS", "ComparisonPlan", "ModelPlan", "OverBudget", "RunCost", "measure_costs", "plan_comparison"]

MIN_TRIALS = 3
MIN_EPOCHS = 10
_TIMED_EPOCHS, _TIMED_STEPS = 2, 2
"""Epochs that are measured, and steps of each; the first step is not."""
_TIMED_TEST_IMAGES = 64
"""Test images that are measured, at most."""
_REPEATED_BELOW_SECONDS = 2.0
"""Seconds: a measurement that takes less, setup aside, is repeated, without what the first one had to load."""


class OverBudget(ValueError):
    """The smallest plan takes longer than the budget."""


@dataclass(frozen=True)
class RunCost:
    """Seconds that the runs of a network take."""

    step: float
    """A training step of a full batch."""
    test: float
    """A test on all test images."""
    setup: float = 0.0
    """The time before the first step."""
    epoch: float = 0.0
    """The time from the last step of an epoch to the first of the next."""
    features: float = 0.0
    """Features of all images, once for all runs; 0 where they are cached, or those of another network."""

    def seconds(self, samples: int, recipe: Recipe) -> float:
        """Returns the time of one run.

        >>> RunCost(step=0.1, test=1.0, setup=2.0).seconds(64, Recipe(epochs=10, batch_size=32))
        14.0
        """
        tests = -(-recipe.epochs // eval_every(recipe.epochs))
        epoch = self.epoch + len(recipe.batch_sizes(samples)) * self.step
        return self.setup + recipe.epochs * epoch + tests * self.test


@dataclass(frozen=True)
class ModelPlan:
    """The pending runs of a network."""

    name: str
    seconds: float
    """Seconds of the first trials."""
    step: float | None
    """Seconds of a training step; None: no run is pending."""


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison, and their estimated time."""

    grid: Grid
    recipe: Recipe
    models: tuple[ModelPlan, ...]
    features: float
    """Seconds to compute features."""
    most_seconds: float
    """Seconds if all trials are needed that the grid allows, features included."""
    finished: int
    """Runs of the first trials that are finished."""
    left_out: tuple[str, ...] = ()
    """Trials, samples and epochs that do not fit the budget."""
    full_seconds: float = 0.0
    """Seconds of the first trials with nothing left out, and of the budget spent before them."""
    workers: int = 1
    """Processes that share the runs; time is divided among them, as if no run had to wait for others."""

    @property
    def seconds(self) -> float:
        """Seconds of the first trials, features included."""
        return self.features + sum(model.seconds for model in self.models) / self.workers

    @property
    def runs(self) -> int:
        """Runs of the first trials."""
        return self.grid.trials * len(self.grid.samples) * len(self.models)


def plan_comparison(
    runs: ComparisonRuns,
    contenders: Sequence[Contender],
    grid: Grid,
    costs: Mapping[str, RunCost],
    budget: float | None = None,
    workers: int = 1,
    spent: float = 0.0,
) -> ComparisonPlan:
    """Returns the largest plan that fits a budget, or that of the whole grid.

    Args:
        runs: what all runs have in common.
        contenders: the networks.
        grid: samples and trials.
        costs: what the runs of each network take.
        budget: seconds that are left; None: no limit.
        workers: processes that share the runs.
        spent: seconds of the budget that are gone, which a larger budget would spend again.

    Raises:
        OverBudget: not even the smallest plan fits; the message says what it takes.
    """
    full = _plan(runs, contenders, grid, costs, workers)
    if budget is None or full.seconds <= budget:
        return full
    smallest = full
    for smaller, recipe in _smaller(grid, runs.recipe):
        smallest = _plan(replace(runs, recipe=recipe), contenders, smaller, costs, workers)
        if smallest.seconds <= budget:
            return replace(smallest, left_out=_left_out(full, smallest), full_seconds=full.seconds + spent)
    labels, trials, epochs = smallest.grid.samples[0], smallest.grid.trials, smallest.recipe.epochs
    raise OverBudget(
        f"{max(budget, 0) / 60:.1f} minutes are left, and the smallest plan ({len(contenders)} networks with "
        f"{labels:,} labels, {trials} trials, {epochs} epochs) takes about {smallest.seconds / 60:.1f}; "
        f"use --minutes {-(-(smallest.seconds + spent) // 60) + 1:.0f} or more, fewer "
        "networks or smaller images"
    )


def _plan(
    runs: ComparisonRuns, contenders: Sequence[Contender], grid: Grid, costs: Mapping[str, RunCost], workers: int
) -> ComparisonPlan:
    def missing(contender: Contender, trials: range) -> list[int]:
        """The number of samples of each run that is left to do."""
        cells = itertools.product(trials, grid.samples)
        return [size for trial, size in cells if runs.find(contender, size, trial) is None]

    models: list[ModelPlan] = []
    features = most = 0.0
    finished = 0
    for who in contenders:
        first = missing(who, range(grid.trials))
        later = missing(who, range(grid.trials, grid.max_trials or grid.trials))
        cost = costs.get(who.model.name)
        assert cost is not None or not first + later, "the cost of runs that are left to do was measured"
        first_seconds, later_seconds = (
            sum(cost.seconds(size, runs.recipe) for size in each) if cost else 0.0 for each in (first, later)
        )
        models.append(ModelPlan(who.model.name, first_seconds, cost.step if cost and first else None))
        features += cost.features if cost and first + later else 0.0
        most += first_seconds + later_seconds
        finished += grid.trials * len(grid.samples) - len(first)
    longest = most / workers + features
    return ComparisonPlan(grid, runs.recipe, tuple(models), features, longest, finished, workers=workers)


def _smaller(grid: Grid, recipe: Recipe) -> Iterator[tuple[Grid, Recipe]]:
    """Smaller grids and recipes, the more complete ones first."""
    for trials in range(grid.trials - 1, MIN_TRIALS - 1, -1):
        yield replace(grid, trials=trials), recipe
    grid = replace(grid, trials=min(grid.trials, MIN_TRIALS))
    ends = replace(grid, samples=tuple(sorted({grid.samples[0], grid.samples[-1]})))
    parts = [max(recipe.epochs // part, min(MIN_EPOCHS, recipe.epochs)) for part in (1, 2, 4)]
    for epochs in dict.fromkeys(parts):
        yield ends, replace(recipe, epochs=epochs)
    yield replace(grid, samples=grid.samples[:1]), replace(recipe, epochs=parts[-1])


def _left_out(full: ComparisonPlan, plan: ComparisonPlan) -> tuple[str, ...]:
    left_out: list[str] = []
    trials = full.grid.trials - plan.grid.trials
    if trials:
        left_out.append(f"{trials} of {full.grid.trials} trials")
    samples = [size for size in full.grid.samples if size not in plan.grid.samples]
    if samples:
        left_out.append(f"{' and '.join(f'{size:,}' for size in samples)} labels")
    epochs = full.recipe.epochs - plan.recipe.epochs
    if epochs:
        left_out.append(f"{epochs} of {full.recipe.epochs} epochs")
    return tuple(left_out)


def measure_costs(
    runs: ComparisonRuns, contenders: Sequence[Contender], grid: Grid, log: Callable[[str], None]
) -> dict[str, RunCost]:
    """Measures the networks that have runs left to do, whatever part of the grid a plan will choose."""
    costs: dict[str, RunCost] = {}
    backbones: set[str] = set()
    trials = range(grid.max_trials or grid.trials)
    for who in contenders:
        cells = itertools.product(grid.samples, trials)
        if all(runs.find(who, size, trial) is not None for size, trial in cells):
            continue
        small, features, backbone = _small_images(runs, who, grid.samples[-1], log)
        start = time.perf_counter()
        cost = _measure(runs, who, small)
        if time.perf_counter() - start - cost.setup < _REPEATED_BELOW_SECONDS:
            cost = _measure(runs, who, small)
        costs[who.model.name] = replace(cost, features=0.0 if backbone in backbones else features)
        if backbone:
            backbones.add(backbone)
    return costs


def _small_images(
    runs: ComparisonRuns, contender: Contender, samples: int, log: Callable[[str], None]
) -> tuple[ImageDataset, float, str]:
    """Images to measure with, the seconds that features of all images will take, and the backbone of these."""
    dataset = runs.normalized(contender)
    model = runs.backbone_of(contender, dataset)
    if model is not None and has_cached_features(dataset, model, runs.cache_dir):
        return _few(runs.images_of(contender, log), runs.recipe, samples), 0.0, ""
    small = _few(dataset, runs.recipe, samples)
    if model is None:
        return small, 0.0, ""
    one = replace(small, train=_first(small.train, 1), test=_first(small.test, 1))
    add_features(one, model, device=runs.device)  # the first pass takes longer than others
    start = time.perf_counter()
    small = add_features(small, model, device=runs.device)
    per_image = (time.perf_counter() - start) / (len(small.train) + len(small.test))
    return small, per_image * (len(dataset.train) + len(dataset.test)), backbone_digest(model)


def _few(dataset: ImageDataset, recipe: Recipe, samples: int) -> ImageDataset:
    """Training images for a few steps of the largest batch, and some test images."""
    images = _TIMED_STEPS * max(recipe.batch_sizes(samples))
    return replace(dataset, train=_first(dataset.train, images), test=_first(dataset.test, _TIMED_TEST_IMAGES))


def _first(images: LabelledImages, count: int) -> LabelledImages:
    return images.take(torch.arange(min(count, len(images))))


class _StepTimes(Callback):
    """The times at which steps begin and end."""

    capturable = True

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_step_start(self, trainer: Trainer, epoch: float) -> None:
        self.begun.append(_now())

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        self.ended.append(_now())


def _now() -> float:
    synchronize()
    return time.perf_counter()


def _measure(runs: ComparisonRuns, contender: Contender, small: ImageDataset) -> RunCost:
    start, clock = _now(), _StepTimes()
    with torch.random.fork_rng(devices=[]):
        model = contender.spec.build()
    # steps of length 0 take as long as others, and cannot diverge
    recipe = replace(runs.recipe_of(contender), epochs=_TIMED_EPOCHS, warmup_epochs=None, lr=0.0)
    fit(
        model,
        small,
        recipe,
        device=runs.device,
        callbacks=[clock],
        eval_every=_TIMED_EPOCHS,
        test_features=True,
        cuda_graph=True,  # where a GPU has them, although by default so few steps would run eagerly
    )
    test = (_now() - clock.ended[-1]) * len(runs.dataset.test) / len(small.test)
    steps = len(clock.begun) // _TIMED_EPOCHS
    taken = [end - begin for begin, end in zip(clock.begun, clock.ended, strict=True)][1:]
    setup, epoch = clock.begun[0] - start, clock.begun[steps] - clock.ended[steps - 1]
    return RunCost(statistics.median(taken), test, setup, epoch)
