"""A real browser shows the whole report of claims: by mouse and keyboard, in both themes, and without any request."""

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from browser.chromium import Chromium, Page
from papers.engine.example_findings import CHARTS, FINDINGS, PAPERS, SECOND_CHARTS, SECOND_FINDINGS, finding

from moesaic.papers.engine.findings import Source
from moesaic.papers.engine.report import write_report
from moesaic.report.chart import Blocks, Chart, Panel
from moesaic.report.chart_style import COLOURS, ON_DARK

LONG = "a.path.of.a.function.that.is.far.too.long.for.a.line.of.a.telephone.and.cannot.be.broken"
ALL_CHARTS = CHARTS + SECOND_CHARTS
ALL_FINDINGS = (
    *FINDINGS,
    *SECOND_FINDINGS,
    finding("long", where="Figure 9", statement=LONG, verdict=f"fails: {LONG}"),
)
LEGENDS = 2
"""Of the charts whose panels share one."""


@pytest.fixture(scope="module")
def opened(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Page]]:
    path = tmp_path_factory.mktemp("report") / "report.html"
    papers = [Source("chowdhury2023", "A <b>paper</b>"), PAPERS[1]]
    write_report(path, findings=ALL_FINDINGS, charts=ALL_CHARTS, papers=papers, notes=["<script>throw 1</script>"])
    page = browser.open(path)
    yield path, page
    page.close()


@pytest.fixture
def page(opened: tuple[Path, Page]) -> Page:
    """The report as it was when it was opened."""
    path, page = opened
    page.look()
    page.go(path)
    return page


def claims(page: Page) -> list[str]:
    """The claims that are not hidden."""
    return page.run(
        """() => [...document.querySelectorAll("[data-claim]")].filter((each) => !each.closest("[hidden]"))
            .map((each) => each.dataset.claim)"""
    )


def test_every_claim_and_every_chart_is_shown(page: Page):
    assert sorted(claims(page)) == sorted(id for _, id in {(each.paper, each.id) for each in ALL_FINDINGS})
    drawings = page.run("() => document.querySelectorAll('main svg').length")
    assert drawings == sum(len(chart.panels) for chart in ALL_CHARTS) + LEGENDS


