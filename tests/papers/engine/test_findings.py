"""Findings and charts survive the way through a file, and a damaged file says what is wrong with it."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.files import write_atomic, write_json
from moesaic.papers.engine.findings import Finding, read_findings, write_findings
from moesaic.report.chart import Blocks, Chart, Counts, Group, Panel, Points, Regions, Series, read_charts, write_charts

KEYS = {
    "id",
    "paper",
    "where",
    "statement",
    "fidelity",
    "preset",
    "published",
    "measured",
    "interval",
    "rule",
    "verdict",
    "seconds",
}

FINDING = Finding(
    id="samples",
    paper="chowdhury2023",
    where="Figure 4",
    statement="joint training needs 60 % of the CNN's samples",
    fidelity="print",
    preset="quick",
    published=60.0,
    measured=52.5,
    interval=(48.0, 57.25),
    rule="holds if the interval lies below 70",
    verdict="holds",
    seconds=1.5,
)

CHART = Chart(
    "figure-4",
    "chowdhury2023",
    "Figure 4",
    "Test accuracy",
    "Higher is better.",
    (
        Panel("print", "samples", "%", (Series("CNN", "cnn", (100, 200.5), (80.0, 90.0), (1.0, 2.0)),), level=95.0),
        Panel("l", "l", "samples", blocks=Blocks((1, 2), (10,), ((0.0, 1.0),)), log_y=True, log_x=True),
        Panel("to", "expert", "cluster", counts=Counts(("1", "2"), ("a",), ((3.0,), (4000.0,)))),
        Panel("plane", "", "", points=Points((Group("expert 1", "expert-1", (0.5,), (1.5,), "+", "class 1"),))),
        Panel(
            "regions",
            "",
            "",
            points=Points(
                (Group("expert 1", "expert-1", (), ()),),
                Regions((0.0, 1.0), (0.0,), ("expert-1",), ((0, -1),), ((-1.5, 2.0),)),
            ),
        ),
    ),
    columns=2,
    row_titles=("lines and blocks", "the rest"),
)


@pytest.mark.parametrize(
    "finding",
    [
        FINDING,
        replace(FINDING, published="falls with l", fidelity="released", verdict="partly: on one side only"),
        replace(FINDING, published=None, measured=None, interval=None, verdict="not run here: needs --preset short"),
        replace(FINDING, interval=(48.0, math.inf)),
        replace(FINDING, interval=(-math.inf, math.inf)),
    ],
    ids=["number", "word", "not run", "open above", "open"],
)
def test_findings_come_back_as_they_were_written(tmp_path: Path, finding: Finding):
    path = tmp_path / "claims.json"
    write_findings(path, [FINDING, finding])
    assert read_findings(path) == [FINDING, finding]


def test_a_claim_in_the_file_has_exactly_the_agreed_keys(tmp_path: Path):
    write_findings(tmp_path / "claims.json", [FINDING])
    (entry,) = json.loads((tmp_path / "claims.json").read_text("utf-8"))
    assert set(entry) == KEYS


def test_charts_come_back_as_they_were_written(tmp_path: Path):
    write_charts(tmp_path / "charts.json", [CHART])
    assert read_charts(tmp_path / "charts.json") == [CHART]


def test_a_gap_in_a_line_stays_a_gap(tmp_path: Path):
    gap = replace(CHART, panels=(Panel("", "", "", (Series("CNN", "cnn", (1.0, 2.0), (math.nan, 90.0)),)),))
    write_charts(tmp_path / "charts.json", [gap])
    missing, there = read_charts(tmp_path / "charts.json")[0].panels[0].series[0].y
    assert math.isnan(missing)
    assert there == 90.0


def test_the_files_are_json_that_every_reader_knows(tmp_path: Path):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    write_findings(tmp_path / "claims.json", [replace(FINDING, measured=math.nan, interval=(-math.inf, math.inf))])
    json.loads((tmp_path / "claims.json").read_text("utf-8"), parse_constant=refuse)


def test_a_list_of_numbers_takes_one_line_and_texts_stay_as_they_are(tmp_path: Path):
    content = {"rows": [[1.0, -2e-05], [math.nan, 3]], "texts": ["[\n 1,\n 2\n]", "[ 1 ]"], "none": []}
    write_json(tmp_path / "some.json", content)
    text = (tmp_path / "some.json").read_text("utf-8")
    assert "[1.0, -2e-05]" in text
    assert "[null, 3]" in text
    assert json.loads(text) == content | {"rows": [[1.0, -2e-05], [None, 3]]}


def test_a_marker_that_does_not_exist_is_refused_with_its_place(tmp_path: Path):
    path = tmp_path / "charts.json"
    write_charts(path, [CHART])
    path.write_text(path.read_text("utf-8").replace('"marker": "+"', '"marker": "heart"'), "utf-8")
    with pytest.raises(ValueError, match=r"groups\[0\]\.marker: 'heart'; expected one of"):
        read_charts(path)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "some.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text("utf-8")) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["some.json"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"measured": "much"}, "measured: 'much'; expected a float"),
        ({"measured": True}, "measured: True; expected a float"),
        ({"fidelity": "exact"}, "fidelity: 'exact'; expected one of"),
        ({"interval": [1.0]}, "interval: 1 values; expected 2"),
        ({"statement": 3}, "statement: 3; expected a str"),
        ({"verdict": "perhaps"}, "verdict='perhaps'"),
        ({"colour": "red"}, "has the keys"),
    ],
)
def test_a_finding_that_is_none_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], complaint: str):
    path = tmp_path / "claims.json"
    write_findings(path, [FINDING])
    (entry,) = json.loads(path.read_text("utf-8"))
    write_json(path, [entry | change])
    with pytest.raises(ValueError, match=r"claims\.json|Finding") as error:
        read_findings(path)
    assert complaint in str(error.value)


@pytest.mark.parametrize(("text", "complaint"), [("[{", "is not JSON"), ("{}", "expected a list")])
def test_a_damaged_file_says_so(tmp_path: Path, text: str, complaint: str):
    (tmp_path / "charts.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=complaint):
        read_charts(tmp_path / "charts.json")


def test_a_write_that_fails_leaves_the_file_of_before_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomic(path, b"before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
