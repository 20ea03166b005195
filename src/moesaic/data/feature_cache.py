"""On-disk cache of the features of a frozen backbone, memory-mapped when it is read.

An entry lies beside the decoded images and is two files named after its key. ``features-KEY.npy`` has the features;
``features-KEY.json``, written last, their shape and a checksum. Damaged, incomplete or foreign entries are computed
again. The cache may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from moesaic.data.decoded_cache import DecodedCache, remove_stale, write_error

__all__ = ["cached_features", "is_cached"]

Features = NDArray[np.float32]

_BLOCK = 64
"""Rows that a checksum reads at a time."""


def cached_features(cache: DecodedCache, key: str, rows: int, compute: Callable[[], Iterator[Features]]) -> Features:
    """Returns an array of ``rows`` rows from the cache, or computed block by block into it.

    >>> import tempfile
    >>> blocks = lambda: iter([np.zeros((2, 3), np.float32), np.ones((1, 3), np.float32)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = cached_features(DecodedCache(Path(folder)), "key", 3, blocks)
    ...     again = cached_features(DecodedCache(Path(folder)), "key", 3, lambda: iter([]))
    >>> first.shape, bool((first == again).all())
    ((3, 3), True)
    """
    values, header = _paths(cache.folder, key)
    if header.exists():
        found = _read(values, header, rows)
        if found is not None:
            return found
        cache.log(f"the features in {cache.folder} are damaged; computing them again")
    return _write(cache, values, header, rows, compute())


def is_cached(folder: Path, key: str) -> bool:
    """Returns whether there is an entry, without reading its features."""
    return all(path.exists() for path in _paths(folder, key))


def _paths(folder: Path, key: str) -> tuple[Path, Path]:
    """The features and the header of an entry."""
    return folder / f"features-{key}.npy", folder / f"features-{key}.json"


def _read(values: Path, header: Path, rows: int) -> Features | None:
    try:
        content = cast("dict[str, Any]", json.loads(header.read_bytes()))
        found: Features = np.load(values, mmap_mode="c", allow_pickle=False)  # changes do not reach the file
        whole = found.dtype == np.float32 and found.flags["C_CONTIGUOUS"] and list(found.shape) == content["shape"]
        if whole and len(found) == rows and _checksum(found) == content["checksum"]:
            return found
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        pass  # a damaged file can be wrong in any way
    return None


def _write(cache: DecodedCache, values: Path, header: Path, rows: int, blocks: Iterator[Features]) -> Features:
    first = next(blocks)
    shape = (rows, *first.shape[1:])
    unfinished = values.with_name(f".{values.stem}.{uuid4().hex}.unfinished")
    checksum = 0
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        remove_stale(cache.folder)
        with open(unfinished, "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": "<f4"})
            for block in chain([first], blocks):
                content = np.ascontiguousarray(block, dtype="<f4").tobytes()
                checksum = zlib.crc32(content, checksum)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(values)
        unfinished.write_text(json.dumps({"shape": list(shape), "checksum": checksum}))
        unfinished.replace(header)
    except OSError as fault:
        raise write_error(fault, cache.folder, "features", 4 * rows * first[0].size) from fault
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return np.load(values, mmap_mode="c", allow_pickle=False)


def _checksum(values: Features) -> int:
    checksum = 0
    for start in range(0, len(values), _BLOCK):
        checksum = zlib.crc32(np.ascontiguousarray(values[start : start + _BLOCK]).data, checksum)
    return checksum
