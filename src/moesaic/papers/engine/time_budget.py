"""A time limit of a run: a cell starts only if it fits in what is left, as far as cells of its kind ran before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["TimeBudget"]


class TimeBudget:
    """Seconds that a run may take, and the times of the cells that are known.

    A cell's time is estimated from the known cells whose names have the longest common beginning with its own, by their
    largest time per step. A kind of which none is known fits while any time is left.

    Args:
        seconds: from now on.
        clock: monotonic, in seconds.

    >>> budget = TimeBudget(60, clock=lambda: 0.0)
    >>> budget.record("wide/pmoe/1000/0", 50, 10.0)
    >>> budget.record("wide/wrn/1000/0", 50, 80.0)
    >>> budget.estimate("wide/pmoe/1000/1", 50), budget.estimate("wide/pmoe/2000/1", 100), budget.estimate("routers", 5)
    (10.0, 20.0, None)
    >>> budget.fits("wide/pmoe/1000/1", 50), budget.fits("wide/wrn/1000/1", 50), budget.fits("routers", 5)
    (True, False, True)
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds
        self._rates: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 when the time is over."""
        return self._end - self._clock()

    def record(self, name: str, steps: int, seconds: float) -> None:
        """Adds the time of a finished cell."""
        rate = seconds / max(steps, 1)
        for kind in _kinds(name):
            self._rates[kind] = max(rate, self._rates.get(kind, 0.0))

    def estimate(self, name: str, steps: int) -> float | None:
        """Returns the seconds that a cell will take; None if no cell of its kind is known."""
        rate = next((self._rates[kind] for kind in _kinds(name) if kind in self._rates), None)
        return None if rate is None else rate * max(steps, 1)

    def fits(self, name: str, steps: int) -> bool:
        """Whether a cell may start."""
        estimate = self.estimate(name, steps)
        return self.left > 0 and (estimate is None or estimate <= self.left)

    def describe(self, cells: Mapping[str, int]) -> str:
        """Returns a sentence on cells that did not run, given by name with their steps, and the time they would take.

        >>> budget = TimeBudget(120, clock=lambda: 0.0)
        >>> budget.record("wide/pmoe/1000/0", 50, 90.0)
        >>> budget.describe({"wide/pmoe/1000/1": 50, "wide/pmoe/2000/0": 50, "routers": 5})
        '3 cells did not fit in 2 min: 2 take about 3 min, and of 1 no like has run'
        """
        known = [seconds for name, steps in cells.items() if (seconds := self.estimate(name, steps)) is not None]
        parts = [f"{len(known)} take about {max(sum(known) / 60, 0.1):.2g} min"] if known else []
        if len(known) < len(cells):
            parts.append(f"of {len(cells) - len(known)} no like has run")
        count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
        return f"{count} did not fit in {self.seconds / 60:g} min: {', and '.join(parts)}"


def _kinds(name: str) -> list[str]:
    """The beginnings of a name, from the name itself to its first part."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
