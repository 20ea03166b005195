"""Images of the study of heads: what tells the class fills a known share of an image.

An image is a mosaic of grid × grid tiles. One tile, at a random place, is of one of the classes; all others are of
classes that say nothing. With one tile the object fills the image. Another task pastes a digit onto a photograph.

Every trial has its own images, in an order in which classes take turns. Sources of training and test images are
disjoint: photographs are halved anew in every trial, the other sources have their own training and test split.
"""

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moesaic.data.cifar10 import CIFAR10_CLASSES, load_cifar10
from moesaic.data.mnist import load_digits

__all__ = ["REPORTED", "SIDE", "TASKS", "TUNING", "Task", "draw_images"]

SIDE = 224
"""Pixels of an image."""
SEED = 700
CROP = 0.8
"""Tiles are random crops of their source, of at least this share of its side, flipped or not."""
DIGIT = 56
"""Pixels of a digit: its square is a sixteenth of the image."""

Part = Literal["train", "test"]
Pixels = NDArray[np.uint8]
Groups = Mapping[str, Sequence[Pixels]]
"""Square images (side, side, 3) by group."""


@dataclass(frozen=True)
class Task:
    """A classification task; ``classes`` and ``others`` are groups of the source."""

    name: str
    question: str
    source: Literal["photographs", "faces", "validation faces", "cifar10", "digits"]
    classes: tuple[str, ...]
    others: tuple[str, ...] = ()
    grid: int = 1

    @property
    def share(self) -> float:
        """Share of the image that tells the class."""
        return (DIGIT / SIDE) ** 2 if self.source == "digits" else 1 / self.grid**2


PHOTOGRAPHS = ("dogs", "birds", "food", "reptiles and amphibians")
FILLERS = ("airplane", "bird", "cat", "deer")

REPORTED = (
    *(
        Task(
            f"dog or bird, 1 of {grid**2}",
            "photographs: a dog or a bird among food and reptiles?",
            "photographs",
            PHOTOGRAPHS[:2],
            PHOTOGRAPHS[2:],
            grid,
        )
        for grid in (1, 2, 3, 4)
    ),
    Task(
        "food or reptile, 1 of 16",
        "photographs: food or a reptile among dogs and birds?",
        "photographs",
        PHOTOGRAPHS[2:],
        PHOTOGRAPHS[:2],
        4,
    ),
    Task("four classes", "photographs: dog, bird, food or reptile?", "photographs", PHOTOGRAPHS),
    Task("glasses", "faces: does it wear glasses?", "faces", ("without", "glasses")),
    Task("glasses, 1 of 16", "faces: does one of 16 wear glasses?", "faces", ("without", "glasses"), ("without",), 4),
    Task(
        "car or horse, 1 of 4",
        "CIFAR-10: a car or a horse among airplanes, birds, cats and deer?",
        "cifar10",
        ("automobile", "horse"),
        FILLERS,
        2,
    ),
    Task("digit on a photograph", "MNIST: a 3 or a 7 on a photograph?", "digits", ("3", "7")),
)
TUNING = (
    *(
        Task(f"frog or truck, 1 of {grid**2}", "CIFAR-10", "cifar10", ("frog", "truck"), ("ship", "dog"), grid)
        for grid in (2, 3)
    ),
    Task("ship or dog", "CIFAR-10", "cifar10", ("ship", "dog")),
    Task("hat, 1 of 4", "faces of the validation split", "validation faces", ("bare", "hat"), ("bare",), 2),
)
"""Tasks on which defaults are chosen; none of them is reported."""
TASKS = {task.name: task for task in (*REPORTED, *TUNING)}


