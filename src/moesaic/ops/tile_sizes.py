"""Tile sizes of the GPU kernels: default rules, and tiles that were measured to be faster on this GPU.

A kernel calls `tile` with its default and the sizes that matter. ``moesaic bench layer --tune`` times other tiles for a
shape (`tune`) and caches the fastest in a file per GPU, from which `tile` reads them. Nothing is timed while a model
runs, so that the first step costs no more than the others and runs are reproducible to the bit.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from moesaic.cache_dir import default_cache_dir
from moesaic.files import write_json
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["CANDIDATES", "Tile", "forget_tiles", "tile", "tile_file", "tune", "version"]

Tile = tuple[int, ...]

CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "channel_conv": ((128, 32, 32, 4, 4), (64, 64, 32, 4, 4), (128, 64, 64, 8, 3), (32, 32, 32, 2, 4)),
    "fold": ((16, 32, 4), (8, 32, 2), (4, 32, 1), (32, 16, 4)),
    "scatter": ((32, 32, 1), (16, 64, 1), (16, 128, 2), (64, 32, 2), (64, 32, 4), (32, 32, 2)),
    "scatter_backward": ((64, 16, 4), (64, 32, 4), (16, 128, 4), (128, 16, 8), (32, 32, 2)),
    "gather": ((16, 128, 4), (32, 128, 4), (8, 256, 4), (4, 1024, 4)),
    "gather_backward": ((128, 2), (64, 1), (128, 4), (256, 4), (512, 2), (1024, 1), (1024, 2)),
    "pointwise": ((128, 64, 128, 4, 3), (64, 64, 64, 4, 4), (128, 32, 64, 4, 5)),
    "pointwise_input": ((128, 64, 128, 4, 3), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3)),
    "pointwise_shared": ((16, 128, 4), (32, 128, 4), (8, 256, 4)),
    "pointwise_weight": ((64, 128, 8, 5, 132), (32, 128, 4, 5, 264), (32, 64, 4, 5, 264), (32, 256, 8, 5, 132)),
    "route": ((64, 4, 4), (128, 4, 3)),
    "scores": ((64, 4, 5), (128, 4, 4)),
    "pointwise_gate": ((2,), (4,), (8,)),
    "output_gate_backward": ((16, 256, 4), (8, 256, 2), (32, 32, 4)),
    "moments": ((16, 128, 1, 1, 4), (16, 128, 1, 1, 8), (16, 64, 1, 1, 4), (8, 64, 1, 1, 4), (4, 128, 1, 1, 16)),
    "norm_sums": ((16, 64, 2, 3, 2), (16, 64, 2, 1, 4), (16, 64, 2, 4, 2), (16, 64, 2, 3, 4)),
    "patch_sums": ((128, 1, 3, 2), (128, 1, 1, 4), (128, 1, 1, 8), (64, 1, 1, 8)),
    "fused_backward": ((64, 2, 4, 3, 2), (64, 2, 4, 3, 1), (64, 2, 4, 4, 1), (64, 1, 4, 3, 1), (64, 2, 2, 3, 1)),
    "pooled_line_rows": ((4, 32, 1, 8), (8, 32, 2, 8), (8, 16, 1, 4), (8, 16, 1, 16)),
    "pooled_line_backward": ((16, 1, 4), (16, 1, 8)),
    "pooled_scatter_backward": ((32, 128, 8), (32, 128, 4), (64, 128, 8), (64, 32, 4)),
    "pooled_mean": ((8, 16, 1), (16, 16, 1)),
    "thin_conv": ((128, 9, 160, 4, 3), (64, 9, 160, 4, 3), (256, 9, 160, 8, 3), (128, 9, 32, 4, 3)),
    "thin_conv_weight": (
        (64, 3, 160, 8, 4, 132),
        (32, 3, 160, 8, 4, 132),
        (64, 3, 32, 4, 3, 660),
        (64, 1, 16, 4, 4, 1056),
    ),
    "thin_conv_input": ((64, 4), (128, 8), (256, 8)),
    "thin_add": ((128, 160, 8), (64, 32, 4), (128, 32, 4), (128, 64, 4)),
    "thin_add_backward": ((64, 4, 3, 528), (64, 4, 4, 396), (128, 8, 2, 528), (64, 8, 3, 528)),
}
"""By kernel: sides of a tile and warps; of pipelined kernels also stages, of split sums also splits or programs."""

_GAIN = 0.99
"""A tile replaces the best one so far if the measured time falls below this share of its time."""

_MAX_SIDE = 2**16
"""Of a tile in a file: no side, and no number of warps, stages or programs, is larger."""

_trial: dict[str, Tile] = {}
_requested: dict[str, tuple[str, Tile]] | None = None
_version = 0
_resolved: dict[tuple[Any, ...], Tile] = {}
"""Tiles that were looked up before: a launch must not spend time on paths and names."""


def tile(kernel: str, default: Tile, *sizes: int) -> Tile:
    """The tile for a kernel and sizes: the one being timed, the one measured fastest on this GPU, or the default.

    The cache file is read once per process and GPU: tiles that another process measures apply from the next start on.
    """
    tuning = _requested is not None or bool(_trial)
    key = (_current_gpu(), kernel, default, sizes)
    known = None if tuning else _resolved.get(key)
    if known is not None:
        return known
    name = f"{kernel} {' '.join(map(str, sizes))}"
    if _requested is not None:
        _requested.setdefault(name, (kernel, default))
    if name in _trial:
        return _trial[name]
    found = _cached_or_default(name, default)
    if not tuning:
        _resolved[key] = found
    return found


def version() -> int | None:
    """A number that changes when tiles may change; None while they are timed."""
    return None if _requested is not None or _trial else _version


def tile_file() -> Path:
    """The cache file of this GPU's measured tiles."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return default_cache_dir() / "tiles" / f"{'-'.join(gpu.split())}.json"


