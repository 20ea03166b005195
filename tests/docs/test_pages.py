"""The examples in the README and the documentation run and show the committed results."""

import doctest
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from papers.engine.example_findings import CHARTS, FINDINGS, SECOND_CHARTS, SECOND_FINDINGS

from moesaic.cache_dir import CACHE_ENV_VAR
from moesaic.cli import main as moesaic
from moesaic.papers.engine.findings import read_findings, write_findings
from moesaic.papers.engine.raw_trials import Trials
from moesaic.report.chart import read_charts, write_charts

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CONTRIBUTING.md"})  # its recipe: below
FENCE = re.compile(r"^```(?:python|pycon)\b[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PAGES_WITH_CODE = [page for page in PAGES if FENCE.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.chdir(tmp_path)  # examples may write files
    text = page.read_text("utf-8")
    if any(re.search(r"^import timm$", block[1], re.MULTILINE) for block in FENCE.finditer(text)):
        request.getfixturevalue("timm")
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


def test_the_commands_of_the_quick_start_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_ENV_VAR, str(tmp_path / "cache"))
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    (images,) = (block[1] for block in FENCE.finditer(page) if "shapes/" in block[1])
    exec(images.replace("range(150)", "range(10)"), {})
    ran = []
    for line in re.findall(r"^\$ moesaic (.* ?shapes.*)$", page, re.MULTILINE):
        command = shlex.split(line.replace("--epochs 15", "--epochs 1"))
        assert moesaic(command) == 0, line
        ran.append(command[0])
    assert ran == ["train", "predict", "explain"]
    out = capsys.readouterr().out
    assert "Test accuracy" in out
    assert "multiply-adds" in out
    (named,) = re.findall(r"^Page: (runs/.*)$", page, re.MULTILINE)
    assert (tmp_path / named).is_file()


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


def test_readme_is_at_most_150_lines_long():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("folder", sorted(path.parent for path in ROOT.glob("docs/papers/*/charts.json")), ids=str)
def test_a_papers_folder_has_its_own_findings_and_a_figure_for_every_chart(folder: Path):
    charts = read_charts(folder / "charts.json")
    assert {each.paper for each in (*charts, *read_findings(folder / "claims.json"))} == {folder.name}
    assert {file.stem for file in folder.glob("*.svg")} == {chart.id for chart in charts}
    assert list(folder.glob("*.png")) == []


SVG_FIGURES = sorted(
    {
        (page.parent / figure).resolve()
        for page in PAGES
        for figure in re.findall(r"!\[[^\]]*\]\(([\w./-]+\.svg)\)", page.read_text("utf-8"))
    }
)


@pytest.mark.parametrize("figure", SVG_FIGURES, ids=lambda path: path.stem)
def test_a_figure_of_a_page_follows_the_theme(figure: Path):
    text = figure.read_text("utf-8")
    assert "@media (prefers-color-scheme: dark)" in text, "save it with docs/theme.py"
    assert not re.search(r"<text[^>]*fill: #333333", text), "ink that a dark page would hide"


def test_the_pictures_of_the_idea_are_those_that_the_script_draws():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, draw in pictures["FIGURES"].items():
        committed = (pictures["IMAGES"] / f"{name}.svg").read_text("utf-8")
        assert draw() == committed, "run: python docs/pictures.py"


def test_a_run_of_two_papers_is_taken_over_into_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")  # as for a script of that folder
    run, results = tmp_path / "run", tmp_path / "results"
    charts = (CHARTS[2], SECOND_CHARTS[3])
    run.mkdir()
    write_charts(run / "charts.json", charts)
    write_findings(run / "claims.json", (*FINDINGS, *SECOND_FINDINGS))
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    verdicts["take_over"].__globals__.update(RESULTS=results, TRIALS=results)
    verdicts["take_over"](run)
    assert read_findings(results / "chen2022" / "claims.json") == list(SECOND_FINDINGS)
    assert read_charts(results / "chowdhury2023" / "charts.json") == [CHARTS[2]]
    drawn = (results / "chen2022" / "table-1.svg").read_text("utf-8")
    assert "prefers-color-scheme: dark" in drawn
    assert "var(--chart-ink" in drawn
    found = read_findings(results / "chowdhury2023" / "claims.json")
    assert found[0].id == "lemmaK.1-inseparable", "which reads no cells"
    assert found[1:] == list(FINDINGS)
    page = "before <!-- verdicts chen2022 -->old<!-- end of verdicts --> after"
    assert "**holds**: 99.61 [99.40, 99.80]" in verdicts["with_verdicts"](page)
    assert "Figure 5" not in verdicts["with_verdicts"](page)


def test_a_chart_is_replaced_by_one_that_shows_as_much():
    merge = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))["merge_charts"]
    chart, other = CHARTS[0], SECOND_CHARTS[3]
    newer, fewer_panels = replace(chart, title="newer"), replace(chart, panels=chart.panels[:-1])
    line = chart.panels[0].series[0]
    shorter = replace(line, x=line.x[:-1], y=line.y[:-1])
    panel = replace(chart.panels[0], series=(shorter, *chart.panels[0].series[1:]))
    shorter_line = replace(chart, panels=(panel, *chart.panels[1:]))
    assert merge([chart], [newer, other]) == [newer, other]
    assert merge([chart, other], [fewer_panels]) == [chart, other]
    assert merge([chart], [shorter_line]) == [chart]


def test_a_part_of_a_larger_run_leaves_the_stored_trials_and_a_smaller_run_is_refused(tmp_path):
    verdicts = runpy.run_path(str(ROOT / "docs" / "verdicts.py"))
    shutil.copytree(ROOT / "docs" / "papers" / "wang2019", tmp_path / "wang2019")
    stored = tmp_path / "wang2019.json.gz"
    shutil.copy(verdicts["TRIALS"] / stored.name, stored)
    verdicts["merge_paper"].__globals__.update(RESULTS=tmp_path, TRIALS=tmp_path)
    paper, before = verdicts["REPRODUCED"]["wang2019"], stored.read_bytes()
    claims = tmp_path / "wang2019" / "claims.json"
    known = read_findings(claims)
    new = replace(next(each for each in known if each.id == "equal-cost-met"), verdict="holds", preset="full")

    verdicts["merge_paper"](paper, Trials("full", ()), [new], [])
    assert stored.read_bytes() == before
    assert read_findings(claims) == [new if each.id == new.id else each for each in known]
    with pytest.raises(ValueError, match=r"'quick'.*'short' is stored, which is larger"):
        verdicts["merge_paper"](paper, Trials("quick", ()), [replace(new, preset="quick")], [])
    assert stored.read_bytes() == before
