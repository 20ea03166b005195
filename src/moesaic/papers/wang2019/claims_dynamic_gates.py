"""Claims on gates that depend on the image, against controls of equal cost; `experiments_dynamic_gates` has the runs.

Every comparison is over pairs: the trials of all networks, in each of which both sides share the seed and the order of
images. The cost of a network may miss its target by a little, so each side is measured by its lead over a static
network of its own cost. Intervals are Student's over the pairs, of which the full preset has nine. Where the best of
several forms counts, each has the confidence 1 − 0.05 / forms (Bonferroni), so that the best is not picked by chance.

A claim holds if the lead is clearly above 0. It fails if the lead is clearly below `MARGIN`: a smaller lead is not
worth an embedding network. Half a point is what nine pairs can tell from none if pairs differ by up to 0.4 points
(standard deviation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import CONFIDENCE, Estimate, difference
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Claim
from moesaic.papers.wang2019.experiments_dynamic_gates import (
    ARMS,
    DEPENDENT,
    FULL_EPOCHS,
    NETWORKS,
    SHORT_EPOCHS,
    TRIALS,
    arm_runs,
    networks_of,
)

__all__ = ["CHECKS", "GPU_HOURS", "MARGIN", "NOTE", "leads", "static_leads"]

Array: TypeAlias = NDArray[np.float64]
ExperimentResults: TypeAlias = paper.ExperimentResults[Any]
ClaimCheck: TypeAlias = paper.ClaimCheck[Any]

NOTE = (
    f"CIFAR-10 (whether gates should depend on the image): {FULL_EPOCHS} epochs of SGD and {TRIALS} trials of three "
    f"networks with --preset full, {SHORT_EPOCHS} epochs of VGG-16 at 0.25 with --preset short, which is too short to "
    "decide it."
)
"""Remark for the report."""

MARGIN = 0.5
"""The smallest lead, in points, that is worth the gates."""
_TRAINED = 50.0
"""Training accuracy, in percent, of a network that has trained; ten classes by chance are 10."""
_TOLERANCE = 0.05
"""Tolerance of the cost around its target."""
_FORMS = ("constant", "constant-hard", *DEPENDENT)
"""Forms of gates without a teacher."""
_STEERED = "steered"
"""The default of ``moesaic train --target-macs``."""

_GATED_HOURS, _STATIC_HOURS, _TEACHER_HOURS, _DENSE_HOURS = 0.8, 0.1, 0.2, 0.2
GPU_HOURS: Mapping[str, float] = {
    "dense": _DENSE_HOURS,
    "narrow": _STATIC_HOURS,
    **{
        name: (_STATIC_HOURS if arm.gates is None else _GATED_HOURS) + (_TEACHER_HOURS if arm.teacher else 0.0)
        for name, arm in ARMS.items()
    },
}
"""Estimated hours on an H200 of all networks and trials of an arm in the full preset: 2.0 and 0.5 s for an epoch of
VGG-16 with and without gates, as in the recorded run, where several cells shared a GPU."""


def static_leads(experiment: ExperimentResults, arm: str, network: str) -> Array:
    """Returns the leads (T,), in points, of an arm over a static network of equal cost.

    The static accuracy of a trial is interpolated over the logarithm of the cost between the static networks of the
    same architecture; beyond them that of the closest counts.
    """
    alike = [name for name in networks_of(experiment) if NETWORKS[name].backbone == NETWORKS[network].backbone]
    static = [arm_runs(experiment, kind, name) for name in alike for kind in ("narrow", "static", "dense")]
    found: list[float] = []
    for trial, run in enumerate(arm_runs(experiment, arm, network)):
        peers = sorted((runs[trial] for runs in static), key=lambda peer: peer.cost)
        costs, accuracies = np.log([peer.cost for peer in peers]), [peer.accuracy for peer in peers]
        found.append(run.accuracy - cast("float", np.interp(np.log(run.cost), costs, accuracies)))
    return np.array(found)


def leads(experiment: ExperimentResults, arm: str, other: str) -> Array:
    """Returns the leads of an arm over another one at equal cost, in points, of all networks and trials."""
    networks = networks_of(experiment)
    own = np.concatenate([static_leads(experiment, arm, network) for network in networks])
    if other == "static":
        return own
    return own - np.concatenate([static_leads(experiment, other, network) for network in networks])


def _decide(estimates: Mapping[str, Estimate]) -> CheckResult:
    """The rule; reports the form of the largest mean lead."""
    best = max(estimates, key=lambda name: estimates[name].value)
    found = estimates[best]
    above = [name for name, each in estimates.items() if each.low > 0]
    unclear = [name for name, each in estimates.items() if each.low <= 0 and each.high >= MARGIN]
    if above:
        verdict = f"holds: {', '.join(above)}" if len(estimates) > 1 else "holds"
    elif unclear:
        named = f" of {', '.join(unclear)}" if len(estimates) > 1 else ""
        verdict = f"undecided: the interval{named} has both 0 and {MARGIN:g}"
    else:
        verdict = f"fails: {best} has the largest lead" if len(estimates) > 1 else "fails"
    return CheckResult(verdict, found.value, found.interval)


def _best_of(arms: Sequence[str], other: Callable[[str], str]) -> Callable[[ExperimentResults], CheckResult]:
    """Compares each arm with another; the best counts."""
    confidence = 1 - (1 - CONFIDENCE) / len(arms)

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        failed = _failed(experiment, dict.fromkeys([*arms, *map(other, arms)]))
        if failed:
            return CheckResult(f"undecided: networks that failed to train: {', '.join(failed)}")
        return _decide({arm: difference(leads(experiment, arm, other(arm)), confidence) for arm in arms})

    return evaluate


def _failed(experiment: ExperimentResults, arms: Iterable[str]) -> list[str]:
    """The cells of arms whose network failed to train."""
    return [
        f"{arm}/{network}/{trial}"
        for arm in arms
        for network in networks_of(experiment)
        for trial, run in enumerate(arm_runs(experiment, arm, network))
        if run.training[-1] < _TRAINED
    ]


def _met(experiment: ExperimentResults) -> CheckResult:
    """The largest distance of a run's cost from its target, of gates with biases."""
    misses = [
        abs(run.cost / NETWORKS[network].cost - 1)
        for arm, each in ARMS.items()
        for network in networks_of(experiment)
        if each.gates is not None and arm != "printed"
        for run in arm_runs(experiment, arm, network)
    ]
    missed = sum(miss > _TOLERANCE for miss in misses)
    if not missed:
        return CheckResult("holds", 100 * max(misses))
    verdict = "fails" if missed == len(misses) else f"partly: not in {missed} of {len(misses)} runs"
    return CheckResult(verdict, 100 * max(misses))


