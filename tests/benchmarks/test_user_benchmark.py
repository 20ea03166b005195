"""The benchmark of what users run: every part runs on a CPU, and a bar is judged in the direction of its unit."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import loaded_script


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with loaded_script("user") as module:
        yield module


def test_rows_of_layers_and_fit_are_written(script, tmp_path: Path, capsys):
    out = tmp_path / "user.json"
    script.main(["--small", "--repetitions", "1", "--only", "layers,mlp,fit", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["unit"] for row in rows] == ["× as fast", "× as fast", "ms", *["× as fast"] * 5]
    assert all(row["figure"] > 0 for row in rows)
    assert "reached" not in capsys.readouterr().out  # small sizes say nothing of the bars


def test_unknown_parts_are_refused(script):
    with pytest.raises(SystemExit, match="layer is not a part; choose from layers, mlp"):
        script.main(["--only", "layer"])


@pytest.mark.parametrize(
    ("unit", "figure", "reached"),
    [
        ("× as fast", 1.2, "yes"),
        ("× as fast", 1.19, "no"),
        ("of a captured step", 1.21, "yes"),
        ("ms", 1.2, "yes"),
        ("× one", 1.21, "no"),
    ],
)
def test_a_bar_is_judged_in_the_direction_of_its_unit(script, unit, figure, reached):
    assert script.Row("a", figure, unit, 1.2, None).reached == reached


def test_a_part_that_fails_costs_no_other_its_rows(script, tmp_path: Path, monkeypatch, capsys):
    def failing(options):
        yield script.Row("first", 1.0, "ms", None, None)
        raise RuntimeError("no memory")

    monkeypatch.setitem(script.PARTS, "mlp", failing)
    out = tmp_path / "user.json"
    with pytest.raises(SystemExit, match="failed: mlp"):
        script.main(["--small", "--repetitions", "1", "--only", "mlp,layers", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert (rows[0]["what"], len(rows)) == ("first", 6)
    assert "RuntimeError: no memory" in capsys.readouterr().err
