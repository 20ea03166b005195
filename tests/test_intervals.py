"""Estimates: intervals that cover, curves read off where they should be."""

import numpy as np
import pytest

from moesaic.intervals import (
    Curve,
    Estimate,
    Sample,
    bootstrap,
    difference,
    mean,
    ratio_estimate,
    sample_ratio,
    samples_at,
    samples_to_reach,
    saved_labels,
    shared_level,
    welch_difference,
)


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (6, 2.571), (20, 2.093), (200, 1.972)]
)
def test_the_interval_of_a_mean_is_students(count: int, quantile: float):
    values = np.random.default_rng(count).normal(size=count)
    found = mean(values)
    half = quantile * values.std(ddof=1) / count**0.5
    assert found.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=2e-4)


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = [mean(rng.normal(size=5)) for _ in range(2000)]
    assert np.mean([each.low <= 0 <= each.high for each in covered]) == pytest.approx(0.95, abs=0.015)


def test_one_trial_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        mean([1.0])


def test_the_bootstrap_repeats_itself_and_covers_the_statistic():
    rng = np.random.default_rng(1)
    a, b = rng.normal(4, 1, (3, 20)), rng.normal(2, 1, (3, 20))

    def ratio(x: np.ndarray, y: np.ndarray) -> float:
        return float(x.mean() / y.mean())

    found = bootstrap(ratio, a, b)
    assert found == bootstrap(ratio, a, b)
    assert found.low < found.value == ratio(a, b) < found.high
    assert found.low < 2 < found.high


def test_groups_of_equally_many_trials_are_resampled_together():
    values = np.random.default_rng(2).normal(size=(1, 30))
    found = bootstrap(lambda a, b: float((a - b).mean()), values + 5, values)
    assert found == Estimate(pytest.approx(5), pytest.approx(5), pytest.approx(5))
    apart = bootstrap(lambda a, b: float(a.mean() - b.mean()), values + 5, values[:, :29])
    assert apart.high > apart.low + 0.1


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([90.0, 95.0, 97.0], 300),
        ([90.0, 94.0, 96.0], 400),
        ([96.0, 97.0, 98.0], 100),
        ([90.0, 96.0, 94.0], 100 + 200 * 5 / 6),
        ([90.0, 91.0, 94.9], np.inf),
    ],
)
def test_curves_are_read_where_they_first_reach_the_level(curve: list[float], expected: float):
    assert samples_at(95.0, [100, 300, 500], np.asarray(curve)) == pytest.approx(expected)


def test_between_sizes_far_apart_curves_are_read_over_their_logarithm():
    sizes, curve = [100, 10_000], np.array([80.0, 90.0])
    assert samples_at(85.0, sizes, curve, logarithmic=True) == pytest.approx(1000)
    assert samples_at(85.0, sizes, curve) == pytest.approx(5050)
    assert samples_at(90.0, sizes, curve, logarithmic=True) == pytest.approx(10_000)


SIZES = [100, 200, 400, 800]


def curve(*values: float, spread: float = 0.0, trials: int = 3) -> Curve:
    deviation = spread * np.linspace(-1, 1, trials)
    return SIZES, np.asarray(values)[:, None] + deviation


def test_labels_are_saved_by_the_curve_that_is_ahead_and_lost_by_the_one_behind():
    ahead, behind = curve(80, 85, 90, 95, spread=0.2), curve(75, 80, 85, 90, spread=0.2)
    for level in (83.0, 85.0, 88.0):
        found = saved_labels(level, ahead, behind)
        assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5))  # trials differ alike
        assert saved_labels(level, behind, ahead).value == pytest.approx(-1)
        assert sample_ratio(level, ahead, behind, logarithmic=True).value == pytest.approx(0.5)


def test_trials_that_differ_widen_what_is_saved():
    one, other = curve(80, 85, 90, 95, spread=2.0), curve(75, 80, 85, 90)
    found = saved_labels(87.0, one, other)
    assert found.low < 0.5 < found.high
    assert found.value == pytest.approx(0.5)


def test_a_level_that_we_never_reach_saves_minus_infinity_and_one_that_they_never_reach_counts_for_them():
    low, high = curve(70, 75, 80, 85), curve(75, 80, 85, 90)
    assert saved_labels(88.0, low, high) == Estimate(-np.inf, -np.inf, -np.inf)
    assert sample_ratio(90.0, high, low).value == pytest.approx(1.0)
    assert sample_ratio(90.0, curve(75, 90, 91, 92), low).value == pytest.approx(0.25)


def test_samples_to_reach_a_level_have_the_interval_of_the_trials():
    found = samples_to_reach(85.0, curve(80, 85, 90, 95, spread=5.0))
    assert found.value == pytest.approx(200)
    assert (found.low, found.high) == (pytest.approx(100), pytest.approx(400))
    assert samples_to_reach(96.0, curve(80, 85, 90, 95)).value == np.inf
    assert samples_to_reach(10.0, curve(80, 85, 90, 95)).value == 100


