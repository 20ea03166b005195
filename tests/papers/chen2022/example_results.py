"""Results of Chen et al. 2022 that were never measured: made so that a claim's interval is where a test wants it."""

import math

import numpy as np
from numpy.typing import NDArray

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chen2022.claims_synthetic import CHECKS
from moesaic.papers.chen2022.experiments_synthetic import ExperimentResults, Plan, plan
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult

Array = NDArray[np.float64]
CLAIMS = {test.claim.id: test for test in CHECKS}

STUDENT = np.array([-1.0, 0.0, 1.0])
"""Three trials with this spread have the interval ± HALF."""
HALF = 4.30265 / math.sqrt(3)


def around(value: float, half: float = 0.001) -> Array:
    """(3,): trials whose interval is value ± half."""
    return value + half / HALF * STUDENT


def experiment(results: dict[str, CellArrays], fidelity: Fidelity = "print") -> ExperimentResults:
    cells: Plan = dict.fromkeys(results, next(iter(plan("quick", "print").values())))
    return ExperimentResults(cells, results, None, fidelity=fidelity)  # type: ignore[arg-type]


def evaluated(claim: str, results: dict[str, CellArrays], fidelity: Fidelity = "print") -> CheckResult:
    test, made = CLAIMS[claim], experiment(results, fidelity)
    assert test.can_run(made.plan), "the claim needs other cells than these"
    return test.evaluate(made)


def decision(result: CheckResult) -> str:
    return result.verdict.partition(":")[0]


def mixed(share: float, samples: float = 4000.0) -> Array:
    """(4, 8): experts 0 to 3 have a cluster each, of which the share goes to the next expert instead."""
    table = np.zeros((4, 8))
    for k in range(4):
        table[k, k], table[k, (k + 1) % 4] = (1 - share) * samples, share * samples
    return table


def share_with(entropy: float) -> float:
    """The share for which `mixed` has this entropy."""
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        found = -middle * math.log(middle) - (1 - middle) * math.log(1 - middle)
        low, high = (middle, high) if found < entropy else (low, middle)
    return low


def tables(entropy: float, half: float = 0.001) -> Array:
    """(3, 4, 8): dispatch of three trials whose entropies have the interval entropy ± half; up to log 2."""
    return np.stack([mixed(share_with(each)) for each in around(entropy, half)])


PURE = mixed(0.0)
BLIND = np.full((4, 8), 500.0)


def leads(ahead: str, behind: str, *points: tuple[float, float]) -> dict[str, CellArrays]:
    """In settings 1, 2, …: leads with the interval point ± half, on top of what differs from trial to trial."""
    results: dict[str, CellArrays] = {}
    for setting, (point, half) in enumerate(points, 1):
        base = 70 + 5 * np.array([0.3, -1.0, 0.7])
        results[f"{behind}/s{setting}"] = {"accuracy": base}
        results[f"{ahead}/s{setting}"] = {"accuracy": base + around(point, half)}
    return results
