"""The findings as a table for README and documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moesaic.fidelity import Fidelity
from moesaic.papers.engine.findings import Finding, Source
from moesaic.papers.engine.verdict_text import BRIEFLY, by_claim, by_paper, measured, published

__all__ = ["markdown_table"]


def markdown_table(findings: Iterable[Finding], papers: Iterable[Source] = ()) -> str:
    """One row a claim, with a column for each fidelity that was run; a table a paper, headed where there are several.

    >>> found = Finding("a", "p", "Figure 4", "Fewer.", "print", "full", 0.6, 0.4, (0.3, 0.5), "r", "holds", 1.0)
    >>> print(markdown_table([found]))
    | where | claim | paper | as printed |
    | --- | --- | --- | --- |
    | Figure 4 | Fewer. | 0.6 | **holds**: 0.400 [0.300, 0.500] |
    """
    tables = [(paper.title, _table(own)) for paper, own in by_paper(findings, papers).items()]
    if len(tables) == 1:
        return tables[0][1]
    return "\n\n".join(f"**{_plain(title)}**\n\n{table}" for title, table in tables)


def _table(findings: Iterable[Finding]) -> str:
    claims = by_claim(findings)
    run = {str(each.fidelity) for claim in claims for each in claim}
    ways = cast("list[Fidelity]", [way for way in BRIEFLY if way in run])
    lines = [_row("where", "claim", "paper", *(BRIEFLY[way] for way in ways)), _row(*["---"] * (3 + len(ways)))]
    for claim in claims:
        cells: dict[Fidelity, str] = {each.fidelity: f"**{each.decision}**: {measured(each)}" for each in claim}
        said, statement = _plain(published(claim[0])), _plain(claim[0].statement)
        lines.append(_row(claim[0].where, statement, said, *(cells.get(way, "–") for way in ways)))
    return "\n".join(lines)


def _plain(text: str) -> str:
    """l* is no emphasis."""
    return text.replace("*", r"\*")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
