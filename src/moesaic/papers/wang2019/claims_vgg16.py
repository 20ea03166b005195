"""Claims on VGG-16 with channel gates on CIFAR-10 (Wang et al. 2019); `experiments_vgg16` has the runs.

The supplement prints networks (Table 1) but no accuracies, so that all but one of these claims are our own: they
compare DeepMoE with static networks of equal cost, which decides whether gates are worth having.

Leads are differences of test accuracy, trial by trial: networks of a trial have the same seed and the same order of
images. With two trials Student's interval is thirteen standard errors wide on each side, so that many claims stay
undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate, mean
from moesaic.models.vgg import VGG16_WIDTHS
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import AHEAD_RULE, CheckResult, above_zero, ahead_everywhere, at_least
from moesaic.papers.engine.findings import Claim
from moesaic.papers.wang2019.experiments_vgg16 import (
    COSTS,
    EPOCHS,
    FULL_EPOCHS,
    REMEDIES,
    REMEDY_COST,
    REMEDY_TRIALS,
    TRIALS,
    WIDE_EPOCHS,
    WIDE_TRIALS,
    GateResult,
    runs_of,
)
from moesaic.papers.wang2019.vgg_widths import WIDENINGS, Widening, conv_macs, conv_parameters

__all__ = ["CHECKS", "NOTE", "accuracies", "lead_at_equal_cost"]

Array: TypeAlias = NDArray[np.float64]
ExperimentResults: TypeAlias = paper.ExperimentResults[Any]
ClaimCheck: TypeAlias = paper.ClaimCheck[Any]

NOTE = (
    f"CIFAR-10 (DeepMoE), with --preset short: {EPOCHS} epochs and {TRIALS} trials where gates are compared with "
    f"static widths at equal cost, {EPOCHS} and {REMEDY_TRIALS} for remedies, {WIDE_EPOCHS} and {WIDE_TRIALS} for the "
    "four widenings, by our recipe. The main paper's tables are not at hand, and nothing here is compared with them."
)
"""Remark for the report."""

_TOLERANCE = 0.05
"""Tolerance of the cost around its target."""
_LOSSLESS = 1.0
"""Loss of accuracy, in points, that counts as none."""


def accuracies(runs: Sequence[GateResult]) -> Array:
    """Returns the test accuracies (T,) in percent."""
    return np.array([run.accuracy for run in runs])


def lead_at_equal_cost(experiment: ExperimentResults, prefix: str) -> Array:
    """Returns the leads (T,), in points, of runs over a static VGG-16 of equal cost.

    The static accuracy of a trial is interpolated over the logarithm of the cost. Runs that cost less than the
    narrowest network are compared with that network, which favours it.
    """
    static = [runs_of(experiment, f"cost/static/{cost}") for cost in (*COSTS, 1)]
    leads: list[float] = []
    for trial, run in enumerate(runs_of(experiment, prefix)):
        peers = [runs[trial] for runs in static]
        costs, reached = np.log([peer.cost for peer in peers]), [peer.accuracy for peer in peers]
        leads.append(run.accuracy - cast("float", np.interp(np.log(run.cost), costs, reached)))
    return np.array(leads)


def _ahead(experiment: ExperimentResults) -> CheckResult:
    return ahead_everywhere([mean(lead_at_equal_cost(experiment, f"cost/gated/{cost}")) for cost in COSTS], "costs")


def _lossless(experiment: ExperimentResults) -> CheckResult:
    gated, dense = (accuracies(runs_of(experiment, f"cost/{name}")) for name in (f"gated/{COSTS[-1]}", "static/1"))
    return at_least(mean(gated - dense), -_LOSSLESS)


def _met(experiment: ExperimentResults) -> CheckResult:
    """The largest distance of a run's cost from its target."""
    misses = [abs(run.cost / cost - 1) for cost in COSTS for run in runs_of(experiment, f"cost/gated/{cost}")]
    missed = sum(miss > _TOLERANCE for miss in misses)
    if not missed:
        verdict = "holds"
    else:
        verdict = "fails" if missed == len(misses) else f"partly: not in {missed} of {len(misses)} runs"
    return CheckResult(verdict, 100 * max(misses))


def _depends(experiment: ExperimentResults) -> CheckResult:
    shares = [mean([run.dynamic for run in runs_of(experiment, f"cost/gated/{cost}")]) for cost in COSTS]
    least = min(shares, key=lambda share: share.value)
    bounded = Estimate(least.value, max(least.low, 0.0), min(least.high, 100.0))
    return at_least(bounded, 50.0)


def _by_class(experiment: ExperimentResults) -> CheckResult:
    ratios = [
        mean([run.between / max(run.within, 1e-9) for run in runs_of(experiment, f"cost/gated/{cost}")])
        for cost in COSTS
    ]
    return at_least(min(ratios, key=lambda ratio: ratio.value), 1.1)


