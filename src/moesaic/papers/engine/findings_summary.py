"""What a run found, in one sentence for each paper, and what was not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesaic.papers.engine.finding_formatting import (
    FIDELITY_LABELS,
    ClaimFindings,
    format_measured,
    group_by_claim,
    group_by_paper,
    verdict_reason,
)
from moesaic.papers.engine.findings import VERDICTS, Finding, Source
from moesaic.report.formatting import listed

__all__ = ["not_run_lines", "summary_sentences"]

_NOT_RUN = VERDICTS[-1]
_LISTED = 6
"""Claims that are named; of more, their number."""
_VERBS = {
    "holds": ("holds", "hold"),
    "partly": ("holds in part", "hold in part"),
    "undecided": ("is undecided", "are undecided"),
    "fails": ("fails", "fail"),
}
"""Of one claim, and of several."""


def summary_sentences(findings: Iterable[Finding], papers: Iterable[Source]) -> list[str]:
    """Returns a sentence for each paper: how many claims hold, and what was found on its main claim.

    >>> finding = Finding(
    ...     "a", "p", "Figure 4", "Routing needs fewer samples (share).", "print", "quick", 0.6, 0.4, (0.3, 0.5), "r",
    ...     "holds", 1.0,
    ... )
    >>> summary_sentences([finding], [Source("p", "A paper (Doe et al. 2023)", headline="a")])
    ['Doe et al. 2023: of 1 claim tested, 1 holds; the main one, that routing needs fewer samples (share), holds as
    printed (0.400 [0.300, 0.500]).']
    """
    return [_sentence(paper, own) for paper, own in group_by_paper(findings, papers).items()]


def not_run_lines(findings: Iterable[Finding]) -> list[str]:
    """Returns a line for each reason why claims have no verdict."""
    reasons: dict[str, list[str]] = {}
    for claim in group_by_claim(findings):
        if not _tested(claim):
            reasons.setdefault(verdict_reason(claim[0]), []).append(claim[0].id)
    return [
        f"{_NOT_RUN}: {_count(len(ids))}, {reason or 'without a reason'}{_names(ids)}"
        for reason, ids in reasons.items()
    ]


def _sentence(paper: Source, findings: Sequence[Finding]) -> str:
    claims = group_by_claim(findings)
    tested = [own for claim in claims if (own := _tested(claim))]
    if not tested:
        return f"{paper.short_title}: none of {_count(len(claims))} was run here."
    decisions = [_decision(claim) for claim in tested]
    counts = [
        f"{count} {verb if count == 1 else plural}"
        for decision, (verb, plural) in _VERBS.items()
        if (count := decisions.count(decision))
    ]
    text = f"{paper.short_title}: of {_count(len(tested))} tested, {listed(counts)}"
    main = next((claim for claim in tested if claim[0].id == paper.headline), None)
    if main is None:
        return f"{text}."
    found: dict[str, list[str]] = {}
    for each in main:
        found.setdefault(each.decision, []).append(f"{FIDELITY_LABELS[each.fidelity]} ({format_measured(each)})")
    forms = [f"{_VERBS[decision][0]} {listed(labels)}" for decision, labels in found.items()]
    return f"{text}; the main one, that {_inside(main[0].statement)}, {listed(forms)}."


def _tested(claim: ClaimFindings) -> ClaimFindings:
    return tuple(each for each in claim if each.decision != _NOT_RUN)


def _decision(claim: ClaimFindings) -> str:
    """The verdict on a claim in all forms that were tested: "partly" unless they agree."""
    decisions = {each.decision for each in claim}
    return decisions.pop() if len(decisions) == 1 else "partly"


def _inside(statement: str) -> str:
    """A statement as part of a sentence; acronyms stay capitals."""
    begin = statement[:1].lower() if statement[1:2].islower() else statement[:1]
    return f"{begin}{statement[1:]}".rstrip(".")


def _count(number: int) -> str:
    return f"{number} claim" if number == 1 else f"{number} claims"


def _names(ids: Sequence[str]) -> str:
    return f" ({', '.join(ids)})" if len(ids) <= _LISTED else ""
