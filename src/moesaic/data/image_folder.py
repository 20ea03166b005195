"""Image folders: one subfolder per class, or a zip file of such a folder.

Either the class folders are at the top, and a fifth of each class is held out for testing; or there are
``train`` and ``test`` (or ``val``, ``valid``, ``validation``), each with the class folders. Files in
subfolders of a class folder belong to the class. Hidden files and files outside of class folders are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data.decoded_cache import DecodedCache, Log, decode_images
from moesaic.data.file_sources import FileSource, SkippedFile, ZipSource, open_source, printable
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.validated_json import InvalidFile

__all__ = ["DEFAULT_SIZE", "load_folder"]

DEFAULT_SIZE = 64
"""Image size in pixels if none is given."""

_TRAIN = "train"
_TESTS = ("test", "val", "valid", "validation")
"""In order of preference."""
_TEST_FRACTION = 0.2
_TOLERANCE = 0.1
_MAX_NAMED = 3
"""Ignored files that are named."""

_Tree = Mapping[str, list[str]]
"""The file names below each top folder."""


def load_folder(path: str | Path, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
    """Loads a folder or a zip file in the layout that this module describes.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for path in ("train/cat", "train/dog", "test/cat", "test/dog"):
    ...         Path(folder, path).mkdir(parents=True)
    ...         Image.new("RGB", (40, 30), "red").save(f"{folder}/{path}/1.jpg")
    ...     splits = load_folder(folder, 8, DecodedCache(Path(folder, ".cache")), seed=0)
    >>> splits.class_names, splits.train.labels.tolist(), splits.test.labels.tolist()
    (('cat', 'dog'), [0, 1], [0, 1])
    """
    with open_source(path) as source:
        layout = _layout(source, cache.log)
        # in the order of the default seed, for which both splits are then views
        files = layout.files(seed=0)
        decoded = decode_images(source, [file.name for file in files], size or DEFAULT_SIZE, cache)
    rows = frozenset(cast("list[int]", decoded.rows.tolist()))
    readable = [file for row, file in enumerate(files) if row in rows]
    skipped_labels = [file.label for row, file in enumerate(files) if row not in rows]
    is_test = layout.is_test(readable, seed)
    labels = torch.tensor([file.label for file in readable], dtype=torch.int64)
    images = LabelledImages(decoded.pixels, labels, labels, names=tuple(file.name for file in readable))
    train, test = (images.take(mask.nonzero()[:, 0]) for mask in (~is_test, is_test))
    names = tuple(printable(name) for name in layout.classes)
    _check_images(source.path, names, train, test, dict(zip(skipped_labels, decoded.skipped, strict=True)))
    return ImageSplits(train, test, names, names, tuple(sorted(decoded.skipped, key=lambda skipped: skipped.path)))


@dataclass(frozen=True)
class _File:
    name: str
    label: int
    is_test: bool


@dataclass(frozen=True)
class _Layout:
    """The files of each class."""

    train: _Tree
    test: _Tree | None
    """None if test files are held out from ``train``."""

    @property
    def classes(self) -> list[str]:
        return sorted(self.train)

    def files(self, seed: int) -> list[_File]:
        """All files, training files first."""
        files: list[_File] = []
        for label, name in enumerate(self.classes):
            held_out = _held_out(self.train[name], seed, label) if self.test is None else frozenset[str]()
            files += [_File(file, label, file in held_out) for file in self.train[name]]
            files += [_File(file, label, is_test=True) for file in (self.test or {}).get(name, [])]
        return sorted(files, key=lambda file: file.is_test)

    def is_test(self, readable: list[_File], seed: int) -> Tensor:
        """(B,) bool: which of the readable files are test images."""
        names = {file.name for file in self.files(seed) if file.is_test}
        is_test = torch.tensor([file.name in names for file in readable], dtype=torch.bool)
        labels = torch.tensor([file.label for file in readable], dtype=torch.int64)
        for label in range(len(self.classes)) if self.test is None else ():
            rows = (labels == label).nonzero()[:, 0]
            names = [readable[row].name for row in cast("list[int]", rows.tolist())]
            held_out = _held_out(names, seed, label)
            # drawn again if skipped files leave too few or too many; small differences are accepted
            if abs(int(is_test[rows].sum()) - len(held_out)) > _TOLERANCE * len(held_out):
                is_test[rows] = torch.tensor([name in held_out for name in names])
        return is_test


def _held_out(names: list[str], seed: int, label: int) -> frozenset[str]:
    """A fifth of the files of a class, at least one; none if there is only one file."""
    order = keyed_random.permutations(keyed_random.keys(seed, [label]), "hold out", len(names))[0]
    count = max(round(_TEST_FRACTION * len(names)), 1) if len(names) > 1 else 0
    return frozenset(names[row] for row in cast("list[int]", order[:count].tolist()))


def _layout(source: FileSource, log: Log) -> _Layout:
    path, names = source.path, [entry.name for entry in source.entries()]
    for name, reason in getattr(source, "ignored", {}).items():
        log(f"{path}: {printable(name)} {printable(reason)}; it is ignored")
    tree, start = _tree(names, ""), ""
    if isinstance(source, ZipSource) and len(tree) == 1:  # a zip of a folder contains the folder itself
        top = f"{next(iter(tree))}/"
        inside = _tree(names, top)
        if len(inside) > 1 or [name.lower() for name in inside] == [_TRAIN]:
            tree, start = inside, top
    stray = [printable(name) for name in names if name.startswith(start) and "/" not in name.removeprefix(start)]
    if stray and tree:
        named = ", ".join(stray[:_MAX_NAMED]) + (" …" if len(stray) > _MAX_NAMED else "")
        log(f"{path}: ignored outside of the class folders: {named}")
    if not tree:
        raise InvalidFile(
            f"{path}: has {'files but' if names else 'no files and'} no folder with files; put the images of each "
            "class into a folder of its own"
        )
    train = next((top for top in sorted(tree) if top.lower() == _TRAIN), None)
    tests = [top for name in _TESTS for top in sorted(tree) if top.lower() == name]
    if train is None or not (tests or len(tree) == 1):
        return _checked(path, _Layout(tree, None))
    ignored = sorted(tree.keys() - {train, *tests[:1]})
    if ignored:
        verb = "is" if len(ignored) == 1 else "are"
        log(f"{path}: {train} and {tests[0]} are used; {', '.join(map(printable, ignored))} {verb} ignored")
    trees = [_tree(names, f"{start}{split}/") for split in (train, *tests[:1])]
    return _checked(path, _Layout(trees[0], trees[1] if tests else None))


def _tree(names: list[str], start: str) -> _Tree:
    """The files below each folder in the folder ``start``."""
    found: dict[str, list[str]] = {}
    for name in names:
        top, below, _ = name.removeprefix(start).partition("/")
        if name.startswith(start) and below:
            found.setdefault(top, []).append(name)
    return found


def _checked(path: Path, layout: _Layout) -> _Layout:
    classes = [printable(name) for name in layout.classes]
    if len(classes) < 2:
        found = f"only the folder {classes[0]!r} with files" if classes else "no folder with files"
        raise InvalidFile(
            f"{path}: has {found}, but at least two classes are needed; put the images of each class into a folder of "
            "its own, and give the folder that contains these folders"
        )
    if layout.test is not None and layout.test.keys() != layout.train.keys():
        raise InvalidFile(
            f"{path}: the classes differ: {_only('train', layout.train, layout.test)}"
            f"{_only('test', layout.test, layout.train)}use the same folders in both"
        )
    return layout


def _only(split: str, tree: _Tree, other: _Tree) -> str:
    missing = sorted(tree.keys() - other.keys())
    return f"only the {split} images have {', '.join(map(repr, map(printable, missing)))}; " if missing else ""


def _check_images(
    path: Path, names: tuple[str, ...], train: LabelledImages, test: LabelledImages, skipped: Mapping[int, SkippedFile]
) -> None:
    """Raises for classes without training or test images; ``skipped`` has one skipped file per class."""
    counts = {"train": train.labels.bincount(minlength=len(names)), "test": test.labels.bincount(minlength=len(names))}
    for label, name in enumerate(names):
        empty = [split for split, count in counts.items() if not count[label]]
        if not empty:
            continue
        example = f", for example: {skipped[label].path} {skipped[label].reason}" if label in skipped else ""
        which = "" if len(empty) == 2 else {"train": "training ", "test": "test "}[empty[0]]
        raise InvalidFile(
            f"{path}: the class {name!r} has no {which}image that can be read{example}; add at least two images to its "
            "folder, or remove it"
        )
