"""Findings as Markdown tables, for the documentation."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.finding_formatting import (
    FIDELITY_LABELS,
    format_measured,
    format_published,
    group_by_claim,
    group_by_paper,
    verdict_reason,
)
from moesaic.papers.engine.findings import CAUSES, Cause, Finding, Source, find_cause

__all__ = ["causes_legend", "causes_table", "markdown_table"]


def markdown_table(
    findings: Iterable[Finding], papers: Iterable[Source] = (), marked: Collection[tuple[str, Fidelity]] = ()
) -> str:
    """Returns a table per paper with a row per claim and a column per fidelity; titled if there are several papers.

    Findings whose id and fidelity are in ``marked`` have a dagger. Claims of our own, without published values, have
    no column for them.

    >>> from dataclasses import replace
    >>> found = Finding("a", "p", "Figure 4", "Fewer.", "print", "short", 0.6, 0.4, (0.3, 0.5), "r", "holds", 1.0)
    >>> print(markdown_table([found]))
    | where | claim | paper | as printed |
    | --- | --- | --- | --- |
    | Figure 4 | Fewer. | 0.6 | **holds**: 0.400 [0.300, 0.500] |
    >>> print(markdown_table([replace(found, verdict="fails: never")], marked={("a", "print")}).splitlines()[-1])
    | Figure 4 | Fewer. | 0.6 | **fails**†: 0.400 [0.300, 0.500]; never |
    """
    tables = [(paper.title, _table(own, marked)) for paper, own in group_by_paper(findings, papers).items()]
    if len(tables) == 1:
        return tables[0][1]
    return "\n\n".join(f"**{_plain(title)}**\n\n{table}" for title, table in tables)


def causes_table(findings: Iterable[Finding], causes: Collection[Cause]) -> str:
    """Returns a table with a row for each cause, in the order of the findings; findings of one cause share a row.

    >>> found = Finding("a", "p", "Figure 4", "Fewer.", "print", "short", 0.6, 0.7, None, "r", "fails: more", 1.0)
    >>> print(causes_table([found], [Cause("a", "print", "fails", "code", "As released it holds.")]))
    | where | claim | verdict | cause | evidence |
    | --- | --- | --- | --- | --- |
    | Figure 4 | `a` | fails as printed | code | As released it holds. |
    """
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        cause = find_cause(finding, causes)
        if cause is not None:
            verdicts = rows.setdefault((finding.where, f"`{finding.id}`", cause.kind, cause.evidence), [])
            verdicts.append(f"{finding.decision} {FIDELITY_LABELS[finding.fidelity]}")
    lines = [_row("where", "claim", "verdict", "cause", "evidence"), _row(*["---"] * 5)]
    for (where, id, kind, evidence), verdicts in rows.items():
        lines.append(_row(where, id, ", ".join(verdicts), kind, _plain(evidence)))
    return "\n".join(lines)


def causes_legend() -> str:
    """Returns what each kind of cause means, as a list.

    >>> print(causes_legend().splitlines()[-1])
    - **open**: not known
    """
    return "\n".join(f"- **{kind}**: {text}" for kind, text in CAUSES.items())


def _table(findings: Iterable[Finding], marked: Collection[tuple[str, Fidelity]]) -> str:
    claims = group_by_claim(findings)
    run = {str(each.fidelity) for claim in claims for each in claim}
    fidelities = cast("list[Fidelity]", [fidelity for fidelity in FIDELITY_LABELS if fidelity in run])
    own = all(each.published is None for claim in claims for each in claim)  # claims of no paper
    header = _row("where", "claim", *([] if own else ["paper"]), *(FIDELITY_LABELS[each] for each in fidelities))
    lines = [header, _row(*["---"] * (header.count("|") - 1))]
    for claim in claims:
        cells: dict[Fidelity, str] = {
            each.fidelity: _verdict(each, "†" if (each.id, each.fidelity) in marked else "") for each in claim
        }
        published = [] if own else [_plain(format_published(claim[0]))]
        verdicts = (cells.get(fidelity, "–") for fidelity in fidelities)
        lines.append(_row(claim[0].where, _plain(claim[0].statement), *published, *verdicts))
    return "\n".join(lines)


def _verdict(finding: Finding, mark: str) -> str:
    """The verdict with the measurement and the reason: **partly**: 0.4 [0.3, 0.5]; the reason."""
    reason = verdict_reason(finding)
    parts = [
        *([format_measured(finding)] if finding.measured is not None else []),
        *([_plain(reason)] if reason else []),
    ]
    return f"**{finding.decision}**{mark}: {'; '.join(parts) or '–'}"


def _plain(text: str) -> str:
    """Escapes asterisks: l* is not the start of emphasis."""
    return text.replace("*", r"\*")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
