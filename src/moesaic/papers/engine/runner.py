"""Runs the cells of experiments on one device, and caches their results on disk.

Several processes that share the cache share the work (`moesaic.training.cell_runner`). Cells that are equal run once,
and a time budget decides which cells may still start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from moesaic import keyed_random
from moesaic.papers.engine.cells import Cell, CompletedCell
from moesaic.papers.engine.time_budget import TimeBudget
from moesaic.training import Progress, ResultCache
from moesaic.training.cell_runner import CellWork, run_cells
from moesaic.training.result_cache import CachedResult

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

    def trial_seed(self, trial: int) -> int:
        """Returns the seed of a trial, from 0 to 2^62 − 1, for what is drawn by torch's generators."""
        return int(keyed_random.keys(self.seed, [trial])[0]) & ((1 << 62) - 1)

    def missing_requirement(self, name: str, cell: Cell[Any]) -> str | None:
        """Returns what this machine lacks to run the cell; None if it can run or its result is in the cache."""
        reason = cell.missing_requirement(self)
        if reason is None or self._cache.find(name, cell.spec(self)) is not None:
            return None
        return reason

    def run(
        self,
        named: Mapping[str, Cell[R]],
        on_completed: Callable[[str, CompletedCell[R]], None] | None = None,
        budget: TimeBudget | None = None,
    ) -> dict[str, CompletedCell[R]]:
        """Returns the results of the cells by name; runs those that the cache does not have, in the order of ``named``.

        ``on_completed`` is called with each name and result as soon as it is there, first with those of the cache.
        Cells that do not fit in the budget do not run and have no result.
        """
        todo = {cell for name, cell in named.items() if self._cache.find(name, cell.spec(self)) is None}
        self.progress.begin("all experiments", sum(cell.steps for cell in todo))
        names_of: dict[Cell[R], list[str]] = {}
        for name, cell in named.items():
            names_of.setdefault(cell, []).append(name)
        work = [
            CellWork(names[0], cell.spec(self), cell.steps, self._work(names[0], cell))
            for cell, names in names_of.items()
        ]
        cells_of: dict[str, list[Cell[R]]] = {}
        for cell, each in zip(names_of, work, strict=True):
            cells_of.setdefault(each.digest, []).append(cell)
        completed: dict[Cell[R], CompletedCell[R]] = {}

        def add(digest: str, stored: CachedResult) -> None:
            if budget is not None:
                for cell in cells_of[digest]:
                    budget.record(names_of[cell][0], cell.steps, stored.seconds)
            for cell in cells_of[digest]:
                completed[cell] = CompletedCell(cell.result(stored.result), stored.seconds)
                for name in names_of[cell]:
                    if on_completed is not None:
                        on_completed(name, completed[cell])

        def may_start(each: CellWork) -> bool:
            return budget is None or budget.fits(each.name, each.steps)

        run_cells(self._cache, work, self.progress, add, may_start)
        self.progress.end()
        return {name: completed[cell] for name, cell in named.items() if cell in completed}

    def _work(self, name: str, cell: Cell[Any]) -> Callable[[Progress], dict[str, Any]]:
        def work(progress: Progress) -> dict[str, Any]:
            before, self.progress = self.progress, progress  # cells report to that of their runner
            progress.begin(name, cell.steps)
            try:
                return cell.measure(self)
            finally:
                progress.end()
                self.progress = before

        return work
