"""Claims of Chen et al. 2022's theory: Theorems 4.1 and 4.2, Lemmas 5.1 and 5.2, and the loads of eq. 5.1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate, difference, mean, percentage
from moesaic.papers.chen2022.experiments_synthetic import ClaimCheck, ExperimentResults, claim
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult, at_least, at_most

__all__ = ["CHECKS", "all_groups", "group_balance", "to_own_group"]

Array = NDArray[np.float64]

CLUSTERS = 4
_ROUNDING = 1e-3
"""Share of a router that counts as rounding: single precision over thousands of steps."""
BOUND = 87.5
"""Accuracy in percent of the best additive classifier (Theorem 4.1)."""
GOOD = 95.0
"""Accuracy in percent that counts as "error o(1)", for which the paper gives no number."""


def _tight(experiment: ExperimentResults) -> CheckResult:
    found = percentage(experiment.results["theory/additive/s3"]["accuracy"])
    inside = found.low <= BOUND <= found.high
    return CheckResult("holds" if inside else "fails", found.value, found.interval)


def _uncovered(experiment: ExperimentResults) -> CheckResult:
    found = percentage(experiment.results["theory/additive/s1"]["accuracy"])
    checked = at_most(found, BOUND)
    better = "fails: an additive classifier does better there"
    return replace(checked, verdict=better) if checked.verdict == "fails" else checked


def _best_ensemble(experiment: ExperimentResults) -> CheckResult:
    """The most accurate ensemble of two networks or more, over activations and sizes."""
    every = [
        percentage(cell["ensemble_accuracy"][:, place])
        for cell in _ensembles(experiment)
        for place, members in enumerate(cell["members"])
        if members > 1
    ]
    return at_most(max(every, key=lambda found: found.value), BOUND)


def _ensemble_gain(experiment: ExperimentResults) -> CheckResult:
    """The largest gain of the largest ensemble over the mean accuracy of its networks, over activations."""
    gains = [
        difference(cell["ensemble_accuracy"][:, -1] - cell["single_accuracy"].mean(axis=1))
        for cell in _ensembles(experiment)
    ]
    return at_most(max(gains, key=lambda gain: gain.value), 1.0)


def _ensembles(experiment: ExperimentResults) -> list[CellArrays]:
    return [result for name, result in experiment.results.items() if name.startswith("ensemble/")]


def _smooth(experiment: ExperimentResults) -> CheckResult:
    result = experiment.results["theory/smoothing"]
    steepest = np.maximum(result["random"], result["made"])
    share = float((steepest / result["experts"] ** 2).max())
    return CheckResult("holds" if share <= 1 else "fails", share)


def _smoother(experiment: ExperimentResults) -> CheckResult:
    result = experiment.results["theory/smoothing"]
    steepest = float(np.maximum(result["random"], result["made"]).max())
    if steepest > 2 * (1 + 1e-9):
        return CheckResult("fails", steepest)
    return CheckResult("holds" if steepest >= 1.98 else "partly: it holds, but is not attained", steepest)


def _trained(experiment: ExperimentResults) -> CheckResult:
    errors = experiment.results["moe/cubic/s3"]["errors"]
    samples = experiment.results["moe/cubic/s3"]["train_dispatch"].sum(axis=(1, 2))
    found = percentage(100 * (1 - errors / samples))
    zero = int((errors == 0).sum())
    verdict = "holds" if zero == len(errors) else f"partly: zero in {zero} of {len(errors)} trials"
    return CheckResult(verdict if found.value >= 99 else "fails", found.value, found.interval)


def _generalises(experiment: ExperimentResults) -> CheckResult:
    return at_least(percentage(experiment.results["moe/cubic/s3"]["accuracy"]), 99.0)


def _own(accuracy: Array, groups: Array) -> Array:
    """(T, E): of accuracies (T, E, K), each expert's on the cluster of its group."""
    return np.take_along_axis(accuracy, groups[..., None].astype(int), axis=2)[..., 0]


def _others(accuracy: Array, groups: Array) -> Array:
    """(T, E): of accuracies (T, E, K), each expert's mean over the other clusters."""
    return (accuracy.sum(axis=2) - _own(accuracy, groups)) / (accuracy.shape[2] - 1)


