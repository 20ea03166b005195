"""Arrays in .npy files of a known dtype and shape, memory-mapped.

The header must be the one that is written for that dtype and shape, byte by byte, so that a damaged header is noticed
and never parsed.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moesaic.validated_json import InvalidFile

__all__ = ["map_npy", "write_npy_header"]


def write_npy_header(file: BinaryIO, shape: tuple[int, ...], dtype: str) -> None:
    """Writes the header of the .npy format, whose padded length is the same for fewer rows."""
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": dtype})


def map_npy(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Maps a file into memory, copy-on-write: changes of the array do not reach the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.arange(6, dtype=np.uint8).reshape(2, 3))
    ...     values = map_npy(Path(folder, "a.npy"), (2, 3), "|u1").tolist()
    >>> values
    [[0, 1, 2], [3, 4, 5]]
    """
    header = io.BytesIO()
    write_npy_header(header, shape, dtype)
    expected = header.getvalue()
    size = len(expected) + math.prod(shape) * np.dtype(dtype).itemsize
    with open(path, "rb") as file:
        if file.read(len(expected)) != expected or path.stat().st_size != size:
            raise InvalidFile(f"{path}: is not a whole .npy file of the shape {shape}")
    return np.memmap(path, np.dtype(dtype), mode="c", offset=len(expected), shape=shape)
