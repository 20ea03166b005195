"""Trials that are added one by one: the error of all looks together, and what they decide."""

import numpy as np
import pytest

from moesaic.intervals import Estimate, student_quantile
from moesaic.training.group_sequential import (
    FIRST_LOOK,
    LAST_LOOK,
    LEVEL_MARGIN,
    LOOK_ERROR,
    is_clear,
    more_trials,
    sequential_difference,
    trials_to_width,
)

LOOKS = range(FIRST_LOOK, LAST_LOOK + 1)


def stopped_at(values: np.ndarray, quantum: float = 0.0) -> np.ndarray:
    """(comparisons,) the look at which each row of differences first excludes 0; 0: never. As the rule, vectorised."""
    found = np.zeros(len(values), dtype=int)
    for trials in LOOKS:
        seen = values[:, :trials]
        spread = np.maximum(seen.std(axis=1, ddof=1), quantum / trials**0.5)
        half = student_quantile(trials - 1, 1 - LOOK_ERROR) * spread / trials**0.5
        found[(found == 0) & (np.abs(seen.mean(axis=1)) > half)] = trials
    return found


def test_the_vectorised_rule_is_the_rule():
    values = np.random.default_rng(3).normal(1.0, 1.0, (20, LAST_LOOK)).round(1)
    for row, stop in zip(values, stopped_at(values, 0.1), strict=True):
        intervals = [sequential_difference(row[:trials], 0.1) for trials in LOOKS]
        ahead = [trials for trials, each in zip(LOOKS, intervals, strict=True) if each.low > 0 or each.high < 0]
        assert (ahead[0] if ahead else 0) == stop


def test_all_looks_together_err_in_at_most_five_percent():
    values = np.random.default_rng(0).standard_normal((60_000, LAST_LOOK))
    error = np.mean(stopped_at(values) > 0)
    assert 0.045 < error < 0.05, "not more, and not much less, which would cost trials"


@pytest.mark.parametrize("images", [1.0, 2.0, 5.0])
def test_few_test_images_do_not_make_chance_certain(images):
    # accuracies of few test images agree exactly now and then; standard deviation of so many images
    values = np.random.default_rng(1).normal(0.0, images, (20_000, LAST_LOOK)).round()
    assert np.mean(stopped_at(values, quantum=1.0) > 0) < 0.05
    assert images > 1 or np.mean(stopped_at(values) > 0) > 0.055, "without the least spread"


def test_a_large_difference_stops_early_and_a_small_one_takes_longer():
    rng = np.random.default_rng(2)
    large, medium = (stopped_at(rng.normal(shift, 1.0, (2000, LAST_LOOK))) for shift in (4.0, 1.0))
    assert np.mean((large > 0) & (large <= 6)) > 0.95
    assert np.mean(medium > 0) > 0.9
    assert np.median(large) < np.median(medium[medium > 0])


def test_an_interval_is_within_what_is_possible():
    assert sequential_difference([0.0, 40.0], 1.0) == Estimate(20.0, -100.0, 100.0)


def test_a_comparison_is_clear_when_one_is_ahead_or_both_are_level_or_nothing_would_help():
    assert is_clear(Estimate(2.0, 0.1, 4.0), 3, 1.0)
    assert is_clear(Estimate(-2.0, -4.0, -0.1), 3, 1.0)
    assert not is_clear(Estimate(2.0, 0.1, 4.0), 2, 1.0), "no look before the third trial"
    assert not is_clear(Estimate(2.0, -0.1, 4.0), 3, 1.0)
    assert is_clear(Estimate(0.5, -0.9, LEVEL_MARGIN), 3, 1.0)
    assert not is_clear(Estimate(0.5, -0.9, LEVEL_MARGIN + 0.1), 3, 1.0)
    assert not is_clear(Estimate(0.1, -9.0, 9.0), 5, 8.0), "too early to give up"
    assert is_clear(Estimate(0.1, -9.0, 9.0), 6, 8.0)


@pytest.mark.parametrize("sequential", [False, True])
def test_so_many_more_trials_are_just_enough(sequential):
    confidence = 1 - LOOK_ERROR if sequential else 0.95
    for value, spread, trials in ((2.0, 3.0, 3), (-1.0, 2.0, 4), (5.0, 0.1, 2)):
        more = more_trials(value, spread, trials, sequential=sequential)

        def half(count: int, spread: float = spread) -> float:
            return student_quantile(count - 1, confidence) * spread / count**0.5

        assert half(trials + more) < abs(value)
        assert more == 1 or half(trials + more - 1) >= abs(value)
    assert more_trials(0.0, 1.0, 3, sequential=sequential) is None
    assert trials_to_width(0.001, 1.0, 3, sequential=sequential) is None
