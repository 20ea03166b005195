"""What the claims on images have in common: runs as curves, how long they were, and rules that several claims share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moesaic.fidelity import Fidelity
from moesaic.intervals import Curve, Estimate
from moesaic.papers.chowdhury2023.image_cells import Arm, WideResult, runs_of, sizes_of
from moesaic.papers.chowdhury2023.image_plan import EPOCHS, SEEN, TRIALS
from moesaic.papers.engine import claims
from moesaic.papers.engine.claims import Judgement
from moesaic.papers.engine.findings import Claim

__all__ = ["LENGTH", "Array", "Study", "Test", "accuracies", "claimed", "curve", "needs", "saving"]

Array: TypeAlias = NDArray[np.float64]
Study: TypeAlias = claims.Study[Any]
Test: TypeAlias = claims.Test[Any]

LENGTH = (
    f"Runs of {EPOCHS} epochs, or of fewer once they would see more than {SEEN[64]:,} images "
    f"({SEEN[32]:,} of CIFAR-10), both networks alike; {TRIALS[0]} trials on smiling faces and on "
    f"vehicles, {TRIALS[1]} on other tasks, where networks share images; accuracy after the last epoch."
)
"""What rules say about how runs were shortened."""


def claimed(
    id: str,
    where: str,
    statement: str,
    published: float | str | None,
    rule: str,
    needs: tuple[str, ...],
    judge: Callable[[Study], Judgement],
    fidelities: tuple[Fidelity, ...] = ("released",),
) -> Test:
    """A claim on images and the way to decide on it."""
    claim = Claim(id, "chowdhury2023", where, statement, published, rule)
    return Test(claim, needs, judge, fidelities, missing="not run here: needs --preset full and a GPU")


def needs(*tasks: str) -> tuple[str, ...]:
    """The runs of both networks on some tasks."""
    return tuple(f"wide/{task}/{arm}/" for task in tasks for arm in ("wrn", "pmoe"))


def accuracies(runs: Sequence[WideResult]) -> Array:
    """(T,) in percent."""
    return np.array([run.accuracy for run in runs])


def curve(study: Study, task: str, arm: Arm) -> Curve:
    """Accuracy against samples."""
    sizes = sizes_of(study, task, arm)
    return sizes, np.stack([accuracies(runs_of(study, task, arm, samples)) for samples in sizes])


def saving(estimate: Estimate, limit: float) -> Judgement:
    """Holds if the whole interval is at or below the limit, fails if it is at or above 1, partly in between."""
    if estimate.high <= limit:
        verdict = "holds"
    elif estimate.low >= 1:
        verdict = "fails"
    elif estimate.high < 1:
        verdict = f"partly: less is needed, but not clearly as little as {limit:g}"
    else:
        verdict = "partly: undecided, 1 is in the interval"
    return Judgement(verdict, estimate.value, estimate.interval)
