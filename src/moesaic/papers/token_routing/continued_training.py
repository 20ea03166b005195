"""Cells that train a network once on CIFAR-10, and then on from its weights in several ways.

A branch starts from a copy of the trained network, converted or as it is, and trains it further. All branches of a
trial start from the same weights and see the images in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moesaic.data.builtin_datasets import missing_files
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.image_dataset import ImageDataset
from moesaic.data.load import load_images
from moesaic.models.convert import convert
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import create_model
from moesaic.papers.engine.runner import Runner
from moesaic.papers.token_routing.vit_recipe import AUGMENT, NORMALIZE
from moesaic.training.fit import fit
from moesaic.training.recipe import Recipe

__all__ = ["SIDE", "Branch", "Option", "Stage", "TokenCell", "TokenResult", "check_data", "converted", "network"]

Option: TypeAlias = tuple[str, float | str]
"""An option of `create_model` or `convert`, and its value."""

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

_TASK = "cifar10"
_CIFAR10_DIGEST = "641bfa6cf15463dc"
"""Digest of CIFAR-10's own images."""
_CLASSES = 10
SIDE = 32
"""Height and width of the images."""


@dataclass(frozen=True)
class Stage:
    """The result of a training run."""

    accuracy: float
    """Test accuracy after the last epoch, in percent."""
    macs: int
    """Multiply-adds of the network for one image."""
    images: int
    """Seen in training, with repetition."""

    @property
    def training_macs(self) -> int:
        """Multiply-adds of the forward passes of training."""
        return self.images * self.macs


@dataclass(frozen=True)
class TokenResult:
    """The results of a network's training and of its branches."""

    base: Stage
    branches: Mapping[str, Stage]

    def training_macs(self, branch: str) -> int:
        """Multiply-adds of the forward passes of training up to the end of a branch."""
        return self.base.training_macs + self.branches[branch].training_macs


@dataclass(frozen=True)
class Branch:
    """A way to train a trained network further."""

    name: str
    recipe: Recipe
    conversion: tuple[Option, ...] = ()
    """Arguments of `convert`; empty: the network stays as it is."""
    images: int = 0
    """Training images on which `convert` sees which hidden neurons are active together; 0 for none."""


@dataclass(frozen=True)
class TokenCell:
    """Trains one network once, and then its branches."""

    network: str
    """A name of `create_model`."""
    trial: int
    recipe: Recipe
    options: tuple[Option, ...] = ()
    """Options of `create_model`."""
    samples: int | None = None
    """Number of training images; None for all."""
    branches: tuple[Branch, ...] = ()
    on_cpu: bool = False
    """Whether the cell may run on a CPU, which takes days for all but small networks."""

    @property
    def steps(self) -> int:
        return self.recipe.epochs + sum(branch.recipe.epochs for branch in self.branches)

    def missing_requirement(self, runner: Runner) -> str | None:
        lacks: list[str] = []
        if missing_files(_TASK, runner.data_dir) is not None:
            lacks.append("CIFAR-10's binary files under --data-dir")
        if not self.on_cpu and not runner.device.startswith("cuda"):
            lacks.append("a GPU (--device cuda)")
        return f"needs {' and '.join(lacks)}" if lacks else None

    def spec(self, runner: Runner) -> dict[str, Any]:
        # what was measured elsewhere can be looked at without the images
        here = runner.data_dir if missing_files(_TASK, runner.data_dir) is None else None
        return {
            "experiment": "token routing",
            "engine": ENGINE,
            "data": _CIFAR10_DIGEST if here is None else _loaded(here).digest,
            "augment": AUGMENT,
            "normalize": NORMALIZE,
            "seed": runner.seed,
            "network": self.network,
            "trial": self.trial,
            "recipe": self.recipe.cell_spec(),
            "options": dict(self.options),
            "samples": self.samples,
            "branches": [
                {**asdict(branch), "recipe": branch.recipe.cell_spec(), "conversion": dict(branch.conversion)}
                for branch in self.branches
            ],
        }

    def measure(self, runner: Runner) -> dict[str, Any]:
        assert runner.data_dir is not None, "missing_requirement covers this"
        seed = runner.trial_seed(self.trial)
        task = _loaded(runner.data_dir)
        if self.samples is not None:
            task = task.subset(self.samples, seed)  # the same subset for all networks of a trial
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = network(self.network, self.options)
        base = _trained(model, task, self.recipe, seed, runner)
        branches: dict[str, Any] = {}
        for branch in self.branches:
            other = _start(copy.deepcopy(model), branch, task, seed)
            branches[branch.name] = _trained(other, task, branch.recipe, seed + 1, runner)
        return {"base": base, "branches": branches}

    def result(self, stored: dict[str, Any]) -> TokenResult:
        return TokenResult(
            _stage(stored["base"]), {name: _stage(branch) for name, branch in stored["branches"].items()}
        )


def network(name: str, options: tuple[Option, ...]) -> nn.Module:
    """Returns a network for CIFAR-10, initialised from torch's default generator."""
    given: dict[str, Any] = dict(options)
    return create_model(name, num_classes=_CLASSES, **given)


def converted(
    model: nn.Module, conversion: tuple[Option, ...], *, images: Tensor | None = None, seed: int = 0
) -> nn.Module:
    """Returns the network for CIFAR-10, converted in place; as it is if there is no conversion."""
    if not conversion:
        return model
    arguments: dict[str, Any] = dict(conversion)
    return convert(model, arguments.pop("layer"), input_size=SIDE, images=images, seed=seed, **arguments)


def _start(model: nn.Module, branch: Branch, task: ImageDataset, seed: int) -> nn.Module:
    images = task.eval_transform(task.train.pixels[: branch.images], torch.empty(0)) if branch.images else None
    return converted(model, branch.conversion, images=images, seed=seed)


def _trained(model: nn.Module, task: ImageDataset, recipe: Recipe, seed: int, runner: Runner) -> dict[str, Any]:
    """Trains the network and returns the measurements as plain JSON."""
    found = fit(
        model,
        task,
        recipe,
        seed=seed,
        device=runner.device,
        progress=runner.progress,
        eval_every=recipe.epochs,
    )
    return {
        "accuracy": round(found.accuracy, 4),
        "training": [round(epoch.train_accuracy, 2) for epoch in found.epochs],
        "losses": [round(epoch.loss, 5) for epoch in found.epochs],
        "alarms": sorted({alarm for epoch in found.epochs for alarm in epoch.alarms}),
        "macs": count_macs(model, (3, SIDE, SIDE)).macs,
        "images": found.images,
        "seconds": round(found.seconds, 3),
    }


def _stage(stored: Mapping[str, Any]) -> Stage:
    return Stage(stored["accuracy"], stored["macs"], stored["images"])


@lru_cache(maxsize=1)
def _loaded(data_dir: Path) -> ImageDataset:
    return load_images(_TASK, data_dir=data_dir, augment=AUGMENT, normalize=NORMALIZE)


def check_data(data_dir: Path | None) -> None:
    """Raises if CIFAR-10 in the directory is damaged; missing files are not an error."""
    if data_dir is not None and missing_files(_TASK, data_dir) is None:
        for split in ("train", "test"):
            load_cifar10(split, data_dir)
