"""Carries cells between machines that share nothing: `merge_cells` joins folders, `pack_cells` makes one file of one.

It copies finished cells, plans, and the networks that a comparison has saved. An archive is a zip file, the same bytes
for the same files, read back within the limits of `moesaic.data.file_sources`: nothing in it is executed or extracted
by its own path. Two results of one specification must agree but for times; nothing is written if some do not.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.data.file_sources import ZipSource
from moesaic.files import atomic_file, json_digest, write_atomic, write_new
from moesaic.leases import Leases
from moesaic.training.cell_plan import PLANS, SweepPlan, parse_plan, write_plan
from moesaic.training.cell_status import CELLS, cells_folder
from moesaic.training.result_cache import StoredCell, cell_digest, parse_cell, read_cell
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes

__all__ = ["ConflictingCells", "Merged", "first_difference", "merge_cells", "pack_cells"]

NETWORKS = "networks"
_RUN_FILES = ("config.json", "metrics.jsonl", "model.safetensors", "result.json")
"""Files of a finished run; the result is written last."""
_TIME_KEYS = ("seconds",)
"""Keys of results that differ from one time to the next."""
_CELL = re.compile(rf"{CELLS}/([A-Za-z0-9=.-]{{0,60}})-([0-9a-f]{{16}})\.json")
_PLAN = re.compile(rf"{PLANS}/[0-9a-f]{{16}}\.json")
_NETWORK = re.compile(rf"{NETWORKS}/([A-Za-z0-9=.-]{{1,60}}-[0-9a-f]{{16}})/({'|'.join(map(re.escape, _RUN_FILES))})")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in an archive: the first that zip files know."""


class ConflictingCells(ValueError):
    """Two results of one specification differ."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge: numbers of cells and networks."""

    cells: int
    """Cells that were added."""
    known: int
    """Cells that were there already, or in two sources."""
    networks: int
    """Networks that were added."""


@dataclass(frozen=True)
class _Source:
    """The files of a folder or an archive, by their path within it."""

    where: Path
    names: tuple[str, ...]
    read: Callable[[str], bytes]


def merge_cells(sources: Sequence[Path], out: Path, log: Callable[[str], None] = lambda message: None) -> Merged:
    """Joins the finished cells of folders and archives in ``out``, which may have some already.

    Damaged files are left out, which is logged, as are networks with a file of more than 256 MB.

    Raises:
        ConflictingCells: results of one specification differ by more than times; the message names both and the first
            two values that differ. Nothing was written.

    >>> import tempfile
    >>> from moesaic.training.result_cache import ResultCache
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, two, out = (Path(folder, name) for name in ("one", "two", "out"))
    ...     for place, seeds in ((one, (0, 1)), (two, (1, 2))):
    ...         for seed in seeds:
    ...             _ = ResultCache(place / "cells").get_or_run("a", {"seed": seed}, lambda: {"accuracy": 90.0})
    ...     pack_cells(two, Path(folder, "two.zip"))
    ...     merge_cells([one, Path(folder, "two.zip")], out)
    2
    Merged(cells=3, known=1, networks=0)
    """
    cells: dict[str, _Cell] = {}
    plans: dict[str, SweepPlan] = {}
    networks: dict[str, _Network] = {}
    before = [out] if (out / CELLS).is_dir() else []
    known = 0
    with _opened([*before, *sources]) as opened:
        for source in opened:
            for cell in _cells(source, log):
                other = cells.setdefault(cell.key, cell)
                if other is not cell:
                    known += source.where != out
                    _check_equal(other, cell)
            for name, plan in _plans(source, log):
                plans[name] = plans[name].extended(plan.cells) if name in plans else plan
            for network in _networks(source):
                networks.setdefault(network.name, network)
        added = [cell for cell in cells.values() if cell.where != out]
        (out / CELLS).mkdir(parents=True, exist_ok=True)
        for cell in added:
            cell.write(out)
        for name, plan in plans.items():
            write_plan(out / name, plan)
        carried = 0
        for network in networks.values():
            content = {} if network.source.where == out else network.read(log)
            carried += bool(content)
            for name, each in content.items():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(out / name, each)
    return Merged(len(added), known, carried)


def pack_cells(folder: Path, file: Path, log: Callable[[str], None] = lambda message: None) -> int:
    """Writes the finished cells of a folder to a zip file, the same bytes for the same files; returns how many.

    Networks with a file of more than 256 MB are left out, which is logged.
    """
    packed = 0
    with _opened([folder]) as [source], atomic_file(file) as stream, zipfile.ZipFile(stream, "w") as archive:
        for cell in _cells(source, log):
            _add(archive, cell.name, cell.content)
            packed += 1
        for name, _ in _plans(source, log):
            _add(archive, name, source.read(name))
        for network in _networks(source):
            for name, content in network.read(log).items():
                _add(archive, name, content)
    return packed


