"""Our claims on routing by token, and their rules, written before any of the networks was trained at these lengths.

Leads are differences of test accuracy in points, trial by trial: networks of a trial have the same seed, images and
order of images. Their mean has Student's interval. Two margins decide:

- `LOSSLESS`, one point of accuracy: what `moesaic compare` calls level. With three trials whose differences have a
  standard deviation of 0.4 points, Student's interval is one point long on each side, so that the question can be
  settled; a margin much below would stay undecided.
- `COST_TOLERANCE`, one percent of multiply-adds: routers cost up to half a percent, and blocks and slots come in whole
  numbers. A network that costs more than that above its peer cannot be ahead at equal cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import mean
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import AHEAD_RULE, CheckResult, above_zero, ahead_everywhere, at_least
from moesaic.papers.engine.findings import Claim
from moesaic.papers.token_routing.continued_training import Stage, TokenResult
from moesaic.papers.token_routing.experiments import (
    COMPARED_COSTS,
    LABELS,
    SIZES,
    SPLIT_SHARE,
    UPCYCLE_SHARE,
    gpu_hours,
    plan,
)
from moesaic.training.group_sequential import LEVEL_MARGIN

__all__ = ["CHECKS", "COST_TOLERANCE", "LOSSLESS", "NOTE", "branch_stages", "label_accuracies", "stages"]

Array: TypeAlias = NDArray[np.float64]
ExperimentResults: TypeAlias = paper.ExperimentResults[Any]
ClaimCheck: TypeAlias = paper.ClaimCheck[Any]

LOSSLESS = LEVEL_MARGIN
"""Loss of accuracy, in points, that counts as none."""
COST_TOLERANCE = 0.01
"""Share by which the multiply-adds of networks of equal cost may differ."""


def stages(experiment: ExperimentResults, prefix: str) -> list[Stage]:
    """Returns the results of training a network from scratch, by trial."""
    return [run.base for run in _runs(experiment, prefix)]


def branch_stages(experiment: ExperimentResults, prefix: str, branch: str) -> list[Stage]:
    """Returns the results of a branch of that network's training, by trial."""
    return [run.branches[branch] for run in _runs(experiment, prefix)]


def label_accuracies(experiment: ExperimentResults, kind: str, arm: str) -> Array:
    """Returns test accuracies (sizes, T) for the numbers of `LABELS`."""
    return np.array([_accuracies(stages(experiment, f"labels/{kind}/{arm}/{samples}")) for samples in LABELS])


def _runs(experiment: ExperimentResults, prefix: str) -> list[TokenResult]:
    return experiment.series(prefix)[1]


def _accuracies(found: Sequence[Stage]) -> Array:
    return np.array([stage.accuracy for stage in found])


def _lead(ours: Sequence[Stage], theirs: Sequence[Stage]) -> Array:
    return _accuracies(ours) - _accuracies(theirs)


def _at_cost(found: CheckResult, ours: Sequence[float], theirs: Sequence[float], cost: str) -> CheckResult:
    """The check as it is, unless it holds at a higher cost than the peer's."""
    ratio = max(own / other for own, other in zip(ours, theirs, strict=True))
    if found.verdict != "holds" or ratio <= 1 + COST_TOLERANCE:
        return found
    return CheckResult(f"partly: at {ratio:.2f} times the peer's {cost}", found.measured, found.interval)


def _macs(found: Sequence[Stage]) -> list[int]:
    return [stage.macs for stage in found]


def _ahead(arm: str, peer: str) -> Callable[[ExperimentResults], CheckResult]:
    """Whether a network is ahead of a dense one of equal cost."""

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        ours, theirs = (stages(experiment, f"vit/{name}") for name in (arm, peer))
        return _at_cost(above_zero(mean(_lead(ours, theirs))), _macs(ours), _macs(theirs), "multiply-adds")

    return evaluate


def _skip_lossless(experiment: ExperimentResults) -> CheckResult:
    return at_least(mean(_lead(stages(experiment, "vit/skip"), stages(experiment, "vit/dense"))), -LOSSLESS)


def _split_lossless(experiment: ExperimentResults) -> CheckResult:
    split, tuned = (branch_stages(experiment, "vit/dense", name) for name in ("split", "tuned"))
    return at_least(mean(_lead(split, tuned)), -LOSSLESS)


def _split_ahead(experiment: ExperimentResults) -> CheckResult:
    split, narrow = branch_stages(experiment, "vit/dense", "split"), stages(experiment, "vit/narrow")
    return _at_cost(above_zero(mean(_lead(split, narrow))), _macs(split), _macs(narrow), "multiply-adds")


