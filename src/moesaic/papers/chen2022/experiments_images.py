"""Experiments of Chen et al. 2022 on images (Section 6.2): one network, alone or as the four experts of a mixture.

A cell is one run: `ImageCell` trains as printed, `ReleasedImageCell` as the authors' code does. `plan` lists the cells
of a preset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.data.builtin_datasets import missing_files
from moesaic.data.cifar10 import CIFAR10_CLASSES, cifar10_files, load_cifar10
from moesaic.data.image_dataset import ImageDataset, Transform
from moesaic.data.splits import Split
from moesaic.insight.metrics import entropy_of_counts
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.data.rotated_cifar import blur_and_normalize, cifar10_dataset, cifar10_rotate_task
from moesaic.papers.chen2022.image_networks import image_mixture, image_network, released_image_mixture
from moesaic.papers.chen2022.image_training import (
    ImageSchedule,
    ImageTest,
    ReleasedImageSchedule,
    embed_images,
    train_images,
)
from moesaic.papers.engine import paper
from moesaic.papers.engine.runner import Runner

__all__ = [
    "CAR",
    "CIFAR10_DIGEST",
    "EXPERTS",
    "FROG",
    "PRINTED_EPOCHS",
    "PRINTED_TRIALS",
    "RELEASED_KINDS",
    "RELEASED_RUNS",
    "RUNS",
    "SHIP",
    "Embedding",
    "ImageCell",
    "ImageResult",
    "ReleasedImageCell",
    "TaskName",
    "cifar10_digest",
    "plan",
    "released_runs_of",
    "runs_of",
]

Array = NDArray[np.float64]

TaskName = Literal["cifar10", "rotate", "rotate-sharp"]
"""The last is CIFAR-10-Rotate as the authors' code has it: images to train on are blurred, those to test on are not."""

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

EXPERTS = 4
FROG, SHIP, CAR = (CIFAR10_CLASSES.index(name) for name in ("frog", "ship", "automobile"))

CIFAR10_DIGEST = "013ba16d14ecc482"
"""`cifar10_digest` of the original files."""

_DIMENSIONS = 30
_MANY, _FEW = 200, 50
"""Images in Figure 7 of frogs and of ships, and of each other class."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """Features of some test images of one label, each computed by the expert that the router chose."""

    points: Array
    """(n, 30): principal components, in thousandths of the largest."""
    clusters: NDArray[np.int64]
    """(n,) the class of CIFAR-10."""
    experts: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ImageResult:
    """Measurements of one run."""

    accuracy: float
    """After the last epoch, in percent."""
    tested: int
    """Number of test images."""
    accuracies: Array
    """After each epoch."""
    losses: Array
    dispatch: Array
    """(2, 10, 4) for CIFAR-10-Rotate, (1, 10, 4) for CIFAR-10: how many test images, upright or rotated, of each
    class went to each expert; empty for a single network."""
    entropies: Array
    """After each epoch, eq. 6.1 on the test images; empty for a single network."""
    embedding: Embedding | None
    blurred_accuracies: Array = field(default_factory=lambda: np.empty(0))
    """After each epoch, on blurred test images; empty unless they were tested besides sharp ones."""


@dataclass(frozen=True)
class ImageCell:
    """One run of one network on one task."""

    task: TaskName
    network: str
    mixture: bool
    schedule: ImageSchedule
    trial: int
    embedding: bool = False
    """Whether to keep the features of some test images, for Figure 7."""
    images_per_file: int = 10_000
    on_cpu: bool = False
    """Whether the cell may run on a CPU, which takes days for all but small data."""
    experiment: ClassVar[str] = "images"
    """Name of the experiment in the specification."""

    @property
    def steps(self) -> int:
        return self.schedule.epochs

    def missing_requirement(self, runner: Runner) -> str | None:
        lacks = ["CIFAR-10's binary files under --data-dir"] if missing_files("cifar10", runner.data_dir) else []
        if not self.on_cpu and not runner.device.startswith("cuda"):
            lacks.append("a GPU (--device cuda)")
        return f"needs {' and '.join(lacks)}" if lacks else None

    def spec(self, runner: Runner) -> dict[str, Any]:
        # what was measured elsewhere can be looked at without the images
        here = runner.data_dir if missing_files("cifar10", runner.data_dir) is None else None
        digest = CIFAR10_DIGEST if here is None else _digest(here)
        described = asdict(self)
        del described["on_cpu"]
        return {"experiment": self.experiment, "engine": ENGINE, "data": digest, "seed": runner.seed, **described}

    def measure(self, runner: Runner) -> dict[str, Any]:
        assert runner.data_dir is not None, "missing_requirement covers this"
        task = _task(self.task, runner.data_dir, self.images_per_file)
        seed = runner.trial_seed(self.trial)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._model(task.num_classes)
        epochs = train_images(
            model,
            task,
            self.schedule,
            seed=seed,
            device=runner.device,
            progress=runner.progress,
            eval_transforms=self._eval_transforms(),
        )
        measured: dict[str, Any] = {
            "tested": len(task.test),
            "accuracies": [round(epoch.test.accuracy, 4) for epoch in epochs],
            "losses": [round(epoch.loss, 5) for epoch in epochs],
        }
        for name in epochs[0].others:
            measured[f"{name}_accuracies"] = [round(epoch.others[name].accuracy, 4) for epoch in epochs]
        if self.mixture:
            tables = [_dispatch(task, epoch.test) for epoch in epochs]
            measured["dispatch"] = tables[-1].tolist()
            measured["entropies"] = [round(entropy_of_counts(table.sum(0)), 5) for table in tables]
        experts = epochs[-1].test.experts
        if self.embedding and experts is not None:
            rows = _shown(task)
            measured["embedding"] = {
                "points": _principal(embed_images(model, task, rows)),
                "clusters": task.test.clusters[rows].tolist(),
                "experts": experts[rows].tolist(),
            }
        return measured

    def _model(self, num_classes: int) -> nn.Module:
        """Returns the network, initialised from torch's default generator."""
        return (image_mixture if self.mixture else image_network)(self.network, num_classes)

    def _eval_transforms(self) -> Mapping[str, Transform]:
        """Returns the transforms with which to test besides that of the task."""
        return {}

    def result(self, stored: dict[str, Any]) -> ImageResult:
        latent = stored.get("embedding")
        accuracies = np.asarray(stored["accuracies"], dtype=np.float64)
        return ImageResult(
            float(accuracies[-1]),
            stored["tested"],
            accuracies,
            np.asarray(stored["losses"], dtype=np.float64),
            np.asarray(stored.get("dispatch", []), dtype=np.float64),
            np.asarray(stored.get("entropies", []), dtype=np.float64),
            latent
            and Embedding(
                np.asarray(latent["points"], dtype=np.float64),
                np.asarray(latent["clusters"], dtype=np.int64),
                np.asarray(latent["experts"], dtype=np.int64),
            ),
            np.asarray(stored.get("blurred_accuracies", []), dtype=np.float64),
        )


