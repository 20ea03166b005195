"""Console output under ``torchrun``: only rank 0 prints.

Other ranks print nothing except an error that rank 0 does not have: when a rank fails, torchrun ends all others at
once, so a rank that still runs a few seconds after its own error is the only one that can report it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from moesaic import torchrun_env

__all__ = ["end_rank", "report_failure", "silence_other_ranks"]

_GRACE = 4.0
"""Seconds that torchrun gets to end the other ranks after an error of the first."""


class _Silent:
    stream: io.StringIO | None = None


@contextmanager
def silence_other_ranks() -> Generator[None]:
    """Context in which ranks other than 0 print nothing."""
    if torchrun_env.rank() == 0:
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
    """Prints the error of a silent rank, unless rank 0 ends the job for the same reason."""
    if _Silent.stream is None or sys.__stderr__ is None:
        return
    _wait()
    sys.__stderr__.write(f"rank {torchrun_env.rank()}: {line}\n")
    sys.__stderr__.flush()


def end_rank(code: int) -> None:
    """Exits this process at once if it is a rank of a job.

    All files are written by now. Threads of a process group may abort a process during its regular shutdown while
    another rank closes its connections, and torchrun would report a complete job as failed.
    """
    if torchrun_env.in_job():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _wait() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # without a word
    time.sleep(_GRACE)
