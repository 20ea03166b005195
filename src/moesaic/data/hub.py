"""Image classification sets from the Hugging Face hub, through the package ``datasets`` (the extra ``hub``).

``hub:owner/name`` is the set of that name, ``hub:owner/name:config`` one of its configurations. Which
column is the image and which the class is read off its features. Images are taken as they are stored
and decoded here, so that a damaged one is skipped and told like any other file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.data.datasets import LabelledImages, Skipped
from moesaic.data.decoded_cache import Cache, decode_pictures
from moesaic.data.file_sources import FileEntry, UnreadableFile, printable
from moesaic.data.image_source import ImageParts
from moesaic.data.splits import stratified_order

__all__ = ["PREFIX", "HubPart", "HubSet", "HubShelf", "hub_parts", "open_hub"]

PREFIX = "hub:"

_SIDE = 64
"""Pixels along the side, where nothing else is asked for."""
_HELD_OUT = 5
"""One in so many images of a class is held out for testing, where no split is for that."""
_TRAIN = ("train", "training")
_TEST = ("test", "testing", "validation", "valid", "val", "dev", "eval")
"""Names of splits to test on, the ones to prefer first."""
_LABELS = ("label", "labels", "class", "category", "target")
"""Names a column of classes may have: it tells which, where there are several, or its values are no class labels."""


@dataclass(frozen=True, eq=False)
class HubPart:
    """The labelled images of one split."""

    split: str
    rows: NDArray[np.int64]
    """Which rows of the split have a label."""
    labels: NDArray[np.int64]
    """(B,): of each of them, an index into `HubSet.class_names`."""
    fingerprint: str
    """Changes with what is in the split."""
    stored: Any
    """The split, with nothing but images as they are stored: ``{"bytes": …, "path": …}`` in one column."""
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> list[str]:
        """What to call each of these images."""
        return [f"{self.split}/{row}" for row in self.rows]


@dataclass(frozen=True, eq=False)
class HubSet:
    """A set of the hub; made by `open_hub`."""

    name: str
    train: HubPart
    test: HubPart | None
    """None where no other split has labels."""
    class_names: tuple[str, ...]

    @property
    def parts(self) -> tuple[HubPart, ...]:
        return (self.train,) if self.test is None else (self.train, self.test)


class HubShelf:
    """The files of a set, to be listed and read like those of a folder: ``train/0``, ``train/1`` and so on."""

    def __init__(self, hub: HubSet) -> None:
        self.path = Path(PREFIX + hub.name)
        self._parts = {part.split: part for part in hub.parts}

    @property
    def identity(self) -> str:
        return " ".join([str(self.path), *(part.fingerprint for part in self._parts.values())])

    def entries(self) -> tuple[FileEntry, ...]:
        """All images with a label; the identity alone tells whether they changed."""
        return tuple(FileEntry(name, 0, 0) for part in self._parts.values() for name in part.names)

    def read(self, name: str) -> bytes:
        split, _, row = name.rpartition("/")
        part = self._parts[split]
        file: Mapping[str, Any] = part.stored[int(row)][part.column] or {}
        content, path = file.get("bytes"), file.get("path")
        if content is None and path is None:
            raise UnreadableFile("has no image")
        try:
            return Path(path or "").read_bytes() if content is None else content
        except OSError as fault:
            raise UnreadableFile(f"cannot be read ({fault.strerror or fault})") from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


def hub_parts(source: str, size: int | None, cache: Cache, seed: int) -> ImageParts:
    """The images of ``hub:owner/name``; where no split is for testing, a fifth of each class is, drawn by seed."""
    hub = open_hub(source)
    with HubShelf(hub) as shelf:
        names = [name for part in hub.parts for name in part.names]
        decoded = decode_pictures(shelf, names, size or _SIDE, cache)
    labels = torch.from_numpy(np.concatenate([part.labels for part in hub.parts]))[decoded.kept]
    images = LabelledImages(decoded.pixels, labels, labels)
    training = int((decoded.kept < len(hub.train)).sum())
    if hub.test is None:
        order = stratified_order(labels, labels, seed)
        border = len(order) - len(order) // _HELD_OUT
        train, test = (images.take(rows.sort().values) for rows in (order[:border], order[border:]))
    else:
        train, test = (images.take(rows) for rows in (torch.arange(training), torch.arange(training, len(images))))
    class_names = tuple(printable(name) for name in hub.class_names)
    _check_images(source, class_names, train, test, decoded.skipped)
    return ImageParts(train, test, class_names, class_names, decoded.skipped)


def _check_images(
    source: str, names: tuple[str, ...], train: LabelledImages, test: LabelledImages, skipped: tuple[Skipped, ...]
) -> None:
    """Refuse a task that has nothing to tell apart, or classes without an image to learn from."""
    example = f"; {len(skipped)} could not be read, for example {skipped[0].path} {skipped[0].why}" if skipped else ""
    if len(names) < 2:
        raise ValueError(f"{source}: has one class alone, {', '.join(names)}, so there is nothing to tell apart")
    counts = train.labels.bincount(minlength=len(names))
    if not bool(counts.all()):
        lacking = names[int(counts.argmin())]
        raise ValueError(f"{source}: there is no image of the class {lacking!r} to train on{example}")
    if not len(test):
        raise ValueError(f"{source}: there is no image to test on{example}")


def open_hub(source: str) -> HubSet:
    """The set ``hub:owner/name``, downloaded where it is not yet; no image is decoded.

    To train on is the split "train", or the only one; to test on "test", or "validation" where no "test" has labels.
    Classes that no image has are left out.
    """
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if name.count("/") > 1 or not all(name.split("/")):
        raise ValueError(f"{source!r}: name a set of the hub as hub:owner/name, or hub:owner/name:config")
    try:
        package: Any = import_module("datasets")
    except ImportError as missing:
        raise ImportError(
            f"{source}: sets of the Hugging Face hub need the package datasets, which is not installed; "
            "pip install 'moesaic[hub]', or download the images and give their folder"
        ) from missing
    try:
        splits: Mapping[str, Any] = package.load_dataset(name, config or None)
    except Exception as failure:  # of many kinds: no such set, no network, no permission, a configuration to choose
        raise ValueError(f"{source}: datasets could not load it: {failure}") from failure
    train = _named(splits, _TRAIN) or (next(iter(splits)) if len(splits) == 1 else None)
    if train is None:
        raise ValueError(
            f"{source}: has the splits {', '.join(splits)}, none of which is named train; "
            "download it and give the images as a folder with train/ and test/"
        )
    columns = _columns(source, package, splits[train].features)
    names = _class_names(splits[train], columns)
    part = _part(source, package, train, splits[train], columns, names)
    if not len(part):
        raise ValueError(f"{source}: none of the {len(splits[train])} images of {train} has a label")
    for split in _TEST:
        if split in splits and split != train and {columns.image, columns.label} <= set(splits[split].features):
            test = _part(source, package, split, splits[split], columns, names)
            if len(test):
                return _without_unused(HubSet(name, part, test, names))
    return _without_unused(HubSet(name, part, None, names))


def _without_unused(hub: HubSet) -> HubSet:
    used: NDArray[np.int64] = np.unique(np.concatenate([part.labels for part in hub.parts]))
    train, *rest = (replace(part, labels=np.searchsorted(used, part.labels)) for part in hub.parts)
    return HubSet(hub.name, train, rest[0] if rest else None, tuple(hub.class_names[int(label)] for label in used))


class _Columns(NamedTuple):
    image: str
    label: str
    named: bool
    """Whether labels are numbers of names that the feature knows; else they are the names."""


def _named(splits: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in splits), None)


def _columns(source: str, package: Any, features: Mapping[str, Any]) -> _Columns:
    """The names of the columns that hold the image and the class."""
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
            f"{source}: is no set of images with a class each: "
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


def _part(source: str, package: Any, split: str, dataset: Any, columns: _Columns, names: tuple[str, ...]) -> HubPart:
    """The images of a split that have a label: sets for competitions keep those of the test split to themselves."""
    number = {name: label for label, name in enumerate(names)}
    given: list[Any] = list(dataset[columns.label])
    if columns.named:
        labels = np.array([-1 if value is None else value for value in given], dtype=np.int64)
    else:
        labels = np.array([-1 if value is None else number.get(str(value), -2) for value in given], dtype=np.int64)
        if (labels == -2).any():
            strange = str(given[int((labels == -2).argmax())])
            raise ValueError(f"{source}: {split} has the class {strange!r}, which is not among those to train on")
    stored = dataset.select_columns([columns.image]).cast_column(columns.image, package.Image(decode=False))
    rows = np.flatnonzero(labels >= 0)
    fingerprint = str(getattr(dataset, "_fingerprint", ""))
    return HubPart(split, rows, labels[rows], fingerprint, stored, columns.image)
