"""Verdicts computed again from the stored raw trials are those that are committed."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.files import json_digest
from moesaic.papers.engine.findings import Finding, read_findings
from moesaic.papers.engine.raw_trials import StoredCell, Trials, merge_trials, read_trials, write_trials
from moesaic.papers.engine.runner import Runner
from moesaic.papers.recompute import (
    Recomputed,
    merge_findings,
    pack_trials,
    recompute,
    stored_trials,
    without_trials,
)
from moesaic.papers.reproduce import PAPERS
from moesaic.training import NoProgress, ResultCache
from moesaic.validated_json import InvalidFile

DOCS = Path(__file__).parents[2] / "docs" / "papers"


@pytest.fixture(scope="module")
def again() -> Recomputed:
    return recompute()


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_trials_give_the_committed_verdicts_and_intervals(paper: str, again: Recomputed):
    committed = {(each.id, each.fidelity): each for each in read_findings(DOCS / paper / "claims.json")}
    found = [each for each in again.findings if each.paper == paper]
    assert found

    def close(finding: Finding) -> list[float]:
        return [value for value in (finding.measured, *(finding.interval or ())) if value is not None]

    for finding in found:
        known = committed[finding.id, finding.fidelity]
        plain = replace(finding, measured=known.measured, interval=known.interval)
        assert plain == known
        assert close(finding) == pytest.approx(close(known), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_committed_finding_has_trials_or_is_named_as_without(paper: str, again: Recomputed):
    committed = {(each.id, each.fidelity) for each in read_findings(DOCS / paper / "claims.json")}
    found = {(each.id, each.fidelity) for each in again.findings if each.paper == paper}
    without = {(id, fidelity) for each, id, fidelity in again.without_trials if each == paper}
    assert without == set(without_trials(paper))
    assert not found & without
    assert found | without == committed


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_trials_are_those_of_todays_plan(paper: str, tmp_path: Path):
    runner = Runner(ResultCache(tmp_path), None, device="cpu", seed=0, progress=NoProgress())
    trials = stored_trials(paper)
    compared = 0
    for stored in trials.cells:
        cell = PAPERS[paper].plan(trials.preset, stored.fidelity)[stored.name]
        spec = cell.spec(runner)
        if "digits" not in json.dumps(spec):  # the digest of all of MNIST, which is not at hand
            assert json_digest(spec)[:16] == stored.spec, stored.name
            compared += 1
    assert compared


def test_stored_trials_are_small():
    assert sum(len(gzip.compress(json.dumps(cell.result).encode())) for p in PAPERS for cell in stored_trials(p).cells)
    folder = Path(__file__).parents[2] / "src" / "moesaic" / "papers" / "trials"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000


def test_a_run_is_packed_into_what_claims_read(tmp_path: Path):
    paper = PAPERS["wang2019"]
    cache = ResultCache(tmp_path / "run" / "cells")
    runner = Runner(cache, None, device="cpu", seed=0, progress=NoProgress())
    cell = paper.plan("short", "print")["table1"]
    runner.run({"table1": cell})
    packed = pack_trials(paper, tmp_path / "run", None)
    assert [(each.fidelity, each.name) for each in packed.cells] == [("print", "table1")]
    write_trials(tmp_path / "a.json.gz", packed)
    assert read_trials(tmp_path / "a.json.gz") == packed


def test_a_run_of_another_preset_is_packed_as_such(tmp_path: Path):
    paper = PAPERS["token_routing"]
    cache = ResultCache(tmp_path / "cells")
    spec = paper.plan("full", "best")["costs"].spec(Runner(cache, None, device="cpu", seed=0, progress=NoProgress()))
    cache.get_or_run("costs", spec, lambda: {"dense": 5})
    packed = pack_trials(paper, tmp_path, None, preset="full")
    assert (packed.preset, [(each.name, each.result) for each in packed.cells]) == ("full", [("costs", {"dense": 5})])


def test_tracks_are_reduced_to_their_ends():
    compact = PAPERS["chen2022"].compact
    made = {"losses": [1.0], "track_steps": [0, 1, 2], "track_load": [[[1], [2], [3]]], "accuracy": [90.0]}
    assert compact("moe/cubic/s1", made) == {
        "track_steps": [0, 1, 2],
        "track_load": [[[1], [3]]],
        "accuracy": [90.0],
    }


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{", mtime=0), gzip.compress(b'{"preset": 3, "cells": []}', mtime=0)],
    ids=["no gzip", "no JSON", "no trials"],
)
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "a.json.gz").write_bytes(content)
    with pytest.raises(InvalidFile, match=r"a\.json\.gz"):
        read_trials(tmp_path / "a.json.gz")


def test_a_claim_with_some_of_its_cells_has_no_trials(monkeypatch: pytest.MonkeyPatch):
    cells = tuple(cell for cell in stored_trials("wang2019").cells if cell.name != "ranks/sparse")
    monkeypatch.setattr("moesaic.papers.recompute.stored_trials", lambda paper: Trials("short", cells))
    found = recompute(["wang2019"], ["rank-static", "rank-dense"])
    assert [each.id for each in found.findings] == ["rank-dense"]
    assert found.without_trials == (("wang2019", "rank-static", "print"),)


def test_cells_of_a_run_replace_those_of_their_name_and_others_stay():
    old = StoredCell("print", "a", "0", 1.0, {"accuracy": [90.0]})
    kept = (replace(old, name="b"), replace(old, fidelity="released"))
    new = replace(old, seconds=2.0, result={"accuracy": [91.0]})
    added = replace(old, name="c")
    merged = merge_trials(Trials("short", (old, *kept)), Trials("short", (added, new)))
    assert merged == Trials("short", (new, kept[0], added, kept[1]))
    assert merged == merge_trials(Trials("short", (kept[1], added)), Trials("short", (new, kept[0])))
    with pytest.raises(ValueError, match="'short', the run has 'full'"):
        merge_trials(Trials("short", (old,)), Trials("full", (new,)))


def test_findings_of_which_a_run_completes_the_cells_are_computed_and_others_stay():
    paper, trials = PAPERS["wang2019"], stored_trials("wang2019")
    committed = read_findings(DOCS / "wang2019" / "claims.json")
    before = [replace(each, measured=-1.0) for each in committed]
    run = [replace(each, measured=-2.0) for each in committed]
    stored = Trials("short", tuple(cell for cell in trials.cells if cell.name.startswith("widths/")))
    added = Trials("short", tuple(cell for cell in trials.cells if cell.name in ("ranks/L=1", "blind")))

    def values(known: list[Finding]) -> dict[str, float | None]:
        merged = merge_findings(paper, known, run, merge_trials(stored, added))
        assert [(each.id, each.fidelity) for each in merged] == [(each.id, each.fidelity) for each in committed]
        return {each.id: each.measured for each in merged}

    found, measured = values(before), {each.id: each.measured for each in committed}
    for complete in ("rank-dense", "pair-told-apart"):  # of stored cells, and of those of the run
        assert found[complete] == pytest.approx(measured[complete])
    assert found["rank-static"] == -1.0, "one of its cells ran, others are missing"
    assert found["cost-met"] == -1.0
    unknown = values([each for each in before if each.id != "cost-met"])
    assert unknown["cost-met"] == -2.0, "a new claim has the verdict of the run"


def test_the_command_prints_verdicts_and_what_has_no_trials(capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--recompute", "--paper", "wang2019", "--claim", "rank-dense", "--claim", "cost-met"]) == 0
    printed = capsys.readouterr().out
    assert "partly" in printed
    assert "no raw trials are stored for cost-met (best)" in " ".join(printed.split())
    assert "moesaic reproduce --paper wang2019 --preset short --without-trials" in printed


def test_cells_of_a_fidelity_are_found_by_name():
    cell = StoredCell("print", "a", "0", 1.0, {})
    assert Trials("short", (cell, replace(cell, fidelity="best"))).of("print") == {"a": cell}
