"""A run's folder is read while the run goes on, and a stranger's folder is checked."""

import json
import re
from dataclasses import replace

import pytest
from training.squares import LONG, TASK, Notes, dense, routed

from moesaic.training.fit import fit
from moesaic.training.run_reader import is_run, read_run
from moesaic.validated_json import InvalidFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, fit(routed(), TASK, replace(LONG, epochs=2), out=folder)


def test_a_complete_run_is_read_as_it_was_returned(whole):
    folder, result = whole
    run = read_run(folder)
    assert is_run(folder)
    assert run.epochs == result.epochs
    assert run.result is not None
    assert run.result.class_accuracy == result.class_accuracy
    assert run.data.classes == ("up", "down")
    assert (run.model_name, run.total_epochs, run.seed) == ("Routed", 2, 0)
    assert run.predictions is not None


def test_a_run_in_progress_has_what_is_there(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(dense(), TASK, LONG, out=tmp_path, progress=Notes(2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"number": 3, "lo')  # a line that is being written
    run = read_run(tmp_path)
    assert [epoch.number for epoch in run.epochs] == [1, 2]
    assert run.result is None
    assert run.total_epochs == 4
    (tmp_path / "metrics.jsonl").unlink()
    assert read_run(tmp_path).epochs == ()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model": {}, "data": {"name": "x"}, "recipe": {}, "seed": 0}'),
        ("metrics.jsonl", '{"number": 1}\n'),
        ("metrics.jsonl", "7\n"),
        ("metrics.jsonl", "no json\n"),
        ("result.json", "{}"),
        ("predictions.safetensors", "x"),
    ],
)
def test_what_no_run_writes_is_refused_in_one_line(whole, tmp_path, name, content):
    for path in whole[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidFile) as refused:
        read_run(tmp_path)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("loss", 1e300), ("number", 0), ("alarms", [1]), ("lr", "x")])
def test_numbers_that_are_none_are_refused(whole, tmp_path, key, value):
    for path in whole[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    del line["sha256"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, key: value}) + "\n")
    with pytest.raises(InvalidFile, match="line 1") as refused:
        read_run(tmp_path)
    assert "checksum" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
def test_a_changed_digit_is_noticed(whole, tmp_path, name):
    for path in whole[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / name).read_text()
    key = {"config.json": '"seed": 0', "metrics.jsonl": '"number": 1', "result.json": '"number": 1'}[name]
    assert key in text
    (tmp_path / name).write_text(text.replace(key, key[:-1] + "5", 1))
    with pytest.raises(InvalidFile, match="checksum"):
        read_run(tmp_path)


def test_files_of_earlier_versions_have_no_checksum(whole, tmp_path):
    for path in whole[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "metrics.jsonl", "result.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(re.sub(r',\s*"sha256": "\w{64}"', "", text))
        assert "sha256" not in (tmp_path / name).read_text()
    run = read_run(tmp_path)
    assert run.epochs == whole[1].epochs
    assert run.result is not None


def test_another_folder_is_no_run(tmp_path):
    assert not is_run(tmp_path)
    (tmp_path / "config.json").write_text('{"command": "moesaic compare"}')
    assert not is_run(tmp_path)
