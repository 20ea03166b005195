"""`moesaic claims`: which claims are listed."""

import pytest
from cli.example_papers import Papers

from moesaic.cli import main
from moesaic.papers import reproduce as real_papers


def test_selected_claims_list_the_parameters_of_their_experiments(capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--figure", "6"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "experts (k)=2,4,8," in printed
    assert "Parameters: as above" in printed
    assert main(["claims", "--paper", "chowdhury2023"]) == 0
    assert "Parameters" not in capsys.readouterr().out


def test_claims_can_be_listed_of_some_papers_only(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--paper", "chen2022"]) == 0
    printed = capsys.readouterr().out
    assert "chen2022: Towards" in printed
    assert "chowdhury2023" not in printed


def test_claims_lists_every_claim_with_its_rule(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["claims"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "chowdhury2023: Patch-level Routing" in printed
    for claim in papers.PAPERS["chowdhury2023"].claims:
        assert f"{claim.id} {claim.where}: {claim.statement}" in printed
        assert f"Rule: {claim.rule}" in printed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--claim", "fig4-joint"], ["fig4-joint-samples", "fig4-joint-ahead"]),
        (["--claim", "fig15"], ["fig15-ahead"]),
        (["--figure", "15"], ["fig15-ahead", "fig14-16-local"]),
        (["--claim", "lemma5.1", "--figure", "1"], ["fig1-clusters", "lemma5.1"]),
    ],
)
def test_the_papers_claims_are_listed_by_beginning_and_figure(
    given: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["claims", *given]) == 0
    ids = {claim.id for paper in real_papers.PAPERS.values() for claim in paper.claims}
    assert [line for line in capsys.readouterr().out.splitlines() if line in ids] == expected


def test_a_figure_without_claims_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--paper", "chen2022", "--figure", "2"]) == 2
    assert "--figure=2 is unknown; use 1, 3, 4, 5, 7 or 8" in capsys.readouterr().err


def test_every_claim_of_every_paper_can_be_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for paper in real_papers.PAPERS.values():
        assert [claim.id for claim in paper.claims if claim.id not in lines] == []