@dataclass(frozen=True)
class ReleasedImageCell(ImageCell):
    """One run of one network as the authors' code trains it; tested on blurred images, too.

    Blur changes the test images alone, so that one run serves both.
    """

    black_images: bool = True
    """Whether the experts of a mixture get black images in the place of those of other experts."""
    experiment: ClassVar[str] = "images as released"

    def _model(self, num_classes: int) -> nn.Module:
        if not self.mixture:
            return image_network(self.network, num_classes)
        return released_image_mixture(self.network, num_classes, EXPERTS, black_images=self.black_images)

    def _eval_transforms(self) -> Mapping[str, Transform]:
        return {"blurred": blur_and_normalize}


def released_runs_of(experiment: paper.ExperimentResults[ImageResult], network: str, kind: str) -> list[ImageResult]:
    """The trials of a network as released; ``kind`` is one of `RELEASED_KINDS`."""
    return experiment.series(f"images/released/{network}/{kind}")[1]


def runs_of(
    experiment: paper.ExperimentResults[ImageResult], task: TaskName, network: str, kind: str
) -> list[ImageResult]:
    """The trials of a network, alone ("single") or as a "mixture"."""
    return experiment.series(f"images/{task}/{network}/{kind}")[1]


def check_data(data_dir: Path) -> None:
    """Raises if CIFAR-10 in the directory is damaged; missing files are not an error."""
    if missing_files("cifar10", data_dir) is None:
        for split in ("train", "test"):
            load_cifar10(split, data_dir)


def cifar10_digest(data_dir: Path) -> str:
    """A hash of all images and labels under ``data_dir``; the same for a folder and an archive."""
    content = hashlib.sha256()
    for split in get_args(Split):
        for _, some in cifar10_files(split, data_dir):
            content.update(some)
    return content.hexdigest()[:16]


_digest = cache(cifar10_digest)


@cache
def _task(name: TaskName, data_dir: Path, images_per_file: int) -> ImageDataset:
    if name == "cifar10":
        return cifar10_dataset(data_dir, images_per_file=images_per_file)
    return cifar10_rotate_task(data_dir, blur_test=name == "rotate", images_per_file=images_per_file)


