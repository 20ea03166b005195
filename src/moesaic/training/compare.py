"""Train several models with different numbers of labelled images, to see which needs fewer of them.

A run is a model, a number of samples and a trial. Within a trial every model gets the same images, fewer
images are among more, and the order of the images is the same: models are compared pair by pair. A finished
run is a cell (`result_cache`) and never done again; one that was interrupted goes on from its last checkpoint. Any
number of processes may run one comparison together (`sweep`).

With ``Grid(max_trials=…)`` trials are added one by one, to the models whose comparison is still open
(`sequential_trials`). Which these are depends on results alone, so that an interrupted comparison ends as any other:
every worker decides after all runs of a trial are finished, and therefore decides the same.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic import keyed_random
from moesaic.data.datasets import ImageDataset, Normalize
from moesaic.layers.heads import HEAD_OPTIONS
from moesaic.models.registry import ModelSpec, create_model
from moesaic.training.backbone_features import add_features, refuses_features
from moesaic.training.comparison_result import ComparedModel, Comparison, Run, run_from_json
from moesaic.training.fit import Diverged, FitResult, fit
from moesaic.training.head_recipe import HEAD_LRS, head_recipe
from moesaic.training.model_for_dataset import spec_for_dataset
from moesaic.training.paired_comparison import is_settled
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.recipe import Recipe
from moesaic.training.result_cache import CachedResult, ResultCache
from moesaic.training.sequential_trials import FIRST_LOOK, LAST_LOOK
from moesaic.training.sweep import CellWork, run_cells
from moesaic.training.sweep_plan import PlannedCell, SweepPlan, add_to_plan

__all__ = [
    "HEADS",
    "ComparisonRuns",
    "Contender",
    "Grid",
    "check_models",
    "compare",
    "default_samples",
    "eval_every",
    "expand_models",
    "shared_image_size",
    "short_names",
]

MAX_TESTS = 25
"""So many times a run is tested at most: more would take longer than training on few images does."""
_NOTED_MARGIN = 3.0
"""Points of accuracy: a larger margin of error of the test images is noted in the result."""


HEADS = ("mean", "routed")
"""Heads that one pretrained network is compared with, the first the baseline; follows docs/heads.md."""


def eval_every(epochs: int) -> int:
    """Epochs from one test of a run to the next."""
    return -(-epochs // MAX_TESTS)


@dataclass(frozen=True)
class Grid:
    """What to run: every model with every number of samples, ``trials`` times or up to ``max_trials`` times."""

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

    def _check_max_trials(self, most: int) -> None:
        if self.trials < FIRST_LOOK:
            raise ValueError(
                f"compare: trials={self.trials} with max_trials={most}; trials are added to at least {FIRST_LOOK}"
            )
        if not self.trials <= most <= LAST_LOOK:
            raise ValueError(
                f"compare: max_trials={most}; it must be from {self.trials} to {LAST_LOOK}, for which the error of "
                f"5 % holds; for another number use exactly trials={max(most, 2)}"
            )

    def check(self, dataset: ImageDataset) -> None:
        """Whether the dataset has images enough; an error says how many there are."""
        fewest, most, there = self.samples[0], self.samples[-1], len(dataset.train)
        if most > there:
            raise ValueError(
                f"compare: samples={most}, but there are {there} images to train on"
                f"{f' in {dataset.name}' if dataset.name else ''}; use at most {there}, or add images"
            )
        if fewest < dataset.num_classes:
            raise ValueError(
                f"compare: samples={fewest} is less than one image for each of the {dataset.num_classes} classes; "
                f"use {dataset.num_classes} or more"
            )

    def contenders(self, dataset: ImageDataset) -> list[Contender]:
        """The models, made for images of the dataset, and what they cost."""
        found: list[Contender] = []
        for model, label in zip(self.models, short_names(self.models), strict=True):
            spec, cost = spec_for_dataset(model, dataset)
            share = 100 * cost.routed_parameters / cost.parameters
            spelling = re.sub(r"(:weights=)[^:]*/", r"\1", model) if label != model else ""  # without folders
            found.append(Contender(spec, ComparedModel(label, cost.parameters, cost.macs, share, spelling)))
        return found


@dataclass(frozen=True)
class Contender:
    """A model of a comparison: how it is made, and what it costs."""

    spec: ModelSpec
    model: ComparedModel


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
    """Run what is missing of the grid, and put everything together.

    ``recipe.trainable`` and ``recipe.layer_decay`` apply to pretrained models; others are trained as a whole. Where
    only heads are trained, the features of a backbone are computed once for all runs and cached in ``cache_dir``, or
    in memory. Pretrained models have their own normalization.

    ``settings`` is what runs depend on beside images, labels and the other arguments: the augmentation.
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

    def run_trials(active: Sequence[Contender], trials: Sequence[int], name: str) -> list[Run]:
        wanted = [(who, size, trial) for trial in trials for size in grid.samples for who in active]
        missing = [each for each in wanted if cells.find(*each) is None]
        for who in active:  # features first: their time would spoil the estimate of the rest
            if any(each[0] is who for each in missing):
                cells.images_of(who, progress.log)
        progress.begin(name, len(wanted) * recipe.epochs, (len(wanted) - len(missing)) * recipe.epochs)
        work = [cells.work(*each, keep=each[1:] == (grid.samples[-1], 0)) for each in wanted]
        planned = tuple(PlannedCell(each.name, each.digest) for each in work)
        add_to_plan(out, asked, SweepPlan(title, planned))
        results = run_cells(cells.cells, work, progress)
        progress.end()
        return [_run(*each, result.result) for each, result in zip(wanted, results, strict=True)]

    asked = [dataset.digest, grid.models, grid.samples, grid.trials, grid.max_trials, seed, recipe.to_json(), settings]
    sizes = ", ".join(map(str, grid.samples))
    title = f"compare {dataset.name}: {', '.join(grid.models)}; {sizes} samples, {recipe.epochs} epochs"
    planned = f"{grid.trials * len(grid.samples) * len(contenders)} runs"
    found = Comparison(
        data=dataset.name,
        digest=dataset.digest,
        classes=dataset.class_names,
        groups=dataset.cluster_names if _has_groups(dataset) else (),
        pool=len(dataset.train),
        tested=len(dataset.test),
        guessing=100 * float(dataset.test.labels.bincount().max()) / len(dataset.test),
        models=tuple(who.model for who in contenders),
        samples=grid.samples,
        trials=grid.trials,
        seed=seed,
        recipe={**recipe.to_json(), **heads, **(settings or {})},
        machine=machine,
        runs=tuple(run_trials(contenders, range(grid.trials), planned)),
        notes=tuple(_notes(dataset, grid)),
        max_trials=grid.max_trials,
    )
    if grid.max_trials is None:
        return found
    baseline, *others = contenders
    while True:
        others = [who for who in others if not is_settled(found, who.model.name)]
        if not others:
            return replace(found, ended="more would hardly change the answers")
        if found.trials == grid.max_trials:
            return replace(found, ended=f"{grid.max_trials} trials are the most that were allowed")
        active, trial = [baseline, *others], found.trials
        if seconds_left is not None and cells.seconds(active, grid.samples, trial) > seconds_left():
            return replace(found, ended="the next would take longer than the time that is left")
        runs = run_trials(active, [trial], f"trial {trial + 1}")
        found = replace(found, trials=trial + 1, runs=(*found.runs, *runs))


