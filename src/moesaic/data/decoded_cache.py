"""On-disk cache of decoded images, memory-mapped when it is read.

An entry is two files named after a digest of the file names, sizes and stamps, and of the decoder's
version. ``DIGEST.npy`` has the pixels (B, H, W, C); ``DIGEST.json``, written last, lists which files were
decoded, which were skipped and why, and a checksum. Damaged or incomplete entries are rebuilt. The cache
may be deleted at any time.
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

from moesaic.cache_dir import CACHE_ENV_VAR, default_cache_dir
from moesaic.checks import check_positive
from moesaic.data.decode import DECODING, InvalidImage, decode_image, pixel_limit
from moesaic.data.file_sources import FileEntry, FileSource, SkippedFile, UnreadableFile, printable

__all__ = ["DecodedCache", "DecodedImages", "Log", "decode_images", "no_log", "remove_stale", "write_error"]

Log = Callable[[str], None]

_BLOCK = 512
"""Images decoded per block."""
_LOG_INTERVAL = 5.0
"""Seconds between progress messages."""
_STALE = 24 * 3600.0
"""Seconds after which an unfinished file counts as abandoned."""
_MAX_WORKERS = 16


def no_log(message: str) -> None:
    """Discards the message."""


@dataclass(frozen=True)
class DecodedCache:
    """Folder of the cache, and where progress is logged."""

    folder: Path = field(default_factory=default_cache_dir)
    log: Log = no_log


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """Decoded images; made by `decode_images`."""

    pixels: Tensor
    """(B, 3, size, size) uint8: a channels_last view of the memory-mapped file."""
    rows: Tensor
    """(B,) int64, ascending: indices of the decoded files in the list of names."""
    skipped: tuple[SkippedFile, ...]


def decode_images(source: FileSource, names: Sequence[str], size: int, cache: DecodedCache) -> DecodedImages:
    """Returns the named files as squares of ``size`` pixels, from the cache or decoded into it.

    >>> import tempfile
    >>> from PIL import Image
    >>> from moesaic.data.file_sources import open_source
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (9, 9), "blue").save(f"{folder}/blue.png")
    ...     _ = Path(folder, "notes.txt").write_text("no image")
    ...     with open_source(folder) as source:
    ...         found = decode_images(source, ["blue.png", "notes.txt"], 8, DecodedCache(Path(folder, "cache")))
    >>> tuple(found.pixels.shape), found.skipped[0].reason
    ((1, 3, 8, 8), 'is not an image, or its format is unknown')
    """
    check_positive("decode_images", size=size)
    known = {entry.name: entry for entry in source.entries()}
    # a file that was removed meanwhile is reported when it is read
    entry = _CacheEntry(cache, _digest(source, [known.get(name, FileEntry(name, 0, 0)) for name in names], size))
    return entry.read(len(names), size) or entry.write(source, names, size)


def _digest(source: FileSource, entries: list[FileEntry], size: int) -> str:
    content = hashlib.sha256(json.dumps([DECODING, size, source.identity]).encode())
    for entry in entries:
        content.update(json.dumps([entry.name, entry.bytes, entry.stamp]).encode())
    return content.hexdigest()[:24]


class _CacheEntry:
    """The two files of a digest."""

    def __init__(self, cache: DecodedCache, digest: str) -> None:
        self.folder, self.log = cache.folder, cache.log
        self.pixels, self.header = (cache.folder / f"{digest}{suffix}" for suffix in (".npy", ".json"))

    def read(self, requested: int, size: int) -> DecodedImages | None:
        """Returns the cached images, or None if they are missing or damaged."""
        if not self.header.exists():
            return None
        try:
            header = cast("dict[str, Any]", json.loads(self.header.read_bytes()))
            skipped = [SkippedFile(path, reason) for path, reason in header["skipped"]]
            found = _decoded(self._mapped(), header["kept"], skipped)
            images = requested - len(found.skipped)
            whole = found.pixels.dtype == torch.uint8 and found.pixels.shape == (images, 3, size, size)
            if whole and len(found.rows) == images and _checksum(found.pixels) == header["checksum"]:
                return found
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # a damaged file can be wrong in any way
        self.log(f"the decoded images in {self.folder} are damaged; decoding them again")
        return None

    def write(self, source: FileSource, names: Sequence[str], size: int) -> DecodedImages:
        """Decodes the images into the two files."""
        unfinished = self.pixels.with_name(f".{self.pixels.stem}.{uuid4().hex}.unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_stale(self.folder)
            with open(unfinished, "wb") as file:
                rows, skipped, checksum = _write_pixels(file, source, names, size, self.log)
            if not rows:
                return _decoded(np.zeros((0, size, size, 3), np.uint8), rows, skipped)
            unfinished.replace(self.pixels)
            header = {"kept": rows, "skipped": [[each.path, each.reason] for each in skipped], "checksum": checksum}
            unfinished.write_text(json.dumps(header))
            unfinished.replace(self.header)
            return _decoded(self._mapped(), rows, skipped)
        except OSError as fault:
            raise write_error(fault, self.folder, "decoded images", len(names) * size * size * 3) from fault
        finally:
            with suppress(OSError):
                unfinished.unlink()

    def _mapped(self) -> NDArray[np.uint8]:
        """Copy-on-write: changes of the array do not reach the file."""
        return np.load(self.pixels, mmap_mode="c", allow_pickle=False)


def _write_pixels(
    file: BinaryIO, source: FileSource, names: Sequence[str], size: int, log: Log
) -> tuple[list[int], list[SkippedFile], int]:
    """Writes the pixels; returns the rows that were decoded, the files that were not, and the checksum."""
    rows: list[int] = []
    skipped: list[SkippedFile] = []
    checksum = 0

    def decode(name: str) -> bytes | SkippedFile:
        try:
            return decode_image(source.read(name), size).tobytes()
        except (InvalidImage, UnreadableFile) as fault:
            return SkippedFile(printable(str(source.path / name)), printable(str(fault)))

    _write_header(file, (len(names), size, size, 3))
    start = logged = time.monotonic()
    # in threads: Pillow releases the GIL while it decodes
    with pixel_limit(), ThreadPoolExecutor(min(_cpu_count(), _MAX_WORKERS)) as pool:
        for first in range(0, len(names), _BLOCK):
            for at, found in enumerate(pool.map(decode, names[first : first + _BLOCK]), first):
                if isinstance(found, SkippedFile):
                    skipped.append(found)
                    continue
                rows.append(at)
                checksum = zlib.crc32(found, checksum)
                file.write(found)
            now, done = time.monotonic(), first + _BLOCK
            if now - logged > _LOG_INTERVAL and done < len(names):
                logged, left = now, (now - start) * (len(names) / done - 1)
                log(f"decoded {done} of {len(names)} images, about {left:.0f} s left")
    file.seek(0)
    _write_header(file, (len(rows), size, size, 3))
    file.flush()
    os.fsync(file.fileno())
    return rows, skipped, checksum


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Writes the header of the .npy format, whose padded length is the same for fewer rows."""
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": "|u1"})


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _decoded(pixels: NDArray[np.uint8], rows: list[int], skipped: list[SkippedFile]) -> DecodedImages:
    channels_last = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return DecodedImages(channels_last, torch.tensor(rows, dtype=torch.int64), tuple(skipped))


def _checksum(pixels: Tensor) -> int:
    checksum = 0
    for block in cast("tuple[Tensor, ...]", pixels.permute(0, 2, 3, 1).split(_BLOCK)):
        checksum = zlib.crc32(block.numpy().data, checksum)
    return checksum


def write_error(fault: OSError, folder: Path, what: str, needed: int) -> OSError:
    """Returns an error that says why ``what`` cannot be written to the cache, and what to do."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        explained = OSError(
            f"no space left in {folder} for {what}, which take {needed / 1e6:.0f} MB; free some, "
            f"or choose a folder on another disk with --cache-dir or in {CACHE_ENV_VAR}"
        )
    else:
        explained = OSError(
            f"{what} cannot be written to {folder} ({fault.strerror or fault}); choose a writable "
            f"folder with --cache-dir or in {CACHE_ENV_VAR}"
        )
    explained.errno = fault.errno
    return explained


def remove_stale(folder: Path) -> None:
    """Removes unfinished files of processes that were killed."""
    for unfinished in folder.glob(".*.unfinished"):
        with suppress(OSError):  # another process may remove it first
            if time.time() - unfinished.stat().st_mtime > _STALE:
                unfinished.unlink()
