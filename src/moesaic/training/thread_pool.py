"""Chunks of trials side by side on a CPU: every core has trials of its own and works on them in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from moesaic.checks import check_positive
from moesaic.training.progress import Progress

__all__ = ["SharedProgress", "check_device", "check_trials", "flushing_denormals", "run_in_threads"]

P = ParamSpec("P")
R = TypeVar("R")


class SharedProgress:
    """Lets chunks in several threads report what they do, one at a time, and tells them when to stop."""

    def __init__(self, progress: Progress) -> None:
        self.stopped = threading.Event()
        self._progress = progress
        self._lock = threading.Lock()

    def call(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it while no other chunk does."""
        with self._lock:
            function(*args, **kwargs)

    def advance(self, amount: int) -> None:
        """So many trial-epochs are done."""
        with self._lock:
            self._progress.advance(amount)
        if self.stopped.is_set():
            raise _Stopped


class _Stopped(Exception):
    """Another chunk failed, or the user interrupted."""


def run_in_threads(train: Callable[[int], R], starts: Sequence[int], turns: SharedProgress) -> list[R]:
    """One thread a core, each of which computes by itself."""
    cores = torch.get_num_threads()
    if cores == 1 or len(starts) == 1:
        return [train(start) for start in starts]
    pool = ThreadPoolExecutor(min(cores, len(starts)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        waiting = [pool.submit(train, start) for start in starts]
        for each in as_completed(waiting):
            each.result()  # what fails first is raised at once, whoever is still at work
        return [each.result() for each in waiting]
    except BaseException:
        turns.stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the threads' setting is also that of threads to come


@contextmanager
def flushing_denormals() -> Generator[None]:
    """Numbers below 1e-38 count as 0 in this thread: a CPU takes a hundred times as long for each of them.

    A network that is sure of its samples has a loss whose slopes are that small.
    """
    already = float(torch.tensor(1e-40) * torch.tensor(0.5)) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def check_trials(owner: str, trials: Iterable[int], samples: int, chunk: int | None) -> list[int]:
    """The trials to train, once the counts are known to make sense."""
    check_positive(owner, samples=samples)
    if chunk is not None:
        check_positive(owner, chunk=chunk)
    numbers = list(trials)
    if not numbers:
        raise ValueError(f"{owner}: no trials to train; give at least one trial number")
    return numbers


def check_device(owner: str, device: torch.device | str) -> torch.device:
    """The device, if it is there."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{owner}: device={str(found)!r}, but torch finds no GPU here; use device='cpu'")
    return found