def tune(
    measure: Callable[[], float],
    log: Callable[[str], None] = print,
    *,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Tile]:
    """Time other tiles for every kernel that ``measure`` runs, and cache those that make it faster.

    Kernels are tuned one after the other, with a line logged for each. Every new tile is compiled first, so that a
    candidate takes seconds. A tile that fails, such as one that needs too much shared memory, is logged and skipped.

    Args:
        measure: Returns the time to minimise.
        log: Called with each line of the log.
        seconds: Time limit. Once it is over, no other candidate is started and the best so far counts.
        clock: Returns the current time in seconds.

    Returns:
        The tiles that were cached, by kernel name and sizes.
    """
    end = clock() + seconds
    found: dict[str, Tile] = {}
    late: list[str] = []
    try:
        with _recording() as requested:
            before = measure()
        for name, (kernel, default) in requested.items():
            now = _cached_or_default(name, default)
            candidates = [each for each in dict.fromkeys((default, *CANDIDATES.get(kernel, ()))) if each != now]
            trials = _Trials(name, now, measure, log) if candidates and clock() < end else None
            while trials is not None and candidates and clock() < end:
                trials.add(candidates.pop(0))
            if candidates:
                late.append(name)
            if trials is not None and trials.done() != now:
                found[name] = trials.best
        if late:
            log(f"{seconds:g} s are over, with tiles left to try of {', '.join(late)}")
        faster = bool(found) and measure() < before
    finally:
        _trial.clear()
    if not faster:
        return {}
    _write_cache(tile_file(), found)
    return found


class _Trials:
    """Times the tiles of one kernel one after the other; the best one stays in use for the kernels after it."""

    def __init__(self, name: str, now: Tile, measure: Callable[[], float], log: Callable[[str], None]) -> None:
        self.name, self.now, self.best = name, now, now
        self._measure, self._log = measure, log
        self._before = self._least = measure()
        self._tried = 0

    def add(self, candidate: Tile) -> None:
        _trial[self.name] = candidate
        self._tried += 1
        try:
            spent = self._measure()
        except Exception as error:  # Triton raises various types for a tile that does not fit
            lines = str(error).strip().splitlines()
            self._log(f"{self.name}: {candidate} left out: {type(error).__name__}: {lines[0] if lines else ''}")
            return
        if spent < self._least * _GAIN:
            self.best, self._least = candidate, spent

    def done(self) -> Tile:
        _trial.pop(self.name, None)
        gain = f"{self.now} stays"
        if self.best != self.now:
            _trial[self.name] = self.best
            gain = f"{self.best} in place of {self.now}, {self._least / self._before:.3f} × the time"
        self._log(f"{self.name}: {self._tried} tiles tried; {gain}")
        return self.best


def _current_gpu() -> int:
    """The index of the current GPU, -1 where CUDA is not in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


@contextmanager
def _recording() -> Generator[dict[str, tuple[str, Tile]]]:
    global _requested
    _requested = {}
    try:
        yield _requested
    finally:
        _requested = None


def _cached_or_default(name: str, default: Tile) -> Tile:
    """The cached tile, or the default: also where another version's kernel had other sides."""
    cached = _read_cache(str(tile_file())).get(name, default)
    return cached if len(cached) == len(default) else default


@dataclass(frozen=True)
class _Cache:
    tiles: Mapping[str, Any]


def _checked(sides: Tile) -> Tile:
    if not all(1 <= side <= _MAX_SIDE for side in sides):
        raise InvalidFile(f"the tile {sides} has a side that is not from 1 to {_MAX_SIDE}")
    return sides


@lru_cache(maxsize=8)
def _read_cache(file: str) -> dict[str, Tile]:
    """Tiles of a cache file; none, and a warning, if it cannot be read."""
    try:
        cached = cast("_Cache", decode(_Cache, read_json(file, advice="measure again"), file, more=True))
        return {name: _checked(decode(Tile, sides, name)) for name, sides in cached.tiles.items()}
    except FileNotFoundError:
        return {}
    except (OSError, InvalidFile) as error:
        warnings.warn(
            f"the measured tiles in {file} cannot be read ({type(error).__name__}: {error}); the defaults apply. "
            "Delete the file, or measure again with moesaic bench layer --tune",
            stacklevel=2,
        )
        return {}


def _write_cache(file: Path, found: dict[str, Tile]) -> None:
    tiles = _read_cache(str(file)) | found
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"tiles": {name: list(tiles[name]) for name in sorted(tiles)}})
    forget_tiles()


def forget_tiles() -> None:
    """Read the cache file anew at the next launch."""
    global _version
    _version += 1
    _read_cache.cache_clear()
    _resolved.clear()
