"""Records the default of every parameter of the public face and of every option: tests/public-defaults.json.

    python tests/record_defaults.py

A default is part of what users get. Record anew where one changes on purpose, and say so in CHANGELOG.md.
"""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moesaic

FILE = Path(__file__).parent / "public-defaults.json"


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every function and class that a module lists in ``__all__``, under the name of the module that defines it."""
    for module in pkgutil.walk_packages(moesaic.__path__, "moesaic."):
        if "triton" in module.name or module.name.endswith("__main__"):  # the first needs Triton, the second runs
            continue
        content = importlib.import_module(module.name)
        for name in getattr(content, "__all__", ()):
            value = getattr(content, name)
            if callable(value) and getattr(value, "__module__", "") == module.name:
                yield f"{module.name}.{name}", value


def defaults() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, value in public_objects():
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):  # a protocol or an exception
            continue
        own = {each.name: written(each.default) for each in parameters if each.default is not each.empty}
        if own:
            found[name] = own
    return dict(sorted(found.items()))


def written(default: object) -> str:
    text = repr(default)
    return type(default).__name__ if " at 0x" in text else text


if __name__ == "__main__":
    FILE.write_text(json.dumps(defaults(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
