"""Fill the verdicts into README and the papers' pages, from the committed claims.json of each paper.

    python docs/verdicts.py RUN [DATA_DIR [DEVICE]]    # first merges the results of a run of moesaic reproduce
    python docs/verdicts.py figures                    # first draws the figures of the committed charts again

A run is the directory of `moesaic reproduce --preset short`, and may have some of the cells. They replace those of the
same name among the raw trials in src/moesaic/papers/trials. In docs/papers, findings of which all cells are then there
are computed from them, and charts are replaced where the run has all that they show; everything else stays.

A paper's page has a table with one row per claim between <!-- verdicts PAPER --> and <!-- end of verdicts -->, or with
the claims whose ids begin with START, after <!-- verdicts PAPER START -->, and one with the causes of verdicts other
than "holds" between <!-- causes PAPER --> and <!-- end of causes -->. The table of the arms of DeepMoE is between
<!-- arms PAPER --> and <!-- end of arms -->. README has a table with one row per paper, the number of verdicts of each
kind, between <!-- verdict counts --> and <!-- end of verdict counts -->.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moesaic.papers.engine.findings import RECORDED_PRESET, VERDICTS, Finding, read_findings, write_findings
from moesaic.papers.engine.markdown_tables import causes_legend, causes_table, markdown_table
from moesaic.papers.engine.paper import Paper
from moesaic.papers.engine.raw_trials import Trials, merge_trials, read_trials, write_trials
from moesaic.papers.recompute import merge_findings, pack_trials, without_trials
from moesaic.papers.reproduce import PAPERS as REPRODUCED
from moesaic.papers.reproduce import PRESETS
from moesaic.papers.wang2019.figures_dynamic_gates import arms_table
from moesaic.report.chart import Chart, read_charts, write_charts

DOCS = Path(__file__).parent
RESULTS = DOCS / "papers"
TRIALS = DOCS.parent / "src" / "moesaic" / "papers" / "trials"
README = DOCS.parent / "README.md"
PAPER_PAGES = (*sorted(RESULTS.glob("*.md")), DOCS / "tokens.md")
PAGES = (README, *PAPER_PAGES)
TABLE = re.compile(r"<!-- verdicts ([\w-]+)( [\w-]+)? -->.*?<!-- end of verdicts -->", re.DOTALL)
ARMS = re.compile(r"<!-- arms ([\w-]+) -->.*?<!-- end of arms -->", re.DOTALL)
CAUSES = re.compile(r"<!-- causes ([\w-]+) -->.*?<!-- end of causes -->", re.DOTALL)
COUNTS = re.compile(r"<!-- verdict counts -->.*?<!-- end of verdict counts -->", re.DOTALL)

PAPERS = {
    "chowdhury2023": ("Chowdhury et al. 2023", "patch", "docs/papers/chowdhury2023.md"),
    "chen2022": ("Chen et al. 2022", "sample", "docs/papers/chen2022.md"),
    "wang2019": ("Wang et al. 2019", "channel", "docs/papers/wang2019.md"),
    "token_routing": ("claims of our own", "token", "docs/tokens.md#what-to-expect"),
}
"""Name, unit of routing and page."""
KINDS = VERDICTS


def with_verdicts(page: str) -> str:
    """The page with the tables and counts of the committed runs."""

    def table(place: re.Match[str]) -> str:
        start, findings = place[2] or "", read_findings(RESULTS / place[1] / "claims.json")
        lacking = {(each.id, each.fidelity) for each in findings if each.verdict.startswith("not run here: needs")}
        marked = set(without_trials(place[1])) - lacking
        found = markdown_table([each for each in findings if each.id.startswith(start.strip())], marked=marked)
        return f"<!-- verdicts {place[1]}{start} -->\n\n{found}\n\n<!-- end of verdicts -->"

    def arms(place: re.Match[str]) -> str:
        found = arms_table(read_charts(RESULTS / place[1] / "charts.json"))
        return f"<!-- arms {place[1]} -->\n\n{found}\n\n<!-- end of arms -->"

    def causes(place: re.Match[str]) -> str:
        findings = read_findings(RESULTS / place[1] / "claims.json")
        found = causes_table(findings, REPRODUCED[place[1]].causes)
        return f"<!-- causes {place[1]} -->\n\n{causes_legend()}\n\n{found}\n\n<!-- end of causes -->"

    def counts(_: re.Match[str]) -> str:
        return f"<!-- verdict counts -->\n\n{counts_table()}\n\n<!-- end of verdict counts -->"

    return COUNTS.sub(counts, CAUSES.sub(causes, ARMS.sub(arms, TABLE.sub(table, page))))


def counts_table() -> str:
    """One row per paper with the number of verdicts of each kind."""
    lines = [f"| paper | routes by | {' | '.join(KINDS)} |", f"| --- | --- |{' ---: |' * len(KINDS)}"]
    for paper, (name, unit, page) in PAPERS.items():
        count = Counter(finding.decision for finding in read_findings(RESULTS / paper / "claims.json"))
        lines.append(f"| [{name}]({page}) | {unit} | {' | '.join(str(count[kind]) for kind in KINDS)} |")
    return "\n".join(lines)


def take_over(run: Path, data_dir: Path | None = None, device: str = "cpu") -> None:
    """Merge the raw trials, findings and charts of a run, finished or not, into those of each paper."""
    findings = read_findings(run / "claims.json") if (run / "claims.json").is_file() else []
    charts = read_charts(run / "charts.json") if (run / "charts.json").is_file() else []
    for id, paper in REPRODUCED.items():
        found = [finding for finding in findings if finding.paper == id]
        preset = found[0].preset if found else RECORDED_PRESET
        trials = pack_trials(paper, run, data_dir, device, preset=preset)
        if trials.cells or found:
            merge_paper(paper, trials, found, [chart for chart in charts if chart.paper == id])


def merge_paper(paper: Paper[Any], trials: Trials, found: Iterable[Finding], charts: Iterable[Chart]) -> None:
    """Merge what a run has of a paper into its files, and draw the charts if one is new.

    A file of trials has those of one preset. A run of a larger one replaces the findings that it has, and the trials if
    it has all of their cells; a run of a smaller one is refused.
    """
    folder, stored = RESULTS / paper.id, TRIALS / f"{paper.id}.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    claims, figures = folder / "claims.json", folder / "charts.json"
    known, found = read_findings(claims) if claims.is_file() else [], list(found)
    before = read_trials(stored) if stored.is_file() else None
    if before is not None and before.preset == trials.preset:
        trials = merge_trials(before, trials)
    elif before is not None:
        if PRESETS.index(trials.preset) < PRESETS.index(before.preset):
            raise ValueError(
                f"{paper.id}: the run is of the preset {trials.preset!r}, and {before.preset!r} is stored, which is "
                "larger; run that one"
            )
        replaced = {(finding.id, finding.fidelity) for finding in found}
        known = [finding for finding in known if (finding.id, finding.fidelity) not in replaced]
        trials = trials if names(before) <= names(trials) else before
    write_trials(stored, trials)
    drawn = read_charts(figures) if figures.is_file() else []
    write_findings(claims, merge_findings(paper, known, found, trials))
    merged = merge_charts(drawn, charts)
    if merged != drawn:
        write_charts(figures, merged)
        draw_figures(folder)


def names(trials: Trials) -> set[tuple[str, str]]:
    """Fidelity and name of each cell."""
    return {(cell.fidelity, cell.name) for cell in trials.cells}


def merge_charts(known: Iterable[Chart], run: Iterable[Chart]) -> list[Chart]:
    """The known charts, replaced by those of the run that show at least as much, and the run's new ones."""
    merged = {chart.id: chart for chart in known}
    for chart in run:
        if chart.id not in merged or shown(merged[chart.id]) <= shown(chart):
            merged[chart.id] = chart
    return list(merged.values())


def shown(chart: Chart) -> set[tuple[int, str, int]]:
    """The places of a chart's values: panel, line, and the number of the value on it."""
    lines = {
        (panel, line.label, place)
        for panel, content in enumerate(chart.panels)
        for line in content.series
        for place in range(len(line.x))
    }
    return lines | {(panel, "", 0) for panel in range(len(chart.panels))}


def draw_figures(folder: Path) -> None:
    """Draw the charts of a paper's folder as SVG files that follow the theme."""
    from theme import chart_svg

    for chart in read_charts(folder / "charts.json"):
        (folder / f"{chart.id}.svg").write_text(chart_svg(chart), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["figures"]:
        for paper in PAPERS:
            draw_figures(RESULTS / paper)
    elif len(sys.argv) > 1:
        take_over(Path(sys.argv[1]), *map(Path, sys.argv[2:3]), *sys.argv[3:4])
    for path in PAGES:
        path.write_text(with_verdicts(path.read_text("utf-8")), "utf-8")
