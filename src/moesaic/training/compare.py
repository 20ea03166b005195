"""Train several models with different numbers of labelled images, to see which needs fewer of them.

A run is a model, a number of samples and a trial. Within a trial every model gets the same images, fewer
images are among more, and the order of the images is the same: models are compared pair by pair. A finished
run is a cell (`cells`) and never done again; one that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesaic import keyed_random
from moesaic.data.datasets import ImageDataset, Normalize
from moesaic.models.registry import ModelSpec, create_model
from moesaic.training.comparison_result import ComparedModel, Comparison, Run, run_from_json
from moesaic.training.features import add_features, refuses_features
from moesaic.training.fit import Diverged, FitResult, fit
from moesaic.training.head_recipe import HEAD_LRS, head_recipe
from moesaic.training.model_for_dataset import spec_for_dataset
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.recipe import Recipe
from moesaic.training.result_cache import ResultCache

__all__ = ["Grid", "compare"]

MOST_TESTS = 25
"""So many times a run is tested at most: more would take longer than training on few images does."""
_MARGIN = 3.0
"""Points of accuracy: a larger margin of error of the test images is noted in the result."""


@dataclass(frozen=True)
class Grid:
    """What to run: every model with every number of samples, ``trials`` times."""

    models: tuple[str, ...]
    """Networks as `ModelSpec.parse` reads them, such as "wrn10_2_pmoe:patches_per_expert=8". Others are compared with
    the first."""
    samples: tuple[int, ...]
    trials: int

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
        object.__setattr__(self, "samples", tuple(sorted(self.samples)))

    def check_names(self) -> None:
        """Whether the models exist; an error names near ones. It takes no memory."""
        for label in self.models:
            try:
                spec = ModelSpec.parse(label).without_weights()
                with torch.device("meta"):
                    create_model(spec.name, num_classes=2, **spec.arguments)
            except (ValueError, TypeError, ImportError) as error:
                raise ValueError(f"compare: models: {str(error).removeprefix('create_model: ')}") from error

    def image_size(self) -> int | None:
        """The image size of the pretrained models, which must agree; None without such."""
        sizes: dict[int, str] = {}
        for label in self.models:
            size = ModelSpec.parse(label).pretrained_config().image_size
            if size is not None:
                sizes.setdefault(size, label)
        if len(sizes) > 1:
            each = " and ".join(f"{size} pixels ({label})" for size, label in sizes.items())
            raise ValueError(f"compare: models were pretrained on images of {each}; choose one size with --img-size")
        return next(iter(sizes), None)

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

    def contenders(self, dataset: ImageDataset) -> list[_Contender]:
        """The models, made for images of the dataset, and what they cost."""
        found: list[_Contender] = []
        shorter = [re.sub(r"(:weights=)[^:]*/", r"\1", model) for model in self.models]  # without folders
        labels = shorter if len(set(shorter)) == len(shorter) else self.models
        for model, label in zip(self.models, labels, strict=True):
            spec, cost = spec_for_dataset(model, dataset)
            share = 100 * cost.routed_parameters / cost.parameters
            found.append(_Contender(spec, ComparedModel(label, cost.parameters, cost.macs, share)))
        return found


@dataclass(frozen=True)
class _Contender:
    spec: ModelSpec
    sized: ComparedModel


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
    """
    grid.check(dataset)
    if not dataset.digest:
        raise ValueError("compare: the dataset has no digest, by which finished runs are found again; give it one")
    progress = progress or NoProgress()
    device = torch.device(device)
    contenders = grid.contenders(dataset)
    results = ResultCache(out / "cells", progress.log)
    heads = {"head_lrs": dict(HEAD_LRS)} if head_lrs and recipe.trainable == "head" else {}
    cells = _Runs(dataset, recipe, out, seed, device, dict(settings or {}), results, cache_dir, head_lrs, {})
    wanted = [(who, size, trial) for trial in range(grid.trials) for size in grid.samples for who in contenders]
    done = sum(cells.find(*each) is not None for each in wanted)
    progress.begin(f"{len(wanted)} runs", len(wanted) * recipe.epochs, done * recipe.epochs)
    runs = [cells.run(*each, progress=progress, keep=each[1:] == (grid.samples[-1], 0)) for each in wanted]
    progress.end()
    return Comparison(
        data=dataset.name,
        digest=dataset.digest,
        classes=dataset.class_names,
        groups=dataset.cluster_names if _has_groups(dataset) else (),
        pool=len(dataset.train),
        tested=len(dataset.test),
        guessing=100 * float(dataset.test.labels.bincount().max()) / len(dataset.test),
        models=tuple(who.sized for who in contenders),
        samples=grid.samples,
        trials=grid.trials,
        seed=seed,
        recipe={**recipe.to_json(), **heads, **(settings or {})},
        machine=machine,
        runs=tuple(runs),
        notes=tuple(_notes(dataset, grid)),
    )


