"""On-disk cache of decoded images, memory-mapped when it is read.

An entry is two files named after a digest of the file names, sizes and stamps, and of the decoder's
version. ``DIGEST.npy`` has the pixels (B, H, W, C); ``DIGEST.json``, written last, lists which files were
decoded, which were skipped and why, a checksum of the pixels and one of itself. Damaged or incomplete
entries are rebuilt, as are those of an archive with skipped files that has changed since. Processes that
need the same entry at a time decode it once. The cache may be deleted at any time.
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
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.cache_dir import CACHE_ENV_VAR, default_cache_dir
from moesaic.data.decode import DECODER_VERSION, InvalidImage, decode_image, pixel_limit
from moesaic.data.file_sources import FileEntry, FileSource, SkippedFile, UnreadableFile, printable
from moesaic.data.npy_memmap import map_npy, write_npy_header
from moesaic.files import atomic_file, check_json_digest, json_digest, write_atomic
from moesaic.leases import Leases, make_once
from moesaic.validated_json import InvalidFile, JsonLimits, decode, read_json

__all__ = ["DecodedCache", "DecodedImages", "Log", "decode_images", "no_log", "remove_stale", "write_error"]

Log = Callable[[str], None]

_BLOCK_IMAGES = 512
"""Images decoded per block."""
_LOG_INTERVAL = 5.0
"""Seconds between progress messages."""
_ABANDONED_SECONDS = 24 * 3600.0
"""Seconds after which an unfinished file counts as abandoned."""
_MAX_WORKERS = 16
_UINT8 = "|u1"
_HEADER_LIMITS = JsonLimits(bytes=1 << 29, values=20_000_000)
"""A header has a number for every image."""


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
    try:
        return make_once(
            Leases(cache.folder),
            entry.digest,
            lambda: entry.read(source, len(names), size),
            lambda: entry.write(source, names, size),
            lambda holder: cache.log(f"waiting for the images that another worker decodes ({holder})"),
        )
    except OSError as fault:
        raise write_error(fault, cache.folder, "decoded images", len(names) * size * size * 3) from fault


def _digest(source: FileSource, entries: list[FileEntry], size: int) -> str:
    content = hashlib.sha256(json.dumps([DECODER_VERSION, size, source.identity]).encode())
    for entry in entries:
        content.update(json.dumps([entry.name, entry.bytes, entry.stamp]).encode())
    return content.hexdigest()[:24]


@dataclass(frozen=True)
class _Header:
    """The content of DIGEST.json, without its own checksum."""

    kept: tuple[int, ...]
    """Rows of the requested files that were decoded, ascending."""
    skipped: tuple[tuple[str, str], ...]
    """Path and reason of the others."""
    checksum: int
    """CRC of the pixels."""
    stamp: str
    """`FileSource.stamp` when the files were read."""


class _NoImages(Exception):
    """There is nothing to cache."""

    def __init__(self, skipped: list[SkippedFile]) -> None:
        super().__init__()
        self.skipped = skipped


class _CacheEntry:
    """The two files of a digest."""

    def __init__(self, cache: DecodedCache, digest: str) -> None:
        self.folder, self.log, self.digest = cache.folder, cache.log, digest
        self._damage_logged = False
        self.pixels, self.header = (cache.folder / f"{digest}{suffix}" for suffix in (".npy", ".json"))

    def read(self, source: FileSource, requested: int, size: int) -> DecodedImages | None:
        """Returns the cached images, or None if they are missing or damaged."""
        if not self.header.exists():
            return None
        try:
            header = self._read_header(requested)
            if header.skipped and header.stamp != source.stamp:
                self._log_once(f"{source.path} has changed: files that could not be read are tried again")
                return None
            pixels = map_npy(self.pixels, (len(header.kept), size, size, 3), _UINT8)
            images = _decoded(pixels, list(header.kept), [SkippedFile(*entry) for entry in header.skipped])
            if _checksum(images.pixels) == header.checksum:
                return images
        except (OSError, InvalidFile):
            pass
        self._log_once(
            f"the decoded images in {self.folder} are damaged, or of an earlier version; decoding them again"
        )
        return None

    def _log_once(self, message: str) -> None:
        """Log a message once: an entry is read again before it is written, for another process may have written it."""
        if not self._damage_logged:
            self._damage_logged = True
            self.log(message)

    def _read_header(self, requested: int) -> _Header:
        content = read_json(self.header, limits=_HEADER_LIMITS)
        if not isinstance(content, dict) or "sha256" not in content:
            raise InvalidFile("no checksum")
        fields, whole = check_json_digest(cast("dict[str, Any]", content))
        header = cast("_Header", decode(_Header, fields, "header"))
        rows = header.kept
        in_order = all(a < b for a, b in pairwise(rows)) and all(0 <= row < requested for row in rows)
        if not (whole and in_order and len(rows) + len(header.skipped) == requested):
            raise InvalidFile("damaged")
        return header

    def write(self, source: FileSource, names: Sequence[str], size: int) -> DecodedImages:
        """Decodes the images into the two files."""
        stamp = source.stamp
        remove_stale(self.folder)
        try:
            with atomic_file(self.pixels) as file:
                rows, skipped, checksum = _write_pixels(file, source, names, size, self.log)
                if not rows:
                    raise _NoImages(skipped)
        except _NoImages as none:
            return _decoded(np.zeros((0, size, size, 3), np.uint8), [], none.skipped)
        header = asdict(_Header(tuple(rows), tuple((skip.path, skip.reason) for skip in skipped), checksum, stamp))
        plain: dict[str, Any] = json.loads(json.dumps(header))
        write_atomic(self.header, json.dumps({**plain, "sha256": json_digest(plain)}).encode())
        return _decoded(map_npy(self.pixels, (len(rows), size, size, 3), _UINT8), rows, skipped)


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

    write_npy_header(file, (len(names), size, size, 3), _UINT8)
    start = logged = time.monotonic()
    # in threads: Pillow releases the GIL while it decodes
    with pixel_limit(), ThreadPoolExecutor(min(_cpu_count(), _MAX_WORKERS)) as pool:
        for first in range(0, len(names), _BLOCK_IMAGES):
            for at, decoded in enumerate(pool.map(decode, names[first : first + _BLOCK_IMAGES]), first):
                if isinstance(decoded, SkippedFile):
                    skipped.append(decoded)
                    continue
                rows.append(at)
                checksum = zlib.crc32(decoded, checksum)
                file.write(decoded)
            now, done = time.monotonic(), first + _BLOCK_IMAGES
            if now - logged > _LOG_INTERVAL and done < len(names):
                logged, remaining = now, (now - start) * (len(names) / done - 1)
                log(f"decoded {done} of {len(names)} images, about {remaining:.0f} s left")
    file.seek(0)
    write_npy_header(file, (len(rows), size, size, 3), _UINT8)
    return rows, skipped, checksum


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _decoded(pixels: NDArray[np.uint8], rows: list[int], skipped: list[SkippedFile]) -> DecodedImages:
    channels_last = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return DecodedImages(channels_last, torch.tensor(rows, dtype=torch.int64), tuple(skipped))


def _checksum(pixels: Tensor) -> int:
    checksum = 0
    for block in cast("tuple[Tensor, ...]", pixels.permute(0, 2, 3, 1).split(_BLOCK_IMAGES)):
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
            if time.time() - unfinished.stat().st_mtime > _ABANDONED_SECONDS:
                unfinished.unlink()
