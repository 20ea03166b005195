"""Functions and texts that the claims on images share: accuracy curves, decision rules, how runs were shortened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Curve, Estimate
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.experiments_images import EPOCHS, SEEN, TRIALS, Arm, WideResult, runs_of, sizes_of
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Claim

__all__ = [
    "LENGTH",
    "SAVING_RULE",
    "Array",
    "ClaimCheck",
    "ExperimentResults",
    "accuracies",
    "cell_prefixes",
    "curve",
    "image_check",
    "saving",
]

Array: TypeAlias = NDArray[np.float64]
ExperimentResults: TypeAlias = paper.ExperimentResults[Any]
ClaimCheck: TypeAlias = paper.ClaimCheck[Any]

LENGTH = (
    f"With --preset full {EPOCHS} epochs, and the paper's N as far as the data hold them. With --preset short {EPOCHS} "
    f"epochs, or fewer once runs would see more than {SEEN[64]:,} images ({SEEN[32]:,} of CIFAR-10), both networks "
    f"alike; {TRIALS[0]} trials on smiling faces and on vehicles, {TRIALS[1]} on other tasks, where networks share "
    "images; accuracy after the last epoch."
)
"""Text of the rules on how runs were shortened."""

SAVING_RULE = "partly if it lies between the two, else undecided."
"""Text of the end of the rule of `saving`."""


def image_check(
    id: str,
    where: str,
    statement: str,
    published: float | str | None,
    rule: str,
    cell_prefixes: tuple[str, ...],
    evaluate: Callable[[ExperimentResults], CheckResult],
    fidelities: tuple[Fidelity, ...] = ("released",),
) -> ClaimCheck:
    """Returns the check of a claim on images."""
    claim = Claim(id, "chowdhury2023", where, statement, published, rule)
    return ClaimCheck(
        claim, cell_prefixes, evaluate, fidelities, missing="not run here: needs --preset short and a GPU"
    )


def cell_prefixes(*tasks: str) -> tuple[str, ...]:
    """Returns the name prefixes of the runs of both networks on some tasks."""
    return tuple(f"wide/{task}/{arm}/" for task in tasks for arm in ("wrn", "pmoe"))


def accuracies(runs: Sequence[WideResult]) -> Array:
    """Returns the test accuracies (T,) in percent."""
    return np.array([run.accuracy for run in runs])


def curve(experiment: ExperimentResults, task: str, arm: Arm) -> Curve:
    """Returns accuracy against samples."""
    sizes = sizes_of(experiment, task, arm)
    return sizes, np.stack([accuracies(runs_of(experiment, task, arm, samples)) for samples in sizes])


def saving(estimate: Estimate, limit: float) -> CheckResult:
    """Decides by `SAVING_RULE` whether a ratio is at most the limit."""
    if estimate.high <= limit:
        verdict = "holds"
    elif estimate.low >= 1:
        verdict = "fails"
    elif estimate.high >= 1:
        verdict = "undecided: 1 is in the interval"
    elif estimate.low > limit:
        verdict = f"partly: less is needed, but not as little as {limit:g}"
    else:
        verdict = f"undecided: less is needed, but {limit:g} is in the interval"
    return CheckResult(verdict, estimate.value, estimate.interval)
