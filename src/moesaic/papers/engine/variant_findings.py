"""What variants measured, next to the paper's own setting: variants.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from moesaic.files import write_json
from moesaic.intervals import Estimate, percentage
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import Finding
from moesaic.papers.engine.paper import ClaimCheck, ExperimentResults
from moesaic.papers.engine.variants import Variant

__all__ = ["VariantCell", "VariantFinding", "VariantResults", "rule_outcome", "variant_finding", "write_variants"]

_OUTCOMES = {"holds": "rule met", "partly": "rule met in part", "undecided": "rule undecided", "fails": "rule not met"}
_NOT_COMPARABLE = "no rule: the settings that it compares became equal"


@dataclass(frozen=True)
class VariantCell:
    """A cell of a variant, or the paper's own cell beside it."""

    name: str
    """Such as "fig6/N=300/4"."""
    changed: bool
    """Whether it differs from the paper's setting."""
    accuracy: float | None
    """Mean test accuracy over the trials in percent; None if the cell measures none."""
    interval: tuple[float, float] | None
    """95 % confidence interval over the trials; None if there is one trial."""


@dataclass(frozen=True)
class VariantFinding:
    """A claim measured with other parameters: one object of variants.json. It is no verdict on the paper."""

    finding: Finding
    """The claim in the paper's own setting."""
    label: str
    """The parameters, such as "k=4"."""
    adds: bool
    """Whether the values were added to the paper's own."""
    measured: float | None
    interval: tuple[float, float] | None
    outcome: str
    """Whether the claim's rule would be met: "rule met", "rule met in part", "rule undecided", "rule not met", or why
    it is not known."""
    cells: tuple[VariantCell, ...]
    seconds: float


VariantResults: TypeAlias = Sequence[VariantFinding]


def rule_outcome(verdict: str) -> str:
    """Returns a verdict in words that cannot be taken for a verdict on the paper.

    >>> rule_outcome("undecided: 0 is in the interval")
    'rule undecided: 0 is in the interval'
    """
    decision, colon, reason = verdict.partition(": ")
    return f"{_OUTCOMES.get(decision, decision)}{colon}{reason}"


def variant_finding(
    check: ClaimCheck[Any],
    variant: Variant,
    experiment: ExperimentResults[Any],
    finding: Finding,
) -> VariantFinding:
    """Applies the check of a claim to the results of a variant."""
    missing = next(iter(experiment.missing_requirements.values()), None)
    if missing is not None:
        found = CheckResult(f"not run here: {missing}")
    elif not variant.comparable:
        found = CheckResult(_NOT_COMPARABLE)
    else:
        try:
            found = check.evaluate(experiment)
        except (ValueError, LookupError, ArithmeticError) as error:  # the rule was written for the paper's settings
            found = CheckResult(f"no rule: it does not apply to these settings ({error})")
    cells = [
        _measured_cell(name, experiment.results[name], changed=name in variant.changed)
        for name in sorted(variant.cells, key=_by_numbers)
        if name in experiment.results and (variant.adds or name in variant.changed)
    ]
    seconds = sum(experiment.seconds.get(name, 0.0) for name in variant.changed)
    return VariantFinding(
        finding,
        variant.label,
        variant.adds,
        found.measured,
        found.interval,
        rule_outcome(found.verdict),
        tuple(cells),
        round(seconds, 3),
    )


def _by_numbers(name: str) -> list[tuple[float, str]]:
    """Sorts k=4 before k=16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if part[:1].isdigit() else (-1.0, part) for part in parts]


def _measured_cell(name: str, result: Any, *, changed: bool) -> VariantCell:
    accuracy = _accuracy(result)
    interval = accuracy.interval if accuracy and accuracy.low < accuracy.high else None
    return VariantCell(name, changed, accuracy.value if accuracy else None, interval)


def _accuracy(result: Any) -> Estimate | None:
    """Returns the mean accuracy over trials; a cell of one trial has one number."""
    found: Any = (
        cast("Mapping[str, Any]", result).get("accuracy")
        if isinstance(result, Mapping)
        else getattr(result, "accuracy", None)
    )
    if found is None:
        return None
    values = np.atleast_1d(np.asarray(found, dtype=np.float64))
    if values.ndim > 1:
        return None
    return percentage(values) if len(values) > 1 else Estimate(float(values[0]), float(values[0]), float(values[0]))


def write_variants(path: Path, variants: VariantResults) -> None:
    """Writes variants.json atomically."""
    write_json(path, [_record(each) for each in variants])


def _record(variant: VariantFinding) -> dict[str, Any]:
    own = variant.finding
    return {
        "id": own.id,
        "paper": own.paper,
        "where": own.where,
        "statement": own.statement,
        "fidelity": own.fidelity,
        "preset": own.preset,
        "variant": variant.label,
        "measured": variant.measured,
        "interval": variant.interval,
        "outcome": variant.outcome,
        "paper_setting": {"measured": own.measured, "interval": own.interval, "verdict": own.verdict},
        "rule": own.rule,
        "cells": [asdict(cell) for cell in variant.cells],
        "seconds": variant.seconds,
    }