def _upcycled(kind: str) -> Callable[[ExperimentResults], CheckResult]:
    """Whether an upcycled network is ahead of dense ones of equal training compute, continued and from scratch."""

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        runs, longer = _runs(experiment, f"{kind}/dense"), stages(experiment, f"{kind}/longer")
        upcycled, continued = (branch_stages(experiment, f"{kind}/dense", name) for name in ("upcycled", "continued"))
        leads = [mean(_lead(upcycled, peer)) for peer in (continued, longer)]
        work = [run.training_macs("upcycled") for run in runs]
        least = [
            min(run.training_macs("continued"), other.training_macs) for run, other in zip(runs, longer, strict=True)
        ]
        return _at_cost(ahead_everywhere(leads, "ways to train longer"), work, least, "training compute")

    return evaluate


def _label_leads(experiment: ExperimentResults, kind: str) -> Array:
    """Leads (sizes, T) of expert choice over the dense network."""
    return label_accuracies(experiment, kind, "routed") - label_accuracies(experiment, kind, "dense")


def _labels(kind: str) -> Callable[[ExperimentResults], CheckResult]:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        return ahead_everywhere([mean(lead) for lead in _label_leads(experiment, kind)], "numbers of labels")

    return evaluate


def _labels_alike(experiment: ExperimentResults) -> CheckResult:
    difference = _label_leads(experiment, "vit") - _label_leads(experiment, "wrn")
    return at_least(mean(difference.mean(axis=0)), -LOSSLESS)


def _costs(experiment: ExperimentResults) -> CheckResult:
    macs = experiment.results["costs"]
    excess = [float(macs[arm] / macs[peer]) - 1 for arm, peer in COMPARED_COSTS]
    over = sum(each > COST_TOLERANCE for each in excess)
    many = len(excess)
    verdict = "holds" if not over else "fails" if over == many else f"partly: not in {over} of {many} comparisons"
    return CheckResult(verdict, 100 * max(excess))


_FULL, _SHORT = SIZES["full"], SIZES["short"]
_LENGTH = (
    "CIFAR-10, accuracy after the last epoch, networks of a trial with the same seed and order of images; "
    f"{_FULL.epochs} epochs and {_FULL.trials} trials with --preset full, {_SHORT.epochs} and {_SHORT.trials} with "
    "--preset short. "
)
_LABEL_LENGTH = (
    f"{LABELS[0]:,} and {LABELS[1]:,} labels of CIFAR-10, accuracy after the last epoch, networks of a trial with the "
    f"same labels, recipe and order of images; {_FULL.label_images:,} images seen and {_FULL.label_trials} trials with "
    f"--preset full, {_SHORT.label_images:,} and {_SHORT.label_trials} with --preset short. "
)
_SIGN = "Holds if the 95 % interval is above 0, fails if it is below, else undecided."
_LEVEL = (
    f"Holds if the 95 % interval is at or above −{LOSSLESS:g} point, fails if it is below, else undecided. A point is "
    "what counts as level elsewhere here, and what three trials can tell."
)
_EQUAL = f"Cannot hold where its multiply-adds are over {1 + COST_TOLERANCE:g} times the peer's."
_EQUAL_TRAINING = (
    f"Training compute is multiply-adds of the network times images seen, from the first epoch on; cannot hold where "
    f"it is over {1 + COST_TOLERANCE:g} times a peer's."
)
_MOE = "8 experts in every second block, each as wide as the MLP"
_LONGER = (
    f"Trained, upcycled, and trained for {100 * UPCYCLE_SHARE:.0f} % more epochs. Two peers: the same weights trained "
    "on without conversion, and a network from scratch with one schedule over all of these epochs."
)

NOTE = (
    "Token routing: the claims are our own. Hours on a GPU are estimates, from an assumed 10,000 images a second; "
    "nothing was timed on one."
)
"""Remark for the report."""


def _claimed(
    id: str,
    where: str,
    statement: str,
    rule: str,
    cell_prefixes: tuple[str, ...],
    evaluate: Callable[[ExperimentResults], CheckResult],
) -> ClaimCheck:
    claim = Claim(id, "token_routing", where, statement, None, rule)
    check = ClaimCheck(claim, cell_prefixes, evaluate, ("best",))
    short, full = (gpu_hours(check.cells(plan(preset, "best")).values()) for preset in ("short", "full"))
    needs = "needs --preset short or full, --device cuda and CIFAR-10"
    return replace(check, missing=f"not run here: {needs}, about {short:.1g} or {full:.1g} GPU hours (estimated)")


