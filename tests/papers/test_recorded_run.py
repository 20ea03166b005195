"""Specifications of cells, and the verdicts and charts of a recorded run: they change only on purpose."""

import json
import zipfile
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from papers.record import RUN, SPECS, cell_specs

from moesaic.papers.engine.findings import Finding
from moesaic.papers.reproduce import PAPERS, ReproduceResult, reproduce
from moesaic.training import NoProgress


class NoTraining(NoProgress):
    def begin(self, name: str, total: int, done: int = 0) -> None:
        assert total == 0, f"the recorded run has no cell for {name!r}: its specification changed"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with zipfile.ZipFile(RUN) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def early() -> list[Finding]:
    """Findings in the order in which they were known."""
    return []


@pytest.fixture(scope="module")
def repeated(recorded: Path, early: list[Finding]) -> ReproduceResult:
    return reproduce(out=recorded, progress=NoTraining(), on_finding=early.append)


def same(actual: Any, expected: Any) -> bool:
    """Equal but for the last digits of floats, which may differ between versions of numpy."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same(actual[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(expected, float):
        return actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
    return actual == expected


def as_read(value: Any) -> Any:
    return json.loads(json.dumps(asdict(value)))


def test_cells_have_the_specifications_under_which_their_results_are_stored(tmp_path):
    expected, found = json.loads(SPECS.read_text("utf-8")), cell_specs(tmp_path)
    changed = [name for name in expected | found if expected.get(name) != found.get(name)]
    assert not changed, f"stored results of these cells are lost; record.py says what to do: {changed}"


def test_recorded_results_give_the_recorded_verdicts(recorded, repeated):
    expected = json.loads((recorded / "claims.json").read_text("utf-8"))
    found = [as_read(finding) for finding in repeated.findings]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        ours["seconds"] = theirs["seconds"]
        assert same(ours, theirs), (ours, theirs)


def test_verdicts_that_come_early_are_those_of_the_end(repeated, early):
    final = [finding for finding in repeated.findings if finding.decision != "not run here"]
    key = attrgetter("paper", "id", "fidelity")
    assert sorted(early, key=key) == sorted(final, key=key)


def test_the_main_claim_of_each_paper_comes_before_the_others(repeated, early):
    """In one form at least, apart from claims that come of the same cells, and where it needs no GPU."""
    first = {}
    for place, finding in enumerate(early):
        if finding.id == PAPERS[finding.paper].headline:
            first.setdefault(finding.paper, place)
    assert first.keys() == PAPERS.keys() - {"token_routing"}
    assert early[0].id == PAPERS[early[0].paper].headline
    assert max(first.values()) < len(early) / 2


def test_recorded_results_give_the_recorded_charts(recorded, repeated):
    expected = json.loads((recorded / "charts.json").read_text("utf-8"))
    found = [as_read(chart) for chart in repeated.charts]
    assert [chart["title"] for chart in found] == [chart["title"] for chart in expected]
    different = [ours["title"] for ours, theirs in zip(found, expected, strict=True) if not same(ours, theirs)]
    assert not different
