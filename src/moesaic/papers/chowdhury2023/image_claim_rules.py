"""What the rules of the claims on images share: how runs were shortened, the decision on a saving, and the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from moesaic.intervals import Estimate
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023.experiments_images import EPOCHS, SEEN, TRIALS
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Claim

__all__ = [
    "LENGTH",
    "SAVING_RULE",
    "ClaimCheck",
    "ExperimentResults",
    "image_check",
    "saving",
]

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
