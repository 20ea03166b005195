"""Claims and findings: what a paper states, what was measured, and the verdict.

claims.json is a list of findings. Tables and reports are made from it. Causes of the verdicts of the recorded run are
data of the papers, beside their claims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from moesaic.files import write_json
from moesaic.paper_fidelity import Fidelity
from moesaic.validated_json import read_records

__all__ = [
    "CAUSES",
    "RECORDED_PRESET",
    "VERDICTS",
    "Cause",
    "CauseKind",
    "Claim",
    "Finding",
    "GlossaryEntry",
    "Source",
    "find_cause",
    "needs_cause",
    "read_findings",
    "write_findings",
]

VERDICTS = ("holds", "partly", "undecided", "fails", "not run here")
"""The verdicts, from best to worst: some parts of the rule are met and others are not (partly), or the interval lies on
both sides of the limit (undecided)."""

CauseKind = Literal["paper", "code", "means", "open"]

CAUSES: Mapping[CauseKind, str] = MappingProxyType(
    {
        "paper": "the paper: its statement is wrong or too strong, or its text leaves out what the result needs",
        "code": "the authors' code: it differs from print, and the published result is that of the code",
        "means": "our means: too few trials, short runs, other data",
        "open": "not known",
    }
)
"""What keeps a claim from holding."""

RECORDED_PRESET = "short"
"""Preset of the run whose verdicts are committed, and have causes."""

GlossaryEntry: TypeAlias = tuple[str, str, str]
"""A term, the regular expression that finds it, and its definition."""


@dataclass(frozen=True)
class Cause:
    """Why a claim does not hold in the recorded run."""

    claim: str
    """Id of the claim."""
    fidelity: Fidelity
    decision: str
    """The verdict that it explains: "fails", "partly" or "undecided"."""
    kind: CauseKind
    evidence: str
    """A sentence that names the experiment or the fact that shows it; if it is open, what is known."""


@dataclass(frozen=True)
class Source:
    """A paper as the report introduces it."""

    id: str
    title: str
    about: str = ""
    """Summary of the experiments for readers who do not know the paper."""
    glossary: tuple[GlossaryEntry, ...] = ()
    """The paper's own definitions of terms."""
    headline: str = ""
    """Id of the paper's main claim."""
    causes: tuple[Cause, ...] = ()
    """Causes of the verdicts of the recorded run."""

    @property
    def short_title(self) -> str:
        """Authors and year, where the title has them in parentheses."""
        found = re.search(r"\(([^()]+ \d{4})\)", self.title)
        return found[1] if found else self.title


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the rule, written before any measurement, that decides whether it holds."""

    id: str
    paper: str
    where: str
    """Place in the paper: "Figure 4", "Lemma 4.1"."""
    statement: str
    published: float | str | None
    """The paper's value, in the unit that the statement names; text if the paper shows a trend."""
    rule: str
    """What is measured, and for which values the claim holds, partly holds, fails or is undecided."""


@dataclass(frozen=True)
class Finding:
    """A claim with its measurement and verdict: one object of claims.json."""

    id: str
    paper: str
    where: str
    statement: str
    fidelity: Fidelity
    preset: str
    published: float | str | None
    measured: float | None
    interval: tuple[float, float] | None
    """95 % confidence interval of ``measured``; its ends may be infinite."""
    rule: str
    verdict: str
    """One of `VERDICTS`, optionally with ": " and a reason."""
    seconds: float

    def __post_init__(self) -> None:
        if not any(self.verdict == known or self.verdict.startswith(f"{known}: ") for known in VERDICTS):
            raise ValueError(f"Finding {self.id}: verdict={self.verdict!r}; it must start with one of {VERDICTS}")

    @property
    def decision(self) -> str:
        """The verdict without the reason."""
        return self.verdict.partition(": ")[0]


def needs_cause(finding: Finding) -> bool:
    """Whether a finding was run and does not hold."""
    return finding.decision in VERDICTS[1:-1]


def find_cause(finding: Finding, causes: Iterable[Cause]) -> Cause | None:
    """Returns the cause of the recorded verdict, if the finding is of the same preset and has the same verdict.

    >>> found = Finding("a", "p", "Figure 4", "Fewer.", "print", "short", 0.6, 0.7, None, "r", "fails: more", 1.0)
    >>> cause = Cause("a", "print", "fails", "code", "As released it holds.")
    >>> find_cause(found, [cause]).kind, find_cause(replace(found, preset="quick"), [cause])
    ('code', None)
    """
    for cause in causes:
        if (cause.claim, cause.fidelity, cause.decision) == (finding.id, finding.fidelity, finding.decision):
            return cause if finding.preset == RECORDED_PRESET else None
    return None


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Writes claims.json atomically."""
    write_json(path, [asdict(finding) for finding in findings])


def read_findings(path: Path) -> list[Finding]:
    """Reads the findings from a claims.json."""
    return [_bounded(finding) for finding in read_records(path, Finding)]


def _bounded(finding: Finding) -> Finding:
    """Replaces the nulls of the file, read as NaN, by infinite ends of the interval."""
    if finding.interval is None:
        return finding
    low, high = finding.interval
    ends = (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
    return replace(finding, interval=ends)
