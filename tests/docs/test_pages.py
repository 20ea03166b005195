"""The examples in the README and the documentation run, and the site's menu leads somewhere."""

import dataclasses
import doctest
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from papers.engine.example_findings import CHARTS, FINDINGS, SECOND_CHARTS, SECOND_FINDINGS

from moesaic.cli.commands import COMMANDS
from moesaic.papers.engine.findings import read_findings, write_findings
from moesaic.report import write_figures
from moesaic.report.chart import read_charts, write_charts

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CONTRIBUTING.md"})  # its recipe: below
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


def test_the_recipe_of_a_router_works_to_the_letter(tmp_path: Path):
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    module, line, use = (block[1] for block in FENCE.finditer(page))
    (path,) = set(re.findall(r"Write it to `(src/[\w/]+\.py)`", page))
    (package, name) = re.findall(r"Import it in `(src/[\w/]+\.py)`, and add `(\"\w+\")` to `__all__`", page)[0]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / path).write_text(module, "utf-8")
    docstring, imports, names = re.split(r"\n\n(?=from)|__all__ = \[", (tmp_path / package).read_text("utf-8"))
    # before all others, where the package has nothing yet that the module could import from it
    (tmp_path / package).write_text(f"{docstring}\n\n{line}{imports}__all__ = [\n    {name},{names}", "utf-8")
    dotted = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    script = f"import doctest, {dotted} as written\nassert doctest.testmod(written) == (0, 2)\n{use}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_entry_of_the_menu_has_its_page():
    # the strict build of the site does not notice a missing one
    site = (ROOT / "zensical.toml").read_text("utf-8")
    listed = re.findall(r"[\w/-]+\.md", str(tomllib.loads(site)["project"]["nav"]))
    assert listed
    assert [page for page in listed if not (ROOT / "docs" / page).is_file()] == []


def test_the_verdicts_on_the_pages_are_those_of_the_committed_run():
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    for page in verdicts["PAPER_PAGES"]:
        assert verdicts["TABLE"].search(page.read_text("utf-8")), f"{page.name} has no place for the verdicts"
    assert verdicts["COUNTS"].search(verdicts["README"].read_text("utf-8")), "README has no place for the counts"
    for page in verdicts["PAGES"]:
        text = page.read_text("utf-8")
        assert verdicts["with_verdicts"](text) == text, "run: python docs/verdicts.py"


def test_the_counts_have_every_paper_and_every_finding():
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    papers = sorted(path.parent.name for path in ROOT.glob("docs/papers/*/claims.json"))
    assert sorted(verdicts["PAPERS"]) == papers
    counted = sum(int(number) for number in re.findall(r"(?<=\| )\d+(?= \|)", verdicts["counts_table"]()))
    assert counted == sum(len(read_findings(ROOT / "docs" / "papers" / paper / "claims.json")) for paper in papers)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_have_the_options_it_gives_them(page: Path):
    for name, rest in re.findall(r"^\$ moesaic (\w+)([^#\n]*)", page.read_text("utf-8"), re.MULTILINE):
        known = {field.name.replace("_", "-") for field in dataclasses.fields(COMMANDS[name])}
        assert set(re.findall(r"--([a-z][a-z0-9-]*)", rest)) <= known, f"moesaic {name}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_links_to_exist(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_is_at_most_150_lines_long():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("folder", sorted(path.parent for path in ROOT.glob("docs/papers/*/charts.json")), ids=str)
def test_a_papers_folder_has_its_own_findings_and_a_figure_for_every_chart(folder: Path):
    charts = read_charts(folder / "charts.json")
    assert {each.paper for each in (*charts, *read_findings(folder / "claims.json"))} == {folder.name}
    figures = {file.name for kind in ("png", "svg") for file in folder.glob(f"*.{kind}")}
    assert figures == {f"{chart.id}.{kind}" for chart in charts for kind in ("png", "svg")}


def test_a_run_of_two_papers_is_taken_over_into_a_folder_each(tmp_path: Path):
    run, results = tmp_path / "run", tmp_path / "results"
    charts = (CHARTS[2], SECOND_CHARTS[3])
    write_figures(run / "figures", charts)
    write_charts(run / "charts.json", charts)
    write_findings(run / "claims.json", (*FINDINGS, *SECOND_FINDINGS))
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    verdicts["take_over"].__globals__.update(RESULTS=results, TRIALS=results)
    verdicts["take_over"](run)
    assert read_findings(results / "chen2022" / "claims.json") == list(SECOND_FINDINGS)
    assert read_charts(results / "chowdhury2023" / "charts.json") == [CHARTS[2]]
    assert (results / "chen2022" / "table-1.png").is_file()
    page = "before <!-- verdicts chen2022 -->old<!-- end of verdicts --> after"
    assert "**holds**: 99.61 [99.40, 99.80]" in verdicts["with_verdicts"](page)
    assert "Figure 5" not in verdicts["with_verdicts"](page)
