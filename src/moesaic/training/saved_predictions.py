"""predictions.safetensors in the folder of a run: the predictions of the last test, and the worst mistakes.

`PredictionsCallback` gets the logits of the tests of `fit`. The page about a run is made from this file, without the
dataset and without running the network again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.argument_checks import printable
from moesaic.tensor_files import open_tensors, write_tensors
from moesaic.training.callbacks import Callback
from moesaic.validated_json import InvalidFile, decode, refused_as

if TYPE_CHECKING:
    from moesaic.data.image_dataset import LabelledImages
    from moesaic.training.trainer import Trainer

__all__ = ["PREDICTIONS", "Mistake", "PredictionsCallback", "SavedPredictions", "read_predictions"]

PREDICTIONS = "predictions.safetensors"
_MAX_MISTAKES = 24
"""Mistakes that are saved with their image."""
_MAX_TOP = 3
"""Classes that a mistake is saved with."""
_MAX_SIDE = 112
"""Pixels of the longer side of a saved image, at most."""
_WRITE_SECONDS = 5.0
"""Seconds from one write during training to the next."""
_DTYPES = {
    "labels": torch.int32,
    "predicted": torch.int32,
    "mistake_labels": torch.int32,
    "top": torch.int32,
    "probability": torch.float32,
    "label_probability": torch.float32,
    "images": torch.uint8,
}
_MISTAKE_COLUMNS = ("mistake_labels", "top", "probability", "label_probability")


@dataclass(frozen=True, eq=False)
class Mistake:
    """A test image that was classified wrongly."""

    label: int
    top: tuple[int, ...]
    """The classes with the highest probabilities; the first was predicted."""
    probabilities: tuple[float, ...]
    """Probabilities of ``top``."""
    label_probability: float
    image: Tensor
    """(C, H, W) uint8, of one or three channels."""
    name: str
    """Name of its file; empty where it is not known."""


@dataclass(frozen=True, eq=False)
class SavedPredictions:
    """The predictions of a network for the test images."""

    epoch: int
    """The epoch after which the network was tested."""
    labels: Tensor
    """(B,)"""
    predicted: Tensor
    """(B,)"""
    mistakes: tuple[Mistake, ...]
    """The most confident ones, by the probability of the predicted class."""

    def confusion(self, classes: int) -> Tensor:
        """(classes, classes): test images of each class (row) by predicted class (column)."""
        return (self.labels.long() * classes + self.predicted.long()).bincount(minlength=classes**2).view(classes, -1)

    def class_counts(self, classes: int) -> tuple[Tensor, Tensor]:
        """(classes,) each: the test images of each class, and those among them that were classified correctly."""
        right = self.labels[self.labels == self.predicted]
        return self.labels.bincount(minlength=classes), right.bincount(minlength=classes)

    def confusions(self, limit: int) -> list[tuple[int, int, int]]:
        """The most frequent confusions, at most ``limit``: true class, predicted class, number of test images."""
        wrong = self.labels != self.predicted
        pairs = (cast("list[int]", classes[wrong].tolist()) for classes in (self.labels, self.predicted))
        counts = Counter(zip(*pairs, strict=True))
        order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return [(label, guess, count) for (label, guess), count in order[:limit]]


@dataclass(frozen=True)
class _Header:
    epoch: int
    names: tuple[str, ...]


class PredictionsCallback(Callback):
    """Writes predictions.safetensors after tests, a few seconds apart, and in the end."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []
        self._unwritten: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._written_at = 0.0

    def on_test_batch(self, trainer: Trainer, logits: Tensor, labels: Tensor) -> None:
        """Takes the highest probabilities and that of the label."""
        probability = logits.float().softmax(1)
        top = probability.topk(min(_MAX_TOP, probability.shape[1]))
        # argmax, as in the accuracy: it may take another one of two equal classes
        self._batches.append(
            (logits.argmax(1), labels, top.indices, top.values, probability.gather(1, labels[:, None])[:, 0])
        )

    def on_test_end(self, trainer: Trainer) -> None:
        """Writes the file, unless it was written a moment ago."""
        if not self._batches:  # the test was not made here, but by other processes
            return
        predicted, labels, top, probability, label_probability = (
            torch.cat(parts).cpu() for parts in zip(*self._batches, strict=True)
        )
        self._batches = []
        wrong = (predicted != labels).nonzero()[:, 0]
        worst = wrong[probability[wrong, 0].argsort(descending=True, stable=True)][:_MAX_MISTAKES]
        tensors = {
            "labels": labels,
            "predicted": predicted,
            "mistake_labels": labels[worst],
            "top": top[worst],
            "probability": probability[worst],
            "label_probability": label_probability[worst],
            "images": _thumbnails(trainer.dataset.test, worst),
        }
        names = trainer.dataset.test.names
        rows = cast("list[int]", worst.tolist())
        header = {"epoch": len(trainer.epochs), "names": [printable(names[row]) for row in rows] if names else []}
        self._unwritten = {name: tensor.to(_DTYPES[name]) for name, tensor in tensors.items()}, header
        if time.monotonic() - self._written_at >= _WRITE_SECONDS:
            self._write(trainer)

    def final_metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """Writes those of the final test."""
        self._write(trainer)
        return {}

    def on_fit_end(self, trainer: Trainer) -> None:
        """Writes those of the last test of a run that was stopped; what stopped it counts more than a failed write."""
        with suppress(OSError):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._unwritten is not None and trainer.run_dir is not None and trainer.run_dir.writes:
            write_tensors(trainer.run_dir.folder / PREDICTIONS, *self._unwritten)
            self._unwritten = None
            self._written_at = time.monotonic()


