"""Progress of a run: bars with rates and remaining time in a terminal, a line every ten seconds elsewhere.

Both implement `moesaic.training.Progress`. Tasks may be nested: advancing the inner one advances the outer
ones, so that a run and its cells are shown at once. Rows are for work of other processes, beside the tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moesaic.report.formatting import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Bars", "Lines", "Row", "watch_progress"]

_INTERVAL = 10.0
"""Seconds between lines."""
_WIDE = 100
"""Columns of a terminal with room for long bars."""


@contextmanager
def watch_progress(console: Console, unit: str = "epochs") -> Generator[Bars | Lines]:
    """Progress bars if the console is a terminal, lines otherwise; rates are in ``unit`` per second.

    >>> from rich.console import Console
    >>> with watch_progress(Console()) as progress:
    ...     progress.begin("joint training, 300 samples", total=750)
    ...     progress.advance(150)
    ...     progress.end()
    """
    if not console.is_terminal:
        yield Lines(console, unit)
        return
    bars = Bars(console, unit)
    with bars.display:
        yield bars


class Bars:
    """A progress bar for each open task."""

    def __init__(self, console: Console, unit: str = "epochs") -> None:
        from rich import progress
        from rich.text import Text

        class Rate(progress.ProgressColumn):
            def render(self, task: progress.Task) -> Text:
                return Text(_speed(task.speed or 0.0, unit), style="bright_black")

        self.display = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20 if console.width >= _WIDE else 12),
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
        for task in self.display.tasks:  # not `advance`, which would change the rate
            if task.id in self._open:
                task.completed += amount

    def end(self) -> None:
        if self._open:
            self.display.remove_task(self._open.pop())

    def row(self, name: str, total: int) -> Row:
        """A bar beside the tasks."""
        return Row(self.display, self.display.add_task(name, total=total, note=""))

    def log(self, message: str) -> None:
        self.display.console.print(message, markup=False, highlight=False)


class Row:
    """A bar beside the tasks, of another process; nothing where there are lines."""

    def __init__(self, display: RichProgress | None = None, task: TaskID | None = None) -> None:
        self._display, self._task = display, task

    def advance(self, amount: int, note: str = "") -> None:
        if self._display is not None and self._task is not None:
            self._display.advance(self._task, amount)
            self._display.update(self._task, note=note)

    def end(self) -> None:
        if self._display is not None and self._task is not None:
            self._display.remove_task(self._task)


@dataclass
class _Task:
    name: str
    total: int
    done: int
    already: int
    """The part of ``done`` that was restored or skipped: it counts for the percentage, not for the rate."""
    since: float


class Lines:
    """Prints a line every ten seconds."""

    def __init__(self, console: Console, unit: str = "epochs", clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._unit = unit
        self._clock = clock
        self._last = clock()
        self._open: list[_Task] = []

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self._open.append(_Task(name, total, done, done, self._clock()))

    def advance(self, amount: int, note: str = "") -> None:
        for task in self._open:
            task.done += amount
        now = self._clock()
        if self._open and now - self._last >= _INTERVAL:
            self._last = now
            self.log("; ".join(_line(task, now, self._unit) for task in self._open) + (f"; {note}" if note else ""))

    def skip(self, amount: int) -> None:
        for task in self._open:
            task.done += amount
            task.already += amount

    def end(self) -> None:
        if self._open:
            self._open.pop()

    def row(self, name: str, total: int) -> Row:
        """Nothing: a line has no room for the work of other processes."""
        return Row()

    def log(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def _line(task: _Task, now: float, unit: str) -> str:
    share = f"{task.name}: {100 * task.done // task.total if task.total else 100} %"
    seconds, processed = now - task.since, task.done - task.already
    if seconds <= 0 or processed <= 0:
        return share
    rate = processed / seconds
    parts = [share, _speed(rate, unit), f"{duration(max(task.total - task.done, 0) / rate)} left"]
    return ", ".join(filter(None, parts))


def _speed(rate: float, unit: str) -> str:
    """Empty below one per second: training of a single network reports images per second instead."""
    return f"{rate:,.0f} {unit}/s" if rate >= 1 else ""