def test_nothing_outside_the_file_is_asked_for(opened: tuple[Path, Page], page: Page):
    assert page.complaints == []
    assert page.requests == []
    text = opened[0].read_text("utf-8")
    references = re.findall(r'\s(?:src|srcset|href|xlink:href|action|data)="([^"]*)"', text)
    assert references
    assert [reference for reference in references if not reference.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert "Content-Security-Policy" in text


def test_markup_in_what_was_given_stays_text(page: Page):
    assert page.run("() => document.scripts.length") == 1, "the page's own"
    assert "A <b>paper</b>" in page.text("main")


def test_filters_show_the_claims_that_match_and_hide_empty_sections(page: Page):
    everything = claims(page)
    page.click('input[name=verdict][value="fails"] + span')
    failing = [(each.paper, each.id) for each in ALL_FINDINGS if each.decision == "fails"]
    assert sorted(claims(page)) == sorted(name for _, name in failing)
    sections = page.run(
        """() => [...document.querySelectorAll("main section[aria-labelledby]")]
            .filter((each) => !each.closest("[hidden]")).length"""
    )
    assert sections == len({(each.paper, each.where) for each in ALL_FINDINGS if each.decision == "fails"})
    page.run("() => document.querySelector('input[name=paper][value=chen2022]').focus()")
    page.press(" ")
    chen = [name for paper, name in failing if paper == "chen2022"]
    assert claims(page) == chen
    assert page.text("output") == f"{len(chen)} of {len(everything)} claims"
    page.click(".filters button")
    assert claims(page) == everything


def test_a_link_to_a_claim_opens_it_and_a_fold_opens_by_keyboard(page: Page):
    state = "() => document.querySelector('details[data-claim=\"samples\"]').open"
    assert page.run(state) is False
    page.click('.square[href="#claim-chowdhury2023-samples"]')
    assert page.run(state) is True
    page.run("() => document.querySelector('details[data-claim=\"samples\"] > summary').focus()")
    page.press("Enter")
    assert page.run(state) is False


def test_the_same_text_and_drawings_are_in_both_themes(page: Page):
    shapes = """() => {
        const drawn = [...document.querySelectorAll("svg :is(path, use, image)")];
        const shape = (each) => each.getAttribute("d") ?? each.outerHTML;
        return [document.querySelector("main").innerText, ...drawn.map(shape)];
    }"""
    light = page.run(shapes)
    page.look(dark=True)
    assert page.run(shapes) == light
    assert len(light) > 100


def test_a_dark_page_exchanges_the_colour_of_ink_and_of_no_mark(page: Page):
    colours = """() => {
        const drawn = [...document.querySelectorAll("svg :is(path, use, text)")].map((each) => {
            const { fill, stroke } = getComputedStyle(each);
            return [fill, stroke];
        });
        const marks = [...document.querySelectorAll(".square i, .scale i:not(.paper, .zero), .key i")].map((each) => {
            const { backgroundColor, boxShadow } = getComputedStyle(each);
            return [backgroundColor, boxShadow];
        });
        return [drawn, marks];
    }"""
    light, light_marks = page.run(colours)
    page.look(dark=True)
    dark, dark_marks = page.run(colours)
    assert dark_marks == light_marks
    assert len(light_marks) > 10
    changed = {
        (a, b) for one, other in zip(light, dark, strict=True) for a, b in zip(one, other, strict=True) if a != b
    }
    assert changed == {(rgb(COLOURS[name]), rgb(ON_DARK[name])) for name in ON_DARK}


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_a_phone_needs_no_sideways_scrolling_whatever_is_open(page: Page):
    page.look(width=390, height=844)
    assert page.run("() => document.documentElement.scrollWidth") <= 390
    page.run("() => { for (const fold of document.querySelectorAll('details')) fold.open = true; }")
    assert page.run("() => document.documentElement.scrollWidth") <= 390


def test_print_shows_what_is_folded_and_no_navigation(page: Page):
    page.look(width=794, height=1123, media="print")
    heights = page.run(
        """() => [document.querySelector('details[data-claim="samples"] table'), document.querySelector(".side"),
            document.querySelector(".filters")].map((each) => each.getBoundingClientRect().height)"""
    )
    assert heights[0] > 20
    assert heights[1:] == [0, 0]
    assert page.run("() => document.documentElement.scrollWidth") <= 794


def test_names_texts_and_contrast(page: Page):
    page.run("() => { for (const fold of document.querySelectorAll('details')) fold.open = true; }")
    for dark in (False, True):
        page.look(dark=dark)
        faults, texts = page.faults()
        assert faults == []
        assert texts > 100


def test_the_report_is_accessible(page: Page, axe: str):
    for dark in (False, True):
        page.look(dark=dark)
        assert page.violations(axe) == []


def test_a_dark_page_shows_the_same_cells(browser: Chromium, tmp_path: Path):
    greys = (0.2, 0.549, 0.733)  # those of ink, of a line's colour and of frames
    cells = Panel("", "x", "y", blocks=Blocks((1.0, 2.0, 3.0), (1.0,), (greys,)))
    path, picture = tmp_path / "report.html", tmp_path / "page.png"
    write_report(path, findings=(), charts=[Chart("figure-1", "paper", "Figure 1", "Cells", "", (cells,))])
    page = browser.open(path, width=900, height=1200)
    counts, grounds = [], []
    for dark in (False, True):
        page.look(width=900, height=1200, dark=dark)
        page.settle()
        page.screenshot(picture)
        pixels = np.round(matplotlib.image.imread(picture)[..., :3] * 255).astype(int)
        counts.append([int((abs(pixels - round(255 * grey)).max(-1) == 0).sum()) for grey in greys])
        grounds.append(pixels[2, 2].mean())
    page.close()
    assert grounds[0] > 200 > 50 > grounds[1]
    light, dark = counts
    assert min(light) > 3_000
    assert all(abs(a - b) < 0.1 * a for a, b in zip(light, dark, strict=True)), counts
