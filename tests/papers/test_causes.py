"""Causes of the committed verdicts: each that does not hold has one, with evidence, and reports show it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.papers.engine.findings import CAUSES, Cause, Finding, find_cause, needs_cause, read_findings
from moesaic.papers.engine.markdown_tables import causes_table
from moesaic.papers.engine.report import write_report
from moesaic.papers.reproduce import PAPERS

DOCS = Path(__file__).parents[2] / "docs" / "papers"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_verdict_that_does_not_hold_has_one_cause_and_no_other_has(paper: str):
    causes = PAPERS[paper].causes
    explained = [(cause.claim, cause.fidelity, cause.decision) for cause in causes]
    assert len(set(explained)) == len(explained)
    findings = read_findings(DOCS / paper / "claims.json")
    assert sorted(explained) == sorted(
        (each.id, each.fidelity, each.decision) for each in findings if needs_cause(each)
    )
    for finding in findings:
        assert (find_cause(finding, causes) is not None) == needs_cause(finding)


@pytest.mark.parametrize("paper", PAPERS)
def test_causes_have_evidence_and_name_claims_that_exist(paper: str):
    ids = {claim.id for claim in PAPERS[paper].claims}
    places = "|".join(sorted({id.split("-")[0] for id in ids}))
    for cause in PAPERS[paper].causes:
        assert cause.kind in CAUSES
        assert cause.evidence.endswith(".")
        assert "{" not in cause.evidence
        for named in re.findall(rf"\b(?:{places})-[a-z0-9-]+", cause.evidence):
            assert named in ids, f"{cause.claim}: there is no claim {named}"


FOUND = Finding("a", "p", "Figure 4", "Fewer.", "print", "short", 0.6, 0.7, None, "r", "fails: more", 1.0)
CAUSE = Cause("a", "print", "fails", "code", "As released it holds.")


@pytest.mark.parametrize(
    "other",
    [{"preset": "quick"}, {"preset": "full"}, {"verdict": "holds"}, {"verdict": "undecided"}, {"fidelity": "best"}],
)
def test_a_cause_is_that_of_the_recorded_verdict_alone(other):
    assert find_cause(FOUND, [CAUSE]) is CAUSE
    assert find_cause(replace(FOUND, **other), [CAUSE]) is None


def test_forms_with_one_cause_share_a_row():
    released = replace(FOUND, fidelity="released", verdict="undecided")
    causes = [CAUSE, replace(CAUSE, fidelity="released", decision="undecided")]
    rows = causes_table([FOUND, released], causes).splitlines()[2:]
    assert rows == ["| Figure 4 | `a` | fails as printed, undecided as released | code | As released it holds. |"]


def test_the_report_tells_the_cause_of_a_verdict(tmp_path: Path):
    paper = PAPERS["wang2019"]
    findings = [each for each in read_findings(DOCS / "wang2019" / "claims.json") if each.id == "rank-probability"]
    write_report(tmp_path / "a.html", findings=findings, charts=[], papers=[paper.source])
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "Why it does not hold here" in page
    assert "14 restore the rank" in page
    quick = [replace(each, preset="quick") for each in findings]
    write_report(tmp_path / "b.html", findings=quick, charts=[], papers=[paper.source])
    assert "Why it does not hold here" not in (tmp_path / "b.html").read_text("utf-8")
