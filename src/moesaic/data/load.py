"""Images by name or from a folder of one's own, as a task that is ready to train on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from moesaic.cache_dir import default_cache
from moesaic.checks import at_least_one, one_of
from moesaic.data.builtin_datasets import DATASETS
from moesaic.data.datasets import Augment, Augmented, ImageTask, Scale, Skipped
from moesaic.data.decoded_cache import Cache, Log
from moesaic.data.file_sources import printable
from moesaic.data.hub import PREFIX, hub_parts
from moesaic.data.image_folder import folder_parts
from moesaic.data.image_source import ImageParts

__all__ = ["Scaling", "as_task", "load_images"]

Scaling = Literal["unit", "standard"]
"""Pixels from 0 to 1, or with mean 0 and variance 1 in each channel of the images to train on."""

_MEASURED = 10_000
"""Images that a mean is taken over, at most."""
_TOGETHER = 1024
_LISTED = 10
"""Skipped files that are told by name."""


def _silent(message: str) -> None:
    """Tells nobody."""


def load_images(
    source: str | Path,
    *,
    data_dir: Path | None = None,
    size: int | None = None,
    cache_dir: Path | None = None,
    augment: Augment = "none",
    scale: Scaling = "standard",
    seed: int = 0,
    log: Log = _silent,
) -> ImageTask:
    """Images to train and to test on, from a folder or by name.

    A folder, or a zip file of one, has a folder for each class, or ``train`` and ``test`` (or ``val``) with a folder
    for each class in both; without images to test on, a fifth of each class is held out by ``seed``. Names are those
    of `DATASETS`, whose files lie under ``data_dir``, or ``hub:owner/name`` of sets of the Hugging Face hub.
    Pictures become squares of ``size`` pixels, 64 unless the set has a size of its own, and are decoded once, into
    ``cache_dir``. Files that cannot be read are skipped: they are in the task's ``skipped``, and ``log`` is told.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for kind in ("cat", "dog"):
    ...         Path(folder, kind).mkdir()
    ...         for number in range(5):
    ...             Image.new("RGB", (40, 30), (50 * number, 0, 99)).save(f"{folder}/{kind}/{number}.jpg")
    ...     task = load_images(folder, size=16, cache_dir=Path(folder, ".cache"), augment="flip")
    >>> task.class_names, len(task.train), len(task.test), tuple(task.train.pixels.shape[1:])
    (('cat', 'dog'), 8, 2, (3, 16, 16))
    """
    one_of("load_images", "augment", augment, get_args(Augment))
    one_of("load_images", "scale", scale, get_args(Scaling))
    if size is not None:
        at_least_one("load_images", size=size)
    cache = Cache(default_cache() if cache_dir is None else Path(cache_dir), log)
    if isinstance(source, str) and source in DATASETS:
        parts, name = DATASETS[source].load(data_dir, size, cache, seed), source
    elif isinstance(source, str) and source.startswith(PREFIX):
        parts, name = hub_parts(source, size, cache, seed), source
    else:
        path = _existing(source).resolve()
        parts = folder_parts(path, size, cache, seed)
        name = printable(path.name if path.is_dir() else path.stem)
    _tell(parts, name, log)
    return as_task(parts, name, augment=augment, scale=scale)


def as_task(parts: ImageParts, name: str, *, augment: Augment = "none", scale: Scaling = "standard") -> ImageTask:
    """The images as a task: scaled, and varied while training."""
    scaled = _scale_of(parts.train.pixels, scale)
    vary = Augmented.of(augment, scaled, parts.train.pixels.shape[-1])
    return ImageTask(
        parts.train,
        parts.test,
        parts.class_names,
        parts.cluster_names,
        vary,
        scaled,
        name=name,
        digest=_digest(parts),
        scale=scaled,
        skipped=parts.skipped,
    )


def _existing(source: str | Path) -> Path:
    path = Path(source)
    if path.exists():
        return path
    if isinstance(source, str) and path.name == source and DATASETS:
        try:
            one_of("load_images", "source", source, DATASETS)
        except ValueError as unknown:
            raise ValueError(f"{unknown}, or the path of a folder of images") from None
    raise FileNotFoundError(
        f"load_images: there is no folder or zip file {source}; give one with a folder of images for each class"
    )


def _scale_of(pixels: Tensor, scale: Scaling) -> Scale:
    """The scale of images: of up to 10 000 of them, evenly spread, and the same on any machine."""
    channels = pixels.shape[1]
    if scale == "unit":
        return Scale((0.0,) * channels, (1.0,) * channels)
    some = pixels[:: -(-len(pixels) // _MEASURED)]
    total = torch.zeros(channels, 2, dtype=torch.int64)
    for block in _blocks(some):  # whole numbers, so that no order of adding them matters
        values = block.permute(1, 0, 2, 3).flatten(1).int()
        total += torch.stack([values.sum(1), values.square().sum(1)], dim=1)
    count = some.numel() // channels
    first, second = (total.double() / count).unbind(1)
    std = (second - first.square()).clamp_min(0).sqrt() / 255
    std[std < 1e-4] = 1.0
    return Scale(*(tuple(round(value, 6) for value in cast("list[float]", x.tolist())) for x in (first / 255, std)))


def _digest(parts: ImageParts) -> str:
    content = hashlib.sha256(repr((parts.class_names, parts.cluster_names)).encode())
    for images in (parts.train, parts.test):
        content.update(repr(tuple(images.pixels.shape)).encode())
        for block in _blocks(images.pixels):
            content.update(block.permute(0, 2, 3, 1).contiguous().numpy().data)
        for numbers in (images.labels, images.clusters):
            content.update(numbers.cpu().contiguous().numpy().data)
    return content.hexdigest()[:16]


def _blocks(pixels: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", pixels.split(_TOGETHER))  # torch types it in part


def _tell(parts: ImageParts, name: str, log: Log) -> None:
    C, H, W = parts.train.pixels.shape[1:]
    log(
        f"{name}: {len(parts.train)} images to train on and {len(parts.test)} to test on, of {H}×{W} pixels in "
        f"{'grey' if C == 1 else 'colour'}; {len(parts.class_names)} classes"
    )
    if parts.skipped:
        log(_list_skipped(parts.skipped))


def _list_skipped(skipped: tuple[Skipped, ...]) -> str:
    listed = [f"  {each.path} {each.why}" for each in skipped[:_LISTED]]
    if len(skipped) > _LISTED:
        listed.append(f"  and {len(skipped) - _LISTED} more")
    return "\n".join([f"skipped {len(skipped)} {'file' if len(skipped) == 1 else 'files'}:", *listed])
