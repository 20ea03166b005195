"""`moesaic advise`: what it prints, the commands it suggests, and what it refuses."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro
from training.trained import save_run

from moesaic.bench.advise import Plan
from moesaic.cli import main
from moesaic.cli.advise import Advise, train_command
from moesaic.cli.commands import find_command
from moesaic.cli.network_argument import Network, NetworkOptions
from moesaic.cli.shared import CommandError
from moesaic.models import ModelSpec

FAST = ["--batch-size", "1", "--repetitions", "1", "--inference", "--device", "cpu"]
SPLIT = {"layer": ["blocks.*.mlp"], "experts": 8, "capacity": 4.0, "init": "split"}
CONVS = {"layer": ["layer3.*.conv2", "layer4.1.conv1"], "experts": 4, "init": "upcycle"}
SKIP = {"skip": ["every-2"], "keep": 0.5}


def words(network: str, *conversions: dict[str, Any], weights: Path | None = None) -> list[str]:
    plan = Plan("convert", conversions, 1.0, 1.0, {})
    return train_command(plan, Network(None, (3, 64, 64), ModelSpec.parse(network), weights))


@pytest.mark.parametrize("conversions", [(SPLIT,), (CONVS,), (SKIP,), (CONVS, SPLIT)])
def test_the_command_asks_train_for_the_plan(conversions):
    moesaic, name, *options = shlex.split(shlex.join(words("timm/vit_tiny_patch16_224:pretrained", *conversions)))
    assert (moesaic, name) == ("moesaic", "train")
    command, _ = find_command([name])
    train = tyro.cli(command, args=options)
    assert (train.data, train.img_size) == ("DATA", 64)
    spec = train._spec()
    assert spec.name == "timm/vit_tiny_patch16_224"
    assert spec.arguments == {"pretrained": True}
    assert [{key: value for key, value in each.items() if key != "seed"} for each in spec.conversions] == [*conversions]


def test_one_conversion_is_given_by_options():
    assert shlex.join(words("timm/vit_tiny_patch16_224", SPLIT)) == (
        "moesaic train DATA --img-size 64 --model timm/vit_tiny_patch16_224 --convert 'blocks.*.mlp' --experts 8 "
        "--capacity 4 --init split"
    )


def test_a_transformer_gets_advice_in_json(capsys: pytest.CaptureFixture[str]):
    options = [*FAST, "--experts", "4", "--img-size", "8", "--json"]
    assert main(["advise", "vit_tiny_patch4_32:depth=2", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network"] == "vit_tiny_patch4_32:depth=2"
    assert found["image"] == [3, 8, 8]
    assert {layer["way"] for layer in found["layers"]} == {"split", "experts", "skip"}
    assert all(layer["bounds"]["forward"] is None or layer["bounds"]["forward"] > 1 for layer in found["layers"])
    plans = {plan["name"]: plan for plan in found["plans"]}
    assert plans["experts"]["command"] == (
        "moesaic train DATA --img-size 8 --model vit_tiny_patch4_32:depth=2 --convert 'blocks.*.mlp' --experts 4 "
        "--capacity 1"
    )
    assert found["verdict"]


def test_a_busy_machine_is_pointed_out(monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, says in ((8.0, "load 8.0 on 2 cores): times will be unreliable"), (1.0, "")):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 1.0, 1.0))
        NetworkOptions("wrn10_1").warn_if_busy("cpu")
        assert capsys.readouterr().err.strip().endswith(says)
        NetworkOptions("wrn10_1").warn_if_busy("cuda")
        assert capsys.readouterr().err == ""


def test_a_run_is_continued_from_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save_run(tmp_path / "a run", "wrn10_1")
    network = NetworkOptions(str(run)).build()
    assert network.spec == ModelSpec("wrn10_1", {})
    assert network.weights == run / "model.safetensors"
    plan = Plan("convert", ({"layer": ["body.group3.0.conv2"], "experts": 4, "init": "upcycle"},), 1.0, 1.0, {})
    assert train_command(plan, network)[5:9] == ["--model", "wrn10_1", "--weights", str(run / "model.safetensors")]
    assert main(["advise", str(run), *FAST, "--experts", "4"]) == 0
    assert "the whole network" in capsys.readouterr().out


def test_a_network_of_timm_has_its_own_size_and_needs_no_weights(timm):
    network = NetworkOptions("timm/resnet18:pretrained").build()
    assert network.image == (3, 224, 224)
    assert network.spec.is_pretrained


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": 0}, "^moesaic advise: --batch-size=0"),
        ({"experts": 0}, "^moesaic advise: --experts=0"),
        ({"capacity": 9.0}, "--capacity=9.0; it must be above 0 and at most --experts 8"),
        ({"keep": 0.0}, "--keep=0.0; it must be above 0 and at most 1"),
        ({"network": "wrn10_1_pmo"}, "wrn10_1_pmo"),
        ({"network": "wrn10_1_pmoe"}, "moe' is routed already; moesaic bench model times"),
        ({"network": "wrn10_1:convert=body.group3.0.conv2:experts=4"}, "is routed already"),
        ({"network": "vgg16_deepmoe", "img_size": 32}, "has channel gates"),
    ],
)
def test_advise_refuses_in_one_line(options: dict[str, Any], complaint: str):
    with pytest.raises(CommandError, match=complaint):
        Advise(**{"network": "wrn10_1", "device": "cpu", **options}).run([])
