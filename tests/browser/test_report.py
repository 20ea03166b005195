"""A real browser shows the whole report and asks nobody for anything."""

import re
import shutil
import subprocess

import pytest
from papers.engine.example_findings import CHARTS, FINDINGS, PAPERS, SECOND_CHARTS, SECOND_FINDINGS

from moesaic.papers.engine.findings import Source
from moesaic.papers.engine.report import write_report

ALL_CHARTS, ALL_FINDINGS = CHARTS + SECOND_CHARTS, FINDINGS + SECOND_FINDINGS
LEGENDS = 2
"""Of the charts whose panels share one."""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.fixture(scope="module")
def dom(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as the browser has it after loading."""
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "report.html"
    papers = [Source("chowdhury2023", "A <b>paper</b>"), PAPERS[1]]
    write_report(page, findings=ALL_FINDINGS, charts=ALL_CHARTS, papers=papers, notes=["<script>throw 1</script>"])
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        # the browser itself likes to call home
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"),
        *("--dump-dom", page.as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if shown.returncode:
        pytest.skip(f"chromium does not start here: {shown.stderr.strip().splitlines()[-1:]}")
    return shown.stdout


def test_every_claim_and_every_chart_is_shown(dom: str):
    claims = re.findall(r'data-claim="([^"]+)"', dom)
    assert sorted(claims) == sorted(id for _, id in {(each.paper, each.id) for each in ALL_FINDINGS})
    assert dom.count("<svg") == sum(len(chart.panels) for chart in ALL_CHARTS) + LEGENDS
    assert dom.rstrip().endswith("</html>")


def test_nothing_outside_the_file_is_asked_for(dom: str):
    references = re.findall(r'\s(?:src|srcset|href|xlink:href|action|data)="([^"]*)"', dom)
    assert references
    assert [reference for reference in references if not reference.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)|@import", dom)
    assert "Content-Security-Policy" in dom


def test_markup_in_what_was_given_stays_text(dom: str):
    assert "<script" not in dom
    assert "A &lt;b&gt;paper&lt;/b&gt;" in dom
