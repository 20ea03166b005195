"""Draws the content of a panel: lines, blocks, counts or points.

The functions return legend handles by label.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesaic.report.chart import Blocks, Counts, Panel, Points, Regions, Series
from moesaic.report.chart_style import DATA_ID, INK, LINE, MANY_POINTS, NOT_RUN, LineStyle
from moesaic.report.formatting import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_blocks", "draw_counts", "draw_lines", "draw_points"]

_FULL, _ON_LIGHT, _ON_DARK, _ZERO = "#0B4F8A", "#222222", "#FEFEFE", "#8A8F96"
"""Colours of counts."""

_MARKER, _STAR = 5, 9
"""Sizes of markers: a star has less area than its width says."""
_ERROR_BARS: dict[str, Any] = {"linewidth": 1.6, "elinewidth": 1, "capsize": 2.5, "capthick": 1}
_VECTORS = 300
"""More points are rasterised in an SVG, to limit its size."""


def draw_lines(axes: Axes, panel: Panel, shared: Sequence[Panel], styles: Mapping[str, LineStyle]) -> dict[str, Any]:
    """Lines with error bars and markers, or with a band for many points. Panels in ``shared`` have the same limits."""
    handles: dict[str, Any] = {}
    if panel.log_y:
        axes.set_yscale("log")
    if panel.log_x:
        axes.set_xscale("log")
    axes.grid(axis="y", color=LINE, alpha=0.35, linewidth=0.6)
    for line in panel.series:
        style = styles[line.label]
        if len(line.x) > MANY_POINTS:
            (handles[line.label],) = axes.plot(
                line.x, line.y, color=style.colour, linestyle=style.dash, linewidth=1.4, solid_joinstyle="round"
            )
            if line.spread is not None:
                axes.fill_between(line.x, *_ends(panel, line), color=style.colour, alpha=0.18, linewidth=0)
            continue
        look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "linestyle": style.dash}
        look["markersize"] = _STAR if style.marker == "*" else _MARKER
        low, high = _ends(panel, line)
        bars = None if line.spread is None else np.maximum([np.array(line.y) - low, high - np.array(line.y)], 0)
        handles[line.label] = axes.errorbar(line.x, line.y, yerr=bars, **look, **_ERROR_BARS)
    _limit(axes, shared)
    if all(len(line.x) <= MANY_POINTS for line in panel.series):
        ticks = _ticks([x for line in panel.series for x in line.x], axes.get_xlim(), logarithmic=panel.log_x)
        if ticks:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
    elif not panel.log_x:
        axes.locator_params("x", nbins=5)
    if panel.level is not None:
        axes.axhline(panel.level, color=INK, linestyle=(0, (1, 1.5)), linewidth=1, zorder=1)
        edge = ("axes fraction", "data")
        axes.annotate(number(panel.level), (1, panel.level), (2, 0), edge, "offset points", va="center", fontsize=8)
    return handles


def _data_id(axes: Axes) -> str:
    """The id of elements whose colour is a value, which a dark page must not change."""
    return f"{DATA_ID}{axes.figure.axes.index(axes)}"


def _limit(axes: Axes, shared: Sequence[Panel]) -> None:
    """Sets limits that contain the lines of all panels with shared axes."""
    lines = [line for panel in shared for line in panel.series]
    levels = [panel.level for panel in shared if panel.level is not None]
    ends = [float(end) for line in lines for side in _ends(shared[0], line) for end in side]
    x = _span([each for line in lines for each in line.x], logarithmic=shared[0].log_x)
    y = _span([*ends, *levels], logarithmic=shared[0].log_y)
    if x:
        axes.set_xlim(x)
    if y:
        axes.set_ylim(y)


def _ends(panel: Panel, line: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper ends of the error bars; those of percentages end at 0 and 100."""
    y, spread = np.array(line.y, dtype=np.float64), np.array(line.spread or 0.0, dtype=np.float64)
    low, high = y - spread, y + spread
    return (low.clip(0, 100), high.clip(0, 100)) if panel.y_label.endswith("(%)") else (low, high)


def _span(values: Iterable[float], *, logarithmic: bool = False) -> tuple[float, float] | None:
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not logarithmic)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if logarithmic:
        room = (high / low) ** 0.05 if high > low else 1.5
        return low / room, high * room
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _ticks(values: Iterable[float], limits: tuple[float, float], *, logarithmic: bool) -> list[float]:
    """The measured x values, except those too close to the previous one."""

    def place(x: float) -> float:
        return math.log(x) if logarithmic else x

    distance = 0.07 * (place(limits[1]) - place(limits[0]))
    ticks: list[float] = []
    for value in sorted({value for value in values if value > 0 or not logarithmic}):
        if not ticks or place(value) - place(ticks[-1]) >= distance:
            ticks.append(value)
    return ticks


