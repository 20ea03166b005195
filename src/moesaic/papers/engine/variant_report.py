"""Variants as a table in the terminal and as a page, next to the paper's own setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.files import write_atomic
from moesaic.papers.engine.finding_formatting import FIDELITY_LABELS, format_estimate, format_measured, format_published
from moesaic.papers.engine.findings import Source
from moesaic.papers.engine.variant_findings import (
    VariantCell,
    VariantFinding,
    VariantResults,
    rule_outcome,
    write_variants,
)
from moesaic.report.templates import render

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_variants", "write_variant_files"]

_NOTICE = "Other settings than the paper's: no verdict on the paper."


@dataclass(frozen=True)
class _Row:
    setting: str
    measured: str
    outcome: str


@dataclass(frozen=True)
class _CellTable:
    setting: str
    rows: list[tuple[str, str, str]]
    """Name of the cell, accuracy, and whether it is the paper's or the variant's."""
    in_terminal: bool
    """Whether the accuracies say what the rows of the claim do not."""


@dataclass(frozen=True)
class _Claim:
    paper: str
    id: str
    heading: str
    published: str
    rule: str
    rows: list[_Row]
    tables: list[_CellTable]
    """Cells that no claim before has shown."""


def print_variants(variants: VariantResults, console: Console) -> None:
    """Prints each claim with the paper's own setting and its variants below."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text("\nVariants", style="bold"))
    console.print(Text(f"{_NOTICE}\n"))
    for claim in _claims(variants):
        console.print(Text(claim.heading))
        lines = Table.grid(padding=(0, 2, 0, 0))
        for row in claim.rows:
            indent = 4 if row.setting.startswith(" ") else 2  # of a line that is wrapped, too
            setting = Padding(Text(row.setting.strip()), (0, 0, 0, indent))
            lines.add_row(setting, Text(row.measured, no_wrap=True), Text(row.outcome))
        console.print(lines)
        for table in claim.tables:
            if table.in_terminal:
                console.print(Text(f"  Test accuracy in percent, {table.setting}:"))
                cells = Table.grid(padding=(0, 2, 0, 0))
                for name, accuracy, whose in table.rows:
                    cells.add_row(Text(f"    {name}"), Text(accuracy), Text(whose))
                console.print(cells)
        console.print()


def write_variant_files(
    out: Path, variants: VariantResults, *, papers: Sequence[Source], command: str, machine: str
) -> Path:
    """Writes variants.json and variants.html atomically, and returns the path of the page."""
    write_variants(out / "variants.json", variants)
    titles = {paper.id: paper.title for paper in papers}
    page = render(
        "variants.html",
        package="moesaic.papers.engine",
        claims=_claims(variants),
        titles=titles,
        notice=_NOTICE,
        command=command,
        machine=machine,
    )
    write_atomic(out / "variants.html", page.encode())
    return out / "variants.html"


def _claims(variants: VariantResults) -> list[_Claim]:
    grouped: dict[tuple[str, str], list[VariantFinding]] = {}
    for each in variants:
        grouped.setdefault((each.finding.paper, each.finding.id), []).append(each)
    shown: set[tuple[str, str, str, tuple[VariantCell, ...]]] = set()
    claims: list[_Claim] = []
    for (paper, id), several in grouped.items():
        first = several[0].finding
        tables: list[_CellTable] = []
        for each in several:
            key = (paper, each.finding.fidelity, each.label, each.cells)
            if each.cells and key not in shown:
                shown.add(key)
                tables.append(_cell_table(each))
        heading = f"{first.where}: {first.statement}"
        claims.append(_Claim(paper, id, heading, format_published(first), first.rule, _rows(several), tables))
    return claims


def _rows(variants: Sequence[VariantFinding]) -> list[_Row]:
    rows: list[_Row] = []
    for fidelity, label in FIDELITY_LABELS.items():
        own = [each for each in variants if each.finding.fidelity == fidelity]
        if not own:
            continue
        finding = own[0].finding
        rows.append(_Row(label, format_measured(finding), rule_outcome(finding.verdict)))
        rows += [_Row(f"  {each.label}", format_estimate(each.measured, each.interval), each.outcome) for each in own]
    return rows


def _cell_table(variant: VariantFinding) -> _CellTable:
    rows = [
        (cell.name, format_estimate(cell.accuracy, cell.interval), "variant" if cell.changed else "paper's")
        for cell in variant.cells
    ]
    setting = f"{FIDELITY_LABELS[variant.finding.fidelity]}, {variant.label}"
    return _CellTable(setting, rows, variant.adds or variant.outcome.startswith("no rule"))
