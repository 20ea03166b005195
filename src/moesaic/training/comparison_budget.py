"""The time budget of ``compare --minutes``, shared by workers: one of them plans, and all make the same decisions.

How much fits into a budget depends on measured times, so workers that planned on their own would disagree. The first
worker plans and publishes what it chose; those that join follow it. Whether there is time for another trial is decided
once for each look, by the first worker that gets there; the others read its decision. The end of the budget is a wall
time: clocks that differ by seconds move it by as much, and change nothing else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from moesaic.files import json_digest, write_json
from moesaic.leases import Lease, Leases
from moesaic.training.cell_plan import PLANS
from moesaic.training.result_cache import ResultCache
from moesaic.validated_json import InvalidFile, decode, read_json

__all__ = ["BudgetPlan", "SharedTimeBudget"]


@dataclass(frozen=True)
class BudgetPlan:
    """The part of a comparison that fits the budget, and its deadline."""

    samples: tuple[int, ...]
    trials: int
    epochs: int
    workers: int
    """Workers that share the time; those that join later are not counted."""
    deadline: float
    """Unix time."""
    session: str
    """Identifies a budget: the same command has a new one each time, unless other workers are active."""


class SharedTimeBudget:
    """The budget of the workers of one comparison.

    Args:
        out: folder of the comparison.
        command: options of the command, as plain JSON.
        cells: leases of the cells, which show whether others are at work.
        clock: Unix time.
    """

    def __init__(self, out: Path, command: Any, cells: Leases, clock: Callable[[], float] = time.time) -> None:
        self._folder = out / PLANS / "budget"
        self._key = json_digest(command)[:16]
        self._cells, self._clock = cells, clock
        self._leases = Leases(self._folder)
        self._lease: Lease | None = None
        self._plan: BudgetPlan | None = None
        self._looks = 0
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        """Folders that are not there yet."""

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._key}.json"

    def join(self) -> BudgetPlan | None:
        """Returns the plan of the workers that are at work; None if there are none: the caller publishes a plan."""
        while True:
            self._lease = self._leases.acquire(self._key)
            plan = self._read()
            if self._lease is not None and not (plan and self._cells.has_live()):
                self._path.unlink(missing_ok=True)
                return None
            if plan is not None:
                self._plan = plan
                return plan
            self._leases.wait()  # until the first worker has measured

    def publish(self, samples: tuple[int, ...], trials: int, epochs: int, workers: int, seconds: float) -> None:
        """Lets others follow the plan, which has so many seconds left."""
        deadline = self._clock() + seconds
        self._plan = BudgetPlan(samples, trials, epochs, workers, deadline, secrets.token_hex(8))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path, asdict(self._plan))

    def seconds_left(self) -> float:
        """Returns the time left to all workers together, at the next look: the same in every worker."""
        assert self._plan is not None, "join or publish comes first"
        plan, look = self._plan, self._looks
        self._looks += 1
        decisions = ResultCache(self._folder / "looks")
        spec = {"session": plan.session, "look": look}
        decided = decisions.get_or_run(f"look {look + 1}", spec, lambda: {"seconds": plan.deadline - self._clock()})
        return plan.workers * cast("float", decided.result["seconds"])

    def close(self) -> None:
        """Ends the part of this worker; where it found no plan that fits, the folders are as they were before."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._plan is None:
            for path in self._made:
                with suppress(OSError):  # others use it
                    path.rmdir()

    def _read(self) -> BudgetPlan | None:
        try:
            return cast("BudgetPlan", decode(BudgetPlan, read_json(self._path), "budget"))
        except (FileNotFoundError, InvalidFile):
            return None
