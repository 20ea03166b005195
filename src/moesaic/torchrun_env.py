"""Environment variables of ``torchrun``, and the signal that ends a rank when its agent dies. Imports nothing slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["in_job", "local_rank", "local_ranks", "rank", "ranks", "signal_when_agent_dies"]

_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


def in_job() -> bool:
    """Whether this process was started as one of several ranks."""
    return ranks() > 1


def ranks() -> int:
    """Returns the number of ranks of the job; 1 outside of one."""
    return _number("WORLD_SIZE", 1) if all(name in os.environ for name in _REQUIRED_VARIABLES) else 1


def rank() -> int:
    """Returns the rank of this process; 0 outside of a job."""
    return _number("RANK", 0) if in_job() else 0


def local_rank() -> int:
    """Returns the rank of this process among those on its machine; 0 outside of a job."""
    return _number("LOCAL_RANK", 0) if in_job() else 0


def local_ranks() -> int:
    """Returns the number of ranks on this machine; 1 outside of a job."""
    return max(_number("LOCAL_WORLD_SIZE", 1), 1) if in_job() else 1


def signal_when_agent_dies(number: signal.Signals) -> None:
    """Lets the system send this process a signal when ``torchrun`` dies without ending its ranks; on Linux alone.

    A killed torchrun ends no rank. They would train on, and keep the output folder locked, or wait half an hour for
    ranks that never come. The last call counts.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ and in_job():
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
