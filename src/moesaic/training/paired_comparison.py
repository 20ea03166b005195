"""Paired comparison of two models: lead in accuracy, labels saved, work saved, each with its interval.

Runs of one trial share their images, so everything is compared trial by trial. What the intervals leave open
stays open: a saving is named only where the whole interval is on one side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Curve, Estimate, difference, mean, percentage, saved_labels
from moesaic.training.comparison_result import Comparison, Run
from moesaic.training.group_sequential import is_clear, more_trials, sequential_difference, trials_to_width

__all__ = [
    "Effort",
    "PairedComparison",
    "Saving",
    "Work",
    "accuracies",
    "group_accuracies",
    "is_settled",
    "paired_comparisons",
]

Array = NDArray[np.float64]

FLOPS_PER_IMAGE = 2 * 3
"""Operations for each multiply-add of the forward pass: two, and the backward pass does twice the forward's work."""
NARROW_MARGIN = 2.0
"""Points of accuracy: models that differ by less are as good as level, where no number of trials tells them apart."""

_NO_SAVING = 0.5
"""Percent of the labels: a bound below it would be printed as 0 %."""


@dataclass(frozen=True)
class Saving:
    """Labels that one model saves."""

    saver: str
    other: str
    level: float
    """The accuracy, in percent, that both are asked for."""
    share: Estimate
    """Percent of the other's labels, at most 100."""
    at_least: bool
    """Whether ``share`` is a lower bound: the saver is there with the fewest labels tried, or the other never is."""
    beyond: bool = False
    """Whether the saver with the fewest labels is ahead of the other with the most."""


@dataclass(frozen=True)
class Effort:
    """The work of a model until it reaches an accuracy, mean over trials."""

    model: str
    flops: Estimate
    seconds: Estimate


@dataclass(frozen=True)
class Work:
    """The work of two models until they reach the same accuracy with the same labels."""

    level: float
    samples: int
    efforts: tuple[Effort, Effort]
    """Effort of the baseline and of the model."""
    flops: Estimate
    """Ratio of the model's to the baseline's."""
    seconds: Estimate
    """Ratio of the model's to the baseline's."""


@dataclass(frozen=True)
class PairedComparison:
    """A model compared with the baseline, which is the first model of a comparison."""

    baseline: str
    model: str
    leads: tuple[Estimate, ...]
    """Points of accuracy that the model is ahead, for each number of samples."""
    lead: Estimate
    """Their mean."""
    saving: Saving | None
    work: Work | None
    open: str
    """Why there is no saving; empty where there is one."""
    no_work: str
    """Why there is no work to compare; empty where there is."""
    trials: int = 0
    """Trials that both have."""
    more: int | None = None
    """If undecided: about so many more trials would decide, if differences stay as they are; None: over 100."""
    more_to_narrow: int | None = None
    """If undecided: about so many more trials would show whether both are within `NARROW_MARGIN` points; None: over
    100."""

    @property
    def within(self) -> float:
        """Points of accuracy by which the models differ at most."""
        return max(abs(self.lead.low), abs(self.lead.high))

    @property
    def ahead(self) -> str | None:
        """The model with the higher accuracy at the same number of labels; None if undecided."""
        return self.model if self.lead.low > 0 else self.baseline if self.lead.high < 0 else None


def accuracies(comparison: Comparison, model: str) -> tuple[Estimate, ...]:
    """The model's test accuracy in percent, for each number of samples."""
    return tuple(percentage(values) for values in _curve(comparison, model)[1])


def group_accuracies(comparison: Comparison, model: str) -> tuple[tuple[Estimate, ...], ...]:
    """For each number of samples, the test accuracy within each group."""
    table: list[tuple[Estimate, ...]] = []
    for size in comparison.samples:
        runs = comparison.runs_of(model, size)
        columns = zip(*(run.groups for run in runs), strict=True)
        table.append(tuple(_known_percentage(values) for values in columns))
    return tuple(table)


def paired_comparisons(comparison: Comparison) -> tuple[PairedComparison, ...]:
    """Compares every other model with the first."""
    baseline, *others = [model.name for model in comparison.models]
    return tuple(_compare_pair(comparison, baseline, other) for other in others)


