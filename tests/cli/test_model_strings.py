"""Every spelling of a network and of a router runs: in `train`, in `compare` and in Python."""

import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from moesaic import PatchMoE, TokenChoice
from moesaic.cli import main
from moesaic.models import HeadedNetwork, ModelSpec, convert, create_model
from moesaic.models.model_string import insert_router
from moesaic.routing import registry as of_routers
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.comparison_result import read_comparison

SHORT = ["--epochs", "1", "--batch-size", "8", "--img-size", "16", "--device", "cpu", "--cache-dir", "cache"]
LARGER = [*SHORT, "--img-size", "64"]  # of which the last map of resnet10t has four positions
HEAD = ["--head", "routed", "--experts", "2", "--patches-per-expert", "1"]
ROUTERS = ["expert-choice", "token-choice", "soft", "my_router:Mine"]
CONVERTED = "timm/resnet10t:pretrained:convert=layer4.0.conv2:experts=8"


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for kind in ("cat", "dog"):
        Path("pets", kind).mkdir(parents=True)
        for number in range(6):
            pixels = torch.randint(0, 255, (32, 32, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(f"pets/{kind}/{number}.png")


@cache
def some_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return import_module("timm").create_model("resnet10t", num_classes=1000).state_dict()


@pytest.fixture
def hub(timm, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has random weights for every network; the names of those that were asked for."""
    asked: list[str] = []

    def load(name: str, *given, **options) -> dict[str, torch.Tensor]:
        asked.append(name)
        return dict(some_weights())

    builder = import_module("timm.models._builder")
    monkeypatch.setattr(builder, "load_state_dict_from_hf", load)
    monkeypatch.setattr(builder, "has_hf_hub", lambda necessary=False: True)
    return asked


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch):
    """A module with a router of a user in the current folder."""
    monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))
    Path("my_router.py").write_text("from moesaic.routing import TokenChoice\n\nclass Mine(TokenChoice): ...\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    yield
    sys.modules.pop("my_router", None)


def stem(weights: nn.Module) -> torch.Tensor:
    return weights.state_dict()["conv1.0.weight"]


@pytest.mark.parametrize(
    ("given", "pretrained"),
    [
        (["--model", "timm/resnet10t"], False),
        (["--model", "timm/resnet10t:pretrained"], True),
        (["--model", "timm/resnet10t:pretrained=True"], True),
        (["--model", "timm/resnet10t", "--pretrained"], True),
        (["--model", CONVERTED], True),
        (["--model", "timm/resnet10t", "--pretrained", "--convert", "layer4.0.conv2", "--experts", "8"], True),
        (["--model", "timm/resnet10t:pretrained", *HEAD], True),
    ],
)
def test_networks_of_timm_in_train(pets, hub, given, pretrained):
    assert main(["train", "pets", *given, *LARGER, "--out", "out"]) == 0
    assert bool(hub) == pretrained
    hub.clear()
    found = load_checkpoint("out")
    assert not hub, "a checkpoint has its weights"
    assert found.spec.is_pretrained == pretrained
    text = " ".join(given)
    layer = dict(found.model.named_modules()).get("layer4.0.conv2")
    assert isinstance(layer, PatchMoE) == ("convert" in text)
    if isinstance(layer, PatchMoE):
        assert len(layer.experts) == 8
    assert isinstance(found.model, HeadedNetwork) == ("--head" in text)
    recipe = json.loads(Path("out/config.json").read_text())["recipe"]
    assert (recipe.get("trainable") == "head") == (pretrained and "convert" not in text)


def test_networks_of_timm_in_compare(pets, hub):
    models = f"timm/resnet10t,timm/resnet10t:pretrained,{CONVERTED}"
    given = ["--models", models, "--samples", "4", "--trials", "2", "--out", "out"]
    assert main(["compare", "pets", *given, *LARGER]) == 0
    assert hub
    found = read_comparison(Path("out/result.json"))
    assert [model.name for model in found.models] == models.split(",")
    assert len(found.runs) == 6


def test_a_converted_network_has_the_pretrained_weights_of_all_its_other_layers(hub):
    spec = ModelSpec.parse(CONVERTED)
    model = ModelSpec(spec.name, {**spec.arguments, "num_classes": 2}, ({**spec.conversions[0], "input_size": 64},))
    first, again = model.build(), create_model("timm/resnet10t", num_classes=2, pretrained=True)
    assert len(hub) == 2
    assert torch.equal(stem(first), stem(again))
    assert not torch.equal(stem(first), stem(create_model("timm/resnet10t", num_classes=2)))
    assert isinstance(first.layer4[0].conv2, PatchMoE)


@pytest.mark.parametrize(
    "given",
    [["timm/resnet10t:pretrained"], ["timm/resnet10t", "--pretrained"], [CONVERTED]],
    ids=["name", "flag", "more"][:3],
)
def test_a_hub_that_cannot_be_reached_is_told_in_one_line(pets, timm, given, monkeypatch, capsys):
    def offline(*given, **options):
        raise ConnectionError("no route to host\nand more")

    builder = import_module("timm.models._builder")
    monkeypatch.setattr(builder, "load_state_dict_from_hf", offline)
    monkeypatch.setattr(builder, "has_hf_hub", lambda necessary=False: True)
    assert main(["train", "pets", "--model", *given, *SHORT]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "downloaded" in line]
    assert re.search(r"^moesaic train: .*resnet10t cannot be downloaded \(no route to host\); .*--weights FILE", line)
    if len(given) == 1:
        assert main(["compare", "pets", "--models", f"wrn10_1,{given[0]}", "--samples", "4", *SHORT]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "downloaded" in line]
        assert line.startswith("moesaic compare: ")


@pytest.mark.parametrize("head", [None, "routed", "mean"])
def test_a_file_of_weights_for_a_network_of_ours(pets, head, capsys):
    source = create_model("wrn10_1", num_classes=5)
    save_file(source.state_dict(), "weights.safetensors")
    few = ["--patches-per-expert", "2"] if head == "routed" else []  # of the few positions of small images
    given = ["--model", "wrn10_1", "--weights", "weights.safetensors", *(["--head", head] if head else []), *few]
    assert main(["train", "pets", *given, *SHORT, "--out", "out"]) == 0
    assert "the frozen backbone runs in every step" not in capsys.readouterr().err, "features are cached"
    model = load_checkpoint("out").model
    body = model.backbone.body if head else model.body
    assert torch.equal(body.stem.weight.cpu(), source.body.stem.weight)
    options = {None: "", "mean": ":head=mean", "routed": ":head=routed:patches_per_expert=2"}[head]
    spelled = f"wrn10_1:weights=weights.safetensors{options}"
    assert main(["train", "pets", "--model", spelled, *SHORT, "--out", "spelled"]) == 0
    assert Path("out/model.safetensors").read_bytes() == Path("spelled/model.safetensors").read_bytes()
    if head == "routed":
        assert (
            main(["explain", "out", "pets/cat/0.png", "--data", "pets", "--cache-dir", "cache", "--device", "cpu"]) == 0
        )
        models = f"{spelled}:experts=2,wrn10_1:weights=weights.safetensors:head=mean"
        given = ["--models", models, "--samples", "4", "--trials", "2", "--out", "compared"]
        assert main(["compare", "pets", *given, *SHORT]) == 0
        assert len(list(Path("cache").glob("features-*.npy"))) == 2, "one backbone, two splits"


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_in_train(pets, mine, router):
    assert main(["train", "pets", "--model", "wrn10_1_pmoe", "--router", router, *SHORT, "--out", "flag"]) == 0
    given = ["--model", f"wrn10_1_pmoe:router={router}", *SHORT, "--out", "option"]
    assert main(["train", "pets", *given]) == 0
    converted = ["--model", "wrn10_1", "--convert", "body.group3.0.conv2", "--experts", "4", "--router", router]
    assert main(["train", "pets", *converted, *SHORT, "--out", "converted"]) == 0
    kind = of_routers.registered_router(router)
    for out in ("flag", "option", "converted"):
        model = load_checkpoint(out).model
        (layer,) = (module for module in model.modules() if isinstance(module, PatchMoE))
        assert type(layer.router) is kind


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_in_compare(pets, mine, router):
    converted = "wrn10_1:convert=body.group3.0.conv2:experts=4"
    spelled = f"wrn10_1,wrn10_1_pmoe:router={router},wrn10_1:convert=body.group3.0.conv2:router={router}:experts=4"
    grid = ["--samples", "4", "--trials", "2", *SHORT, "--out", "out"]
    flag = ["--models", f"wrn10_1,wrn10_1_pmoe,{converted}", "--router", router]
    assert main(["compare", "pets", *flag, *grid]) == 0
    found = read_comparison(Path("out/result.json"))
    assert [model.name for model in found.models] == spelled.split(",")
    assert len(found.runs) == 6
    if router == ROUTERS[-1]:
        assert main(["compare", "pets", "--models", spelled, *grid]) == 0
        assert read_comparison(Path("out/result.json")).runs == found.runs, "the same networks, which run once"


@pytest.mark.parametrize("router", [*ROUTERS, TokenChoice], ids=str)
def test_routers_in_python(timm, tmp_path, monkeypatch, mine_here, router):
    model = create_model("wrn10_1_pmoe", num_classes=2, router=router)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    network = create_model("timm/resnet10t", num_classes=2, image_size=64)
    convert(network, "layer3.0.conv2", experts=4, router=router)
    assert type(network.layer3[0].conv2.router) is type(model.moe.router)
    assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 2)


@pytest.fixture
def mine_here(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    return request.getfixturevalue("mine")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (["--models", "wrn10_1,wrn10_2"], "--router='soft', but none of wrn10_1, wrn10_2 lacks one; use a network"),
        (["--models", "wrn10_1,wrn10_1_pmoe:router=soft"], "--router='soft', but none of"),
    ],
)
def test_a_router_that_no_network_takes_is_told(pets, given, fault, capsys):
    assert main(["compare", "pets", *given, "--router", "soft", "--samples", "4", *SHORT]) == 2
    assert fault in capsys.readouterr().err


def test_every_conversion_without_a_router_gets_the_one_that_is_given():
    text = "timm/x:convert=a:experts=8:convert=b:experts=2:router=soft:head=routed:experts=4"
    expected = "timm/x:convert=a:router=token-choice:experts=8:convert=b:experts=2:router=soft:head=routed:experts=4"
    assert insert_router(text, "token-choice", in_network=False) == expected
    assert insert_router("wrn10_1_pmoe", "my:Class", in_network=True) == "wrn10_1_pmoe:router=my:Class"
