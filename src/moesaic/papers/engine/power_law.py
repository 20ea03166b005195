"""How a quantity grows with another: least-squares slopes, and the exponent of a power law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_squares_slopes", "power_law_exponent"]

Array = NDArray[np.float64]


def least_squares_slopes(x: Sequence[float], values: Array) -> Array:
    """Returns the least-squares slope (T,) of each trial's values (S, T) over x (S,)."""
    centred = np.asarray(x, dtype=np.float64) - np.mean(x)
    return centred @ values / float(centred @ centred)


def power_law_exponent(x: Sequence[float], values: Array) -> float:
    """Returns the exponent of x that the mean of the values (S, T) follows: the slope of logarithms.

    >>> power_law_exponent([1, 2, 4], np.array([[3.0], [6.0], [12.0]]))
    1.0
    """
    means = np.maximum(values.mean(axis=-1), 1e-9)
    return float(least_squares_slopes(np.log(x).tolist(), np.log(means)))
