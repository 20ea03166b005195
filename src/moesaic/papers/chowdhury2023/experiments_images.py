"""Experiments of Chowdhury et al. 2023, Section 5.2 and Appendix A: wide residual networks on images.

`WideCell` trains one network, dense (WRN) or with a pMoE layer (WRN-pMoE), on one number of samples. `StepCell` times
a training step of both. `plan` lists the cells of a preset.

The authors train 50 epochs on up to 50 000 images, five times; so does the full preset, as far as the data hold so
many. With the short preset a run sees at most `SEEN` images, so that all runs fit on one GPU in twenty minutes: with
few samples it has 50 epochs, with more samples fewer epochs and the same number of steps. Both networks of a comparison
have the same number of epochs and, within a trial, the same images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moesaic.data.augment import train_transform
from moesaic.data.builtin_datasets import missing_files
from moesaic.data.celeba import read_celeba
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.image_dataset import Augment, ImageDataset, LabelledImages, Normalize
from moesaic.data.load import Normalization, load_images
from moesaic.intervals import Curve
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import create_model
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.data import cifar_mosaics
from moesaic.papers.engine import paper
from moesaic.papers.engine.runner import Runner
from moesaic.training.fit import Epoch, fit
from moesaic.training.recipe import Recipe

__all__ = [
    "COMPARED",
    "CONVERGED",
    "EPOCHS",
    "FIGURES",
    "SEEN",
    "SETTLED",
    "TRIALS",
    "Arm",
    "Figure",
    "StepCell",
    "StepResult",
    "WideCell",
    "WideResult",
    "accuracies",
    "accuracy_curve",
    "cell_prefixes",
    "check_data",
    "epochs",
    "plan",
    "recipe",
    "runs_of",
    "sizes_of",
]

Array = NDArray[np.float64]

Arm = Literal["wrn", "pmoe"]
"""The dense network, or the same network with a pMoE layer as its last convolution."""

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

PRINTED_ROUTER_INIT = "eq. 7"
"""Initial routers of WRN-pMoE as printed. Cells without this entry started from `PatchMoE`'s own weights."""

CONVERGED = 99.0
"""Training accuracy in percent, averaged over an epoch, at which a network counts as converged."""

_NEEDS_GPU = "needs a GPU (--device cuda)"
_CELEBA, _CIFAR = "CelebA's images and lists", "CIFAR-10's binary files"
_FILES = {
    "celeba-smiling": _CELEBA,
    "celeba-spurious": _CELEBA,
    "celeba-4class": _CELEBA,
    "cifar10": _CIFAR,
    "cifar10-noise": f"{_CIFAR} and photographs of plants (plants or flowers102)",
    "cifar-vehicles": _CIFAR,
}

cifar_mosaics.register()


@dataclass(frozen=True, eq=False)
class WideResult:
    """Measurements of one run."""

    accuracy: float
    """Test accuracy after the last epoch, in percent."""
    groups: dict[str, float]
    """Test accuracy of each group of test images, by name."""
    tested: Array
    """(n, 2): epochs with a test, and their test accuracies."""
    training: Array
    """(epochs,): training accuracy in percent."""
    images: int
    """Images seen in training, with repetition."""
    macs: int
    """Multiply-adds of the forward pass of one image, with routed layers executed sparsely."""
    seconds: float
    """Duration of training. Not comparable between runs, which may share a GPU."""

    @property
    def converged(self) -> float:
        """Images seen by the end of the first epoch with `CONVERGED` training accuracy; infinite if there is none."""
        reached = np.flatnonzero(self.training >= CONVERGED)
        return self.images * (int(reached[0]) + 1) / len(self.training) if reached.size else math.inf


