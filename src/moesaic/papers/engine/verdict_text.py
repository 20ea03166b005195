"""Findings in words: numbers with as many digits as they deserve, verdicts in sentences, claims put together.

A claim is tried in up to three ways (`Fidelity`), and each try is a finding. Table and page show
the tries of one claim side by side, and the claims of one place in the paper under one heading.
"""

from __future__ import annotations

from collections.abc import Iterable

from moesaic.fidelity import Fidelity
from moesaic.papers.engine.findings import VERDICTS, Claim, Finding, Source
from moesaic.report.formatting import number

__all__ = [
    "BRIEFLY",
    "MEANING",
    "by_claim",
    "by_paper",
    "by_place",
    "measured",
    "published",
    "reason",
    "tries",
]

MEANING: dict[Fidelity, str] = {
    "print": "as the paper's text says",
    "released": "as its authors' code does",
    "best": "our own settings",
}
"""What a fidelity is, for someone who has not met the word."""

BRIEFLY: dict[Fidelity, str] = {"print": "as printed", "released": "as released", "best": "with our settings"}

Tries = tuple[Finding, ...]
"""The findings on one claim, in the order of `MEANING`."""


def by_paper(findings: Iterable[Finding], papers: Iterable[Source]) -> dict[Source, list[Finding]]:
    """The findings paper by paper, in the order in which papers first appear; who is not introduced has its id."""
    known = {paper.id: paper for paper in papers}
    found: dict[Source, list[Finding]] = {}
    for each in findings:
        found.setdefault(known.get(each.paper) or Source(each.paper, each.paper), []).append(each)
    return found


def by_claim(findings: Iterable[Finding]) -> list[Tries]:
    """The findings claim by claim, claims in the order in which they first appear."""
    claims: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        claims.setdefault((finding.paper, finding.id), []).append(finding)
    order = list(MEANING)
    return [tuple(sorted(claim, key=lambda each: order.index(each.fidelity))) for claim in claims.values()]


def by_place(findings: Iterable[Finding]) -> dict[str, list[Tries]]:
    """The claims of one paper under the place where they are made: {"Figure 4": [...]}."""
    places: dict[str, list[Tries]] = {}
    for claim in by_claim(findings):
        places.setdefault(claim[0].where, []).append(claim)
    return places


def published(claim: Claim | Finding) -> str:
    """What the paper says: its number with all its digits, or its word; a dash where it says nothing."""
    if claim.published is None:
        return "–"
    return claim.published if isinstance(claim.published, str) else f"{claim.published:,.10g}".replace("-", "−")


def measured(finding: Finding, between: str = ", ", brackets: str = "[]") -> str:
    """What was measured, with its interval.

    >>> from dataclasses import replace
    >>> found = Finding("a", "p", "Figure 4", "s", "print", "quick", 60.0, 52.04, (48.31, 57.9), "r", "holds", 1.0)
    >>> measured(found)
    '52.0 [48.3, 57.9]'
    >>> measured(replace(found, interval=None)), measured(replace(found, measured=None, interval=None))
    ('52', '–')
    """
    if finding.measured is None:
        return "–"
    if finding.interval is None:
        return number(finding.measured)
    together = (finding.measured, *finding.interval)
    value, low, high = (number(each, near=together) for each in together)
    return f"{value} {brackets[0]}{low}{between}{high}{brackets[1]}"


def reason(finding: Finding) -> str:
    """What follows the verdict's first word, if anything."""
    return finding.verdict.partition(": ")[2]


def tries(claim: Tries) -> list[tuple[str, list[Fidelity]]]:
    """The decisions on a claim, each with the fidelities that came to it: [("holds", ["print", "best"]), ...]."""
    decisions: dict[str, list[Fidelity]] = {}
    for finding in claim:
        decisions.setdefault(finding.decision, []).append(finding.fidelity)
    return sorted(decisions.items(), key=lambda each: VERDICTS.index(each[0]))
