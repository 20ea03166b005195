"""Claims and findings as plain data: what a paper states, what was measured, and the verdict.

A list of findings is the content of claims.json, from which tables, figures and reports are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moesaic.fidelity import Fidelity
from moesaic.files import read_records, write_json

__all__ = ["VERDICTS", "Claim", "Finding", "Source", "read_findings", "write_findings"]

VERDICTS = ("holds", "partly", "fails", "not run here")
"""What a verdict may be, from best to worst."""


@dataclass(frozen=True)
class Source:
    """A paper, as a report introduces it."""

    id: str
    title: str
    about: str = ""
    """Its experiments in a few sentences, for someone who has not read it."""


@dataclass(frozen=True)
class Claim:
    """Something a paper says, and the rule that will decide whether it holds, written before measuring."""

    id: str
    paper: str
    where: str
    """The place in the paper: "Figure 4", "Lemma 4.1"."""
    statement: str
    published: float | str | None
    """The paper's value, in the unit the statement names; a word where the paper shows a trend."""
    rule: str
    """What is measured, and when the claim holds, holds partly or fails."""


@dataclass(frozen=True)
class Finding:
    """A claim with what was measured: one object of claims.json."""

    id: str
    paper: str
    where: str
    statement: str
    fidelity: Fidelity
    preset: str
    published: float | str | None
    measured: float | None
    interval: tuple[float, float] | None
    """95 % confidence interval of ``measured``; an end that no number bounds is infinite."""
    rule: str
    verdict: str
    """ "holds", "partly", "fails", or "not run here: " and why."""
    seconds: float

    def __post_init__(self) -> None:
        if not any(self.verdict == known or self.verdict.startswith(f"{known}: ") for known in VERDICTS):
            raise ValueError(f"Finding {self.id}: verdict={self.verdict!r}; it must start with one of {VERDICTS}")

    @property
    def decision(self) -> str:
        """The verdict without its reason."""
        return self.verdict.partition(": ")[0]


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write claims.json; a reader never sees half a file."""
    write_json(path, [asdict(finding) for finding in findings])


def read_findings(path: Path) -> list[Finding]:
    """The findings of a claims.json."""
    return [_bounded(finding) for finding in read_records(path, Finding)]


def _bounded(finding: Finding) -> Finding:
    """Where the file has null for an end of the interval, the end is infinite."""
    if finding.interval is None:
        return finding
    low, high = finding.interval
    ends = (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
    return replace(finding, interval=ends)
