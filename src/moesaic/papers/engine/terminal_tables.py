"""Findings and claims as tables in the terminal.

Each claim has one line per fidelity. Terminals with at least `_WIDE` columns show the claims in a column of their own;
narrower terminals, and files, show each claim as a heading above its lines. Colours repeat what the text says, and are
left out if the output is not a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moesaic.papers.engine.finding_formatting import (
    FIDELITY_DESCRIPTIONS,
    FIDELITY_LABELS,
    format_measured,
    format_published,
    group_by_claim,
    group_by_paper,
    verdict_reason,
)
from moesaic.papers.engine.findings import VERDICTS, Claim, Finding, Source

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from moesaic.papers.engine.finding_formatting import ClaimFindings

__all__ = ["GrowingTable", "show_claim_rules", "show_findings_table", "verdict_counts"]

_COLOURS = {"holds": "green", "partly": "yellow", "undecided": "blue", "fails": "red", "not run here": "bright_black"}
_WIDE = 100
_VERDICT_WIDTH, _MEASURED_WIDTH = len("undecided"), 20
"""Of the columns of a growing table; the claim has the rest. Longer verdicts break between their words."""


class GrowingTable:
    """A table that gets a row for each finding as soon as it is known.

    >>> from rich.console import Console
    >>> finding = Finding(
    ...     "samples", "p", "Figure 4", "Routing needs 60 % of the CNN's samples.", "print", "quick", 60.0, 52.04,
    ...     (48.3, 57.9), "holds below 70", "holds", 1.0,
    ... )
    >>> table = GrowingTable(Console(width=80), [Source("p", "A paper (Doe et al. 2023)")])
    >>> table.add(finding)
    verdict    measured [95 %]       claim
    holds      52.0 [48.3, 57.9]     Doe et al. 2023, Figure 4, as printed:
                                     Routing needs 60 % of the CNN's samples.
                                     Paper: 60
    """

    def __init__(self, console: Console, papers: Iterable[Source]) -> None:
        self.console = console
        """Where rows are printed."""
        self._papers = {paper.id: paper for paper in papers}
        self.rows = 0
        """Findings so far."""

    def add(self, finding: Finding) -> None:
        """Prints a row."""
        from rich.text import Text

        if not self.rows:
            self._print(*(Text(name, style="bright_black") for name in ("verdict", "measured [95 %]", "claim")))
        self.rows += 1
        paper = self._papers.get(finding.paper) or Source(finding.paper, finding.paper)
        where = "our own claim" if finding.where == "Our own" else f"{finding.where}"
        place = f"{paper.short_title}, {where}, {FIDELITY_LABELS[finding.fidelity]}: "
        published = f" Paper: {format_published(finding)}" if finding.published is not None else ""
        reason = f" ({verdict_reason(finding)})" if verdict_reason(finding) else ""
        claim = Text.assemble((place, "bold"), finding.statement, published, (reason, "bright_black"))
        self._print(_verdict(finding), Text(format_measured(finding)), claim)

    def _print(self, verdict: Text, measured: Text, claim: Text) -> None:
        from rich.text import Text

        gap, left = 2, _VERDICT_WIDTH + _MEASURED_WIDTH + 4
        widths = (_VERDICT_WIDTH, _MEASURED_WIDTH, max(self.console.width - left, _MEASURED_WIDTH))
        cells = [text.wrap(self.console, width) for text, width in zip((verdict, measured, claim), widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = Text(end="")
            for lines, width in zip(cells, widths, strict=True):
                part = lines[i].copy() if i < len(lines) else Text()
                part.rstrip()
                part.pad_right(width + gap - part.cell_len)
                line.append_text(part)
            line.rstrip()
            self.console.print(line, soft_wrap=True)


def show_findings_table(
    findings: Sequence[Finding], console: Console | None = None, papers: Iterable[Source] = ()
) -> None:
    """Prints the table, and below it the meaning of the fidelities and the number of verdicts of each kind.

    If the findings are on several papers, each paper has a table under its title from ``papers``.

    >>> from rich.console import Console
    >>> finding = Finding(
    ...     "samples", "chowdhury2023", "Figure 4", "joint training needs 60 % of the CNN's samples",
    ...     "print", "quick", 60.0, 52.04, (48.3, 57.9), "holds below 70", "holds", 1.0,
    ... )
    >>> show_findings_table([finding], Console(width=80))
    Figure 4: joint training needs 60 % of the CNN's samples
      paper       60
      print       52.0 [48.3, 57.9]     holds
    <BLANKLINE>
    print: as the paper's text says
    1 holds
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    grouped = group_by_paper(findings, papers)
    for paper, own in grouped.items():
        claims = group_by_claim(own)
        if len(grouped) > 1:
            console.print(Text(f"{paper.title}\n", style="bold underline"))
        for part in _wide(claims) if console.width >= _WIDE else _narrow(claims):
            console.print(part)
        if len(grouped) > 1:
            console.print(_counts(own), "", sep="\n")
    run = {finding.fidelity for finding in findings}
    described = [f"{fidelity}: {text}" for fidelity, text in FIDELITY_DESCRIPTIONS.items() if fidelity in run]
    if described:
        console.print(Text("; ".join(described)))
    console.print(Text.assemble("in all: " if len(grouped) > 1 else "", _counts(findings)))


