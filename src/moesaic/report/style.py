"""How things look in charts: what a role stands for decides colour and marker, the same in every figure.

The CNN, separate training, joint training, our settings and the experts have looks of their own; any other
role gets one that is still free in its chart. The first colours are Okabe and Ito's, which colour-blind
eyes tell apart too; markers and dashes tell lines apart without any colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.report.chart import Panel

__all__ = [
    "COLOURS",
    "DATA_ID",
    "INK",
    "LINE",
    "MANY",
    "MOST_ROLES",
    "NOT_RUN",
    "ON_DARK",
    "STYLE",
    "Look",
    "colours_of",
    "looks_of",
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
    "indigo": "#332288",
    "olive": "#999933",
    "wine": "#882255",
}
"""The colours that a page may want to exchange, for a dark background say: name, colour in the drawing."""

ON_DARK = {
    "ink": "#d5d8dd",
    "line": "#5a616b",
    "vermilion": "#f0873f",
    "blue": "#6aa5ff",
    "green": "#2cc79a",
    "purple": "#e29bc4",
    "orange": "#f2b632",
    "sky": "#8fd0f7",
    "grey": "#a5a9af",
    "indigo": "#a99df2",
    "olive": "#c8c862",
    "wine": "#dd7fa8",
}
"""`COLOURS` for a dark page."""

DATA_ID = "data-"
"""Beginning of the ids of SVG elements whose colours are values: they are the same on a dark page."""

_EXPERTS = ("blue", "vermilion", "green", "purple", "orange", "sky", "grey", "indigo")

_ROLES = {
    "cnn": (COLOURS["vermilion"], "s"),
    "separate": (COLOURS["blue"], "o"),
    "joint": (COLOURS["green"], "^"),
    "best": (COLOURS["purple"], "D"),
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

MOST_ROLES = len(_OTHERS)
"""So many colours there are; the points of a chart must not need more."""

MANY = 30
"""A line of more points has no markers, and a band instead of error bars."""

STYLE: dict[Any, Any] = {
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
class Look:
    """Of a line, or of a group of points."""

    colour: str
    marker: str
    dash: Any


def looks_of(panels: Sequence[Panel]) -> dict[str, Look]:
    """A look for the label of every line. Lines of one role share its colour and differ by dash."""
    roles = _by_role(panels)
    lines = [line for panel in panels for line in panel.series]
    bare = {line.label for line in lines if len(line.x) > MANY}
    siblings: dict[str, list[str]] = {}
    looks: dict[str, Look] = {}
    for line in lines:
        if line.label not in looks:
            # without markers, dashes are all that is left where there are no colours
            several = siblings.setdefault("" if line.label in bare else line.role, [])
            looks[line.label] = Look(*roles[line.role], _DASHES[len(several) % len(_DASHES)])
            several.append(line.label)
    return looks


def colours_of(panels: Sequence[Panel]) -> dict[str, str]:
    """The colour of every role."""
    return {role: colour for role, (colour, _) in _by_role(panels).items()}


def _by_role(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    roles = list(dict.fromkeys(role for panel in panels for role in _roles(panel)))
    taken = {_ROLES[role][0] for role in roles if role in _ROLES}
    strangers = [role for role in roles if role not in _ROLES]
    free = [look for look in _OTHERS if look[0] not in taken]
    return {role: _ROLES[role] if role in _ROLES else free[strangers.index(role) % len(free)] for role in roles}


def _roles(panel: Panel) -> Iterator[str]:
    yield from (line.role for line in panel.series)
    if panel.points is not None:
        yield from (group.role for group in panel.points.groups)
        yield from panel.points.regions.roles if panel.points.regions else ()
