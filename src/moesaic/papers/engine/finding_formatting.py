"""Findings grouped and formatted for tables and reports.

A claim is checked in up to three forms (`Fidelity`), and each check is a finding. Tables and reports show the findings
on one claim side by side, and the claims of one place in the paper under one heading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.findings import VERDICTS, Claim, Finding, Source
from moesaic.report.formatting import number

__all__ = [
    "FIDELITY_DESCRIPTIONS",
    "FIDELITY_LABELS",
    "ClaimFindings",
    "fidelities_by_verdict",
    "format_estimate",
    "format_measured",
    "format_published",
    "group_by_claim",
    "group_by_paper",
    "group_by_place",
    "verdict_reason",
]

FIDELITY_DESCRIPTIONS: dict[Fidelity, str] = {
    "print": "as the paper's text says",
    "released": "as its authors' code does",
    "best": "our own settings",
}
"""What each fidelity means, in the order in which reports show them."""

FIDELITY_LABELS: dict[Fidelity, str] = {"print": "as printed", "released": "as released", "best": "with our settings"}

ClaimFindings: TypeAlias = tuple[Finding, ...]
"""The findings on one claim, in the order of `FIDELITY_DESCRIPTIONS`."""


def group_by_paper(findings: Iterable[Finding], papers: Iterable[Source]) -> dict[Source, list[Finding]]:
    """Groups findings by paper, in the order in which papers first appear.

    A paper that ``papers`` does not have is shown by its id.
    """
    known = {paper.id: paper for paper in papers}
    grouped: dict[Source, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(known.get(finding.paper) or Source(finding.paper, finding.paper), []).append(finding)
    return grouped


def group_by_claim(findings: Iterable[Finding]) -> list[ClaimFindings]:
    """Groups findings by claim, in the order in which claims first appear."""
    claims: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        claims.setdefault((finding.paper, finding.id), []).append(finding)
    order = list(FIDELITY_DESCRIPTIONS)
    return [tuple(sorted(claim, key=lambda finding: order.index(finding.fidelity))) for claim in claims.values()]


def group_by_place(findings: Iterable[Finding]) -> dict[str, list[ClaimFindings]]:
    """Groups the claims of one paper by the place where it makes them: {"Figure 4": [...]}."""
    places: dict[str, list[ClaimFindings]] = {}
    for claim in group_by_claim(findings):
        places.setdefault(claim[0].where, []).append(claim)
    return places


def format_published(claim: Claim | Finding) -> str:
    """Formats the paper's value: a number with all its digits, text as it is, a dash if there is none."""
    if claim.published is None:
        return "–"
    return claim.published if isinstance(claim.published, str) else f"{claim.published:,.10g}".replace("-", "−")


def format_measured(finding: Finding, between: str = ", ", brackets: str = "[]") -> str:
    """Formats the measured value with its interval.

    >>> from dataclasses import replace
    >>> found = Finding("a", "p", "Figure 4", "s", "print", "quick", 60.0, 52.04, (48.31, 57.9), "r", "holds", 1.0)
    >>> format_measured(found)
    '52.0 [48.3, 57.9]'
    >>> format_measured(replace(found, interval=None)), format_measured(replace(found, measured=None, interval=None))
    ('52', '–')
    """
    return format_estimate(finding.measured, finding.interval, between, brackets)


def format_estimate(
    value: float | None, interval: tuple[float, float] | None, between: str = ", ", brackets: str = "[]"
) -> str:
    """Formats a value with its interval, both to the same digits; a dash if there is none.

    >>> format_estimate(52.04, (48.31, 57.9)), format_estimate(52.0, None), format_estimate(None, None)
    ('52.0 [48.3, 57.9]', '52', '–')
    """
    if value is None:
        return "–"
    if interval is None:
        return number(value)
    together = (value, *interval)
    text, low, high = (number(each, near=together) for each in together)
    return f"{text} {brackets[0]}{low}{between}{high}{brackets[1]}"


def verdict_reason(finding: Finding) -> str:
    """Returns the reason that follows the verdict; empty if there is none."""
    return finding.verdict.partition(": ")[2]


def fidelities_by_verdict(claim: ClaimFindings) -> list[tuple[str, list[Fidelity]]]:
    """Returns the verdicts on a claim, each with the fidelities that have it: [("holds", ["print", "best"]), ...]."""
    decisions: dict[str, list[Fidelity]] = {}
    for finding in claim:
        decisions.setdefault(finding.decision, []).append(finding.fidelity)
    return sorted(decisions.items(), key=lambda item: VERDICTS.index(item[0]))
