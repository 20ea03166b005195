"""What is done, running and missing of a sweep."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.leases import Holder
from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan, read_plans
from moesaic.training.cell_status import folder_status
from moesaic.training.result_cache import ResultCache, cell_digest
from moesaic.validated_json import InvalidFile


def planned(number: int, needs: str = "") -> PlannedCell:
    return PlannedCell(f"cell {number}", cell_digest({"number": number}), needs)


def store(out: Path, number: int) -> Path:
    cache, spec = ResultCache(out / "cells"), {"number": number}
    cache.get_or_run(f"cell {number}", spec, lambda: {"square": number**2})
    return cache.path(f"cell {number}", spec)


def held(out: Path, number: int, holder: Holder, written: float) -> None:
    path = out / "cells" / f"{planned(number).digest}.0.lease"
    path.write_bytes(holder.to_bytes())
    os.utime(path, (written, written))


def test_each_cell_of_a_plan_has_its_state(tmp_path: Path):
    cells = [*(planned(number) for number in range(5)), planned(5, "needs a GPU")]
    add_to_plan(tmp_path, "asked", SweepPlan("a sweep", tuple(cells)))
    store(tmp_path, 0)
    store(tmp_path, 4).write_text("{")
    elsewhere = replace(Holder.of_this_process(), machine="another", host="far", pid=7, started=900.0)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    held(tmp_path, 1, elsewhere, 990.0)
    held(tmp_path, 2, replace(Holder.of_this_process(), pid=ended.pid), 950.0)
    [plan] = folder_status(tmp_path, lambda: 1000.0)
    assert [cell.state for cell in plan.cells] == ["done", "running", "abandoned", "missing", "damaged", "missing"]
    done, running, abandoned, _, _, unable = plan.cells
    assert done.seconds is not None
    assert (running.host, running.pid, running.started, running.heartbeat_age) == ("far", 7, 900.0, 10.0)
    assert abandoned.heartbeat_age == 50.0
    assert unable.needs == "needs a GPU"
    assert plan.count("missing") == 2


def test_cells_of_no_plan_are_shown_after_the_plans(tmp_path: Path):
    add_to_plan(tmp_path, "asked", SweepPlan("a sweep", (planned(0), replace(planned(0), name="the same"))))
    store(tmp_path, 0)
    store(tmp_path, 1)
    plan, others = folder_status(tmp_path)
    assert len(plan.cells) == 1, "the same work under two names is one cell"
    assert [(cell.name, cell.state) for cell in others.cells] == [("cell-1", "done")]


def test_a_cell_that_one_machine_cannot_run_is_replaced_in_the_plan_by_that_of_one_that_can(tmp_path: Path):
    unable, able = PlannedCell("a", "1", "needs data"), PlannedCell("a", "2")
    for cells in ((unable,), (able,), (unable,)):
        add_to_plan(tmp_path, "asked", SweepPlan("a sweep", cells))
    assert [plan.cells for plan in read_plans(tmp_path)] == [(able,)]


def test_a_damaged_plan_is_told_and_written_again_by_its_command(tmp_path: Path):
    add_to_plan(tmp_path, "asked", SweepPlan("a sweep", (planned(0),)))
    [path] = (tmp_path / "plans").iterdir()
    path.write_text("{}")
    (tmp_path / "cells").mkdir()
    with pytest.raises(InvalidFile, match="it must have"):
        folder_status(tmp_path)
    add_to_plan(tmp_path, "asked", SweepPlan("a sweep", (planned(0),)))
    assert folder_status(tmp_path)[0].count("missing") == 1


def test_a_lease_that_cannot_be_read_is_of_an_unknown_worker(tmp_path: Path):
    add_to_plan(tmp_path, "asked", SweepPlan("a sweep", (planned(0),)))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{planned(0).digest}.0.lease").write_bytes(b"")
    [plan] = folder_status(tmp_path)
    assert (plan.cells[0].state, plan.cells[0].host) == ("running", "")