def is_settled(comparison: Comparison, model: str) -> bool:
    """Whether no trial of a model should be added to its comparison with the first one."""
    ours, theirs = _paired_curves(comparison, comparison.models[0].name, model)
    values = (ours[1] - theirs[1]).mean(axis=0)
    return is_clear(sequential_difference(values, _quantum(comparison)), values.size, _spread(comparison, values))


def _compare_pair(comparison: Comparison, baseline: str, model: str) -> PairedComparison:
    ours, theirs = _paired_curves(comparison, baseline, model)
    differences = ours[1] - theirs[1]
    values = differences.mean(axis=0)
    lead, trials, spread = _lead(comparison, values), values.size, _spread(comparison, values)
    saving, why = _saving(comparison, lead, (baseline, theirs), (model, ours))
    work, no_work = _work(comparison, baseline, model, saving)
    leads = tuple(_lead(comparison, each, len(comparison.samples)) for each in differences)
    pair = PairedComparison(baseline, model, leads, lead, saving, work, why, no_work, trials)
    if pair.ahead is not None:
        return pair
    sequential = comparison.max_trials is not None
    more = more_trials(lead.value, spread, trials, sequential=sequential)
    narrow = (
        None if pair.within <= NARROW_MARGIN else trials_to_width(NARROW_MARGIN, spread, trials, sequential=sequential)
    )
    return replace(pair, more=more, more_to_narrow=narrow)


def _paired_curves(comparison: Comparison, baseline: str, model: str) -> tuple[Curve, Curve]:
    """Curves of the model and of the baseline, over the trials that both have."""
    ours, (sizes, accuracies) = _curve(comparison, model), _curve(comparison, baseline)
    return ours, (sizes, accuracies[:, : ours[1].shape[1]])


def _lead(comparison: Comparison, values: Array, counts: int = 1) -> Estimate:
    """The mean of differences; ``counts`` is how many numbers of samples a mean over all would have."""
    if comparison.max_trials is None:
        return difference(values)
    return sequential_difference(values, counts * _quantum(comparison))


def _quantum(comparison: Comparison) -> float:
    """The change of the mean difference of a trial by one test image of one run, in points."""
    return 100 / comparison.tested / len(comparison.samples)


def _spread(comparison: Comparison, values: Array) -> float:
    least = 0.0 if comparison.max_trials is None else _quantum(comparison) / values.size**0.5
    return max(float(values.std(ddof=1)), least)


def _saving(
    comparison: Comparison, lead: Estimate, one: tuple[str, Curve], two: tuple[str, Curve]
) -> tuple[Saving | None, str]:
    """The labels that one saves, or why that is unknown; ``lead`` is that of the second."""
    ahead = {two[0]: lead.low > 0, one[0]: lead.high < 0}
    for (saver, ours), (other, theirs) in ((two, one), (one, two)):
        dominant = _dominant(comparison, saver, ours, other, theirs) if ahead[saver] else None
        if dominant is not None:
            return dominant, ""
    level = _common_level(one[1], two[1])
    named = f"{level:.3g} %"
    if level <= comparison.guessing:
        weak = min((one, two), key=lambda each: float(each[1][1].mean(axis=1).max()))[0]
        return None, f"{weak} does not get beyond guessing, {comparison.guessing:.3g} %"
    if all(float(curve[1][0].mean()) >= level for _, curve in (one, two)):
        return None, f"both are at {named} with the fewest labels tried, {comparison.samples[0]:,}; try fewer"
    for (saver, ours), (other, theirs) in ((two, one), (one, two)):
        share = saved_labels(level, ours, theirs)
        if share.low > 0 and ahead[saver]:
            at_least = float(ours[1][0].mean()) >= level
            return Saving(saver, other, level, _percent(share), at_least), ""
    share = _percent(saved_labels(level, two[1], one[1]))
    if share.low > 0 or share.high < 0:
        return None, f"{two[1][1].shape[1]} trials may agree on that by chance; more trials tell"
    return None, f"at {named} {_open_saving(two[0], one[0], share)}"


