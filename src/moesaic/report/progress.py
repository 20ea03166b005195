"""How far a run is: bars with rates and time left in a terminal, a line now and then elsewhere.

Both implement `moesaic.training.Progress`. Pieces of work may lie within each other: what advances
the inner one advances those around it, so a whole run and its cells can be watched at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

__all__ = ["Bars", "Lines", "watch_progress"]

_EVERY = 10.0
"""Seconds between two lines."""

_UNIT = "trial-epochs"


@contextmanager
def watch_progress(console: Console) -> Generator[Bars | Lines]:
    """Bars where the console is a terminal, lines elsewhere.

    >>> from rich.console import Console
    >>> with watch_progress(Console()) as progress:
    ...     progress.begin("joint training, 300 samples", total=750)
    ...     progress.advance(150)
    ...     progress.end()
    """
    if not console.is_terminal:
        yield Lines(console)
        return
    bars = Bars(console)
    with bars.display:
        yield bars


class Bars:
    """A bar for each piece of work in progress."""

    def __init__(self, console: Console) -> None:
        from rich import progress
        from rich.text import Text

        class Rate(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text(_speed(task.speed or 0.0), style="bright_black")

        self.display = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(compact=True),
            Rate(),
            progress.TextColumn("{task.fields[note]}", style="bright_black", markup=False),
            console=console,
            transient=True,
        )
        self._open: list[TaskID] = []

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self._open.append(self.display.add_task(name, total=total, completed=done, note=""))

    def advance(self, amount: int, note: str = "") -> None:
        for task in self._open:
            self.display.advance(task, amount)
        if self._open and note:
            self.display.update(self._open[-1], note=note)

    def skip(self, amount: int) -> None:
        for task in self.display.tasks:  # all that are open; `advance` would take it for work
            task.completed += amount

    def end(self) -> None:
        if self._open:
            self.display.remove_task(self._open.pop())

    def log(self, message: str) -> None:
        self.display.console.print(message, markup=False, highlight=False)


@dataclass
class _Piece:
    name: str
    total: int
    done: int
    already: int
    """Of ``done``, what was there when it began or was skipped: it counts for the share, not for the rate."""
    since: float


class Lines:
    """A line every ten seconds; nothing for what takes less."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last = clock()
        self._open: list[_Piece] = []

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self._open.append(_Piece(name, total, done, done, self._clock()))

    def advance(self, amount: int, note: str = "") -> None:
        for piece in self._open:
            piece.done += amount
        now = self._clock()
        if self._open and now - self._last >= _EVERY:
            self._last = now
            self.log("; ".join(_line(piece, now) for piece in self._open) + (f"; {note}" if note else ""))

    def skip(self, amount: int) -> None:
        for piece in self._open:
            piece.done += amount
            piece.already += amount

    def end(self) -> None:
        if self._open:
            self._open.pop()

    def log(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def _line(piece: _Piece, now: float) -> str:
    share = f"{piece.name}: {100 * piece.done // piece.total if piece.total else 100} %"
    seconds, fresh = now - piece.since, piece.done - piece.already
    if seconds <= 0 or fresh <= 0:
        return share
    rate = fresh / seconds
    told = [share, _speed(rate), f"{_duration(max(piece.total - piece.done, 0) / rate)} left"]
    return ", ".join(filter(None, told))


def _speed(rate: float) -> str:
    """Nothing for what is slow: who trains one network is told of images a second."""
    return f"{rate:,.0f} {_UNIT}/s" if rate >= 1 else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
