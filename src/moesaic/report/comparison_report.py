"""A comparison of models as a terminal table, as a self-contained HTML page and as entries of result.json.

The page is made from the runs in result.json and the charts in charts.json. It embeds styles and drawings
and forbids the browser to load anything (Content-Security-Policy); names of classes, groups and files are
escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from moesaic.files import write_atomic
from moesaic.intervals import Estimate
from moesaic.report import comparison_sentences as text
from moesaic.report.chart import Chart
from moesaic.report.chart_drawing import to_svg
from moesaic.report.formatting import number
from moesaic.report.templates import render
from moesaic.training.comparison_result import Comparison
from moesaic.training.paired_comparison import PairedComparison, accuracies, group_accuracies, paired_comparisons

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["derived_from", "print_comparison", "write_comparison_report"]

_Row: TypeAlias = tuple[str, list[str]]
"""The head of a row of a table, and its cells."""


def derived_from(found: Comparison) -> dict[str, Any]:
    """Verdicts, accuracies and paired comparisons, for result.json."""
    compared = paired_comparisons(found)
    return {
        "answers": [asdict(answer) for answer in text.answers(found, compared)],
        "verdicts": [text.verdict(found, pair) for pair in compared],
        "accuracies": {
            model.name: [asdict(estimate) for estimate in accuracies(found, model.name)] for model in found.models
        },
        "paired_comparisons": [asdict(pair) for pair in compared],
    }


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Prints the accuracies and the verdicts."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    compared = paired_comparisons(found)
    console.print(_table(found, compared))
    key = f"test accuracy in percent [95 % interval over {text.trial_count(found)} trials]"
    console.print(Text(key, style="bright_black"))
    for line in text.heads(found):
        console.print(Text(line, style="bright_black"))
    if found.ended:
        console.print(Text(f"no more trials were added because {found.ended}", style="bright_black"))
    for answer in text.answers(found, compared):
        console.print()
        console.print(Text.assemble((answer.question, "bold"), " ", answer.answer))
    for pair in compared:
        console.print()
        colour = "yellow" if pair.saving is None and pair.ahead is None else "green"
        console.print(Text(text.verdict(found, pair), style=colour))
        for line in _details(found, pair):
            console.print(Text(line))


def write_comparison_report(
    path: Path, found: Comparison, charts: Sequence[Chart], *, command: str = "", machine: str = ""
) -> None:
    """Writes the page to ``path`` atomically.

    ``command`` is the command line that reproduces it, ``machine`` the hardware of the last run.
    """
    compared = paired_comparisons(found)
    answers = text.answers(found, compared)
    verdicts = [
        {
            "label": text.outcome(pair),
            "decided": pair.saving is not None or pair.ahead is not None,
            "sentence": text.verdict(found, pair),
            "details": _details(found, pair),
        }
        for pair in compared
    ]
    page = render(
        "comparison.html",
        found=found,
        headline=_headline(found, answers) if len(compared) > 1 else verdicts[0]["sentence"],
        answers=answers[1:] if len(compared) > 1 else answers,
        frozen=text.on_frozen_backbones(found),
        trials=text.trial_count(found),
        verdicts=verdicts,
        charts={chart.id: chart for chart in charts},
        svg=partial(to_svg, variables=True),
        accuracy=_accuracy_rows(found, compared),
        leads=[f"lead of {pair.model}" for pair in compared],
        costs=_cost_rows(found, compared),
        work=next((pair.work for pair in compared if pair.work is not None), None),
        groups=_group_rows(found),
        heads=text.heads(found),
        meaning=text.meaning,
        recipe=_recipe(found),
        command=command,
        machine=machine or found.machine,
        number=number,
    )
    write_atomic(path, page.encode())


def _headline(found: Comparison, answers: Sequence[text.Answer]) -> str:
    """Which of several networks to use."""
    use = answers[0].answer
    return f"On {found.data or 'these images'}, use {use.replace('None of them', 'none of them')}"


def _details(found: Comparison, pair: PairedComparison) -> list[str]:
    """Sentences that follow the verdict."""
    lines: list[str] = []
    if pair.saving is not None or pair.ahead is None:
        lines.append(text.lead(found, pair))
    if pair.work is not None:
        lines.append(text.work(pair, pair.work, frozen=text.on_frozen_backbones(found)))
    else:
        lines.append(f"The training cost to the same accuracy is unknown: {pair.no_work}.")
    return lines


def _accuracy_rows(found: Comparison, compared: Sequence[PairedComparison]) -> list[_Row]:
    columns: list[Sequence[Estimate]] = [accuracies(found, model.name) for model in found.models]
    columns += [pair.leads for pair in compared]
    return [(f"{size:,}", [text.points(column[i]) for column in columns]) for i, size in enumerate(found.samples)]


def _cost_rows(found: Comparison, compared: Sequence[PairedComparison]) -> list[_Row]:
    """Size of each model, and its training cost to the accuracy that it has in common with the first model."""
    efforts = {effort.model: effort for each in compared if each.work for effort in each.work.efforts}
    rows: list[_Row] = []
    for model in found.models:
        effort = efforts.get(model.name)
        cells = [f"{model.parameters:,}", f"{model.routed_share:.0f} %", f"{model.macs / 1e6:,.1f} M"]
        if not text.on_frozen_backbones(found):
            cells.append("–" if effort is None else text.flops(effort.flops.value))
        cells.append("–" if effort is None else text.seconds(effort.seconds.value))
        rows.append((model.name, cells))
    return rows


def _group_rows(found: Comparison) -> list[_Row]:
    """Accuracy within each group, with the most labels."""
    if not found.groups:
        return []
    columns = [group_accuracies(found, model.name)[-1] for model in found.models]
    return [(group, [text.points(column[g]) for column in columns]) for g, group in enumerate(found.groups)]


def _recipe(found: Comparison) -> str:
    settings = {name: value for name, value in found.recipe.items() if value not in (None, "", (), [])}
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in settings.items())


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {each}" for name, each in cast("Mapping[str, Any]", value).items())
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
        for head, cells in _accuracy_rows(found, compared):
            table.add_row(head, *map(Text, cells))
        return table
    # with more models the columns would not fit
    for head in ("network", "accuracy", f"lead over {found.models[0].name}"):
        table.add_column(Text(head))
    names = [model.name for model in found.models]
    for head, cells in _accuracy_rows(found, compared):
        leads = ["", *cells[len(names) :]]
        for i, name in enumerate(names):
            table.add_row("" if i else head, Text(name), Text(cells[i]), Text(leads[i]))
    return table