@dataclass(frozen=True)
class WideCell:
    """Trains one network on one number of samples."""

    task: str
    """A name of `moesaic.data.DATASETS`."""
    arm: Arm
    fidelity: Fidelity
    samples: int
    trial: int
    recipe: Recipe
    scale: Normalization = "unit"
    augment: Augment = "none"
    tests: int = 5
    """Number of tests, evenly spaced over the epochs, including the last epoch."""
    network: str = "wrn10_10"
    size: int | None = None
    """Side to which images are resized; None for their own size."""
    on_cpu: bool = False
    """Whether the cell may run on a CPU, which takes days for all but small networks."""

    @property
    def steps(self) -> int:
        return self.recipe.epochs

    def missing_requirement(self, runner: Runner) -> str | None:
        if missing_files(self.task, runner.data_dir) is not None:
            return f"needs {_FILES[self.task]} under --data-dir"
        return None if self.on_cpu or runner.device.startswith("cuda") else _NEEDS_GPU

    def spec(self, runner: Runner) -> dict[str, Any]:
        described = {**asdict(self), "recipe": self.recipe.cell_spec()}
        del described["on_cpu"]
        here = runner.data_dir if missing_files(self.task, runner.data_dir) is None else None
        digest = _digest(self.task, here, self.size) if here is not None else "not here"
        if self.arm == "pmoe" and self.fidelity == "print":
            described["router_init"] = PRINTED_ROUTER_INIT
        return {"experiment": "wide", "engine": ENGINE, "data": digest, "seed": runner.seed, **described}

    def measure(self, runner: Runner) -> dict[str, Any]:
        assert runner.data_dir is not None, "missing_requirement covers this"
        seed = runner.trial_seed(self.trial)
        whole = _scaled(_loaded(self.task, runner.data_dir, self.size), self.scale, self.augment)
        task = whole.subset(self.samples, seed)  # the same subset for all networks of a trial
        shape = (int(task.train.pixels.shape[1]), int(task.train.pixels.shape[2]), int(task.train.pixels.shape[3]))
        model = _network(self.network, self.arm, self.fidelity, task.num_classes, shape, seed)
        every = max(math.ceil(self.recipe.epochs / self.tests), 1)
        cost = count_macs(model, shape).macs
        found = fit(
            model, task, self.recipe, seed=seed, device=runner.device, progress=runner.progress, eval_every=every
        )
        return {
            "accuracy": round(found.accuracy, 4),
            "groups": {
                name: round(share, 4)
                for name, share in zip(task.cluster_names, found.cluster_accuracy, strict=True)
                if math.isfinite(share)
            },
            "tested": [[e.number, round(e.test_accuracy, 4)] for e in found.epochs if e.test_accuracy is not None],
            "training": [round(epoch.train_accuracy, 4) for epoch in found.epochs],
            "losses": [round(epoch.loss, 6) for epoch in found.epochs],
            "images": found.images,
            "macs": cost,
            "seconds": round(found.seconds, 3),
            "stopped": found.stopped,
        }

    def result(self, stored: dict[str, Any]) -> WideResult:
        return WideResult(
            stored["accuracy"],
            stored["groups"],
            np.asarray(stored["tested"], dtype=np.float64).reshape(-1, 2),
            np.asarray(stored["training"], dtype=np.float64),
            stored["images"],
            stored["macs"],
            stored["seconds"],
        )


@dataclass(frozen=True, eq=False)
class StepResult:
    """Durations of training steps."""

    wrn: Array
    """(rounds,) seconds per image."""
    pmoe: Array
    macs: dict[str, int]
    """Multiply-adds of the forward pass of one image, by arm."""
    device: str


@dataclass(frozen=True)
class StepCell:
    """Times training of both arms in turn. The machine must be otherwise idle."""

    fidelity: Fidelity
    classes: int = 4
    side: int = 64
    batch: int = 128
    batches: int = 20
    rounds: int = 5
    network: str = "wrn10_10"
    on_cpu: bool = False

    @property
    def steps(self) -> int:
        return 2 * self.rounds * _TIMED_EPOCHS

    def missing_requirement(self, runner: Runner) -> str | None:
        return None if self.on_cpu or runner.device.startswith("cuda") else _NEEDS_GPU

    def spec(self, runner: Runner) -> dict[str, Any]:
        described = asdict(self)
        del described["on_cpu"]
        return {"experiment": "wide steps", "engine": ENGINE, **described}

    def measure(self, runner: Runner) -> dict[str, Any]:
        shape = (3, self.side, self.side)
        noise = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.batch * self.batches, *shape), dtype=torch.uint8, generator=noise)
        train = LabelledImages(images, torch.arange(len(images)) % self.classes, torch.zeros(len(images)).long())
        names = tuple(f"class {number}" for number in range(self.classes))
        scale = Normalize((0.0,) * 3, (1.0,) * 3)
        few = train.take(torch.arange(2 * self.classes))
        task = ImageDataset(train, few, names, ("all",), scale, scale, name="noise")
        recipe = Recipe(
            _TIMED_EPOCHS,
            self.batch,
            "sgd",
            1e-3,
            momentum=0.0,
            weight_decay=0.0,
            schedule="constant",
            warmup_epochs=0.0,
        )
        arms: tuple[Arm, Arm] = ("wrn", "pmoe")
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        macs: dict[str, int] = {}
        for _ in range(self.rounds):
            for arm in arms:
                model = _network(self.network, arm, self.fidelity, self.classes, shape, 0)
                macs[arm] = count_macs(model, shape).macs
                epochs = fit(
                    model, task, recipe, device=runner.device, progress=runner.progress, eval_every=_TIMED_EPOCHS
                ).epochs
                seconds[arm].append(_seconds_an_image(epochs))
        return {**seconds, "macs": macs, "device": _device_name(runner.device)}

    def result(self, stored: dict[str, Any]) -> StepResult:
        wrn, pmoe = (np.asarray(stored[arm], dtype=np.float64) for arm in ("wrn", "pmoe"))
        return StepResult(wrn, pmoe, stored["macs"], stored["device"])


