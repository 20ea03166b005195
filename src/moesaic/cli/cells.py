"""`moesaic cells`: what is done, running and missing of a sweep, and how its cells get to another machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from moesaic.argument_checks import check_choice
from moesaic.cli.shared import check_writable, log, user_errors

if TYPE_CHECKING:
    from rich.console import Console

    from moesaic.training.cell_status import CellStatus, PlanStatus

__all__ = ["Cells"]

ACTIONS = ("status", "merge", "pack")


@dataclass(frozen=True)
class Cells:
    """Show, merge or pack the results (cells) that `compare` and `reproduce` store in --out.

    status DIR lists the cells that are done, running (with worker and start) and missing. merge DIR… --out DIR joins
    folders and packed files; different results of one cell are an error. pack DIR --out FILE.zip writes the finished
    cells into one file.
    """

    action: Positional[Annotated[str, arg(metavar="status|merge|pack")]]
    """Action: show the state of the cells, merge folders, or pack a folder."""
    folders: Positional[Annotated[tuple[Path, ...], arg(metavar="DIR", help_behavior_hint="(one; several for merge)")]]
    """Output folders of compare or reproduce; for merge, packed files too."""
    out: Annotated[Path | None, arg(metavar="DIR|FILE", help_behavior_hint="(for merge and pack)")] = None
    """Folder to join the cells in, or zip file to write."""
    json: FlagCreatePairsOff[bool] = False
    """Print the status as JSON."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command."""
        with user_errors("cells"):
            check_choice("cells", "ACTION", self.action, ACTIONS)
            self._check()
            if self.action == "status":
                self._status()
            elif self.action == "merge":
                self._merge()
            else:
                self._pack()
        return 0

    def _check(self) -> None:
        if not self.folders:
            raise ValueError(f"cells: {self.action} without DIR; name an output folder of compare or reproduce")
        if self.action != "merge" and len(self.folders) > 1:
            raise ValueError(f"cells: {self.action} takes one DIR, not {len(self.folders)}; name one")
        if self.action != "status" and self.json:
            raise ValueError(f"cells: --json is for status, not for {self.action}; leave it out")
        if self.action == "status" and self.out is not None:
            raise ValueError(f"cells: --out={str(self.out)!r} is for merge and pack; leave it out")
        if self.action != "status" and self.out is None:
            what = "FILE.zip" if self.action == "pack" else "DIR"
            raise ValueError(f"cells: {self.action} without --out; add --out {what}")

    def _status(self) -> None:
        from rich.console import Console

        from moesaic.files import json_bytes
        from moesaic.training.cell_status import folder_status

        plans = folder_status(self.folders[0])
        if self.json:
            sys.stdout.write(json_bytes([asdict(plan) for plan in plans]).decode())
            return
        console = Console()
        for plan in plans:
            _print_plan(plan, console)

    def _merge(self) -> None:
        from moesaic.report.formatting import counted
        from moesaic.training.cell_transfer import merge_cells

        assert self.out is not None
        done = merge_cells(self.folders, self.out, log)
        networks = f", {counted(done.networks, 'network')}" if done.networks else ""
        known = f"; {done.known} were there already" if done.known else ""
        sys.stdout.write(f"{counted(done.cells, 'cell')}{networks} added to {self.out}{known}\n")

    def _pack(self) -> None:
        from moesaic.report.formatting import counted
        from moesaic.training.cell_transfer import pack_cells

        assert self.out is not None
        if self.out.suffix != ".zip":
            raise ValueError(f"cells: --out={str(self.out)!r} is not a zip file; name one such as cells.zip")
        check_writable("--out", self.out)
        count = pack_cells(self.folders[0], self.out, log)
        size = self.out.stat().st_size
        sys.stdout.write(f"{counted(count, 'cell')} in {self.out}, {size / 1e6:.1f} MB\n")


_COLUMNS = ("cell", "state", "worker", "since", "heartbeat")
_LISTED = 20
"""Missing cells that the table lists."""


def _print_plan(plan: PlanStatus, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from moesaic.report.formatting import counted

    left = [(state, plan.count(state)) for state in ("running", "abandoned", "damaged", "missing")]
    counts = [f"{plan.count('done')} of {counted(len(plan.cells), 'cell')} done"]
    counts += [f"{count} {state}" for state, count in left if count]
    console.print(f"{plan.title}: {', '.join(counts)}", markup=False, highlight=False, soft_wrap=True)
    shown = [cell for cell in plan.cells if cell.state != "done"]
    shown.sort(key=lambda cell: cell.state == "missing")
    if not shown:
        return
    table = Table(box=None)
    rows = [_row(cell) for cell in shown[:_LISTED]]
    used = [number for number in range(len(_COLUMNS)) if any(row[number] for row in rows)]
    for number in used:
        table.add_column(_COLUMNS[number])
    for row in rows:
        table.add_row(*(Text(row[number]) for number in used))  # names come from files: no markup
    console.print(table)
    if len(shown) > _LISTED:
        console.print(f"and {len(shown) - _LISTED} more; --json lists all", markup=False, highlight=False)


def _row(cell: CellStatus) -> tuple[str, str, str, str, str]:
    worker = f"{cell.host}, process {cell.pid}" if cell.host else ""
    since = "" if cell.started is None else _time(cell.started)
    beat = "" if cell.heartbeat_age is None else f"{cell.heartbeat_age:.0f} s ago"
    return cell.name, f"{cell.state}: {cell.needs}" if cell.needs else cell.state, worker, since, beat


def _time(seconds: float) -> str:
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged file
        return "?"
