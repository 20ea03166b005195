"""Runs the cells of experiments and caches their results on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from moesaic.papers.engine.cells import Cell, CompletedCell
from moesaic.training import Progress, ResultCache

__all__ = ["Runner"]

R = TypeVar("R")


class Runner:
    """Runs cells on one device with one seed. Cells that are in the result cache do not run again.

    Args:
        cache: Results of the cells that ran before.
        data_dir: Directory with the papers' datasets; None if there is none.
        device: torch device on which cells run.
        seed: Base seed of all random numbers.
        progress: Receives the progress of the cells that run.
    """

    def __init__(
        self, cache: ResultCache, data_dir: Path | None, *, device: str, seed: int, progress: Progress
    ) -> None:
        self.data_dir = data_dir
        self.device = device
        self.seed = seed
        self.progress = progress
        self._cache = cache

    def missing_requirement(self, name: str, cell: Cell[Any]) -> str | None:
        """Returns what this machine lacks to run the cell; None if it can run or its result is in the cache."""
        reason = cell.missing_requirement(self)
        if reason is None or self._cache.find(name, cell.spec(self)) is not None:
            return None
        return reason

    def run(
        self, named: Mapping[str, Cell[R]], on_completed: Callable[[str, CompletedCell[R]], None] | None = None
    ) -> dict[str, CompletedCell[R]]:
        """Returns the results of the cells by name; runs those that the cache does not have, in the order of ``named``.

        ``on_completed`` is called with each name and result as soon as it is there, first with those of the cache.
        """
        todo = {cell for name, cell in named.items() if self._cache.find(name, cell.spec(self)) is None}
        self.progress.begin("all experiments", sum(cell.steps for cell in todo))
        names: dict[Cell[R], list[str]] = {}
        for name, cell in named.items():
            names.setdefault(cell, []).append(name)
        completed: dict[Cell[R], CompletedCell[R]] = {}
        for cell in sorted(names, key=lambda cell: cell in todo):
            stored = self._cache.get_or_run(names[cell][0], cell.spec(self), self._work(names[cell][0], cell))
            completed[cell] = CompletedCell(cell.result(stored.result), stored.seconds)
            if on_completed is not None:
                for name in names[cell]:
                    on_completed(name, completed[cell])
        self.progress.end()
        return {name: completed[cell] for name, cell in named.items()}

    def _work(self, name: str, cell: Cell[Any]) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            self.progress.begin(name, cell.steps)
            try:
                return cell.measure(self)
            finally:
                self.progress.end()

        return work
