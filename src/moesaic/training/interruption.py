"""Interruptions that wait for the end of a step, so that training can write a checkpoint before it stops.

A signal handler calls `request_stop`. While training runs inside `stoppable`, the request waits until the training loop
asks `stop_requested` after a step, writes its checkpoint and raises KeyboardInterrupt. Anywhere else the handler itself
has to raise, as Python does.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["request_stop", "stop_requested", "stoppable"]


class _State:
    loops: int = 0
    requested: bool = False


_state = _State()


@contextmanager
def stoppable() -> Generator[None]:
    """Inside, the caller checks `stop_requested` after each step."""
    _state.loops += 1
    try:
        yield
    finally:
        _state.loops -= 1
        if not _state.loops:
            _state.requested = False


def request_stop() -> bool:
    """Asks the training loop to stop after the step; False if none runs, or if it was asked before."""
    if not _state.loops or _state.requested:
        return False
    _state.requested = True
    return True


def stop_requested() -> bool:
    """Whether the training loop is to write a checkpoint and stop."""
    return _state.requested