_TIMED_EPOCHS = 3
"""The first epoch is warm-up and not counted."""


def _seconds_an_image(epochs: tuple[Epoch, ...]) -> float:
    return float(np.mean([1 / epoch.images_per_second for epoch in epochs[1:]]))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _network(
    name: str, arm: Arm, fidelity: Fidelity, classes: int, shape: tuple[int, int, int], seed: int
) -> nn.Module:
    options: dict[str, Any] = {"fidelity": fidelity, "in_channels": shape[0]}
    if arm == "pmoe":
        options["image_size"] = shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_model(name if arm == "wrn" else f"{name}_pmoe", num_classes=classes, **options)


@lru_cache(maxsize=1)
def _loaded(name: str, data_dir: Path, size: int | None) -> ImageDataset:
    """Loads a dataset. Only one is cached: they take gigabytes, and the cells of a dataset run one after another."""
    return load_images(name, data_dir=data_dir, size=size)


@cache
def _digest(name: str, data_dir: Path, size: int | None) -> str:
    return _loaded(name, data_dir, size).digest


def _scaled(task: ImageDataset, scale: Normalization, augment: Augment) -> ImageDataset:
    channels, side = task.train.pixels.shape[1:3]
    assert task.normalize is not None, "named sets have one"
    chosen = task.normalize if scale == "standard" else Normalize((0.0,) * channels, (1.0,) * channels)
    return replace(
        task,
        train_transform=train_transform(augment, chosen, side),
        eval_transform=chosen,
        normalize=chosen,
    )


def check_data(data_dir: Path) -> None:
    """Raises if CelebA's lists or CIFAR-10 in the directory are damaged; missing files are not an error."""
    if missing_files("celeba-smiling", data_dir) is None:
        read_celeba(data_dir)
    if missing_files("cifar10", data_dir) is None:
        for split in ("train", "test"):
            load_cifar10(split, data_dir)


def runs_of(experiment: paper.ExperimentResults[Any], task: str, arm: Arm, samples: int) -> list[WideResult]:
    """Returns the trials of a network on a number of samples."""
    return experiment.series(f"wide/{task}/{arm}/{samples}")[1]


def sizes_of(experiment: paper.ExperimentResults[Any], task: str, arm: Arm = "pmoe") -> list[int]:
    """Returns the numbers of samples with runs, in increasing order."""
    start = f"wide/{task}/{arm}/"
    return sorted(
        {int(name.removeprefix(start).partition("/")[0]) for name in experiment.plan if name.startswith(start)}
    )


def cell_prefixes(*tasks: str) -> tuple[str, ...]:
    """Returns the name prefixes of the runs of both networks on some tasks."""
    return tuple(f"wide/{task}/{arm}/" for task in tasks for arm in ("wrn", "pmoe"))


def accuracies(runs: Sequence[WideResult]) -> Array:
    """Returns the test accuracies (T,) in percent."""
    return np.array([run.accuracy for run in runs])


def accuracy_curve(experiment: paper.ExperimentResults[Any], task: str, arm: Arm) -> Curve:
    """Returns test accuracies by number of samples."""
    sizes = sizes_of(experiment, task, arm)
    return sizes, np.stack([accuracies(runs_of(experiment, task, arm, samples)) for samples in sizes])


EPOCHS = 50
"""Epochs of the authors' code, and of runs here if `SEEN` allows them."""
TRIALS = (5, 3)
"""Trials on smiling faces and on vehicles, as in the paper; trials on the other tasks."""
SETTLED = 1250
"""Samples from which on runs have 450 steps or more, enough for BatchNorm's averages with Keras' momentum."""


@dataclass(frozen=True)
class Figure:
    """One of the paper's figures: accuracy against samples on one task."""

    where: str
    about: str
    """Short description of the task."""
    side: int
    """Side of the images."""
    paper_sizes: str
    """Numbers of samples in the authors' code."""
    sizes: Mapping[Fidelity, tuple[int, ...]]
    """Numbers of samples here."""
    trials: int = TRIALS[1]
    more_for_wrn: Mapping[Fidelity, tuple[int, ...]] = field(default_factory=dict[Fidelity, tuple[int, ...]])
    """Further numbers of samples for WRN alone, to find how many it needs for the accuracy of WRN-pMoE."""
    full_sizes: tuple[int, ...] = ()
    """Numbers of samples as released with the full preset: the paper's, as far as the data hold them."""
    full_trials: int = TRIALS[0]


