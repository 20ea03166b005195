"""Draw a chart, one of the paper's figures with our numbers, so that it can be laid beside the paper's.

Lines carry error bars and markers, blocks are grey levels from black (0) to white (1). What a line
stands for decides its look everywhere: the CNN, separate training, joint training and our settings
keep their colour and marker from figure to figure. Colours are Okabe and Ito's, which colour-blind
eyes tell apart too; markers and dashes tell lines apart without any colour.

The same chart gives the same bytes: no dates, no random ids.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from moesaic.ledger import Blocks, Chart, Panel, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "draw", "to_svg", "write_figures"]

_ROLES = {
    "cnn": ("#D55E00", "s"),
    "separate": ("#0072B2", "o"),
    "joint": ("#009E73", "^"),
    "best": ("#CC79A7", "D"),
}
_OTHERS = (("#E69F00", "v"), ("#56B4E9", "P"), ("#8C8C8C", "X"), ("#0072B2", "*"), ("#D55E00", "p"), ("#009E73", "h"))
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 2, 1, 2)))
_INK, _LINE, _NOT_RUN = "#333333", "#BBBBBB", "#D6E6F2"

COLOURS = {
    "ink": _INK,
    "line": _LINE,
    "vermilion": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "grey": "#8C8C8C",
}
"""The colours that a page may want to exchange, for a dark background say: name, colour in the drawing."""

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

# inches
_PANEL = (4.4, 3.1)
_LEGEND_ROW = 0.19
_MOST_COLUMNS = 3
_LETTERS_PER_INCH = 13

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "legend.fontsize": 8.5,
    "legend.labelcolor": _INK,
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _LINE,
    "xtick.labelcolor": _INK,
    "xtick.labelsize": 8.5,
    "ytick.color": _LINE,
    "ytick.labelcolor": _INK,
    "ytick.labelsize": 8.5,
}


def draw(chart: Chart, panel: int | None = None) -> Figure:
    """The chart with its panels side by side, or one of them alone within the limits of all.

    >>> from moesaic.ledger import Series
    >>> line = Series("CNN", "cnn", (100, 300), (80.0, 90.0), spread=(2.0, 1.0))
    >>> panel = Panel("as printed", "training samples", "test accuracy (%)", (line,), level=95)
    >>> chart = Chart("figure-4", "chowdhury2023", "Figure 4", "Test accuracy", "Higher is better.", (panel,))
    >>> figure = draw(chart)
    >>> figure.savefig("figure-4.png")  # doctest: +SKIP
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    _check(chart)
    picked = list(chart.panels) if panel is None else [chart.panels[panel]]
    looks = _looks(chart.panels)
    columns = min(len(picked), _MOST_COLUMNS)
    rows = math.ceil(len(picked) / columns)
    width = columns * _PANEL[0] + 0.3
    labels = [label for label in looks if any(line.label == label for each in picked for line in each.series)]
    legend_columns = _legend_columns(labels, width)
    legend_rows = math.ceil(len(labels) / legend_columns) if labels else 0
    with matplotlib.rc_context(_STYLE):
        size = (width, rows * _PANEL[1] + 0.2 + legend_rows * _LEGEND_ROW)
        figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        grid: Any = figure.subplots(rows, columns, squeeze=False)
        axes: list[Axes] = list(grid.flat)
        for spare in axes[len(picked) :]:
            spare.remove()
        handles: dict[str, Any] = {}
        for i, (each, here) in enumerate(zip(picked, axes, strict=False)):
            alike = [other for other in chart.panels if _alike(each, other)]
            _frame(here, each, outer=i % columns == 0 or not _alike(each, picked[i - 1]))
            if each.blocks is not None:
                _draw_blocks(here, each.blocks, bar=i + 1 == len(picked))
            else:
                handles |= _draw_lines(here, each, alike, looks)
        if labels:
            # always in the chart's order, whichever panel a line is in
            _legend(figure, {label: handles[label] for label in labels}, legend_columns)
    return figure


