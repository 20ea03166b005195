"""A short version of the kill campaign: a run that is killed ends as one that is not."""

import json
from pathlib import Path

import pytest
from benchmark_scripts import loaded_script


@pytest.fixture(scope="module")
def kills():
    with loaded_script("kills") as module:
        yield module


def test_a_killed_training_ends_with_the_results_of_an_undisturbed_one(kills, tmp_path: Path, capsys):
    [tally] = kills.main(["--kills", "2", "--commands", "train", "--seed", "1", "--out", str(tmp_path / "kills.json")])
    assert tally.kills == 2
    assert (tally.lost, tally.redone, tally.different, tally.refused) == (0, 0, 0, 0), capsys.readouterr().err
    assert json.loads((tmp_path / "kills.json").read_text())["commands"][0]["kills"] == 2


def test_results_are_compared_without_times_but_with_everything_else(kills, tmp_path: Path):
    def digest(content: object) -> dict[str, str]:
        (tmp_path / "result.json").write_text(json.dumps(content))
        return kills.digests(tmp_path, "*.json")

    first = digest({"accuracy": 90.0, "epochs": [{"loss": 1.0, "seconds": 3.0}], "digest": "ab"})
    assert first == digest({"accuracy": 90.0, "epochs": [{"loss": 1.0, "seconds": 4.0}], "digest": "cd"})
    assert first != digest({"accuracy": 90.0, "epochs": [{"loss": 1.1, "seconds": 3.0}], "digest": "ab"})