def draw_blocks(axes: Axes, blocks: Blocks, *, bar: bool) -> None:
    """Grey levels from black (0) to white (1); ``bar`` adds a colour bar."""
    from matplotlib import colormaps

    values = np.ma.masked_invalid(np.array(blocks.values, dtype=np.float64))
    grey = colormaps["gray"].with_extremes(bad=NOT_RUN)
    mesh = axes.pcolormesh(values, cmap=grey, vmin=0, vmax=1, edgecolors=LINE, linewidth=0.4, gid=_data_id(axes))
    axes.set_xticks(np.arange(len(blocks.x)) + 0.5, [f"{x:g}" for x in blocks.x])
    axes.set_yticks(np.arange(len(blocks.y)) + 0.5, [f"{y:g}" for y in blocks.y])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(True)
    if bar:
        scale = axes.figure.colorbar(mesh, ax=axes, ticks=[0, 0.5, 1], fraction=0.06, pad=0.03)
        assert scale.solids is not None
        scale.solids.set_gid(_data_id(scale.ax))
        scale.ax.set_yticklabels(["none", "half", "all"])
        missing = "; blue: not run" if np.ma.is_masked(values) else ""
        scale.set_label(f"trials that succeed{missing}", size=8.5)
        scale.outline.set_edgecolor(LINE)  # pyright: ignore[reportCallIssue]


def draw_counts(axes: Axes, counts: Counts) -> None:
    """A table of numbers; darker cells have a larger share of their row."""
    from matplotlib.colors import LinearSegmentedColormap

    values = np.array(counts.values, dtype=np.float64).reshape(len(counts.rows), len(counts.columns))
    sums = np.nansum(values, axis=1, keepdims=True)
    shares = np.ma.masked_invalid(values / np.where(sums > 0, sums, 1))
    blue = LinearSegmentedColormap.from_list("counts", ["#FFFFFF", _FULL]).with_extremes(bad=NOT_RUN)
    axes.pcolormesh(shares, cmap=blue, vmin=0, vmax=1, edgecolors=LINE, linewidth=0.4, gid=_data_id(axes))
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(counts.columns)) + 0.5, counts.columns)
    axes.set_yticks(np.arange(len(counts.rows)) + 0.5, counts.rows)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_parse_math(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    size = 8.5 if len(counts.columns) <= 8 else 7
    for (row, column), value in np.ndenumerate(values):
        share = 0.0 if np.ma.is_masked(shares[row, column]) else float(shares[row, column])
        colour = _ON_DARK if share > 0.58 else _ON_LIGHT if value else _ZERO
        label = "–" if math.isnan(value) else f"{value:,.0f}" if value == round(value) else number(value)
        gid = f"{_data_id(axes)}-{row}-{column}"
        axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", fontsize=size, color=colour, gid=gid)


def draw_points(axes: Axes, panel: Panel, points: Points, colours: Mapping[str, str]) -> dict[str, Any]:
    """Groups of points over regions; the legend lists colours, markers and the decision boundary."""
    from matplotlib.lines import Line2D

    if points.regions is not None:
        _draw_regions(axes, points.regions, colours)
    total = sum(len(group.x) for group in points.groups)
    size = 5.0 if total <= 100 else 3.8 if total <= 500 else 2.8
    groups: dict[str, Any] = {}
    markers: dict[str, Any] = {}
    plain = not any(group.marker_label for group in points.groups)
    for group in points.groups:
        colour, marker = colours[group.role], "_" if group.marker == "-" else group.marker
        look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "", "alpha": 0.85}
        look |= {"markersize": size, "markeredgewidth": 0.3}
        if marker not in "os^vD":
            look |= {"markersize": 1.5 * size, "markeredgewidth": 1.1}
        axes.plot(group.x, group.y, rasterized=total > _VECTORS, **look)
        groups.setdefault(group.label, Line2D([], [], color=colour, marker=marker if plain else "s", linestyle=""))
        if group.marker_label:
            markers.setdefault(group.marker_label, Line2D([], [], color=INK, marker=marker, linestyle=""))
    lines = {}
    if points.regions is not None and points.regions.scores is not None:
        lines = {"decision boundary": Line2D([], [], color=INK, linewidth=1.3)}
    if not panel.x_label and not panel.y_label:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
    return groups | markers | lines


def _draw_regions(axes: Axes, regions: Regions, colours: Mapping[str, str]) -> None:
    from matplotlib.colors import to_rgba

    x, y = np.array(regions.x), np.array(regions.y)
    if regions.values:
        # transparent, for light and dark pages
        tints = np.array([*(to_rgba(colours[role], 0.25) for role in regions.roles), (0, 0, 0, 0)])
        steps = [(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 1.0 for ends in (x, y)]
        edges = [(ends[0] - step / 2, ends[-1] + step / 2) for ends, step in zip((x, y), steps, strict=True)]
        look: dict[str, Any] = {"origin": "lower", "aspect": "auto", "interpolation": "nearest", "zorder": 0}
        axes.imshow(tints[np.array(regions.values)], extent=(*edges[0], *edges[1]), **look)
    if regions.scores is not None:
        scores = np.array(regions.scores)
        if np.nanmin(scores) < 0 < np.nanmax(scores):
            axes.contour(x, y, scores, levels=[0.0], colors=[INK], linewidths=1.3, zorder=1.5)
