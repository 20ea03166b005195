"""Write the tables of verdicts into the pages that show them, from the committed claims.json.

    python docs/verdicts.py results/of/moesaic-reproduce    # also takes over the results of a new run

A page shows them between the comments <!-- verdicts --> and <!-- end of verdicts -->.
"""

import re
import shutil
import sys
from pathlib import Path

from moesaic.ledger import read_findings
from moesaic.report import markdown_table

DOCS = Path(__file__).parent
RESULTS = DOCS / "papers" / "chowdhury2023"
PAGES = (DOCS.parent / "README.md", DOCS / "papers" / "chowdhury2023.md")
PLACE = re.compile(r"<!-- verdicts -->.*?<!-- end of verdicts -->", re.DOTALL)


def with_verdicts(page: str) -> str:
    """The page with the table of the committed run."""
    table = markdown_table(read_findings(RESULTS / "claims.json"))
    return PLACE.sub(lambda _: f"<!-- verdicts -->\n\n{table}\n\n<!-- end of verdicts -->", page)


def take_over(run: Path) -> None:
    """Commit-to-be: the findings, the charts as numbers, and the figures of a run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in ("claims.json", "charts.json"):
        shutil.copyfile(run / name, RESULTS / name)
    for figure in sorted((run / "figures").iterdir()):
        shutil.copyfile(figure, RESULTS / figure.name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    for path in PAGES:
        path.write_text(with_verdicts(path.read_text("utf-8")), "utf-8")
