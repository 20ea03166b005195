"""The page about a run: all numbers in it, nothing of a stranger's in it but text, at any stage of the run."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.example_run import epochs, write_run

from moesaic.report import training_page as training_page_module
from moesaic.report import write_training_page
from moesaic.report.training_page import training_page
from moesaic.training.run_reader import read_run


def page_of(folder: Path, **options) -> str:
    return training_page(read_run(write_run(folder, **options)))


def cells(page: str, label: str) -> list[list[str]]:
    """The rows of the table in a region."""
    part = page.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)] for row in rows]


def test_the_page_has_every_number_of_every_epoch(tmp_path):
    page = page_of(tmp_path)
    table = cells(page, "Numbers behind the curves")
    assert table[0][:4] == ["epoch", "loss", "training %", "test %"]
    assert table[1][:4] == ["1", "2.0000", "50.00", "–"]
    assert table[4][:4] == ["4", "0.5000", "53.00", "43.00"]
    assert len(table) == 5
    for title in ("Accuracy (%)", "Loss", "Learning rate"):
        assert f"<h3>{title}</h3>" in page
    assert "epoch 4, test: 43" in page


def test_routing_loads_alarms_and_the_next_commands_are_there(tmp_path):
    page = page_of(tmp_path)
    table = cells(page, "Numbers behind the routing of net.&lt;moe&gt;")
    assert table[0] == [
        "epoch",
        "routing entropy",
        "class entropy of experts",
        "coverage",
        "load 0",
        "load 1",
        "load 2",
    ]
    assert table[2] == ["2", "0.9", "0.7", "0.8", "0.020", "0.030", "0.040"]
    assert "units choose their experts" in page
    assert "Epoch 2: layer &#39;a&lt;b&gt;&#39; is odd" in page
    for command in ("predict", "explain", "export"):
        assert f"moesaic {command} {tmp_path}" in page


def test_experts_that_choose_are_compared_with_chance_and_have_no_load_chart(tmp_path):
    page = page_of(tmp_path, lines=epochs(3, "expert"))
    assert "experts choose their patches" in page
    assert "overlap by chance" in page
    assert "Load of the experts" not in page


def test_many_experts_are_drawn_by_the_smallest_and_the_largest_load(tmp_path):
    page = page_of(tmp_path, lines=epochs(3, experts=20))
    assert "epoch 1, smallest: 0.01" in page
    assert "epoch 1, largest: 0.2" in page
    assert "load 19" in page


def test_costs_of_gates_are_drawn_where_there_are_some(tmp_path):
    assert "Cost of the gates" in page_of(tmp_path / "a", lines=epochs(2, experts=0, gates=True))
    page = page_of(tmp_path / "b", lines=epochs(2, experts=0))
    assert "Cost of the gates" not in page
    assert "Routing over time" not in page
    assert "moesaic explain" not in page


def test_confusion_matrix_classes_and_mistakes_say_the_same(tmp_path):
    page = page_of(tmp_path)
    matrix = cells(page, "Confusion matrix")
    assert [row[1:] for row in matrix[1:]] == [["1", "1", "·"], ["·", "1", "1"], ["1", "·", "1"]]
    by_class = cells(page, "Accuracy by class")
    assert {row[1]: row[2] for row in by_class[1:]} == {"2": "50.0\u00a0%"}
    assert len(by_class) == 4
    assert "3 of 6 test images were classified wrongly" in page
    mistakes = page.partition('class="mistakes"')[2].partition("</ul>")[0]
    assert mistakes.count("<li") == 3
    first = mistakes.partition("</li>")[0]
    assert "<strong>cat</strong> 99.5" in first, "the most confident one"
    assert "dog &amp; co/5.png" in first
    data = re.findall(r"data:image/png;base64,([^\"]+)", mistakes)
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in data)


def test_many_classes_have_a_list_of_confusions_and_a_fold(tmp_path):
    names = tuple(f"class {i}" for i in range(30))
    page = page_of(tmp_path, classes=names)
    assert "Most frequent confusions" in page
    assert 'class="matrix"' not in page
    assert len(cells(page, "Most frequent confusions")) == 21
    assert "10 more classes" in page
    assert page.count('class="bar"') == 30


def test_a_run_that_is_not_complete_says_so(tmp_path):
    page = page_of(tmp_path / "a", complete=False, tested=False)
    assert "not complete: after epoch 4 of 6" in page
    assert "Confusion" not in page
    folder = write_run(tmp_path / "b", [], complete=False, tested=False)
    page = write_training_page(folder, stopped="stopped").read_text("utf-8")
    assert "stopped after epoch 0 of 6" in page
    assert "No epoch is complete yet" in page


def test_a_network_without_mistakes_is_told(tmp_path):
    assert "No mistakes: all test images were classified correctly" in page_of(tmp_path, classes=("only",))


class Markup(HTMLParser):
    """Collects elements, handlers and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.unlabelled: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        given = dict(attrs)
        if (tag == "img" and not given.get("alt")) or (given.get("role") == "img" and not given.get("aria-label")):
            self.unlabelled.append(tag)


def test_the_page_loads_nothing_runs_nothing_and_names_stay_text(tmp_path):
    page = page_of(tmp_path)
    found = Markup(page)
    assert "script" not in found.tags
    assert found.handlers == found.unlabelled == []
    assert all(address.startswith("data:image/png") for address in found.addresses)
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "p&lt;b&gt;ets" in page


def test_a_live_page_has_its_script_and_its_version(tmp_path):
    live = {"script": "look()", "digest": "abc", "version": "v1"}
    page = training_page(read_run(write_run(tmp_path)), live=live)
    assert "<script>look()</script>" in page
    assert "script-src 'sha256-abc'; connect-src 'self'" in page
    assert 'data-version="v1"' in page


def test_long_runs_have_a_table_of_equally_spaced_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(training_page_module, "_TABLE_ROWS", 10)
    page = page_of(tmp_path, lines=epochs(30, experts=0))
    assert len(cells(page, "Numbers behind the curves")) == 11
    assert "10 of 30 epochs, equally spaced." in page


@pytest.mark.parametrize("name", ["a folder", "it's"])
def test_commands_name_the_folder_for_a_shell(tmp_path, name):
    page = page_of(tmp_path / name)
    assert "moesaic predict &#39;" in page
