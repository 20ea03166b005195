"""A comparison of models in words: verdicts a newcomer understands, and numbers with their intervals."""

from __future__ import annotations

import math

from moesaic.intervals import Estimate
from moesaic.report.formatting import number
from moesaic.training.comparison_result import Comparison
from moesaic.training.paired_comparison import PairedComparison, Saving, Work

__all__ = ["flops", "lead", "outcome", "points", "prefix_of", "saved", "saving", "seconds", "times", "verdict", "work"]

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def verdict(found: Comparison, contrast: PairedComparison) -> str:
    """What a comparison of two models comes to, in one sentence."""
    on = f"On {found.data or 'these images'}"
    model, baseline, lead = contrast.model, contrast.baseline, contrast.lead
    if contrast.saving is not None:
        return f"{on}, {saving(found, contrast.saving)}."
    if contrast.ahead is None:
        return f"{on}, no difference between {baseline} and {model} can be told with {found.trials} trials."
    ahead, behind = (model, baseline) if contrast.ahead == model else (baseline, model)
    gain = lead if ahead == model else Estimate(-lead.value, -lead.high, -lead.low)
    return (
        f"{on}, {ahead} is {points(gain)} points more accurate than {behind} with the same labels; "
        f"how many labels that saves cannot be said: {contrast.open}."
    )


def outcome(contrast: PairedComparison) -> str:
    """The verdict in two or three words."""
    if contrast.saving is not None:
        return f"{contrast.saving.saver} saves labels"
    return "undecided" if contrast.ahead is None else f"{contrast.ahead} is ahead"


def saving(found: Comparison, saving: Saving) -> str:
    """Who saves how many labels against whom."""
    level, share = number(saving.level), saving.share
    if saving.at_least and math.isinf(share.high):
        return (
            f"{saving.saver} with {found.samples[0]:,} labels is more accurate than {saving.other} with "
            f"{found.samples[-1]:,}: it saves at least {share.value:.0f} % of the labels"
        )
    if saving.at_least:
        return (
            f"{saving.saver} reaches {level} % with at least {share.value:.0f} % fewer labels than {saving.other} "
            f"(95 % interval from {share.low:.0f} %), being there with the fewest tried"
        )
    return (
        f"{saving.saver} reaches {level} % with {share.value:.0f} % fewer labels than {saving.other} "
        f"[{share.low:.0f}, {share.high:.0f}]"
    )


def saved(contrast: PairedComparison) -> str:
    """The saving as a number: "43 % [20, 60]"; a dash where nothing can be said."""
    if contrast.saving is None:
        return "–"
    share = contrast.saving.share
    if contrast.saving.at_least:
        return f"at least {share.low if math.isfinite(share.low) else share.value:.0f} %"
    return f"{share.value:.0f} % [{share.low:.0f}, {share.high:.0f}]"


def lead(found: Comparison, contrast: PairedComparison) -> str:
    """How far ahead the model is with the same labels."""
    listed = _listed(found.samples)
    where = f"the mean over {listed} labels" if len(found.samples) > 1 else f"with {listed} labels"
    told = "" if contrast.ahead else "; the interval has both signs, so it may be chance"
    return f"With the same labels {contrast.model} is {_by(contrast.lead)} in accuracy, {where}{told}."


def work(contrast: PairedComparison, work: Work) -> str:
    """What training took to the same accuracy."""
    return (
        f"With {work.samples:,} labels, {contrast.model} takes {times(work.flops)} the training operations of "
        f"{contrast.baseline} to get to {number(work.level)} %, and {times(work.seconds)} the time."
    )


def points(estimate: Estimate) -> str:
    """Points of accuracy with their interval: "3.2 [1.0, 5.4]".

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
    """The prefix a number is read best with, and what it stands for."""
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
    """Ahead or behind, and by how many points."""
    if lead.value >= 0:
        return f"{points(lead)} points ahead"
    return f"{points(Estimate(-lead.value, -lead.high, -lead.low))} points behind"


def _listed(samples: tuple[int, ...]) -> str:
    *most, last = [f"{each:,}" for each in samples]
    return f"{', '.join(most)} and {last}" if most else last
