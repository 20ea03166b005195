"""Sentences of a comparison of models: verdicts, leads, savings and numbers with their intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.intervals import Estimate
from moesaic.report.formatting import listed, number
from moesaic.training.comparison_result import ComparedModel, Comparison
from moesaic.training.group_sequential import LEVEL_MARGIN, MANY_TRIALS
from moesaic.training.paired_comparison import NARROW_MARGIN, PairedComparison, Saving, Work, accuracies

__all__ = [
    "Answer",
    "answers",
    "flops",
    "heads",
    "is_level",
    "lead",
    "meaning",
    "on_frozen_backbones",
    "outcome",
    "points",
    "prefix_of",
    "saving",
    "seconds",
    "times",
    "trial_count",
    "verdict",
    "work",
]

_WIDE = 10.0
"""Points of accuracy: models that may differ by more are not called level."""
_CHEAPER = 0.9
"""Of models that are level, one is preferred that has at most so many of the other's multiply-adds."""
_UNCERTAIN = 100.0
"""A ratio whose interval spans more than this factor is given without it."""
_HEAD = re.compile(r":head=(\w+)")
_HEADS = {
    "mean": "takes the mean over all positions of the last feature map",
    "max": "takes the maximum over all positions of the last feature map",
    "attention": "takes a mean of all positions of the last feature map, weighted by attention",
    "routed": "has experts, each of which selects a few positions of the last feature map",
}
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def verdict(found: Comparison, pair: PairedComparison) -> str:
    """The verdict on two models in one sentence."""
    on = f"On {found.data or 'these images'}"
    model, baseline, lead = pair.model, pair.baseline, pair.lead
    if pair.saving is not None:
        return f"{on}, {saving(found, pair.saving)}."
    if pair.ahead is None:
        return f"{on}, {_undecided(pair)}."
    ahead, behind = (model, baseline) if pair.ahead == model else (baseline, model)
    gain = lead if ahead == model else Estimate(-lead.value, -lead.high, -lead.low)
    return (
        f"{on}, {ahead} is {points(gain)} points more accurate than {behind} with the same labels; "
        f"how many labels this saves is unknown: {pair.open}."
    )


def _undecided(pair: PairedComparison) -> str:
    """What two models have in common, or how many more trials would tell them apart."""
    model, baseline, so_far = pair.model, pair.baseline, _trials(pair.trials)
    if is_level(pair):
        return f"{baseline} and {model} are level within {_rounded_up(pair.within)} points ({so_far})"
    if pair.more is not None:
        return (
            f"{so_far} do not decide between {baseline} and {model}; about {_more(pair.more)} would, if the difference "
            "stays as it is"
        )
    more = pair.more_to_narrow
    narrow = f"more than {MANY_TRIALS} more" if more is None else f"about {_more(more)}"
    close = "are level" if pair.within <= _WIDE else "cannot be told apart"
    return (
        f"{baseline} and {model} {close} within {_rounded_up(pair.within)} points after {so_far}; {narrow} would "
        f"show whether they are within {NARROW_MARGIN:g}"
    )


def is_level(pair: PairedComparison) -> bool:
    """Whether the models differ by little, if at all."""
    return pair.ahead is None and pair.within <= (NARROW_MARGIN if pair.more is None else LEVEL_MARGIN)


def answers(found: Comparison, compared: Sequence[PairedComparison]) -> list[Answer]:
    """What a reader wants to know first: which network to use, and whether routing helps."""
    model, why = _choice(found, compared)
    made = [Answer("Which network should I use?", why if model is None else f"{model}{why}", model)]
    routed = [pair for pair in compared if found.model(pair.model).routed_share > 0]
    if routed and found.models[0].routed_share == 0 and model is not None:
        made.append(Answer("Does routing help on these images?", _routing(routed)))
    return made


def meaning(model: ComparedModel) -> str:
    """What a short name of a network stands for.

    >>> meaning(ComparedModel("head=mean", 9, 9, 0.0, "timm/resnet18:pretrained:head=mean"))
    'timm/resnet18:pretrained:head=mean: a head that takes the mean over all positions of the last feature map'
    """
    head = _head(model)
    return f"{model.spelling}: a head that {head}" if head else model.spelling


def heads(found: Comparison) -> list[str]:
    """A sentence on each network whose name is that of its head; for others the name says it.

    >>> model = ComparedModel("head=mean", 9, 9, 0.0, "timm/resnet18:pretrained:head=mean")
    >>> from moesaic.report.comparison_sentences import _head
    >>> _head(model)
    'takes the mean over all positions of the last feature map'
    """
    named = [(model.name, _head(model)) for model in found.models if model.name.startswith("head=")]
    return [f"{name} {head}." for name, head in named if head]


def _head(model: ComparedModel) -> str:
    found = _HEAD.search(model.spelling)
    return _HEADS.get(found[1], "") if found else ""


@dataclass(frozen=True)
class Answer:
    """A question and its answer, a sentence each."""

    question: str
    answer: str
    model: str | None = None
    """The network that it recommends."""


