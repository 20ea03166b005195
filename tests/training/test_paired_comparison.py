"""What runs say about two models: nothing that chance could have said, and everything the intervals allow."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from training.example_comparison import comparison

from moesaic.intervals import Estimate
from moesaic.training.paired_comparison import accuracies, group_accuracies, is_settled, paired_comparisons

SIZES = (250, 500, 1000)
NOISE = (-0.4, 0.1, 0.3)


def noisy(*means: float, noise: Sequence[float] = NOISE) -> list[list[float]]:
    return [[mean + each for each in noise] for mean in means]


def only(found):
    [pair] = paired_comparisons(found)
    return pair


def test_a_model_that_needs_half_of_the_labels_saves_half():
    pair = only(comparison(SIZES, noisy(70, 80, 90), noisy(80, 90, 95, noise=(0.2, -0.3, 0.1))))
    assert pair.ahead == "pmoe"
    assert pair.saving.saver == "pmoe"
    assert pair.saving.other == "cnn"
    assert pair.saving.level == 90
    assert pair.saving.share.value == pytest.approx(50, abs=2)
    assert 40 < pair.saving.share.low < 50 < pair.saving.share.high < 60
    assert not pair.saving.at_least


def test_the_baseline_may_be_the_one_that_saves():
    pair = only(comparison(SIZES, noisy(80, 90, 95), noisy(70, 80, 90)))
    assert pair.ahead == pair.saving.saver == "cnn"
    assert pair.saving.share.value == pytest.approx(50, abs=2)
    assert pair.lead.value == pytest.approx(-25 / 3)


def test_leads_are_those_of_pairs():
    # the trials lie far apart, and the models do not
    apart = (-10.0, 0.0, 10.0)
    pair = only(comparison(SIZES, noisy(50, 60, 70, noise=apart), noisy(52, 62, 72, noise=apart)))
    assert [lead.value for lead in pair.leads] == pytest.approx([2, 2, 2])
    assert pair.lead.low == pytest.approx(2)
    assert pair.ahead == "pmoe"


def test_a_lead_that_may_be_chance_is_nobodys():
    pair = only(comparison(SIZES, noisy(70, 80, 90, noise=(-3, 0, 3)), noisy(71, 81, 91, noise=(3, 0, -3))))
    assert pair.ahead is None
    assert pair.saving is None
    assert pair.more is None, "the difference is small beside its spread"
    assert pair.more_to_narrow == 35


def test_two_trials_that_agree_by_chance_save_nothing():
    # both trials have the model ahead, but by so different amounts that Student's interval has both signs
    pair = only(comparison(SIZES, noisy(70, 80, 90, noise=(0, 0)), noisy(71, 81, 91, noise=(0, 8))))
    assert pair.lead.low < 0 < pair.lead.value
    assert pair.saving is None
    assert pair.more == 6


def test_a_model_ahead_with_the_fewest_labels_of_the_other_with_the_most_saves_at_least_their_ratio():
    saving = only(comparison(SIZES, noisy(60, 70, 80), noisy(85, 90, 95))).saving
    assert saving.at_least
    assert saving.share.value == saving.share.low == 75
    assert saving.share.high == 100
    assert saving.beyond


def test_a_model_that_is_there_from_the_start_saves_at_least_what_the_lines_say():
    # 250 labels do what the other needs 500 for or more, but not what it does with all of 1,000
    little = (-0.1, 0.0, 0.1)
    tables = noisy(60, 70, 80.5, noise=little), noisy(80.2, 80.4, 80.6, noise=little)
    saving = only(comparison(SIZES, *tables)).saving
    assert saving.saver == "pmoe"
    assert saving.at_least
    assert saving.level == 80
    assert 65 < saving.share.low <= saving.share.value < 75


def test_models_that_only_guess_save_nothing():
    pair = only(comparison(SIZES, noisy(50, 50.2, 49.9), noisy(50.1, 49.8, 50), guessing=51))
    assert pair.saving is None
    assert "does not get beyond guessing, 51 %" in pair.open
    assert pair.work is None
    assert "guessing" in pair.no_work


def test_models_that_are_both_there_with_the_fewest_labels_have_nothing_to_save():
    pair = only(comparison(SIZES, noisy(99, 99, 99), noisy(99, 99, 99)))
    assert pair.saving is None
    assert "both are at 99 % with the fewest labels tried, 250; try fewer" in pair.open


def test_work_counts_the_images_until_the_accuracy_is_reached():
    # at each test half of the way that is left is done: 90 of 95 after 5 tests with the pace 0.5
    found = comparison(SIZES, noisy(70, 80, 90, noise=(0, 0)), noisy(80, 90, 96, noise=(0, 0)))
    work = only(found).work
    cnn, pmoe = work.efforts
    assert work.samples == 1000
    assert work.level <= only(found).saving.level
    for effort, name in ((cnn, "cnn"), (pmoe, "pmoe")):
        run = found.runs_of(name, 1000)[0]
        first = next(moment for moment in run.curve if moment.accuracy >= work.level)
        assert effort.flops.value == first.images * found.model(name).macs * 6
        assert effort.seconds.value == first.seconds
    assert work.flops.value == pytest.approx(pmoe.flops.value / cnn.flops.value)
    assert work.seconds.value == pytest.approx(pmoe.seconds.value / cnn.seconds.value)


def test_accuracies_end_at_100_percent():
    found = comparison(SIZES, noisy(70, 80, 90), noisy(98, 99, 99.5))
    assert accuracies(found, "pmoe")[2].high == 100


def test_groups_have_accuracies_of_their_own_and_none_where_there_is_nothing_to_test():
    found = comparison(SIZES, noisy(70, 80, 90), noisy(80, 90, 95), groups=("a", "b"))
    broken = replace(found, runs=tuple(replace(run, groups=(run.groups[0], math.nan)) for run in found.runs))
    assert group_accuracies(found, "cnn")[0][0].value == pytest.approx(70)
    assert group_accuracies(found, "cnn")[0][1].value == pytest.approx(65)
    assert math.isnan(group_accuracies(broken, "cnn")[0][1].value)


def test_every_other_model_is_compared_with_the_first():
    found = comparison(SIZES, noisy(70, 80, 90), noisy(80, 90, 95), noisy(60, 70, 80))
    assert [(each.baseline, each.model) for each in paired_comparisons(found)] == [("cnn", "pmoe"), ("cnn", "third")]
    assert [each.saving.saver for each in paired_comparisons(found)] == ["pmoe", "cnn"]


def test_the_level_of_a_model_that_is_always_ahead_is_what_it_reaches_with_the_fewest_labels():
    saving = only(comparison(SIZES, noisy(60, 70, 80), noisy(85.6, 90, 95))).saving
    assert saving.level == 85
    little = (-0.1, 0.0, 0.1)  # half a point ahead is ahead
    saving = only(comparison(SIZES, noisy(60, 70, 80, noise=little), noisy(80.5, 90, 95, noise=little))).saving
    assert (saving.level, saving.beyond) == (80, True)
    # ahead by what may be chance, or no further than guessing
    for tables, guessing in (((noisy(60, 70, 80), noisy(80.1, 90, 95, noise=(-3, 0, 3))), 40.0),
                             ((noisy(50, 50, 50), noisy(60, 61, 62)), 60.0)):  # fmt: skip
        saving = only(comparison(SIZES, *tables, guessing=guessing)).saving
        assert saving is None or not saving.beyond


def test_of_two_models_the_one_that_only_guesses_is_named():
    # its best mean is the lower one, although a single trial of it has the highest accuracy
    cnn, pmoe = [[50.0, 50.0], [44.0, 50.0]], [[48.0, 51.0], [47.0, 51.0]]
    assert only(comparison((250, 500), cnn, pmoe, guessing=50.0)).open.startswith("pmoe does not get beyond guessing")
    assert only(comparison((250, 500), pmoe, cnn, guessing=50.0)).open.startswith("cnn does not get beyond guessing")


def test_models_at_the_level_with_the_fewest_labels_have_nothing_to_save_and_one_below_does():
    both = only(comparison(SIZES, noisy(90.0, 90.0, 90.0, noise=(0, 0)), noisy(90.0, 90.0, 90.0, noise=(0, 0))))
    assert both.open == "both are at 90 % with the fewest labels tried, 250; try fewer"
    level = only(comparison(SIZES, noisy(80.0, 85.0, 90.0, noise=(0, 0)), noisy(90.0, 90.0, 90.0, noise=(0, 0)))).saving
    assert (level.saver, level.level, level.at_least) == ("pmoe", 90, True)


def test_a_level_has_a_decimal_where_whole_percents_are_below_the_start():
    tables = noisy(80.15, 80.3, 80.55, noise=(0, 0)), noisy(80.25, 80.5, 80.75, noise=(0, 0))
    assert only(comparison(SIZES, *tables)).saving.level == 80.5


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (Estimate(2.0, -26.0, 31.0), "pmoe may need anything from 31 % fewer to 26 % more labels than cnn"),
        (Estimate(-9.0, -381.0, 0.2), "pmoe saves none of the labels of cnn, and how many more it needs is not clear"),
        (Estimate(2.0, -381.0, 31.0), "pmoe saves at most 31 % of the labels of cnn"),
        (Estimate(-math.inf, -math.inf, 31.0), "pmoe saves at most 31 % of the labels of cnn"),
        (Estimate(2.0, -381.0, 99.0), "the accuracies of the trials lie too far apart to give a number of labels"),
    ],
)
def test_an_open_saving_says_what_is_possible(share, text, monkeypatch):
    found = comparison(SIZES, noisy(70, 80, 90, noise=(-3, 0, 3)), noisy(71, 81, 91, noise=(3, 0, -3)))
    part = Estimate(share.value / 100, share.low / 100, share.high / 100)
    monkeypatch.setattr("moesaic.training.paired_comparison.saved_labels", lambda *given: part)
    assert only(found).open == f"at 90 % {text}"


def test_nothing_is_outside_what_is_possible():
    wild = [[10.0, 90.0], [20.0, 95.0], [90.0, 99.0]]
    for tables in (
        (noisy(50, 60, 70, noise=(0, 0)), wild),
        (wild, wild[::-1]),
        (wild, noisy(98, 99, 99, noise=(0, 0))),
    ):
        pair = only(comparison(SIZES, *tables))
        for lead in (pair.lead, *pair.leads):
            assert -100 <= lead.low <= lead.value <= lead.high <= 100
        for effort in () if pair.work is None else pair.work.efforts:
            assert effort.flops.low >= 0 <= effort.seconds.low
        assert pair.within <= 100
        if pair.saving is not None:
            assert pair.saving.share.high <= 100


def test_what_training_takes_begins_at_nothing_where_trials_differ_more_than_their_mean():
    early, late = noisy(50, 60, 70, noise=(0, 0)), [[80.0, 80.0], [85.0, 85.0], [70.0, 99.9]]
    effort = only(comparison(SIZES, early, late)).work.efforts[1]
    assert effort.flops.low == effort.seconds.low == 0 < effort.seconds.value < effort.seconds.high


def sequential(found, fewer: int = 0):
    """As if trials had been added one by one; the last model has ``fewer`` trials."""
    last, kept = found.models[-1].name, found.trials - fewer
    runs = tuple(run for run in found.runs if run.model != last or run.trial < kept)
    return replace(found, max_trials=12, runs=runs)


def test_trials_that_were_added_one_by_one_have_wider_intervals():
    found = comparison(SIZES, noisy(70, 80, 90), noisy(72, 82, 92, noise=(0.2, -0.3, 0.1)))
    fixed, added = only(found), only(sequential(found))
    assert fixed.lead.value == added.lead.value
    assert added.lead.low < fixed.lead.low
    assert fixed.ahead == "pmoe"
    assert added.ahead is None, "three trials that differ so much do not decide"
    assert added.more == 1
    assert not is_settled(sequential(found), "pmoe")


def test_a_pair_is_over_the_trials_that_both_have():
    noise = (-0.2, 0.1, 0.1, 30.0)
    found = sequential(comparison(SIZES, noisy(50, 60, 70, noise=noise), noisy(60, 70, 80, noise=noise)), fewer=1)
    pair = only(found)
    assert pair.trials == 3
    assert pair.lead.value == pytest.approx(10)
    assert is_settled(found, "pmoe")
    assert pair.work.efforts[0].flops.high < 1e13
    assert accuracies(found, "cnn")[0].value == pytest.approx(57.5), "over all of its own"


def test_work_is_told_to_an_accuracy_above_guessing_alone():
    tables = noisy(60.0, 70.0, noise=(0, 0)), noisy(65.0, 71.0, noise=(0, 0))
    assert only(comparison((250, 500), *tables, guessing=69.0)).work.level == 70
    pair = only(comparison((250, 500), *tables, guessing=70.0))
    assert pair.work is None
    assert pair.no_work == "some run with 500 labels does not get beyond guessing, 70 %"