def _experts_good(experiment: ExperimentResults) -> CheckResult:
    def good(result: CellArrays) -> Array:
        return 100 * (100 * _own(result["expert_accuracy"], result["groups"]) >= GOOD).mean(axis=1)

    return _explored(experiment, good, GOOD, 100.0)


def _routed_well(experiment: ExperimentResults) -> CheckResult:
    return _explored(experiment, to_own_group, 99.0, 100.0)


def all_groups(result: CellArrays) -> NDArray[np.bool_]:
    """(T,): whether no group is empty, which the theorem assumes."""
    return np.array([len(set(trial)) == CLUSTERS for trial in result["groups"].tolist()])


def _explored(
    experiment: ExperimentResults, measure: Callable[[CellArrays], Array], limit: float, highest: float
) -> CheckResult:
    """Checks that values (T,) of the trials that the theorem is about are at least the limit.

    Trials without a value have NaN. The verdict names their mean after all of training beside it.
    """
    result = experiment.results["explored/cubic/s3"]
    values, covered = measure(result), all_groups(result)
    valid = covered & np.isfinite(values)
    if valid.sum() < 2:
        return CheckResult("undecided: fewer than two trials have an expert for each cluster")
    found = mean(values[valid])
    checked = at_least(Estimate(found.value, max(found.low, 0.0), min(found.high, highest)), limit)
    beside = f"in {valid.sum()} of {len(valid)} trials"
    longer = experiment.results.get("moe/cubic/s3")
    if longer is not None and experiment.fidelity == "print":
        beside += f", after training {np.nanmean(measure(longer)[covered]):.3g}"
    decision, _, reason = checked.verdict.partition(": ")
    return replace(checked, verdict=f"{decision}: {f'{reason}; ' if reason else ''}{beside}")


def to_own_group(result: CellArrays) -> Array:
    """(T,): the percentage of test samples that go to an expert of their cluster's group."""
    tables = result["test_dispatch"]
    clusters = np.arange(tables.shape[1], dtype=np.float64)
    belongs: NDArray[np.bool_] = result["groups"][:, None] == clusters[:, None]
    return 100 * (tables * belongs).sum(axis=(1, 2)) / tables.sum(axis=(1, 2))


def _groups_filled(experiment: ExperimentResults) -> CheckResult:
    filled = all_groups(experiment.results["moe/cubic/s3"]).astype(float)
    found = percentage(100 * filled)
    full = int(filled.sum())
    verdict = "holds" if full == len(filled) else f"partly: in {full} of {len(filled)} trials" if full else "fails"
    return CheckResult(verdict, found.value, found.interval)


def _allowed_start(experiment: ExperimentResults) -> CheckResult:
    return at_least(percentage(experiment.results["init/0.3"]["accuracy"]), 99.0)


def _explored_own(experiment: ExperimentResults) -> CheckResult:
    result = experiment.results["explored/cubic/s3"]
    return at_least(percentage(100 * _own(result["explored_accuracy"], result["groups"]).mean(axis=1)), GOOD)


def _explored_others(experiment: ExperimentResults) -> CheckResult:
    result = experiment.results["explored/cubic/s3"]
    errors = 100 - 100 * _others(result["explored_accuracy"], result["groups"]).mean(axis=1)
    return at_least(percentage(errors), 50 / CLUSTERS)


def _equal_loads(experiment: ExperimentResults) -> CheckResult:
    return _explored(experiment, group_balance, 0.5, 1.0)


def group_balance(result: CellArrays) -> Array:
    """(T,): least over largest load in groups of two or more used experts, averaged; NaN for a trial without such."""
    found: list[float] = []
    for load, group in zip(result["track_load"][:, -1], result["groups"], strict=True):
        members = [load[group == k] for k in range(CLUSTERS)]
        ratios = [float(each.min() / each.max()) for each in members if len(each) > 1 and each.max() > 0]
        found.append(float(np.mean(ratios)) if ratios else float("nan"))
    return np.array(found)


def _sum_kept(experiment: ExperimentResults) -> CheckResult:
    """The largest share of a router that its rows' sum has, over trials and moments."""
    share = float(experiment.results["figure1/cubic"]["track_router_sum"].max())
    return CheckResult("holds" if share <= _ROUNDING else "fails", share)


