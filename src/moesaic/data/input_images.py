"""Pictures that someone names, files and folders, made what a trained network takes.

They are decoded as pictures to train on are. A picture in a folder that is named after a class is
taken to be of that class; of others the class is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.checks import at_least_one
from moesaic.data.datasets import Skipped
from moesaic.data.decode import BadPicture, decode_picture, pixel_limit
from moesaic.data.file_sources import FolderShelf, UnreadableFile, printable

__all__ = ["GivenPictures", "read_given_pictures"]

_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""How bright red, green and blue are to the eye (ITU-R BT.601)."""


@dataclass(frozen=True, eq=False)
class GivenPictures:
    """Pictures that could be read, in the order given; made by `read_given_pictures`."""

    pixels: Tensor
    """(B, C, H, W) uint8."""
    names: tuple[str, ...]
    labels: tuple[int | None, ...]
    """The class of each picture, or None where it is not known."""
    files: int
    """How many files there were."""
    skipped: tuple[Skipped, ...]


def read_given_pictures(
    paths: Sequence[str | Path],
    shape: tuple[int, int, int],
    class_names: Sequence[str] = (),
    *,
    most: int | None = None,
    seed: int = 0,
) -> GivenPictures:
    """Read picture files, and those in folders and below, for a network that takes ``shape`` (C, H, W).

    Of more than ``most`` files, so many are drawn by ``seed``. Files that are no pictures are
    skipped; that none is one is an error.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "cat").mkdir()
    ...     Image.new("RGB", (40, 30), "red").save(f"{folder}/cat/red.png")
    ...     _ = Path(folder, "notes.txt").write_text("no picture")
    ...     found = read_given_pictures([folder], (3, 8, 8), ["cat", "dog"])
    >>> tuple(found.pixels.shape), found.labels, found.skipped[0].why
    ((1, 3, 8, 8), (0,), 'is no picture, or one of an unknown kind')
    """
    C, H, W = shape
    if C not in (1, 3) or H != W:
        raise ValueError(
            f"the network takes images of {C} channels and {H}×{W} pixels; picture files become squares of 1 or 3 "
            "channels: make a tensor of your images and use moesaic.insight.look"
        )
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise ValueError(f"there is no file in {_listed(paths)}; give picture files, or folders of them")
    if most is not None and len(files) > most:
        at_least_one("read_given_pictures", most=most)
        drawn = keyed_random.permutations(keyed_random.keys(seed, [0]), "pictures", len(files))[0][:most].sort().values
        files = [files[int(row)] for row in drawn]
    pixels: list[Tensor] = []
    kept: list[Path] = []
    skipped: list[Skipped] = []
    with pixel_limit():
        for file in files:
            try:
                content = FolderShelf(file.parent).read(file.name)
                pixels.append(torch.from_numpy(_channels(decode_picture(content, H), C)))
                kept.append(file)
            except (BadPicture, UnreadableFile) as fault:
                skipped.append(Skipped(printable(str(file)), printable(str(fault))))
    if not kept:
        raise ValueError(
            f"none of {len(skipped)} files is a picture that can be read, for example: {skipped[0].path} "
            f"{skipped[0].why}; give JPEG or PNG files, or folders of them"
        )
    known = {name: label for label, name in enumerate(class_names)}
    return GivenPictures(
        torch.stack(pixels),
        tuple(printable(str(file)) for file in kept),
        tuple(_label(file, known) for file in kept),
        len(files),
        tuple(skipped),
    )


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / entry.name for entry in FolderShelf(path).entries()]
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}; check the path")
    return [path]


def _channels(picture: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """(C, H, W), in grey or in colour."""
    if channels == 1:
        return np.rint(picture.astype(np.float32) @ _GREY).astype(np.uint8)[None]
    return np.ascontiguousarray(picture.transpose(2, 0, 1))


def _label(file: Path, known: dict[str, int]) -> int | None:
    """The class of the nearest folder above that has the name of one."""
    names = [printable(folder.name) for folder in file.absolute().parents]
    return next((known[name] for name in names if name in known), None)


def _listed(paths: Sequence[str | Path]) -> str:
    return ", ".join(str(path) for path in paths)
