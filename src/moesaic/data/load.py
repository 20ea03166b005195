"""Loads an image dataset from a folder, a built-in name or the Hugging Face hub."""

from __future__ import annotations

import hashlib
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice, check_positive
from moesaic.cache_dir import default_cache_dir
from moesaic.data.augment import train_transform
from moesaic.data.builtin_datasets import DATASETS
from moesaic.data.decoded_cache import DecodedCache, Log, no_log
from moesaic.data.file_sources import printable
from moesaic.data.hub import PREFIX, load_hub
from moesaic.data.image_dataset import Augment, ImageDataset, ImageSplits, Normalize
from moesaic.data.image_folder import load_folder

__all__ = ["Normalization", "build_dataset", "load_images"]

Normalization = Literal["unit", "standard"]
"""Pixels in [0, 1], or mean 0 and variance 1 in each channel of the training images."""

_MAX_STATISTICS_IMAGES = 10_000
"""Images that mean and standard deviation are computed from, at most."""
_BLOCK_IMAGES = 1024
_MAX_LISTED = 10
"""Skipped files that are logged by name."""


def load_images(
    source: str | Path,
    *,
    data_dir: Path | None = None,
    size: int | None = None,
    cache_dir: Path | None = None,
    augment: Augment = "none",
    normalize: Normalization = "standard",
    seed: int = 0,
    log: Log = no_log,
) -> ImageDataset:
    """Loads an image classification dataset.

    Files that cannot be read are skipped; they are logged, and listed in ``ImageDataset.skipped``.

    Args:
        source: a folder or zip file with one subfolder per class, or with ``train`` and ``test`` (or ``val``) that
            have one subfolder per class; a name in `DATASETS`; or ``hub:owner/name`` on the Hugging Face hub.
        data_dir: folder with the files of a built-in dataset.
        size: images are resized to ``size × size`` pixels; the default is the dataset's own size, or 64.
        cache_dir: folder for decoded images.
        augment: augmentation of training images.
        normalize: "standard" for mean 0 and variance 1 per channel, "unit" for pixels in [0, 1].
        seed: seed of the held-out test images if the source has no test split (a fifth of each class).
        log: called with messages about progress and skipped files.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("cat", "dog"):
    ...         Path(folder, name).mkdir()
    ...         for number in range(5):
    ...             Image.new("RGB", (40, 30), (50 * number, 0, 99)).save(f"{folder}/{name}/{number}.jpg")
    ...     dataset = load_images(folder, size=16, cache_dir=Path(folder, ".cache"), augment="flip")
    >>> dataset.class_names, len(dataset.train), len(dataset.test), tuple(dataset.train.pixels.shape[1:])
    (('cat', 'dog'), 8, 2, (3, 16, 16))
    """
    check_choice("load_images", "augment", augment, get_args(Augment))
    check_choice("load_images", "normalize", normalize, get_args(Normalization))
    if size is not None:
        check_positive("load_images", size=size)
    cache = DecodedCache(default_cache_dir() if cache_dir is None else Path(cache_dir), log)
    if isinstance(source, str) and source in DATASETS:
        splits, name = DATASETS[source].load(data_dir, size, cache, seed), source
    elif isinstance(source, str) and source.startswith(PREFIX):
        splits, name = load_hub(source, size, cache, seed), source
    else:
        path = _existing(source).resolve()
        splits = load_folder(path, size, cache, seed)
        name = printable(path.name if path.is_dir() else path.stem)
    _log_summary(splits, name, log)
    return build_dataset(splits, name, augment=augment, normalize=normalize)


def build_dataset(
    splits: ImageSplits, name: str, *, augment: Augment = "none", normalize: Normalization = "standard"
) -> ImageDataset:
    """Adds the transforms, a name and a digest to training and test images."""
    normalization = _normalization_of(splits.train.pixels, normalize)
    return ImageDataset(
        splits.train,
        splits.test,
        splits.class_names,
        splits.cluster_names,
        train_transform=train_transform(augment, normalization, splits.train.pixels.shape[-1]),
        eval_transform=normalization,
        name=name,
        digest=_digest(splits),
        normalize=normalization,
        skipped=splits.skipped,
    )


def _existing(source: str | Path) -> Path:
    path = Path(source)
    if path.exists():
        return path
    if isinstance(source, str) and path.name == source and DATASETS:
        near = get_close_matches(source, list(DATASETS), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"load_images: there is no folder or zip file {source!r}; check the path, or name one of the datasets "
            f"{', '.join(map(repr, DATASETS))}{hint}"
        )
    raise FileNotFoundError(
        f"load_images: there is no folder or zip file {source}; give one with a subfolder of images per class"
    )


def _normalization_of(pixels: Tensor, kind: Normalization) -> Normalize:
    """Statistics of up to 10 000 evenly spaced images; the same on any machine."""
    channels = pixels.shape[1]
    if kind == "unit":
        return Normalize((0.0,) * channels, (1.0,) * channels)
    sample = pixels[:: -(-len(pixels) // _MAX_STATISTICS_IMAGES)]
    total = torch.zeros(channels, 2, dtype=torch.int64)
    for block in _blocks(sample):  # in integers: the sum does not depend on the order
        values = block.permute(1, 0, 2, 3).flatten(1).int()
        total += torch.stack([values.sum(1), values.square().sum(1)], dim=1)
    count = sample.numel() // channels
    mean, mean_square = (total.double() / count).unbind(1)
    std = (mean_square - mean.square()).clamp_min(0).sqrt() / 255
    std[std < 1e-4] = 1.0
    return Normalize(*(tuple(round(value, 6) for value in cast("list[float]", x.tolist())) for x in (mean / 255, std)))


def _digest(splits: ImageSplits) -> str:
    content = hashlib.sha256(repr((splits.class_names, splits.cluster_names)).encode())
    for images in (splits.train, splits.test):
        content.update(repr(tuple(images.pixels.shape)).encode())
        for block in _blocks(images.pixels):
            content.update(block.permute(0, 2, 3, 1).contiguous().numpy().data)
        for numbers in (images.labels, images.clusters):
            content.update(numbers.cpu().contiguous().numpy().data)
    return content.hexdigest()[:16]


def _blocks(pixels: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", pixels.split(_BLOCK_IMAGES))  # torch types it in part


def _log_summary(splits: ImageSplits, name: str, log: Log) -> None:
    C, H, W = splits.train.pixels.shape[1:]
    log(
        f"{name}: {len(splits.train)} training images and {len(splits.test)} test images of {H}×{W} pixels in "
        f"{'grey' if C == 1 else 'colour'}; {len(splits.class_names)} classes"
    )
    if splits.skipped:
        count = len(splits.skipped)
        lines = [f"skipped {count} {'file' if count == 1 else 'files'}:"]
        lines += [f"  {file.path} {file.reason}" for file in splits.skipped[:_MAX_LISTED]]
        log("\n".join([*lines, f"  and {count - _MAX_LISTED} more"] if count > _MAX_LISTED else lines))
