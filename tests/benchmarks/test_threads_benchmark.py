"""The thread benchmark: it counts calls, and notices wrong ones and failures."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_scripts import loaded_script
from torch import Tensor, nn


@pytest.fixture
def script() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    with loaded_script("threads") as module:
        yield module
    torch.set_num_threads(threads)


def test_all_calls_are_counted_and_written(script, monkeypatch, tmp_path: Path):
    out = tmp_path / "threads.json"
    options = ["--threads", "3", "--calls", "4", "--only", "vgg16_deepmoe", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["threads.py", *options])
    assert script.main() == 0
    found = json.loads(out.read_text())
    assert [row["model"] for row in found["models"]] == ["vgg16_deepmoe", "vgg16_deepmoe, frozen"]
    for row in found["models"]:
        assert row["calls"] == 12
        assert row["wrong"] == row["failed"] == 0
    assert (found["calls"], found["wrong_or_failed"]) == (24, 0)


class Faulty(nn.Module):
    """Returns the output of another input for single images, and fails for pairs."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise ValueError("no pairs")
        return x.flip(1)


def test_wrong_calls_and_failures_are_counted(script):
    images = script.inputs(4)
    found = script.call_from_threads("faulty", Faulty(), images, images, threads=2, calls=4)
    assert (found.calls, found.identical, found.wrong, found.failed) == (8, 0, 4, 4)
    assert found.errors == {"ValueError: no pairs": 4}
    assert found.largest_difference > script.DIFFERENT


def test_a_model_whose_outputs_do_not_differ_proves_nothing(script):
    with pytest.raises(RuntimeError, match="two inputs have nearly the same output"):
        script.expected_outputs(nn.Dropout(1.0), script.inputs(4))
