"""The latency table of the page on export is that of the committed results, and says so where there are none."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def latency() -> ModuleType:
    spec = importlib.util.spec_from_file_location("latency", ROOT / "docs" / "latency.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_on_the_page_is_that_of_the_committed_results(latency: ModuleType):
    text = latency.PAGE.read_text("utf-8")
    assert len(latency.PLACE.findall(text)) == 1
    assert latency.with_table(text) == text, "run: python docs/latency.py"


def test_a_network_that_is_slower_than_the_dense_one_is_in_bold(
    latency: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    row = {"network": "VGG-16, all open", "format": "onnx", "batch": 1, "routed, ms": 5.0, "dense": "VGG-16"}
    row |= {"dense, ms": 4.0, "× dense": 0.8}
    machine = {"processor": "a CPU", "threads": 2, "torch": "2.13", "onnxruntime": "1.31"}
    results = tmp_path / "export-cpu.json"
    monkeypatch.setattr(latency, "RESULTS", results)
    assert latency.table() == "*not measured yet*"
    results.write_text(json.dumps({"machine": machine, "networks": [row, row | {"× dense": 1.25, "format": "pt2"}]}))
    lines = latency.table().splitlines()
    assert lines[0] == "*a CPU, 2 threads, ONNX Runtime 1.31, torch 2.13; medians*"
    assert lines[4] == "| ONNX Runtime | VGG-16, all open | 1 | 5.00 ms | 4.00 ms (VGG-16) | **0.80** |"
    assert lines[5].startswith("| torch, `.pt2` |")
    assert lines[5].endswith("| 1.25 |")