@dataclass(frozen=True)
class _Runs:
    """Runs the cells of a comparison."""

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

    def find(self, who: _Contender, samples: int, trial: int) -> Run | None:
        cached = self.cells.find(_name(who, samples, trial), self._content(who, samples, trial))
        return None if cached is None else _run(who, samples, trial, cached.result)

    def run(self, who: _Contender, samples: int, trial: int, *, progress: Progress, keep: bool) -> Run:
        found = self.find(who, samples, trial)
        if found is not None:
            return found
        name, content = _name(who, samples, trial), self._content(who, samples, trial)
        folder = self.out / "networks" / self.cells.path(name, content).stem
        progress.begin(name, self.recipe.epochs)
        cached = self.cells.get_or_run(name, content, lambda: self._train(who, samples, trial, folder, progress))
        progress.end()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return _run(who, samples, trial, cached.result)

    def _train(self, who: _Contender, samples: int, trial: int, folder: Path, progress: Progress) -> dict[str, Any]:
        key = keyed_random.keys(self.seed, [trial])
        number = int(keyed_random.bits(key, "compare", 1)[0, 0]) & ((1 << 62) - 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            spec = who.spec.with_seed(number)
            model = spec.build()
        try:
            found = fit(
                model,
                self._images(who, progress).subset(samples, number),
                self._recipe(who),
                seed=number,
                device=self.device,
                out=folder,
                spec=spec,
                progress=progress,
                eval_every=-(-self.recipe.epochs // MOST_TESTS),
                test_features=True,
            )
        except Diverged as error:
            raise Diverged(f"{_name(who, samples, trial)}: {error}") from error
        return _cell_result(found, samples, _has_groups(self.dataset))

    def _images(self, who: _Contender, progress: Progress) -> ImageDataset:
        if who.sized.name not in self.images:
            config, dataset = who.spec.pretrained_config(), self.dataset
            if config.mean and config.std:
                dataset = dataset.with_normalize(Normalize(config.mean, config.std))
            if self._recipe(who).trainable == "head":
                with torch.random.fork_rng(devices=[]):
                    model = who.spec.build()
                if not refuses_features(model, dataset):
                    options: dict[str, Any] = {"cache_dir": self.cache_dir, "device": self.device}
                    dataset = add_features(dataset, model, **options, log=progress.log)
            self.images[who.sized.name] = dataset
        return self.images[who.sized.name]

    def _recipe(self, who: _Contender) -> Recipe:
        if not who.spec.is_pretrained:
            return replace(self.recipe, trainable="all", layer_decay=None)
        return head_recipe(self.recipe, who.spec.arguments.get("head")) if self.head_lrs else self.recipe

    def _content(self, who: _Contender, samples: int, trial: int) -> dict[str, Any]:
        """Everything the run depends on; of a file of weights, its digest."""
        model = who.spec.to_json()
        model["arguments"].pop("weights", None)
        return {
            "model": model,
            "images": self.dataset.digest,
            "samples": samples,
            "trial": trial,
            "seed": self.seed,
            "recipe": self._recipe(who).cell_spec(),
            "device": self.device.type,
            **self.settings,
        }


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


def _run(who: _Contender, samples: int, trial: int, result: Mapping[str, Any]) -> Run:
    return run_from_json({"model": who.sized.name, "samples": samples, "trial": trial, **result})


def _name(who: _Contender, samples: int, trial: int) -> str:
    return f"{who.sized.name}, {samples} samples, trial {trial + 1}"


def _has_groups(dataset: ImageDataset) -> bool:
    """Whether clusters tell more than classes do."""
    return not torch.equal(dataset.test.clusters, dataset.test.labels)


def _notes(dataset: ImageDataset, grid: Grid) -> Iterator[str]:
    if dataset.skipped:
        some = ", ".join(f"{each.path} ({each.reason})" for each in dataset.skipped[:3])
        more = f" and {len(dataset.skipped) - 3} more" if len(dataset.skipped) > 3 else ""
        yield f"{len(dataset.skipped)} files were skipped: {some}{more}."
    margin = 100 * math.sqrt(0.25 / len(dataset.test)) * 1.96
    if margin > _MARGIN:
        yield (
            f"All runs are tested on the same {len(dataset.test):,} images: intervals show how far trials differ, not "
            f"how far other test images would differ. On so many an accuracy of 50 % is known to ±{margin:.0f} points."
        )
    if grid.samples[-1] == len(dataset.train):
        yield (
            f"With {grid.samples[-1]:,} samples all images to train on are used: there trials differ by their initial "
            "weights and the order of the images, not by the images."
        )
