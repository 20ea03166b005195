"""Cells that are carried between machines: merged where they agree, refused where they do not, packed the same way."""

import zipfile
from pathlib import Path
from typing import Any

import pytest

from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan, read_plans
from moesaic.training.cell_transfer import ConflictingCells, Merged, first_difference, merge_cells, pack_cells
from moesaic.training.result_cache import ResultCache, cell_digest
from moesaic.validated_json import InvalidFile


def store(out: Path, seed: int, **result: Any) -> Path:
    cache, spec = ResultCache(out / "cells"), {"seed": seed}
    cache.get_or_run(f"cell {seed}", spec, lambda: result or {"accuracy": [90.0 + seed]})
    return cache.path(f"cell {seed}", spec)


def plan(out: Path, *names: str) -> None:
    add_to_plan(out, "asked", SweepPlan("a sweep", tuple(PlannedCell(name, name) for name in names)))


def network(out: Path, name: str = "wrn-0123456789abcdef", *, whole: bool = True) -> Path:
    folder = out / "networks" / name
    folder.mkdir(parents=True)
    for file in ("config.json", "metrics.jsonl", "model.safetensors", *(["result.json"] if whole else [])):
        (folder / file).write_text(file)
    return folder


def names(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    one, two = tmp_path / "one", tmp_path / "two"
    for out, seeds in ((one, (0, 1)), (two, (1, 2, 3))):
        for seed in seeds:
            store(out, seed)
        plan(out, *(f"cell {seed}" for seed in seeds))
    network(one)
    network(two, "unfinished-0123456789abcdef", whole=False)
    (two / "cells" / "0123456789abcdef.0.lease").write_text("{}")
    return one, two


def test_folders_are_joined_with_plans_and_finished_networks(parts, tmp_path: Path):
    one, two = parts
    out = tmp_path / "out"
    assert merge_cells([one, two], out) == Merged(cells=4, known=1, networks=1)
    assert [path.name for path in (out / "networks").iterdir()] == ["wrn-0123456789abcdef"]
    for seed in range(4):
        found = ResultCache(out / "cells").find("", {"seed": seed})
        assert found is not None
        assert found.result == {"accuracy": [90.0 + seed]}
    [joined] = read_plans(out)
    assert [cell.name for cell in joined.cells] == [f"cell {seed}" for seed in range(4)]
    assert not list(out.rglob("*.lease"))
    assert merge_cells([one, two], out) == Merged(cells=0, known=5, networks=0)


def test_a_packed_folder_is_the_same_as_the_folder_and_always_the_same_bytes(parts, tmp_path: Path):
    one, _ = parts
    assert pack_cells(one, tmp_path / "a.zip") == 2
    for path in one.rglob("*"):
        path.touch()
    assert pack_cells(one, tmp_path / "b.zip") == 2
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    merge_cells([tmp_path / "a.zip"], tmp_path / "out")
    assert names(tmp_path / "out") == names(one)
    for name in names(one):
        assert (tmp_path / "out" / name).read_bytes() == (one / name).read_bytes()


def test_times_may_differ_and_the_first_source_counts(tmp_path: Path):
    first = store(tmp_path / "one", 0, accuracy=90.0, seconds=1.0)
    store(tmp_path / "two", 0, accuracy=90.0, seconds=2.0)
    merge_cells([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    [path] = (tmp_path / "out" / "cells").iterdir()
    assert path.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("there", [False, True])
def test_different_results_of_one_specification_are_refused_with_both_values(tmp_path: Path, there: bool):
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    first = store(out if there else one, 0, accuracy=[90.0, 91.0])
    second = store(two, 0, accuracy=[90.0, 91.5])
    store(two, 1)
    before = names(out) if there else []
    with pytest.raises(ConflictingCells) as conflict:
        merge_cells([two] if there else [one, two], out)
    message = str(conflict.value)
    assert f"{first} and {second} have different results" in message
    assert "result.accuracy[1] is 91.0 in the first, 91.5 in the second; remove one of the two" in message
    assert (names(out) if there else list(tmp_path.glob("out"))) == before, "nothing was written"


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1, "seconds": 3}, {"a": 1, "seconds": 4}, None),
        ({"curve": [{"seconds": 1, "x": 2}]}, {"curve": [{"x": 2}]}, None),
        ({"a": 1}, {"b": 1}, ("result.a", 1, None)),
        ({"a": [1]}, {"a": [1, 2]}, ("the length of result.a", 1, 2)),
        ({"a": [1]}, {"a": 1}, ("result.a", [1], 1)),
        ({"a": {"b": [0.1]}}, {"a": {"b": [0.2]}}, ("result.a.b[0]", 0.1, 0.2)),
    ],
)
def test_the_first_difference_is_found_with_its_place(one: Any, other: Any, found: Any):
    assert first_difference(one, other) == found


