"""A cache of results on disk, so that no finished work is ever repeated.

A cell is a piece of work with a specification, everything its result depends on, and a result, both
plain JSON. It is stored under the digest of its specification: another seed or another size is
another cell, and experiments that need the same cell share it. What exists is complete, because a
file is written beside its place and then renamed; what was damaged afterwards is noticed by its own
digest, set aside and done again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import check_json_digest, json_digest, write_json
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["CachedResult", "ResultCache"]


@dataclass(frozen=True)
class CachedResult:
    """The result of a cell."""

    result: dict[str, Any]
    seconds: float
    """How long the work took when it was done."""


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

    def __init__(self, folder: Path, log: Callable[[str], None] = lambda message: None) -> None:
        self.folder = folder
        self._log = log

    def path(self, name: str, spec: Mapping[str, Any]) -> Path:
        """Where the cell is, or would be."""
        readable = re.sub(r"[^A-Za-z0-9=.]+", "-", name).strip("-")[:60]
        return self.folder / f"{readable}-{json_digest(spec)[:16]}.json"

    def find(self, name: str, spec: Mapping[str, Any]) -> CachedResult | None:
        """The cell if it is finished. A damaged file is set aside, and its cell counts as not finished."""
        # the name is for people: the same work under another name is the same cell
        for path in sorted(self.folder.glob(f"*-{json_digest(spec)[:16]}.json")):
            try:
                return _read(path, spec)
            except InvalidFile as damage:
                aside = path.with_name(f"{path.name}.damaged")
                path.replace(aside)
                self._log(f"{path.name} is damaged ({damage}); it was set aside as {aside.name} and is done again")
        return None

    def get_or_run(self, name: str, spec: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> CachedResult:
        """The finished cell, after doing the work where it is not there yet."""
        found = self.find(name, spec)
        if found is not None:
            return found
        start = time.perf_counter()
        result = json.loads(json.dumps(dict(work()), allow_nan=False))
        seconds = time.perf_counter() - start
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps({"spec": dict(spec), "result": result, "seconds": seconds}))
        write_json(self.path(name, spec), {**content, "digest": json_digest(content)})
        return CachedResult(result, seconds)


@dataclass(frozen=True)
class _Cell:
    """A cell as its file has it, without the digest."""

    spec: Mapping[str, Any]
    result: Mapping[str, Any]
    seconds: float


def _read(path: Path, spec: Mapping[str, Any]) -> CachedResult:
    content = read_json(path, advice="the cell is done again")
    if not isinstance(content, dict) or "digest" not in content:
        raise InvalidFile("not a cell")
    written, whole = check_json_digest(cast("dict[str, Any]", content), "digest")
    if not whole:
        raise InvalidFile("its content does not match its digest")
    cell = cast("_Cell", decode(_Cell, written, "cell"))
    if json_digest(cell.spec) != json_digest(spec):
        raise InvalidFile("it belongs to another specification")
    return CachedResult(dict(cell.result), cell.seconds)
