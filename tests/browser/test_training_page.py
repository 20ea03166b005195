"""A real browser shows the page about a run: without script or request, the same data in both themes and at 390 pixels.

The page of `moesaic view` replaces its content when the files have changed.
"""

from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM, Chromium, Page
from report.example_run import epochs, write_run

from moesaic.report import write_training_page
from moesaic.report.page_server import live_script
from moesaic.report.training_page import training_page
from moesaic.training.run_reader import read_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

DATA = """() => {
    const of = (selector, read) => [...document.querySelectorAll(selector)].map(read);
    const paint = (cell) => getComputedStyle(cell).backgroundColor.replace(/^(rgba?|color)/, "");
    return {
        points: of("svg.lines circle", (each) => [each.getAttribute("cx"), each.getAttribute("cy"), each.textContent]),
        lines: of("svg.lines polyline", (each) => each.getAttribute("points")),
        matrix: of(".matrix td", (each) => [each.textContent, each.style.cssText, paint(each)]),
        bars: of(".bar span", (each) => each.style.width),
        tables: of("table", (each) => each.textContent),
        images: of("img", (each) => [each.alt, each.naturalWidth]),
    };
}"""


@pytest.fixture(scope="module")
def page(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = write_run(tmp_path_factory.mktemp("page") / "run", epochs(6, "expert"))
    return browser.open(write_training_page(folder))


def test_dark_and_light_and_narrow_pages_show_the_same_data(page: Page):
    shown: list[dict[str, Any]] = []
    grounds: list[str] = []
    for look in ({}, {"dark": True}, {"width": 390}, {"dark": True, "width": 390}):
        page.look(**look)
        shown.append(page.run(DATA))
        grounds.append(page.run("() => getComputedStyle(document.body).backgroundColor"))
        assert page.run("() => document.documentElement.scrollWidth <= innerWidth"), f"{look}: the page is too wide"
    assert grounds[0] != grounds[1]
    assert len(shown[0]["points"]) == 6 + 3 + 6 + 6 + 5 * 6  # training, test, loss, rate, five measures of routing
    assert all(each == shown[0] for each in shown[1:])
    assert all(width for _, width in shown[0]["images"])
    page.look()


def test_the_page_asks_for_nothing_and_the_console_stays_empty(page: Page):
    assert page.requests == []
    assert page.complaints == []
    assert page.run("() => document.scripts.length") == 0
    assert "<script>alert(1)</script>" in page.text("#mistakes ~ .mistakes")


def test_folds_open_by_keyboard_and_have_the_numbers(page: Page):
    page.run("() => document.querySelector('summary').focus()")
    assert not page.run("() => document.querySelector('details').open")
    page.press("Enter")
    assert page.run("() => document.querySelector('details').open")
    assert "0.3333" in page.text("details[open] table")
    page.press(" ")
    assert not page.run("() => document.querySelector('details').open")


def test_a_live_page_takes_over_what_is_new_and_keeps_folds_open(browser: Chromium, tmp_path: Path):
    folder = write_run(tmp_path / "run", epochs(2), complete=False)
    pages = []
    for version, lines in (("v1", 2), ("v2", 4)):
        run = read_run(write_run(folder, epochs(lines), complete=False))
        pages.append(training_page(run, live={**live_script(), "version": version}))
    (tmp_path / "empty.html").write_text("", encoding="utf-8")
    (tmp_path / "live.html").write_text(pages[0], encoding="utf-8")
    live = browser.open(tmp_path / "empty.html")
    # the page's next look at the server happens when the test asks for it
    timer = "window.setTimeout = (call) => { window.next = call; };"
    live.send("Page.addScriptToEvaluateOnNewDocument", source=timer)
    live.go(tmp_path / "live.html")
    live.run("() => { document.querySelector('details').open = true; }")
    answer = """async (next) => {
        window.fetch = async (address) => address === "/version"
            ? new Response(JSON.stringify({ version: "v2", fault: "" }))
            : new Response(next);
        await window.next();
    }"""
    live.run(answer, pages[1])
    assert live.run("() => document.querySelector('main').dataset.version") == "v2"
    assert live.run("() => document.querySelectorAll('details tbody')[0].rows.length") == 4
    assert live.run("() => document.querySelector('details').open")
    assert live.run("() => document.querySelector('.live').hidden")
    gone = """async () => {
        window.fetch = async () => { throw new TypeError("gone"); };
        await window.next();
    }"""
    live.run(gone)
    assert "has ended" in live.text(".live")
    assert live.complaints == []
    live.close()


def test_the_page_is_accessible(page: Page, axe: str):
    page.run("() => document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    for look in ({}, {"dark": True}, {"width": 390}):
        page.look(**look)
        assert page.violations(axe) == [], look
    page.run("() => document.querySelectorAll('details').forEach((fold) => { fold.open = false; })")
    page.look()
