"""The plan of a sweep: the cells that a command needs, stored beside them so that anyone can see what is missing.

A folder may have several plans, of commands with other options; each is a file named after what was asked for. Trials
that are added one by one are added to the plan. All workers write the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import json_digest, write_json
from moesaic.validated_json import InvalidFile, JsonLimits, decode, parse_json, read_bytes

__all__ = ["PLANS", "PlannedCell", "SweepPlan", "add_to_plan", "parse_plan", "read_plan", "read_plans", "write_plan"]

PLANS = "plans"
"""The subfolder of the plans."""


@dataclass(frozen=True)
class PlannedCell:
    """A cell that a command needs."""

    name: str
    """Unique within the plan."""
    digest: str
    """`cell_digest`, which depends on the data: without these it is another one."""
    needs: str = ""
    """Requirement of the cell that the machine of the plan does not have; empty if it can run."""


@dataclass(frozen=True)
class SweepPlan:
    """The cells that a command needs."""

    title: str
    """Description of the command."""
    cells: tuple[PlannedCell, ...]

    def extended(self, cells: Sequence[PlannedCell]) -> SweepPlan:
        """The plan with further cells; one that can run somewhere takes the place of the same where it cannot."""
        known = {cell.name: cell for cell in self.cells}
        for cell in cells:
            if cell.name not in known or known[cell.name].needs:
                known[cell.name] = cell
        return SweepPlan(self.title, tuple(known.values()))


def add_to_plan(out: Path, command: Any, plan: SweepPlan) -> None:
    """Adds cells to the plan of a command in ``out``; ``command`` is plain JSON that tells commands apart.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for trial in ("trial 1", "trial 2"):
    ...         add_to_plan(Path(folder), {"seed": 0}, SweepPlan("compare pets", (PlannedCell(trial, trial[-1]),)))
    ...     [cell.name for plan in read_plans(Path(folder)) for cell in plan.cells]
    ['trial 1', 'trial 2']
    """
    path = out / PLANS / f"{json_digest(command)[:16]}.json"
    try:
        before = read_plan(path)
    except (FileNotFoundError, InvalidFile):  # none yet, or damaged: it is made anew from the command
        before = None
    whole = plan if before is None else before.extended(plan.cells)
    if whole != before:
        write_plan(path, whole)


def write_plan(path: Path, plan: SweepPlan) -> None:
    """Writes a plan; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(plan))


def read_plan(path: Path) -> SweepPlan:
    """Reads a plan."""
    return parse_plan(read_bytes(path, JsonLimits().bytes), str(path))


def parse_plan(content: bytes, where: str) -> SweepPlan:
    """Returns the plan that a file of this content has."""
    advice = "remove it; the command that made it writes it again"
    return cast("SweepPlan", decode(SweepPlan, parse_json(content, where, advice=advice), where))


def read_plans(out: Path) -> list[SweepPlan]:
    """Returns the plans in a folder."""
    return [read_plan(path) for path in sorted((out / PLANS).glob("*.json"))]