def show_claim_rules(
    title: str,
    claims: Iterable[Claim],
    console: Console | None = None,
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Prints claims with the rules that decide them, and the ``parameters`` of their experiments by id.

    >>> from rich.console import Console
    >>> claim = Claim("samples", "p", "Figure 4", "joint training needs fewer samples", 60.0, "holds below 70")
    >>> show_claim_rules("A paper", [claim], Console(width=80))
    A paper
    <BLANKLINE>
    samples
      Figure 4: joint training needs fewer samples
      Paper: 60
      Rule: holds below 70
    <BLANKLINE>
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = console or Console()
    console.print(Text(f"{title}\n", style="bold"))
    before = ""
    for claim in claims:
        console.print(Text(claim.id, style="bold"))
        lines = [f"{claim.where}: {claim.statement}", f"Paper: {format_published(claim)}", f"Rule: {claim.rule}"]
        if known := (parameters or {}).get(claim.id):
            lines.append(f"Parameters: {'as above' if known == before else known}")
            before = known
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        console.print()


def verdict_counts(findings: Iterable[Finding]) -> dict[str, str]:
    """Returns the number of findings with each verdict as text: {"holds": "3 hold", "fails": "1 fails"}."""
    decisions = [finding.decision for finding in findings]
    counts: dict[str, str] = {}
    for decision in VERDICTS:
        count = decisions.count(decision)
        if count:
            plural = {"holds": "hold", "fails": "fail"}.get(decision, decision)
            counts[decision] = f"{count} {decision if count == 1 else plural}"
    return counts


def _counts(findings: Iterable[Finding]) -> Text:
    from rich.text import Text

    counts = [Text(text, style=_COLOURS[decision]) for decision, text in verdict_counts(findings).items()]
    return Text(", ").join(counts) if counts else Text("no claims")


def _wide(claims: Sequence[ClaimFindings]) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("Claim", ratio=1)
    table.add_column("Paper", max_width=22)
    for name in ("As", "Measured [95 %]", "Verdict"):
        table.add_column(name, no_wrap=True)
    for i, claim in enumerate(claims):
        if i:
            table.add_row()
        lines = [
            Text("\n").join(column)
            for column in zip(
                *((Text(each.fidelity), Text(format_measured(each)), _verdict(each)) for each in claim), strict=True
            )
        ]
        table.add_row(_statement(claim), Text(format_published(claim[0])), *lines)
    yield table
    reasons: dict[str, list[str]] = {}
    for each in (finding for claim in claims for finding in claim if verdict_reason(finding)):
        reasons.setdefault(each.verdict, []).append(f"{each.id} ({each.fidelity})")
    for verdict, names in reasons.items():
        yield Text(f"{verdict} – {', '.join(names)}", style="bright_black")


def _narrow(claims: Sequence[ClaimFindings]) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    for claim in claims:
        yield _statement(claim)
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(width=10)
        lines.add_column(min_width=20)
        lines.add_column()
        lines.add_row("  paper", Text(format_published(claim[0])), "")
        for each in claim:
            reason = f": {verdict_reason(each)}" if verdict_reason(each) else ""
            lines.add_row(Text(f"  {each.fidelity}"), Text(format_measured(each)), _verdict(each) + reason)
        yield lines
        yield ""


def _statement(claim: ClaimFindings) -> Text:
    from rich.text import Text

    return Text.assemble((f"{claim[0].where}: ", "bold"), claim[0].statement)


def _verdict(finding: Finding) -> Text:
    from rich.text import Text

    return Text(finding.decision, style=_COLOURS[finding.decision])