SEEN = {64: 128_000, 32: 100_000}
"""Maximum number of images that a run sees, by the side of the images: 1 000 and 780 steps."""

FIGURES: Mapping[str, Figure] = {
    "celeba-smiling": Figure(
        "Figure 10",
        "faces: smiling or not",
        64,
        "2 000 to 10 000",
        {"released": (1000, 2000, 4000), "best": (250, 1000, 4000)},
        TRIALS[0],
        more_for_wrn={"released": (8000,)},
        full_sizes=(1000, 2000, 4000, 6000, 8000, 10_000),
    ),
    "celeba-spurious": Figure(
        "Figure 11",
        "faces: smiling or not, where it is correlated with hair colour in training",
        64,
        "5 000 to 25 000",
        {"released": (3000,)},
        full_sizes=(3400,),
        full_trials=10,
    ),
    "celeba-4class": Figure(
        "Figure 12",
        "faces: smiling × eyeglasses",
        64,
        "4 000 to 16 000",
        {"released": (1250, 5000)},
        full_sizes=(4000, 5440),
    ),
    "cifar10": Figure(
        "Figure 14",
        "CIFAR-10",
        32,
        "10 000 to 50 000",
        {"released": (4000, 8000)},
        full_sizes=(10_000, 20_000, 30_000, 40_000, 50_000),
    ),
    "cifar10-noise": Figure(
        "Figure 15",
        "CIFAR-10, small on a photograph of a plant",
        32,
        "10 000 to 50 000",
        {"released": (4000, 8000)},
        full_sizes=(10_000, 20_000, 30_000, 40_000, 50_000),
    ),
    "cifar-vehicles": Figure(
        "Figure 16",
        "a vehicle among three animals",
        32,
        "4 000 to 20 000",
        {"released": (1000, 2000, 4000), "best": (4000,), "print": (4000,)},
        TRIALS[0],
        full_sizes=(4000, 8000, 12_000, 16_000, 20_000),
    ),
}
"""By the name of the task."""


COMPARED: Mapping[str, tuple[int, ...]] = {"celeba-smiling": (1000, 4000), "cifar-vehicles": (4000,)}
"""Tasks and samples on which our network is compared with the released one."""


_ROUTERS = 1e-4
"""Learning rate of routers in our recipe: `Recipe`'s default, fixed here because results depend on it."""


def epochs(samples: int, side: int) -> int:
    """How long a run on so many samples is.

    >>> [epochs(samples, side=64) for samples in (250, 1000, 4000, 8000)]
    [50, 50, 32, 16]
    """
    return max(min(EPOCHS, SEEN[side] // samples), 1)


def recipe(fidelity: Fidelity, samples: int, side: int, arm: Arm, preset: str = "short") -> Recipe:
    """The authors' recipe, for the network as printed too, since print names none; ours for ours."""
    long = EPOCHS if preset == "full" else epochs(samples, side)
    if fidelity == "best":
        return Recipe(long, router_lr=_ROUTERS if arm == "pmoe" else None)
    return Recipe(long, 128, "sgd", lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", warmup_epochs=0.0)


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[WideResult | StepResult]:
    """Returns the cells of a preset, by names of task, network, samples and trial."""
    if preset == "quick":
        return {}
    cells: dict[str, WideCell | StepCell] = {}
    for task, figure in FIGURES.items():
        whole = preset == "full" and fidelity == "released"
        for samples in figure.full_sizes if whole else figure.sizes.get(fidelity, ()):
            cells |= _runs("wide", task, ("wrn", "pmoe"), fidelity, samples, preset)
        for samples in () if whole else figure.more_for_wrn.get(fidelity, ()):
            cells |= _runs("wide", task, ("wrn",), fidelity, samples, preset)
    if fidelity == "released":
        cells["wide-step/both/64"] = StepCell(fidelity)
    if fidelity == "best":  # the released network, for comparison
        for task, sizes in COMPARED.items():
            for samples in sizes:
                cells |= _runs("wide-released", task, ("pmoe",), "released", samples, preset)
    return cells


def _runs(
    start: str, task: str, arms: tuple[Arm, ...], fidelity: Fidelity, samples: int, preset: str
) -> dict[str, WideCell | StepCell]:
    side = FIGURES[task].side
    ours = fidelity == "best"
    return {
        f"{start}/{task}/{arm}/{samples}/{trial}": WideCell(
            task,
            arm,
            fidelity,
            samples,
            trial,
            recipe(fidelity, samples, side, arm, preset),
            scale="standard" if ours else "unit",
            augment="flip" if ours else "none",
        )
        for trial in range(FIGURES[task].full_trials if preset == "full" else FIGURES[task].trials)
        for arm in arms
    }
