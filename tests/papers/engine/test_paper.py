"""Rules: an interval, not a value, decides."""

import pytest

from moesaic.intervals import Estimate, Sample
from moesaic.papers.engine.decision_rules import (
    CheckResult,
    above_zero,
    ahead_everywhere,
    at_least,
    at_least_published,
    at_most,
    below,
    same_mean,
)


def decided(result: CheckResult) -> str:
    return result.verdict.partition(":")[0]


@pytest.mark.parametrize(
    ("low", "high", "least", "most", "less"),
    [
        (1.0, 2.0, "fails", "holds", "holds"),
        (2.5, 3.0, "undecided", "holds", "undecided"),
        (2.0, 3.5, "undecided", "undecided", "undecided"),
        (2.0, 5.0, "undecided", "undecided", "undecided"),
        (3.0, 4.0, "holds", "undecided", "undecided"),
        (3.5, 4.0, "holds", "fails", "fails"),
    ],
)
def test_a_limit_of_three(low: float, high: float, least: str, most: str, less: str):
    for value in (low, (low + high) / 2, high):  # wherever in it the value lies
        estimate = Estimate(value, low, high)
        assert decided(at_most(estimate, 3.0)) == most
        assert decided(below(estimate, 3.0)) == less
        assert decided(at_least(estimate, 3.0)) == least
        assert at_least(estimate, 3.0).measured == value
        assert at_least(estimate, 3.0).interval == (low, high)


@pytest.mark.parametrize(("low", "verdict"), [(92.0, "holds"), (91.9, "undecided")])
def test_a_published_value_is_reached_within_its_margin(low: float, verdict: str):
    assert decided(at_least_published(Estimate(93.0, low, 94.0), 95.0, 3.0)) == verdict
    assert decided(at_least_published(Estimate(90.0, 88.0, 91.9), 95.0, 3.0)) == "fails"


def test_an_undecided_verdict_names_its_limit():
    estimate = Estimate(93.0, 91.0, 94.0)
    reason = "undecided: the interval lies on both sides of 92"
    assert at_most(estimate, 92.0).verdict == below(estimate, 92.0).verdict == reason
    assert at_least_published(estimate, 95.0, 3.0).verdict == f"{reason}, 95 less 3"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 2.0, "holds"),
        (0.0, 2.0, "undecided: 0 is in the interval"),
        (-1.0, 0.0, "undecided: 0 is in the interval"),
        (-1.0, -0.1, "fails"),
    ],
)
def test_above_zero_is_strictly_above(low: float, high: float, verdict: str):
    assert above_zero(Estimate(0.05, low, high)) == CheckResult(verdict, 0.05, (low, high))


@pytest.mark.parametrize(
    ("leads", "verdict", "shown"),
    [
        ([(1, 0.5), (2, 0.1), (3, 1)], "holds", 1),
        ([(1, 0.5), (2, 2.0), (3, 1)], "undecided: clearly ahead at 2 of 3 sizes", 1),  # 2 from 0 on
        ([(1, 0.5), (0, 0.1), (3, 1), (-1, 5)], "undecided: clearly ahead at 2 of 4 sizes", -1),
        ([(1, 0.5), (2, 3), (-1, 0.5)], "partly: clearly ahead at 1 of 3 sizes, clearly behind at 1", -1),
        ([(1, 2), (-2, 1)], "fails: clearly ahead at 0 of 2 sizes, clearly behind at 1", -2),
        ([(1, 2), (2, 3)], "undecided: clearly ahead at 0 of 2 sizes", 1),
        ([(1, 2)], "undecided: 0 is in the interval", 1),
        ([(-1, 2)], "undecided: 0 is in the interval", -1),
        ([(-3, 2)], "fails", -3),
    ],
)
def test_ahead_everywhere_needs_a_clear_lead_at_each(leads: list[tuple[float, float]], verdict: str, shown: float):
    found = ahead_everywhere([Estimate(value, value - half, value + half) for value, half in leads], "sizes")
    assert (found.verdict, found.measured) == (verdict, shown)
    assert found.interval == next((value - half, value + half) for value, half in leads if value == shown)


@pytest.mark.parametrize(
    ("ours", "deviation", "verdict"),
    [
        (92.0, 1.0, "holds"),
        (92.4, 1.0, "holds"),
        (94.21, 0.5, "fails: 2.21 points [1.45, 2.97] more accurate than published"),
        (90.0, 0.5, "fails: 2.00 points [1.24, 2.76] less accurate than published"),
        (92.0, 4.0, "undecided: the difference may be -2.9 to 2.9"),
    ],
)
def test_published_means_are_compared_with_standard_errors(ours: float, deviation: float, verdict: str):
    measured = Estimate(ours, ours - 1, ours + 1)
    found = same_mean(Sample(ours, deviation, 10), Sample(92.0, 1.0, 10), measured)
    assert found == CheckResult(verdict, ours, (ours - 1, ours + 1))


def test_a_small_difference_that_is_no_chance_is_met_in_part():
    found = same_mean(Sample(100.0, 0.0, 10), Sample(99.46, 0.55, 10), Estimate(100.0, 100.0, 100.0))
    assert found.verdict == "partly: 0.54 points [0.15, 0.93] more accurate than published"
    assert same_mean(Sample(5.0, 0.0, 10), Sample(5.0, 0.0, 10), Estimate(5.0, 5.0, 5.0)).verdict == "holds"
