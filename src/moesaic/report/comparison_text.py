"""Sentences of a comparison of models: verdicts, leads, savings and numbers with their intervals."""

from __future__ import annotations

import math

from moesaic.intervals import Estimate
from moesaic.report.formatting import listed, number
from moesaic.training.comparison_result import Comparison
from moesaic.training.paired_comparison import PairedComparison, Saving, Work

__all__ = ["flops", "lead", "outcome", "points", "prefix_of", "saved", "saving", "seconds", "times", "verdict", "work"]

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def verdict(found: Comparison, pair: PairedComparison) -> str:
    """The verdict on two models in one sentence."""
    on = f"On {found.data or 'these images'}"
    model, baseline, lead = pair.model, pair.baseline, pair.lead
    if pair.saving is not None:
        return f"{on}, {saving(found, pair.saving)}."
    if pair.ahead is None:
        return f"{on}, {found.trials} trials show no significant difference between {baseline} and {model}."
    ahead, behind = (model, baseline) if pair.ahead == model else (baseline, model)
    gain = lead if ahead == model else Estimate(-lead.value, -lead.high, -lead.low)
    return (
        f"{on}, {ahead} is {points(gain)} points more accurate than {behind} with the same labels; "
        f"how many labels this saves is unknown: {pair.open}."
    )


def outcome(pair: PairedComparison) -> str:
    """A short label of the verdict."""
    if pair.saving is not None:
        return f"{pair.saving.saver} saves labels"
    return "undecided" if pair.ahead is None else f"{pair.ahead} is ahead"


def saving(found: Comparison, saving: Saving) -> str:
    """Which model saves how many labels."""
    level, share = number(saving.level), saving.share
    if saving.at_least and math.isinf(share.high):
        return (
            f"{saving.saver} with {found.samples[0]:,} labels is more accurate than {saving.other} with "
            f"{found.samples[-1]:,}: it saves at least {share.value:.0f} % of the labels"
        )
    if saving.at_least:
        return (
            f"{saving.saver} reaches {level} % with at least {share.value:.0f} % fewer labels than {saving.other} "
            f"(95 % interval from {share.low:.0f} %); it reaches it with the smallest number of labels tested"
        )
    return (
        f"{saving.saver} reaches {level} % with {share.value:.0f} % fewer labels than {saving.other} "
        f"[{share.low:.0f}, {share.high:.0f}]"
    )


def saved(pair: PairedComparison) -> str:
    """The saving as a number: "43 % [20, 60]"; a dash if it is unknown."""
    if pair.saving is None:
        return "–"
    share = pair.saving.share
    if pair.saving.at_least:
        return f"at least {share.low if math.isfinite(share.low) else share.value:.0f} %"
    return f"{share.value:.0f} % [{share.low:.0f}, {share.high:.0f}]"


def lead(found: Comparison, pair: PairedComparison) -> str:
    """The lead of the model with the same labels."""
    sizes = listed([f"{each:,}" for each in found.samples])
    where = f"mean over {sizes} labels" if len(found.samples) > 1 else f"with {sizes} labels"
    note = "" if pair.ahead else "; the interval contains 0, so this may be chance"
    return f"With the same labels, the accuracy of {pair.model} is {_by(pair.lead)} ({where}{note})."


def work(pair: PairedComparison, work: Work) -> str:
    """Training cost to the same accuracy."""
    return (
        f"With {work.samples:,} labels, {pair.model} takes {times(work.flops)} the training FLOPs of {pair.baseline} "
        f"to reach {number(work.level)} % accuracy, and {times(work.seconds)} the time."
    )


def points(estimate: Estimate) -> str:
    """Percentage points with their interval: "3.2 [1.0, 5.4]".

    >>> points(Estimate(3.21, 1.04, 5.38))
    '3.2 [1.0, 5.4]'
    """
    value, low, high = (f"{each:.1f}".replace("-", "−") for each in (estimate.value, estimate.low, estimate.high))
    return "–" if math.isnan(estimate.value) else f"{value} [{low}, {high}]"


def times(ratio: Estimate) -> str:
    """A ratio with its interval: "0.61 [0.50, 0.74] times"."""
    value, low, high = (number(each, near=(ratio.value, ratio.low)) for each in (ratio.value, ratio.low, ratio.high))
    return f"{value} [{low}, {high}] times"


def flops(value: float) -> str:
    """Operations with a prefix: "1.23 TFLOP".

    >>> flops(1.234e12), flops(5e6)
    ('1.23 TFLOP', '5 MFLOP')
    """
    size, prefix = prefix_of(value)
    return f"{number(value / size)} {prefix}FLOP"


def prefix_of(value: float) -> tuple[float, str]:
    """The SI prefix of a number, and its factor."""
    return next(((size, prefix) for size, prefix in _PREFIXES if value >= size), (1.0, ""))


def seconds(value: float) -> str:
    """A duration: "12 s", "4.2 min", "1.5 h".

    >>> seconds(12.3), seconds(250), seconds(5400)
    ('12.3 s', '4.17 min', '1.5 h')
    """
    size, unit = next(
        (each for each in ((3600, "h"), (60, "min")) if value >= 1.5 * each[0] or value == each[0]), (1, "s")
    )
    return f"{number(value / size)} {unit}"


def _by(lead: Estimate) -> str:
    """Higher or lower, and by how many points."""
    if lead.value >= 0:
        return f"{points(lead)} points higher"
    return f"{points(Estimate(-lead.value, -lead.high, -lead.low))} points lower"
