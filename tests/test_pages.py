"""The examples in the README and the documentation run, and the site's menu leads somewhere."""

import doctest
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(?:python|pycon)\b[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PAGES_WITH_CODE = [page for page in PAGES if FENCE.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    text = page.read_text("utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if block[1].startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block[1], names, page.name, str(page), line)
            assert runner.run(test, clear_globs=False).failed == 0, f"an example of {page.name} fails, see the output"
            names = test.globs
        else:  # blank lines before the code give tracebacks the page's own line numbers
            exec(compile("\n" * line + block[1], str(page), "exec"), names)


def test_every_entry_of_the_menu_has_its_page():
    # the strict build of the site does not notice a missing one
    site = (ROOT / "zensical.toml").read_text("utf-8")
    listed = re.findall(r"[\w/-]+\.md", str(tomllib.loads(site)["project"]["nav"]))
    assert listed
    assert [page for page in listed if not (ROOT / "docs" / page).is_file()] == []


def test_the_verdicts_on_the_pages_are_those_of_the_committed_run():
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    for page in verdicts["PAGES"]:
        text = page.read_text("utf-8")
        assert verdicts["PLACE"].search(text), f"{page.name} has no place for the verdicts"
        assert verdicts["with_verdicts"](text) == text, "run: python docs/verdicts.py"
