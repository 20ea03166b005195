"""The sentences at the end of a run say what the findings say."""

import pytest
from papers.engine.example_findings import finding

from moesaic.papers.engine.findings import VERDICTS, Source
from moesaic.papers.engine.findings_summary import not_run_lines, summary_sentences

PAPER = Source("chowdhury2023", "Routing (Doe et al. 2023)", headline="main")


def sentence(*findings) -> str:
    (found,) = summary_sentences(findings, [PAPER])
    return found


def test_claims_are_counted_over_the_forms_in_which_they_were_tested():
    found = sentence(
        finding(id="a", fidelity="print", verdict="holds"),
        finding(id="a", fidelity="released", verdict="not run here: needs a GPU"),
        finding(id="b", fidelity="print", verdict="holds"),
        finding(id="b", fidelity="released", verdict="fails: too small"),
        finding(id="c", verdict="fails"),
        finding(id="d", verdict="partly: undecided"),
        finding(id="e", verdict="not run here: needs --preset full"),
    )
    assert found == "Doe et al. 2023: of 4 claims tested, 1 holds, 2 hold in part and 1 fails."


def test_the_main_claim_is_told_with_its_numbers():
    shared = {"id": "main", "statement": "Routing needs fewer samples (share).", "interval": None}
    found = sentence(
        finding(**shared, fidelity="print", verdict="holds", measured=0.4),
        finding(**shared, fidelity="released", verdict="holds", measured=0.5),
        finding(**shared, fidelity="best", verdict="fails: more", measured=1.5),
    )
    assert found.endswith(
        "the main one, that routing needs fewer samples (share), holds as printed (0.4) and as released (0.5) and "
        "fails with our settings (1.5)."
    )
    acronym = sentence(finding(id="main", statement="CNNs fail.", verdict="holds", measured=1.0, interval=None))
    assert "that CNNs fail, holds as printed (1)." in acronym


def test_a_main_claim_that_was_not_run_is_left_out():
    found = sentence(finding(id="main", verdict="not run here: x"), finding(id="a", verdict="holds"))
    assert found == "Doe et al. 2023: of 1 claim tested, 1 holds."
    assert sentence(finding(id="a", verdict="not run here: x")) == "Doe et al. 2023: none of 1 claim was run here."


def test_each_paper_has_a_sentence():
    other = Source("chen2022", "Chen")
    found = summary_sentences([finding(), finding(paper="chen2022")], [PAPER, other])
    assert [each.partition(":")[0] for each in found] == ["Doe et al. 2023", "Chen"]


def test_claims_without_a_verdict_are_named_by_their_reason():
    many = [finding(id=f"c{i}", verdict="not run here: needs a GPU") for i in range(7)]
    lines = not_run_lines([finding(id="a", verdict="not run here: needs data"), finding(id="b"), *many])
    assert lines == ["not run here: 1 claim, needs data (a)", "not run here: 7 claims, needs a GPU"]


@pytest.mark.parametrize("verdict", VERDICTS[:-1])
def test_every_verdict_has_a_verb_and_is_counted(verdict: str):
    found = sentence(finding(id="main", verdict=f"{verdict}: a reason"), finding(id="a", verdict=verdict))
    assert found.startswith("Doe et al. 2023: of 2 claims tested, 2 ")
    assert ", is undecided as printed" in found if verdict == "undecided" else "undecided" not in found