@dataclass(frozen=True)
class ComparisonRuns:
    """Finds and runs the cells of a comparison."""

    dataset: ImageDataset
    recipe: Recipe
    out: Path
    seed: int
    device: torch.device
    settings: dict[str, Any]
    cells: ResultCache
    cache_dir: Path | None
    head_lrs: bool
    images: dict[str, ImageDataset]
    """The images as each model takes them, with features where these stand for them."""

    @classmethod
    def of(
        cls,
        dataset: ImageDataset,
        recipe: Recipe,
        out: Path,
        seed: int,
        device: torch.device | str,
        settings: Mapping[str, Any] | None,
        cache_dir: Path | None,
        log: Callable[[str], None],
        head_lrs: bool = False,
    ) -> ComparisonRuns:
        """Those in a folder."""
        cells, about = ResultCache(out / "cells", log), dict(settings or {})
        return cls(dataset, recipe, out, seed, torch.device(device), about, cells, cache_dir, head_lrs, {})

    def seconds(self, models: Sequence[Contender], samples: Sequence[int], trial: int) -> float:
        """How long the missing runs of a trial will take, by the median of the same runs of earlier trials."""
        total = 0.0
        for who, size in itertools.product(models, samples):
            if self.find(who, size, trial) is None:
                earlier = (self._cached(who, size, each) for each in range(trial))
                total += statistics.median([each.seconds for each in earlier if each is not None] or [0.0])
        return total

    def find(self, who: Contender, samples: int, trial: int) -> Run | None:
        """The run, if it is finished."""
        cached = self._cached(who, samples, trial)
        return None if cached is None else _run(who, samples, trial, cached.result)

    def _cached(self, who: Contender, samples: int, trial: int) -> CachedResult | None:
        return self.cells.find(_name(who, samples, trial), self._content(who, samples, trial))

    def work(self, who: Contender, samples: int, trial: int, *, keep: bool) -> CellWork:
        """Returns the run as work to be done; ``keep`` is whether the trained network is kept."""
        name, content = _name(who, samples, trial), self._content(who, samples, trial)
        folder = self.out / "networks" / self.cells.path(name, content).stem

        def train(progress: Progress) -> dict[str, Any]:
            images = self.images_of(who, progress.log)
            progress.begin(name, self.recipe.epochs)
            # on features a run takes seconds, and files of a whole network as long
            found = self._train(who, samples, trial, folder if keep or not images.backbone else None, progress)
            progress.end()
            return found

        def remove() -> None:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

        return CellWork(name, content, self.recipe.epochs, train, remove)

    def _train(
        self, who: Contender, samples: int, trial: int, folder: Path | None, progress: Progress
    ) -> dict[str, Any]:
        key = keyed_random.keys(self.seed, [trial])
        number = int(keyed_random.bits(key, "compare", 1)[0, 0]) & ((1 << 62) - 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            spec = who.spec.with_seed(number)
            model = spec.build()
        try:
            found = fit(
                model,
                self.images_of(who, progress.log).subset(samples, number),
                self.recipe_of(who),
                seed=number,
                device=self.device,
                out=folder,
                spec=spec,
                progress=progress,
                eval_every=eval_every(self.recipe.epochs),
                test_features=True,
            )
        except Diverged as error:
            raise Diverged(f"{_name(who, samples, trial)}: {error}") from error
        return _cell_result(found, samples, _has_groups(self.dataset))

    def images_of(self, who: Contender, log: Callable[[str], None]) -> ImageDataset:
        """The images as a model takes them; features are computed where these stand for them."""
        if who.model.name not in self.images:
            dataset = self.normalized(who)
            model = self.backbone_of(who, dataset)
            if model is not None:
                options: dict[str, Any] = {"cache_dir": self.cache_dir, "device": self.device}
                dataset = add_features(dataset, model, **options, log=log)
            self.images[who.model.name] = dataset
        return self.images[who.model.name]

    def normalized(self, who: Contender) -> ImageDataset:
        """The images with the normalization of a model."""
        config = who.spec.pretrained_config()
        if not config.mean or not config.std:
            return self.dataset
        return self.dataset.with_normalize(Normalize(config.mean, config.std))

    def backbone_of(self, who: Contender, dataset: ImageDataset) -> nn.Module | None:
        """The model, where its features stand for the images of a dataset; None where they do not."""
        if self.recipe_of(who).trainable != "head":
            return None
        with torch.random.fork_rng(devices=[]):
            model = who.spec.build()
        return None if refuses_features(model, dataset) else model

    def recipe_of(self, who: Contender) -> Recipe:
        """The recipe of a model: layers are frozen in pretrained ones alone."""
        if not who.spec.is_pretrained:
            return replace(self.recipe, trainable="all", layer_decay=None)
        return head_recipe(self.recipe, who.spec.arguments.get("head")) if self.head_lrs else self.recipe

    def _content(self, who: Contender, samples: int, trial: int) -> dict[str, Any]:
        """Everything the run depends on; of a file of weights, its digest."""
        model = who.spec.to_json()
        model["arguments"].pop("weights", None)
        return {
            "model": model,
            "images": self.dataset.digest,
            "samples": samples,
            "trial": trial,
            "seed": self.seed,
            "recipe": self.recipe_of(who).cell_spec(),
            "device": self.device.type,
            **self.settings,
        }


def check_models(models: Sequence[str]) -> None:
    """Checks whether the models exist; an error names near ones. It takes no memory."""
    for label in models:
        try:
            spec = ModelSpec.parse(label).without_weights()
            with torch.device("meta"):
                create_model(spec.name, num_classes=2, **spec.arguments)
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f"compare: models: {str(error).removeprefix('create_model: ')}") from error


