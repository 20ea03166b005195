"""Terminal tables of the theory: bounds of the three models, and measured constants with their meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesaic.papers.chowdhury2023.theory.complexity_bounds import ComplexityRow, Setting, complexity_table
from moesaic.papers.chowdhury2023.theory.patches_per_expert_estimate import PatchDepth
from moesaic.papers.chowdhury2023.theory.pattern_separation import Separation
from moesaic.report.formatting import number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["show_complexity_table", "show_separation"]

_WIDE = 100
"""Terminal width from which on the table has a column of places in the paper."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def show_complexity_table(setting: Setting, console: Console | None = None) -> None:
    """Prints the bounds of the three models, and the savings of either pMoE over the CNN at a setting."""
    from rich.console import Console

    console = console or Console()
    rows = complexity_table(setting)
    letters = {letter: setting.letters[letter] for letter in "nlkdpcmBεδ"}
    letters |= {"δ_d": setting.delta_d, "δ_r": setting.delta_r}
    console.print("At", ", ".join(f"{letter}={number(value)}" for letter, value in letters.items()), highlight=False)
    console.print(_bounds(rows, places=console.width >= _WIDE))
    console.print(_savings(rows))
    console.print(
        "Orders of growth, their constants left out: a bound alone tells nothing, a ratio compares what the same "
        "proof guarantees for two models. The bounds are sufficient, not necessary.",
        style="bright_black",
        highlight=False,
    )


def show_separation(
    title: str, found: Separation, suggested: PatchDepth, true: PatchDepth, console: Console | None = None
) -> None:
    """Prints the constants that were measured on data, each with its meaning.

    ``suggested`` is the l estimated from samples and labels alone, ``true`` the one with known places.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    most = found.delta_r_quantiles
    console.print(Text(f"{title}\n", style="bold"))
    for name, value, meaning in (
        (
            "δ_d",
            number(found.delta_d),
            "the inner product of the class patterns: from −1 (opposite) to 1 (the same, classes cannot be told apart)",
        ),
        (
            "δ_r",
            number(found.delta_r),
            "the largest inner product, in size, of a patch that tells nothing with a class pattern: near 1, some such "
            f"patch looks like a pattern ({number(most[0.5])} for half of the patches, {number(most[0.95])} for 95 %)",
        ),
        (
            "δ",
            number(found.delta),
            "the separation 1/(1 − max(δ_d², δ_r²)) of eq. (9), 1 at best: the sample bounds grow with δ⁶",
        ),
        (
            "l*",
            str(found.l_star),
            "an expert that takes so many patches has the one that matters among them, by Definition D.3 "
            f"({_quantile(found, 0.95)} would do for 95 % of the samples)",
        ),
        (
            "l",
            str(suggested.l),
            "suggested patches per expert, from samples and labels alone: trained routers should then find the patch "
            f"that matters in {100 * suggested.coverage:.0f} % of all samples "
            f"(it takes {true.l}, when one knows where it is)",
        ),
    ):
        console.print(_explained(name, value, meaning))


def _explained(name: str, value: str, meaning: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=4)
    line.add_column(width=7, justify="right")
    line.add_column()
    line.add_row(Text(name, style="bold"), value, meaning)
    return line


def _quantile(found: Separation, share: float) -> int:
    return max(close.quantiles[share][0] for close in found.closeness)


def _bounds(rows: Sequence[ComplexityRow], *, places: bool) -> Table:
    table = _table("Bounds", "separate training", "joint training", "CNN", *(["where"] if places else []))
    for row in rows:
        formulas = [row.formulas[model] or "–" for model in ("separate", "joint", "cnn")]
        table.add_row(row.quantity, *formulas, *([row.where] if places else []))
    return table


def _savings(rows: Sequence[ComplexityRow]) -> Table:
    table = _table("CNN over pMoE", "separate training", "joint training")
    for row in rows:
        if any(saving is not None for saving in row.savings.values()):
            cells = (_saving(row.saving_formulas[model], row.savings[model]) for model in ("separate", "joint"))
            table.add_row(row.quantity, *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title)
    for column in columns:
        table.add_column(column, no_wrap=column == "CNN" or "training" in column)
    return table


def _saving(formula: str | None, value: float | None) -> str:
    return "–" if formula is None or value is None else f"{formula} = {_times(value)}"


def _times(value: float) -> str:
    """Formats large and small numbers as powers of ten."""
    if 1e-3 <= value < 1e6:
        return number(value)
    power = math.floor(math.log10(value))
    return f"{number(value / 10**power)}·10{str(power).translate(_SUPERSCRIPTS)}"
