"""Raw trials of papers' experiments in one compressed file a paper, from which verdicts are computed again.

A file has the results of cells, reduced to what claims read, by fidelity and name. Each carries the digest of its
cell's specification: a cell that the plan has with another specification is another cell.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import write_atomic
from moesaic.paper_fidelity import Fidelity
from moesaic.validated_json import InvalidFile, decode, parse_json, read_bytes, read_stream

__all__ = ["StoredCell", "Trials", "merge_trials", "read_trials", "write_trials"]

_MAX_BYTES = 64 << 20
_ADVICE = "write it again with docs/verdicts.py"


@dataclass(frozen=True)
class StoredCell:
    """The result of a cell."""

    fidelity: Fidelity
    name: str
    """Name in the plan, such as "fig4/cnn/100"."""
    spec: str
    """Digest of the specification."""
    seconds: float
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Trials:
    """The stored cells of a paper's plans."""

    preset: str
    cells: tuple[StoredCell, ...]

    def of(self, fidelity: Fidelity) -> dict[str, StoredCell]:
        """Returns the cells of a fidelity by name."""
        return {cell.name: cell for cell in self.cells if cell.fidelity == fidelity}


def merge_trials(stored: Trials, run: Trials) -> Trials:
    """Returns all cells, by fidelity and name; those of the run replace stored ones of the same fidelity and name.

    >>> old = [StoredCell("print", name, "0ab1", 1.5, {"accuracy": [90.0]}) for name in ("b", "a")]
    >>> new = StoredCell("print", "b", "0ab1", 2.5, {"accuracy": [91.0]})
    >>> merged = merge_trials(Trials("short", tuple(old)), Trials("short", (new,)))
    >>> [(cell.name, cell.seconds) for cell in merged.cells]
    [('a', 1.5), ('b', 2.5)]
    """
    if stored.preset != run.preset:
        raise ValueError(
            f"merge_trials: stored trials of the preset {stored.preset!r}, the run has {run.preset!r}; run that preset"
        )
    cells = {(cell.fidelity, cell.name): cell for cell in (*stored.cells, *run.cells)}
    return Trials(stored.preset, tuple(cells[key] for key in sorted(cells)))


def write_trials(path: Path, trials: Trials) -> None:
    """Writes the file atomically; equal trials give equal bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cell = StoredCell("print", "fig4/cnn/100", "0ab1", 1.5, {"accuracy": [90.0, 91.5]})
    ...     trials = Trials("short", (cell,))
    ...     write_trials(Path(folder, "a.json.gz"), trials)
    ...     read_trials(Path(folder, "a.json.gz")) == trials
    True
    """
    text = json.dumps(asdict(trials), separators=(",", ":"), sort_keys=True, allow_nan=False)
    write_atomic(path, gzip.compress(text.encode(), 9, mtime=0))


def read_trials(path: Path) -> Trials:
    """Reads the file that `write_trials` wrote; raises `InvalidFile` if it is damaged."""
    try:
        with gzip.open(io.BytesIO(read_bytes(path, _MAX_BYTES))) as file:
            text = read_stream(file, _MAX_BYTES, str(path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as fault:
        raise InvalidFile(f"{path}: is no gzip file ({fault}); {_ADVICE}") from fault
    return cast("Trials", decode(Trials, parse_json(text, str(path), advice=_ADVICE), str(path)))
