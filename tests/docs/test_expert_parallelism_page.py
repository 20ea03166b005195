"""The page on expert parallelism shows what is in the committed results, and what the cost model predicts."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_parallel_page", ROOT / "docs" / "expert_parallel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_on_the_page_are_those_of_the_committed_results(page: ModuleType):
    text = page.PAGE.read_text("utf-8")
    assert set(page.PLACE.findall(text)) == set(page.TABLES)
    assert page.with_tables(text) == text, "run: python docs/expert_parallel.py"


def test_the_figure_on_the_page_is_there_and_shows_the_cost_model(page: ModuleType):
    (figure,) = re.findall(r"\]\((images/[\w-]+\.svg)\)", page.PAGE.read_text("utf-8"))
    assert (ROOT / "docs" / figure).is_file()
    drawn = page.draw()
    for axes, (layer, images) in zip(drawn.axes, page.LAYERS.values(), strict=True):
        line = axes.get_lines()[0]
        cost = page.expert_parallel_step(layer, images, 8, 1, page.H100_CLUSTER)
        assert line.get_ydata()[0] == pytest.approx(1e3 * cost.total())


def test_a_changed_result_changes_its_row(page: ModuleType):
    content = json.loads(page.RESULTS.read_text("utf-8"))
    before = page.steps_table(content).splitlines()
    content["runs"][0]["steps"][0] |= {"measured, ms": 1234.5, "error": -0.125}
    changed = [line for line in page.steps_table(content).splitlines() if line not in before]
    assert len(changed) == 1
    assert "| 1234.5 |" in changed[0]
    assert "−12 %" in changed[0]
