"""Fill the verdicts into README and the papers' pages, from the committed claims.json of each paper.

    python docs/verdicts.py results/of/moesaic-reproduce    # first copies the results of a new run into docs/papers

A paper's page has a table with one row per claim between <!-- verdicts PAPER --> and <!-- end of verdicts -->. README
has a table with one row per paper, the number of verdicts of each kind, between <!-- verdict counts --> and
<!-- end of verdict counts -->.
"""

import re
import shutil
import sys
from collections import Counter
from pathlib import Path

from moesaic.papers.engine.claims_markdown import markdown_table
from moesaic.papers.engine.findings import VERDICTS, read_findings, write_findings
from moesaic.report import figure_name
from moesaic.report.chart import read_charts, write_charts

DOCS = Path(__file__).parent
RESULTS = DOCS / "papers"
README = DOCS.parent / "README.md"
PAPER_PAGES = tuple(sorted(RESULTS.glob("*.md")))
PAGES = (README, *PAPER_PAGES)
TABLE = re.compile(r"<!-- verdicts ([\w-]+) -->.*?<!-- end of verdicts -->", re.DOTALL)
COUNTS = re.compile(r"<!-- verdict counts -->.*?<!-- end of verdict counts -->", re.DOTALL)

PAPERS = {
    "chowdhury2023": ("Chowdhury et al. 2023", "patch"),
    "chen2022": ("Chen et al. 2022", "sample"),
    "wang2019": ("Wang et al. 2019", "channel"),
}
KINDS = VERDICTS


def with_verdicts(page: str) -> str:
    """The page with the tables and counts of the committed runs."""

    def table(place: re.Match[str]) -> str:
        found = markdown_table(read_findings(RESULTS / place[1] / "claims.json"))
        return f"<!-- verdicts {place[1]} -->\n\n{found}\n\n<!-- end of verdicts -->"

    def counts(_: re.Match[str]) -> str:
        return f"<!-- verdict counts -->\n\n{counts_table()}\n\n<!-- end of verdict counts -->"

    return COUNTS.sub(counts, TABLE.sub(table, page))


def counts_table() -> str:
    """One row per paper with the number of verdicts of each kind."""
    lines = [f"| paper | routes by | {' | '.join(KINDS)} |", f"| --- | --- |{' ---: |' * len(KINDS)}"]
    for paper, (name, unit) in PAPERS.items():
        count = Counter(finding.decision for finding in read_findings(RESULTS / paper / "claims.json"))
        lines.append(
            f"| [{name}](docs/papers/{paper}.md) | {unit} | {' | '.join(str(count[kind]) for kind in KINDS)} |"
        )
    return "\n".join(lines)


def take_over(run: Path) -> None:
    """Copy the findings, charts and figures of a run into each paper's folder."""
    findings, charts = read_findings(run / "claims.json"), read_charts(run / "charts.json")
    for paper in dict.fromkeys(finding.paper for finding in findings):
        folder = RESULTS / paper
        folder.mkdir(parents=True, exist_ok=True)
        own = [chart for chart in charts if chart.paper == paper]
        write_findings(folder / "claims.json", [finding for finding in findings if finding.paper == paper])
        write_charts(folder / "charts.json", own)
        for name in (figure_name(chart, kind) for chart in own for kind in ("png", "svg")):
            shutil.copyfile(run / "figures" / name, RESULTS / name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    for path in PAGES:
        path.write_text(with_verdicts(path.read_text("utf-8")), "utf-8")
