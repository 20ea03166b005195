"""Tile sizes of the GPU kernels: rules that came from measuring, and what was measured better for a shape on this GPU.

A kernel asks `tile` with its rule's answer and the sizes that matter. ``moesaic bench layer --tune`` times other tiles
for a shape (`tune`) and keeps the winners in a file beside the other caches, by GPU; from then on they are used.
Nothing is timed while a model runs, so the first step costs no more than the others and a run repeats to the bit.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moesaic.cache_dir import default_cache_dir

__all__ = ["CANDIDATES", "Tile", "tile", "tile_file", "tune"]

Tile = tuple[int, ...]

CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "fold": ((16, 32, 4), (8, 32, 2), (4, 32, 1), (32, 16, 4)),
    "combine": ((32, 32, 1), (16, 64, 1), (16, 128, 2), (64, 32, 2), (64, 32, 4), (32, 32, 2)),
    "spread": ((64, 16, 4), (64, 32, 4), (16, 128, 4), (128, 16, 8), (32, 32, 2)),
    "gather": ((16, 128, 4), (32, 128, 4), (8, 256, 4), (4, 1024, 4)),
    "collect": ((128, 2), (64, 1), (128, 4), (256, 4), (512, 2), (1024, 1), (1024, 2)),
    "answer": ((128, 64, 128, 4, 3), (64, 64, 64, 4, 4), (128, 32, 64, 4, 5)),
    "back": ((128, 64, 128, 4, 3), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3)),
    "shared": ((16, 128, 4), (32, 128, 4), (8, 256, 4)),
    "weights": ((64, 128, 8, 5, 132), (32, 128, 4, 5, 264), (32, 64, 4, 5, 264), (32, 256, 8, 5, 132)),
    "route": ((64, 4, 4), (128, 4, 3)),
    "scores": ((64, 4, 5), (128, 4, 4)),
    "gates": ((2,), (4,), (8,)),
    "gated": ((16, 256, 4), (8, 256, 2), (32, 32, 4)),
    "moments": ((16, 128, 1, 1, 4), (16, 128, 1, 1, 8), (16, 64, 1, 1, 4), (8, 64, 1, 1, 4), (4, 128, 1, 1, 16)),
    "norm_sums": ((16, 64, 2, 3, 2), (16, 64, 2, 1, 4), (16, 64, 2, 4, 2), (16, 64, 2, 3, 4)),
    "patch_sums": ((128, 1, 3, 2), (128, 1, 1, 4), (128, 1, 1, 8), (64, 1, 1, 8)),
    "joint": ((64, 2, 4, 3, 2), (64, 2, 4, 3, 1), (64, 2, 4, 4, 1), (64, 1, 4, 3, 1), (64, 2, 2, 3, 1)),
    "land": ((4, 32, 1, 8), (8, 32, 2, 8), (8, 16, 1, 4), (8, 16, 1, 16)),
    "pooled_lines": ((16, 1, 4), (16, 1, 8)),
    "pooled_spread": ((32, 128, 8), (32, 128, 4), (64, 128, 8), (64, 32, 4)),
    "pool": ((8, 16, 1), (16, 16, 1)),
    "thin": ((128, 9, 160, 4, 3), (64, 9, 160, 4, 3), (256, 9, 160, 8, 3), (128, 9, 32, 4, 3)),
    "thin_weights": ((64, 3, 160, 8, 4, 132), (32, 3, 160, 8, 4, 132), (64, 3, 32, 4, 3, 660), (64, 1, 16, 4, 4, 1056)),
    "thin_map": ((64, 4), (128, 8), (256, 8)),
    "thin_add": ((128, 160, 8), (64, 32, 4), (128, 32, 4), (128, 64, 4)),
    "thin_add_back": ((64, 4, 3, 528), (64, 4, 4, 396), (128, 8, 2, 528), (64, 8, 3, 528)),
}
"""By kernel: sides of a tile and warps, of those with several tiles on the way also stages, and where sums are taken in
parts how many or by how many programs."""

_GAIN = 0.99
"""A tile is kept if what it is part of takes less than this share of the best time so far."""

_trial: dict[str, Tile] = {}
_asked: dict[str, tuple[str, Tile]] | None = None


def tile(kernel: str, rule: Tile, *sizes: int) -> Tile:
    """The tile for a kernel and sizes: the one under trial, the one that was measured best here, or else the rule's."""
    name = f"{kernel} {' '.join(map(str, sizes))}"
    if _asked is not None:
        _asked.setdefault(name, (kernel, rule))
    if name in _trial:
        return _trial[name]
    return _kept(name, rule)


