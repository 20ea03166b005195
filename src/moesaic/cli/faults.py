"""What can go wrong around a command: signals, full disks, too little memory, consoles without UTF-8.

Every command runs inside `signal_handlers` and `run_guarded`. A fault of the surroundings ends with one line that says
what to do; results that were written before are whole, and the same command resumes. Errors of moesaic itself keep
their traceback.

This module imports nothing slow: handlers are in place before torch is imported.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from unicodedata import category

from moesaic import torchrun_env
from moesaic.cli.rank_output import report_failure

__all__ = [
    "DISK_FAULTS",
    "CommandError",
    "Interrupted",
    "escaped",
    "log",
    "replace_unencodable",
    "run_guarded",
    "signal_handlers",
    "work_begins",
]

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_RESUMABLE = ("train", "compare", "reproduce")
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that a terminal may act on: control, format, surrogate, line and paragraph separator."""
_MEMORY_ADVICE = {
    "train": "use a smaller --batch-size or --img-size, or --grad-accum 2, which computes each batch in two parts",
    "compare": "use a smaller --batch-size, --img-size or network. Finished runs are kept",
    "predict": "use a smaller --batch-size",
    "explain": "use fewer --samples",
    "export": "use a smaller network, or a machine with more memory",
    "bench": "use a smaller --batch-size, --channels or --size",
    "theory": "use fewer --samples",
    "reproduce": "set OMP_NUM_THREADS=1, which trains fewer trials at a time, or check claims one by one with --claim. "
    "Finished results are kept",
}


class CommandError(Exception):
    """An option or input that cannot be used; the message says which, and what to do."""


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to stop."""


class _Signals:
    working: bool = False
    """Whether the command has begun; before that there is nothing to save."""
    received: int | None = None
    raised: bool = False


_signals = _Signals()


@contextmanager
def signal_handlers(given: Sequence[str], *, process_ends: bool = False) -> Generator[None]:
    """Handles SIGINT, SIGTERM and SIGHUP; a signal that is ignored, as by nohup, stays ignored.

    While torch is imported, a signal ends the process at once, for an exception could be lost in an import. Later it
    raises `Interrupted`, in training after the step. A second signal ends the process: whatever is on disk is whole.
    Afterwards the handlers are those of before; or, if the process ends, signals come too late to change its exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not _signals.working:
            _write_line(f"\nInterrupted before anything was done. To run it:\n  {_again(given)}")
            os._exit(128 + number)
        if torchrun_env.in_job() and _signals.received is not None:
            return  # torchrun passes on what its ranks have got themselves, and kills them if they do not end
        if _signals.raised:
            os._exit(128 + number)
        _signals.received = number
        if _request_stop():  # refused the second time
            _write_line("\nInterrupted: saving a checkpoint after this step")
            return
        _signals.raised = True
        raise Interrupted

    _reset()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, handle)
    hook_before, sys.unraisablehook = sys.unraisablehook, _raise_again
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        for number in handled:
            signal.signal(number, signal.SIG_IGN if process_ends else before[number])
        _reset()


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeats an interruption that came in a destructor, where Python drops exceptions."""
    if not isinstance(lost.exc_value, Interrupted):
        sys.__unraisablehook__(lost)
        return

    def repeat() -> None:
        if _signals.working and _signals.received is not None:
            os.kill(os.getpid(), _signals.received)

    _signals.raised = False
    timer = threading.Timer(0.02, repeat)
    timer.daemon = True
    timer.start()


def _reset() -> None:
    _signals.working, _signals.received, _signals.raised = False, None, False


def work_begins() -> None:
    """From here on a signal raises `Interrupted`, so that the command can say how to resume."""
    _signals.working = True


def _request_stop() -> bool:
    interruption = sys.modules.get("moesaic.training.interruption")
    return interruption is not None and interruption.request_stop()


def run_guarded(name: str, given: Sequence[str], run: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; faults of the surroundings are logged in one line.

    Exit codes are 2 for bad input and faults, and 128 plus the number of a signal.
    """
    try:
        code = run()
    except BrokenPipeError:
        raise
    except CommandError as error:
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        return _failed(re.sub(r"\[Errno \d+\] ", "", str(error)))
    except BaseException as error:
        # rich and others may raise something else on the way out
        if any(isinstance(each, KeyboardInterrupt) for each in _chain(error)):
            log(f"\nInterrupted. To run it again:\n  {_again(given)}")
            return _stopped()
        line = _explained(name, error)
        if line is None or os.environ.get("MOESAIC_DEBUG"):
            raise
        return _failed(line)
    return _stopped() if code == 128 + signal.SIGINT else code


