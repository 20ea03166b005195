"""The rule of the study of heads: leads of the routed head over its peers, and verdicts.

``docs/heads.md`` states the rule; it was committed before anything was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate, mean, saved_labels, shared_level

__all__ = ["FEW", "LEVEL", "MARGIN", "PEERS", "holm", "verdicts"]

OURS = "routed"
PEERS = ("mean", "max", "conv", "attention")
FEW = (5, 10, 20)
"""Very few labels."""
LEVEL, MARGIN = 0.05, 3.0
"""Of the rule: the family-wise error, and the points within which heads are level."""
SWEEP = "dog or bird, 1 of "

Accuracies = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""By task, labels and head: the accuracy of each trial."""
Array = NDArray[np.float64]


def verdicts(accuracies: Accuracies, shares: Mapping[str, float]) -> dict[str, Any]:
    """Leads and verdicts over all label counts, over very few labels, and how leads change with the share."""
    counts = [int(count) for count in next(iter(accuracies.values()))]
    return {
        "leads": _leads(accuracies, counts),
        "few": _leads(accuracies, [count for count in counts if count in FEW] or counts),
        "slopes": _slopes(accuracies, shares, counts),
    }


def _leads(accuracies: Accuracies, counts: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for task, found in accuracies.items():
        for peer in PEERS:
            ours, theirs = _curve(found, OURS, counts), _curve(found, peer, counts)
            rows.append({"task": task, "peer": peer, **_tested((ours - theirs).mean(0))})
            level = shared_level((counts, ours), (counts, theirs))
            saving = None if level is None else saved_labels(level, (counts, ours), (counts, theirs))
            rows[-1] |= {"level": level, "saved": None if saving is None else _finite(saving)}
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["verdict"] = _verdict(row, adjusted)
    return rows


def _slopes(accuracies: Accuracies, shares: Mapping[str, float], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Points of lead for each halving of the share, over the tasks that differ in nothing else."""
    tasks = [task for task in accuracies if task.startswith(SWEEP)]
    if len(tasks) < 2:
        return []
    halvings = np.array([-np.log2(shares[task]) for task in tasks])
    centred = halvings - halvings.mean()
    rows: list[dict[str, Any]] = []
    for peer in PEERS:
        leads = np.stack(
            [
                (_curve(accuracies[task], OURS, counts) - _curve(accuracies[task], peer, counts)).mean(0)
                for task in tasks
            ]
        )
        rows.append({"peer": peer, **_tested(centred @ leads / (centred @ centred))})
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["grows"] = "yes" if adjusted < LEVEL and row["lead"] > 0 else "no" if adjusted < LEVEL else "undecided"
    return rows


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min((len(p) - rank) * p[i], 1.0))
        adjusted[i] = largest
    return adjusted


def _verdict(row: Mapping[str, Any], adjusted: float) -> str:
    if adjusted < LEVEL:
        return "fewer labels" if row["lead"] > 0 else "more labels"
    return "level" if row["low"] > -MARGIN and row["high"] < MARGIN else "undecided"


def _tested(differences: Array) -> dict[str, float]:
    """Mean with Student's 95 % interval, and the p-value of the paired t-test."""
    from scipy.special import stdtr

    found, trials = mean(differences), differences.size
    error = float(differences.std(ddof=1)) / trials**0.5
    t = abs(found.value) / error if error else (np.inf if found.value else 0.0)
    return {"lead": found.value, "low": found.low, "high": found.high, "p": float(2 * stdtr(trials - 1, -t))}


def _finite(found: Estimate) -> list[float | None]:
    """Value, low and high; None where a curve never gets there."""
    return [value if np.isfinite(value) else None for value in (found.value, found.low, found.high)]


def _curve(found: Mapping[str, Mapping[str, Sequence[float]]], head: str, counts: Sequence[int]) -> Array:
    """(counts, trials)."""
    return np.array([found[str(count)][head] for count in counts], dtype=np.float64)