def _choice(found: Comparison, compared: Sequence[PairedComparison]) -> tuple[str | None, str]:
    """The network to use, and the rest of the sentence; or why none is."""
    baseline = found.models[0]
    best_mean = max(each.value for model in found.models for each in accuracies(found, model.name))
    if best_mean <= found.guessing:
        return None, (
            f"None of them: no network gets beyond guessing, {number(found.guessing)} %. Train with more labels or "
            "more epochs, or begin with a pretrained network."
        )
    ahead = [pair for pair in compared if pair.ahead == pair.model]
    if ahead:
        best = max(ahead, key=lambda pair: pair.lead.value)
        gain = points(best.lead)
        return best.model, f": it is {gain} points more accurate than {baseline.name} with the same labels."
    cheap = [pair for pair in compared if is_level(pair) and found.model(pair.model).macs <= _CHEAPER * baseline.macs]
    if cheap:
        least = min(cheap, key=lambda pair: found.model(pair.model).macs)
        share = 100 * found.model(least.model).macs / baseline.macs
        return least.model, (
            f": it is level with {baseline.name} within {_rounded_up(least.within)} points and has {share:.0f} % of "
            "its multiply-adds."
        )
    if all(pair.ahead == baseline.name for pair in compared):
        others = listed([pair.model for pair in compared])
        return baseline.name, f": it is more accurate than {others} with the same labels."
    undecided = [pair.model for pair in compared if pair.ahead is None and not is_level(pair)]
    if undecided:
        return baseline.name, f", for now: {listed(undecided)} may be better or worse, {_outlook(compared)}."
    return baseline.name, ": no other network is more accurate."


def _outlook(compared: Sequence[PairedComparison]) -> str:
    more = [pair.more for pair in compared if pair.ahead is None]
    known = [each for each in more if each is not None]
    if len(known) < len(more):
        return "by so little that trials hardly tell"
    return f"which about {_more(max(known))} {'trials' if max(known) > 1 else 'trial'} would show"


def _routing(routed: Sequence[PairedComparison]) -> str:
    best = max(routed, key=lambda pair: pair.lead.value)
    for pair in routed:
        if pair.ahead == pair.model:
            best = pair
    if best.ahead == best.model:
        gain = points(best.lead)
        return f"Yes: {best.model} is {gain} points more accurate than {best.baseline} with the same labels."
    if best.ahead == best.baseline:
        loss = points(Estimate(-best.lead.value, -best.lead.high, -best.lead.low))
        return f"No: {best.model} is {loss} points less accurate than {best.baseline} with the same labels."
    if is_level(best):
        return f"It makes no difference of more than {_rounded_up(best.within)} points."
    return f"Not shown: {_undecided(best)}."


def outcome(pair: PairedComparison) -> str:
    """A short label of the verdict."""
    if pair.saving is not None:
        return f"{pair.saving.saver} saves labels"
    if is_level(pair):
        return "level"
    return "undecided" if pair.ahead is None else f"{pair.ahead} is ahead"


def trial_count(found: Comparison) -> str:
    """The number of trials, or from the fewest to the most of a network."""
    counts = {found.trials_of(model.name) for model in found.models}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{found.trials}"


def saving(found: Comparison, saving: Saving) -> str:
    """Which model saves how many labels."""
    level, share = number(saving.level), saving.share
    if saving.beyond:
        return (
            f"{saving.saver} with {found.samples[0]:,} labels is more accurate than {saving.other} with "
            f"{found.samples[-1]:,}: it saves at least {share.value:.0f} % of the labels"
        )
    if saving.at_least:
        return (
            f"{saving.saver} reaches {level} % with at least {share.value:.0f} % fewer labels than {saving.other} "
            f"(95 % interval from {share.low:.0f} %), already with the smallest number of labels tested"
        )
    return (
        f"{saving.saver} reaches {level} % with {share.value:.0f} % [{share.low:.0f}, {share.high:.0f}] fewer labels "
        f"than {saving.other}"
    )


def lead(found: Comparison, pair: PairedComparison) -> str:
    """The lead of the model with the same labels."""
    sizes = listed([f"{each:,}" for each in found.samples])
    where = f"mean over {sizes} labels" if len(found.samples) > 1 else f"with {sizes} labels"
    note = "" if pair.ahead else "; the interval contains 0, so this may be chance"
    return f"With the same labels, the accuracy of {pair.model} is {_by(pair.lead)} ({where}{note})."


def on_frozen_backbones(found: Comparison) -> bool:
    """Whether heads alone were trained: the operations of whole networks say nothing about the cost of that."""
    return found.recipe.get("trainable") == "head"


def work(pair: PairedComparison, work: Work, *, frozen: bool = False) -> str:
    """Training cost to the same accuracy; on ``frozen`` backbones, the time alone."""
    if frozen:
        return (
            f"With {work.samples:,} labels, {pair.model} takes {times(work.seconds)} the training time of "
            f"{pair.baseline} to reach {number(work.level)} % accuracy."
        )
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
    if ratio.low <= 0 or ratio.high / ratio.low > _UNCERTAIN:
        return f"about {number(ratio.value)} times"
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


def _more(count: int) -> str:
    return "one more" if count == 1 else f"{count} more"


def _trials(count: int) -> str:
    return f"{count} trials"


def _rounded_up(value: float) -> str:
    """With one decimal, never less than the value."""
    return number(max(math.ceil(10 * value - 1e-9), 1) / 10)


def _by(lead: Estimate) -> str:
    """Higher or lower, and by how many points."""
    if lead.value >= 0:
        return f"{points(lead)} points higher"
    return f"{points(Estimate(-lead.value, -lead.high, -lead.low))} points lower"