def _open_saving(model: str, baseline: str, share: Estimate) -> str:
    """Describes an interval of labels saved that contains 0."""
    fewer, more = f"{share.high:.0f} %", f"{-share.low:.0f} %" if math.isfinite(share.low) else ""
    if share.low >= -100:
        return f"{model} may need anything from {fewer} fewer to {more} more labels than {baseline}"
    if share.high < _NO_SAVING:
        return f"{model} saves none of the labels of {baseline}, and how many more it needs is not clear"
    if share.high <= 90:
        return f"{model} saves at most {fewer} of the labels of {baseline}"
    return "the accuracies of the trials lie too far apart to give a number of labels"


def _dominant(comparison: Comparison, saver: str, ours: Curve, other: str, theirs: Curve) -> Saving | None:
    """The saving of a model that is ahead with the fewest labels of the other with the most; None if it is not.

    A level that the other reaches would give too small a saving.
    """
    fewest, most = comparison.samples[0], comparison.samples[-1]
    start = mean(ours[1][0])
    if (
        fewest == most
        or start.low <= comparison.guessing
        or _lead(comparison, ours[1][0] - theirs[1][-1], len(comparison.samples)).low <= 0
    ):
        return None
    bound = 100 * (1 - fewest / most)
    return Saving(saver, other, math.floor(start.value), Estimate(bound, bound, 100.0), at_least=True, beyond=True)


def _common_level(*curves: Curve) -> float:
    """The highest accuracy that both reach in the mean, as a round number where not both start there."""
    means = [values.mean(axis=1) for _, values in curves]
    top, start = min(float(each.max()) for each in means), min(float(each[0]) for each in means)
    return next((level for level in (math.floor(top), math.floor(10 * top) / 10) if level > start), top)


def _work(comparison: Comparison, baseline: str, model: str, saving: Saving | None) -> tuple[Work | None, str]:
    """The work of both with the most labels, to the level of the saving or a lower one that every run reaches."""
    most = comparison.samples[-1]
    trials = min(comparison.trials_of(baseline), comparison.trials_of(model))
    pairs = [(name, comparison.runs_of(name, most)[:trials]) for name in (baseline, model)]
    reached = math.floor(min(max(point.accuracy for point in run.curve) for _, runs in pairs for run in runs))
    level = float(reached) if saving is None else min(saving.level, float(reached))
    if level <= comparison.guessing:
        return None, f"some run with {most:,} labels does not get beyond guessing, {comparison.guessing:.3g} %"
    theirs, ours = (np.array([_effort(comparison, run, level) for run in runs]).T for _, runs in pairs)
    efforts = Effort(baseline, *map(_amount, theirs)), Effort(model, *map(_amount, ours))
    return Work(level, most, efforts, *map(_ratio, ours, theirs)), ""


def _effort(comparison: Comparison, run: Run, level: float) -> tuple[float, float]:
    """Operations and seconds of a run until it reaches the level."""
    point = next(point for point in run.curve if point.accuracy >= level)
    return float(point.images) * FLOPS_PER_IMAGE * comparison.model(run.model).macs, point.seconds


def _amount(values: Array) -> Estimate:
    estimate = mean(values)
    return Estimate(estimate.value, max(estimate.low, 0.0), estimate.high)


def _ratio(ours: Array, theirs: Array) -> Estimate:
    """The geometric mean of the ratios of trials: their logarithms have Student's interval, however few they are."""
    log_ratio = mean(np.log(ours / theirs))
    return Estimate(math.exp(log_ratio.value), math.exp(log_ratio.low), math.exp(min(log_ratio.high, 700.0)))


def _curve(comparison: Comparison, model: str) -> Curve:
    values = [[run.accuracy for run in comparison.runs_of(model, size)] for size in comparison.samples]
    return list(comparison.samples), np.array(values, dtype=np.float64)


def _percent(share: Estimate) -> Estimate:
    return Estimate(100 * share.value, 100 * share.low, 100 * share.high)


def _known_percentage(values: Sequence[float]) -> Estimate:
    """No number where a group has no images to test on."""
    return Estimate(math.nan, math.nan, math.nan) if any(map(math.isnan, values)) else percentage(values)
