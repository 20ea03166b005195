"""Trains many trials at once, in chunks: on a CPU a thread for each core, on a GPU steps as CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.training.progress import Progress

__all__ = ["SharedProgress", "check_trials", "concatenate", "flushing_denormals", "replayable", "run_chunks"]

P = ParamSpec("P")
R = TypeVar("R")


class SharedProgress:
    """Progress that is shared by threads: their reports are serialised, and they stop when one of them fails."""

    def __init__(self, progress: Progress) -> None:
        self.stopped = threading.Event()
        self._progress = progress
        self._lock = threading.Lock()

    def call(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the function while no other thread does."""
        with self._lock:
            function(*args, **kwargs)

    def advance(self, amount: int) -> None:
        """Reports ``amount`` more steps or epochs of trials as done."""
        with self._lock:
            self._progress.advance(amount)
        if self.stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """Another chunk failed, or the user interrupted."""


def run_chunks(
    train: Callable[[int], R], starts: Sequence[int], device: torch.device, shared_progress: SharedProgress
) -> list[R]:
    """Runs ``train`` for each start: on a CPU in a pool with a thread for each core, in which torch uses one thread."""
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    if cores == 1 or len(starts) == 1:
        return [train(start) for start in starts]
    pool = ThreadPoolExecutor(min(cores, len(starts)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        waiting = [pool.submit(train, start) for start in starts]
        for each in as_completed(waiting):
            each.result()  # the first failure is raised at once, while other threads still run
        return [each.result() for each in waiting]
    except BaseException:
        shared_progress.stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the threads' setting is also that of threads to come


@contextmanager
def flushing_denormals() -> Generator[None]:
    """Flushes denormal numbers, below 1e-38, to 0 in this thread: they slow a CPU down a hundred times.

    The gradients of a network that fits its samples get that small.
    """
    already = float(torch.tensor(1e-40) * torch.tensor(0.5)) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def replayable(work: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Returns ``work``; on a GPU the replay of a CUDA graph of it, as launches outlast kernels.

    ``state`` are the tensors that ``work`` changes in place. They are left as they were.
    """
    if not state[0].is_cuda:
        return work
    before = [each.clone() for each in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # libraries initialize at the first call, which a graph must not capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for each, value in zip(state, before, strict=True):
        each.copy_(value)
    return graph.replay


def concatenate(parts: Sequence[R], *names: str) -> R:
    """Returns the first of several dataclasses with the tensors of these names from all parts; None stays None."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    joined = {name: None if values[0] is None else torch.cat(values) for name, values in columns.items()}
    return replace(cast("Any", parts[0]), **joined)


def check_trials(owner: str, trials: Iterable[int], samples: int, chunk: int | None) -> list[int]:
    """Returns the trials to train; refuses counts that make no sense."""
    check_positive(owner, samples=samples)
    if chunk is not None:
        check_positive(owner, chunk=chunk)
    numbers = list(trials)
    if not numbers:
        raise ValueError(f"{owner}: no trials to train; give at least one trial number")
    return numbers