def shared_image_size(models: Sequence[str]) -> int | None:
    """Returns the image size of the pretrained models, which must agree; None without such."""
    sizes: dict[int, str] = {}
    for label in models:
        size = ModelSpec.parse(label).pretrained_config().image_size
        if size is not None:
            sizes.setdefault(size, label)
    if len(sizes) > 1:
        each = " and ".join(f"{size} pixels ({label})" for size, label in sizes.items())
        raise ValueError(f"compare: models were pretrained on images of {each}; choose one size with --img-size")
    return next(iter(sizes), None)


def expand_models(models: Sequence[str]) -> tuple[str, ...]:
    """Returns the comparison that naming a single network stands for; several stay as they are.

    A converted network is compared with itself before the conversion, a routed wide residual network with the dense
    one. Of a pretrained network of timm, the heads in `HEADS` are compared on its backbone, or the head that it names
    with the first of the others; mean pooling is the baseline.

    >>> expand_models(["timm/resnet18:pretrained"])
    ('timm/resnet18:pretrained:head=mean', 'timm/resnet18:pretrained:head=routed')
    >>> expand_models(["wrn10_2_pmoe:experts=8"])
    ('wrn10_2', 'wrn10_2_pmoe:experts=8')
    """
    if len(models) != 1:
        return tuple(models)
    [model] = models
    spec = ModelSpec.parse(model)
    if spec.conversions:
        return re.split(":convert=|:skip=", model, maxsplit=1)[0], model
    if re.fullmatch(r"wrn\d+_\d+_pmoe", spec.name) and not spec.is_pretrained:
        return spec.name.removesuffix("_pmoe"), model
    if not spec.is_pretrained or not spec.name.startswith("timm/"):
        raise ValueError(
            f"compare: models={model!r} has 1 of the at least 2 models that can be compared; name another one, such as "
            f"'{spec.name},…', or a network of timm with pretrained weights, whose heads are then compared: "
            "'timm/resnet18:pretrained' or 'timm/resnet18:weights=FILE'"
        )
    head = re.compile(r":head=(\w+)")
    own = head.search(model)
    if own is None:
        return tuple(f"{model}:head={each}" for each in HEADS)
    other = next(each for each in HEADS if each != own[1])
    stem = ":".join(part for part in model.split(":") if part.split("=")[0] not in ("head", *HEAD_OPTIONS))
    pair = f"{stem}:head={other}", model
    return pair if other == HEADS[0] else pair[::-1]


