"""Rendering of HTML templates: values are escaped, undefined values are errors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from moesaic.report.chart_style import COLOURS, ON_DARK

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["render"]


def render(template: str, *, package: str = "moesaic.report", **values: Any) -> str:
    """Renders a template of a package; every template may include the shared stylesheet, page.css.

    The only unescaped values are SVG drawings of matplotlib, which escapes text, moesaic's own scripts, and JSON
    without "<".
    """
    return _environment(package).get_template(template).render(light=COLOURS, dark=ON_DARK, **values)


@cache
def _environment(package: str) -> Environment:
    """One for each package, so that a template is compiled once and not for every page."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader("moesaic.report", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    return environment


def _prose(text: str) -> str:
    """Keeps a number and its percent sign on one line."""
    return text.replace(" %", "\u00a0%")
