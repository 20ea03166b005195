"""Where a paper's experiments are carried out: cells of work in, what they measured out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from moesaic.data.mnist import has_digits
from moesaic.papers.chowdhury2023.digit_patches import DigitPatches
from moesaic.training import Progress, ResultCache

__all__ = ["Cell", "Done", "Lab"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Cell(Protocol[R_co]):
    """A piece of an experiment that is carried out once and kept: the trials of one network on one task.

    Cells are values: two that are equal are the same work.
    """

    @property
    def steps(self) -> int:
        """How much work it is, for the progress bar: epochs, summed over trials."""
        ...

    def obstacle(self, lab: Lab) -> str | None:
        """Why it cannot be carried out here, such as "needs a GPU (--device cuda)"; None if it can."""
        ...

    def spec(self, lab: Lab) -> dict[str, Any]:
        """Everything its result depends on, as plain JSON."""
        ...

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Do the work; plain JSON."""
        ...

    def result(self, kept: dict[str, Any]) -> R_co:
        """What `measure` returned, as judges and charts read it."""
        ...


@dataclass(frozen=True)
class Done(Generic[R]):
    """A cell that was carried out, now or before."""

    result: R
    seconds: float


class Lab:
    """Carries out cells, keeps the results on disk, and does no cell twice."""

    def __init__(
        self, cells: ResultCache, data_dir: Path | None, *, device: str, seed: int, progress: Progress
    ) -> None:
        self.data_dir = data_dir
        self.device = device
        self.seed = seed
        self.progress = progress
        self._cells = cells

    @cached_property
    def digits(self) -> DigitPatches:
        """Digits from the data folder, or those that come with the library where it has none."""
        return DigitPatches(self.data_dir if self.data_dir is not None and has_digits(self.data_dir) else None)

    def obstacle(self, name: str, cell: Cell[Any]) -> str | None:
        """Why the cell cannot be had here; None if it can, because it is done already or nothing is in the way."""
        reason = cell.obstacle(self)
        if reason is None or self._cells.find(name, cell.spec(self)) is not None:
            return None
        return reason

    def carry_out(self, named: Mapping[str, Cell[R]]) -> dict[str, Done[R]]:
        """The cells' results, by name."""
        todo = {cell for name, cell in named.items() if self._cells.find(name, cell.spec(self)) is None}
        self.progress.begin("all experiments", sum(cell.steps for cell in todo))
        found: dict[Cell[R], Done[R]] = {}
        for name, cell in named.items():
            if cell not in found:
                kept = self._cells.get_or_run(name, cell.spec(self), self._work(name, cell))
                found[cell] = Done(cell.result(kept.result), kept.seconds)
        self.progress.end()
        return {name: found[cell] for name, cell in named.items()}

    def _work(self, name: str, cell: Cell[Any]) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            self.progress.begin(name, cell.steps)
            try:
                return cell.measure(self)
            finally:
                self.progress.end()

        return work
