"""The status of the cells in a folder, by its plans, its files and its leases: done, running, missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.leases import Holder, Leases, is_running
from moesaic.training.cell_plan import SweepPlan, read_plans
from moesaic.training.result_cache import read_cell
from moesaic.validated_json import InvalidFile

__all__ = ["CELLS", "CellStatus", "PlanStatus", "State", "cells_folder", "folder_status"]

CELLS = "cells"
"""The subfolder of the cells."""

State = Literal["done", "running", "abandoned", "damaged", "missing"]
"""abandoned: its worker, on this machine, is dead, and another one will take over; damaged: it will be done again."""


@dataclass(frozen=True)
class CellStatus:
    """A cell of a plan, or one that is there without a plan."""

    name: str
    digest: str
    state: State
    seconds: float | None = None
    """Seconds that it took; None if it is not done."""
    host: str = ""
    """Machine of the worker, where there is one."""
    pid: int | None = None
    started: float | None = None
    """Unix time when the worker began with the cell, by its clock."""
    heartbeat_age: float | None = None
    """Seconds since the last heartbeat, by the clocks of this machine and of the folder's."""
    needs: str = ""
    """`PlannedCell.needs`."""


@dataclass(frozen=True)
class PlanStatus:
    """The cells of a plan."""

    title: str
    cells: tuple[CellStatus, ...]

    def count(self, state: State) -> int:
        """Returns how many cells are in a state."""
        return sum(cell.state == state for cell in self.cells)


def folder_status(out: Path, clock: Callable[[], float] = time.time) -> list[PlanStatus]:
    """Returns the status of each plan in a folder, and of the cells that are in no plan.

    >>> import tempfile
    >>> from moesaic.training.result_cache import ResultCache
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = ResultCache(Path(folder, "cells")).get_or_run("a cell", {"seed": 0}, lambda: {"accuracy": 90.0})
    ...     [plan] = folder_status(Path(folder))
    >>> plan.title, plan.cells[0].name, plan.cells[0].state
    ('cells of no plan', 'a-cell', 'done')
    """
    folder = cells_folder(out)
    paths = {path.stem.rpartition("-")[2]: path for path in sorted(folder.glob("*-*.json"))}
    holders = Leases(folder).holders()

    def status(name: str, digest: str, needs: str = "") -> CellStatus:
        path = paths.get(digest)
        if path is not None:
            try:
                return CellStatus(name, digest, "done", read_cell(path).seconds)
            except (InvalidFile, FileNotFoundError):
                if digest not in holders:
                    return CellStatus(name, digest, "damaged")
        if digest not in holders:
            return CellStatus(name, digest, "missing", needs=needs)
        holder, written = holders[digest]
        return _running(name, digest, holder, max(0.0, clock() - written))

    plans = read_plans(out)
    statuses = [PlanStatus(plan.title, tuple(_once(plan, status))) for plan in plans]
    planned = {cell.digest for plan in plans for cell in plan.cells}
    unplanned = {digest: path for digest, path in paths.items() if digest not in planned}
    cells = tuple(status(path.stem.rpartition("-")[0], digest) for digest, path in unplanned.items())
    return [*statuses, PlanStatus("cells of no plan", cells)] if cells or not statuses else statuses


def cells_folder(out: Path) -> Path:
    """Returns the folder of the cells; an error says what to name."""
    if not (out / CELLS).is_dir():
        raise FileNotFoundError(
            f"{out} has no folder {CELLS}; name the folder that --out of compare or reproduce names, such as "
            "runs/reproduce-quick"
        )
    return out / CELLS


def _once(plan: SweepPlan, status: Callable[[str, str, str], CellStatus]) -> Iterator[CellStatus]:
    """The cells of a plan; the same work under two names is one."""
    digests: set[str] = set()
    for cell in plan.cells:
        if cell.digest not in digests:
            digests.add(cell.digest)
            yield status(cell.name, cell.digest, cell.needs)


def _running(name: str, digest: str, holder: Holder | None, age: float) -> CellStatus:
    if holder is None:
        return CellStatus(name, digest, "running", heartbeat_age=age)
    state: State = "abandoned" if is_running(holder) is False else "running"
    about = {"host": holder.host, "pid": holder.pid, "started": holder.started, "heartbeat_age": age}
    return CellStatus(name, digest, state, **about)  # pyright: ignore[reportArgumentType]
