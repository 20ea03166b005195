"""`moesaic bench`: what it prints, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.trained import save_run

from moesaic.cli import main
from moesaic.cli.bench import Bench
from moesaic.cli.bench_model import BenchModel
from moesaic.cli.shared import CommandError

SMALL = [
    "--channels",
    "8",
    "--size",
    "8",
    "--batch-size",
    "2",
    "--experts",
    "2",
    "--repetitions",
    "2",
    "--device",
    "cpu",
]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", "layer", *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_every_backend_has_its_times_beside_the_dense_layer(capsys: pytest.CaptureFixture[str]):
    table = printed([], capsys)
    for layer in ("dense convolution", "PatchMoE, torch ←", "masked (reference)"):
        found = re.search(rf"{re.escape(layer)} +[\d.]+ ms +[\d.]+ +[\d.]+ ms +[\d.]+", table)
        assert found, f"no times of {layer} in:\n{table}"
    assert "input 2×8×8×8, 3×3 kernel, 2 experts with 2 of 4 patches each, float32 on cpu" in table


def test_it_prints_the_chosen_backend_and_whether_routing_is_faster(capsys: pytest.CaptureFixture[str]):
    table = printed(["--inference"], capsys)
    assert "← moesaic chooses torch: " in table
    assert re.search(r"^(Routing is slower|Routing is faster|No difference): .*forward pass", table, re.MULTILINE)
    assert "training step" not in table


def test_training_alone_leaves_out_the_forward_pass(capsys: pytest.CaptureFixture[str]):
    assert "forward pass" not in printed(["--training"], capsys)


def test_a_kernel_of_one_pixel_is_also_measured_as_a_linear_layer(capsys: pytest.CaptureFixture[str]):
    assert "dense, linear over pixels" in printed(["--inference", "--kernel-size", "1"], capsys)


def test_the_released_block_is_measured_too(capsys: pytest.CaptureFixture[str]):
    table = printed(["--gate", "softmax_all", "--gate-on", "input", "--expert-norm", "--training"], capsys)
    assert "PatchMoE, torch" in table


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (Bench("lair"), r"WHAT='lair' is unknown; use 'layer' or 'model' \(did you mean 'layer'\?\)"),
        (Bench("model"), "model must be the first word: moesaic bench model NETWORK"),
        (Bench("layer", channels=0), "--channels=0; it must be at least 1"),
        (Bench("layer", repetitions=0), "--repetitions=0; it must be at least 1"),
        (Bench("layer", size=15), r"a 15×15 map is not divisible into 4×4 patches; pad it to 16×16"),
        (Bench("layer", patches_per_expert=17), r"patches_per_expert=17, but a 4×4 grid has only 16 patches"),
        (Bench("layer", kernel_size=2), "kernel_size=2 has no centre pixel; use an odd size, 1 or 3"),
        (Bench("layer", experts=7), "out_channels=64"),
        (Bench("layer", dtype="int8"), "--dtype='int8' is unknown; use 'float32', 'bfloat16' or 'float16'"),
        (Bench("layer", gate_on="both"), "--gate-on='both' is unknown; use 'output' or 'input'"),
        (Bench("layer", device="tpu"), "--device='tpu' is unknown; use 'auto', 'cpu' or 'cuda'"),
        (Bench("layer", device="cpu", tune=True), "--tune needs the triton backend, but the backend is torch: "),
        (Bench("layer", tune_seconds=0), "--tune-seconds"),
        (Bench("layer", patch_size=10**6), "--patch-size=1000000 is larger than the map of --size 16; use at most 16"),
        (
            Bench("layer", batch_size=10**9),
            r"the feature maps have .* elements; the maximum is 2,147,483,648: use a smaller --batch-size",
        ),
        (Bench("layer", channels=10**6, size=4), r"the experts have .* elements; .* use a smaller --channels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(asked: Bench, complaint: str):
    with pytest.raises(CommandError, match=f"^moesaic bench: .*{complaint}"):
        asked.run([])


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CommandError, match=r"--device='cuda', but torch finds no GPU here; use 'cpu' or 'auto'"):
        Bench("layer", device="cuda").run([])


def test_a_network_is_timed_against_its_dense_counterpart(capsys: pytest.CaptureFixture[str]):
    options = ["--img-size", "16", "--batch-size", "1", "--mode", "eager", "--repetitions", "1", "--device", "cpu"]
    assert main(["bench", "model", "wrn10_1_pmoe", *options, "--inference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network"] == "wrn10_1_pmoe"
    assert found["image"] == [3, 16, 16]
    assert [each["mode"] for each in found["networks"]] == ["eager"]
    assert main(["bench", "model", "wrn10_1_pmoe", *options, "--inference"]) == 0
    assert "× dense" in capsys.readouterr().out


def test_a_run_is_timed_on_images_of_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = str(save_run(tmp_path / "run"))
    options = ["--batch-size", "1", "--mode", "eager", "--repetitions", "1", "--inference", "--device", "cpu"]
    assert main(["bench", "model", run, *options]) == 0
    assert "× dense" in capsys.readouterr().out
    with pytest.raises(CommandError, match="--img-size=7, but this network takes"):
        BenchModel(run, img_size=7).run([])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "graph"}, "--mode='graph'"),
        ({"mode": "captured", "device": "cpu"}, "--mode=captured needs a GPU"),
        ({"batch_size": 0}, "--batch-size=0"),
        ({"img_size": 10**9}, "--img-size=1000000000 is more than 4096"),
        ({"network": "wrn10_1_pmo"}, "wrn10_1_pmo"),
        ({"network": "vgg16_deepmoe", "img_size": 32}, "has channel gates"),
        ({"network": "wrn10_1"}, "has no routed layers; moesaic advise finds"),
    ],
)
def test_bench_model_refuses_in_one_line(options: dict[str, Any], complaint: str):
    with pytest.raises(CommandError, match=f"^moesaic bench model: .*{complaint}"):
        BenchModel(**{"network": "wrn10_1_pmoe", "device": "cpu", **options}).run([])
