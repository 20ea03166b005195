"""Cells on disk: never done twice, never half there, damage noticed."""

import hashlib
import json
from pathlib import Path

import pytest

from moesaic.training.result_cache import ResultCache

SPEC = {"model": "joint", "samples": 300, "rate": 0.1}


class Work:
    def __init__(self, result: dict[str, object] | None = None) -> None:
        self.calls = 0
        self.result = result or {"accuracy": [0.1, 1 / 3, 0.95]}

    def __call__(self) -> dict[str, object]:
        self.calls += 1
        return self.result


def test_a_finished_cell_is_not_done_again(tmp_path: Path):
    work = Work()
    first = ResultCache(tmp_path).get_or_run("Figure 4: joint, 300", SPEC, work)
    again = ResultCache(tmp_path).get_or_run("Figure 4: joint, 300", SPEC, work)
    assert work.calls == 1
    assert again == first
    assert again.result == {"accuracy": [0.1, 1 / 3, 0.95]}, "numbers survive the file exactly"


def test_the_same_work_under_another_name_is_the_same_cell(tmp_path: Path):
    work = Work()
    cells = ResultCache(tmp_path)
    cells.get_or_run("Figure 4", SPEC, work)
    cells.get_or_run("Figure 7", dict(reversed(SPEC.items())), work)
    assert work.calls == 1


@pytest.mark.parametrize("change", [{"samples": 301}, {"model": "cnn"}, {"rate": 0.1000001}, {"more": None}])
def test_another_specification_is_another_cell(tmp_path: Path, change: dict[str, object]):
    work = Work()
    cells = ResultCache(tmp_path)
    cells.get_or_run("a", SPEC, work)
    cells.get_or_run("a", SPEC | change, work)
    assert work.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def corrupt(path: Path, how: str) -> None:
    text = path.read_text()
    if how == "half a file":
        path.write_text(text[: len(text) // 2])
    elif how == "empty":
        path.write_text("")
    elif how == "a changed number":
        path.write_text(text.replace("0.95", "0.96"))
    elif how == "another cell's content":
        content = json.loads(text)
        content["spec"]["samples"] = 500
        path.write_text(json.dumps(content))
    elif how == "nested too deep":
        path.write_text("[" * 100_000)
    elif how == "a result that is none":
        content = {**json.loads(text), "result": 7}
        del content["digest"]
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        path.write_text(json.dumps({**content, "digest": hashlib.sha256(canonical).hexdigest()}))
    elif how == "not text":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        path.write_text("[1, 2]")


@pytest.mark.parametrize(
    "how",
    [
        "half a file",
        "empty",
        "a changed number",
        "another cell's content",
        "nested too deep",
        "a result that is none",
        "not text",
        "no cell",
    ],
)
def test_a_damaged_cell_is_reported_set_aside_and_done_again(tmp_path: Path, how: str):
    work, messages = Work(), []
    cells = ResultCache(tmp_path, messages.append)
    cells.get_or_run("a", SPEC, work)
    path = cells.path("a", SPEC)
    corrupt(path, how)
    damaged = path.read_bytes()
    again = cells.get_or_run("a", SPEC, work)
    assert work.calls == 2
    assert again.result == work.result
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged, "nothing is lost"
    assert len(messages) == 1
    assert path.name in messages[0]
    assert ResultCache(tmp_path, messages.append).get_or_run("a", SPEC, work).result == work.result
    assert work.calls == 2


def test_a_cell_under_the_name_of_another_is_not_taken_for_it(tmp_path: Path):
    cells, messages = ResultCache(tmp_path), []
    cells.get_or_run("a", SPEC, Work({"accuracy": [0.1]}))
    other = SPEC | {"samples": 500}
    cells.path("a", SPEC).replace(cells.path("a", other))  # whole, but in the wrong place
    later = ResultCache(tmp_path, messages.append)
    assert later.find("a", other) is None
    assert later.get_or_run("a", other, Work()).result == Work().result
    assert "another specification" in messages[0]


def test_work_that_fails_leaves_nothing(tmp_path: Path):
    def interrupted() -> dict[str, object]:
        raise KeyboardInterrupt

    cells = ResultCache(tmp_path / "cells")
    with pytest.raises(KeyboardInterrupt):
        cells.get_or_run("a", SPEC, interrupted)
    assert cells.find("a", SPEC) is None
    assert cells.get_or_run("a", SPEC, Work()).result == Work().result


def test_what_a_kill_left_half_written_does_no_harm(tmp_path: Path):
    cells = ResultCache(tmp_path)
    path = cells.path("a", SPEC)
    path.with_name(f".{path.name}.123.unfinished").write_text("{")
    assert cells.find("a", SPEC) is None
    work = Work()
    cells.get_or_run("a", SPEC, work)
    assert ResultCache(tmp_path).get_or_run("a", SPEC, work).result == work.result
    assert work.calls == 1


def test_a_result_that_json_does_not_know_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        ResultCache(tmp_path).get_or_run("a", SPEC, Work({"accuracy": float("nan")}))
    assert ResultCache(tmp_path).find("a", SPEC) is None


def test_names_make_safe_file_names(tmp_path: Path):
    path = ResultCache(tmp_path).path("../l = 4 / N: 300\n" + "x" * 300, SPEC)
    assert path.parent == tmp_path
    assert len(path.name) < 100


def test_a_cell_keeps_the_seconds_of_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = iter([100.0, 107.5])
    monkeypatch.setattr("moesaic.training.result_cache.time.perf_counter", lambda: next(now))
    ResultCache(tmp_path).get_or_run("a cell", SPEC, Work())
    found = ResultCache(tmp_path).find("a cell", SPEC)
    assert found is not None
    assert found.seconds == 7.5
