"""On-disk cache of the features of a frozen backbone, memory-mapped when it is read.

An entry lies beside the decoded images and is two files named after its key. ``features-KEY.npy`` has the features;
``features-KEY.json``, written last, their shape and a checksum. Damaged, incomplete or foreign entries are computed
again. Processes that need the same entry at a time compute it once. The cache may be deleted at any time.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moesaic.data.decoded_cache import DecodedCache, remove_stale, write_error
from moesaic.data.npy_memmap import map_npy, write_npy_header
from moesaic.files import atomic_file, write_atomic
from moesaic.leases import Leases, make_once
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["cached_features", "is_cached"]

Features = NDArray[np.float32]

_FLOAT32 = "<f4"
_BLOCK_ROWS = 64
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
    logged, needed = False, 0

    def find() -> Features | None:
        nonlocal logged
        if not header.exists():
            return None
        features = _read(values, header, rows)
        if features is None and not logged:  # it is looked at again before it is written
            logged = True
            cache.log(f"the features in {cache.folder} are damaged; computing them again")
        return features

    def make() -> Features:
        nonlocal needed
        blocks = compute()
        first = next(blocks)
        needed = 4 * rows * first[0].size
        return _write(values, header, (rows, *first.shape[1:]), chain([first], blocks))

    def waiting(holder: str) -> None:
        cache.log(f"waiting for the features that another worker computes ({holder})")

    try:
        return make_once(Leases(cache.folder), f"features-{key}", find, make, waiting)
    except OSError as fault:
        raise write_error(fault, cache.folder, "features", needed) from fault


def is_cached(folder: Path, key: str) -> bool:
    """Returns whether there is an entry, without reading its features."""
    return all(path.exists() for path in _paths(folder, key))


def _paths(folder: Path, key: str) -> tuple[Path, Path]:
    """The features and the header of an entry."""
    return folder / f"features-{key}.npy", folder / f"features-{key}.json"


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    checksum: int


def _read(values: Path, header: Path, rows: int) -> Features | None:
    try:
        content = cast("_Header", decode(_Header, read_json(header), "header"))
        if len(content.shape) < 2 or content.shape[0] != rows or min(content.shape) < 1:
            return None
        features = cast("Features", map_npy(values, content.shape, _FLOAT32))
        return features if _checksum(features) == content.checksum else None
    except (OSError, InvalidFile, OverflowError, MemoryError):
        return None


def _write(values: Path, header: Path, shape: tuple[int, ...], blocks: Iterable[Features]) -> Features:
    checksum = 0
    remove_stale(values.parent)
    with atomic_file(values) as file:
        write_npy_header(file, shape, _FLOAT32)
        for block in blocks:
            content = np.ascontiguousarray(block, dtype=_FLOAT32).tobytes()
            checksum = zlib.crc32(content, checksum)
            file.write(content)
    write_atomic(header, json.dumps({"shape": list(shape), "checksum": checksum}).encode())
    return cast("Features", map_npy(values, shape, _FLOAT32))


def _checksum(values: Features) -> int:
    checksum = 0
    for start in range(0, len(values), _BLOCK_ROWS):
        checksum = zlib.crc32(np.ascontiguousarray(values[start : start + _BLOCK_ROWS]).data, checksum)
    return checksum
