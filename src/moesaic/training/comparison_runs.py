"""The runs of a comparison: each trains a model with a number of samples in a trial, and is a cell of a cache."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moesaic import keyed_random
from moesaic.data.image_dataset import ImageDataset, Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.backbone_features import add_features, refuses_features
from moesaic.training.cell_runner import CellWork, run_cells
from moesaic.training.comparison_result import ComparedModel, Run, run_from_json
from moesaic.training.fit import Diverged, FitResult, fit
from moesaic.training.head_recipe import head_recipe
from moesaic.training.progress import Progress
from moesaic.training.recipe import Recipe
from moesaic.training.result_cache import CachedResult, ResultCache

__all__ = ["ComparisonRuns", "Contender", "eval_every", "has_groups"]

MAX_TESTS = 25
"""Tests of a run, at most: more would take longer than training on few images does."""


def eval_every(epochs: int) -> int:
    """Epochs from one test of a run to the next."""
    return -(-epochs // MAX_TESTS)


@dataclass(frozen=True)
class Contender:
    """A model of a comparison: how it is made, and what it costs."""

    spec: ModelSpec
    model: ComparedModel


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
    """The dataset with the normalization of each model, and with features where it trains on features."""

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
        """Returns the runs whose cells are in the folder ``out``."""
        cells, options = ResultCache(out / "cells", log), dict(settings or {})
        return cls(dataset, recipe, out, seed, torch.device(device), options, cells, cache_dir, head_lrs, {})

    def seconds(self, models: Sequence[Contender], samples: Sequence[int], trial: int) -> float:
        """Returns the time of the missing runs of a trial: the median time of the same runs of earlier trials."""
        total = 0.0
        for who, size in itertools.product(models, samples):
            if self.find(who, size, trial) is None:
                earlier = (self._cached(who, size, each) for each in range(trial))
                total += statistics.median([each.seconds for each in earlier if each is not None] or [0.0])
        return total

    def run_trials(
        self,
        models: Sequence[Contender],
        samples: Sequence[int],
        trials: Sequence[int],
        name: str,
        progress: Progress,
        plan: Callable[[Sequence[CellWork]], None],
    ) -> list[Run]:
        """Runs what is missing of the trials; ``plan`` gets all of their cells before the first one runs."""
        runs = [(who, size, trial) for trial in trials for size in samples for who in models]
        missing = [run for run in runs if self.find(*run) is None]
        for who in models:  # features first: their time would spoil the estimate of the rest
            if any(run[0] is who for run in missing):
                self.images_of(who, progress.log)
        epochs = self.recipe.epochs
        progress.begin(name, len(runs) * epochs, (len(runs) - len(missing)) * epochs)
        work = [self.work(*run, keep=run[1:] == (samples[-1], 0)) for run in runs]
        plan(work)
        results = run_cells(self.cells, work, progress)
        progress.end()
        return [_run(*run, result.result) for run, result in zip(runs, results, strict=True)]

    def find(self, contender: Contender, samples: int, trial: int) -> Run | None:
        """The run, if it is finished."""
        cached = self._cached(contender, samples, trial)
        return None if cached is None else _run(contender, samples, trial, cached.result)

    def _cached(self, contender: Contender, samples: int, trial: int) -> CachedResult | None:
        return self.cells.find(_name(contender, samples, trial), self._content(contender, samples, trial))

    def work(self, contender: Contender, samples: int, trial: int, *, keep: bool) -> CellWork:
        """Returns the run as work to be done; ``keep`` is whether the trained network is kept."""
        name, content = _name(contender, samples, trial), self._content(contender, samples, trial)
        folder = self.out / "networks" / self.cells.path(name, content).stem

        def train(progress: Progress) -> dict[str, Any]:
            images = self.images_of(contender, progress.log)
            progress.begin(name, self.recipe.epochs)
            # on features a run takes seconds, and files of a whole network as long
            result = self._train(contender, samples, trial, folder if keep or not images.backbone else None, progress)
            progress.end()
            return result

        def remove() -> None:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

        return CellWork(name, content, self.recipe.epochs, train, remove)

    def _train(
        self, contender: Contender, samples: int, trial: int, folder: Path | None, progress: Progress
    ) -> dict[str, Any]:
        key = keyed_random.keys(self.seed, [trial])
        number = int(keyed_random.bits(key, "compare", 1)[0, 0]) & ((1 << 62) - 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            spec = contender.spec.with_seed(number)
            model = spec.build()
        try:
            result = fit(
                model,
                self.images_of(contender, progress.log).subset(samples, number),
                self.recipe_of(contender),
                seed=number,
                device=self.device,
                out=folder,
                spec=spec,
                progress=progress,
                eval_every=eval_every(self.recipe.epochs),
                test_features=True,
            )
        except Diverged as error:
            raise Diverged(f"{_name(contender, samples, trial)}: {error}") from error
        return _cell_result(result, samples, has_groups(self.dataset))

    def images_of(self, contender: Contender, log: Callable[[str], None]) -> ImageDataset:
        """Returns the dataset with the normalization of a model; features are computed where it trains on features."""
        if contender.model.name not in self.images:
            dataset = self.normalized(contender)
            model = self.backbone_of(contender, dataset)
            if model is not None:
                options: dict[str, Any] = {"cache_dir": self.cache_dir, "device": self.device}
                dataset = add_features(dataset, model, **options, log=log)
            self.images[contender.model.name] = dataset
        return self.images[contender.model.name]

    def normalized(self, contender: Contender) -> ImageDataset:
        """The images with the normalization of a model."""
        config = contender.spec.pretrained_config()
        if not config.mean or not config.std:
            return self.dataset
        return self.dataset.with_normalize(Normalize(config.mean, config.std))

    def backbone_of(self, contender: Contender, dataset: ImageDataset) -> nn.Module | None:
        """Returns the model if it trains on its features in place of the images of a dataset; else None."""
        if self.recipe_of(contender).trainable != "head":
            return None
        with torch.random.fork_rng(devices=[]):
            model = contender.spec.build()
        return None if refuses_features(model, dataset) else model

    def recipe_of(self, contender: Contender) -> Recipe:
        """The recipe of a model: layers are frozen in pretrained ones alone."""
        if not contender.spec.is_pretrained:
            return replace(self.recipe, trainable="all", layer_decay=None)
        return head_recipe(self.recipe, contender.spec.arguments.get("head")) if self.head_lrs else self.recipe

    def _content(self, contender: Contender, samples: int, trial: int) -> dict[str, Any]:
        """The settings that the run depends on; of a file of weights, its digest."""
        model = contender.spec.to_json()
        model["arguments"].pop("weights", None)
        return {
            "model": model,
            "images": self.dataset.digest,
            "samples": samples,
            "trial": trial,
            "seed": self.seed,
            "recipe": self.recipe_of(contender).cell_spec(),
            "device": self.device.type,
            **self.settings,
        }


def has_groups(dataset: ImageDataset) -> bool:
    """Whether the clusters of a dataset are others than its classes."""
    return not torch.equal(dataset.test.clusters, dataset.test.labels)


def _cell_result(result: FitResult, samples: int, has_groups: bool) -> dict[str, Any]:
    curve = [
        {"images": epoch.number * samples, "accuracy": epoch.test_accuracy, "seconds": epoch.seconds}
        for epoch in result.epochs
        if epoch.test_accuracy is not None
    ]
    groups = [None if math.isnan(accuracy) else accuracy for accuracy in result.cluster_accuracy] if has_groups else []
    return {
        "accuracy": result.accuracy,
        "groups": groups,
        "curve": curve,
        "stopped": result.stopped,
        "seconds": result.seconds,
    }


def _run(contender: Contender, samples: int, trial: int, result: Mapping[str, Any]) -> Run:
    return run_from_json({"model": contender.model.name, "samples": samples, "trial": trial, **result})


def _name(contender: Contender, samples: int, trial: int) -> str:
    return f"{contender.model.name}, {samples} samples, trial {trial + 1}"
