"""Checks of arguments, with errors that tell the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import TypeVar

__all__ = ["at_least_one", "one_of"]

T = TypeVar("T")


def one_of(owner: str, option: str, value: T, allowed: Collection[T]) -> T:
    """``value`` if it is allowed, else an error that lists what is.

    >>> one_of("PatchMoE", "context", "patches", ("map", "patch"))
    Traceback (most recent call last):
    ValueError: PatchMoE: context='patches' is unknown; use 'map' or 'patch' (did you mean 'patch'?)
    """
    if value in allowed:
        return value
    *most, last = [repr(choice) for choice in allowed]
    listed = f"{', '.join(most)} or {last}" if most else last
    near = get_close_matches(str(value), [choice for choice in allowed if isinstance(choice, str)], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{owner}: {option}={value!r} is unknown; use {listed}{hint}")


def at_least_one(owner: str, **counts: int) -> None:
    """Refuse counts that are not whole numbers from 1 on.

    >>> at_least_one("PatchMoE", experts=0)
    Traceback (most recent call last):
    ValueError: PatchMoE: experts=0; it must be at least 1
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a whole number")
        if value < 1:
            raise ValueError(f"{owner}: {name}={value}; it must be at least 1")
