"""Sentences of a comparison: which of two models is named, by how much, and in which unit."""

import math
from dataclasses import replace

import pytest
from training.example_comparison import comparison

from moesaic.intervals import Estimate
from moesaic.report.comparison_text import (
    flops,
    lead,
    outcome,
    points,
    prefix_of,
    saved,
    saving,
    seconds,
    times,
    verdict,
)
from moesaic.training.paired_comparison import PairedComparison, Saving

FOUND = comparison((250, 1000), [[70.0, 71.0], [80.0, 81.0]], [[72.0, 73.0], [82.0, 83.0]])
PAIR = PairedComparison("cnn", "pmoe", (), Estimate(2.0, 1.0, 3.0), None, None, "why", "")
EXACT = Saving("pmoe", "cnn", 80.0, Estimate(43.2, 19.6, 60.4), at_least=False)


@pytest.mark.parametrize(
    ("low", "high", "ahead"),
    [(0.1, 1.0, "pmoe"), (0.0, 1.0, None), (-1.0, 0.0, None), (-1.0, -0.1, "cnn"), (-1.0, 1.0, None)],
)
def test_a_model_is_ahead_where_the_whole_interval_is_on_its_side(low: float, high: float, ahead: str | None):
    pair = replace(PAIR, lead=Estimate((low + high) / 2, low, high))
    assert pair.ahead == ahead
    assert outcome(pair) == ("undecided" if ahead is None else f"{ahead} is ahead")
    note = "; the interval contains 0, so this may be chance" if ahead is None else ""
    assert lead(FOUND, pair).endswith(f"(mean over 250 and 1,000 labels{note}).")


def test_who_is_ahead_is_named_first_with_a_lead_above_zero():
    assert "pmoe is 2.0 [1.0, 3.0] points more accurate than cnn with the same labels" in verdict(FOUND, PAIR)
    behind = replace(PAIR, lead=Estimate(-2.0, -3.5, -1.0))
    assert "cnn is 2.0 [1.0, 3.5] points more accurate than pmoe with the same labels" in verdict(FOUND, behind)
    assert "the accuracy of pmoe is 2.0 [1.0, 3.5] points lower" in lead(FOUND, behind)
    assert "is 0.0 [−1.0, 1.0] points higher" in lead(FOUND, replace(PAIR, lead=Estimate(0.0, -1.0, 1.0)))
    one_size = replace(FOUND, samples=(250,), data="")
    assert lead(one_size, PAIR).endswith("points higher (with 250 labels).")
    assert verdict(one_size, PAIR).startswith("On these images, ")


def test_a_saving_is_a_number_with_its_interval_or_a_bound():
    assert saved(PAIR) == "–"
    assert saved(replace(PAIR, saving=EXACT)) == "43 % [20, 60]"
    assert saving(FOUND, EXACT) == "pmoe reaches 80 % with 43 % fewer labels than cnn [20, 60]"
    bound = replace(EXACT, at_least=True)
    assert saved(replace(PAIR, saving=bound)) == "at least 20 %"
    assert saving(FOUND, bound) == (
        "pmoe reaches 80 % with at least 43 % fewer labels than cnn (95 % interval from 20 %); it reaches it with the "
        "smallest number of labels tested"
    )
    open_below = replace(bound, share=Estimate(75.0, -math.inf, math.inf))
    assert saved(replace(PAIR, saving=open_below)) == "at least 75 %"
    assert saving(FOUND, open_below) == (
        "pmoe with 250 labels is more accurate than cnn with 1,000: it saves at least 75 % of the labels"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e18, "1 EFLOP"), (1e15, "1 PFLOP"), (1e12, "1 TFLOP"), (1e9, "1 GFLOP"), (1e6, "1 MFLOP"), (999.0, "999 FLOP")],
)
def test_a_prefix_begins_at_its_factor(value: float, text: str):
    assert flops(value) == text
    assert prefix_of(value * 0.999)[0] < max(value, 1.001)


@pytest.mark.parametrize(
    ("value", "text"),
    [(59.0, "59 s"), (60.0, "1 min"), (61.0, "61 s"), (89.0, "89 s"), (90.0, "1.5 min"), (3600.0, "1 h"),
     (3660.0, "61 min"), (5399.0, "90 min"), (5400.0, "1.5 h"), (7200.0, "2 h")],
)  # fmt: skip
def test_minutes_and_hours_begin_at_one_and_a_half_or_at_exactly_one(value: float, text: str):
    assert seconds(value) == text


def test_points_and_ratios_have_their_intervals():
    assert points(Estimate(-3.21, -5.38, 0.04)) == "−3.2 [−5.4, 0.0]"
    assert points(Estimate(math.nan, math.nan, math.nan)) == "–"
    assert times(Estimate(0.612, 0.5, 0.745)) == "0.612 [0.500, 0.745] times"