def _wide_gated(name: str) -> Callable[[ExperimentResults], CheckResult]:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        runs = runs_of(experiment, f"wide/gated/{name}")
        lead = mean(accuracies(runs) - accuracies(runs_of(experiment, "wide/dense/vgg16")))
        over = float(np.mean([run.cost for run in runs]))
        found = above_zero(lead)
        if over > 1 + _TOLERANCE and found.verdict == "holds":
            return CheckResult(f"partly: ahead, at {over:.2f} times VGG-16's cost", found.measured, found.interval)
        return found

    return evaluate


def _wide_where(kind: str) -> Callable[[ExperimentResults], CheckResult]:
    """The most accurate widening against the least accurate one."""

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        reached = {name: accuracies(runs_of(experiment, f"wide/{kind}/{name}")) for name in WIDENINGS}
        best, worst = (pick(reached, key=lambda name: float(reached[name].mean())) for pick in (max, min))
        lead = mean(reached[best] - reached[worst])
        named = f"{WIDENINGS[best].title} over {WIDENINGS[worst].title}"
        if lead.low > 0:
            return CheckResult(f"holds: {named}", lead.value, lead.interval)
        return CheckResult(f"undecided: 0 is in the interval ({named})", lead.value, lead.interval)

    return evaluate


def _remedy(name: str) -> Callable[[ExperimentResults], CheckResult]:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        return above_zero(mean(lead_at_equal_cost(experiment, f"remedy/{name}")))

    return evaluate


def _any_remedy(experiment: ExperimentResults) -> CheckResult:
    """Gain of the best remedy over gates without a remedy, at equal cost."""
    without = lead_at_equal_cost(experiment, f"cost/gated/{REMEDY_COST}")
    leads = {name: lead_at_equal_cost(experiment, f"remedy/{name}") for name in REMEDIES}
    gains = {name: mean(lead - without[: len(lead)]) for name, lead in leads.items()}
    best = max(gains, key=lambda name: gains[name].value)
    found = above_zero(gains[best])
    decision, _, reason = found.verdict.partition(": ")
    verdict = f"{decision}: {best}{f', {reason}' if reason else ''}"
    return CheckResult(verdict, found.measured, found.interval)


def _more_weights(column: Widening) -> float:
    return column.conv_parameters / conv_parameters(VGG16_WIDTHS)


def _more_work(column: Widening) -> float:
    return column.conv_macs() / conv_macs(VGG16_WIDTHS)


def _claimed(
    id: str,
    statement: str,
    rule: str,
    cell_prefixes: tuple[str, ...],
    evaluate: Callable[[ExperimentResults], CheckResult],
    where: str = "Our own",
    published: str | None = None,
) -> ClaimCheck:
    claim = Claim(id, "wang2019", where, statement, published, rule)
    return ClaimCheck(claim, cell_prefixes, evaluate, ("best",), missing="not run here: needs --preset short and a GPU")


_STATIC = tuple(f"cost/static/{cost}/" for cost in (*COSTS, 1))
_GATED = tuple(f"cost/gated/{cost}/" for cost in COSTS)
_FULL = f"{FULL_EPOCHS} epochs and {TRIALS} trials with --preset full"
_TRAINED = f"CIFAR-10 by our recipe, accuracy after the last epoch; {_FULL}; with --preset short {EPOCHS} epochs and"
_SHARED = "in which networks share seeds and the order of images."
_LENGTH = f"{_TRAINED} {TRIALS} trials, {_SHARED}"
_REMEDY_LENGTH = f"{_TRAINED} {REMEDY_TRIALS} trials, {_SHARED}"
_WIDE_LENGTH = (
    f"CIFAR-10 by our recipe, accuracy after the last epoch; {_FULL}; with --preset short {WIDE_EPOCHS} epochs and "
    f"{WIDE_TRIALS} trials, {_SHARED}"
)
_COST = (
    "Costs are multiply-adds of a test image, mean, embedding network and gate heads included, as a share of VGG-16's."
)
_PEER = (
    "The static network is VGG-16 with all widths multiplied by one number; its accuracy at the cost that was measured "
    "is interpolated over the logarithm of the cost between four widths."
)
_SIGN = "Holds if the interval is above 0, fails if it is below."
_NAMED_COSTS = f"{', '.join(f'{cost:g}' for cost in COSTS[:-1])} and {COSTS[-1]:g}"

