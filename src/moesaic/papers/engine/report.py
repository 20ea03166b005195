"""The report on claims: one self-contained HTML file, for readers who do not know the paper.

It begins with one figure and a grid of verdicts, one square for each claim. Then each figure or theorem of the paper
has a section with its claims; charts, measurements and rules unfold. Several papers have a part each, which ends with
the claims that were not run. All verdicts and numbers come from the findings, all charts from the chart records.

Styles, drawings and the script of the filters are inline. A Content-Security-Policy forbids the browser to load
anything, and to run any other script. Text from claims, labels and commands is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from moesaic.files import write_atomic
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.finding_formatting import (
    FIDELITY_DESCRIPTIONS,
    FIDELITY_LABELS,
    ClaimFindings,
    fidelities_by_verdict,
    format_measured,
    format_published,
    group_by_claim,
    group_by_paper,
    group_by_place,
    verdict_reason,
)
from moesaic.papers.engine.findings import CAUSES, VERDICTS, Cause, Finding, Source, find_cause
from moesaic.papers.engine.glossary import used_terms
from moesaic.papers.engine.terminal_tables import verdict_counts
from moesaic.report.chart import Chart
from moesaic.report.chart_drawing import panel_width, to_svg
from moesaic.report.formatting import listed
from moesaic.report.templates import render

__all__ = ["write_report"]

NOT_RUN = VERDICTS[-1]

_VERDICT_DESCRIPTIONS = {
    "holds": "the measurement meets the rule that was written down beforehand",
    "partly": "it meets some parts of the rule, and not the others",
    "undecided": "the trials do not decide: the interval lies on both sides of the limit",
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
    """Writes the report atomically.

    Claims are shown under the place in the paper where it makes them, in the order of ``findings``. The first chart
    opens the page.

    Args:
        path: HTML file to write.
        findings: Findings to show.
        charts: Charts to show.
        papers: Titles, summaries and glossaries of the papers that findings and charts name by id.
        notes: Remarks, such as what was shortened or left out.
        command: Command that repeats the run.
        machine: Machine that it ran on (see `describe_machine`).

    >>> import tempfile
    >>> finding = Finding("a", "paper", "Figure 1", "2 < 3", "print", "quick", 1.0, 1.1, None, "a rule", "holds", 0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(Path(folder, "report.html"), findings=[finding], charts=[])
    ...     "2 &lt; 3" in Path(folder, "report.html").read_text("utf-8")
    True
    """
    shown = _papers(findings, charts, papers)
    script = files("moesaic.papers.engine").joinpath("report.js").read_text("utf-8")
    text = render(
        "report.html",
        package="moesaic.papers.engine",
        papers=shown,
        headline=_headline(shown),
        summary=_summary(findings),
        decided={each.decision for each in findings},
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        fidelity_descriptions=FIDELITY_DESCRIPTIONS,
        fidelity_labels=FIDELITY_LABELS,
        verdicts=_VERDICT_DESCRIPTIONS,
        shown={each.fidelity for each in findings},
        notes=notes,
        command=command,
        machine=machine,
        css=_style_class,
    )
    write_atomic(path, text.encode())


@dataclass(frozen=True)
class _Mark:
    """Position of a finding on its claim's scale, in percent of the width."""

    value: float
    low: float
    high: float
    open_low: bool
    """Whether the interval goes on beyond the scale."""
    open_high: bool


@dataclass(frozen=True)
class _FindingRow:
    fidelity: Fidelity
    measured: str
    decision: str
    reason: str
    seconds: str
    mark: _Mark | None


@dataclass(frozen=True)
class _Claim:
    id: str
    anchor: str
    statement: str
    published: str
    published_mark: float | None
    zero_mark: float | None
    """Position of 0, where some numbers are above and others below it."""
    pills: list[tuple[str, str]]
    """Verdict, and its text, which names the fidelities if their verdicts differ."""
    sentence: str
    rows: list[_FindingRow]
    rules: list[tuple[str, str]]
    """Fidelities, and their rule."""
    causes: list[tuple[str, str, str]]
    """Fidelities, what keeps the claim from holding there, and the evidence."""

    @property
    def ran(self) -> bool:
        """Whether there is a verdict in at least one form."""
        return any(row.decision != NOT_RUN for row in self.rows)

    @property
    def label(self) -> str:
        """The claim and its verdicts in one sentence, for a square of the grid."""
        return f"{self.statement} {'; '.join(text for _, text in self.pills)}"


@dataclass(frozen=True)
class _PanelDrawing:
    svg: str
    title: str
    row_title: str
    """Title of the row that begins with this panel; empty for none."""
    has_points: bool
    """Points may be a bitmap, whose colours fit a light page only."""


@dataclass(frozen=True)
class _Drawing:
    title: str
    caption: str
    panels: list[_PanelDrawing]
    legend: str
    """SVG of a common legend; empty if the panels have legends of their own."""
    columns: int
    """Maximum number of panels in a row."""
    min_width: float
    """Minimum width of a panel, in rem."""


@dataclass(frozen=True)
class _Section:
    place: str
    anchor: str
    drawings: list[_Drawing]
    claims: list[_Claim]

    @property
    def ran(self) -> list[_Claim]:
        return [claim for claim in self.claims if claim.ran]


@dataclass(frozen=True)
class _Paper:
    id: str
    title: str
    short_title: str
    about: str
    anchor: str
    summary: str
    bars: list[_Bar]
    terms: dict[str, str]
    sections: list[_Section]

    @property
    def claims(self) -> list[_Claim]:
        return [claim for section in self.sections for claim in section.claims]

    @property
    def not_run(self) -> dict[str, list[_Claim]]:
        """The claims without any verdict, by the reason."""
        found: dict[str, list[_Claim]] = {}
        for claim in self.claims:
            if not claim.ran:
                found.setdefault(claim.rows[0].reason, []).append(claim)
        return found


@dataclass(frozen=True)
class _Headline:
    """What opens the page: a drawing, and the claim that it is about."""

    paper: _Paper
    section: _Section
    drawing: _Drawing
    claim: _Claim | None


def _headline(papers: Sequence[_Paper]) -> _Headline | None:
    for paper in papers:
        for section in paper.sections:
            if section.drawings:
                return _Headline(paper, section, section.drawings[0], next(iter(section.ran), None))
    return None


@dataclass(frozen=True)
class _Bar:
    fidelity: Fidelity
    parts: list[tuple[str, int, str]]
    """Verdict, number of findings, text."""


def _summary(findings: Sequence[Finding]) -> str:
    claims = group_by_claim(findings)
    decided = [each for each in findings if each.decision != NOT_RUN]
    tested = group_by_claim(decided)
    presets = " and ".join(dict.fromkeys(finding.preset for finding in findings))
    if not tested:
        return f"No claim was tested with the preset {presets}." if claims else "No claim was tested."
    counts = listed(list(verdict_counts(decided).values()))
    fidelities = len({finding.fidelity for finding in decided})
    forms = f", in up to {fidelities} forms each" if fidelities > 1 else ""
    text = (
        f"{len(tested)} {'claim was' if len(tested) == 1 else 'claims were'} tested{forms}, with the preset {presets}. "
        f"Of {len(decided)} {'verdict' if len(decided) == 1 else 'verdicts'}, {counts}."
    )
    left = len(claims) - len(tested)
    return f"{text} {left} {'claim was' if left == 1 else 'claims were'} not run here." if left else text


def _bars(findings: Sequence[Finding]) -> list[_Bar]:
    bars: list[_Bar] = []
    for fidelity in FIDELITY_DESCRIPTIONS:
        own = [finding for finding in findings if finding.fidelity == fidelity]
        texts = verdict_counts(own)
        counts = {decision: sum(each.decision == decision for each in own) for decision in VERDICTS}
        if own:
            bars.append(_Bar(fidelity, [(decision, counts[decision], text) for decision, text in texts.items()]))
    return bars


def _papers(findings: Sequence[Finding], charts: Sequence[Chart], papers: Sequence[Source]) -> list[_Paper]:
    grouped = group_by_paper(findings, papers)
    known = {paper.id: paper for paper in (*papers, *grouped)}
    for chart in charts:
        grouped.setdefault(known.setdefault(chart.paper, Source(chart.paper, chart.paper)), [])
    shown: list[_Paper] = []
    taken: set[str] = set()
    for paper, own in grouped.items():
        drawn = [chart for chart in charts if chart.paper == paper.id]
        anchor = _anchor("paper", paper.id, taken)
        sections = _sections(paper, own, drawn, taken)
        shown.append(
            _Paper(
                paper.id,
                paper.title,
                paper.short_title,
                paper.about,
                anchor,
                _summary(own),
                _bars(own),
                used_terms(own, drawn, paper.glossary),
                sections,
            )
        )
    return shown


def _sections(paper: Source, findings: Sequence[Finding], charts: Sequence[Chart], taken: set[str]) -> list[_Section]:
    places = group_by_place(findings)
    for chart in charts:
        places.setdefault(chart.where, [])
    return [
        _Section(
            where,
            _anchor(paper.id, where, taken),
            [_drawing(chart) for chart in charts if chart.where == where],
            [_claim(claim, _anchor(f"claim {paper.id}", claim[0].id, taken), paper.causes) for claim in claims],
        )
        for where, claims in places.items()
    ]


def _drawing(chart: Chart) -> _Drawing:
    beginnings = dict(zip(range(0, len(chart.panels), chart.columns or 1), chart.row_titles, strict=False))
    panels = [
        _PanelDrawing(to_svg(chart, i, variables=True), panel.title, beginnings.get(i, ""), panel.points is not None)
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
    """Returns an id for a place that is unique on the page."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{paper} {place}".lower()).strip("-")
    others = sum(each == name or re.fullmatch(rf"{name}-no-\d+", each) is not None for each in taken)
    name = f"{name}-no-{others + 1}" if others else name
    taken.add(name)
    return name


def _claim(claim: ClaimFindings, anchor: str, causes: Sequence[Cause]) -> _Claim:
    first = claim[0]
    scale = _Scale.of(claim)
    decided = fidelities_by_verdict(claim)
    pills = [
        (
            decision,
            decision if len(decided) == 1 else f"{decision} {listed([FIDELITY_LABELS[each] for each in fidelities])}",
        )
        for decision, fidelities in decided
    ]
    rules: dict[str, list[str]] = {}
    for each in claim:
        rules.setdefault(each.rule, []).append(FIDELITY_LABELS[each.fidelity])
    return _Claim(
        id=first.id,
        anchor=anchor,
        statement=first.statement,
        published=format_published(first),
        published_mark=scale.position(first.published) if scale and isinstance(first.published, float | int) else None,
        zero_mark=scale.position(0.0) if scale and scale.low < 0 < scale.high else None,
        pills=pills,
        sentence=_sentence(claim),
        rows=[
            _FindingRow(
                each.fidelity,
                format_measured(each, " to ", "()"),
                each.decision,
                verdict_reason(each),
                f"{each.seconds:.0f} s" if each.seconds >= 1 else "under a second",
                scale.mark(each) if scale else None,
            )
            for each in claim
        ],
        rules=[(listed(labels) if len(rules) > 1 else "", rule) for rule, labels in rules.items()],
        causes=_causes(claim, causes),
    )


def _causes(claim: ClaimFindings, causes: Sequence[Cause]) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for each in claim:
        cause = find_cause(each, causes)
        if cause is not None:
            found.setdefault((CAUSES[cause.kind], cause.evidence), []).append(FIDELITY_LABELS[each.fidelity])
    return [(listed(labels), *cause) for cause, labels in found.items()]


def _sentence(claim: ClaimFindings) -> str:
    """Returns the published value, the measurements and the reasons of the verdicts, for the summary."""
    first = claim[0]
    text = f"Paper: {format_published(first)}."
    if first.published is None:
        own = all(each.fidelity == "best" for each in claim)
        text = "A claim of our own." if own else "The paper gives no number."
    found = [
        f"{format_measured(each, ' to ', '()')} {FIDELITY_LABELS[each.fidelity]}"
        for each in claim
        if each.measured is not None
    ]
    by_verdict: dict[str, list[str]] = {}
    for each in claim:
        if verdict_reason(each):
            by_verdict.setdefault(each.verdict, []).append(FIDELITY_LABELS[each.fidelity])
    reasons = [f"{verdict[0].upper()}{verdict[1:]} ({listed(labels)})." for verdict, labels in by_verdict.items()]
    return " ".join([text, *([f"Measured: {', '.join(found)}."] if found else []), *reasons])


@dataclass(frozen=True)
class _Scale:
    """The range of all numbers of a claim, for the drawing beside its findings."""

    low: float
    high: float

    @classmethod
    def of(cls, claim: ClaimFindings) -> _Scale | None:
        numbers = [each.measured for each in claim] + [end for each in claim for end in each.interval or ()]
        known = claim[0].published
        numbers += [known] if isinstance(known, float | int) else []
        finite = [each for each in numbers if each is not None and math.isfinite(each)]
        if len(finite) < 2 or max(finite) == min(finite):
            return None
        margin = 0.08 * (max(finite) - min(finite))
        return cls(min(finite) - margin, max(finite) + margin)

    def position(self, value: float) -> float:
        return round(100 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low), 2)

    def mark(self, finding: Finding) -> _Mark | None:
        if finding.measured is None:
            return None
        low, high = finding.interval or (finding.measured, finding.measured)
        ends = self.position(low), self.position(high)
        return _Mark(self.position(finding.measured), *ends, low < self.low, high > self.high)


def _style_class(decision: str) -> str:
    return decision.replace(" ", "-")
