"""Figures of the site as SVG files that follow the reader's light or dark theme.

An SVG in an ``<img>`` chooses by ``prefers-color-scheme``, which browsers take from the ``color-scheme`` of the page
(docs/stylesheets/site.css). Ink and thin lines change to their counterparts of `moesaic.report`; colours that
stand for a line, a group of points or a value stay.
"""

import re
from pathlib import Path
from typing import Any

from moesaic.report import to_svg
from moesaic.report.chart import Chart
from moesaic.report.chart_style import COLOURS, ON_DARK, RC_PARAMS

GRID = "#E4E4E4"
_LIGHT = {**{name: COLOURS[name] for name in ON_DARK}, "grid": GRID, "page": "#FFFFFF"}
_DARK = {**ON_DARK, "grid": "#3a4048", "page": "#1b1f24"}
_FONT = 'text { font-family: system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }'


def chart_svg(chart: Chart) -> str:
    """The chart as the content of a file."""
    return with_style(to_svg(chart, variables=True))


def follow_theme(drawing: str) -> str:
    """A drawing of matplotlib, saved with ``transparent=True``, with variables for its colours."""
    root = drawing[drawing.index("<svg") :]
    for name, colour in _LIGHT.items():
        root = re.sub(f": {colour}", f": var(--chart-{name}, {colour})", root, flags=re.IGNORECASE)
    return with_style(re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", root))


def with_style(svg: str) -> str:
    """The drawing with both palettes."""
    light, dark = (
        "".join(f"--chart-{name}: {value}; " for name, value in palette.items()) for palette in (_LIGHT, _DARK)
    )
    style = f"<style>{_FONT} svg {{ {light}}} @media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda opening: f"{opening[1]}\n{style}", svg, count=1) + "\n"


def save_figure(figure: Any, path: Path) -> None:
    """Saves a figure of matplotlib as an SVG that follows the theme."""
    import io

    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({**RC_PARAMS, "svg.hashsalt": path.stem}):
        bare = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", metadata=bare, transparent=True)
    path.write_text(follow_theme(file.getvalue()), "utf-8")