CHECKS: tuple[ClaimCheck, ...] = (
    _claimed(
        "depends-on-data",
        "The pattern of open channels depends on the data (percentage of channels that are open for some images and "
        "closed for others).",
        f"Gated layers of VGG-16 over 2,000 test images at costs of {_NAMED_COSTS}; the rest is dead or always on. "
        f"{_LENGTH} Shown: the smallest mean. Holds if its interval is at or above 50, fails if it is below.",
        _GATED,
        _depends,
        "Supplement A.1",
        "depends on the data",
    ),
    _claimed(
        "gates-by-class",
        "Images of one class open more similar channels than images of different classes (ratio of Hamming distances, "
        "between classes over within).",
        f"Distance of the patterns of open gates of all layers, over pairs of 2,000 test images, at costs of "
        f"{_NAMED_COSTS}. {_LENGTH} Shown: the smallest mean. Holds if its interval is at or above 1.1, fails if it is "
        "below.",
        _GATED,
        _by_class,
    ),
    _claimed(
        "cost-met",
        "A cost that is asked for is met (percent by which it is missed, at most).",
        f"{_COST} Asked for {_NAMED_COSTS}. {_LENGTH} Shown: the largest miss of all runs, in percent of what was "
        f"asked for. Holds if it is at most {100 * _TOLERANCE:g} in every run, fails if in none.",
        _GATED,
        _met,
    ),
    _claimed(
        "cost-ahead",
        "At equal multiply-adds VGG-16 with gates is more accurate than a static VGG-16 of smaller width (lead in "
        "points).",
        f"{_COST} {_PEER} At costs of {_NAMED_COSTS}. {_LENGTH} Shown: the smallest mean lead. " + AHEAD_RULE,
        (*_GATED, *_STATIC),
        _ahead,
    ),
    _claimed(
        "cost-lossless",
        f"Gates save half of VGG-16's multiply-adds without loss (lead over VGG-16 in points, at a cost of "
        f"{COSTS[-1]:g}).",
        f"{_COST} {_LENGTH} Holds if the interval is at or above −{_LOSSLESS:g} point, fails if it is below.",
        (_GATED[-1], "cost/static/1/"),
        _lossless,
    ),
    *(
        _claimed(
            f"wide-{name.replace('_', '-')}",
            f"VGG-16 widened as {column.title} and gated down to VGG-16's multiply-adds is more accurate than VGG-16 "
            "(lead in points).",
            f"The widening has {_more_weights(column):.2f} times VGG-16's convolution weights and "
            f"{_more_work(column):.1f} times its work before gates close. {_COST} {_WIDE_LENGTH} {_SIGN} "
            f"Cannot hold where the mean cost is above {1 + _TOLERANCE:g}.",
            (f"wide/gated/{name}/", "wide/dense/vgg16/"),
            _wide_gated(name),
        )
        for name, column in WIDENINGS.items()
    ),
    _claimed(
        "wide-where",
        "At equal weights and equal multiply-adds it matters which layers of VGG-16 are widened (lead of the best "
        "widening over the worst in points).",
        f"The four widenings of Table 1, all gated down to VGG-16's multiply-adds. {_COST} {_WIDE_LENGTH} The two are "
        "picked by the same runs, which makes the lead look larger than it is. Holds if the interval is above 0, else "
        "undecided.",
        ("wide/gated/vgg16/", *(f"wide/gated/{name}/" for name in WIDENINGS)),  # the chart shows VGG-16 beside them
        _wide_where("gated"),
    ),
    _claimed(
        "wide-where-dense",
        "At equal weights alone, without gates, it matters which layers of VGG-16 are widened (lead of the best "
        "widening over the worst in points).",
        f"The four widenings of Table 1 as they are, of 1.1 to 13.8 times VGG-16's multiply-adds. {_WIDE_LENGTH} The "
        "two are picked by the same runs, which makes the lead look larger than it is. Holds if the interval is above "
        "0, else undecided.",
        tuple(f"wide/dense/{name}/" for name in WIDENINGS),
        _wide_where("dense"),
    ),
    *(
        _claimed(
            f"remedy-{name}",
            f"With {remedy.about}, VGG-16 with gates is more accurate than a static VGG-16 of as many multiply-adds "
            f"(lead in points, at a cost of {REMEDY_COST:g}).",
            f"{_COST} {_PEER} {_REMEDY_LENGTH} {_SIGN}"
            + (
                " The static network has no teacher, and training the teacher is not counted." if remedy.teacher else ""
            ),
            (f"remedy/{name}/", *_STATIC),
            _remedy(name),
        )
        for name, remedy in REMEDIES.items()
    ),
    _claimed(
        "remedies-help",
        f"One of the {len(REMEDIES)} remedies makes VGG-16 with gates more accurate than it is without (points gained "
        f"by the best, at a cost of {REMEDY_COST:g}).",
        f"Lead over a static network of equal cost, less that of gates without any remedy, trial by trial. {_PEER} "
        f"{_REMEDY_LENGTH} The best is picked by the same runs, which "
        f"makes it look better than it is. {_SIGN}",
        (*(f"remedy/{name}/" for name in REMEDIES), f"cost/gated/{REMEDY_COST}/", *_STATIC),
        _any_remedy,
    ),
)