def read_predictions(path: Path, classes: int) -> SavedPredictions:
    """Reads predictions.safetensors of a run with so many classes; anything wrong raises `InvalidFile`."""

    def check(fits: bool, fault: str) -> None:
        if not fits:
            raise InvalidFile(f"{path}: {fault}; train again")

    with open_tensors(path) as file, refused_as(f"{path} is not what a run writes"):
        header = cast("_Header", decode(_Header, file.content(), f"{path}"))
        check(
            file.shapes.keys() == _DTYPES.keys(),
            f"has the tensors {sorted(file.shapes)}; it must have {[*_DTYPES]}",
        )
        tensors = file.tensors()
    for name, dtype in _DTYPES.items():
        check(tensors[name].dtype == dtype, f"{name} is {tensors[name].dtype}; it must be {dtype}")
    labels, predicted, top, images = (tensors[name] for name in ("labels", "predicted", "top", "images"))
    mistake_labels, _, probability, label_probability = (tensors[name] for name in _MISTAKE_COLUMNS)
    check(labels.ndim == 1 and labels.shape == predicted.shape, "labels and predictions are not equally long")
    count = len(top)
    check(top.ndim == 2 and 1 <= top.shape[1] <= _MAX_TOP and top.shape == probability.shape, "top classes do not fit")
    check(count <= _MAX_MISTAKES and mistake_labels.shape == label_probability.shape == (count,), "mistakes do not fit")
    check(images.ndim == 4 and len(images) == count and images.shape[1] in (1, 3), "images do not fit")
    check(
        count == 0 or 1 <= min(images.shape[2:]) <= max(images.shape[2:]) <= _MAX_SIDE,
        "images have the wrong size",
    )
    check(len(header.names) in (0, count), "names do not fit")
    for numbers in (labels, predicted, mistake_labels, top):
        check(
            not numbers.numel() or 0 <= int(numbers.min()) <= int(numbers.max()) < classes, "classes are out of range"
        )
    for numbers in (probability, label_probability):
        check(bool(((numbers >= 0) & (numbers <= 1)).all()), "probabilities are not from 0 to 1")
    columns = zip(*(cast("list[Any]", tensors[name].tolist()) for name in _MISTAKE_COLUMNS), strict=True)
    mistakes = [
        Mistake(label, tuple(top), tuple(values), of_label, image, name)
        for (label, top, values, of_label), image, name in zip(
            columns, images, header.names or ("",) * count, strict=True
        )
    ]
    return SavedPredictions(header.epoch, labels, predicted, tuple(mistakes))


def _thumbnails(test: LabelledImages, rows: Tensor) -> Tensor:
    """(M, C, H, W) uint8: the images at ``rows`` in one or three channels, not larger than `_MAX_SIDE`."""
    images = test.pixels[rows.to(test.pixels.device)].cpu()
    C, H, W = images.shape[1:]
    if C not in (1, 3):
        images = images.float().mean(1, keepdim=True).round().to(torch.uint8)
    if max(H, W) <= _MAX_SIDE or not len(rows):
        return images
    size = [max(round(side * _MAX_SIDE / max(H, W)), 1) for side in (H, W)]
    smaller = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return smaller.round().clamp(0, 255).to(torch.uint8)
