"""Numbers have a sensible number of digits, and the findings on a claim stay together."""

import math
from dataclasses import replace

import pytest
from papers.engine.example_findings import FINDINGS, PAPERS, finding

from moesaic.papers.engine.finding_formatting import (
    fidelities_by_verdict,
    format_measured,
    format_published,
    group_by_claim,
    group_by_paper,
    group_by_place,
    verdict_reason,
)
from moesaic.report.formatting import number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (60.0, "60"),
        (95.63, "95.6"),
        (0.0531, "0.0531"),
        (-2.5, "−2.5"),
        (0.0, "0"),
        (123456.0, "123,456"),
        (1e-12, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "not a number"),
    ],
)
def test_a_number_alone(value: float, text: str):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (52.04, (48.31, 57.92), "52.0 [48.3, 57.9]"),
        (0.1, (-0.9, 1.1), "0.10 [−0.90, 1.10]"),
        (99.96, (99.4, 100.0), "100.0 [99.4, 100.0]"),
        (99.46, (99.31, 99.58), "99.46 [99.31, 99.58]"),
        (100.0, (100.0, 100.0), "100.0 [100.0, 100.0]"),
        (1500.0, (900.0, 2100.0), "1,500 [900, 2,100]"),
        (1.5, (1.0, math.inf), "1.50 [1.00, ∞]"),
        (0.0, (0.0, 0.0), "0 [0, 0]"),
    ],
)
def test_a_measurement_and_its_interval_have_the_same_decimals(value: float, interval: tuple[float, float], text: str):
    assert format_measured(finding(measured=value, interval=interval)) == text


def test_what_the_paper_says_may_be_a_number_a_word_or_nothing():
    assert [format_published(finding(published=each)) for each in (60.0, 99.46, -0.5, "falls with l", None)] == [
        "60",
        "99.46",
        "−0.5",
        "falls with l",
        "–",
    ]


def test_the_findings_on_a_claim_come_together_printed_first():
    shuffled = [finding("b", "best"), finding("a", "released"), finding("b", "print"), finding("a", "print")]
    assert [[(each.id, each.fidelity) for each in claim] for claim in group_by_claim(shuffled)] == [
        [("b", "print"), ("b", "best")],
        [("a", "print"), ("a", "released")],
    ]


def test_claims_of_one_name_in_two_papers_are_two():
    other = replace(finding(), paper="chen2022")
    assert len(group_by_claim([finding(), other])) == 2
    grouped = group_by_paper([finding(), other, finding("b")], PAPERS[:1])
    assert [(paper.title, [each.id for each in own]) for paper, own in grouped.items()] == [
        (PAPERS[0].title, ["samples", "b"]),
        ("chen2022", ["samples"]),
    ]


def test_no_finding_is_lost_on_the_way_to_its_place():
    placed = [each for claims in group_by_place(FINDINGS).values() for claim in claims for each in claim]
    assert sorted(placed, key=FINDINGS.index) == list(FINDINGS)


def test_decisions_come_from_best_to_worst_with_their_fidelities():
    claim = (finding(verdict="fails"), finding(fidelity="released"), finding(fidelity="best", verdict="fails: why"))
    assert fidelities_by_verdict(claim) == [("holds", ["released"]), ("fails", ["print", "best"])]
    assert [verdict_reason(each) for each in claim] == ["", "", "why"]