def test_damaged_cells_and_plans_are_left_out_and_logged(parts, tmp_path: Path):
    one, two = parts
    path = store(one, 0)
    path.write_text(path.read_text().replace("90.0", "95.0"))
    misplaced = store(one, 1)
    misplaced.rename(misplaced.with_name("cell-1-0123456789abcdef.json"))
    next((one / "plans").iterdir()).write_text("[")
    logged: list[str] = []
    merge_cells([one, two], tmp_path / "out", logged.append)
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 3
    assert any("does not match its digest" in message for message in logged)
    assert any("another specification" in message for message in logged)
    assert any("is not JSON" in message for message in logged)


def test_a_damaged_cell_of_the_folder_is_replaced_unless_a_worker_runs_it(parts, tmp_path: Path):
    one, out = parts[0], tmp_path / "out"
    paths = [store(out, seed) for seed in (0, 1)]
    for path in paths:
        path.write_text("{")
    cache = ResultCache(out / "cells")
    with cache.leases.hold(cell_digest({"seed": 1})):
        merge_cells([one], out)
        assert cache.find("", {"seed": 0}) is not None
        assert paths[1].read_text() == "{"


def test_files_of_an_archive_that_are_no_cells_are_not_written(tmp_path: Path):
    content = store(tmp_path / "one", 0).read_bytes()
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for name in (
            "../cells/a-0123456789abcdef.json",
            "cells/../../a.json",
            "cells/x/a.json",
            "run.py",
            "cells/.json",
        ):
            archive.writestr(name, content)
        archive.writestr("networks/../../x-0123456789abcdef/model.safetensors", b"")
    assert merge_cells([tmp_path / "evil.zip"], tmp_path / "out") == Merged(0, 0, 0)
    assert names(tmp_path / "out") == []
    assert not list(tmp_path.glob("*.json"))


def test_what_is_no_folder_of_cells_is_told(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="there is no such folder or archive"):
        merge_cells([tmp_path / "none"], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="has no folder cells; name the folder that --out"):
        merge_cells([tmp_path], tmp_path / "out")
    (tmp_path / "a.zip").write_text("no archive")
    with pytest.raises(InvalidFile, match="is not a complete zip file"):
        merge_cells([tmp_path / "a.zip"], tmp_path / "out")


def test_a_network_that_is_too_large_is_left_out_and_logged(parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesaic.training.cell_transfer.MAX_FILE_BYTES", 1000)
    (parts[0] / "networks" / "wrn-0123456789abcdef" / "model.safetensors").write_bytes(bytes(1001))
    logged: list[str] = []
    assert merge_cells([parts[0]], tmp_path / "out", logged.append) == Merged(2, 0, 0)
    assert "wrn-0123456789abcdef is left out: model.safetensors" in logged[0]
    pack_cells(parts[0], tmp_path / "a.zip", logged.append)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert not any(name.startswith("networks/") for name in archive.namelist())
