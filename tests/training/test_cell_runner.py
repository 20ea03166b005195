"""Workers that share a folder: every cell once, dead workers replaced, the same results for all of them."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic.leases import Holder, Leases
from moesaic.training.cell_runner import CellWork, run_cells
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.result_cache import ResultCache, cell_digest
from moesaic.training.run_dir import FolderInUse


class Recorded(NoProgress):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self.events.append(("begin", name))

    def advance(self, amount: int, note: str = "") -> None:
        self.events.append(("advance", amount, note))

    def skip(self, amount: int) -> None:
        self.events.append(("skip", amount))

    def end(self) -> None:
        self.events.append(("end",))


def cell(number: int, done: list[int], inside: Callable[[Progress], None] = lambda progress: None) -> CellWork:
    def work(progress: Progress) -> dict[str, Any]:
        progress.begin(f"cell {number}", 2)
        inside(progress)
        done.append(number)
        progress.advance(2)
        progress.end()
        return {"square": number**2}

    return CellWork(f"cell {number}", {"number": number}, 2, work)


def squares(found: list[Any]) -> list[int]:
    return [each.result["square"] for each in found]


def test_results_are_in_the_order_of_the_cells_and_equal_cells_run_once(tmp_path: Path):
    done: list[int] = []
    cells = [cell(number, done) for number in (3, 1, 3, 2)]
    assert squares(run_cells(ResultCache(tmp_path), cells, NoProgress())) == [9, 1, 9, 4]
    assert done == [3, 1, 2]
    assert squares(run_cells(ResultCache(tmp_path), cells, NoProgress())) == [9, 1, 9, 4]
    assert done == [3, 1, 2]
    assert not list(tmp_path.glob("*.lease"))


def test_what_another_worker_finishes_meanwhile_is_skipped(tmp_path: Path):
    mine, others, progress = [], [], Recorded()

    def meanwhile(_: Progress) -> None:
        run_cells(ResultCache(tmp_path), [cell(2, others), cell(3, others)], NoProgress())

    cells = [cell(1, mine, meanwhile), cell(2, mine), cell(3, mine), cell(4, mine)]
    assert squares(run_cells(ResultCache(tmp_path), cells, progress)) == [1, 4, 9, 16]
    assert (mine, others) == ([1, 4], [2, 3])
    assert progress.events[3:9] == [
        ("begin", "cell 2"),
        ("skip", 2),
        ("end",),
        ("begin", "cell 3"),
        ("skip", 2),
        ("end",),
    ]


def test_a_cell_under_the_lease_of_another_worker_comes_last_and_is_waited_for(tmp_path: Path):
    done, progress = [], Recorded()
    other = ResultCache(tmp_path)
    lease = other.leases.hold(cell(1, []).digest)

    def wait(seconds: float) -> None:
        other.run("cell 1", {"number": 1}, lambda: {"square": 1})
        lease.release()

    cache = ResultCache(tmp_path, leases=Leases(tmp_path, wait=wait))
    assert squares(run_cells(cache, [cell(1, done), cell(2, done)], progress)) == [1, 4]
    assert done == [2]
    holder = Holder.of_this_process()
    note = f"waiting for 1 cell of other workers ({holder.host}, process {holder.pid})"
    assert ("advance", 0, note) in progress.events


def test_the_cell_of_a_worker_that_failed_is_run_by_who_waits(tmp_path: Path):
    done: list[int] = []
    lease = Leases(tmp_path).hold(cell(1, []).digest)
    cache = ResultCache(tmp_path, leases=Leases(tmp_path, wait=lambda seconds: lease.release()))
    assert squares(run_cells(cache, [cell(1, done)], NoProgress())) == [1]
    assert done == [1]


def test_an_error_is_raised_and_its_lease_is_released(tmp_path: Path):
    def fail(_: Progress) -> None:
        raise ValueError("diverged")

    with pytest.raises(ValueError, match="diverged"):
        run_cells(ResultCache(tmp_path), [cell(1, [], fail)], NoProgress())
    assert list(tmp_path.iterdir()) == []


def test_who_lost_the_lease_stops_and_takes_the_result_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held, progress, done = [], Recorded(), []
    acquire = Leases.acquire

    def remember(self: Leases, key: str) -> Any:
        held.append(acquire(self, key))
        return held[-1]

    monkeypatch.setattr(Leases, "acquire", remember)

    def taken_over(_: Progress) -> None:
        digest = cell(1, []).digest
        (tmp_path / f"{digest}.1.lease").write_bytes(Holder.of_this_process().to_bytes())
        held[0].beat()
        ResultCache(tmp_path).run("cell 1", {"number": 1}, lambda: {"square": 100})

    cache = ResultCache(tmp_path, leases=Leases(tmp_path, wait=lambda seconds: None))
    found = run_cells(cache, [cell(1, done, taken_over)], progress)
    assert squares(found) == [100]
    assert progress.events[:2] == [("begin", "cell 1"), ("end",)], "what it began is ended"


def test_the_first_result_that_is_stored_counts(tmp_path: Path):
    cache = ResultCache(tmp_path)

    def slower() -> dict[str, Any]:
        ResultCache(tmp_path).run("a", {"seed": 0}, lambda: {"accuracy": 1.0})
        return {"accuracy": 2.0}

    assert cache.run("a", {"seed": 0}, slower).result == {"accuracy": 1.0}
    assert len(list(tmp_path.iterdir())) == 1


def test_files_that_a_suspended_worker_has_locked_are_waited_for(tmp_path: Path):
    tries: list[int] = []

    def locked(_: Progress) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise FolderInUse("fit: another run is at work")

    waits: list[float] = []
    cache = ResultCache(tmp_path, leases=Leases(tmp_path, wait=waits.append))
    assert squares(run_cells(cache, [cell(1, [], locked)], NoProgress())) == [1]
    assert len(tries) == 2
    assert len(waits) == 1


def test_a_damaged_cell_under_a_lease_is_left_to_its_worker(tmp_path: Path):
    cache = ResultCache(tmp_path)
    path = cache.path("a", {"seed": 0})
    with Leases(tmp_path).hold(cell_digest({"seed": 0})):
        path.write_text("{")  # it is being written, on a file system without hard links
        assert cache.find("a", {"seed": 0}) is None
        assert path.exists()


# four processes, of which the first kills itself within its third cell; the others begin when it is dead
SCRIPT = """
import os, signal, sys
from pathlib import Path
from moesaic.training.progress import NoProgress
from moesaic.training.result_cache import ResultCache
from moesaic.training.cell_runner import CellWork, run_cells

