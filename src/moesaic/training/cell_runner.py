"""Runs cells together with other workers: processes, on one machine or on several, that share the folder of the cells.

A worker takes the first cell that is neither finished nor under the lease of another worker, runs and stores it, and
looks again. When every pending cell is under a lease, it waits: for the results of the others, or for the leases
of dead workers to expire. All workers end with the same results, whichever worker computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.leases import Lease
from moesaic.training.progress import Progress
from moesaic.training.result_cache import CachedResult, ResultCache, cell_digest
from moesaic.training.run_dir import FolderInUse

__all__ = ["CellWork", "run_cells"]


@dataclass(frozen=True)
class CellWork:
    """A cell, and how it is computed."""

    name: str
    spec: Mapping[str, Any]
    steps: int
    """Amount of work, as progress counts it."""
    work: Callable[[Progress], Mapping[str, Any]]
    """Computes the result; begins and ends its part of the progress."""
    stored: Callable[[], None] = lambda: None
    """Is called when this worker has stored the result."""

    @property
    def digest(self) -> str:
        return cell_digest(self.spec)


def run_cells(
    cache: ResultCache,
    cells: Sequence[CellWork],
    progress: Progress,
    on_result: Callable[[str, CachedResult], None] = lambda digest, result: None,
    may_start: Callable[[CellWork], bool] = lambda cell: True,
) -> list[CachedResult]:
    """Returns the results of the cells, in their order, after running those that no other worker runs.

    Cells that are finished at the start are not part of the progress; those that others finish later are skipped in it.
    ``on_result`` is called with the digest and the result of each cell as soon as it is finished, by any worker.
    ``may_start`` is asked before each cell; one that may not start is left out, and has no result in the list.
    """
    by_digest: dict[str, CellWork] = {}
    for cell in cells:
        by_digest.setdefault(cell.digest, cell)
    results: dict[str, CachedResult] = {}

    def add(digest: str, result: CachedResult) -> None:
        results[digest] = result
        on_result(digest, result)

    for digest, cell in by_digest.items():
        result = _find(cache, cell)
        if result is not None:
            add(digest, result)
    pending = [cell for digest, cell in by_digest.items() if digest not in results]
    while pending:
        stored = cache.digests()
        for cell in pending:
            result = _find(cache, cell) if cell.digest in stored else None
            if result is not None:  # another worker has finished it
                add(cell.digest, result)
                progress.begin(cell.name, cell.steps)
                progress.skip(cell.steps)
                progress.end()
        pending = [cell for cell in pending if cell.digest not in results]
        pending = [cell for cell in pending if may_start(cell)]
        for cell in pending:
            result = _run(cache, cell, progress)
            if result is not None:
                add(cell.digest, result)
                pending.remove(cell)
                break
        else:
            if not pending:
                break
            progress.advance(0, _waiting(cache, pending))
            cache.leases.wait()
    cache.leases.remove(by_digest.keys())  # of workers that were killed between storing a cell and releasing it
    return [results[cell.digest] for cell in cells if cell.digest in results]


def _find(cache: ResultCache, cell: CellWork) -> CachedResult | None:
    return cache.find(cell.name, cell.spec)


def _run(cache: ResultCache, cell: CellWork, progress: Progress) -> CachedResult | None:
    """Runs the cell; None if another worker has it, or took it over."""
    lease = cache.leases.acquire(cell.digest)
    if lease is None:
        return None
    with lease:
        finished = _find(cache, cell)  # finished before this worker got the lease
        if finished is not None:
            progress.skip(cell.steps)
            return finished
        leased = _LeasedProgress(progress, lease)
        try:
            result = cache.run(cell.name, cell.spec, lambda: cell.work(leased))
        except Exception as error:
            # lost: the files of the cell belong to another worker now; in use: a suspended one has locked them
            if lease.lost or isinstance(error, FolderInUse):
                leased.close()
                return None
            raise
        cell.stored()
        return result


def _waiting(cache: ResultCache, pending: Sequence[CellWork]) -> str:
    holders = [cache.leases.holder(cell.digest) for cell in pending]
    names = sorted({f"{holder.host}, process {holder.pid}" for holder in holders if holder is not None})
    cells = "1 cell" if len(pending) == 1 else f"{len(pending)} cells"
    return f"waiting for {cells} of other workers ({'; '.join(names)})"


class _LeaseLost(Exception):
    """Another worker runs the cell."""


class _LeasedProgress(Progress):
    """Progress of a cell, which ends the work when the lease is lost."""

    def __init__(self, progress: Progress, lease: Lease) -> None:
        self._progress, self._lease, self._open = progress, lease, 0

    def close(self) -> None:
        """Ends what the work began."""
        while self._open:
            self.end()

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self._open += 1
        self._progress.begin(name, total, done)

    def advance(self, amount: int, note: str = "") -> None:
        if self._lease.lost:
            raise _LeaseLost
        self._progress.advance(amount, note)

    def skip(self, amount: int) -> None:
        self._progress.skip(amount)

    def end(self) -> None:
        self._open -= 1
        self._progress.end()

    def log(self, message: str) -> None:
        self._progress.log(message)
