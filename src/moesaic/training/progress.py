"""How a long computation tells how far it is."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Someone who wants to know how far a computation is."""

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """A piece of work of ``total`` trial-epochs begins."""
        ...

    def advance(self, amount: int, note: str = "") -> None:
        """So many more are done."""
        ...

    def skip(self, amount: int) -> None:
        """So many more need not be done, or were done before: they count for the share, and not for the rate."""
        ...

    def end(self) -> None:
        """The piece of work is complete."""
        ...

    def log(self, message: str) -> None:
        """Something happened that the user should read."""
        ...


class NoProgress:
    """Progress that nobody looks at."""

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """Nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Nothing."""

    def skip(self, amount: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def log(self, message: str) -> None:
        """Nothing."""
