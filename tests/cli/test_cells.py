"""`moesaic cells`: the status of a sweep, joined folders, packed files, and what is refused."""

import json
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.leases import Leases
from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan
from moesaic.training.result_cache import ResultCache, cell_digest


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of 30 cells done."""
    monkeypatch.chdir(tmp_path)
    cells = [PlannedCell(f"cell [red]{i}", cell_digest({"i": i}), "needs a GPU" if i == 29 else "") for i in range(30)]
    add_to_plan(Path("out"), "asked", SweepPlan("compare pets", tuple(cells)))
    ResultCache(Path("out/cells")).get_or_run("cell 0", {"i": 0}, lambda: {"accuracy": 90.0})
    return Path("out")


def test_the_status_counts_and_lists_what_is_not_done(sweep: Path, capsys: pytest.CaptureFixture[str]):
    with Leases(sweep / "cells").hold(cell_digest({"i": 3})):
        assert main(["cells", "status", "out"]) == 0
        said = capsys.readouterr().out
        assert main(["cells", "status", "out", "--json"]) == 0
        [plan] = json.loads(capsys.readouterr().out)
    lines = said.splitlines()
    assert lines[0] == "compare pets: 1 of 30 cells done, 1 running, 28 missing"
    assert "cell [red]3" in lines[2], "what runs comes first"
    assert "running" in lines[2]
    assert "process" in lines[2]
    assert lines[-1] == "and 9 more; --json lists all"
    assert plan["title"] == "compare pets"
    assert [cell["state"] for cell in plan["cells"]].count("missing") == 28
    assert plan["cells"][3]["pid"] is not None
    assert plan["cells"][29]["needs"] == "needs a GPU"


def test_a_folder_is_packed_and_merged(sweep: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["cells", "pack", "out", "--out", "out.zip"]) == 0
    assert "1 cell in out.zip, 0.0 MB" in capsys.readouterr().out
    assert main(["cells", "merge", "out.zip", "out", "--out", "all"]) == 0
    assert capsys.readouterr().out == "1 cell added to all; 1 were there already\n"
    assert main(["cells", "status", "all"]) == 0
    assert capsys.readouterr().out.startswith("compare pets: 1 of 30 cells done, 29 missing\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["list", "out"], "ACTION='list' is unknown; use 'status', 'merge' or 'pack'"),
        (["status"], "status without DIR; name an output folder of compare or reproduce"),
        (["status", "out", "out"], "status takes one DIR, not 2; name one"),
        (["status", "none"], "none has no folder cells; name the folder that --out of compare or reproduce names"),
        (["status", "out", "--out", "x"], "--out='x' is for merge and pack; leave it out"),
        (["merge", "out"], "merge without --out; add --out DIR"),
        (["merge", "none", "--out", "x"], "none: there is no such folder or archive; check the path"),
        (["merge", "out", "--out", "x", "--json"], "--json is for status, not for merge; leave it out"),
        (["pack", "out"], "pack without --out; add --out FILE.zip"),
        (["pack", "out", "--out", "x.tar"], "--out='x.tar' is not a zip file; name one such as cells.zip"),
        (["pack", "out", "--out", "no/x.zip"], "there is no directory no; create it, or name another file"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(sweep: Path, capsys: pytest.CaptureFixture[str], given, message):
    assert main(["cells", *given]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_conflicting_results_are_told_with_both_values(sweep: Path, capsys: pytest.CaptureFixture[str]):
    ResultCache(Path("two/cells")).get_or_run("cell 0", {"i": 0}, lambda: {"accuracy": 80.0})
    assert main(["cells", "merge", "out", "two", "--out", "all"]) == 2
    assert "result.accuracy is 90.0 in the first, 80.0 in the second" in capsys.readouterr().err
    assert not Path("all").exists()
