"""The pages' templates, rendered so that whatever comes from a user is escaped and nothing that is missing passes."""

from __future__ import annotations

from typing import Any

__all__ = ["render"]


def render(template: str, *, package: str = "moesaic.report", **values: Any) -> str:
    """A template of a package, filled in. The only markup from outside is matplotlib's, which escapes what is in it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    return environment.get_template(template).render(**values)


def _prose(text: str) -> str:
    """A number and its percent sign stay on one line."""
    return text.replace(" %", "\u00a0%")
