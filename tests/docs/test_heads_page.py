"""The page on heads shows what is in the committed results."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("heads_page", ROOT / "docs" / "heads.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def content(page: ModuleType) -> dict[str, Any]:
    return json.loads(page.RESULTS.read_text("utf-8"))


def test_the_tables_on_the_page_are_those_of_the_committed_results(page: ModuleType) -> None:
    text = page.PAGE.read_text("utf-8")
    assert set(page.PLACE.findall(text)) == set(page.TABLES)
    assert page.with_tables(text) == text, "run: python docs/heads.py"


def test_the_figure_on_the_page_is_there(page: ModuleType) -> None:
    (figure,) = re.findall(r"\]\((images/[\w-]+\.svg)\)", page.PAGE.read_text("utf-8"))
    assert ROOT / "docs" / figure == page.FIGURE
    assert page.FIGURE.is_file()


def test_a_changed_result_changes_its_table(page: ModuleType, content: dict[str, Any]) -> None:
    before = page.leads_table(lambda content: content["leads"])(content)
    row = content["leads"][0]
    row |= {"lead": 12.34, "low": 10.0, "high": -0.04, "verdict": "fewer labels"}
    after = page.leads_table(lambda content: content["leads"])(content)
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(changed) == 1
    assert "+12.3 [+10.0, 0.0] **fewer labels**" in changed[0]


def test_the_best_head_is_in_bold(page: ModuleType, content: dict[str, Any]) -> None:
    found = content["accuracies"]["four classes"]["100"]
    for head in found:
        found[head] = [90.0] * 10
    found["max"] = [91.0] * 10
    lines = page.accuracy_table(content).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| four classes"))
    assert [line.split(" | ")[6] for line in lines[first : first + 5]] == ["90.0", "**91.0**", "90.0", "90.0", "90.0"]


def test_there_is_a_panel_for_each_task_and_one_for_the_share(page: ModuleType, content: dict[str, Any]) -> None:
    figure = page.draw(content)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == len(content["accuracies"]) + 1
    assert all(len(axes.lines) >= 4 for axes in figure.axes if axes.get_title())
