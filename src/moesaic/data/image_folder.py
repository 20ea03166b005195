"""Images of one's own: a folder with one folder for each class, or a zip file of such a folder.

Either every class has its folder at the top, and a fifth of each class is held out for testing; or
there is ``train`` beside ``test`` (or ``val``, ``valid``, ``validation``), and the classes are in
both. Files count wherever they lie below the folder of their class. What is hidden, and what lies
beside the folders of classes, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data.datasets import LabelledImages, Skipped
from moesaic.data.decoded_cache import Cache, Log, decode_pictures
from moesaic.data.file_sources import Shelf, ZipShelf, open_shelf, printable
from moesaic.data.image_source import ImageParts

__all__ = ["SIZE", "folder_parts"]

SIZE = 64
"""Pixels along the side of an image, unless told otherwise."""

_TRAIN = "train"
_TESTS = ("test", "val", "valid", "validation")
"""From the most to the least wanted."""
_HELD_OUT = 0.2
_TOLERATED = 0.1

_Tree = Mapping[str, list[str]]
"""The files in each folder at the top, by their whole names."""


def folder_parts(path: str | Path, size: int | None, cache: Cache, seed: int) -> ImageParts:
    """The images in a folder or a zip file, in the layout that this module describes.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for kind in ("train/cat", "train/dog", "test/cat", "test/dog"):
    ...         Path(folder, kind).mkdir(parents=True)
    ...         Image.new("RGB", (40, 30), "red").save(f"{folder}/{kind}/1.jpg")
    ...     parts = folder_parts(folder, 8, Cache(Path(folder, ".cache")), seed=0)
    >>> parts.class_names, parts.train.labels.tolist(), parts.test.labels.tolist()
    (('cat', 'dog'), [0, 1], [0, 1])
    """
    with open_shelf(path) as shelf:
        layout = _layout(shelf, cache.log)
        # in the order of the default seed, for which no part then needs a copy
        files = layout.files(seed=0)
        decoded = decode_pictures(shelf, [file.name for file in files], size or SIZE, cache)
    kept = frozenset(cast("list[int]", decoded.kept.tolist()))
    good = [file for row, file in enumerate(files) if row in kept]
    bad = [file.label for row, file in enumerate(files) if row not in kept]
    tested = layout.tested(good, seed)
    labels = torch.tensor([file.label for file in good], dtype=torch.int64)
    images = LabelledImages(decoded.pixels, labels, labels)
    train, test = (images.take(mine.nonzero()[:, 0]) for mine in (~tested, tested))
    names = tuple(printable(name) for name in layout.classes)
    _check_images(shelf.path, names, train, test, dict(zip(bad, decoded.skipped, strict=True)))
    return ImageParts(train, test, names, names, tuple(sorted(decoded.skipped, key=lambda skipped: skipped.path)))


@dataclass(frozen=True)
class _File:
    name: str
    label: int
    tested: bool


@dataclass(frozen=True)
class _Layout:
    """The files of each class."""

    train: _Tree
    test: _Tree | None
    """None where files of ``train`` have to be held out."""

    @property
    def classes(self) -> list[str]:
        return sorted(self.train)

    def files(self, seed: int) -> list[_File]:
        """Those to train on before those to test on."""
        found: list[_File] = []
        for label, name in enumerate(self.classes):
            tested = _drawn(self.train[name], seed, label) if self.test is None else frozenset[str]()
            found += [_File(file, label, file in tested) for file in self.train[name]]
            found += [_File(file, label, tested=True) for file in (self.test or {}).get(name, [])]
        return sorted(found, key=lambda file: file.tested)

    def tested(self, good: list[_File], seed: int) -> Tensor:
        """(B,) bool: which of the files that could be read are to test on."""
        names = {file.name for file in self.files(seed) if file.tested}
        tested = torch.tensor([file.name in names for file in good], dtype=torch.bool)
        labels = torch.tensor([file.label for file in good], dtype=torch.int64)
        for label in range(len(self.classes)) if self.test is None else ():
            rows = (labels == label).nonzero()[:, 0]
            mine = [good[row].name for row in cast("list[int]", rows.tolist())]
            drawn = _drawn(mine, seed, label)
            # drawn anew where bad files leave too few or too many; a few more or less do not matter
            if abs(int(tested[rows].sum()) - len(drawn)) > _TOLERATED * len(drawn):
                tested[rows] = torch.tensor([name in drawn for name in mine])
        return tested


def _drawn(names: list[str], seed: int, label: int) -> frozenset[str]:
    """A fifth of the files of a class, one at least, and none where there is but one."""
    order = keyed_random.permutations(keyed_random.keys(seed, [label]), "hold out", len(names))[0]
    many = max(round(_HELD_OUT * len(names)), 1) if len(names) > 1 else 0
    return frozenset(names[row] for row in cast("list[int]", order[:many].tolist()))


def _layout(shelf: Shelf, log: Log) -> _Layout:
    path, names = shelf.path, [entry.name for entry in shelf.entries()]
    tree, start = _tree(names, ""), ""
    if isinstance(shelf, ZipShelf) and len(tree) == 1 and len(_tree(names, f"{next(iter(tree))}/")) > 1:
        start = f"{next(iter(tree))}/"  # a zip of a folder has that folder at its top
        tree = _tree(names, start)
    if not tree:
        raise ValueError(
            f"{path}: has {'files but' if names else 'no files and'} no folder with files; put the images of each "
            "class into a folder of its own"
        )
    train = next((top for top in sorted(tree) if top.lower() == _TRAIN), None)
    tests = [top for name in _TESTS for top in sorted(tree) if top.lower() == name]
    if train is None or not (tests or len(tree) == 1):
        return _checked(path, _Layout(tree, None))
    others = sorted(tree.keys() - {train, *tests[:1]})
    if others:
        log(f"{path}: {train} and {tests[0]} are used, {', '.join(map(printable, others))} are not")
    parts = [_tree(names, f"{start}{part}/") for part in (train, *tests[:1])]
    return _checked(path, _Layout(parts[0], parts[1] if tests else None))


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
        there = f"only the folder {classes[0]!r} with files" if classes else "no folder with files"
        raise ValueError(
            f"{path}: has {there}, so there is nothing to tell apart; put the images of each class into a folder of "
            "its own, two or more, or give the folder in which they are"
        )
    if layout.test is not None and layout.test.keys() != layout.train.keys():
        raise ValueError(
            f"{path}: classes differ: {_only('train', layout.train, layout.test)}"
            f"{_only('test', layout.test, layout.train)}give both the same folders"
        )
    return layout


def _only(part: str, there: _Tree, elsewhere: _Tree) -> str:
    alone = sorted(there.keys() - elsewhere.keys())
    return f"only those to {part} on have {', '.join(map(repr, map(printable, alone)))}; " if alone else ""


def _check_images(
    path: Path, names: tuple[str, ...], train: LabelledImages, test: LabelledImages, bad: Mapping[int, Skipped]
) -> None:
    """Refuse classes that have no images to train or to test on; ``bad`` has a file of each class that was skipped."""
    counts = {"train": train.labels.bincount(minlength=len(names)), "test": test.labels.bincount(minlength=len(names))}
    for label, name in enumerate(names):
        lacking = [part for part, count in counts.items() if not count[label]]
        if not lacking:
            continue
        example = f", for example: {bad[label].path} {bad[label].why}" if label in bad else ""
        which = "" if len(lacking) == 2 else f" to {lacking[0]} on"
        raise ValueError(
            f"{path}: the class {name!r} has no image{which} that can be read{example}; add images to its folder, two "
            "at least, or remove it"
        )
