"""Train several models with different numbers of labelled images, to see which needs fewer of them.

A run is a model, a number of samples and a trial. Within a trial every model gets the same images, fewer
images are among more, and the order of the images is the same: models are compared pair by pair. A finished
run is a cell (`result_cache`) and never done again; one that was interrupted goes on from its last checkpoint. Any
number of processes may run one comparison together (`cell_runner`).

With ``Grid(max_trials=…)`` trials are added one by one, to the models whose comparison is still open
(`group_sequential`). Which these are depends on results alone, so that an interrupted comparison ends as any other:
every worker decides after all runs of a trial are finished, and therefore decides the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.data.image_dataset import ImageDataset
from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan
from moesaic.training.cell_runner import CellWork
from moesaic.training.compared_models import short_names
from moesaic.training.comparison_result import ComparedModel, Comparison, Run
from moesaic.training.comparison_runs import ComparisonRuns, Contender, has_groups
from moesaic.training.group_sequential import FIRST_LOOK, LAST_LOOK
from moesaic.training.head_recipe import HEAD_LRS
from moesaic.training.model_for_dataset import spec_for_dataset
from moesaic.training.paired_comparison import is_settled
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.recipe import Recipe

__all__ = ["Grid", "compare"]

_NOTED_MARGIN = 3.0
"""Points of accuracy: a larger margin of error of the test images is noted in the result."""


@dataclass(frozen=True)
class Grid:
    """The runs of a comparison: every model with every number of samples, ``trials`` or up to ``max_trials`` times."""

    models: tuple[str, ...]
    """Networks as `ModelSpec.parse` reads them, such as "wrn10_2_pmoe:patches_per_expert=8". Others are compared with
    the first."""
    samples: tuple[int, ...]
    trials: int
    max_trials: int | None = None
    """Adds trials one by one, up to so many in all, until every comparison is clear; None: exactly ``trials``."""

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise ValueError(
                f"compare: models={','.join(self.models)!r} has {len(self.models)} of the at least 2 models that can "
                "be compared; name another one, such as 'wrn10_2,wrn10_2_pmoe'"
            )
        for what, values in (("models", self.models), ("samples", self.samples)):
            twice = [value for i, value in enumerate(values) if value in values[:i]]
            if twice:
                raise ValueError(f"compare: {what} names {twice[0]!r} twice; leave one out")
        if not self.samples:
            raise ValueError("compare: samples names no number; give some, such as 250,500,1000")
        if self.trials < 2:
            raise ValueError(f"compare: trials={self.trials}; it must be at least 2, or there is no interval to give")
        if self.max_trials is not None:
            self._check_max_trials(self.max_trials)
        object.__setattr__(self, "samples", tuple(sorted(self.samples)))

    def _check_max_trials(self, max_trials: int) -> None:
        if self.trials < FIRST_LOOK:
            raise ValueError(
                f"compare: trials={self.trials} with max_trials={max_trials}; trials are added to at least {FIRST_LOOK}"
            )
        if not self.trials <= max_trials <= LAST_LOOK:
            raise ValueError(
                f"compare: max_trials={max_trials}; it must be from {self.trials} to {LAST_LOOK}, for which the error "
                f"of 5 % holds; for another number use exactly trials={max(max_trials, 2)}"
            )

    def check(self, dataset: ImageDataset) -> None:
        """Refuses a dataset with too few images."""
        fewest, most, available = self.samples[0], self.samples[-1], len(dataset.train)
        if most > available:
            raise ValueError(
                f"compare: samples={most}, but there are {available} images to train on"
                f"{f' in {dataset.name}' if dataset.name else ''}; use at most {available}, or add images"
            )
        if fewest < dataset.num_classes:
            raise ValueError(
                f"compare: samples={fewest} is less than one image for each of the {dataset.num_classes} classes; "
                f"use {dataset.num_classes} or more"
            )

    def contenders(self, dataset: ImageDataset) -> list[Contender]:
        """The models, made for images of the dataset, and what they cost."""
        contenders: list[Contender] = []
        for model, label in zip(self.models, short_names(self.models), strict=True):
            spec, cost = spec_for_dataset(model, dataset)
            share = 100 * cost.routed_parameters / cost.parameters
            spelling = re.sub(r"(:weights=)[^:]*/", r"\1", model) if label != model else ""  # without folders
            contenders.append(Contender(spec, ComparedModel(label, cost.parameters, cost.macs, share, spelling)))
        return contenders


def compare(
    dataset: ImageDataset,
    grid: Grid,
    recipe: Recipe,
    *,
    out: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
    machine: str = "",
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    seconds_left: Callable[[], float] | None = None,
    head_lrs: bool = False,
) -> Comparison:
    """Compares models: trains those runs of the grid that are not finished, and returns the results of all.

    ``recipe.trainable`` and ``recipe.layer_decay`` apply to pretrained models; others are trained as a whole. Where
    only heads are trained, the features of a backbone are computed once for all runs and cached in ``cache_dir``, or
    in memory. Pretrained models have their own normalization.

    ``settings`` are settings that runs depend on besides images, labels and the other arguments: the augmentation.
    ``head_lrs`` gives heads on frozen backbones their own learning rates (`head_recipe`) in place of ``recipe.lr``.
    Runs are stored in ``out``/cells; ``out``/networks has the trained networks of the first trial with the most
    samples, one for each model.

    ``seconds_left`` says how much time is left: no trial is added to ``grid.trials`` that would take longer, by the
    time that earlier ones took. Without it, the result depends on nothing but the arguments.
    """
    grid.check(dataset)
    if not dataset.digest:
        raise ValueError("compare: the dataset has no digest, by which finished runs are found again; give it one")
    progress = progress or NoProgress()
    contenders = grid.contenders(dataset)
    heads = {"head_lrs": dict(HEAD_LRS)} if head_lrs and recipe.trainable == "head" else {}
    cells = ComparisonRuns.of(dataset, recipe, out, seed, device, settings, cache_dir, progress.log, head_lrs)

    asked = [dataset.digest, grid.models, grid.samples, grid.trials, grid.max_trials, seed, recipe.to_json(), settings]
    sizes = ", ".join(map(str, grid.samples))
    title = f"compare {dataset.name}: {', '.join(grid.models)}; {sizes} samples, {recipe.epochs} epochs"

    def plan(work: Sequence[CellWork]) -> None:
        planned = tuple(PlannedCell(cell.name, cell.digest) for cell in work)
        add_to_plan(out, asked, SweepPlan(title, planned))

    def run_trials(active: Sequence[Contender], trials: Sequence[int], name: str) -> list[Run]:
        return cells.run_trials(active, grid.samples, trials, name, progress, plan)

    number = grid.trials * len(grid.samples) * len(contenders)
    comparison = Comparison(
        data=dataset.name,
        digest=dataset.digest,
        classes=dataset.class_names,
        groups=dataset.cluster_names if has_groups(dataset) else (),
        pool=len(dataset.train),
        tested=len(dataset.test),
        guessing=100 * float(dataset.test.labels.bincount().max()) / len(dataset.test),
        models=tuple(contender.model for contender in contenders),
        samples=grid.samples,
        trials=grid.trials,
        seed=seed,
        recipe={**recipe.to_json(), **heads, **(settings or {})},
        machine=machine,
        runs=tuple(run_trials(contenders, range(grid.trials), f"{number} runs")),
        notes=tuple(_notes(dataset, grid)),
        max_trials=grid.max_trials,
    )
    if grid.max_trials is None:
        return comparison

    def has_time(active: Sequence[Contender], trial: int) -> bool:
        return seconds_left is None or cells.seconds(active, grid.samples, trial) <= seconds_left()

    return _add_trials(comparison, contenders, grid.max_trials, has_time, run_trials)


def _add_trials(
    comparison: Comparison,
    contenders: Sequence[Contender],
    max_trials: int,
    has_time: Callable[[Sequence[Contender], int], bool],
    run_trials: Callable[[Sequence[Contender], Sequence[int], str], list[Run]],
) -> Comparison:
    """Adds trials one by one, to the models whose comparison is still open."""
    baseline, *others = contenders
    while True:
        others = [contender for contender in others if not is_settled(comparison, contender.model.name)]
        if not others:
            return replace(comparison, ended="more would hardly change the answers")
        if comparison.trials == max_trials:
            return replace(comparison, ended=f"{max_trials} trials are the most that were allowed")
        active, trial = [baseline, *others], comparison.trials
        if not has_time(active, trial):
            return replace(comparison, ended="the next would take longer than the time that is left")
        runs = run_trials(active, [trial], f"trial {trial + 1}")
        comparison = replace(comparison, trials=trial + 1, runs=(*comparison.runs, *runs))


def _notes(dataset: ImageDataset, grid: Grid) -> Iterator[str]:
    if dataset.skipped:
        named = ", ".join(f"{file.path} ({file.reason})" for file in dataset.skipped[:3])
        more = f" and {len(dataset.skipped) - 3} more" if len(dataset.skipped) > 3 else ""
        yield f"{len(dataset.skipped)} files were skipped: {named}{more}."
    margin = 100 * math.sqrt(0.25 / len(dataset.test)) * 1.96
    if margin > _NOTED_MARGIN:
        yield (
            f"All runs are tested on the same {len(dataset.test):,} images: intervals show how far trials differ, not "
            f"how far other test images would differ. On {len(dataset.test):,} images an accuracy of 50 % is known "
            f"to ±{margin:.0f} points."
        )
    if grid.samples[-1] == len(dataset.train):
        yield (
            f"With {grid.samples[-1]:,} samples all images to train on are used: there trials differ by their initial "
            "weights and the order of the images, not by the images."
        )