def write_figures(folder: Path, charts: Iterable[Chart]) -> list[Path]:
    """Draw every chart into ``folder`` as PNG and as SVG, named by its id; each file appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for chart in charts:
        figure = draw(chart)
        for kind in ("png", "svg"):
            path = folder / f"{chart.id}.{kind}"
            write_whole(path, _rendered(figure, chart, kind))
            written.append(path)
    return written


def to_svg(chart: Chart, panel: int | None = None, *, variables: bool = False) -> str:
    """The chart, or one panel of it, as an SVG element to put into a page.

    Its ids begin with the chart's, so that several fit on one page. With ``variables`` the colours are
    CSS variables named after `COLOURS`, ``var(--chart-ink, #333333)``, and there is no background.
    """
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(_rendered(draw(chart, panel), chart, "svg", transparent=variables))
    prefix = chart.id if panel is None else f"{chart.id}-{panel}"
    for element in root.iter():
        for name, value in element.items():
            if name == "id":
                element.set(name, f"{prefix}-{value}")
            elif name == f"{{{_XLINK}}}href":
                element.set(name, re.sub("^#", f"#{prefix}-", value))
            elif name == "clip-path":
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
            elif name == "style" and variables:
                element.set(name, _with_variables(value))
    return ElementTree.tostring(root, encoding="unicode")


def _with_variables(style: str) -> str:
    for name, colour in COLOURS.items():
        style = re.sub(f": {colour}", f": var(--chart-{name}, {colour})", style, flags=re.IGNORECASE)
    # the page's own font; the one that the layout was made with is broader than most
    return re.sub(r"font-family: [^;]*;? ?", "", style)


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    dash: Any


def _check(chart: Chart) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", chart.id):
        raise ValueError(f"draw: chart id {chart.id!r} names a file; use letters, digits, - and _ such as 'figure-4'")
    if not chart.panels:
        raise ValueError(f"draw: chart {chart.id!r} has no panels; give it at least one")
    for panel in chart.panels:
        if panel.blocks is not None:
            rows, columns = len(panel.blocks.y), len(panel.blocks.x)
            found = sorted({len(row) for row in panel.blocks.values})
            if len(panel.blocks.values) != rows or found != [columns]:
                raise ValueError(
                    f"draw: blocks of {chart.id!r} have {len(panel.blocks.values)} rows of {found} values; "
                    f"{rows} y and {columns} x need {rows} rows of {columns}"
                )
        for line in panel.series:
            lengths = {len(line.x), len(line.y), len(line.x if line.spread is None else line.spread)}
            if len(lengths) > 1:
                raise ValueError(
                    f"draw: line {line.label!r} of {chart.id!r} has {len(line.x)} x and {len(line.y)} y; "
                    "x, y and spread must be equally long"
                )


def _looks(panels: Sequence[Panel]) -> dict[str, _Look]:
    """A look for every label. Lines of one role share its colour and differ by dash."""
    lines = [line for panel in panels for line in panel.series]
    strangers = list(dict.fromkeys(line.role for line in lines if line.role not in _ROLES))
    free = [look for look in _OTHERS if look[0] not in {_ROLES[line.role][0] for line in lines if line.role in _ROLES}]
    labels: dict[str, list[str]] = {}
    looks: dict[str, _Look] = {}
    for line in lines:
        if line.label in looks:
            continue
        if line.role in _ROLES:
            colour, marker = _ROLES[line.role]
        else:
            colour, marker = free[strangers.index(line.role) % len(free)]
        siblings = labels.setdefault(line.role, [])
        looks[line.label] = _Look(colour, marker, _DASHES[len(siblings) % len(_DASHES)])
        siblings.append(line.label)
    return looks


def _alike(one: Panel, other: Panel) -> bool:
    """Whether two panels share their axes."""
    same_kind = (one.blocks is None) == (other.blocks is None)
    return same_kind and (one.x_label, one.y_label, one.log_y) == (other.x_label, other.y_label, other.log_y)


def _frame(axes: Axes, panel: Panel, *, outer: bool) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(panel.x_label, parse_math=False)
    if outer:
        axes.set_ylabel(panel.y_label, parse_math=False)
    else:
        axes.tick_params(labelleft=False)


def _draw_lines(axes: Axes, panel: Panel, alike: Sequence[Panel], looks: dict[str, _Look]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    if panel.log_y:
        axes.set_yscale("log")
    axes.grid(axis="y", color=_LINE, alpha=0.35, linewidth=0.6)
    for line in panel.series:
        look = looks[line.label]
        handles[line.label] = axes.errorbar(
            line.x,
            line.y,
            yerr=line.spread,
            color=look.colour,
            marker=look.marker,
            linestyle=look.dash,
            linewidth=1.6,
            markersize=5,
            elinewidth=1,
            capsize=2.5,
            capthick=1,
        )
    _limit(axes, alike)
    ticks = _ticks([x for line in panel.series for x in line.x], axes.get_xlim())
    if ticks:
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    if panel.level is not None:
        axes.axhline(panel.level, color=_INK, linestyle=(0, (1, 1.5)), linewidth=1, zorder=1)
        axes.annotate(
            f"{panel.level:g}",
            (1, panel.level),
            (2, 0),
            ("axes fraction", "data"),
            "offset points",
            va="center",
            fontsize=8,
        )
    return handles


def _limit(axes: Axes, alike: Sequence[Panel]) -> None:
    """The limits that hold all lines of panels that share their axes."""
    lines = [line for panel in alike for line in panel.series]
    levels = [panel.level for panel in alike if panel.level is not None]
    spreads = [line.spread or (0.0,) * len(line.y) for line in lines]
    ends = [
        y + sign * s
        for line, spread in zip(lines, spreads, strict=True)
        for y, s in zip(line.y, spread, strict=True)
        for sign in (-1, 1)
    ]
    if alike[0].log_y:
        ends = [end for end in ends if end > 0]
    if alike[0].y_label.endswith("(%)"):
        ends = [min(max(end, 0.0), 100.0) for end in ends]  # a standard deviation may reach beyond what a share can be
    x = _span([each for line in lines for each in line.x])
    y = _span([*ends, *levels], logarithmic=alike[0].log_y)
    if x:
        axes.set_xlim(x)
    if y:
        axes.set_ylim(y)


def _span(values: Iterable[float], *, logarithmic: bool = False) -> tuple[float, float] | None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if logarithmic:
        room = (high / low) ** 0.05 if high > low else 1.5
        return low / room, high * room
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _ticks(values: Iterable[float], limits: tuple[float, float]) -> list[float]:
    """The measured places, but those too near to the one before to be labelled."""
    distance = 0.07 * (limits[1] - limits[0])
    ticks: list[float] = []
    for value in sorted(set(values)):
        if not ticks or value - ticks[-1] >= distance:
            ticks.append(value)
    return ticks


def _draw_blocks(axes: Axes, blocks: Blocks, *, bar: bool) -> None:
    from matplotlib import colormaps

    values = np.ma.masked_invalid(np.array(blocks.values, dtype=np.float64))
    grey = colormaps["gray"].with_extremes(bad=_NOT_RUN)
    mesh = axes.pcolormesh(values, cmap=grey, vmin=0, vmax=1, edgecolors=_LINE, linewidth=0.4)
    axes.set_xticks(np.arange(len(blocks.x)) + 0.5, [f"{x:g}" for x in blocks.x])
    axes.set_yticks(np.arange(len(blocks.y)) + 0.5, [f"{y:g}" for y in blocks.y])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(True)
    if bar:
        scale = axes.figure.colorbar(mesh, ax=axes, ticks=[0, 0.5, 1], fraction=0.06, pad=0.03)
        scale.ax.set_yticklabels(["none", "half", "all"])
        missing = "; blue: not run" if np.ma.is_masked(values) else ""
        scale.set_label(f"trials that succeed{missing}", size=8.5)
        scale.outline.set_edgecolor(_LINE)  # pyright: ignore[reportCallIssue]


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max((len(label) for label in labels), default=0) + 7  # the handle and the gap
    fitting = max(1, int(width * _LETTERS_PER_INCH / longest))
    rows = math.ceil(len(labels) / fitting)
    return math.ceil(len(labels) / rows) if rows else 1


def _legend(figure: Figure, handles: dict[str, Any], columns: int) -> None:
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _rendered(figure: Figure, chart: Chart, kind: str, *, transparent: bool = False) -> bytes:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.id}):
        if kind == "svg":
            bare = {"Creator": None, "Date": None, "Format": None, "Type": None}
            figure.savefig(file, format="svg", metadata=bare, transparent=transparent)
        else:
            figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
