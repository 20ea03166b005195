"""The benchmark of routed MLPs: eager steps beside those in graphs, and bars for both."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import loaded_script

from moesaic.bench.timing import Roofline, Timing


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with loaded_script("mlp") as module:
        yield module


def test_every_step_is_timed_eager_too(script, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(script, "measure_roofline", lambda *given: Roofline(1e11, 1e12))  # which takes a while
    out = tmp_path / "mlp.json"
    script.main(["--only", "ours,bmm,dense,grouped", "--repetitions", "1", "--out", str(out)])
    content = json.loads(out.read_text())
    assert {row["what"] for row in content["steps"]} >= {"ours", "ours, torch", "bmm", "dense"}
    for row in content["steps"]:
        assert row["eager, ms"] == row["step, ms"], "a CPU has no graphs"
        assert len(row["eager quartiles, ms"]) == 2
    assert content["equality"]["ours"]["equal"]


def test_eager_steps_have_bars_of_their_own(script):
    def timings(**milliseconds: float) -> dict[str, Timing]:
        return {name: Timing(value, value, value) for name, value in milliseconds.items()}

    lines = script.verdicts(timings(ours=1.0, grouped=1.4, dense=0.95), timings(ours=4.0, grouped=3.0, dense=1.0))
    assert lines == [
        "ahead of grouped by 1.40× (bar 1.3×): reached",
        "1.05× the dense MLP's time (goal 1.1×): reached",
        "eager, ahead of grouped by 0.75× (bar 1×): MISSED",
    ]