_RUNS = (
    "CIFAR-10; VGG-16 at 0.25 and 0.5 of its multiply-adds and W13-All at those of VGG-16, "
    f"{FULL_EPOCHS} epochs of SGD and {TRIALS} trials with --preset full; VGG-16 at 0.25 alone and {SHORT_EPOCHS} "
    "epochs with --preset short. "
    "Costs are multiply-adds of a test image, embedding network and gate heads included; each side counts by its lead "
    "over a static network of its own cost, interpolated over the logarithm of the cost between static networks of "
    "half the cost, of the cost, and in full. Student's interval over the pairs of networks and trials, "
)
_ONE = f"{_RUNS}95 %. "
_FAILED = f"Undecided if a network of either side has less than {_TRAINED:g} % training accuracy in the end."
_SIGN = f"Holds if it is above 0, fails if it is below {MARGIN:g} points, else undecided. {_FAILED}"


def _many(arms: Sequence[str]) -> str:
    return (
        f"{_RUNS}{100 - 5 / len(arms):.3g} % for each of {len(arms)} forms. Holds if that of a form is above 0, fails "
        f"if all are below {MARGIN:g} points, else undecided. {_FAILED} Shown: the form of the largest mean "
        "lead."
    )


def _check(
    id: str, statement: str, rule: str, arms: Sequence[str], evaluate: Callable[[ExperimentResults], CheckResult]
) -> ClaimCheck:
    read = dict.fromkeys((*arms, "narrow", "static", "dense"))
    hours = sum(GPU_HOURS[arm] for arm in read)
    return ClaimCheck(
        Claim(f"equal-cost-{id}", "wang2019", "Our own", statement, None, rule),
        tuple(f"equal-cost/{arm}/" for arm in read),
        evaluate,
        ("best",),
        missing=f"not run here: needs --preset full --device cuda, about {hours:.1f} GPU hours (H200, estimated)",
    )


CHECKS: tuple[ClaimCheck, ...] = (
    _check(
        "depends",
        "Gates that depend on the image help at equal cost: a form of them is more accurate than gates that are the "
        "same for all images, trained by the same recipe (lead in points).",
        _many(DEPENDENT),
        _FORMS,
        _best_of(DEPENDENT, lambda arm: ARMS[arm].control),
    ),
    *(
        _check(
            f"depends-{arm}",
            f"Gates that depend on the image help at equal cost, in this form: {ARMS[arm].title} (lead over gates that "
            "are the same for all images, in points).",
            _ONE + _SIGN,
            (arm, ARMS[arm].control),
            _best_of((arm,), lambda arm: ARMS[arm].control),
        )
        for arm in DEPENDENT
    ),
    _check(
        "static",
        "A form of gates that depend on the image is more accurate than a static network of smaller width, at equal "
        "cost (lead in points).",
        _many(DEPENDENT),
        DEPENDENT,
        _best_of(DEPENDENT, lambda arm: "static"),
    ),
    _check(
        "learned-widths",
        "Gates that are the same for all images, which choose the width of every layer, are more accurate than one "
        "factor for all widths, at equal cost (lead in points).",
        _many(_FORMS[:2]),
        _FORMS[:2],
        _best_of(_FORMS[:2], lambda arm: "static"),
    ),
    _check(
        "teacher",
        "With a teacher on both sides, gates that depend on the image are more accurate than a static network of "
        "smaller width, at equal cost (lead in points).",
        _ONE + _SIGN,
        ("gates-teacher", "static-teacher"),
        _best_of(("gates-teacher",), lambda arm: "static-teacher"),
    ),
    _check(
        "default",
        "A form of gates is more accurate at equal cost than the default of moesaic train --target-macs (lead in "
        "points).",
        _many([form for form in _FORMS if form != _STEERED]) + " If it holds, that form becomes the default.",
        _FORMS,
        _best_of([form for form in _FORMS if form != _STEERED], lambda arm: _STEERED),
    ),
    _check(
        "met",
        "All forms of gates with biases meet the cost that is asked for (percent by which it is missed, at most).",
        f"{_RUNS.partition('Costs are')[0]}Shown: the largest miss of all runs, in percent of what was asked for. "
        f"Holds if it is at most {100 * _TOLERANCE:g} in every run, fails if in none.",
        [name for name, arm in ARMS.items() if arm.gates is not None and name != "printed"],
        _met,
    ),
)