out = Path(sys.argv[1])
dead, alive = os.pipe()

def log(line):
    file = os.open(out / "executed.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\\n".encode())
    os.close(file)

def run(worker):
    begun = []
    def cell(number):
        def work(progress):
            begun.append(number)
            log(f"begin {number} {worker}")
            if worker == 0 and len(begun) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"square": number**2}
        return CellWork(f"cell {number}", {"number": number}, 1, work, lambda: log(f"end {number} {worker}"))
    found = run_cells(ResultCache(out / "cells"), [cell(number) for number in range(45)], NoProgress())
    assert [each.result["square"] for each in found] == [number**2 for number in range(45)]

children = []
for worker in range(4):
    child = os.fork()
    if not child:
        code = 1
        try:
            if worker:
                os.close(alive)
                os.read(dead, 1)  # until the first worker is dead, and this end of the pipe with it
            run(worker)
            code = 0
        finally:
            os._exit(code)
    children.append(child)
os.close(alive)
# in their order, so that the dead worker is not waited for before the others have seen it
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in reversed(children)]
sys.exit(0 if codes == [0, 0, 0, -signal.SIGKILL] else f"ended with {codes}")
"""


def test_four_workers_do_45_cells_once_although_one_of_them_is_killed(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in (tmp_path / "executed.txt").read_text().splitlines()]
    begun = Counter(number for what, number, _ in lines if what == "begin")
    assert begun == Counter({str(number): 2 if number == 2 else 1 for number in range(45)})
    ended = Counter(number for what, number, _ in lines if what == "end")
    assert ended == Counter(map(str, range(45)))
    assert len(list((tmp_path / "cells").iterdir())) == 45, "no lease is left"
