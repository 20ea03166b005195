"""A cache of results on disk, so that no finished work is ever repeated.

A cell is a piece of work with a specification, everything its result depends on, and a result, both
plain JSON. It is stored under the digest of its specification: another seed or another size is
another cell, and experiments that need the same cell share it. What exists is complete, because a
file is written beside its place and then linked there; what was damaged afterwards is noticed by its own
digest, set aside and done again.

Several workers may share the folder (`moesaic.leases`, `moesaic.training.cell_runner`). Of two that do the same
cell the first to finish writes it. Only the worker that has the lease of a cell sets a damaged file aside,
for another one may be writing it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import check_json_digest, json_bytes, json_digest, write_new
from moesaic.leases import Leases, make_once
from moesaic.validated_json import InvalidFile, JsonLimits, decode, parse_json, read_bytes

__all__ = ["CachedResult", "ResultCache", "StoredCell", "cell_digest", "parse_cell", "read_cell"]


@dataclass(frozen=True)
class CachedResult:
    """The result of a cell."""

    result: dict[str, Any]
    seconds: float
    """Seconds that the work took."""


class ResultCache:
    """The finished cells in a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cells = ResultCache(Path(folder))
    ...     first = cells.get_or_run("squares", {"up_to": 3}, lambda: {"squares": [0, 1, 4]})
    ...     again = cells.get_or_run("squares", {"up_to": 3}, lambda: {"squares": []})
    >>> again.result
    {'squares': [0, 1, 4]}
    """

    def __init__(
        self, folder: Path, log: Callable[[str], None] = lambda message: None, leases: Leases | None = None
    ) -> None:
        self.folder = folder
        self.leases = Leases(folder) if leases is None else leases
        """Leases of the cells that workers are running, by `cell_digest`."""
        self._log = log

    def path(self, name: str, spec: Mapping[str, Any]) -> Path:
        """Where the cell is, or would be."""
        readable = re.sub(r"[^A-Za-z0-9=.]+", "-", name).strip("-")[:60]
        return self.folder / f"{readable}-{cell_digest(spec)}.json"

    def find(self, name: str, spec: Mapping[str, Any]) -> CachedResult | None:
        """The cell if it is finished. One whose file is damaged counts as not finished."""
        for path in self._paths(spec):
            try:
                return _read(path, spec)
            except InvalidFile:
                continue
        return None

    def digests(self) -> set[str]:
        """Returns the digests of all files of cells, damaged ones included, from one listing of the folder."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set()
        return {name.removesuffix(".json").rpartition("-")[2] for name in names if name.endswith(".json")}

    def get_or_run(self, name: str, spec: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> CachedResult:
        """The finished cell, after doing the work where it is not there yet and no other worker does it."""
        return make_once(
            self.leases, cell_digest(spec), lambda: self.find(name, spec), lambda: self.run(name, spec, work)
        )

    def run(self, name: str, spec: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> CachedResult:
        """Does the work and stores the cell; the caller has the lease of it."""
        self._set_damaged_aside(spec)
        start = time.perf_counter()
        result = json.loads(json.dumps(dict(work()), allow_nan=False))
        seconds = time.perf_counter() - start
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps({"spec": dict(spec), "result": result, "seconds": seconds}))
        written = json_bytes({**content, "digest": json_digest(content)})
        if write_new(self.path(name, spec), written):
            return CachedResult(result, seconds)
        # a worker that was taken for dead has finished after all
        return self.find(name, spec) or CachedResult(result, seconds)

    def _paths(self, spec: Mapping[str, Any]) -> list[Path]:
        # the name is for people: the same work under another name is the same cell
        return sorted(self.folder.glob(f"*-{cell_digest(spec)}.json"))

    def _set_damaged_aside(self, spec: Mapping[str, Any]) -> None:
        for path in self._paths(spec):
            try:
                _read(path, spec)
            except InvalidFile as damage:
                aside = path.with_name(f"{path.name}.damaged")
                with suppress(FileNotFoundError):
                    path.replace(aside)
                self._log(f"{path.name} is damaged ({damage}); it was set aside as {aside.name} and is done again")


def cell_digest(spec: Mapping[str, Any]) -> str:
    """Returns the part of the digest of a specification that files of its cell have in their names."""
    return json_digest(spec)[:16]


@dataclass(frozen=True)
class StoredCell:
    """A cell as its file has it, without the digest."""

    spec: Mapping[str, Any]
    result: Mapping[str, Any]
    seconds: float


def read_cell(path: Path) -> StoredCell:
    """Returns the cell of a file; raises `InvalidFile` where that is damaged."""
    return parse_cell(read_bytes(path, JsonLimits().bytes), str(path))


def parse_cell(content: bytes, where: str) -> StoredCell:
    """Returns the cell that a file of this content has; raises `InvalidFile` where that is damaged."""
    parsed = parse_json(content, where, advice="the cell is done again")
    if not isinstance(parsed, dict) or "digest" not in parsed:
        raise InvalidFile("not a cell")
    written, whole = check_json_digest(cast("dict[str, Any]", parsed), "digest")
    if not whole:
        raise InvalidFile("its content does not match its digest")
    return cast("StoredCell", decode(StoredCell, written, "cell"))


def _read(path: Path, spec: Mapping[str, Any]) -> CachedResult:
    try:
        cell = read_cell(path)
    except FileNotFoundError as gone:  # another worker has just set it aside
        raise InvalidFile("it is not there any more") from gone
    if json_digest(cell.spec) != json_digest(spec):
        raise InvalidFile("it belongs to another specification")
    return CachedResult(dict(cell.result), cell.seconds)
