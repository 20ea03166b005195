"""What cells measure as arrays by name, and cells in which nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moesaic.papers.engine.runner import Lab

__all__ = ["Calculation", "Measured", "arrays"]

Measured: TypeAlias = Mapping[str, NDArray[np.float64]]
"""What a cell measured, by name; arrays of trials begin with the axis of trials."""


def arrays(kept: dict[str, Any]) -> Measured:
    """The numbers of a cell as arrays."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in kept.items()}


class Calculation:
    """A cell in which nothing is trained."""

    @property
    def steps(self) -> int:
        return 0

    def obstacle(self, lab: Lab) -> str | None:
        return None

    def result(self, kept: dict[str, Any]) -> Measured:
        return arrays(kept)
