"""CIFAR-10 with small objects at random positions (Chowdhury et al. 2023, Appendix A, after Karp et al. 2021).

Both datasets downscale CIFAR-10's images to 16×16 and place them in 32×32 images, of which only a quarter determines
the class, so that a network that selects the right patches needs no others:

- *CIFAR-Vehicles* (``cifar-vehicles``): a vehicle in one quadrant, animals in the other three; which vehicle is it?
- *CIFAR-10 with noise* (``cifar10-noise``): the image somewhere on a photograph of plants; which of the ten is it?

The authors' code loads both from files and does not say how they were made. Here images are downscaled by averaging
2×2 pixels, every image with a label occurs once, surrounding images are used equally often, and training and test
images share no surrounding image. `register` makes the datasets known to `moesaic.data.load_images` and the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data.builtin_datasets import DATASETS, register_dataset, require_data_dir, resize_images
from moesaic.data.cifar10 import CIFAR10_CLASSES, CIFAR10_FILE_IMAGES, cifar10_tensors, find_cifar10
from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import open_source
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.splits import Split
from moesaic.papers.engine.trial_datasets import insert_patch, shuffled_cycles

__all__ = [
    "ANIMALS",
    "BACKGROUNDS",
    "QUADRANTS",
    "VEHICLES",
    "cifar10_noise",
    "cifar_vehicles",
    "downscale",
    "find_backgrounds",
    "on_backgrounds",
    "register",
    "split_backgrounds",
    "vehicle_mosaics",
]

VEHICLES = ("airplane", "automobile", "ship", "truck")
"""Classes of CIFAR-Vehicles."""
ANIMALS = tuple(name for name in CIFAR10_CLASSES if name not in VEHICLES)
QUADRANTS = ("upper left", "upper right", "lower left", "lower right")
"""Positions of the vehicle: the clusters of CIFAR-Vehicles."""
BACKGROUNDS = ("plants", "flowers102")
"""Directories or zip files of background photographs; the first one found is used."""

_CIFAR_SIDE = 32
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CHUNK = 8192
"""Images placed on backgrounds at a time: pixel indices take eight times the memory of the pixels."""


def downscale(pixels: Tensor) -> Tensor:
    """Downscales bytes (B, C, H, W) by two: the mean of 2 × 2 pixels, halves rounded up.

    >>> downscale(torch.tensor([[[[0, 1], [2, 3]]]], dtype=torch.uint8)).tolist()
    [[[[2]]]]
    """
    H, W = pixels.shape[2:]
    if H % 2 or W % 2:
        raise ValueError(f"downscale: images of {H}×{W} pixels; height and width must be even")
    rows = pixels[:, :, ::2].to(torch.int16) + pixels[:, :, 1::2]
    return (rows[..., ::2] + rows[..., 1::2]).add_(2).bitwise_right_shift_(2).to(torch.uint8)


def vehicle_mosaics(pixels: Tensor, classes: Tensor, *, split: Split, seed: int) -> LabelledImages:
    """Makes CIFAR-Vehicles from CIFAR-10's images (B, 3, 32, 32) and classes (B,): one mosaic per vehicle.

    Labels index `VEHICLES`, clusters `QUADRANTS`. Within a mosaic the vehicle has its quadrant at random; animals
    are drawn so that none comes again before all others came.

    >>> pixels = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    >>> made = vehicle_mosaics(pixels, torch.tensor([0, 2, 3, 9, 4, 5]), split="train", seed=0)
    >>> made.pixels.shape, made.labels.tolist()
    (torch.Size([2, 3, 32, 32]), [0, 3])
    """
    label_of = torch.full((len(CIFAR10_CLASSES),), -1)
    for label, name in enumerate(VEHICLES):
        label_of[CIFAR10_CLASSES.index(name)] = label
    labels = label_of[classes]
    vehicles, animals = (labels >= 0).nonzero()[:, 0], (labels < 0).nonzero()[:, 0]
    if not len(vehicles) or not len(animals):
        raise ValueError(
            f"vehicle_mosaics: there are {len(vehicles)} vehicles and {len(animals)} animals among the {len(classes)} "
            f"images of the {split} split; at least one of each is needed: give all of CIFAR-10"
        )
    B = len(vehicles)
    key = keyed_random.keys(seed, [0])
    place = keyed_random.integers(key, f"cifar-vehicles {split} quadrants", len(QUADRANTS), B)[0]
    around = shuffled_cycles(key, f"cifar-vehicles {split} animals", len(animals), 3 * B)[0].view(B, 3)
    small = downscale(pixels)
    cells = small[insert_patch(vehicles, animals[around], place)]  # (B, 4, C, 16, 16)
    _, _, C, H, W = cells.shape
    mosaics = cells.view(B, 2, 2, C, H, W).permute(0, 3, 1, 4, 2, 5).reshape(B, C, 2 * H, 2 * W)
    return LabelledImages(mosaics, labels[vehicles], place)


def on_backgrounds(pixels: Tensor, classes: Tensor, backgrounds: Tensor, *, split: Split, seed: int) -> LabelledImages:
    """Makes CIFAR-10 with noise: each downscaled image (B, C, H, W) at a random position on a background (G, C, H, W).

    Backgrounds are used equally often. Pass those of one split; see `split_backgrounds`.

    >>> pixels, plants = torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.full((5, 3, 32, 32), 9, dtype=torch.uint8)
    >>> made = on_backgrounds(pixels, torch.tensor([7, 1]), plants, split="train", seed=0)
    >>> made.labels.tolist(), (made.pixels == 0).sum((1, 2, 3)).tolist()          # 3 colours of 16 × 16 pixels
    ([7, 1], [768, 768])
    """
    if not len(backgrounds):
        raise ValueError(f"on_backgrounds: no background for the {len(pixels)} images of the {split} split")
    if backgrounds.shape[1:] != pixels.shape[1:]:
        raise ValueError(
            f"on_backgrounds: backgrounds are {tuple(backgrounds.shape[1:])} and images {tuple(pixels.shape[1:])}; "
            "they must be of one size"
        )
    B, C, H, W = pixels.shape
    key = keyed_random.keys(seed, [0])
    behind = shuffled_cycles(key, f"cifar10-noise {split} backgrounds", len(backgrounds), B)[0]
    small = downscale(pixels)
    h, w = small.shape[2:]
    top = keyed_random.integers(key, f"cifar10-noise {split} rows", H - h + 1, B)[0]
    left = keyed_random.integers(key, f"cifar10-noise {split} columns", W - w + 1, B)[0]
    images = backgrounds.contiguous()[behind]
    channel = torch.arange(C)[:, None, None]
    for start in range(0, B, _CHUNK):
        some = slice(start, start + _CHUNK)
        image = torch.arange(start, min(start + _CHUNK, B))[:, None, None, None]
        rows = (top[some, None] + torch.arange(h))[:, None, :, None]
        columns = (left[some, None] + torch.arange(w))[:, None, None, :]
        images[image, channel, rows, columns] = small[some]
    return LabelledImages(images, classes, classes)


def split_backgrounds(count: int, split: Split, seed: int) -> Tensor:
    """Returns the indices of the split's backgrounds: one in six is for testing, as of CIFAR-10's images.

    >>> train, test = (split_backgrounds(12, split, seed=0) for split in ("train", "test"))
    >>> len(train), len(test), sorted(train.tolist() + test.tolist()) == list(range(12))
    (10, 2, True)
    """
    if count < 2:
        raise ValueError(
            f"split_backgrounds: count={count}; at least 2 backgrounds are needed, so that the splits share none"
        )
    order = keyed_random.permutations(keyed_random.keys(seed, [0]), "cifar10-noise backgrounds", count)[0]
    border = max(1, count // 6)
    return order[border:] if split == "train" else order[:border]


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
