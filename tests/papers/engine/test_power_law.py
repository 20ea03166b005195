"""Slopes and exponents."""

import numpy as np
import pytest

from moesaic.papers.engine.power_law import least_squares_slopes, power_law_exponent


def test_slopes_are_those_of_each_trial():
    x = [1.0, 2.0, 5.0]
    values = np.stack([np.array([2 * v + 1, -v]) for v in x])
    assert least_squares_slopes(x, values).tolist() == pytest.approx([2, -1])


def test_powers_are_exponents_of_the_mean():
    x = [2, 4, 8, 16]
    values = np.stack([3 * v**0.375 * np.array([0.9, 1.1]) for v in x])
    assert power_law_exponent(x, values) == pytest.approx(0.375)
