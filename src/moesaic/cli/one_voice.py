"""Of several ranks that ``torchrun`` has started, the first speaks.

The others are silent, but for an error that the first does not have: when a rank fails, torchrun ends all others at
once, so a rank that still runs a few seconds after its own error is the only one that knows of it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from moesaic import launcher

__all__ = ["end_rank", "first_rank_speaks", "report_failure"]

_GRACE = 4.0
"""Seconds that torchrun gets to end the other ranks after an error of the first."""


class _Silent:
    stream: io.StringIO | None = None


@contextmanager
def first_rank_speaks() -> Generator[None]:
    """Inside, ranks other than the first write nothing."""
    if launcher.rank() == 0:
        yield
        return
    streams = sys.stdout, sys.stderr
    _Silent.stream = sys.stderr = io.StringIO()
    sys.stdout = io.StringIO()
    try:
        yield
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code:
            _wait()
        raise  # with its traceback
    finally:
        sys.stdout, sys.stderr = streams
        _Silent.stream = None


def report_failure(line: str) -> None:
    """Write the error of a silent rank, if the first has not ended the job for the same reason."""
    if _Silent.stream is None or sys.__stderr__ is None:
        return
    _wait()
    sys.__stderr__.write(f"rank {launcher.rank()}: {line}\n")
    sys.__stderr__.flush()


def end_rank(code: int) -> None:
    """End this process here, if it is a rank of a job.

    All files are written by now. Threads of a process group may abort a process that takes itself apart while another
    rank closes its connections, and torchrun would call a complete job failed.
    """
    if launcher.in_job():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _wait() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # without a word
    time.sleep(_GRACE)