def draw_images(
    task: Task, trial: int, part: Part, count: int, data_dir: Path
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels (count, 3, SIDE, SIDE) and labels of one part of a trial."""
    groups = _groups(task.source, trial, part, data_dir)
    rng = np.random.default_rng([SEED, zlib.crc32(task.name.encode()), trial, part == "test"])
    labels = np.arange(count) % len(task.classes)
    queues = [_shuffled(groups[name], rng) for name in task.classes]
    images = [_image(task, next(queues[label]), groups, rng) for label in labels]
    return np.stack(images).transpose(0, 3, 1, 2), labels.astype(np.int64)


def _shuffled(images: Sequence[Pixels], rng: np.random.Generator) -> Iterator[Pixels]:
    """Endlessly, every image once in each round."""
    while True:
        for i in rng.permutation(len(images)):
            yield images[i]


def _image(task: Task, telling: Pixels, groups: Groups, rng: np.random.Generator) -> Pixels:
    if task.source == "digits":
        photographs = groups["photographs"]
        return _with_digit(_tile(photographs[rng.integers(len(photographs))], SIDE, rng), telling, rng)
    edges = np.linspace(0, SIDE, task.grid + 1).round().astype(int)
    canvas = np.empty((SIDE, SIDE, 3), np.uint8)
    place = int(rng.integers(task.grid**2))
    for i in range(task.grid**2):
        row, column = divmod(i, task.grid)
        top, bottom, left, right = edges[row], edges[row + 1], edges[column], edges[column + 1]
        others = groups[task.others[rng.integers(len(task.others))]] if i != place else [telling]
        tile = _tile(others[rng.integers(len(others))], max(bottom - top, right - left), rng)
        canvas[top:bottom, left:right] = tile[: bottom - top, : right - left]
    return canvas


def _tile(image: Pixels, side: int, rng: np.random.Generator) -> Pixels:
    """A random crop, flipped or not, of so many pixels a side."""
    from PIL import Image

    whole = image.shape[0]
    crop = round(whole * rng.uniform(CROP, 1))
    top, left = rng.integers(whole - crop + 1, size=2)
    cut = image[top : top + crop, left : left + crop]
    cut = cut[:, ::-1] if rng.integers(2) else cut
    resized = Image.fromarray(np.ascontiguousarray(cut)).resize((int(side), int(side)), Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _with_digit(photograph: Pixels, digit: Pixels, rng: np.random.Generator) -> Pixels:
    """The digit in white at a random place."""
    from PIL import Image

    stroke = np.asarray(Image.fromarray(digit[..., 0]).resize((DIGIT, DIGIT), Image.Resampling.BICUBIC))
    top, left = rng.integers(SIDE - DIGIT + 1, size=2)
    canvas = photograph.copy()
    place = canvas[top : top + DIGIT, left : left + DIGIT]
    place[:] = np.maximum(place, stroke[..., None])
    return canvas


def _groups(source: str, trial: int, part: Part, data_dir: Path) -> Groups:
    if source in ("photographs", "digits"):
        rng = np.random.default_rng([SEED, trial])
        halves = {name: _half(images, part, rng) for name, images in _photographs(data_dir).items()}
        if source == "photographs":
            return halves
        return {**_digits(part, data_dir), "photographs": [image for half in halves.values() for image in half]}
    if source == "cifar10":
        return _cifar10(part, data_dir)
    if source == "faces":
        return _faces(0 if part == "train" else 2, "Eyeglasses", ("without", "glasses"), data_dir)
    rng = np.random.default_rng([SEED, trial])
    faces = _faces(1, "Wearing_Hat", ("bare", "hat"), data_dir)
    return {name: _half(images, part, rng) for name, images in faces.items()}


def _half(images: Sequence[Pixels], part: Part, rng: np.random.Generator) -> list[Pixels]:
    order = rng.permutation(len(images))
    middle = (len(images) + 1) // 2
    return [images[i] for i in (order[:middle] if part == "train" else order[middle:])]


@cache
def _photographs(data_dir: Path) -> Groups:
    """The central square of each photograph, by class."""
    from PIL import Image

    found: dict[str, list[Pixels]] = {name: [] for name in PHOTOGRAPHS}
    with zipfile.ZipFile(data_dir / "photos" / "photos.zip") as archive:
        for name in sorted(archive.namelist()):
            group = name.split("/")[0]
            if group in found and name.endswith(".jpg"):
                image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                found[group].append(np.asarray(image.crop((left, top, left + side, top + side))))
    return found


@cache
def _digits(part: Part, data_dir: Path) -> Groups:
    digits = load_digits(part, data_dir / "mnist")
    pixels = digits.pixels.reshape(-1, 28, 28, 1)
    return {str(label): list(pixels[digits.labels == label]) for label in range(10)}


@cache
def _cifar10(part: Part, data_dir: Path) -> Groups:
    images = load_cifar10(part, data_dir)
    pixels = images.pixels.transpose(0, 2, 3, 1)
    return {name: list(pixels[images.labels == label]) for label, name in enumerate(CIFAR10_CLASSES)}


@cache
def _faces(partition: int, attribute: str, names: tuple[str, str], data_dir: Path) -> Groups:
    """Faces of a partition of CelebA, by whether they have the attribute."""
    from PIL import Image

    folder = data_dir / "celeba"
    header, *lines = (folder / "list_attr_celeba.txt").read_text().splitlines()[1:]
    column = header.split().index(attribute) + 1
    has = {(cells := line.split())[0]: cells[column] == "1" for line in lines}
    parts = dict(line.split() for line in (folder / "list_eval_partition.txt").read_text().splitlines())
    found: dict[str, list[Pixels]] = {name: [] for name in names}
    with zipfile.ZipFile(folder / "img_align_celeba.zip") as archive:
        for path in sorted(archive.namelist()):
            file = path.rsplit("/", 1)[-1]
            if parts.get(file) == str(partition):
                image = Image.open(io.BytesIO(archive.read(path))).convert("RGB")
                found[names[has[file]]].append(np.asarray(image))
    return found
