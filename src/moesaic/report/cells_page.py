"""The page about a comparison or a reproduction in progress: a table of its finished cells."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.argument_checks import printable
from moesaic.report.templates import render
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["FinishedCell", "cell_files", "cells_page", "read_cells"]

_DIGEST = re.compile(r"-[0-9a-f]{16}$")
_known: dict[tuple[Path, int, int], FinishedCell] = {}
"""Cells that were read before, by path, size and time: a page is made again after each new one."""


@dataclass(frozen=True)
class FinishedCell:
    """A cell whose result is on disk."""

    name: str
    seconds: float
    finished: float
    """Seconds since 1970."""
    accuracy: float | None
    """In percent, of cells that are one training run."""


@dataclass(frozen=True)
class _Content:
    seconds: float
    result: Mapping[str, Any]


def cell_files(folder: Path) -> list[Path]:
    """The files of finished cells in the folder of a comparison or a reproduction."""
    return sorted((folder / "cells").glob("*.json"))


def read_cells(folder: Path) -> list[FinishedCell]:
    """The finished cells, the latest first; a file that is none is left out."""
    found: list[FinishedCell] = []
    for path in cell_files(folder):
        try:
            about = path.stat()
            key = (path, about.st_size, about.st_mtime_ns)
            if key not in _known:
                _known[key] = _read(path, about.st_mtime)
            found.append(_known[key])
        except (OSError, InvalidFile):
            continue  # the run itself sets a damaged cell aside and says so
    return sorted(found, key=lambda cell: cell.finished, reverse=True)


def cells_page(command: str, cells: list[FinishedCell], *, live: Mapping[str, str]) -> str:
    """Returns the page.

    Args:
        command: the command line of the run.
        cells: its finished cells.
        live: the script of the page, its digest, and the version of what the page shows.
    """
    rows = [
        (
            cell.name,
            f"{cell.seconds:,.1f} s",
            "" if cell.accuracy is None else f"{cell.accuracy:.1f} %",
            time.strftime("%H:%M:%S", time.localtime(cell.finished)),
        )
        for cell in cells
    ]
    measured = any(cell.accuracy is not None for cell in cells)
    return render("cells.html", command=printable(command), rows=rows, measured=measured, live=live)


def _read(path: Path, finished: float) -> FinishedCell:
    cell = cast("_Content", decode(_Content, read_json(path), "cell", more=True))
    accuracy = cell.result.get("accuracy")
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float):
        accuracy = None  # of several trials, or none
    if not 0 <= cell.seconds < 1e9 or not 0 <= (accuracy or 0) <= 100:
        raise InvalidFile(f"{path}: has numbers that no cell has")
    return FinishedCell(printable(_DIGEST.sub("", path.stem)), cell.seconds, finished, accuracy)
