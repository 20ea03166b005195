"""The terminal's table says what was claimed, what was measured and whether it holds, at any width."""

import io

import pytest
from papers.engine.example_findings import FINDINGS, PAPERS, SECOND_FINDINGS, finding
from rich.console import Console

from moesaic.papers.engine.finding_formatting import format_measured, verdict_reason
from moesaic.papers.engine.findings import VERDICTS
from moesaic.papers.engine.markdown_tables import markdown_table
from moesaic.papers.engine.terminal_tables import GrowingTable, show_findings_table, verdict_counts


def printed(width: int, terminal: bool = False, findings=FINDINGS) -> str:
    file = io.StringIO()
    colours = "standard" if terminal else "auto"
    show_findings_table(findings, Console(file=file, width=width, force_terminal=terminal, color_system=colours))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut_off(width: int):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = " ".join(text.split())
    for each in FINDINGS:
        assert format_measured(each) in words
        assert each.decision in words


@pytest.mark.parametrize("width", [80, 120])
def test_a_verdict_stands_on_the_line_of_its_measurement(width: int):
    (line,) = [line for line in printed(width).splitlines() if "0.10 [−0.90, 1.10]" in line]
    assert "released" in line
    assert "fails" in line


@pytest.mark.parametrize("width", [80, 120])
def test_the_reason_of_a_verdict_is_shown(width: int):
    text = " ".join(printed(width).split())
    assert "not run here: needs --preset short" in text
    assert "partly: at 300 samples, not at 1000" in text


@pytest.mark.parametrize("width", [80, 120])
def test_colours_are_for_terminals_only(width: int):
    assert "\x1b[" not in printed(width)
    assert "\x1b[" in printed(width, terminal=True)


def test_brackets_in_a_statement_are_no_markup():
    assert "[red]x[/red]" in printed(80, findings=[finding(statement="[red]x[/red]")])


def test_verdicts_are_counted():
    assert verdict_counts(FINDINGS) == {
        "holds": "6 hold",
        "partly": "1 partly",
        "fails": "1 fails",
        "not run here": "2 not run here",
    }
    assert printed(80).rstrip().endswith("6 hold, 1 partly, 1 fails, 2 not run here")


@pytest.mark.parametrize("width", [80, 120])
def test_the_fidelities_that_occur_are_explained(width: int):
    text = " ".join(printed(width).split())
    assert "print: as the paper's text says; released: as its authors' code does; best: our own settings" in text
    assert "released:" not in printed(width, findings=[finding()])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_several_papers_have_a_table_each_under_their_titles(width: int):
    file = io.StringIO()
    # mixed up: a paper's claims come together all the same
    findings = [*FINDINGS[:3], *SECOND_FINDINGS, *FINDINGS[3:]]
    show_findings_table(findings, Console(file=file, width=width), PAPERS)
    text = " ".join(file.getvalue().split())
    first, second = (text.index(paper.title) for paper in PAPERS)
    assert first < text.index("96.1 [94.9, ∞]") < text.index("6 hold, 1 partly, 1 fails, 2 not run here") < second
    assert second < text.index("99.61 [99.40, 99.80]") < text.index("4 hold, 1 partly, 1 fails")
    assert text.endswith("in all: 10 hold, 2 partly, 2 fail, 2 not run here")


def test_one_paper_needs_no_title():
    assert "chowdhury2023" not in printed(80)


def test_each_paper_has_a_markdown_table_with_the_fidelities_that_ran():
    text = markdown_table([*FINDINGS, *SECOND_FINDINGS], PAPERS)
    first, second = text.split(f"**{PAPERS[1].title}**")
    assert first.startswith(f"**{PAPERS[0].title}**\n\n| where")
    assert "| as printed | as released | with our settings |" in first
    assert "| as printed | as released |\n" in second
    assert markdown_table(FINDINGS, PAPERS).startswith("| where")


def test_no_findings_are_no_crash():
    assert printed(80, findings=()).strip() == "no claims"


def grown(width: int, findings, terminal: bool = False) -> str:
    file = io.StringIO()
    table = GrowingTable(Console(file=file, width=width, force_terminal=terminal), PAPERS)
    for each in findings:
        table.add(each)
    assert table.rows == len(findings)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_growing_table_has_a_row_for_each_finding_in_aligned_columns(width: int):
    text = grown(width, FINDINGS)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []
    for each in FINDINGS:
        start = "not run" if each.decision == "not run here" else each.decision
        assert any(line.startswith(start) for line in lines)
        assert verdict_reason(each) in " ".join(line[33:] for line in lines)
    assert text.count("verdict    measured") == 1
    assert "Paper: 60" in text


@pytest.mark.parametrize("verdict", VERDICTS)
def test_no_word_of_a_verdict_is_broken(verdict: str):
    (_, *rows) = grown(80, [finding(verdict=verdict)]).splitlines()
    assert " ".join(row[:11].strip() for row in rows).strip() == verdict


def test_a_row_is_printed_when_its_finding_is_added():
    file = io.StringIO()
    table = GrowingTable(Console(file=file, width=80), PAPERS)
    table.add(FINDINGS[0])
    first = file.getvalue()
    table.add(FINDINGS[1])
    assert file.getvalue().startswith(first)
    assert len(file.getvalue()) > len(first)


def test_a_growing_table_has_colours_in_terminals_and_no_markup():
    odd = finding(statement="[red]x[/red]")
    assert "[red]x[/red]" in grown(80, [odd])
    assert "\x1b[" not in grown(80, [odd])
    assert "\x1b[" in grown(80, [odd], terminal=True)
