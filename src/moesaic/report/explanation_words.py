"""What the pages on what a network does say in the same way: shares, and names in a row."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "percent"]


def percent(share: float) -> str:
    r"""A share in percent: whole, but never 100 where it is less.

    >>> percent(0.5), percent(0.9996), percent(1.0), percent(0.001)
    ('50\xa0%', '99.9\xa0%', '100\xa0%', '0.1\xa0%')
    """
    value = 100 * share
    if 0.5 <= value < 99.5 or value in (0.0, 100.0):
        return f"{value:.0f}\u00a0%"
    return f"{min(value, 99.9):.1f}\u00a0%" if value >= 0.1 else "below 0.1\u00a0%"


def listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
