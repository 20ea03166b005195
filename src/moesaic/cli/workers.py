"""Worker processes of one command: ``--jobs N`` starts it N times on this machine.

A worker is the same command with `WORKER_VARIABLE` in its environment. It runs cells, as any process on the same folder
does (`moesaic.training.cell_runner`), and writes its progress to stdout, one JSON list in a line; the parent draws
figures and writes the report. A worker ends when its parent does: its stdin is a pipe that the parent holds open.

A worker that is killed is not missed: the others take over its cell, or the parent does when none is left. A worker
that fails ends all of them, with its message.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from moesaic.cli.faults import CommandError, log

if TYPE_CHECKING:
    from moesaic.report.progress_bars import Bars, Lines, Row

__all__ = ["WORKER_VARIABLE", "WorkerProgress", "cpu_threads", "is_worker", "job_count", "run_workers"]

WORKER_VARIABLE = "MOESAIC_WORKER"
"""Environment variable that a worker process has."""
_PATH_VARIABLE = "MOESAIC_WORKER_PATH"
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_START = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop({_PATH_VARIABLE!r})); "
    "from moesaic.cli import main; sys.exit(main())"
)
_MOST_JOBS = 1024
_SIGNALLED = 128
"""Exit codes of commands that a signal ended are this and its number."""
_FAULT = 2
"""Exit code of bad input and of faults, which are told in one line."""
_POLL_SECONDS = 0.5


def job_count(command: str, jobs: str, device: str) -> int:
    """Returns the number of workers of --jobs; auto: one for each GPU, or for each core.

    >>> job_count("compare", "3", "cpu")
    3
    """
    import torch

    if jobs == "auto":
        return max(1, torch.cuda.device_count() if device == "cuda" else _cores())
    if not jobs.isdecimal() or not 1 <= int(jobs) <= _MOST_JOBS:
        raise ValueError(f"{command}: --jobs={jobs!r}; it must be a number from 1 to {_MOST_JOBS}, or auto")
    return int(jobs)


def cpu_threads(jobs: int, earlier: Sequence[int]) -> int:
    """Returns the CPU threads of each worker, which are also those of its results: another number rounds differently.

    OMP_NUM_THREADS decides; else the number that results in the folder were computed with, where the machine has so
    many cores for each worker; else the cores are shared.
    """
    import torch

    if os.environ.get(_THREADS_VARIABLE):
        return torch.get_num_threads()
    share = max(1, _cores() // jobs)
    if earlier and earlier[0] <= share:
        return earlier[0]
    return share if jobs > 1 else torch.get_num_threads()


def is_worker() -> bool:
    """Whether this process is a worker of another one."""
    return WORKER_VARIABLE in os.environ


class WorkerProgress:
    """Progress of a worker, for its parent; implements `moesaic.training.Progress`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        threading.Thread(target=_end_with_parent, name="end with the parent", daemon=True).start()

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self._send("begin", name, total, done)

    def advance(self, amount: int, note: str = "") -> None:
        self._send("advance", amount, note)

    def skip(self, amount: int) -> None:
        self._send("skip", amount)

    def end(self) -> None:
        self._send("end")

    def log(self, message: str) -> None:
        self._send("log", message)

    def report(self, content: Mapping[str, Any]) -> None:
        """Hands something found to ``on_report`` of the parent's `run_workers`, as JSON."""
        self._send("report", content)

    def _send(self, *event: Any) -> None:
        with self._lock, suppress(OSError, ValueError):  # without a parent, `_end_with_parent` ends the process
            sys.stdout.write(f"{json.dumps(event)}\n")
            sys.stdout.flush()


def _end_with_parent() -> None:
    with suppress(OSError):
        # not by sys.stdin, whose lock would abort the interpreter when it ends
        while os.read(0, 1):
            pass
    signal.raise_signal(signal.SIGTERM)


