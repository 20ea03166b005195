"""A comparison of models as a table for the terminal, and as one HTML file that needs nothing else.

Everything shown follows from the runs in result.json and the charts in charts.json. The file carries its
styles and drawings in itself and forbids the browser to load anything else (Content-Security-Policy); names
of classes, groups and files are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.files import write_atomic
from moesaic.intervals import Estimate
from moesaic.report import comparison_words as words
from moesaic.report.chart import Chart
from moesaic.report.charts import to_svg
from moesaic.report.formatting import number
from moesaic.report.style import COLOURS, ON_DARK
from moesaic.report.templates import render
from moesaic.training.comparison_result import Comparison
from moesaic.training.paired_comparison import PairedComparison, accuracies, group_accuracies, paired_comparisons

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["derived_from", "print_comparison", "write_comparison_report"]


def derived_from(found: Comparison) -> dict[str, Any]:
    """What follows from the runs, for readers of result.json: verdicts, accuracies, and each model beside the first."""
    compared = paired_comparisons(found)
    return {
        "verdicts": [words.verdict(found, contrast) for contrast in compared],
        "accuracies": {
            model.name: [asdict(estimate) for estimate in accuracies(found, model.name)] for model in found.models
        },
        "contrasts": [asdict(contrast) for contrast in compared],
    }


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print the accuracies, and below them what they come to."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    compared = paired_comparisons(found)
    console.print(_table(found, compared))
    console.print(Text(f"test accuracy in percent [95 % interval over {found.trials} trials]", style="bright_black"))
    for contrast in compared:
        console.print()
        colour = "yellow" if contrast.saving is None and contrast.ahead is None else "green"
        console.print(Text(words.verdict(found, contrast), style=colour))
        for line in _details(found, contrast):
            console.print(Text(line))


def write_comparison_report(
    path: Path, found: Comparison, charts: Sequence[Chart], *, command: str = "", machine: str = ""
) -> None:
    """Write the page to ``path``; a reader never sees half a file.

    ``command`` tells how to run it again, ``machine`` what the last call ran on.
    """
    compared = paired_comparisons(found)
    verdicts = [_Verdict.of(found, contrast) for contrast in compared]
    text = render(
        "comparison.html",
        found=found,
        headline=next((each for each in verdicts if each.decided), verdicts[0]).sentence,
        verdicts=verdicts,
        drawings={chart.id: _Drawing.of(chart) for chart in charts},
        accuracy=_accuracy_rows(found, compared),
        leads=[f"lead of {contrast.model}" for contrast in compared],
        costs=_cost_rows(found, compared),
        work=next((contrast.work for contrast in compared if contrast.work is not None), None),
        groups=_group_rows(found),
        recipe=_recipe(found),
        command=command,
        machine=machine or found.machine,
        light=COLOURS,
        dark=ON_DARK,
        number=number,
    )
    write_atomic(path, text.encode())


@dataclass(frozen=True)
class _Verdict:
    outcome: str
    decided: bool
    sentence: str
    details: list[str]

    @classmethod
    def of(cls, found: Comparison, contrast: PairedComparison) -> _Verdict:
        decided = contrast.saving is not None or contrast.ahead is not None
        return cls(words.outcome(contrast), decided, words.verdict(found, contrast), _details(found, contrast))


@dataclass(frozen=True)
class _Drawing:
    title: str
    caption: str
    panels: list[str]
    legend: str
    columns: int

    @classmethod
    def of(cls, chart: Chart) -> _Drawing:
        panels = [to_svg(chart, i, variables=True) for i in range(len(chart.panels))]
        legend = to_svg(chart, "legend", variables=True) if chart.columns else ""
        return cls(chart.title, chart.caption, panels, legend, chart.columns or 2)


@dataclass(frozen=True)
class _Row:
    head: str
    cells: list[str]


def _details(found: Comparison, contrast: PairedComparison) -> list[str]:
    """What there is to say beside the verdict."""
    lines: list[str] = []
    if contrast.saving is not None or contrast.ahead is None:
        lines.append(words.lead(found, contrast))
    if contrast.saving is None and contrast.ahead is None:
        lines.append(f"Labels saved cannot be said: {contrast.open}.")
    if contrast.work is not None:
        lines.append(words.work(contrast, contrast.work))
    else:
        lines.append(f"What training takes to the same accuracy cannot be said: {contrast.no_work}.")
    return lines


def _accuracy_rows(found: Comparison, compared: Sequence[PairedComparison]) -> list[_Row]:
    columns: list[Sequence[Estimate]] = [accuracies(found, model.name) for model in found.models]
    columns += [contrast.leads for contrast in compared]
    return [_Row(f"{size:,}", [words.points(column[i]) for column in columns]) for i, size in enumerate(found.samples)]


def _cost_rows(found: Comparison, compared: Sequence[PairedComparison]) -> list[_Row]:
    """Each model's size, and what it takes to the level that it shares with the first model."""
    efforts = {effort.model: effort for each in compared if each.work for effort in each.work.efforts}
    rows: list[_Row] = []
    for model in found.models:
        effort = efforts.get(model.name)
        cells = [f"{model.parameters:,}", f"{model.routed_share:.0f} %", f"{model.macs / 1e6:,.1f} M"]
        cells += (
            ["–", "–"] if effort is None else [words.flops(effort.flops.value), words.seconds(effort.seconds.value)]
        )
        rows.append(_Row(model.name, cells))
    return rows


def _group_rows(found: Comparison) -> list[_Row]:
    """The accuracy within each group, with the most labels."""
    if not found.groups:
        return []
    columns = [group_accuracies(found, model.name)[-1] for model in found.models]
    return [_Row(group, [words.points(column[g]) for column in columns]) for g, group in enumerate(found.groups)]


def _recipe(found: Comparison) -> str:
    told = {name: value for name, value in found.recipe.items() if value not in (None, "", (), [])}
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in told.items())


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)  # pyright: ignore


def _table(found: Comparison, compared: Sequence[PairedComparison]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("labels", justify="right", no_wrap=True)
    if len(compared) == 1:
        for head in (*(model.name for model in found.models), "lead"):
            table.add_column(Text(head))
        for row in _accuracy_rows(found, compared):
            table.add_row(row.head, *map(Text, row.cells))
        return table
    # many columns would not have room beside each other
    for head in ("network", "accuracy", f"lead over {found.models[0].name}"):
        table.add_column(Text(head))
    names = [model.name for model in found.models]
    for row in _accuracy_rows(found, compared):
        leads = ["", *row.cells[len(names) :]]
        for i, name in enumerate(names):
            table.add_row("" if i else row.head, Text(name), Text(row.cells[i]), Text(leads[i]))
    return table