def test_the_shared_level_is_the_highest_all_reach_and_none_where_one_begins_above_anothers_end():
    assert shared_level(curve(70, 80, 85, 84), curve(60, 70, 95, 96)) == pytest.approx(85)
    assert shared_level(curve(60, 65, 66, 67), curve(70, 80, 90, 95)) is None


def test_a_curve_that_is_none_is_refused():
    for sizes, shape in ((SIZES, (3, 2)), (SIZES, (4, 1)), (SIZES, (4,)), (SIZES[::-1], (4, 3))):
        with pytest.raises(ValueError, match="at least 2 trials"):
            samples_to_reach(1.0, (sizes, np.zeros(shape)))


@pytest.mark.parametrize("trials", [5, 20])
def test_bootstrapped_intervals_cover_nearly_as_often_as_they_say(trials: int):
    rng = np.random.default_rng(trials)
    found = [bootstrap(lambda x: float(x.mean()), rng.normal(size=(1, trials))) for _ in range(50)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) > 0.88


def test_differences_end_at_100_points_and_spread_as_far_as_they_must():
    assert difference([-50.0, 90.0]) == Estimate(20.0, -100.0, 100.0)
    values = [1.0, 2.0, 4.0]
    assert difference(values) == mean(values)
    wider = difference(values, 0.99)
    assert wider.low < mean(values).low < mean(values).high < wider.high
    assert difference(values, least_spread=1.0) == mean(values)
    assert difference([3.0] * 4, least_spread=2.0).high == pytest.approx(3 + 3.182 * 2 / 2, abs=1e-3)


def test_labels_saved_in_few_trials_are_covered_as_often_as_the_interval_says():
    # each trial of ours is ahead of theirs by its own factor, around a half
    rng, level, sizes = np.random.default_rng(4), 85.0, [100, 200, 400, 800]
    theirs = np.array([75.0, 80.0, 85.0, 90.0])[:, None]
    for trials in (2, 3, 4):
        shifts = 5 + rng.normal(0.0, 1.0, (400, trials))  # 5 points are a factor of 2
        found = [saved_labels(level, (sizes, theirs + shift), (sizes, theirs.repeat(trials, 1))) for shift in shifts]
        assert np.mean([each.low <= 0.5 <= each.high for each in found]) == pytest.approx(0.95, abs=0.03)
        assert all(each.high <= 1 for each in found)


@pytest.mark.parametrize("trials", [2, 3, 4])
def test_ratios_of_few_trials_are_covered_as_often_as_their_interval_says(trials: int):
    # a bootstrap over three covers 74 %
    rng = np.random.default_rng(trials)
    logs = rng.normal(np.log(0.5), 0.1, (500, trials))
    found = [ratio_estimate(lambda a: float(np.exp(np.log(a).mean())), np.exp(each)) for each in logs]
    assert np.mean([each.low <= 0.5 <= each.high for each in found]) == pytest.approx(0.95, abs=0.03)


def test_a_bootstrap_over_three_trials_covers_too_little():
    rng = np.random.default_rng(1)
    found = [bootstrap(lambda x: float(x.mean()), rng.normal(size=(1, 3))) for _ in range(60)]
    assert np.mean([each.low <= 0 <= each.high for each in found]) < 0.9


def test_a_ratio_of_unequal_groups_adds_their_variances_and_an_infinite_one_has_no_limit():
    def ratio(a: np.ndarray, b: np.ndarray) -> float:
        return float(a.mean() / b.mean())

    few, five = np.array([1.0, 1.1, 0.9]), np.array([2.0, 2.2, 1.8, 2.1, 1.9])
    both = ratio_estimate(ratio, few, five)
    alone = ratio_estimate(ratio, few, np.full(5, 2.0))
    assert both.value == alone.value == pytest.approx(0.5)
    assert both.low < alone.low < 0.5 < alone.high < both.high
    never = ratio_estimate(lambda a: float("inf") if a.max() > 1 else float(a.mean()), few)
    assert never == Estimate(np.inf, 0.0, np.inf)
    assert ratio_estimate(ratio, five, five[::-1].copy()) == bootstrap(ratio, five, five[::-1].copy())


def test_welchs_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(2)
    drawn = [(rng.normal(0, 1, 10), rng.normal(0, 3, 5)) for _ in range(400)]
    found = [welch_difference(Sample.of(a), Sample.of(b)) for a, b in drawn]
    assert np.mean([each.low <= 0 <= each.high for each in found]) == pytest.approx(0.95, abs=0.03)


def test_a_trial_of_few_that_never_gets_there_leaves_the_saving_open():
    ours = (SIZES, np.array([[80.0, 70.0], [85.0, 75.0], [95.0, 80.0], [97.0, 84.0]]))
    found = saved_labels(85.0, ours, curve(75, 80, 85, 90, trials=2))
    assert (found.low, found.high) == (-np.inf, 1.0)
    # the mean of ours is at 85 between 200 and 400 labels, that of theirs with 400
    assert found.value == pytest.approx(1 - 2 ** (5 / 7.5 - 1))