def first_difference(one: Any, other: Any, where: str = "result") -> tuple[str, Any, Any] | None:
    """Returns where two results differ first, times aside, and both values there; None where they are equal.

    >>> first_difference({"accuracy": [90.0, 91.0], "seconds": 1.0}, {"accuracy": [90.0, 91.5], "seconds": 2.0})
    ('result.accuracy[1]', 91.0, 91.5)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first, second = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
        pairs = (
            first_difference(first.get(key), second.get(key), f"{where}.{key}")
            for key in dict.fromkeys([*first, *second])
            if key not in _TIME_KEYS
        )
        return next((each for each in pairs if each is not None), None)
    if isinstance(one, list) and isinstance(other, list):
        a, b = cast("list[Any]", one), cast("list[Any]", other)
        if len(a) != len(b):
            return f"the length of {where}", len(a), len(b)
        items = (first_difference(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((each for each in items if each is not None), None)
    return None if one == other else (where, cast("Any", one), other)


@dataclass(frozen=True)
class _Cell:
    where: Path
    name: str
    """Path within the folder."""
    content: bytes
    stored: StoredCell

    @property
    def key(self) -> str:
        return json_digest(self.stored.spec)

    def write(self, out: Path) -> None:
        """Writes the cell to a folder; a damaged file in its place is replaced, unless a worker runs the cell."""
        path = out / self.name
        if write_new(path, self.content):
            return
        lease = Leases(path.parent).acquire(cell_digest(self.stored.spec))
        if lease is not None:
            with lease:
                try:
                    read_cell(path)
                except (InvalidFile, FileNotFoundError):
                    write_atomic(path, self.content)


def _check_equal(one: _Cell, other: _Cell) -> None:
    differs = first_difference(one.stored.result, other.stored.result)
    if differs is not None:
        where, a, b = differs
        raise ConflictingCells(
            f"{one.where / one.name} and {other.where / other.name} have different results of one specification: "
            f"{where} is {a!r} in the first, {b!r} in the second; remove one of the two, or merge other folders"
        )


@contextmanager
def _opened(paths: Sequence[Path]) -> Generator[list[_Source]]:
    archives: list[ZipSource] = []
    try:
        opened: list[_Source] = []
        for path in paths:
            if path.is_file():
                archive = ZipSource(path)
                archives.append(archive)
                opened.append(_Source(path, tuple(entry.name for entry in archive.entries()), archive.read))
            else:
                opened.append(_folder(path))
        yield opened
    finally:
        for archive in archives:
            archive.__exit__()


def _folder(folder: Path) -> _Source:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder or archive; check the path")
    cells_folder(folder)
    patterns = (f"{CELLS}/*.json", f"{PLANS}/*.json", *(f"{NETWORKS}/*/{name}" for name in _RUN_FILES))
    names = sorted(path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern))
    return _Source(folder, tuple(names), lambda name: read_bytes(folder / name, MAX_FILE_BYTES))


def _cells(source: _Source, log: Callable[[str], None]) -> Iterator[_Cell]:
    for name in source.names:
        match = _CELL.fullmatch(name)
        if match is None:
            continue
        try:
            content = source.read(name)
            stored = parse_cell(content, name)
            if cell_digest(stored.spec) != match[2]:
                raise InvalidFile("it belongs to another specification")
        except InvalidFile as damage:
            log(f"{source.where / name} is left out: {damage}")
            continue
        yield _Cell(source.where, name, content, stored)


def _plans(source: _Source, log: Callable[[str], None]) -> Iterator[tuple[str, SweepPlan]]:
    for name in source.names:
        if _PLAN.fullmatch(name):
            try:
                yield name, parse_plan(source.read(name), name)
            except InvalidFile as damage:
                log(f"{source.where / name} is left out: {damage}")


@dataclass(frozen=True)
class _Network:
    """The folder of a finished run, whose files are read when they are needed."""

    source: _Source
    name: str

    def read(self, log: Callable[[str], None]) -> dict[str, bytes]:
        """The files by their path within the source; none where one of them is too large or damaged."""
        files: dict[str, bytes] = {}
        for file in _RUN_FILES:
            name = f"{NETWORKS}/{self.name}/{file}"
            try:
                files[name] = self.source.read(name)
            except InvalidFile as fault:
                log(f"{self.source.where / NETWORKS / self.name} is left out: {file}: {fault}")
                return {}
        return files


def _networks(source: _Source) -> Iterator[_Network]:
    files: dict[str, set[str]] = {}
    for name in source.names:
        match = _NETWORK.fullmatch(name)
        if match is not None:
            files.setdefault(match[1], set()).add(match[2])
    for network, names in sorted(files.items()):
        if names == set(_RUN_FILES):
            yield _Network(source, network)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system, info.external_attr = 3, 0o644 << 16
    archive.writestr(info, content, zipfile.ZIP_DEFLATED, 6)
