"""Pictures decoded once, into a file of bytes that is mapped into memory from then on.

A store is two files in the cache, named after a digest of all that decides their content: the
pictures' names, sizes and stamps, and how they are decoded. ``DIGEST.npy`` has the bytes
(B, H, W, C); ``DIGEST.json``, written last, tells which files they are, which were skipped and why,
and a checksum. What is damaged or incomplete is made anew. All of it may be deleted at any time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.cache_dir import CACHE_VARIABLE, default_cache
from moesaic.checks import at_least_one
from moesaic.data.datasets import Skipped
from moesaic.data.decode import DECODING, BadPicture, decode_picture, pixel_limit
from moesaic.data.file_sources import FileEntry, Shelf, UnreadableFile, printable

__all__ = ["Cache", "Decoded", "Log", "decode_pictures"]

Log = Callable[[str], None]

_BLOCK = 512
"""Pictures decoded together."""
_TOLD_EVERY = 5.0
"""Seconds between two messages about progress."""
_STALE = 24 * 3600.0
"""Seconds after which an unfinished file is taken for one that nobody writes any more."""
_MOST_WORKERS = 16


def _silent(message: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Cache:
    """Where decoded pictures are kept, and who is told how far it is."""

    folder: Path = field(default_factory=default_cache)
    log: Log = _silent


@dataclass(frozen=True, eq=False)
class Decoded:
    """Pictures as bytes; made by `decode_pictures`."""

    pixels: Tensor
    """(B, 3, size, size) uint8: a channels_last view of the file in the cache."""
    kept: Tensor
    """(B,) int64: which of the pictures asked for they are, in order."""
    skipped: tuple[Skipped, ...]


def decode_pictures(shelf: Shelf, names: Sequence[str], size: int, cache: Cache) -> Decoded:
    """The pictures of these names as squares of ``size`` pixels, from the cache or decoded into it.

    >>> import tempfile
    >>> from PIL import Image
    >>> from moesaic.data.file_sources import open_shelf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (9, 9), "blue").save(f"{folder}/blue.png")
    ...     _ = Path(folder, "notes.txt").write_text("no picture")
    ...     with open_shelf(folder) as shelf:
    ...         found = decode_pictures(shelf, ["blue.png", "notes.txt"], 8, Cache(Path(folder, "cache")))
    >>> tuple(found.pixels.shape), found.skipped[0].why
    ((1, 3, 8, 8), 'is no picture, or one of an unknown kind')
    """
    at_least_one("decode_pictures", size=size)
    known = {entry.name: entry for entry in shelf.entries()}
    # a file that is not there any more will be told when it is read
    store = _Store(cache, _digest(shelf, [known.get(name, FileEntry(name, 0, 0)) for name in names], size))
    return store.read(len(names), size) or store.write(shelf, names, size)


def _digest(shelf: Shelf, entries: list[FileEntry], size: int) -> str:
    content = hashlib.sha256(json.dumps([DECODING, size, shelf.identity]).encode())
    for entry in entries:
        content.update(json.dumps([entry.name, entry.bytes, entry.stamp]).encode())
    return content.hexdigest()[:24]


class _Store:
    """The two files of a digest."""

    def __init__(self, cache: Cache, digest: str) -> None:
        self.folder, self.log = cache.folder, cache.log
        self.pixels, self.about = (cache.folder / f"{digest}{suffix}" for suffix in (".npy", ".json"))

    def read(self, asked: int, size: int) -> Decoded | None:
        """What is there, if it is whole."""
        if not self.about.exists():
            return None
        try:
            about = cast("dict[str, Any]", json.loads(self.about.read_bytes()))
            found = _decoded(self._mapped(), about["kept"], [Skipped(path, why) for path, why in about["skipped"]])
            expected = (asked - len(found.skipped), 3, size, size)
            whole = found.pixels.dtype == torch.uint8 and found.pixels.shape == expected == (
                len(found.kept),
                *expected[1:],
            )
            if whole and _checksum(found.pixels) == about["checksum"]:
                return found
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # what is damaged can be wrong in any way
        self.log(f"the decoded pictures in {self.folder} are damaged; they are made anew")
        return None

    def write(self, shelf: Shelf, names: Sequence[str], size: int) -> Decoded:
        """Decode the pictures into the two files."""
        unfinished = self.pixels.with_name(f".{self.pixels.stem}.{uuid4().hex}.unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.folder)
            with open(unfinished, "wb") as file:
                kept, skipped, checksum = _write_pixels(file, shelf, names, size, self.log)
            if not kept:
                return _decoded(np.zeros((0, size, size, 3), np.uint8), kept, skipped)
            unfinished.replace(self.pixels)
            about = {"kept": kept, "skipped": [[each.path, each.why] for each in skipped], "checksum": checksum}
            unfinished.write_text(json.dumps(about))
            unfinished.replace(self.about)
            return _decoded(self._mapped(), kept, skipped)
        except OSError as fault:
            raise self._told(fault, len(names) * size * size * 3) from fault
        finally:
            with suppress(OSError):
                unfinished.unlink()

    def _mapped(self) -> NDArray[np.uint8]:
        """Copy-on-write: nothing that happens to the array reaches the file."""
        return np.load(self.pixels, mmap_mode="c", allow_pickle=False)

    def _told(self, fault: OSError, needed: int) -> OSError:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            told = OSError(
                f"there is no space left in {self.folder} for decoded pictures, which take {needed / 1e6:.0f} MB; free "
                f"some, or name a folder on another disk with --cache-dir or in {CACHE_VARIABLE}"
            )
        else:
            told = OSError(
                f"decoded pictures cannot be kept in {self.folder} ({fault.strerror or fault}); name a folder that can "
                f"be written with --cache-dir or in {CACHE_VARIABLE}"
            )
        told.errno = fault.errno
        return told


def _write_pixels(
    file: BinaryIO, shelf: Shelf, names: Sequence[str], size: int, log: Log
) -> tuple[list[int], list[Skipped], int]:
    """Which pictures were good, which were not, and the checksum of all bytes."""
    kept: list[int] = []
    skipped: list[Skipped] = []
    checksum = 0

    def decode(name: str) -> bytes | Skipped:
        try:
            return decode_picture(shelf.read(name), size).tobytes()
        except (BadPicture, UnreadableFile) as fault:
            return Skipped(printable(str(shelf.path / name)), printable(str(fault)))

    _write_header(file, (len(names), size, size, 3))
    start = told = time.monotonic()
    # in threads: Pillow decodes without holding up the others
    with pixel_limit(), ThreadPoolExecutor(min(_cores(), _MOST_WORKERS)) as pool:
        for first in range(0, len(names), _BLOCK):
            for at, found in enumerate(pool.map(decode, names[first : first + _BLOCK]), first):
                if isinstance(found, Skipped):
                    skipped.append(found)
                    continue
                kept.append(at)
                checksum = zlib.crc32(found, checksum)
                file.write(found)
            now, done = time.monotonic(), first + _BLOCK
            if now - told > _TOLD_EVERY and done < len(names):
                told, left = now, (now - start) * (len(names) / done - 1)
                log(f"decoded {done} of {len(names)} pictures, about {left:.0f} s left")
    file.seek(0)
    _write_header(file, (len(kept), size, size, 3))
    file.flush()
    os.fsync(file.fileno())
    return kept, skipped, checksum


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Of the .npy format, which leaves room for any number of rows: the header is as long for fewer."""
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": "|u1"})


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _decoded(pixels: NDArray[np.uint8], kept: list[int], skipped: list[Skipped]) -> Decoded:
    channels_last = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return Decoded(channels_last, torch.tensor(kept, dtype=torch.int64), tuple(skipped))


def _checksum(pixels: Tensor) -> int:
    checksum = 0
    for some in cast("tuple[Tensor, ...]", pixels.permute(0, 2, 3, 1).split(_BLOCK)):
        checksum = zlib.crc32(some.numpy().data, checksum)
    return checksum


def _remove_stale(folder: Path) -> None:
    """Unfinished files of programs that ended without a chance to remove them."""
    for left in folder.glob(".*.unfinished"):
        with suppress(OSError):  # another program may be faster
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink()
