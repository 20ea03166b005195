"""A real browser shows the whole report and asks nobody for anything."""

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from papers.engine.example_findings import CHARTS, FINDINGS, PAPERS, SECOND_CHARTS, SECOND_FINDINGS

from moesaic.papers.engine.findings import Source
from moesaic.papers.engine.report import write_report
from moesaic.report.chart import Blocks, Chart, Panel

ALL_CHARTS, ALL_FINDINGS = CHARTS + SECOND_CHARTS, FINDINGS + SECOND_FINDINGS
LEGENDS = 2
"""Of the charts whose panels share one."""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


def browse(page: Path, *options: str) -> str:
    """What the browser prints about a page."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        # the browser itself likes to call home
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}"),
        *(*options, page.as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"chromium does not start here: {shown.stderr.strip().splitlines()[-1:]}")
    return shown.stdout


@pytest.fixture(scope="module")
def dom(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as the browser has it after loading."""
    page = tmp_path_factory.mktemp("browser") / "report.html"
    papers = [Source("chowdhury2023", "A <b>paper</b>"), PAPERS[1]]
    write_report(page, findings=ALL_FINDINGS, charts=ALL_CHARTS, papers=papers, notes=["<script>throw 1</script>"])
    return browse(page, "--dump-dom")


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
    assert dom.count("<script") == 1, "the page's own"
    assert "A &lt;b&gt;paper&lt;/b&gt;" in dom


def driven(page: Path, script: str) -> str:
    """The title of the page after the script ran in it; the page itself allows no script but its own."""
    html = re.sub("<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
    copy = page.with_name("driven.html")
    copy.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    (title,) = re.findall("<title>(.*?)</title>", browse(copy, "--dump-dom"))
    return title


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_report(tmp_path / "report.html", findings=ALL_FINDINGS, charts=ALL_CHARTS, papers=PAPERS)
    return tmp_path / "report.html"


def test_filters_show_the_claims_that_match_and_hide_empty_sections(page: Path):
    count = """
        const all_of = (selector) => [...document.querySelectorAll(selector)];
        const unhidden = (selector) => all_of(selector).filter((part) => !part.closest("[hidden]"));
        const visible = () => unhidden("[data-claim]");
        const pick = (name, value) => document.querySelector(`input[name=${name}][value="${value}"]`).click();
        const all = visible().length;
        pick("verdict", "fails");
        const fails = visible().map((claim) => claim.dataset.claim);
        const places = unhidden("main section[aria-labelledby]");
        pick("paper", "chen2022");
        const both = visible().map((claim) => claim.dataset.claim);
        const said = document.querySelector("output").textContent;
        document.querySelector(".filters button").click();
        document.title = [all, fails.join(" "), places.length, both.join(" "), said, visible().length].join(";");
    """
    claims = {(each.paper, each.id) for each in ALL_FINDINGS}
    failing = [(each.paper, each.id) for each in ALL_FINDINGS if each.decision == "fails"]
    chen = [name for paper, name in failing if paper == "chen2022"]
    shown = driven(page, count).split(";")
    assert shown[0] == shown[5] == str(len(claims))
    assert sorted(shown[1].split()) == sorted(name for _, name in failing)
    assert int(shown[2]) == len({(each.paper, each.where) for each in ALL_FINDINGS if each.decision == "fails"})
    assert shown[3].split() == chen
    assert shown[4] == f"{len(chen)} of {len(claims)} claims"


def test_a_link_to_a_claim_opens_it(page: Path):
    look = """
        const fold = document.querySelector('details[data-claim="samples"]');
        const before = fold.open;
        location.hash = "#claim-chowdhury2023-samples";
        addEventListener("hashchange", () => { document.title = `${before} ${fold.open}`; });
    """
    assert driven(page, look) == "false true"


def test_a_dark_page_shows_the_same_cells(tmp_path: Path):
    greys = (0.2, 0.549, 0.733)  # those of ink, of a line's colour and of frames
    cells = Panel("", "x", "y", blocks=Blocks((1.0, 2.0, 3.0), (1.0,), (greys,)))
    page = tmp_path / "report.html"
    write_report(page, findings=(), charts=[Chart("figure-1", "paper", "Figure 1", "Cells", "", (cells,))])
    counts, pages = [], []
    for scheme in ("1", "0"):  # light, dark
        picture = tmp_path / f"{scheme}.png"
        look = f"--blink-settings=preferredColorScheme={scheme}"
        browse(page, look, "--window-size=900,1200", "--hide-scrollbars", f"--screenshot={picture}")
        pixels = np.round(matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
        counts.append([int((abs(pixels - round(255 * grey)).max(-1) == 0).sum()) for grey in greys])
        pages.append(pixels[2, 2].mean())
    assert pages[0] > 200 > 50 > pages[1]
    light, dark = counts
    assert min(light) > 3_000
    assert all(abs(a - b) < 0.1 * a for a, b in zip(light, dark, strict=True)), counts