def _failed(line: str) -> int:
    log(line)
    report_failure(escaped(line))
    return 2


def _stopped() -> int:
    return 128 + (_signals.received or signal.SIGINT)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _explained(name: str, error: BaseException) -> str | None:
    """Returns a fault of the surroundings in one line; None for an error of moesaic."""
    if _lost_rank(error):
        return (
            f"moesaic {name}: another rank has ended; torchrun says which, and the same command resumes from the last "
            "checkpoint"
        )
    if _out_of_memory(error):
        advice = _MEMORY_ADVICE.get(name, "use a machine with more memory")
        return f"moesaic {name}: the memory is too small: {_first_line(error)}; {advice}"
    if isinstance(error, OSError) and error.errno is not None:
        from moesaic.files import write_error_advice

        path: str | bytes | None = error.filename2 or error.filename
        if path is None and error.strerror != os.strerror(error.errno):  # a message of our own says it all
            return f"moesaic {name}: {error.strerror}"
        # a write that fails does not know its file
        fault = f"{_text(path)} could not be used ({error.strerror})" if path else f"{error.strerror}"
        advice = write_error_advice(error, "file" if path is None else _text(path))
        kept = ": finished results are kept" if name in _RESUMABLE else ""
        return f"moesaic {name}: {fault}. {advice} and run the same again{kept}"
    return None


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    texts = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _lost_rank(error: BaseException) -> bool:
    """Whether a rank is gone: torch has errors of its own for that on a GPU, and messages of gloo on a CPU."""
    if type(error).__name__ in ("RankError", "DistBackendError", "DistNetworkError"):
        return True
    texts = ("onnection closed by peer", "onnection reset by peer", "gloo", "Timed out waiting")
    return torchrun_env.in_job() and isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _first_line(error: BaseException) -> str:
    """Returns the message without torch's place in its source: "can't allocate memory: you tried to …"."""
    text = " ".join(str(error).split())
    for start in ("DefaultCPUAllocator: ",):
        text = text.rpartition(start)[2]
    return (text.partition(". Error code")[0] or type(error).__name__)[:200]


def _text(path: str | bytes) -> str:
    """Returns the path of a file; of a temporary one, that of the file which it was to become."""
    text = os.fsdecode(path)
    folder, name = os.path.split(text)
    return os.path.join(folder, re.sub(r"^\.(.+)\.[^.]+\.unfinished$", r"\1", name))


def _again(given: Sequence[str]) -> str:
    from moesaic.cli.invocation import invocation

    return shlex.join([*invocation(), *given])


def log(message: str) -> None:
    """Writes lines to stderr. Control characters, which come from the names in files, are escaped."""
    _write_line(escaped(message))


def _write_line(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def escaped(text: str) -> str:
    r"""Returns the text with control characters, line breaks aside, as they are written in Python.

    >>> escaped("conv\x1b[2J.weight: ≥ 0")
    'conv\\x1b[2J.weight: ≥ 0'
    """
    return "".join(
        letter.encode("unicode_escape").decode() if category(letter) in _CONTROL and letter not in "\n\t" else letter
        for letter in text
    )


def replace_unencodable() -> None:
    """Lets consoles that cannot show a character show a question mark; the work must not fail on it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")
