"""Predictions as CSV: every name comes back, and none is a formula."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.report.prediction_csv import PredictionCSV
from moesaic.training.predict import Prediction, SelectedPatches

NAMES = [
    "plain",
    'a,b;c"d',
    "two\nlines",
    "two\rlines",
    "=cmd|' /C calc'!A0",
    "+1",
    "-1",
    "@sum",
    "'quoted",
    "\ttab",
    "＝full",
    " = ",
]


def written(classes: list[str], rows: list[tuple[str, Prediction]]) -> list[list[str]]:
    table = PredictionCSV(classes)
    for path, prediction in rows:
        table.add(path, prediction)
    return list(csv.reader(io.StringIO(table.encode().decode("utf-8", "surrogateescape"), newline="")))


def original(name: str) -> str:
    return name[1:] if name.startswith("'") else name


@pytest.mark.parametrize("name", NAMES)
def test_names_come_back_and_no_cell_is_a_formula(name: str):
    header, row = written([name, "other"], [(name, Prediction((0.75, 0.25), 10, {}))])
    assert header == ["path", "class", "probability", f"probability {name}", "probability other", "macs"]
    assert row[0].removeprefix("./") == name
    assert original(row[1]) == name
    assert row[2:] == ["0.75", "0.75", "0.25", "10"]
    for cell in (*header, *row):
        assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"))


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4))
def test_any_names_come_back(names: list[str]):
    shares = tuple(float(k == len(names) - 1) for k in range(len(names)))
    header, row = written(names, [(names[0], Prediction(shares, 1, {}))])
    assert header[3:-1] == [f"probability {name}" for name in names]
    assert row[0] in (names[0], f"./{names[0]}")
    assert original(row[1]) == names[-1]


def test_a_file_name_that_is_no_text_keeps_its_bytes():
    table = PredictionCSV(["a"])
    table.add(b"caf\xe9.png".decode("utf-8", "surrogateescape"), Prediction((1.0,), 1, {}))
    assert b"\ncaf\xe9.png,a,1,1,1\n" in table.encode()


def test_probabilities_keep_nine_digits_and_patches_are_json():
    selected = {"moe": SelectedPatches((2, 3), ((0, 5), (), (1,)))}
    header, row, other = written(
        ["a", "b"], [("x.png", Prediction((1 / 3, 2 / 3), 7, selected)), ("y.png", Prediction((1.0, 0.0), 7, {}))]
    )
    assert header[-1] == "patches moe 2x3"
    assert json.loads(row[-1]) == [[0, 5], [], [1]]
    assert float(row[3]) == pytest.approx(1 / 3, abs=1e-9)
    assert other[-1] == ""
