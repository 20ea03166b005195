"""``cifar-vehicles`` and ``cifar10-noise`` (Chowdhury et al. 2023, Appendix A) as named datasets.

`register` makes them known to `moesaic.data.load_images` and the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from moesaic.data.builtin_datasets import (
    DATASETS,
    register_dataset,
    require_data_dir,
    resize_images,
)
from moesaic.data.cifar10 import CIFAR10_CLASSES, CIFAR10_FILE_IMAGES, cifar10_tensors, find_cifar10
from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import open_source
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.splits import Split
from moesaic.papers.chowdhury2023.data.cifar_mosaics import (
    QUADRANTS,
    VEHICLES,
    on_backgrounds,
    split_backgrounds,
    vehicle_mosaics,
)

__all__ = ["BACKGROUNDS", "cifar10_noise", "cifar_vehicles", "find_backgrounds", "register"]

BACKGROUNDS = ("plants", "flowers102")
"""Directories or zip files of background photographs; the first one found is used."""

_CIFAR_SIDE = 32
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"


def cifar_vehicles(
    data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int, images_per_file: int = CIFAR10_FILE_IMAGES
) -> ImageSplits:
    """Makes ``cifar-vehicles``: a vehicle among three animals. The clusters are the quadrants of the vehicle."""

    def part(split: Split) -> LabelledImages:
        pixels, classes = cifar10_tensors(split, require_data_dir("cifar-vehicles", data_dir), images_per_file)
        made = vehicle_mosaics(pixels, classes, split=split, seed=seed)
        return LabelledImages(resize_images("cifar-vehicles", made.pixels, size), made.labels, made.clusters)

    return ImageSplits(part("train"), part("test"), VEHICLES, QUADRANTS)


def cifar10_noise(
    data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int, images_per_file: int = CIFAR10_FILE_IMAGES
) -> ImageSplits:
    """Makes ``cifar10-noise``: downscaled CIFAR-10 images at random positions on photographs of plants."""
    name = "cifar10-noise"
    splits = {
        split: cifar10_tensors(split, require_data_dir(name, data_dir), images_per_file) for split in get_args(Split)
    }
    place = find_backgrounds(require_data_dir(name, data_dir))
    with open_source(place) as source:
        names = [entry.name for entry in source.entries() if entry.name.lower().endswith(_IMAGE_SUFFIXES)]
        decoded = decode_images(source, names, _CIFAR_SIDE, cache)
    if len(decoded.pixels) < 2:
        raise ValueError(
            f"{name}: {place} has {len(decoded.pixels)} photographs that can be read, and at least 2 are needed: "
            f"some for training, others for testing; get some, such as {_FLOWERS}"
        )
    cache.log(f"{name}: the backgrounds are {len(decoded.pixels)} photographs of {place}")

    def part(split: Split) -> LabelledImages:
        behind = decoded.pixels[split_backgrounds(len(decoded.pixels), split, seed)]
        made = on_backgrounds(*splits[split], behind, split=split, seed=seed)
        return LabelledImages(resize_images(name, made.pixels, size), made.labels, made.clusters)

    return ImageSplits(part("train"), part("test"), CIFAR10_CLASSES, CIFAR10_CLASSES, decoded.skipped)


def find_backgrounds(data_dir: str | Path) -> Path:
    """Returns the directory or zip file of background photographs; raises if there is none."""
    base = Path(data_dir).resolve()
    for name in BACKGROUNDS:
        folder, archive = base / name, base / f"{name}.zip"
        zips = sorted(folder.glob("*.zip")) if folder.is_dir() else []
        for place in (*zips, folder, archive):
            if place.exists():
                return place
    candidates = ", ".join(f"{base / name} (a folder) or {name}.zip" for name in BACKGROUNDS)
    raise FileNotFoundError(
        f"cifar10-noise: no background photographs: neither {candidates} is there; put photographs of "
        f"plants into one of them, such as {_FLOWERS}"
    )


def register() -> None:
    """Registers both datasets; does nothing if they are registered."""
    if "cifar-vehicles" not in DATASETS:
        register_dataset("cifar-vehicles", cifar_vehicles, _locate_vehicles)
        register_dataset("cifar10-noise", cifar10_noise, _locate_noise)


def _locate_vehicles(data_dir: Path | None) -> None:
    find_cifar10(require_data_dir("cifar-vehicles", data_dir))


def _locate_noise(data_dir: Path | None) -> None:
    folder = require_data_dir("cifar10-noise", data_dir)
    find_cifar10(folder)
    find_backgrounds(folder)
