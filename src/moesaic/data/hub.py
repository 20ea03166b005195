"""Image classification datasets of the Hugging Face hub, through the package ``datasets`` (extra ``hub``).

``hub:owner/name`` is the dataset of that name, ``hub:owner/name:config`` one of its configurations. The
columns of images and labels are found by their feature types. Images are decoded here, not by
``datasets``, so that damaged images are skipped and reported like files of a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import FileEntry, FileSource, SkippedFile, UnreadableFile, printable
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.image_folder import DEFAULT_SIZE
from moesaic.data.splits import stratified_order
from moesaic.validated_json import InvalidFile, read_bytes

__all__ = ["PREFIX", "HubDataset", "HubSource", "HubSplit", "load_hub", "open_hub"]

PREFIX = "hub:"

_TEST_EVERY = 5
"""One in so many images of a class is held out for testing if there is no test split."""
_TRAIN = ("train", "training")
_TEST = ("test", "testing", "validation", "valid", "val", "dev", "eval")
"""Names of test splits, in order of preference."""
_LABELS = ("label", "labels", "class", "category", "target")
"""Names of label columns, for datasets with several ClassLabel columns or none."""


@dataclass(frozen=True, eq=False)
class HubSplit:
    """The labelled images of one split."""

    split: str
    rows: NDArray[np.int64]
    """Rows of the split that have a label."""
    labels: NDArray[np.int64]
    """(B,) indices into `HubDataset.class_names`."""
    fingerprint: str
    """Changes with the content of the split."""
    stored: Any
    """The split with its image column alone, not decoded: ``{"bytes": …, "path": …}``."""
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> list[str]:
        """A file name for each image."""
        return [f"{self.split}/{row}" for row in self.rows]


@dataclass(frozen=True, eq=False)
class HubDataset:
    """A dataset of the hub; made by `open_hub`."""

    name: str
    parts: tuple[HubSplit, ...]
    """Training images, and test images if another split has labels."""
    class_names: tuple[str, ...]


class HubSource(FileSource):
    """The images of a dataset as a `FileSource`, named ``train/0``, ``train/1`` and so on."""

    def __init__(self, hub: HubDataset) -> None:
        self.path = Path(PREFIX + hub.name)
        self._parts = {part.split: part for part in hub.parts}

    @property
    def identity(self) -> str:
        return " ".join([str(self.path), *(part.fingerprint for part in self._parts.values())])

    def entries(self) -> tuple[FileEntry, ...]:
        """All images with a label; only the identity shows whether they changed."""
        return tuple(FileEntry(name, 0, 0) for part in self._parts.values() for name in part.names)

    def read(self, name: str) -> bytes:
        split, _, row = name.rpartition("/")
        part = self._parts[split]
        file: Mapping[str, Any] = part.stored[int(row)][part.column] or {}
        content, path = file.get("bytes"), file.get("path")
        if content is None and path is None:
            raise UnreadableFile("has no image")
        try:
            return read_bytes(path or "") if content is None else content
        except InvalidFile as fault:
            raise UnreadableFile(str(fault).removeprefix(f"{printable(str(path))}: ")) from fault
        except OSError as fault:
            raise UnreadableFile(f"cannot be read ({fault.strerror or fault})") from fault


def load_hub(source: str, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """Loads ``hub:owner/name``; without a test split, a fifth of each class is held out by ``seed``."""
    hub = open_hub(source)
    with HubSource(hub) as files:
        names = [name for part in hub.parts for name in part.names]
        decoded = decode_images(files, names, size or DEFAULT_SIZE, cache)
    labels = torch.from_numpy(np.concatenate([part.labels for part in hub.parts]))[decoded.rows]
    images = LabelledImages(decoded.pixels, labels, labels)
    training = int((decoded.rows < len(hub.parts[0])).sum())
    if len(hub.parts) == 1:
        order = stratified_order(labels, labels, seed)
        border = len(order) - len(order) // _TEST_EVERY
        train, test = (images.take(rows.sort().values) for rows in (order[:border], order[border:]))
    else:
        train, test = (images.take(rows) for rows in (torch.arange(training), torch.arange(training, len(images))))
    class_names = tuple(printable(name) for name in hub.class_names)
    _check_images(source, class_names, train, test, decoded.skipped)
    return ImageSplits(train, test, class_names, class_names, decoded.skipped)


def _check_images(
    source: str, names: tuple[str, ...], train: LabelledImages, test: LabelledImages, skipped: tuple[SkippedFile, ...]
) -> None:
    """Raises if there is only one class, or a class without training images, or no test image."""
    example = (
        f"; {len(skipped)} could not be read, for example {skipped[0].path} {skipped[0].reason}" if skipped else ""
    )
    if len(names) < 2:
        raise ValueError(f"{source}: has only the class {', '.join(names)}, but at least two classes are needed")
    counts = train.labels.bincount(minlength=len(names))
    if not bool(counts.all()):
        empty = names[int(counts.argmin())]
        raise ValueError(f"{source}: the class {empty!r} has no training image{example}")
    if not len(test):
        raise ValueError(f"{source}: there is no test image{example}")


def open_hub(source: str) -> HubDataset:
    """Downloads ``hub:owner/name`` unless it is there already; no image is decoded.

    Training images are the split "train", or the only split; test images are "test", or "validation" if "test" has
    no labels. Classes without images are removed.
    """
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if name.count("/") > 1 or not all(name.split("/")):
        raise ValueError(f"{source!r}: name a dataset of the hub as hub:owner/name, or hub:owner/name:config")
    try:
        package: Any = import_module("datasets")
    except ImportError as missing:
        raise ImportError(
            f"{source}: datasets of the Hugging Face hub need the package datasets, which is not installed; "
            "pip install 'moesaic[hub]', or download the images and give their folder"
        ) from missing
    try:
        splits: Mapping[str, Any] = package.load_dataset(name, config or None)
    except Exception as failure:  # of many types: unknown dataset, no network, no permission, missing configuration
        raise ValueError(f"{source}: datasets could not load it: {failure}") from failure
    train = next((split for split in _TRAIN if split in splits), next(iter(splits)) if len(splits) == 1 else None)
    if train is None:
        raise ValueError(
            f"{source}: has the splits {', '.join(splits)}, none of which is named train; "
            "download it and give the images as a folder with train/ and test/"
        )
    columns = _columns(source, package, splits[train].features)
    names = _class_names(splits[train], columns)
    parts = (_part(source, package, train, splits[train], columns, names),)
    if not len(parts[0]):
        raise ValueError(f"{source}: none of the {len(splits[train])} images of {train} has a label")
    for split in _TEST:
        if split in splits and split != train and {columns.image, columns.label} <= set(splits[split].features):
            test = _part(source, package, split, splits[split], columns, names)
            if len(test):
                parts = (*parts, test)
                break
    used: NDArray[np.int64] = np.unique(np.concatenate([part.labels for part in parts]))
    parts = tuple(replace(part, labels=np.searchsorted(used, part.labels)) for part in parts)
    return HubDataset(name, parts, tuple(names[int(label)] for label in used))


class _Columns(NamedTuple):
    image: str
    label: str
    named: bool
    """Whether labels are indices into the names of the feature; otherwise they are the names."""


def _columns(source: str, package: Any, features: Mapping[str, Any]) -> _Columns:
    """The names of the image column and of the label column."""
    images = [name for name, feature in features.items() if isinstance(feature, package.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, package.ClassLabel)]
    plain = [
        name
        for name in _LABELS
        if name in features and str(getattr(features[name], "dtype", "")).startswith(("string", "large_string", "int"))
    ]
    image = images[0] if len(images) == 1 else ("image" if "image" in images else None)
    label = labels[0] if len(labels) == 1 else next((name for name in _LABELS if name in labels), None)
    if not labels and plain:
        label = plain[0]
    if image is None or label is None:
        listed = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
        raise ValueError(
            f"{source}: is not an image classification dataset: "
            f"{_count(len(images), 'Image')} and {_count(len(labels), 'ClassLabel')} among its columns {listed}; "
            "one of each is needed, or columns named image and label"
        )
    return _Columns(image, label, label in labels)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number > 1)}"


def _class_names(dataset: Any, columns: _Columns) -> tuple[str, ...]:
    if columns.named:
        return tuple(str(name) for name in dataset.features[columns.label].names)
    values: set[Any] = {value for value in dataset[columns.label] if value is not None}
    return tuple(str(value) for value in sorted(values))


def _part(source: str, package: Any, split: str, dataset: Any, columns: _Columns, names: tuple[str, ...]) -> HubSplit:
    """The labelled images of a split; test splits of competitions often have no labels."""
    number = {name: label for label, name in enumerate(names)}
    values: list[Any] = list(dataset[columns.label])
    if columns.named:
        labels = np.array([-1 if value is None else value for value in values], dtype=np.int64)
    else:
        labels = np.array([-1 if value is None else number.get(str(value), -2) for value in values], dtype=np.int64)
        if (labels == -2).any():
            unknown = str(values[int((labels == -2).argmax())])
            raise ValueError(f"{source}: {split} has the class {unknown!r}, which has no training images")
    stored = dataset.select_columns([columns.image]).cast_column(columns.image, package.Image(decode=False))
    rows = np.flatnonzero(labels >= 0)
    return HubSplit(split, rows, labels[rows], str(getattr(dataset, "_fingerprint", "")), stored, columns.image)
