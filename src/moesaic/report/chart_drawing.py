"""Draws charts with matplotlib: layout of panels, legend, PNG and SVG files.

`chart_panels` draws the content of a panel, `chart_style` defines colours. The files are reproducible: they have
no dates and no random ids.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from moesaic.files import write_atomic
from moesaic.report.chart import Chart, Panel, Regions
from moesaic.report.chart_panels import draw_blocks, draw_counts, draw_lines, draw_points
from moesaic.report.chart_style import COLOURS, DATA_ID, MAX_ROLES, ON_DARK, RC_PARAMS, line_styles, role_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "figure_name", "panel_width", "to_svg", "write_figures"]

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

# inches
_SIZES = {1: (4.4, 3.1), 2: (4.4, 3.1), 3: (3.3, 2.5)}
_SMALL = (2.3, 1.75)
_COUNTS_ROW, _COUNTS_FRAME = 0.32, 1.0
_ROW_TITLE = 0.3
_LEGEND_ROW = 0.19
_MAX_COLUMNS = 3
_LETTERS_PER_INCH = 13


def draw(chart: Chart, panel: int | Literal["legend"] | None = None) -> Figure:
    """Draws the chart with all panels, or a single panel with the axis limits of all.

    If the chart has ``columns``, single panels have no legend; it is the separate figure "legend".

    >>> from moesaic.report.chart import Series
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
    alone = isinstance(panel, int)
    picked = [chart.panels[panel]] if isinstance(panel, int) else list(chart.panels)
    columns = 1 if alone else chart.columns or min(len(picked), _MAX_COLUMNS)
    rows = [picked[i : i + columns] for i in range(0, len(picked), columns)]
    titles = () if alone else chart.row_titles
    width, height = _panel_size(chart)
    heights = [max(_height(each, height) for each in row) for row in rows]
    wide = width * columns + (0 if alone and chart.columns else 0.3)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        axes = _grid(figure, rows, heights, columns, titles)
        handles = _fill(axes, picked, chart, columns)
        size = sum(heights) + 0.2 + _ROW_TITLE * len(titles)
        if panel == "legend":
            figure.clear()
            wide, size = _SIZES[1][0], 0.1
        if handles and not (alone and chart.columns):
            legend_columns = _legend_columns(list(handles), wide)
            size += math.ceil(len(handles) / legend_columns) * _LEGEND_ROW
            place = "center" if panel == "legend" else "outside lower center"
            style: dict[str, Any] = {"ncols": legend_columns, "frameon": False, "handlelength": 2.6}
            for text in figure.legend(list(handles.values()), list(handles), loc=place, **style).get_texts():
                text.set_parse_math(False)
        figure.set_size_inches(wide, size)
    return figure


def figure_name(chart: Chart, kind: str) -> str:
    """File name of a chart among the figures of a run: "chowdhury2023/figure-4.png"."""
    return f"{chart.paper}/{chart.id}.{kind}"


def panel_width(chart: Chart) -> float:
    """Width of one panel in inches."""
    return _panel_size(chart)[0]


def write_figures(folder: Path, charts: Iterable[Chart]) -> list[Path]:
    """Draws each chart as ``folder``/paper/id.png and .svg; files are written atomically."""
    charts = list(charts)
    names = [figure_name(chart, "png") for chart in charts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"write_figures: two charts would both be {twice[0]}; give them different ids")
    written: list[Path] = []
    for chart in charts:
        figure = draw(chart)
        for kind in ("png", "svg"):
            path = folder / figure_name(chart, kind)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _rendered(figure, chart, kind))
            written.append(path)
    return written


def to_svg(chart: Chart, panel: int | Literal["legend"] | None = None, *, variables: bool = False) -> str:
    """Returns the chart, one panel, or its legend as an SVG element for a page.

    Ids start with the ids of paper and chart, so that a page may have several charts. With ``variables`` ink and
    thin lines are CSS variables, ``var(--chart-ink, #333333)``, and there is no background; colours that stand for
    a line, a group of points or a value stay.
    """
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(_rendered(draw(chart, panel), chart, "svg", transparent=variables))
    prefix = f"{chart.paper}-{chart.id}" + ("" if panel is None else f"-{panel}")
    if variables:
        _use_variables(root)
    for element in root.iter():
        for name, value in element.items():
            if name == "id":
                element.set(name, f"{prefix}-{value}")
            elif name == f"{{{_XLINK}}}href":
                element.set(name, re.sub("^#", f"#{prefix}-", value))
            elif name == "clip-path":
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
    return ElementTree.tostring(root, encoding="unicode")


