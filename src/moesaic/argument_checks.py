"""Argument checks whose errors contain the value, the limit and a way out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # commands import this module, and print their help without waiting for torch
    import torch

__all__ = [
    "check_choice",
    "check_device",
    "check_numbers",
    "check_positive",
    "either",
    "first_line",
    "first_names",
    "nearest_divisors",
    "printable",
]

T = TypeVar("T")

_LONG = 12
"""Choices beyond which the nearest one is named first."""


def check_choice(owner: str, option: str, value: T, allowed: Collection[T]) -> T:
    """Returns ``value`` if it is allowed; the error lists the allowed values.

    >>> check_choice("PatchMoE", "context", "patches", ("map", "patch"))
    Traceback (most recent call last):
    ValueError: PatchMoE: context='patches' is unknown; use 'map' or 'patch' (did you mean 'patch'?)
    """
    if value in allowed:
        return value
    *most, last = [repr(choice) for choice in allowed]
    listed = f"{', '.join(most)} or {last}" if most else last
    near = get_close_matches(str(value), [choice for choice in allowed if isinstance(choice, str)], n=1)
    if near and len(allowed) > _LONG:  # else the hint is lost at the end of a long list
        raise ValueError(f"{owner}: {option}={value!r} is unknown; did you mean {near[0]!r}? It may be {listed}")
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{owner}: {option}={value!r} is unknown; use {listed}{hint}")


def check_positive(owner: str, **counts: int) -> None:
    """Raises unless all counts are integers of at least 1.

    >>> check_positive("PatchMoE", experts=0)
    Traceback (most recent call last):
    ValueError: PatchMoE: experts=0; it must be at least 1
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a whole number")
        if value < 1:
            raise ValueError(f"{owner}: {name}={value}; it must be at least 1")


def check_numbers(owner: str, limit: str, fits: Callable[[float], bool], values: Mapping[str, float]) -> None:
    """Raises unless all values are numbers that satisfy ``fits``; ``limit`` describes the condition.

    >>> check_numbers("Recipe", "0 or more", lambda value: value >= 0, {"clip": -1.0})
    Traceback (most recent call last):
    ValueError: Recipe: clip=-1.0; it must be 0 or more
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a number")
        if not fits(value):
            raise ValueError(f"{owner}: {name}={value}; it must be {limit}")


def check_device(owner: str, device: torch.device | str) -> torch.device:
    """Returns the device; refuses one that is not available."""
    import torch

    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{owner}: device={str(resolved)!r}, but torch finds no GPU here; use device='cpu'")
    return resolved


def printable(name: str) -> str:
    """Returns ``name`` with every character that cannot be printed replaced by �.

    >>> printable("Äpfel & Birnen"), printable("two" + chr(10) + "lines")
    ('Äpfel & Birnen', 'two�lines')
    """
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name)


def nearest_divisors(number: int, near: int) -> str:
    """The two divisors of a number that are closest to another number, as words."""
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return either(sorted(sorted(divisors, key=lambda divisor: abs(divisor - near))[:2]))


def either(numbers: Sequence[int]) -> str:
    """Numbers as words: ``1, 2 or 4``."""
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message, or its type where it has none.

    >>> first_line(ValueError("two\nlines")), first_line(KeyError())
    ('two', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """Returns the first of some names from a file, and how many more there are.

    >>> first_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable, names[:limit])) + more
