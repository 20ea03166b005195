"""Charts as plain data: panels of lines, blocks, counts or points; `chart_drawing` draws them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from moesaic.files import write_json
from moesaic.validated_json import read_records

__all__ = [
    "Blocks",
    "Chart",
    "Counts",
    "Group",
    "Marker",
    "Panel",
    "Points",
    "Regions",
    "Series",
    "read_charts",
    "write_charts",
]

Marker = Literal["o", "s", "^", "v", "D", "+", "x", "-"]
"""The shape of a point: disc, square, triangle up or down, diamond, plus, cross, bar."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    role: str
    """Decides colour and marker: "cnn", "separate", "joint", "best", "expert-1" to "expert-8", or any other name."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] | None = None
    """Half the length of the error bars, or half the height of the band around a line of many points."""


@dataclass(frozen=True)
class Blocks:
    """A grid of values from 0 (black) to 1 (white)."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """One row for each y."""


@dataclass(frozen=True)
class Counts:
    """A table of numbers, such as how many samples of a cluster go to an expert."""

    rows: tuple[str, ...]
    """Row labels, such as clusters; darker cells have a larger share of their row."""
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """(rows, columns), not negative."""


@dataclass(frozen=True)
class Group:
    """Points of the same colour and marker."""

    label: str
    """Legend entry of the colour: "expert 1"."""
    role: str
    """Decides the colour, as for `Series`."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    marker: Marker = "o"
    marker_label: str = ""
    """Legend entry of the marker: "class +1"; empty for none."""


@dataclass(frozen=True)
class Regions:
    """Background of points: coloured regions and a decision boundary."""

    x: tuple[float, ...]
    """Centres of the columns, evenly spaced."""
    y: tuple[float, ...]
    """Centres of the rows, from below, evenly spaced."""
    roles: tuple[str, ...] = ()
    """Roles (see `Group`) whose colours ``values`` refers to."""
    values: tuple[tuple[int, ...], ...] = ()
    """One row for each y, of indices into ``roles``; -1 for no colour. Empty for no colours at all."""
    scores: tuple[tuple[float, ...], ...] | None = None
    """One row for each y; the decision boundary is where they change sign."""


@dataclass(frozen=True)
class Points:
    """Groups of points in a plane, with regions behind them."""

    groups: tuple[Group, ...]
    regions: Regions | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines, with blocks, with counts or with points."""

    title: str
    x_label: str
    y_label: str
    """Axes of points have ticks only if they have labels: those of t-SNE have no meaning."""
    series: tuple[Series, ...] = ()
    blocks: Blocks | None = None
    level: float | None = None
    """A dotted horizontal line, such as 95 % accuracy."""
    log_y: bool = False
    log_x: bool = False
    counts: Counts | None = None
    points: Points | None = None


@dataclass(frozen=True)
class Chart:
    """A figure: panels that share axes if their labels are the same."""

    id: str
    """File name: "figure-4"; unique within a paper."""
    paper: str
    """Id of the paper: the name of the folder of its figures."""
    where: str
    title: str
    caption: str
    """What the figure shows, for readers who have not read the paper."""
    panels: tuple[Panel, ...] = field(default_factory=tuple)
    columns: int | None = None
    """Panels per row; more panels are smaller. None for as many as fit at full size. With a number, a page shows one
    legend for all panels."""
    row_titles: tuple[str, ...] = ()
    """A title for each row; requires ``columns``."""


def write_charts(path: Path, charts: Iterable[Chart]) -> None:
    """Writes charts.json atomically."""
    write_json(path, [asdict(chart) for chart in charts])


def read_charts(path: Path) -> list[Chart]:
    """Reads charts.json."""
    return read_records(path, Chart)
