"""Images to run a trained network on: files, folders and zip files of a user, decoded like training images.

An image in a folder that has the name of a class gets that label; other images have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_positive
from moesaic.data.decode import InvalidImage, decode_image, decode_whole, pixel_limit
from moesaic.data.file_sources import FileSource, FolderSource, SkippedFile, UnreadableFile, open_source, printable

__all__ = [
    "InputFile",
    "InputImages",
    "check_readable",
    "find_input_files",
    "ignored_folders",
    "read_input_images",
    "to_channels",
]

_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Luma of red, green and blue (ITU-R BT.601)."""


@dataclass(frozen=True, eq=False)
class InputImages:
    """The images that could be read, in order; made by `read_input_images`."""

    pixels: Tensor
    """(B, C, H, W) uint8."""
    names: tuple[str, ...]
    labels: tuple[int | None, ...]
    """Label of each image, or None if it is unknown."""
    files: int
    """Number of files, read or skipped."""
    skipped: tuple[SkippedFile, ...]
    sources: tuple[InputFile, ...]
    """The files of the images, which can be read again while ``stack`` is open."""


def read_input_images(
    paths: Sequence[str | Path],
    shape: tuple[int, int, int],
    class_names: Sequence[str] = (),
    *,
    max_images: int | None = None,
    seed: int = 0,
    stack: ExitStack | None = None,
) -> InputImages:
    """Reads image files, and all files in folders and zip files, for a network whose input is ``shape`` (C, H, W).

    If there are more than ``max_images`` files, so many are drawn by ``seed``. Files that are not images are
    skipped; it is an error if no image is left. Zip files stay open in ``stack``, if it is given.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "cat").mkdir()
    ...     Image.new("RGB", (40, 30), "red").save(f"{folder}/cat/red.png")
    ...     _ = Path(folder, "notes.txt").write_text("no image")
    ...     found = read_input_images([folder], (3, 8, 8), ["cat", "dog"])
    >>> tuple(found.pixels.shape), found.labels, found.skipped[0].reason
    ((1, 3, 8, 8), (0,), 'is not an image, or its format is unknown')
    """
    check_readable(shape)
    pixels: list[Tensor] = []
    read: list[InputFile] = []
    skipped: list[SkippedFile] = []
    with ExitStack() as closed:
        files = find_input_files(paths, stack or closed)
        if max_images is not None and len(files) > max_images:
            check_positive("read_input_images", max_images=max_images)
            order = keyed_random.permutations(keyed_random.keys(seed, [0]), "pictures", len(files))[0]
            files = [files[int(row)] for row in order[:max_images].sort().values]
        for file in files:
            try:
                pixels.append(file.read(shape))
                read.append(file)
            except (InvalidImage, UnreadableFile) as fault:
                skipped.append(SkippedFile(printable(str(file.path)), printable(str(fault))))
    if not read:
        raise ValueError(
            f"none of the {len(skipped)} files is an image that can be read, for example: {skipped[0].path} "
            f"{skipped[0].reason}; give JPEG or PNG files, or folders of them"
        )
    label_of = {name: label for label, name in enumerate(class_names)}
    return InputImages(
        torch.stack(pixels),
        tuple(printable(str(file.path)) for file in read),
        tuple(_label(file.path, label_of) for file in read),
        len(files),
        (*skipped, *ignored_folders(files)),
        tuple(read),
    )


@dataclass(frozen=True)
class InputFile:
    """A file that may be an image; found by `find_input_files`."""

    path: Path
    """Where it is; in a zip file, below the path of that file."""
    source: FileSource
    name: str
    """Its name in the source."""

    def read(self, shape: tuple[int, int, int]) -> Tensor:
        """Returns the image as uint8 (C, H, W); raises `InvalidImage` or `UnreadableFile`."""
        C, H, _ = shape
        content = self.source.read(self.name)
        with pixel_limit():
            return torch.from_numpy(to_channels(decode_image(content, H), C))

    def read_whole(self, longest: int) -> NDArray[np.uint8]:
        """Returns all of the image as uint8 (H, W, 3), its long side reduced to ``longest`` pixels."""
        content = self.source.read(self.name)
        with pixel_limit():
            return decode_whole(content, longest)


def ignored_folders(files: Sequence[InputFile]) -> tuple[SkippedFile, ...]:
    """Lists folders whose files are not among ``files``, because moesaic wrote them or a link repeats them."""
    sources = dict.fromkeys(file.source for file in files)
    return tuple(
        SkippedFile(printable(str(source.path / name)), printable(reason))
        for source in sources
        if isinstance(source, FolderSource)
        for name, reason in source.ignored.items()
    )


def find_input_files(paths: Sequence[str | Path], stack: ExitStack) -> list[InputFile]:
    """Lists files, and all files in folders and zip files, which stay open in ``stack``; refuses to find none."""
    files = [file for path in paths for file in _files(Path(path), stack)]
    if not files:
        raise ValueError(
            f"there is no file in {', '.join(map(str, paths))}; give image files, or folders or zip files of them"
        )
    return files


def check_readable(shape: tuple[int, int, int]) -> None:
    """Refuses the input shape of a network that image files cannot be brought to."""
    C, H, W = shape
    if C not in (1, 3) or H != W:
        raise ValueError(
            f"the network takes images of {C} channels and {H}×{W} pixels; image files become squares of 1 or 3 "
            "channels: make a tensor of your images and use moesaic.insight.collect_outputs"
        )


def to_channels(image: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Returns an image (H, W, 3) as (C, H, W) in grey or RGB."""
    if channels == 1:
        return np.rint(image.astype(np.float32) @ _GREY).astype(np.uint8)[None]
    return np.ascontiguousarray(image.transpose(2, 0, 1))


def _files(path: Path, stack: ExitStack) -> list[InputFile]:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}; check the path")
    if path.is_dir() or path.suffix.lower() == ".zip":
        source = stack.enter_context(open_source(path))
        return [InputFile(path / entry.name, source, entry.name) for entry in source.entries()]
    return [InputFile(path, FolderSource(path.parent), path.name)]


def _label(file: Path, label_of: dict[str, int]) -> int | None:
    """The label of the nearest parent folder that has the name of a class."""
    names = [printable(folder.name) for folder in file.absolute().parents]
    return next((label_of[name] for name in names if name in label_of), None)
