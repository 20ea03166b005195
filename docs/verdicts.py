"""Write the tables of verdicts into the pages that show them, from the committed claims.json of each paper.

    python docs/verdicts.py results/of/moesaic-reproduce    # also takes over the results of a new run

A page shows those of a paper between the comments <!-- verdicts PAPER --> and <!-- end of verdicts -->.
"""

import re
import shutil
import sys
from pathlib import Path

from moesaic.papers.engine.claims_markdown import markdown_table
from moesaic.papers.engine.findings import read_findings, write_findings
from moesaic.report import figure_name
from moesaic.report.chart import read_charts, write_charts

DOCS = Path(__file__).parent
RESULTS = DOCS / "papers"
PAGES = (DOCS.parent / "README.md", *sorted(RESULTS.glob("*.md")))
PLACE = re.compile(r"<!-- verdicts ([\w-]+) -->.*?<!-- end of verdicts -->", re.DOTALL)


def with_verdicts(page: str) -> str:
    """The page with the tables of the committed runs."""

    def table(place: re.Match[str]) -> str:
        found = markdown_table(read_findings(RESULTS / place[1] / "claims.json"))
        return f"<!-- verdicts {place[1]} -->\n\n{found}\n\n<!-- end of verdicts -->"

    return PLACE.sub(table, page)


def take_over(run: Path) -> None:
    """Commit-to-be: the findings, the charts as numbers, and the figures of a run, each paper's in its folder."""
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
