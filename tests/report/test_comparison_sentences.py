"""Sentences of a comparison: which of two models is named, by how much, and in which unit."""

import math
from dataclasses import replace

import pytest
from training.example_comparison import comparison

from moesaic.intervals import Estimate
from moesaic.report.comparison_sentences import (
    answers,
    flops,
    lead,
    outcome,
    points,
    prefix_of,
    saving,
    seconds,
    times,
    trial_count,
    verdict,
)
from moesaic.training.comparison_result import Comparison
from moesaic.training.paired_comparison import PairedComparison, Saving


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ((0.61, 0.5, 0.74), "0.610 [0.500, 0.740] times"),
        ((2.0, 0.1, 10.0), "2.00 [0.10, 10.0] times"),
        ((2.0, 0.1, 10.1), "about 2 times"),
        ((0.6, 0.0, 2.0), "about 0.6 times"),
    ],
)
def test_a_ratio_has_its_interval_unless_that_is_too_wide(ratio: tuple[float, float, float], text: str):
    assert times(Estimate(*ratio)) == text


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
    assert outcome(pair) == ("level" if ahead is None else f"{ahead} is ahead")
    assert outcome(replace(pair, lead=Estimate(0.0, 4 * low, 4 * high), more=3)) == (
        "undecided" if ahead is None else f"{ahead} is ahead"
    )
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
    assert saving(FOUND, EXACT) == "pmoe reaches 80 % with 43 % [20, 60] fewer labels than cnn"
    bound = replace(EXACT, at_least=True)
    assert saving(FOUND, bound) == (
        "pmoe reaches 80 % with at least 43 % fewer labels than cnn (95 % interval from 20 %), already with the "
        "smallest number of labels tested"
    )
    beyond = replace(bound, share=Estimate(75.0, 75.0, 100.0), beyond=True)
    assert saving(FOUND, beyond) == (
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
    assert times(Estimate(6.25, 0.00004, 870_809.0)) == "about 6.25 times"
    assert times(Estimate(1.0, 0.0, 2.0)) == "about 1 times"


UNDECIDED = replace(PAIR, lead=Estimate(2.0, -3.01, 7.0), trials=3)


@pytest.mark.parametrize(
    ("pair", "text", "label"),
    [
        (
            replace(UNDECIDED, more=9),
            "On faces, 3 trials do not decide between cnn and pmoe; about 9 more would, if the difference stays as it "
            "is.",
            "undecided",
        ),
        (
            replace(UNDECIDED, more_to_narrow=30),
            "On faces, cnn and pmoe are level within 7 points after 3 trials; about 30 more would show whether they "
            "are within 2.",
            "undecided",
        ),
        (
            replace(UNDECIDED, lead=Estimate(2.0, -53.01, 57.0)),
            "On faces, cnn and pmoe cannot be told apart within 57 points after 3 trials; more than 100 more would "
            "show whether they are within 2.",
            "undecided",
        ),
        (
            replace(UNDECIDED, lead=Estimate(0.1, -1.41, 1.61)),
            "On faces, cnn and pmoe are level within 1.7 points (3 trials).",
            "level",
        ),
        (
            replace(UNDECIDED, lead=Estimate(0.1, -0.3, 0.5), more=40),
            "On faces, cnn and pmoe are level within 0.5 points (3 trials).",
            "level",
        ),
    ],
)
def test_an_open_comparison_says_what_would_settle_it(pair: PairedComparison, text: str, label: str):
    assert verdict(FOUND, pair) == text
    assert outcome(pair) == label


def two_answers(*pairs: PairedComparison, found: Comparison = FOUND) -> list[str]:
    return [each.answer for each in answers(found, pairs)]


def test_the_answers_name_a_network_and_say_whether_routing_helps():
    assert two_answers(PAIR) == [
        "pmoe: it is 2.0 [1.0, 3.0] points more accurate than cnn with the same labels.",
        "Yes: pmoe is 2.0 [1.0, 3.0] points more accurate than cnn with the same labels.",
    ]
    assert two_answers(replace(PAIR, lead=Estimate(-2.0, -3.5, -1.0))) == [
        "cnn: it is more accurate than pmoe with the same labels.",
        "No: pmoe is 2.0 [1.0, 3.5] points less accurate than cnn with the same labels.",
    ]
    assert two_answers(replace(UNDECIDED, more=9)) == [
        "cnn, for now: pmoe may be better or worse, which about 9 more trials would show.",
        "Not shown: 3 trials do not decide between cnn and pmoe; about 9 more would, if the difference stays as it is.",
    ]
    assert two_answers(replace(UNDECIDED, more=1))[0].endswith("which about one more trial would show.")
    assert two_answers(UNDECIDED)[0] == (
        "cnn, for now: pmoe may be better or worse, by so little that trials hardly tell."
    )
    level = replace(UNDECIDED, lead=Estimate(0.1, -0.3, 0.5))
    assert two_answers(level) == [
        "cnn: no other network is more accurate.",
        "It makes no difference of more than 0.5 points.",
    ]
    cheap = replace(FOUND, models=(FOUND.models[0], replace(FOUND.models[1], macs=2_500_000)))
    assert two_answers(level, found=cheap)[0] == (
        "pmoe: it is level with cnn within 0.5 points and has 50 % of its multiply-adds."
    )


@pytest.mark.parametrize("pair", [PAIR, UNDECIDED, replace(PAIR, lead=Estimate(-2.0, -3.5, -1.0))])
def test_the_recommended_network_is_named_apart_from_the_sentence(pair: PairedComparison):
    first = answers(FOUND, [pair])[0]
    assert first.model == ("pmoe" if pair.lead.low > 0 else "cnn")
    assert first.answer.startswith(first.model)


def test_of_several_networks_the_one_that_is_furthest_ahead_is_named():
    found = comparison((250,), [[70.0, 71.0]], [[72.0, 73.0]], [[75.0, 76.0]])
    third = replace(PAIR, model="third", lead=Estimate(5.0, 4.0, 6.0))
    assert two_answers(PAIR, third, found=found)[0].startswith("third: it is 5.0 [4.0, 6.0] points more accurate")
    behind = replace(PAIR, lead=Estimate(-5.0, -6.0, -4.0))
    assert two_answers(behind, replace(third, lead=behind.lead), found=found)[0] == (
        "cnn: it is more accurate than pmoe and third with the same labels."
    )
    assert two_answers(behind, third, found=found)[1].startswith("Yes: third")


def test_networks_that_only_guess_are_not_recommended():
    found = comparison((250,), [[50.0, 50.0]], [[49.0, 50.0]], guessing=50.0)
    [only] = two_answers(UNDECIDED, found=found)
    assert answers(found, [UNDECIDED])[0].model is None
    assert only.startswith("None of them: no network gets beyond guessing, 50 %.")


def test_trials_are_counted_for_each_network():
    assert trial_count(FOUND) == "2"
    fewer = replace(FOUND, max_trials=5, runs=tuple(run for run in FOUND.runs if (run.model, run.trial) != ("pmoe", 1)))
    assert trial_count(fewer) == "1 to 2"
