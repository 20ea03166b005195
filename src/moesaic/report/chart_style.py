"""Colours, markers and line styles of charts; the role of a line decides its style, the same in every figure.

The CNN, separate training, joint training, our settings, published numbers and the experts have fixed styles; any
other role gets one that is not used in its chart. The first colours are the colour-blind-safe palette of Okabe and Ito;
markers and dashes distinguish lines without colour. A colour that stands for a line is the same on light and dark
pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.report.chart import Panel

__all__ = [
    "COLOURS",
    "DARK_CARD",
    "DATA_ID",
    "INK",
    "LINE",
    "MANY_POINTS",
    "MAX_ROLES",
    "NOT_RUN",
    "ON_DARK",
    "RC_PARAMS",
    "LineStyle",
    "line_styles",
    "role_colours",
]

INK, LINE, NOT_RUN = "#333333", "#BBBBBB", "#D6E6F2"

COLOURS = {
    "ink": INK,
    "line": LINE,
    "vermilion": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "grey": "#8C8C8C",
    "indigo": "#6A5ACD",
    "olive": "#999933",
    "wine": "#B84A7C",
}
"""All colours by name. Ink and thin lines follow the theme of a page; the others identify lines and points, and are
the same on every page: each is legible on white and on `DARK_CARD`."""
ON_DARK = {"ink": "#d5d8dd", "line": "#5a616b"}
"""The colours of `COLOURS` that a dark page has others for."""
DARK_CARD = "#1d2125"
"""Background of charts on a dark page (page.css)."""

DATA_ID = "data-"
"""Beginning of the ids of SVG elements whose colours are values: they are the same on a dark page."""

_EXPERTS = ("blue", "vermilion", "green", "purple", "orange", "sky", "grey", "indigo")

_ROLES = {
    "cnn": (COLOURS["vermilion"], "s"),
    "separate": (COLOURS["blue"], "o"),
    "joint": (COLOURS["green"], "^"),
    "best": (COLOURS["purple"], "D"),
    "published": (COLOURS["grey"], "*"),
    **{
        f"expert-{i}": (COLOURS[name], marker)
        for i, (name, marker) in enumerate(zip(_EXPERTS, "os^DvPXp", strict=True), start=1)
    },
}
_OTHERS = tuple(
    (COLOURS[name], marker)
    for name, marker in zip(
        ("orange", "sky", "grey", "blue", "vermilion", "green", "indigo", "olive", "wine", "purple"),
        "vPX*ph<>dD",
        strict=True,
    )
)
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 2, 1, 2)))

MAX_ROLES = len(_OTHERS)
"""Number of colours for points of a chart."""

MANY_POINTS = 30
"""Lines with more points have no markers, and a band instead of error bars."""

RC_PARAMS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": LINE,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": LINE,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}


@dataclass(frozen=True)
class LineStyle:
    """Style of a line or of a group of points."""

    colour: str
    marker: str
    dash: Any


def line_styles(panels: Sequence[Panel]) -> dict[str, LineStyle]:
    """The style of each line, by label. Lines of the same role have the same colour and different dashes."""
    roles = _by_role(panels)
    lines = [line for panel in panels for line in panel.series]
    bare = {line.label for line in lines if len(line.x) > MANY_POINTS}
    siblings: dict[str, list[str]] = {}
    styles: dict[str, LineStyle] = {}
    for line in lines:
        if line.label not in styles:
            # without markers, only dashes distinguish lines in greyscale
            several = siblings.setdefault("" if line.label in bare else line.role, [])
            styles[line.label] = LineStyle(*roles[line.role], _DASHES[len(several) % len(_DASHES)])
            several.append(line.label)
    return styles


def role_colours(panels: Sequence[Panel]) -> dict[str, str]:
    """The colour of every role."""
    return {role: colour for role, (colour, _) in _by_role(panels).items()}


def _by_role(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    roles = list(dict.fromkeys(role for panel in panels for role in _roles(panel)))
    taken = {_ROLES[role][0] for role in roles if role in _ROLES}
    others = [role for role in roles if role not in _ROLES]
    free = [style for style in _OTHERS if style[0] not in taken]
    return {role: _ROLES[role] if role in _ROLES else free[others.index(role) % len(free)] for role in roles}


def _roles(panel: Panel) -> Iterator[str]:
    yield from (line.role for line in panel.series)
    if panel.points is not None:
        yield from (group.role for group in panel.points.groups)
        yield from panel.points.regions.roles if panel.points.regions else ()
