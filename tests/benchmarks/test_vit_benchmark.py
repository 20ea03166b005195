"""The benchmark of routed transformers: it runs on a CPU, compares with float64 first, and judges bars."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_scripts import loaded_script


@pytest.fixture
def script() -> Iterator[ModuleType]:
    with loaded_script("vit") as module:
        yield module


def test_every_network_is_compared_and_timed(script, tmp_path: Path, capsys):
    out = tmp_path / "vit.json"
    script.main(["--small", "--repetitions", "1", "--out", str(out)])
    content = json.loads(out.read_text())
    assert [(row["network"], row["mode"]) for row in content["rows"]] == [
        (name, "eager") for name in ("dense", "experts", "split", "half", "skip")
    ]
    assert {name: each["equal"] for name, each in content["checks"].items()} == {
        "experts": True,
        "split": True,
        "skip": True,
    }
    assert all(each["error"] < 1e-4 for each in content["checks"].values())
    assert all(row["step_ms"] > 0 for row in content["rows"])
    parameters = {row["network"]: row["parameters"] for row in content["rows"]}
    assert parameters["experts"] > 4 * parameters["dense"] > 4 * parameters["half"]
    assert "reached" not in capsys.readouterr().out  # a small size says nothing of the bars


def test_a_layer_that_differs_is_noticed(script):
    options = script.Options("cpu", True, 1)
    model = script.NETWORKS["split"](options)
    layer = model.get_submodule("blocks.1.mlp")
    assert script.check(model, options)["equal"]
    layer.register_forward_hook(lambda module, args, y: y * 1.01)
    assert not script.check(model, options)["equal"]


def test_bars_are_ratios_of_dense_time(script):
    def row(name: str, mode: str, gain: float):
        return script.Row(name, mode, 1.0, gain, gain, script.BARS.get((name, mode)), 1, (1.0, 1.0))

    assert [row("experts", "eager", gain).reached for gain in (0.92, 0.9)] == ["yes", "no"]  # 1.1 times the dense time
    assert [row("split", "compiled", gain).reached for gain in (1.15, 1.14)] == ["yes", "no"]
    assert row("half", "compiled", 1.27).reached == "–"


def test_unknown_networks_are_refused(script):
    with pytest.raises(SystemExit, match="--only: splits is unknown; choose from dense, experts"):
        script.main(["--only", "splits"])


@pytest.mark.gpu
def test_small_networks_run_on_a_gpu(script, tmp_path: Path):
    assert torch.cuda.is_available()
    script.main(["--device", "cuda", "--small", "--repetitions", "1", "--out", str(tmp_path / "vit.json")])