CHECKS: tuple[ClaimCheck, ...] = (
    _claimed(
        "equal-costs",
        "Costs",
        "Routed networks have as many multiply-adds as the dense ones that they are compared with (percent above, at "
        "most).",
        f"Multiply-adds of one image, counted: {', '.join(' and '.join(pair) for pair in COMPARED_COSTS)}. Shown: the "
        f"largest excess. Holds if it is at most {100 * COST_TOLERANCE:g} in every comparison, fails if in none, "
        "partly in between.",
        ("costs",),
        _costs,
    ),
    _claimed(
        "moe-ahead",
        "Equal cost",
        "Mixtures of experts in place of MLPs make a ViT more accurate at equal multiply-adds (lead over dense in "
        "points).",
        f"Expert choice at capacity 1, {_MOE}. {_LENGTH}{_SIGN} {_EQUAL}",
        ("vit/moe/", "vit/dense/"),
        _ahead("moe", "dense"),
    ),
    _claimed(
        "soft-moe-ahead",
        "Equal cost",
        "Soft mixtures of experts in place of MLPs make a ViT more accurate at equal multiply-adds (lead over dense in "
        "points).",
        f"Soft slots, seven for eight tokens, {_MOE}. {_LENGTH}{_SIGN} {_EQUAL}",
        ("vit/soft/", "vit/dense/"),
        _ahead("soft", "dense"),
    ),
    _claimed(
        "split-lossless",
        "Split",
        f"Split into experts that do half of the MLPs' multiply-adds, and trained for {100 * SPLIT_SHARE:.0f} % more "
        "epochs, a ViT loses nothing (lead over dense in points).",
        "All MLPs in 8 parts of hidden neurons that are active together, each on half of the tokens; the dense network "
        f"trains for as many more epochs from the same weights. {_LENGTH}{_LEVEL}",
        ("vit/dense/",),
        _split_lossless,
    ),
    _claimed(
        "split-ahead",
        "Split",
        "A ViT split to half of the MLPs' multiply-adds is more accurate than one with MLPs of half the width (lead in "
        "points).",
        f"Split as in split-lossless; the other trains from scratch for as many epochs in all. {_LENGTH}{_SIGN} "
        f"{_EQUAL}",
        ("vit/dense/", "vit/narrow/"),
        _split_ahead,
    ),
    _claimed(
        "skip-lossless",
        "Skipping",
        "With half of the tokens skipped in every second block a ViT loses nothing (lead over dense in points).",
        f"Trained from scratch, 74 % of the multiply-adds. {_LENGTH}{_LEVEL}",
        ("vit/skip/", "vit/dense/"),
        _skip_lossless,
    ),
    _claimed(
        "skip-ahead",
        "Skipping",
        "With half of the tokens skipped in every second block a ViT is more accurate than one with fewer blocks (lead "
        "in points).",
        f"The peer has 9 blocks in place of 12. {_LENGTH}{_SIGN} {_EQUAL}",
        ("vit/skip/", "vit/shallow/"),
        _ahead("skip", "shallow"),
    ),
    _claimed(
        "labels-vit",
        "Few labels",
        "Expert choice saves labels on a ViT: with as many labels it is more accurate (lead over dense in points, "
        "smallest).",
        f"{_MOE[0].upper()}{_MOE[1:]}. {_LABEL_LENGTH}{AHEAD_RULE}",
        ("labels/vit/",),
        _labels("vit"),
    ),
    _claimed(
        "labels-cnn",
        "Few labels",
        "Expert choice saves labels on a CNN: with as many labels it is more accurate (lead over dense in points, "
        "smallest).",
        f"WRN-10-10 and its pMoE, by the ViT's recipe. {_LABEL_LENGTH}{AHEAD_RULE}",
        ("labels/wrn/",),
        _labels("wrn"),
    ),
    _claimed(
        "labels-alike",
        "Few labels",
        "Expert choice helps a ViT with few labels as much as a CNN (the ViT's lead over dense less the CNN's, in "
        "points).",
        f"Mean of both numbers of labels; labels-cnn says whether there is a lead to equal. {_LABEL_LENGTH}{_LEVEL}",
        ("labels/",),
        _labels_alike,
    ),
    _claimed(
        "upcycle-vit",
        "Upcycling",
        "Upcycling a trained ViT is better than training it longer, at equal training compute (lead in points, "
        "smallest).",
        f"{_LONGER} {_MOE[0].upper()}{_MOE[1:]}. {_LENGTH}{AHEAD_RULE} {_EQUAL_TRAINING}",
        ("vit/dense/", "vit/longer/"),
        _upcycled("vit"),
    ),
    _claimed(
        "upcycle-resnet",
        "Upcycling",
        "Upcycling a trained ResNet-20 is better than training it longer, at equal training compute (lead in points, "
        "smallest).",
        f"WRN-22-1, the pre-activation ResNet-20. {_LONGER} 8 experts for the last convolution of each block of the "
        f"last group. {_LENGTH}{AHEAD_RULE} {_EQUAL_TRAINING}",
        ("resnet/",),
        _upcycled("resnet"),
    ),
)