def run_workers(
    given: Sequence[str],
    jobs: int,
    threads: int,
    device: str,
    display: Bars | Lines,
    on_report: Callable[[object], None] = lambda content: None,
) -> None:
    """Runs the command in so many workers and shows their progress as one, until all have ended.

    ``on_report`` gets what workers `report`; several may report the same.

    Raises:
        CommandError: a worker failed; with its message.
    """
    events: Events = queue.SimpleQueue()
    workers = [_Worker(given, number, threads, device, events) for number in range(jobs)]
    shown = _ShownProgress(display)
    running = set(workers)
    try:
        while running:
            try:
                worker, event = events.get(timeout=_POLL_SECONDS)
            except queue.Empty:  # a signal is handled between two waits
                continue
            match event:
                case ["report", content]:
                    on_report(content)
                    continue
                case list():
                    shown.show(worker, event)
                    continue
                case None:
                    pass
            running.discard(worker)
            shown.close(worker)
            worker.check_end()
    finally:
        shown.end()
        for worker in running:
            worker.stop()
        for worker in workers:
            worker.process.wait()
    killed = sum(worker.was_killed for worker in workers)
    if killed:
        log(f"{killed} of {jobs} workers were killed; what they left is done by the others, or now by this process")


class _Worker:
    """A worker process, and what it is at."""

    def __init__(self, given: Sequence[str], number: int, threads: int, device: str, events: Events) -> None:
        self.number = number
        self.row: Row | None = None
        self.depth = 0
        """Open tasks: the first is all work, the second a cell."""
        self.cell, self.done = "", 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process runs
        environment = {
            **os.environ,
            WORKER_VARIABLE: str(number),
            _PATH_VARIABLE: json.dumps(sys.path),
            _THREADS_VARIABLE: str(threads),
            "PYTHONIOENCODING": "utf-8",
            **_visible_gpu(number, device),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            # a session of its own: Ctrl-C reaches the parent alone, which then stops the workers
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it: by itself, or after the worker had saved a checkpoint."""
        return self.process.returncode < 0 or self.process.returncode > _SIGNALLED

    def stop(self) -> None:
        with suppress(OSError):
            self.process.terminate()

    def check_end(self) -> None:
        """Raises with the worker's message if it failed; one that a signal ended did not."""
        code = self.process.returncode
        if code == 0 or self.was_killed:
            return
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        # bad input and faults are one line, the last; anything else has a traceback
        raise CommandError(text.splitlines()[-1] if code == _FAULT and text else f"a worker ended with {code}:\n{text}")

    def _read(self, events: Events) -> None:
        """Passes events on; None in the end."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # half a line, of a worker that was killed
                    events.put((self, json.loads(line)))
        self.process.wait()
        events.put((self, None))


Events: TypeAlias = "queue.SimpleQueue[tuple[_Worker, list[Any] | None]]"


class _ShownProgress:
    """The progress of all workers: one bar for all work, and one for each worker's cell.

    Work is counted by cell: what a worker takes over, or finds finished, does not count twice.
    """

    def __init__(self, display: Bars | Lines) -> None:
        self._display = display
        self._name: str | None = None
        self._done: dict[str, int] = {}
        self._logged: set[str] = set()

    def show(self, worker: _Worker, event: list[Any]) -> None:
        match event:
            case ["begin", str(name), int(total), int(done)]:
                worker.depth += 1
                if worker.depth == 1:
                    self._begin(name, total, done)
                elif worker.depth == 2:
                    worker.cell, worker.done = name, 0
                    worker.row = self._display.row(f"  worker {worker.number + 1}: {name}", total)
            case ["advance", int(amount), str(note)]:
                self._count(worker, amount, note, skipped=False)
            case ["skip", int(amount)]:
                self._count(worker, amount, "", skipped=True)
            case ["end"]:
                worker.depth -= 1
                if worker.depth == 1:
                    self.close(worker)
            case ["log", str(message)] if message not in self._logged:  # of all workers alike
                self._logged.add(message)
                self._display.log(message)
            case _:
                pass

    def close(self, worker: _Worker) -> None:
        if worker.row is not None:
            worker.row.end()
            worker.row = None

    def end(self) -> None:
        if self._name is not None:
            self._display.end()
            self._name = None

    def _begin(self, name: str, total: int, done: int) -> None:
        if name != self._name:  # the first worker to get there
            self.end()
            self._name = name
            self._display.begin(name, total, done)

    def _count(self, worker: _Worker, amount: int, note: str, *, skipped: bool) -> None:
        if worker.row is None:
            self._display.advance(0, note)
            return
        worker.done += amount
        worker.row.advance(amount, note)
        before = self._done.get(worker.cell, 0)
        new = max(0, worker.done - before)
        self._done[worker.cell] = before + new
        if skipped:
            self._display.skip(new)
        else:
            self._display.advance(new, note)


def _visible_gpu(number: int, device: str) -> dict[str, str]:
    """The GPU of a worker, in turn; none where --device names one."""
    if device != "cuda":
        return {}
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": visible[number % len(visible)]}


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