def _use_variables(element: ElementTree.Element, *, is_data: bool = False) -> None:
    """Replaces ink in all styles below by variables, except for data: a cell of value 0.2 is as grey as ink."""
    is_data = is_data or element.get("id", "").startswith(DATA_ID)
    style = element.get("style")
    if style is not None:
        # the font of the page; the font of the layout is wider than most
        style = re.sub(r"font-family: [^;]*;? ?", "", style)
        for name in () if is_data else ON_DARK:
            colour = COLOURS[name]
            style = re.sub(f": {colour}", f": var(--chart-{name}, {colour})", style, flags=re.IGNORECASE)
        element.set("style", style)
    for child in element:
        _use_variables(child, is_data=is_data)


def _check(chart: Chart) -> None:
    for what, name in (("id", chart.id), ("paper", chart.paper)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(
                f"draw: chart {what} {name!r} names a file; use letters, digits, - and _ such as 'figure-4'"
            )
    if not chart.panels:
        raise ValueError(f"draw: chart {chart.id!r} has no panels; give it at least one")
    if chart.columns is not None and chart.columns < 1:
        raise ValueError(f"draw: chart {chart.id!r} has columns={chart.columns}; it must be at least 1, or None")
    rows = math.ceil(len(chart.panels) / (chart.columns or 1))
    if chart.row_titles and (chart.columns is None or len(chart.row_titles) != rows):
        raise ValueError(
            f"draw: chart {chart.id!r} has {len(chart.row_titles)} row titles for {len(chart.panels)} panels with "
            f"columns={chart.columns}; it needs columns, and a title for each row"
        )
    if len(role_colours([each for each in chart.panels if each.points is not None])) > MAX_ROLES:
        raise ValueError(f"draw: points of {chart.id!r} have more roles than there are colours, {MAX_ROLES}")
    for panel in chart.panels:
        kinds = [bool(panel.series), panel.blocks is not None, panel.counts is not None, panel.points is not None]
        if sum(kinds) > 1:
            raise ValueError(
                f"draw: panel {panel.title!r} of {chart.id!r} has more than one of lines, blocks, counts and points; "
                "use a panel for each"
            )
        _check_panel(panel, f"of {chart.id!r}")


def _check_panel(panel: Panel, of: str) -> None:
    if panel.blocks is not None:
        _check_rows("blocks", of, panel.blocks.values, len(panel.blocks.y), len(panel.blocks.x))
    if panel.counts is not None:
        _check_rows("counts", of, panel.counts.values, len(panel.counts.rows), len(panel.counts.columns))
        if any(value < 0 for row in panel.counts.values for value in row):
            raise ValueError(f"draw: counts {of} are negative; they must be at least 0")
    for line in panel.series:
        lengths = {len(line.x), len(line.y), len(line.x if line.spread is None else line.spread)}
        if len(lengths) > 1:
            raise ValueError(
                f"draw: line {line.label!r} {of} has {len(line.x)} x and {len(line.y)} y; "
                "x, y and spread must be equally long"
            )
    if panel.points is not None:
        for group in panel.points.groups:
            if len(group.x) != len(group.y):
                raise ValueError(f"draw: group {group.label!r} {of} has {len(group.x)} x and {len(group.y)} y")
        if panel.points.regions is not None:
            _check_regions(panel.points.regions, of)


def _check_regions(regions: Regions, of: str) -> None:
    for what, rows in (("values", regions.values), ("scores", regions.scores)):
        if rows:
            _check_rows(f"{what} of regions", of, rows, len(regions.y), len(regions.x))
    beyond = [value for row in regions.values for value in row if not -1 <= value < len(regions.roles)]
    if beyond:
        raise ValueError(
            f"draw: values of regions {of} have {beyond[0]}; they must be from -1 to {len(regions.roles) - 1}, "
            f"for {len(regions.roles)} roles"
        )


def _check_rows(what: str, of: str, values: Sequence[Sequence[float]], rows: int, columns: int) -> None:
    found = sorted({len(row) for row in values})
    if len(values) != rows or found != [columns]:
        raise ValueError(
            f"draw: {what} {of} have {len(values)} rows of {found} values; "
            f"{rows} y and {columns} x need {rows} rows of {columns}"
        )


def _panel_size(chart: Chart) -> tuple[float, float]:
    return _SIZES.get(chart.columns or 1, _SMALL)


def _height(panel: Panel, usual: float) -> float:
    return usual if panel.counts is None else _COUNTS_FRAME + _COUNTS_ROW * len(panel.counts.rows)


def _grid(
    figure: Figure, rows: Sequence[Sequence[Panel]], heights: Sequence[float], columns: int, titles: Sequence[str]
) -> list[Axes]:
    """Axes of the panels, row by row, with titles above the rows."""
    if not titles:
        ratios = heights if len(set(heights)) > 1 else None
        grid: Any = figure.subplots(len(rows), columns, squeeze=False, height_ratios=ratios)
        axes: list[Axes] = list(grid.flat)
        count = sum(map(len, rows))
        for spare in axes[count:]:
            spare.remove()
        return axes[:count]
    # a row title belongs to axes of zero height above the row
    ratios = [ratio for height in heights for ratio in (0.01, height)]
    places = figure.add_gridspec(2 * len(rows), columns, height_ratios=ratios)
    axes = []
    for i, row in enumerate(rows):
        over = figure.add_subplot(places[2 * i, :])
        over.set_axis_off()
        over.set_title(titles[i], fontsize=11, fontweight="bold", loc="left", parse_math=False)
        axes += [figure.add_subplot(places[2 * i + 1, j]) for j in range(len(row))]
    return axes


def _fill(axes: Sequence[Axes], panels: Sequence[Panel], chart: Chart, columns: int) -> dict[str, Any]:
    """Draws all panels; returns the legend handles by label, in the order of the chart."""
    styles, colours = line_styles(chart.panels), role_colours(chart.panels)
    found: dict[str, Any] = {}
    for i, (panel, here) in enumerate(zip(panels, axes, strict=True)):
        left = panels[i - 1] if i % columns else None
        below = panels[i + columns] if i + columns < len(panels) else None
        _frame(here, panel, outer=left is None or not _same_axes(panel, left), small=_panel_size(chart) == _SMALL)
        if below is not None and _same_axes(panel, below) and panel.counts is None:
            here.set_xlabel("")
        if panel.blocks is not None:
            draw_blocks(here, panel.blocks, bar=i + 1 == len(panels))
        elif panel.counts is not None:
            draw_counts(here, panel.counts)
        elif panel.points is not None:
            found = found | draw_points(here, panel, panel.points, colours)
        else:
            shared = [other for other in chart.panels if _same_axes(panel, other)]
            found = draw_lines(here, panel, shared, styles) | found
    order = [label for label in styles if label in found]
    return {label: found[label] for label in (*order, *(label for label in found if label not in styles))}


def _same_axes(one: Panel, other: Panel) -> bool:
    """Whether two panels share their axes."""

    def axes(panel: Panel) -> tuple[object, ...]:
        rows = None if panel.counts is None else panel.counts.rows
        kind = (panel.blocks is None, panel.points is None, rows)
        return *kind, panel.x_label, panel.y_label, panel.log_x, panel.log_y

    return axes(one) == axes(other)


def _frame(axes: Axes, panel: Panel, *, outer: bool, small: bool) -> None:
    axes.set_title(panel.title, fontsize=9 if small else 10, loc="left", parse_math=False)
    axes.set_xlabel(panel.x_label, parse_math=False)
    if outer:
        axes.set_ylabel(panel.y_label, parse_math=False)
    else:
        axes.tick_params(labelleft=False)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max((len(label) for label in labels), default=0) + 7  # the handle and the gap
    fitting = max(1, int(width * _LETTERS_PER_INCH / longest))
    rows = math.ceil(len(labels) / fitting)
    return math.ceil(len(labels) / rows) if rows else 1


def _rendered(figure: Figure, chart: Chart, kind: str, *, transparent: bool = False) -> bytes:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({**RC_PARAMS, "svg.hashsalt": chart.id}):
        if kind == "svg":
            bare = {"Creator": None, "Date": None, "Format": None, "Type": None}
            # the resolution of raster images within the SVG
            figure.savefig(file, format="svg", dpi=200, metadata=bare, transparent=transparent)
        else:
            figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
