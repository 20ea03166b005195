"""Terminal table of a layer benchmark: times against the dense layer, the chosen backend, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesaic.bench.layer_benchmark import LayerTimes, Pass, fastest_dense
from moesaic.ops.dispatch import BackendChoice

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["advice", "print_layer_times"]

_NAMES: dict[Pass, str] = {"forward": "forward pass", "step": "training step"}
_NOISE = 1.05
"""Smaller ratios count as equal."""
_MEBIBYTE = 2**20


def print_layer_times(
    title: str,
    rows: Sequence[LayerTimes],
    choice: BackendChoice,
    passes: Sequence[Pass],
    console: Console | None = None,
) -> None:
    """Prints the times, the backend that moesaic chooses and why, and whether routing is faster.

    >>> from rich.console import Console
    >>> from moesaic.bench.timing import Timing
    >>> dense = LayerTimes("dense convolution", None, forward={"channels_last": Timing(1.0, 0.9, 1.1)})
    >>> ours = LayerTimes("PatchMoE, torch", "torch", picked=True, forward={"channels_last": Timing(4.0, 3.9, 4.2)})
    >>> choice = BackendChoice("torch", "the only one that fits", {})
    >>> print_layer_times("A small layer", [dense, ours], choice, ["forward"], Console(width=80))
    A small layer
    <BLANKLINE>
      layer               forward pass   × dense
     ────────────────────────────────────────────
      dense convolution       1.000 ms      1.00
      PatchMoE, torch ←       4.000 ms      0.25
    <BLANKLINE>
    ← moesaic chooses torch: the only one that fits
    Routing is slower: a forward pass takes 4.0 times as long as that of the dense layer.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    memory = any(row.memory for row in rows)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layer")
    for what in passes:
        table.add_column(_NAMES[what], justify="right", no_wrap=True)
        table.add_column("× dense", justify="right", no_wrap=True)
    if memory:
        table.add_column("peak memory", justify="right")
    for row in rows:
        cells = [cell for what in passes for cell in _cells(row, what, fastest_dense(rows, what))]
        table.add_row(Text(f"{row.layer} ←" if row.picked else row.layer), *cells, *([_memory(row)] if memory else []))
    console.print(Text(title, style="bold"))
    console.print(table)
    lines = [f"← moesaic chooses {choice.name}: {choice.why}"]
    lines += [f"{row.layer}: {note}" for row in rows for note in row.notes]
    for line in (*lines, *advice(rows, passes)):
        console.print(line, highlight=False, markup=False)


def advice(rows: Sequence[LayerTimes], passes: Sequence[Pass]) -> list[str]:
    """Sentences on whether routing is faster than dense, and whether another backend would be faster.

    >>> from moesaic.bench.timing import Timing
    >>> dense = LayerTimes("dense convolution", None, step={"channels_last": Timing(3.0, 2.9, 3.1)})
    >>> ours = LayerTimes("PatchMoE, torch", "torch", picked=True, step={"channels_last": Timing(1.0, 0.9, 1.2)})
    >>> advice([dense, ours], ["step"])
    ['Routing is faster: a training step is 3.0 times as fast as that of the dense layer.']
    """
    sentences: list[str] = []
    for what in passes:
        dense = fastest_dense(rows, what)
        ours = next((row.best(what) for row in rows if row.picked and not row.compiled), None)
        if dense is None or ours is None:
            continue
        if ours > dense * _NOISE:
            verdict, pace = "Routing is slower", f"takes {ours / dense:.1f} times as long"
        elif dense > ours * _NOISE:
            verdict, pace = "Routing is faster", f"is {dense / ours:.1f} times as fast"
        else:
            verdict, pace = "No difference", "takes as long"
        sentences.append(f"{verdict}: a {_NAMES[what]} {pace} as that of the dense layer.")
        others = {row.backend: row.best(what) for row in rows if row.backend and not row.picked and not row.compiled}
        for name, time in others.items():
            if time is not None and time * _NOISE < ours:
                sentences.append(
                    f"Backend {name} is {ours / time:.1f} times as fast in the {_NAMES[what]}: "
                    f"use it with moesaic.backend({name!r})."
                )
    return sentences


def _cells(row: LayerTimes, what: Pass, dense: float | None) -> tuple[str, str]:
    time = row.best(what)
    if time is None:
        return "–", "–"
    return f"{time:.3f} ms" if time < 100 else f"{time:.0f} ms", "–" if dense is None else f"{dense / time:.2f}"


def _memory(row: LayerTimes) -> str:
    return "–" if row.memory is None else f"{(row.memory.peak - row.memory.held) / _MEBIBYTE:.1f} MiB"
