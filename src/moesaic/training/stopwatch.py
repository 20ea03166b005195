"""Measures seconds of work, without interruptions."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Stopwatch"]


class Stopwatch:
    """Counts seconds while it runs.

    >>> watch = Stopwatch()
    >>> watch.start()
    >>> with watch.paused():
    ...     before = watch.lap
    ...     unchanged = watch.lap == before
    >>> unchanged, watch.stop() > 0
    (True, True)
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Up to the last stop."""
        self._since: float | None = None
        self._start = 0.0

    def start(self) -> None:
        self._start = self.seconds
        self._since = time.perf_counter()

    def stop(self) -> float:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None
        return self.seconds

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, no time is counted."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self._since = time.perf_counter()

    @property
    def lap(self) -> float:
        """Seconds since it was started."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.seconds - self._start + running