def short_names(models: Sequence[str]) -> list[str]:
    """Returns names for networks that tell them apart, without what all have in common.

    >>> short_names(["timm/resnet18:weights=a/b.pt:head=mean", "timm/resnet18:weights=a/b.pt:head=routed:experts=4"])
    ['head=mean', 'head=routed:experts=4']
    >>> short_names(["timm/resnet18:weights=a/b.pt", "wrn10_2"])
    ['timm/resnet18', 'wrn10_2']
    """
    parts = [model.split(":") for model in models]
    source = re.compile(r"weights=.*|pretrained(=True)?")
    plain = [[each for each in some if not source.fullmatch(each)] for some in parts]
    one_source = len({tuple(each for each in some if source.fullmatch(each)) for some in parts}) == 1
    one_name = len({some[0] for some in parts}) == 1 and all(len(some) > 1 for some in plain)
    tails = [some[1:] for some in plain] if one_source and one_name else plain
    for found in (tails, plain, [[re.sub(r"^(weights=).*/", r"\1", each) for each in some] for some in parts]):
        names = [":".join(each) for each in found]
        if len(set(names)) == len(names):
            return names
    return list(models)


def default_samples(images: int, classes: int) -> tuple[int, ...]:
    """Returns numbers of samples that fit so many training images: up to 1,000, a half and a quarter of that.

    The most leave a fifth of the images over, so that trials have different ones.

    >>> default_samples(5000, 10), default_samples(167, 4), default_samples(24, 2)
    ((250, 500, 1000), (25, 50, 100), (5, 10))
    """
    steps = [digit * 10**power for power in range(3) for digit in (1, 2, 5)] + [1000]
    most = max([each for each in steps if each <= 0.8 * images], default=images)
    found = tuple(most // part for part in (4, 2, 1) if most // part >= max(classes, 3))
    return found or (images,)


def _cell_result(found: FitResult, samples: int, has_groups: bool) -> dict[str, Any]:
    curve = [
        {"images": epoch.number * samples, "accuracy": epoch.test_accuracy, "seconds": epoch.seconds}
        for epoch in found.epochs
        if epoch.test_accuracy is not None
    ]
    groups = [None if math.isnan(each) else each for each in found.cluster_accuracy] if has_groups else []
    return {
        "accuracy": found.accuracy,
        "groups": groups,
        "curve": curve,
        "stopped": found.stopped,
        "seconds": found.seconds,
    }


def _run(who: Contender, samples: int, trial: int, result: Mapping[str, Any]) -> Run:
    return run_from_json({"model": who.model.name, "samples": samples, "trial": trial, **result})


def _name(who: Contender, samples: int, trial: int) -> str:
    return f"{who.model.name}, {samples} samples, trial {trial + 1}"


def _has_groups(dataset: ImageDataset) -> bool:
    """Whether clusters tell more than classes do."""
    return not torch.equal(dataset.test.clusters, dataset.test.labels)


def _notes(dataset: ImageDataset, grid: Grid) -> Iterator[str]:
    if dataset.skipped:
        some = ", ".join(f"{each.path} ({each.reason})" for each in dataset.skipped[:3])
        more = f" and {len(dataset.skipped) - 3} more" if len(dataset.skipped) > 3 else ""
        yield f"{len(dataset.skipped)} files were skipped: {some}{more}."
    margin = 100 * math.sqrt(0.25 / len(dataset.test)) * 1.96
    if margin > _NOTED_MARGIN:
        yield (
            f"All runs are tested on the same {len(dataset.test):,} images: intervals show how far trials differ, not "
            f"how far other test images would differ. On so many an accuracy of 50 % is known to ±{margin:.0f} points."
        )
    if grid.samples[-1] == len(dataset.train):
        yield (
            f"With {grid.samples[-1]:,} samples all images to train on are used: there trials differ by their initial "
            "weights and the order of the images, not by the images."
        )