def tile_file() -> Path:
    """Where measured tiles of this GPU are kept."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return default_cache_dir() / "tiles" / f"{'-'.join(gpu.split())}.json"


def tune(
    measure: Callable[[], float],
    tell: Callable[[str], None] = print,
    *,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Tile]:
    """Try other tiles for every kernel that ``measure`` runs, and keep what makes it faster; the winners by name.

    ``measure`` gives the time of what is to become fast. Kernels are tuned one after the other, and each one's outcome
    is told in a line. Every new tile is compiled first, so a candidate takes seconds: when ``seconds`` are over by
    ``clock``, no other is begun, the best so far counts, and what there was no time for is told. A tile that fails,
    such as one that the GPU has no shared memory for, is told and left out.
    """
    end = clock() + seconds
    found: dict[str, Tile] = {}
    late: list[str] = []
    try:
        with _listening() as asked:
            before = measure()
        for name, (kernel, rule) in asked.items():
            now = _kept(name, rule)
            candidates = [each for each in dict.fromkeys((rule, *CANDIDATES.get(kernel, ()))) if each != now]
            trials = _Trials(name, now, measure, tell) if candidates and clock() < end else None
            while trials is not None and candidates and clock() < end:
                trials.add(candidates.pop(0))
            if candidates:
                late.append(name)
            if trials is not None and trials.done() != now:
                found[name] = trials.best
        if late:
            tell(f"{seconds:g} s are over, with tiles left to try of {', '.join(late)}")
        faster = bool(found) and measure() < before
    finally:
        _trial.clear()
    if not faster:
        return {}
    _keep(tile_file(), found)
    return found


class _Trials:
    """The tiles of one kernel, timed one after the other; the best of them stays under trial at the end."""

    def __init__(self, name: str, now: Tile, measure: Callable[[], float], tell: Callable[[str], None]) -> None:
        self.name, self.now, self.best = name, now, now
        self._measure, self._tell = measure, tell
        self._before = self._least = measure()
        self._tried = 0

    def add(self, candidate: Tile) -> None:
        _trial[self.name] = candidate
        self._tried += 1
        try:
            spent = self._measure()
        except Exception as fault:  # a tile that this GPU has no room for, in whatever words its compiler says so
            lines = str(fault).strip().splitlines()
            self._tell(f"{self.name}: {candidate} left out: {type(fault).__name__}: {lines[0] if lines else ''}")
            return
        if spent < self._least * _GAIN:
            self.best, self._least = candidate, spent

    def done(self) -> Tile:
        _trial.pop(self.name, None)
        gain = f"{self.now} stays"
        if self.best != self.now:
            _trial[self.name] = self.best
            gain = f"{self.best} in place of {self.now}, {self._least / self._before:.3f} × the time"
        self._tell(f"{self.name}: {self._tried} tiles tried; {gain}")
        return self.best


@contextmanager
def _listening() -> Generator[dict[str, tuple[str, Tile]]]:
    global _asked
    _asked = {}
    try:
        yield _asked
    finally:
        _asked = None


def _kept(name: str, rule: Tile) -> Tile:
    """What was measured best, or else the rule's: also where another version's kernel had other sides."""
    kept = _measured(str(tile_file())).get(name, rule)
    return kept if len(kept) == len(rule) else rule


@lru_cache(maxsize=8)
def _measured(file: str) -> dict[str, Tile]:
    """What was kept; a file that cannot be read is left alone, and said so."""
    try:
        kept: Any = json.loads(Path(file).read_text("utf-8"))
        return {str(name): tuple(int(side) for side in sides) for name, sides in kept["tiles"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
        warnings.warn(
            f"the measured tiles in {file} cannot be read ({fault}); the rules apply. Delete the file, or measure "
            "again with moesaic bench layer --tune",
            stacklevel=2,
        )
        return {}


def _keep(file: Path, found: dict[str, Tile]) -> None:
    tiles = _measured(str(file)) | found
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"tiles": {name: list(tiles[name]) for name in sorted(tiles)}}, indent=1), "utf-8")
    unfinished.replace(file)
    _measured.cache_clear()