def _dispatch(task: ImageDataset, test: ImageTest) -> Tensor:
    """(Y, K, E): how many test images of each cluster went to each expert; by label where labels are not clusters."""
    assert test.experts is not None
    clusters = len(task.cluster_names)
    groups = task.num_classes if _has_rotation_labels(task) else 1
    group = task.test.labels if _has_rotation_labels(task) else torch.zeros_like(task.test.labels)
    place = (group * clusters + task.test.clusters) * EXPERTS + test.experts
    return torch.bincount(place, minlength=groups * clusters * EXPERTS).view(groups, clusters, EXPERTS)


def _has_rotation_labels(task: ImageDataset) -> bool:
    """Whether labels are rotations, and the classes of CIFAR-10 only clusters."""
    return task.num_classes != len(task.cluster_names)


def _shown(task: ImageDataset) -> Tensor:
    """Rows of the test images in Figure 7: rotated ones of every class, or cars."""
    counts = dict.fromkeys(range(len(task.cluster_names)), _FEW) | {FROG: _MANY, SHIP: _MANY}
    if not _has_rotation_labels(task):
        counts = {CAR: 2 * _MANY}
    of_label = task.test.labels == 1  # rotated, and of CIFAR-10 cars, which are its label 1
    rows = [((task.test.clusters == cluster) & of_label).nonzero()[:many, 0] for cluster, many in counts.items()]
    return torch.cat(rows)


def _principal(features: Tensor) -> list[list[int]]:
    """The features' principal components in thousandths of the largest: few digits, and the same distances."""
    centred = features.double() - features.double().mean(0)
    directions = cast("Tensor", torch.linalg.svd(centred, full_matrices=False)[2])
    points = centred @ directions[:_DIMENSIONS].T
    thousandths = (999 * points / points.abs().max().clamp_min(1e-12)).round().int()
    return cast("list[list[int]]", thousandths.tolist())


RUNS: dict[tuple[TaskName, str], tuple[float, int, int]] = {
    ("rotate", "cnn"): (0.01, 30, 3),
    ("rotate", "resnet18"): (0.01, 8, 2),
    ("rotate", "mobilenetv2"): (0.01, 4, 1),
    ("rotate-sharp", "cnn"): (0.01, 30, 3),
    ("rotate-sharp", "resnet18"): (0.01, 8, 1),
    ("cifar10", "cnn"): (0.01, 30, 3),
    ("cifar10", "resnet18"): (0.1, 12, 1),
    ("cifar10", "mobilenetv2"): (0.1, 6, 1),
}
"""Learning rate as printed; epochs and trials of the short preset, which are fewer than the paper's."""

PRINTED_EPOCHS: dict[TaskName, int] = {"cifar10": 200, "rotate": 50, "rotate-sharp": 50}
PRINTED_TRIALS = 10


RELEASED_RUNS: dict[str, tuple[int, int]] = {"resnet18": (10, 5), "mobilenetv2": (30, 5)}
"""Epochs and trials of the authors' code on CIFAR-10-Rotate."""

RELEASED_KINDS = ("single", "mixture", "no-black")
"""The single network, the mixture, and the mixture whose experts get no black images."""

_RELEASED_RATE = 0.01


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[ImageResult]:
    """Returns the cells by names such as "images/rotate/cnn/mixture/0" or "images/released/resnet18/single/0"."""
    if fidelity == "released":
        return _released_plan() if preset == "full" else {}
    if preset == "quick" or fidelity != "print":
        return {}
    cells: dict[str, ImageCell] = {}
    for (task, network), (rate, short_epochs, short_trials) in RUNS.items():
        epochs, trials = (PRINTED_EPOCHS[task], PRINTED_TRIALS) if preset == "full" else (short_epochs, short_trials)
        for trial in range(trials):
            for mixture in (False, True):
                shown = network == "resnet18" and mixture and trial == 0
                cell = ImageCell(task, network, mixture, ImageSchedule(epochs, rate), trial, embedding=shown)
                cells[f"images/{task}/{network}/{'mixture' if mixture else 'single'}/{trial}"] = cell
    return cells


def _released_plan() -> dict[str, ReleasedImageCell]:
    cells: dict[str, ReleasedImageCell] = {}
    for network, (epochs, trials) in RELEASED_RUNS.items():
        schedule = ReleasedImageSchedule(epochs, _RELEASED_RATE)
        for trial in range(trials):
            for kind in RELEASED_KINDS:
                cells[f"images/released/{network}/{kind}/{trial}"] = ReleasedImageCell(
                    "rotate-sharp", network, kind != "single", schedule, trial, black_images=kind != "no-black"
                )
    return cells