_EXPLORED = (
    "The theorem requires early stopping: as printed at the end of the exploration stage, T1 = σ0^½/η = 100 steps, "
    "with the value after all 4000 steps named beside it; as released where its own rule stops training. It assumes "
    "that no group is empty: of the trials in which none is. "
)
_ENSEMBLE = (
    "Single networks of 128 filters as in Table 7, where features and feature noise are alike; those of an ensemble "
    "have the same training samples and other initial weights. With --preset short linear, cubic and celu networks, "
    "five ensembles each, 2000 training samples (the paper's single networks have 16,000), 16,000 test samples; with "
    "--preset quick cubic ones, two ensembles, 500 samples. "
)
_SETTING = "Setting 3, in which α and γ are alike, as the theorem's proof and Theorem 4.1 have them. "

CHECKS: tuple[ClaimCheck, ...] = (
    ClaimCheck(
        claim(
            "theorem4.1-tight",
            "Theorem 4.1",
            "Where feature signal and feature noise are alike, no function that adds up its patches is better than "
            "87.5 %; we add that one attains it (accuracy of that one).",
            87.5,
            "Test accuracy in percent of the classifier of "
            "moesaic.papers.chen2022.theory.additive_classifiers.AdditiveClassifier, whose docstring has "
            "the proof, on ten draws of setting 3. Holds if the interval contains 87.5.",
        ),
        ("theory/additive/s3",),
        _tight,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "theorem4.1-uncovered",
            "Theorem 4.1",
            "Settings 1 and 2, in which feature noise has another distribution, are the more difficult ones "
            "(accuracy of the best additive classifier).",
            "more difficult",
            "Test accuracy in percent of the best additive classifier in setting 1; noise patches do not matter to "
            "it, so it is the same in setting 2. Holds if the interval is at or below 87.5, fails if it is above.",
        ),
        ("theory/additive/s1",),
        _uncovered,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "theorem4.1-ensemble",
            "Theorem 4.1",
            "An ensemble of single networks is bound by 87.5 % like each of them, since it adds up its patches as well "
            "(accuracy of the best).",
            87.5,
            f"{_ENSEMBLE}Test accuracy in percent of the mean output of 2, 4 and 8 networks; of the most accurate "
            "activation and number. Holds if the interval over ensembles is at or below 87.5, fails if it is above.",
        ),
        ("ensemble/",),
        _best_ensemble,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "theorem4.1-ensemble-gain",
            "Theorem 4.1",
            "A simple ensemble of the experts may not improve the performance (points that eight networks gain over "
            "one).",
            "no improvement",
            f"{_ENSEMBLE}Test accuracy of the mean output of eight networks less the mean accuracy of the eight, in "
            "points, of the activation that gains most. Holds if the interval over ensembles is at or below 1, fails "
            "if it is above.",
        ),
        ("ensemble/",),
        _ensemble_gain,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "lemma5.1",
            "Lemma 5.1",
            "Noise makes routing smooth: no probability of being routed changes by more than M² times the change of "
            "the scores (largest share of that bound).",
            1.0,
            "Exact probabilities for 4 · 4000 random pairs of scores of 2 to 16 experts and for pairs made to change "
            "most; change over bound. Holds if it is never above 1.",
        ),
        ("theory/smoothing",),
        _smooth,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "lemma5.1-sharp",
            "Our own",
            "The constant M² of Lemma 5.1 can be replaced by 2, and by nothing smaller (largest change of a "
            "probability over change of scores).",
            None,
            "As for Lemma 5.1. Holds if the largest is at most 2 and at least 1.98; "
            "moesaic.papers.chen2022.theory.smoothing has the proof.",
        ),
        ("theory/smoothing",),
        _smoother,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "theorem4.2-training",
            "Theorem 4.2",
            "The nonlinear mixture's training error becomes zero (percentage of training samples that are right).",
            100.0,
            f"{_SETTING}In the last step, noise included, mean over trials. Holds if all are right in every trial, "
            "fails below 99 on average.",
        ),
        ("moe/cubic/s3",),
        _trained,
    ),
    ClaimCheck(
        claim(
            "theorem4.2-test",
            "Theorem 4.2",
            "Its test error is nearly zero (test accuracy in percent).",
            100.0,
            f"{_SETTING}Mean over trials. Holds if the interval is above 99.",
        ),
        ("moe/cubic/s3",),
        _generalises,
    ),
    ClaimCheck(
        claim(
            "theorem4.2-groups",
            "Theorem 4.2",
            "Every cluster has an expert that leans to it from the start: none of the groups M_k is empty "
            "(percentage of trials).",
            100.0,
            "An expert's group is the cluster whose feature has the largest inner product with one of its filters "
            "before training. Eight experts, four clusters, setting 3. Holds if it is so in every trial, fails if in "
            "none.",
        ),
        ("moe/cubic/s3",),
        _groups_filled,
    ),
    ClaimCheck(
        claim(
            "theorem4.2-experts",
            "Theorem 4.2",
            "Each expert is good on the cluster of its group (percentage of experts).",
            100.0,
            f"{_SETTING}{_EXPLORED}Experts with at least 95 % test accuracy on all samples of the cluster to which "
            "they leaned before training, mean over trials. Holds if the interval is at or above 95, fails if it is "
            "below.",
        ),
        ("explored/cubic/s3",),
        _experts_good,
    ),
    ClaimCheck(
        claim(
            "theorem4.2-router",
            "Theorem 4.2",
            "The router sends a sample only to experts of its cluster's group (percentage of test samples).",
            100.0,
            f"{_SETTING}{_EXPLORED}Groups as before training; without noise as printed, with noise as released; mean "
            "over trials. Holds if the interval is at or above 99, fails if it is below.",
        ),
        ("explored/cubic/s3",),
        _routed_well,
    ),
    ClaimCheck(
        claim(
            "theorem4.2-start",
            "Theorem 4.2",
            "It works for initial weights of the size the theorem asks for, σ0 from d^(-1/3) to d^(-0.01) (test "
            "accuracy in percent).",
            100.0,
            "σ0 = 0.3, which for d = 50 is within 0.27 to 0.96; setting 3, the printed rates, 4000 steps, mean over "
            "trials. Holds if the interval is above 99. The theorem is about large d.",
        ),
        ("init/0.3",),
        _allowed_start,
        ("print",),
        chart_prefixes=("init/",),
    ),
    ClaimCheck(
        claim(
            "lemma5.2-own",
            "Lemma 5.2",
            "At the end of the exploration stage each expert is good on its own cluster (test accuracy in percent).",
            100.0,
            f"{_SETTING}After T1 = σ0^½/η = 100 steps, mean over experts and trials of the accuracy on all samples of "
            "the expert's group. Holds if the interval is above 95, fails if it is below.",
        ),
        ("explored/cubic/s3",),
        _explored_own,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "lemma5.2-others",
            "Lemma 5.2",
            "At that time each expert is bad on the other clusters, with an error of the order of 1/K (error in "
            "percent).",
            "of the order of 25 %",
            f"{_SETTING}Mean over experts, other clusters and trials. Holds if the interval is above half of 1/K, "
            "12.5 %, fails if it is below.",
        ),
        ("explored/cubic/s3",),
        _explored_others,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "lemmaE.1-sum",
            "Lemma E.1",
            "The rows of the router keep their sum, which is 0 at the start (norm of the sum over the sum of norms).",
            0.0,
            "Mixtures of four experts on 1600 samples (Figure 1). The largest share over all trials and all moments "
            f"recorded in 4000 steps. Holds if it is at most {_ROUNDING:g}, which is rounding, else fails. As printed: "
            "as released the gate is no softmax, and the lemma does not apply.",
        ),
        ("figure1/cubic",),
        _sum_kept,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "load-equal",
            "Equation 5.1",
            "Normalised gradients keep the experts of a group alike: the router gives them almost the same load "
            "(least load over largest).",
            "almost the same",
            f"{_SETTING}{_EXPLORED}Exact expected loads on 2000 samples; groups of two or more experts of which one "
            "gets any, mean over groups and trials. Holds if the interval is at or above 0.5, fails if it is below.",
        ),
        ("explored/cubic/s3",),
        _equal_loads,
    ),
)
