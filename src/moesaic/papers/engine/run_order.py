"""The order in which cells run: such that the first verdicts come early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.papers.engine.cells import Cell

__all__ = ["CellGroup", "run_order"]


@dataclass(frozen=True)
class CellGroup:
    """The cells that one verdict needs, by name."""

    cells: Mapping[str, Cell[Any]]
    headline: bool = False
    """Whether the verdict is on a paper's main claim."""
    rank: int = 0
    """Place in an order that is given; lower ones run first."""


def run_order(groups: Sequence[CellGroup]) -> list[str]:
    """Returns the names of all cells: by rank, then main claims, then the verdict with the fewest steps left.

    Steps of different experiments take different times; they need only tell minutes from seconds.
    """
    order: dict[str, None] = {}
    done: set[Cell[Any]] = set()
    waiting = list(groups)
    while waiting:
        steps = [sum(cell.steps for cell in set(group.cells.values()) - done) for group in waiting]
        first = min(range(len(waiting)), key=lambda i: (waiting[i].rank, not waiting[i].headline, steps[i], i))
        group = waiting.pop(first)
        order |= dict.fromkeys(group.cells)
        done.update(group.cells.values())
    return list(order)
