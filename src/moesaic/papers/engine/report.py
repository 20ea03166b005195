"""The report: one HTML file that needs nothing else, for someone who has not read the paper.

On top what holds and what does not, in words that are explained there (`glossary`), then figure by
figure the chart, the claims made there, what was measured and the rule that decided; paper by paper,
where there are several. Verdicts and numbers are those of the findings, charts those of the chart
records; nothing is computed here but words and places on a scale.

The file carries its styles and drawings in itself and forbids the browser to load anything else
(Content-Security-Policy); whatever comes from a claim, a label or a command is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.fidelity import Fidelity
from moesaic.files import write_atomic
from moesaic.papers.engine.claims_table import verdict_counts
from moesaic.papers.engine.findings import VERDICTS, Finding, Source
from moesaic.papers.engine.glossary import explained
from moesaic.papers.engine.verdict_text import (
    BRIEFLY,
    MEANING,
    Tries,
    by_claim,
    by_paper,
    by_place,
    measured,
    published,
    reason,
    tries,
)
from moesaic.report.chart import Chart
from moesaic.report.charts import panel_width, to_svg
from moesaic.report.style import COLOURS, ON_DARK
from moesaic.report.templates import render

__all__ = ["write_report"]

_VERDICTS_IN_WORDS = {
    "holds": "the measurement meets the rule that was written down beforehand",
    "partly": "it meets a part of the rule, or the trials do not decide: the interval lies on both sides of the limit",
    "fails": "it does not meet the rule",
    "not run here": "it was not measured in this run, for the reason given",
}


def write_report(
    path: Path,
    *,
    findings: Sequence[Finding],
    charts: Sequence[Chart],
    papers: Sequence[Source] = (),
    notes: Sequence[str] = (),
    command: str = "",
    machine: str = "",
) -> None:
    """Write the report to ``path``; a reader never sees half a file.

    ``papers`` introduces those that findings and charts name by id, ``notes`` tell what was shortened or left
    out, ``command`` how to run it again, ``machine`` what it ran on (see `describe_machine`). Claims stand
    under the place in the paper where they are made, in the order of ``findings``; the first claim of a
    place is its headline.

    >>> import tempfile
    >>> finding = Finding("a", "paper", "Figure 1", "2 < 3", "print", "quick", 1.0, 1.1, None, "a rule", "holds", 0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(Path(folder, "report.html"), findings=[finding], charts=[])
    ...     "2 &lt; 3" in Path(folder, "report.html").read_text("utf-8")
    True
    """
    text = render(
        "report.html",
        package="moesaic.papers.engine",
        papers=_papers(findings, charts, papers),
        summary=_summary(findings),
        meaning=MEANING,
        briefly=BRIEFLY,
        verdicts=_VERDICTS_IN_WORDS,
        shown={each.fidelity for each in findings},
        notes=notes,
        command=command,
        machine=machine,
        light=COLOURS,
        dark=ON_DARK,
        css=_style_class,
    )
    write_atomic(path, text.encode())


@dataclass(frozen=True)
class _Mark:
    """Where a try lies on its claim's scale, in percent of its width."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class _Try:
    fidelity: Fidelity
    measured: str
    decision: str
    reason: str
    seconds: str
    mark: _Mark | None


@dataclass(frozen=True)
class _Claim:
    id: str
    statement: str
    published: str
    published_mark: float | None
    pills: list[tuple[str, str]]
    """Decision, and how it is worded where the tries differ."""
    sentence: str
    tries: list[_Try]
    rules: list[tuple[str, str]]
    """Which tries, and their rule."""


@dataclass(frozen=True)
class _Shown:
    """A panel."""

    svg: str
    title: str
    over: str
    """The title of the row that it begins, if any."""
    has_points: bool
    """These may be a picture, whose colours are made for a light page."""


@dataclass(frozen=True)
class _Drawing:
    title: str
    caption: str
    panels: list[_Shown]
    legend: str
    """Empty where the panels have their own."""
    columns: int
    """So many panels in a row at most,"""
    least: float
    """and each at least that wide, in rem."""


@dataclass(frozen=True)
class _Section:
    place: str
    anchor: str
    drawings: list[_Drawing]
    claims: list[_Claim]


@dataclass(frozen=True)
class _Paper:
    title: str
    about: str
    anchor: str
    summary: str
    bars: list[_Bar]
    terms: dict[str, str]
    sections: list[_Section]


@dataclass(frozen=True)
class _Bar:
    fidelity: Fidelity
    parts: list[tuple[str, int, str]]
    """Decision, how many, in words."""


def _summary(findings: Sequence[Finding]) -> str:
    claims = len(by_claim(findings))
    if not claims:
        return "No claim was put to the test."
    presets = " and ".join(dict.fromkeys(finding.preset for finding in findings))
    counts = list(verdict_counts(findings).values())
    listed = f"{', '.join(counts[:-1])} and {counts[-1]}" if len(counts) > 1 else counts[0]
    fidelities = len({finding.fidelity for finding in findings})
    ways = f", in up to {fidelities} ways each" if fidelities > 1 else ""
    return (
        f"{claims} {'claim was' if claims == 1 else 'claims were'} put to the test{ways}, with the preset {presets}. "
        f"Of {len(findings)} {'verdict' if len(findings) == 1 else 'verdicts'}, {listed}."
    )


def _bars(findings: Sequence[Finding]) -> list[_Bar]:
    bars: list[_Bar] = []
    for fidelity in MEANING:
        own = [finding for finding in findings if finding.fidelity == fidelity]
        words = verdict_counts(own)
        counts = {decision: sum(each.decision == decision for each in own) for decision in VERDICTS}
        if own:
            bars.append(_Bar(fidelity, [(decision, counts[decision], text) for decision, text in words.items()]))
    return bars


def _papers(findings: Sequence[Finding], charts: Sequence[Chart], papers: Sequence[Source]) -> list[_Paper]:
    grouped = by_paper(findings, papers)
    known = {paper.id: paper for paper in (*papers, *grouped)}
    for chart in charts:
        grouped.setdefault(known.setdefault(chart.paper, Source(chart.paper, chart.paper)), [])
    shown: list[_Paper] = []
    taken: set[str] = set()
    for paper, own in grouped.items():
        drawn = [chart for chart in charts if chart.paper == paper.id]
        anchor = _anchor("paper", paper.id, taken)
        sections = _sections(paper.id, own, drawn, taken)
        shown.append(
            _Paper(paper.title, paper.about, anchor, _summary(own), _bars(own), explained(own, drawn), sections)
        )
    return shown


def _sections(paper: str, findings: Sequence[Finding], charts: Sequence[Chart], taken: set[str]) -> list[_Section]:
    places = by_place(findings)
    for chart in charts:
        places.setdefault(chart.where, [])
    return [
        _Section(
            where,
            _anchor(paper, where, taken),
            [_drawing(chart) for chart in charts if chart.where == where],
            [_claim(claim) for claim in claims],
        )
        for where, claims in places.items()
    ]


def _drawing(chart: Chart) -> _Drawing:
    beginnings = dict(zip(range(0, len(chart.panels), chart.columns or 1), chart.row_titles, strict=False))
    panels = [
        _Shown(to_svg(chart, i, variables=True), panel.title, beginnings.get(i, ""), panel.points is not None)
        for i, panel in enumerate(chart.panels)
    ]
    has_legend = any(panel.series or panel.points for panel in chart.panels)
    return _Drawing(
        chart.title,
        chart.caption,
        panels,
        to_svg(chart, "legend", variables=True) if chart.columns and has_legend else "",
        chart.columns or 2,
        20 if panel_width(chart) > 4 else round(3.8 * panel_width(chart), 1),
    )


def _anchor(paper: str, place: str, taken: set[str]) -> str:
    """An id for a place that no other on the page has."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{paper} {place}".lower()).strip("-")
    others = sum(each == name or re.fullmatch(rf"{name}-no-\d+", each) is not None for each in taken)
    name = f"{name}-no-{others + 1}" if others else name
    taken.add(name)
    return name


def _claim(claim: Tries) -> _Claim:
    first = claim[0]
    scale = _Scale.of(claim)
    decided = tries(claim)
    pills = [
        (decision, decision if len(decided) == 1 else f"{decision} {_joined([BRIEFLY[each] for each in ways])}")
        for decision, ways in decided
    ]
    rules: dict[str, list[str]] = {}
    for each in claim:
        rules.setdefault(each.rule, []).append(BRIEFLY[each.fidelity])
    return _Claim(
        id=first.id,
        statement=first.statement,
        published=published(first),
        published_mark=scale.place(first.published) if scale and isinstance(first.published, float | int) else None,
        pills=pills,
        sentence=_sentence(claim),
        tries=[
            _Try(
                each.fidelity,
                measured(each, " to ", "()"),
                each.decision,
                reason(each),
                f"{each.seconds:.0f} s" if each.seconds >= 1 else "under a second",
                scale.mark(each) if scale else None,
            )
            for each in claim
        ],
        rules=[(_joined(ways) if len(rules) > 1 else "", rule) for rule, ways in rules.items()],
    )


def _sentence(claim: Tries) -> str:
    """What the paper says, what was measured and why the verdict is as it is, for the summary."""
    first = claim[0]
    said = f"Paper: {published(first)}."
    if first.published is None:
        own = all(each.fidelity == "best" for each in claim)
        said = "A claim of our own." if own else "The paper gives no number."
    found = [f"{measured(each, ' to ', '()')} {BRIEFLY[each.fidelity]}" for each in claim if each.measured is not None]
    why: dict[str, list[str]] = {}
    for each in claim:
        if reason(each):
            why.setdefault(each.verdict, []).append(BRIEFLY[each.fidelity])
    reasons = [f"{verdict[0].upper()}{verdict[1:]} ({_joined(ways)})." for verdict, ways in why.items()]
    return " ".join([said, *([f"Measured: {', '.join(found)}."] if found else []), *reasons])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@dataclass(frozen=True)
class _Scale:
    """A line on which all numbers of a claim lie."""

    low: float
    high: float

    @classmethod
    def of(cls, claim: Tries) -> _Scale | None:
        numbers = [each.measured for each in claim] + [end for each in claim for end in each.interval or ()]
        known = claim[0].published
        numbers += [known] if isinstance(known, float | int) else []
        finite = [each for each in numbers if each is not None and math.isfinite(each)]
        if len(finite) < 2 or max(finite) == min(finite):
            return None
        room = 0.08 * (max(finite) - min(finite))
        return cls(min(finite) - room, max(finite) + room)

    def place(self, value: float) -> float:
        return round(100 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low), 2)

    def mark(self, finding: Finding) -> _Mark | None:
        if finding.measured is None:
            return None
        low, high = finding.interval or (finding.measured, finding.measured)
        return _Mark(self.place(finding.measured), self.place(low), self.place(high))


def _style_class(decision: str) -> str:
    return decision.replace(" ", "-")
