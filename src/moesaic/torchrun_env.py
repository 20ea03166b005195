"""Environment variables of ``torchrun``: rank and number of ranks of this process. Imports nothing slow."""

from __future__ import annotations

import os

__all__ = ["in_job", "local_rank", "local_ranks", "rank", "ranks"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_job() -> bool:
    """Whether this process was started as one of several ranks."""
    return ranks() > 1


def ranks() -> int:
    """Returns the number of ranks of the job; 1 outside of one."""
    return _number("WORLD_SIZE", 1) if all(name in os.environ for name in _NEEDED) else 1


def rank() -> int:
    """Returns the rank of this process; 0 outside of a job."""
    return _number("RANK", 0) if in_job() else 0


def local_rank() -> int:
    """Returns the rank of this process among those on its machine; 0 outside of a job."""
    return _number("LOCAL_RANK", 0) if in_job() else 0


def local_ranks() -> int:
    """Returns the number of ranks on this machine; 1 outside of a job."""
    return max(_number("LOCAL_WORLD_SIZE", 1), 1) if in_job() else 1


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
