"""Numbers, shares, names and lists as text, the same way on every page and in every table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesaic.argument_checks import printable

__all__ = ["counted", "duration", "listed", "number", "percent", "short_name"]


def number(value: float, *, near: Sequence[float] = ()) -> str:
    """A number with three significant digits; numbers in ``near`` get the same number of decimals.

    >>> number(60.0), number(0.05312), number(23456.7), number(float("inf"))
    ('60', '0.0531', '23,457', '∞')
    >>> number(52.0, near=[48.31, 57.9])
    '52.0'
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if math.isnan(value):
        return "not a number"
    finite = [each for each in (value, *near) if math.isfinite(each)]
    largest = max(abs(each) for each in finite)
    digits = 2 - math.floor(math.log10(largest)) if largest else 0
    if near and largest:
        width = max(finite) - min(finite)
        # 99.6 and 100.0, not 100 and 100; 99.46 and 99.61, not 99.5 and 99.6
        digits = max(digits, 2 if 0 < width < 0.5 else 1 if width < 5 else 0)
    digits = min(max(digits, 0), 9)
    text = f"{value:,.{digits}f}"
    if not near and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def percent(share: float) -> str:
    r"""A share in percent without decimals, but never 0 for more than 0 and never 100 for less than 1.

    >>> percent(0.5), percent(0.9996), percent(1.0), percent(0.001)
    ('50\xa0%', '99.9\xa0%', '100\xa0%', '0.1\xa0%')
    """
    value = 100 * share
    if 0.5 < value < 99.5 or value in (0.0, 100.0):
        return f"{value:.0f}\u00a0%"
    return f"{min(value, 99.9):.1f}\u00a0%" if value >= 0.1 else "below 0.1\u00a0%"


def counted(count: int, thing: str) -> str:
    """A number of things: "1 epoch", "2,000 epochs".

    >>> counted(1, "epoch"), counted(2000, "epoch")
    ('1 epoch', '2,000 epochs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration with its unit: "45 s", "12 min", "3.5 h".

    >>> duration(44.7), duration(700), duration(12_700)
    ('45 s', '12 min', '3.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def listed(names: Sequence[str]) -> str:
    """Joins names with commas and "and".

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def short_name(name: str, longest: int = 24) -> str:
    r"""A name for a drawing: shortened, and without characters that XML does not allow.

    >>> short_name("a\x08b"), short_name("a name that is far too long")
    ('a�b', 'a name that is far too …')
    """
    name = printable(name)
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
