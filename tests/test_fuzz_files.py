"""Every reader of files against mutated files, a few inputs each; ``make fuzz`` runs many more."""

import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "fuzz_files.py"
SEED = int(os.environ.get("MOESAIC_TEST_SEED", "0"))
INPUTS = 12


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz_files", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_files"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_files"]


def test_a_few_mutated_files_are_read_or_refused_by_every_reader(tool, tmp_path):
    found = tool.fuzz(SEED, 0, None, tmp_path, inputs=INPUTS)
    assert found["failures"] == []
    names = {key.rpartition(" ")[0] for key in found["counts"]}
    assert sum(found["counts"].values()) == INPUTS * len(names)
    assert len(names) > 25
    assert any(key.endswith("refused") for key in found["counts"])


def test_a_failure_is_kept_and_run_again(tool, tmp_path, monkeypatch):
    def broken(content: bytes, folder: Path) -> None:
        if content != b"valid":
            raise ZeroDivisionError("1 / 0")

    monkeypatch.setattr(tool, "all_targets", lambda folder: {"broken": tool.Target(b"valid", broken)})
    found = tool.fuzz(SEED, 0, None, tmp_path, inputs=30)
    assert found["counts"].get("broken failed", 0) >= 1
    kept = [path for path in tmp_path.iterdir() if path.suffix != ".txt"]
    assert "1 / 0" in kept[0].with_name(f"{kept[0].name}.txt").read_text()
    again = tool.fuzz(SEED, 0, None, tmp_path, inputs=0)
    assert again["counts"] == {"broken failed": len(kept)}


def test_mutations_differ_and_follow_the_seed(tool):
    target = tool.Target(b'{"a": [1, 2, {"b": "text"}], "c": null}', lambda content, folder: None, is_json=True)
    made = [tool.mutated(target, random.Random(seed)) for seed in range(50)]
    assert made == [tool.mutated(target, random.Random(seed)) for seed in range(50)]
    assert len(set(made)) > 30
    assert max(map(len, made)) < 30_000, "mutations do not add up"
