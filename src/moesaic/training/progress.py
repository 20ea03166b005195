"""The progress interface of long computations."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Receives the progress of a computation."""

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """A piece of work of ``total`` epochs begins, of which ``done`` are done."""

    def advance(self, amount: int, note: str = "") -> None:
        """``amount`` more are done."""

    def skip(self, amount: int) -> None:
        """``amount`` more need no work: they count for the completed share, but not for the speed."""

    def end(self) -> None:
        """The piece of work is complete."""

    def log(self, message: str) -> None:
        """A message for the user."""


class NoProgress(Progress):
    """Progress that is not reported."""
