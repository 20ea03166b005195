"""Trains chunks of trials in parallel on a CPU: one thread for each core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from moesaic.argument_checks import check_positive
from moesaic.training.progress import Progress

__all__ = ["SharedProgress", "check_trials", "flushing_denormals", "run_in_threads"]

P = ParamSpec("P")
R = TypeVar("R")


class SharedProgress:
    """Progress that is shared by threads: their reports are serialised, and they stop when one of them fails."""

    def __init__(self, progress: Progress) -> None:
        self.stopped = threading.Event()
        self._progress = progress
        self._lock = threading.Lock()

    def call(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the function while no other thread does."""
        with self._lock:
            function(*args, **kwargs)

    def advance(self, amount: int) -> None:
        """``amount`` more trial-epochs are done."""
        with self._lock:
            self._progress.advance(amount)
        if self.stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """Another chunk failed, or the user interrupted."""


def run_in_threads(train: Callable[[int], R], starts: Sequence[int], turns: SharedProgress) -> list[R]:
    """Run ``train`` for each start in a pool with a thread for each core; torch uses one thread in each."""
    cores = torch.get_num_threads()
    if cores == 1 or len(starts) == 1:
        return [train(start) for start in starts]
    pool = ThreadPoolExecutor(min(cores, len(starts)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        waiting = [pool.submit(train, start) for start in starts]
        for each in as_completed(waiting):
            each.result()  # the first failure is raised at once, while other threads still run
        return [each.result() for each in waiting]
    except BaseException:
        turns.stopped.set()
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


def check_trials(owner: str, trials: Iterable[int], samples: int, chunk: int | None) -> list[int]:
    """Returns the trials to train; refuses counts that make no sense."""
    check_positive(owner, samples=samples)
    if chunk is not None:
        check_positive(owner, chunk=chunk)
    numbers = list(trials)
    if not numbers:
        raise ValueError(f"{owner}: no trials to train; give at least one trial number")
    return numbers
