"""The table of finished cells of a sweep in progress."""

import json
import os

from moesaic.report.cells_page import cells_page, read_cells
from moesaic.training import ResultCache

LIVE = {"script": "look()", "digest": "abc", "version": "v1"}


def test_finished_cells_are_listed_the_latest_first(tmp_path):
    cache = ResultCache(tmp_path / "cells")
    for i, accuracy in enumerate((90.5, [1, 2])):
        spec = {"number": i}
        cache.get_or_run(f"wrn <b> {i}", spec, lambda accuracy=accuracy: {"accuracy": accuracy})
        os.utime(cache.path(f"wrn <b> {i}", spec), (1000 + i, 1000 + i))
    found = read_cells(tmp_path)
    assert [(cell.name, cell.accuracy) for cell in found] == [("wrn-b-1", None), ("wrn-b-0", 90.5)]
    page = cells_page("moesaic compare <b>", found, live=LIVE)
    assert "2 cells finished" in page
    assert page.index("wrn-b-1") < page.index("wrn-b-0")
    assert "90.5\u00a0%" in page
    assert "moesaic compare &lt;b&gt;" in page


def test_files_that_are_no_cells_are_left_out(tmp_path):
    cells = tmp_path / "cells"
    cells.mkdir()
    for i, content in enumerate(("x", "[]", "{}", json.dumps({"seconds": -1, "result": {}}), '{"seconds": 1}')):
        (cells / f"bad-{i}.json").write_text(content)
    (cells / "x<i>-0123456789abcdef.json").write_text(json.dumps({"seconds": 1, "result": {"accuracy": True}}))
    assert [(cell.name, cell.accuracy) for cell in read_cells(tmp_path)] == [("x<i>", None)]
    assert "x&lt;i&gt;" in cells_page("c", read_cells(tmp_path), live=LIVE)


def test_a_sweep_that_has_just_begun_has_no_table(tmp_path):
    page = cells_page("moesaic reproduce", read_cells(tmp_path), live=LIVE)
    assert "0 cells finished" in page
    assert "<table" not in page
