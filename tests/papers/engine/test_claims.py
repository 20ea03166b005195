"""Rules: an interval, not a value, decides."""

import pytest

from moesaic.intervals import Estimate
from moesaic.papers.engine.decision_rules import CheckResult, at_least, at_least_published, at_most, below


def decided(result: CheckResult) -> str:
    return result.verdict.partition(":")[0]


@pytest.mark.parametrize(
    ("low", "high", "least", "most", "less"),
    [
        (1.0, 2.0, "fails", "holds", "holds"),
        (2.5, 3.0, "partly", "holds", "partly"),
        (2.0, 3.5, "partly", "partly", "partly"),
        (2.0, 5.0, "partly", "partly", "partly"),
        (3.0, 4.0, "holds", "partly", "partly"),
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


@pytest.mark.parametrize(("low", "verdict"), [(92.0, "holds"), (91.9, "partly")])
def test_a_published_value_is_reached_within_its_margin(low: float, verdict: str):
    assert decided(at_least_published(Estimate(93.0, low, 94.0), 95.0, 3.0)) == verdict
    assert decided(at_least_published(Estimate(90.0, 88.0, 91.9), 95.0, 3.0)) == "fails"
