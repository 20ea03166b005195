"""The findings as a table for the terminal: what the paper says, what was measured, does it hold.

One line a fidelity under every claim. Colours only repeat what words say, and where the output is no
terminal there are none. From `_WIDE` columns on the claims stand in a column of their own; narrower
terminals, and files, get each claim as a heading over its lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moesaic.papers.engine.findings import VERDICTS, Claim, Finding, Source
from moesaic.papers.engine.verdict_text import MEANING, by_claim, by_paper, measured, published, reason

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from moesaic.papers.engine.verdict_text import Tries

__all__ = ["print_claims", "print_rules", "verdict_counts"]

_COLOURS = {"holds": "green", "partly": "yellow", "fails": "red", "not run here": "bright_black"}
_WIDE = 100


def print_claims(findings: Sequence[Finding], console: Console | None = None, papers: Iterable[Source] = ()) -> None:
    """Print the table, and below it what its words mean and how many verdicts there are of each kind.

    Where there are claims of several papers, each has a table under its title, which ``papers`` tell.

    >>> from rich.console import Console
    >>> finding = Finding(
    ...     "samples", "chowdhury2023", "Figure 4", "joint training needs 60 % of the CNN's samples",
    ...     "print", "quick", 60.0, 52.04, (48.3, 57.9), "holds below 70", "holds", 1.0,
    ... )
    >>> print_claims([finding], Console(width=80))
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
    grouped = by_paper(findings, papers)
    for paper, own in grouped.items():
        claims = by_claim(own)
        if len(grouped) > 1:
            console.print(Text(f"{paper.title}\n", style="bold underline"))
        for part in _wide(claims) if console.width >= _WIDE else _narrow(claims):
            console.print(part)
        if len(grouped) > 1:
            console.print(_counted(own), "", sep="\n")
    ways = [f"{way}: {meaning}" for way, meaning in MEANING.items() if any(each.fidelity == way for each in findings)]
    if ways:
        console.print(Text("; ".join(ways)))
    console.print(Text.assemble("in all: " if len(grouped) > 1 else "", _counted(findings)))


def print_rules(title: str, claims: Iterable[Claim], console: Console | None = None) -> None:
    """Print claims with the rules that will decide them.

    >>> from rich.console import Console
    >>> claim = Claim("samples", "p", "Figure 4", "joint training needs fewer samples", 60.0, "holds below 70")
    >>> print_rules("A paper", [claim], Console(width=80))
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
    for claim in claims:
        console.print(Text(claim.id, style="bold"))
        for line in (f"{claim.where}: {claim.statement}", f"Paper: {published(claim)}", f"Rule: {claim.rule}"):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        console.print()


def verdict_counts(findings: Iterable[Finding]) -> dict[str, str]:
    """How many findings came to each decision, in words: {"holds": "3 hold", "fails": "1 fails"}."""
    decisions = [finding.decision for finding in findings]
    words: dict[str, str] = {}
    for decision in VERDICTS:
        count = decisions.count(decision)
        if count:
            plural = {"holds": "hold", "fails": "fail"}.get(decision, decision)
            words[decision] = f"{count} {decision if count == 1 else plural}"
    return words


def _counted(findings: Iterable[Finding]) -> Text:
    from rich.text import Text

    counts = [Text(text, style=_COLOURS[decision]) for decision, text in verdict_counts(findings).items()]
    return Text(", ").join(counts) if counts else Text("no claims")


def _wide(claims: Sequence[Tries]) -> Iterator[RenderableType]:
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
                *((Text(each.fidelity), Text(measured(each)), _verdict(each)) for each in claim), strict=True
            )
        ]
        table.add_row(_statement(claim), Text(published(claim[0])), *lines)
    yield table
    concerned: dict[str, list[str]] = {}
    for each in (finding for claim in claims for finding in claim if reason(finding)):
        concerned.setdefault(each.verdict, []).append(f"{each.id} ({each.fidelity})")
    for verdict, names in concerned.items():
        yield Text(f"{verdict} – {', '.join(names)}", style="bright_black")


def _narrow(claims: Sequence[Tries]) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    for claim in claims:
        yield _statement(claim)
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(width=10)
        lines.add_column(min_width=20)
        lines.add_column()
        lines.add_row("  paper", Text(published(claim[0])), "")
        for each in claim:
            why = f": {reason(each)}" if reason(each) else ""
            lines.add_row(Text(f"  {each.fidelity}"), Text(measured(each)), _verdict(each) + why)
        yield lines
        yield ""


def _statement(claim: Tries) -> Text:
    from rich.text import Text

    return Text.assemble((f"{claim[0].where}: ", "bold"), claim[0].statement)


def _verdict(finding: Finding) -> Text:
    from rich.text import Text

    return Text(finding.decision, style=_COLOURS[finding.decision])
