"""CIFAR-10 (Krizhevsky 2009) from its binary files: 60 000 photographs of 32×32 pixels in ten classes.

The canonical folder ``cifar-10-batches-bin`` has five files for training and one for testing. An
image is one byte for its label, then 1 024 bytes each of red, green and blue, row by row. There is no
header, so that only the size of a file shows whether it is complete.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.argument_checks import check_choice, printable
from moesaic.data.splits import Split
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes, read_stream

__all__ = [
    "CIFAR10_CLASSES",
    "CIFAR10_FILE_IMAGES",
    "Cifar10",
    "cifar10_files",
    "cifar10_tensors",
    "find_cifar10",
    "load_cifar10",
]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The names of the classes 0 to 9, as ``batches.meta.txt`` lists them."""

CIFAR10_FILE_IMAGES = 10_000
"""Images in each file."""

_SIZE = 32
_RECORD_BYTES = 1 + 3 * _SIZE * _SIZE
_FOLDER = "cifar-10-batches-bin"
_ARCHIVE = "cifar-10-binary.tar.gz"
_FILES: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, eq=False)
class Cifar10:
    """The images of a split; made by `load_cifar10`."""

    pixels: NDArray[np.uint8]
    """(B, 3, 32, 32) from 0 to 255: red, green, blue."""
    labels: NDArray[np.int64]
    """(B,) from 0 to 9, indices into `CIFAR10_CLASSES`."""

    def __len__(self) -> int:
        return len(self.labels)


def load_cifar10(split: Split, data_dir: str | Path, images_per_file: int = CIFAR10_FILE_IMAGES) -> Cifar10:
    """Loads a split from the binary files under ``data_dir``.

    The files may be in ``data_dir`` itself, in ``cifar-10-batches-bin`` below it, or in the archive
    ``cifar-10-binary.tar.gz``, which is not extracted. ``images_per_file`` is for other files in CIFAR-10's
    format; its own have 10 000 images each.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     row = bytes([6]) + bytes(range(256)) * 12                   # one frog
    ...     _ = Path(folder, "test_batch.bin").write_bytes(row * 2)
    ...     test = load_cifar10("test", folder, images_per_file=2)
    >>> test.pixels.shape, [CIFAR10_CLASSES[label] for label in test.labels]
    ((2, 3, 32, 32), ['frog', 'frog'])
    """
    rows = np.concatenate(
        [_records(name, content, images_per_file) for name, content in cifar10_files(split, data_dir)]
    )
    return Cifar10(rows[:, 1:].reshape(-1, 3, _SIZE, _SIZE), rows[:, 0].astype(np.int64))


def cifar10_tensors(split: Split, data_dir: str | Path, images_per_file: int) -> tuple[Tensor, Tensor]:
    """Loads a split as `load_cifar10` does: images (B, 3, 32, 32) uint8 and labels (B,) int64."""
    images = load_cifar10(split, data_dir, images_per_file)
    return torch.from_numpy(images.pixels.copy()), torch.from_numpy(images.labels)


def find_cifar10(data_dir: str | Path) -> Path:
    """The folder or archive with CIFAR-10's files; the error lists the expected files."""
    base = Path(data_dir)
    expected = [name for names in _FILES.values() for name in names]
    missing: list[str] = []
    for folder in (base, base / _FOLDER):
        absent = [name for name in expected if not (folder / name).is_file()]
        if len(absent) < len(expected):  # reading reports which files are missing
            return folder
        missing.append(str(folder))
    for archive in (base, base / _ARCHIVE):
        if archive.name.endswith(".tar.gz") and archive.is_file():
            return archive
        missing.append(str(archive))
    raise FileNotFoundError(
        f"load_cifar10: CIFAR-10's binary files ({expected[0]} … {expected[-1]}) are not in {missing[0]} nor in "
        f"{missing[1]}, and there is no {missing[-1]}; get the binary version from {_SOURCE} and give the folder "
        "that holds it"
    )


def cifar10_files(split: Split, data_dir: str | Path) -> list[tuple[str, bytes]]:
    """Path and content of each file of the split."""
    check_choice("load_cifar10", "split", split, get_args(Split))
    source, names = find_cifar10(data_dir), _FILES[split]
    if source.is_dir():
        _require(source, names, {path.name for path in source.iterdir() if path.is_file()})
        return [(str(source / name), read_bytes(source / name)) for name in names]
    try:
        contents = _members(source, names)
    except (PermissionError, InvalidFile):
        raise
    except Exception as damage:  # gzip, zlib, lzma, bz2 and tarfile have exceptions of their own
        why = printable(str(damage) or type(damage).__name__)
        raise InvalidFile(f"{source}: damaged archive ({why}); download it again from {_SOURCE}") from damage
    _require(source, names, contents)
    return [(f"{source}:{name}", contents[name]) for name in names]


def _members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The content of the named files, read in place and in one pass: nothing is extracted, and a bomb is noticed."""
    contents: dict[str, bytes] = {}
    with ExitStack() as stack:
        bounded: Any = _Bounded(stack.enter_context(gzip.open(path)), path)  # tarfile calls its `read` alone
        archive = stack.enter_context(tarfile.open(fileobj=bounded, mode="r|"))
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name in names:
                contents[name] = read_stream(cast("IO[bytes]", archive.extractfile(member)), MAX_FILE_BYTES, str(path))
    return contents


class _Bounded:
    """A stream that ends in an error after the most bytes that an archive of CIFAR-10 may have."""

    def __init__(self, file: gzip.GzipFile, place: Path) -> None:
        self._file, self._place, self._left = file, place, MAX_FILE_BYTES

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise InvalidFile(f"{self._place}: unpacks to more than {MAX_FILE_BYTES} bytes; get it from {_SOURCE}")
        return content


def _require(path: Path, names: Sequence[str], available: Collection[str]) -> None:
    for name in names:
        if name not in available:
            raise FileNotFoundError(f"load_cifar10: {path} has no {name}; get all of CIFAR-10 from {_SOURCE}")


def _records(name: str, content: bytes, images: int) -> NDArray[np.uint8]:
    expected = images * _RECORD_BYTES
    if len(content) != expected:
        raise InvalidFile(
            f"{name}: has {len(content)} bytes, expected {images} images of {_RECORD_BYTES} bytes = {expected}; "
            f"download it again from {_SOURCE}"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(images, _RECORD_BYTES)
    highest = int(rows[:, 0].max(initial=0))
    if highest >= len(CIFAR10_CLASSES):
        at = int((rows[:, 0] >= len(CIFAR10_CLASSES)).argmax())
        raise InvalidFile(
            f"{name}: image {at} has label {rows[at, 0]}, labels go from 0 to {len(CIFAR10_CLASSES) - 1}; "
            "is it CIFAR-100, which has two bytes of labels, or another file?"
        )
    return rows
