"""Charts as plain data: panels of lines, blocks, counts or points. `figures` draws them, charts.json holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from moesaic.files import read_records, write_json

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
    """Half the length of the error bars, or half the height of the band round a line of many points."""


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
    """What is shared out, such as clusters; a cell is the darker the more of its row is in it."""
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """For each row a number for each column, none negative."""


@dataclass(frozen=True)
class Group:
    """Points that look alike. The legend tells colours and markers apart, each named once."""

    label: str
    """What the colour stands for: "expert 1"."""
    role: str
    """Decides the colour, as for `Series`."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    marker: Marker = "o"
    marker_label: str = ""
    """What the marker stands for: "class +1"; empty where it stands for nothing."""


@dataclass(frozen=True)
class Regions:
    """What lies behind points: who decides where, and where the decision turns."""

    x: tuple[float, ...]
    """The middles of the columns, evenly spaced."""
    y: tuple[float, ...]
    """The middles of the rows, from below, evenly spaced."""
    roles: tuple[str, ...] = ()
    """As of `Group`: colours that ``values`` points to."""
    values: tuple[tuple[int, ...], ...] = ()
    """One row for each y, of indices into ``roles``; -1: no colour. Empty: none has any."""
    scores: tuple[tuple[float, ...], ...] | None = None
    """One row for each y; the line of the decision is where they change sign."""


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
    """Axes of points have ticks only where they have labels: those of a t-SNE picture mean nothing."""
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
    """A figure that answers one of the paper's: panels, which share their axes where these have the same labels."""

    id: str
    """Also its file name: "figure-4"; no two charts of a paper share it."""
    paper: str
    """The paper's id, also the name of the folder of its figures."""
    where: str
    title: str
    caption: str
    """What to see in it, in the words of someone who has not read the paper."""
    panels: tuple[Panel, ...] = field(default_factory=tuple)
    columns: int | None = None
    """How many panels stand in a row, the more the smaller; None: as many as have room at full size. With a
    number given, a page shows the legend once for all panels."""
    row_titles: tuple[str, ...] = ()
    """Titles over the rows, one for each; needs ``columns``."""


def write_charts(path: Path, charts: Iterable[Chart]) -> None:
    """Write charts.json, the figures as numbers; a reader never sees half a file."""
    write_json(path, [asdict(chart) for chart in charts])


def read_charts(path: Path) -> list[Chart]:
    """The charts of a charts.json."""
    return read_records(path, Chart)
