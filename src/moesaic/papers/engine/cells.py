"""Cells: the units of work of an experiment. Each cell runs once; its result is cached on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from moesaic.papers.engine.runner import Runner

__all__ = ["AnalyticCell", "ArrayCell", "Cell", "CellArrays", "CompletedCell"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CellArrays: TypeAlias = Mapping[str, NDArray[np.float64]]
"""The arrays that a cell measured, by name. Where they hold several trials, the first axis is the trial."""


class Cell(Protocol[R_co]):
    """A unit of work, such as the trials of one network on one task.

    Cells are hashable values: two equal cells are the same work and share one result.
    """

    @property
    def steps(self) -> int:
        """Amount of work for the progress bar: epochs, summed over trials."""
        ...

    def missing_requirement(self, runner: Runner) -> str | None:
        """Returns what this machine lacks to run the cell, such as "needs a GPU (--device cuda)", or None."""
        ...

    def spec(self, runner: Runner) -> dict[str, Any]:
        """Returns everything that the result depends on, as plain JSON. Its digest is the key in the result cache."""
        ...

    def measure(self, runner: Runner) -> dict[str, Any]:
        """Runs the cell and returns the measurements as plain JSON."""
        ...

    def result(self, stored: dict[str, Any]) -> R_co:
        """Converts the JSON that `measure` returned to the type that claim checks and charts read."""
        ...


@dataclass(frozen=True)
class CompletedCell(Generic[R]):
    """The result of a cell, from this run or from the result cache."""

    result: R
    seconds: float
    """Duration of the run that measured it."""


class ArrayCell:
    """Base class of cells that run on every machine and measure arrays."""

    def missing_requirement(self, runner: Runner) -> str | None:
        return None

    def result(self, stored: dict[str, Any]) -> CellArrays:
        return {name: np.asarray(value, dtype=np.float64) for name, value in stored.items()}


class AnalyticCell(ArrayCell):
    """Base class of cells that train nothing: they evaluate formulas or sample random numbers."""

    @property
    def steps(self) -> int:
        return 0
