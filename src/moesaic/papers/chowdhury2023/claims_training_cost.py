"""Claims on the savings of a pMoE layer: samples and multiply-adds (the talk's slides), iterations and time (Table 2).

All are on four classes of CelebA. The paper's FLOPs are seconds times the GPU's speed; here multiply-adds are counted,
and seconds are measured separately, since runs that share a GPU slow each other down.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import ratio_estimate, samples_at
from moesaic.papers.chowdhury2023.experiments_images import (
    CONVERGED,
    Arm,
    StepResult,
    WideResult,
    accuracy_curve,
    cell_prefixes,
    runs_of,
    sizes_of,
)
from moesaic.papers.chowdhury2023.image_claim_rules import (
    LENGTH,
    SAVING_RULE,
    ClaimCheck,
    ExperimentResults,
    image_check,
    saving,
)
from moesaic.papers.engine.decision_rules import CheckResult, below

__all__ = ["CHECKS"]

Array = NDArray[np.float64]

_FOUR = "celeba-4class"
_STEP = "wide-step/both/64"


def _curves(experiment: ExperimentResults) -> tuple[list[float], Array, Array]:
    """Returns the sizes (S,) and the accuracies (S, T) of WRN-pMoE and WRN."""
    sizes, ours = accuracy_curve(experiment, _FOUR, "pmoe")
    return list(sizes), ours, accuracy_curve(experiment, _FOUR, "wrn")[1]


def _slide_samples(experiment: ExperimentResults) -> CheckResult:
    sizes, ours, theirs = _curves(experiment)

    def ratio(a: Array, b: Array) -> float:
        return samples_at(float(b.mean(axis=1)[-1]), sizes, a.mean(axis=1), logarithmic=True) / sizes[-1]

    return _never(saving(ratio_estimate(ratio, ours, theirs), 0.4))


def _slide_work(experiment: ExperimentResults) -> CheckResult:
    sizes, ours, theirs = _curves(experiment)

    def ratio(a: Array, b: Array, our_work: Array, their_work: Array) -> float:
        needed = samples_at(float(b.mean(axis=1)[-1]), sizes, a.mean(axis=1), logarithmic=True)
        if np.isinf(needed):
            return float("inf")
        spent = cast(
            "float", np.interp(math.log(needed), np.log(sizes), our_work.mean(axis=1))
        )  # numpy types it in part
        return spent / float(their_work[-1].mean())

    found = saving(ratio_estimate(ratio, ours, theirs, _work(experiment, "pmoe"), _work(experiment, "wrn")), 0.5)
    return _never(_converging(found, experiment))


def _never(result: CheckResult) -> CheckResult:
    """Replaces the verdict on an infinite ratio, which JSON cannot represent."""
    if result.measured != float("inf"):
        return result
    return replace(result, verdict="fails: WRN-pMoE never reaches WRN's accuracy here")


def _seen(run: WideResult) -> float:
    """Images until convergence; all images of the run if it did not converge."""
    return min(run.converged, float(run.images))


def _iterations(experiment: ExperimentResults, arm: Arm) -> Array:
    """(S, T): images seen until convergence."""
    return np.array(
        [[_seen(run) for run in runs_of(experiment, _FOUR, arm, n)] for n in sizes_of(experiment, _FOUR, arm)]
    )


def _work(experiment: ExperimentResults, arm: Arm) -> Array:
    """(S, T): multiply-adds until convergence; backward counts twice as much as forward."""
    costs = [[3 * run.macs for run in runs_of(experiment, _FOUR, arm, n)] for n in sizes_of(experiment, _FOUR, arm)]
    return np.array(costs) * _iterations(experiment, arm)


def _converging(result: CheckResult, experiment: ExperimentResults) -> CheckResult:
    """Leaves the claim undecided if most runs end before convergence: the ratio is then bounded on one side at most."""
    ours, theirs = _mostly_open(experiment, "pmoe"), _mostly_open(experiment, "wrn")
    decision = result.verdict.partition(":")[0]
    if ours and theirs:
        reason = "most runs of both networks end before they have converged"
    elif ours and decision == "holds":
        reason = "most runs of WRN-pMoE end before they have converged"
    elif theirs and decision == "fails":
        reason = "most runs of WRN end before they have converged"
    else:
        return result
    return replace(result, verdict=f"undecided: {reason}")


def _mostly_open(experiment: ExperimentResults, arm: Arm) -> bool:
    runs = [run for n in sizes_of(experiment, _FOUR, arm) for run in runs_of(experiment, _FOUR, arm, n)]
    return 2 * sum(math.isinf(run.converged) for run in runs) > len(runs)


def _mean_ratio(ours: Array, theirs: Array) -> float:
    return float(ours.mean() / theirs.mean())


def _fewer_iterations(experiment: ExperimentResults) -> CheckResult:
    ours, theirs = _iterations(experiment, "pmoe"), _iterations(experiment, "wrn")
    return _converging(below(ratio_estimate(_mean_ratio, ours, theirs), 1.0), experiment)


def _cheaper_iterations(experiment: ExperimentResults) -> CheckResult:
    n = sizes_of(experiment, _FOUR)[-1]
    ratio = runs_of(experiment, _FOUR, "pmoe", n)[0].macs / runs_of(experiment, _FOUR, "wrn", n)[0].macs
    return CheckResult("holds" if ratio < 1 else "fails", ratio)


def _faster_iterations(experiment: ExperimentResults) -> CheckResult:
    step: StepResult = experiment.results[_STEP]
    return below(ratio_estimate(_mean_ratio, step.pmoe, step.wrn), 1.0)


def _time(experiment: ExperimentResults) -> CheckResult:
    step: StepResult = experiment.results[_STEP]

    def ratio(ours: Array, theirs: Array, our_step: Array, their_step: Array) -> float:
        return _mean_ratio(ours, theirs) * _mean_ratio(our_step, their_step)

    counts = _iterations(experiment, "pmoe"), _iterations(experiment, "wrn")
    return _converging(saving(ratio_estimate(ratio, *counts, step.pmoe, step.wrn), 0.6), experiment)


def _flops(experiment: ExperimentResults) -> CheckResult:
    found = ratio_estimate(_mean_ratio, _work(experiment, "pmoe"), _work(experiment, "wrn"))
    return _converging(saving(found, 0.58), experiment)


_CONVERGES = (
    f"A network has converged after the first epoch with {CONVERGED:g} % training accuracy, as it is while it trains; "
    "the paper does not say what it means. One that does not get there counts with all its epochs; where that is so "
    "in more than half of WRN-pMoE's runs the claim cannot hold, in more than half of WRN's it cannot fail."
)

_INTERVAL = (
    "The interval is bootstrapped over trials; with fewer than five it is Student's of the logarithm of each trial's "
    "ratio."
)

CHECKS: tuple[ClaimCheck, ...] = (
    image_check(
        "fig12-samples",
        "Figure 12",
        "On four classes of CelebA, WRN-pMoE saves 60 % of the training samples (share of samples; the talk's slides).",
        0.4,
        "Samples at which the mean curve of WRN-pMoE reaches the mean accuracy that WRN has with the most samples "
        "tried, interpolated over the logarithm of N, over the most samples; the slides do not say at which accuracy, "
        f"the authors' code draws a line there. {_INTERVAL} A network that is there with the fewest "
        f"samples counts with these. {LENGTH} Holds if the interval is at or below 0.4, fails if it is at or above 1 "
        f"or WRN-pMoE never gets there, {SAVING_RULE}",
        cell_prefixes(_FOUR),
        _slide_samples,
    ),
    image_check(
        "fig12-flops",
        "Figure 12",
        "On four classes of CelebA, WRN-pMoE saves 50 % of the training FLOPs (share of multiply-adds; the talk's "
        "slides).",
        0.5,
        "Multiply-adds until convergence, executed sparsely: of WRN-pMoE with as many samples as it needs for WRN's "
        f"accuracy (see fig12-samples), interpolated, over those of WRN with the most samples. {_CONVERGES} "
        f"{_INTERVAL} Holds if the interval is at or below 0.5, fails if it is at or above 1 or WRN-pMoE "
        f"never reaches the accuracy, {SAVING_RULE}",
        cell_prefixes(_FOUR),
        _slide_work,
    ),
    image_check(
        "table2-iterations",
        "Table 2",
        "With the same number of training samples WRN-pMoE requires fewer iterations to converge than WRN, on four "
        "classes of CelebA (ratio).",
        "fewer",
        f"Ratio of the images seen until convergence, added over N. {_INTERVAL} {_CONVERGES} Holds if "
        "the interval is below 1, fails if it is above.",
        cell_prefixes(_FOUR),
        _fewer_iterations,
    ),
    image_check(
        "table2-cost",
        "Table 2",
        "WRN-pMoE has a lower cost per iteration than WRN (ratio of multiply-adds).",
        "lower",
        "Multiply-adds of an image in the convolutions, routed ones executed sparsely, router included; counted and "
        "not measured. The authors' code computes experts densely and saves none. Holds if the ratio is below 1.",
        cell_prefixes(_FOUR),
        _cheaper_iterations,
    ),
    image_check(
        "table2-step",
        "Table 2",
        "WRN-pMoE has a lower cost per iteration than WRN (ratio of seconds).",
        "lower",
        "Seconds of a training step at batch 128 on 64×64 images in moesaic, both networks in turn in one process and "
        "nothing beside them, not compiled; five rounds, bootstrapped. Holds if the interval is below 1, fails if it "
        "is above.",
        (_STEP,),
        _faster_iterations,
    ),
    image_check(
        "table2-time",
        "Table 2",
        "With the same number of training samples WRN-pMoE converges in 0.6 of WRN's time, on four classes of CelebA "
        "(ratio of seconds).",
        0.6,
        f"Ratio of the images seen until convergence, added over N, times that of the seconds of a step (see "
        f"table2-step). {_INTERVAL} {_CONVERGES} Holds if the interval is at or below 0.6, fails if it is at or "
        f"above 1, {SAVING_RULE}",
        (*cell_prefixes(_FOUR), _STEP),
        _time,
    ),
    image_check(
        "table2-flops",
        "Table 2",
        "With the same number of training samples WRN-pMoE converges with 0.58 of WRN's training FLOPs, on four "
        "classes of CelebA (ratio of multiply-adds).",
        0.58,
        "Ratio of the multiply-adds until convergence, executed sparsely, added over N; the paper "
        f"multiplies seconds by the GPU's speed and utilisation. {_INTERVAL} {_CONVERGES} Holds if the interval is at "
        f"or below 0.58, fails if it is at or above 1, {SAVING_RULE}",
        cell_prefixes(_FOUR),
        _flops,
    ),
)
