"""With timm: its networks converted, ours in its registry. Skipped where timm is not installed."""

import copy
import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from moesaic import PatchMoE
from moesaic.cli import main
from moesaic.models import timm_registry
from moesaic.models.convert import ChannelsLastPatchMoE, applied_conversions, convert
from moesaic.models.convert_candidates import convertible_layers
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import ModelSpec, create_model, list_models
from moesaic.models.skip import skip
from moesaic.models.timm_registry import register_with_timm, timm_model

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")

# an early enough layer to have 16 patches of images of 64×64
LAYERS = {
    "resnet18": "layer3.1.conv2",
    "resnet50": "layer3.5.conv2",
    "mobilenetv3_large_100": "blocks.4.1.conv_pwl",
    "convnext_tiny": "stages.2.blocks.8.mlp.fc1",
    "efficientnet_b0": "blocks.4.2.conv_pwl",
}
each_network = pytest.mark.parametrize("name", LAYERS)


def lively(name: str) -> nn.Module:
    """A network in which every layer counts: fresh ones have residual branches that are switched off."""
    return copy.deepcopy(made_lively(name))


@functools.cache
@torch.random.fork_rng()  # the first test that asks for a network goes on with the same random numbers as the others
def made_lively(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm_model(name, 10)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
        model.train()(torch.randn(4, 3, 64, 64))
        for norm in norms:
            norm.momentum = 0.1
    return model.eval()


@needs_timm
@each_network
def test_an_upcycled_network_with_all_patches_and_gate_one_equals_the_original(timm, name):
    # in float64: how far float32 sums drift apart depends on the number of threads
    model, x = lively(name).double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
        options = {"patches_per_expert": 16, "gate": "one", "init": "upcycle", "input_size": 64}
        assert convert(model, LAYERS[name], experts=8, **options) is model
        after = model(x)
        layer = model.get_submodule(LAYERS[name])
        assert isinstance(layer, PatchMoE)
        torch.testing.assert_close(after, before, atol=1e-10, rtol=1e-10)
        layer.experts.weight.zero_()
        assert (model(x) - before).abs().max() > 1e-3 * before.abs().max()  # it does matter


@needs_timm
@each_network
def test_a_training_step_updates_router_and_experts(timm, name):
    torch.manual_seed(0)
    model = convert(lively(name).train(), LAYERS[name], experts=4, input_size=64)
    layer = model.get_submodule(LAYERS[name])
    before = {key: weight.detach().clone() for key, weight in layer.named_parameters()}
    assert {"router.weight", "experts.weight"} <= before.keys()
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for key, weight in layer.named_parameters():
        assert not torch.equal(weight, before[key]), key
        assert weight.isfinite().all()


@needs_timm
def test_a_linear_layer_over_maps_is_converted_and_one_over_vectors_is_not(timm):
    model = lively("convnext_tiny")
    found = convertible_layers(model, input_size=64)
    assert "stages.3.blocks.2.mlp.fc2" in found
    assert "head.fc" not in found
    with pytest.raises(ValueError, match=r"'head.fc' did not run on a map \(B, H, W, C\); convertible: "):
        convert(model, "head.fc", experts=2, input_size=64)
    convert(model, "stages.1.blocks.*.mlp.fc1", experts=8, input_size=64)
    made = [name for name, layer in model.named_modules() if isinstance(layer, ChannelsLastPatchMoE)]
    assert made == [f"stages.1.blocks.{block}.mlp.fc1" for block in range(3)]
    counted = count_macs(model, (3, 64, 64))
    assert counted.routed_dense_macs == 3 * 64 * 192 * 768
    assert counted.routed_macs == counted.routed_dense_macs // 8 + 3 * 64 * 192 * 8


@needs_timm
def test_depthwise_and_strided_convolutions_of_timm_are_refused(timm):
    model = timm_model("mobilenetv3_large_100", 10, image_size=64)
    with pytest.raises(ValueError, match=r"'blocks.4.1.conv_dw' is depthwise \(groups=672\), and experts read all"):
        convert(model, "blocks.4.1.conv_dw", experts=4)
    with pytest.raises(ValueError, match="'conv_stem' has stride 2"):
        convert(model, "conv_stem", experts=4)
    with pytest.raises(ValueError, match=r"'blocks.4.1.se.conv_reduce' runs on a map of one pixel"):
        convert(model, "blocks.4.1.se.conv_reduce", experts=4)


@needs_timm
def test_tensorflow_padding_is_converted_and_weight_standardisation_is_refused(timm):
    layers = importlib.import_module("timm.layers")
    same = nn.Sequential(layers.Conv2dSame(4, 8, 3), nn.ReLU()).eval()
    x = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        before = same(x)
        convert(same, "0", experts=2, patches_per_expert=16, gate="one", init="upcycle", input_size=(4, 8, 8))
        torch.testing.assert_close(same(x), before)
    with pytest.raises(ValueError, match="'0' is a StdConv2d, which does not compute the plain layer"):
        convert(nn.Sequential(layers.StdConv2d(4, 8, 3, padding=1)), "0", experts=2, input_size=8)


@needs_timm
def test_a_timm_model_can_be_rebuilt_from_its_spec(timm):
    model = create_model("timm/resnet18", num_classes=3, in_channels=1, image_size=64)
    convert(model, "layer3.1.conv2", experts=4, init="upcycle")
    done = json.loads(json.dumps(applied_conversions(model)))
    spec = ModelSpec("timm/resnet18", {"num_classes": 3, "in_channels": 1, "image_size": 64}, tuple(done))
    again = spec.build()
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x), model.eval()(x))
    assert applied_conversions(again) == tuple(done)


@needs_timm
def test_unknown_timm_models_are_refused_with_suggestions(timm):
    with pytest.raises(ValueError, match=r"create_model: timm .* has no model 'resnet81'; did you mean .*'resnet18'"):
        create_model("timm/resnet81", num_classes=2)


@needs_timm
def test_unknown_options_of_timm_models_are_named(timm):
    with pytest.raises(TypeError, match=r"timm's resnet18 has no option 'experts', got experts=4; leave it out"):
        create_model("timm/resnet18", num_classes=2, experts=4)


@needs_timm
def test_registered_networks_are_in_timms_registry(timm):
    ours = register_with_timm()
    assert ours == register_with_timm()
    assert timm_registry.__all__ == [
        "register_with_timm",
        "timm_config",
        "timm_model",
    ]  # entry points are timm's, not our API
    assert set(list_models()) - set(ours) == {"resnet18", "resnet34", "resnet50", "vgg16"}  # timm has its own
    assert set(timm.list_models("wrn10*")) >= {"wrn10_10", "wrn10_10_pmoe"}
    assert all(hasattr(timm_registry, name) for name in timm_registry.__all__)
    model = timm.create_model("wrn10_1_pmoe", num_classes=7, in_chans=1, img_size=64, drop_rate=0.0, experts=2)
    assert len(model.moe.experts) == 2
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)
    data = importlib.import_module("timm.data").resolve_model_data_config(model)
    assert data["input_size"] == (1, 64, 64)
    assert timm.create_model("wrn10_1", num_classes=2, img_size=64).num_classes == 2
    with pytest.raises(ValueError, match="wrn10_1_pmoe of moesaic has no pretrained weights"):
        timm.create_model("wrn10_1_pmoe", pretrained=True)


@needs_timm
def test_names_of_timm_are_not_overwritten(timm, monkeypatch):
    theirs = timm.model_entrypoint("resnet18")
    monkeypatch.setattr(timm_registry, "list_models", lambda: ["resnet18"])
    assert register_with_timm() == ()
    assert timm.model_entrypoint("resnet18") is theirs


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"create_model: timm is not installed; pip install 'moesaic\[timm\]'"
    ):
        create_model("timm/resnet18", num_classes=2)
    with pytest.raises(ModuleNotFoundError, match="register_with_timm: timm is not installed"):
        register_with_timm()


def stand_in(monkeypatch, tmp_path, torchvision: str | None) -> None:
    """A timm that imports a torchvision of this source; None: there is no torchvision."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("import torchvision.ops\n")
    if torchvision is None:
        monkeypatch.setitem(sys.modules, "torchvision", None)
    else:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(torchvision)
        (tmp_path / "torchvision" / "ops.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import torch\ntorch.library.register_fake('torchvision::gone')(print)", "torchvision::gone does not exist"),
        ("raise OSError('libcudart.so: cannot open shared object file')", "libcudart.so: cannot open"),
        ("raise ImportError('_C.so: undefined symbol: _ZN3c10\\nmore')", "undefined symbol: _ZN3c10"),
        ("import torch\ntorch.ops.gone.thing", "has no attribute"),
    ],
)  # fmt: skip
def test_a_torchvision_that_does_not_match_is_told_in_one_line(monkeypatch, tmp_path, source, why, capsys):
    monkeypatch.setattr(timm_registry, "version", {"torch": "2.13.0", "torchvision": "0.19.1"}.__getitem__)
    stand_in(monkeypatch, tmp_path, source)
    for call in (lambda: create_model("timm/resnet18", num_classes=2), register_with_timm):
        with pytest.raises(ImportError) as caught:
            call()
        message = str(caught.value)
        assert "timm imports torchvision 0.19.1, which does not match torch 2.13.0 (" in message
        assert message.endswith("reinstall both from one index: pip install --force-reinstall torch torchvision")
        assert len(message.splitlines()) == 1
    assert why in message
    Path(tmp_path, "pets", "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "pets" / "cat" / "0.png")
    pets = str(tmp_path / "pets")
    for command in (
        ["train", pets, "--model", "timm/resnet18"],
        ["compare", pets, "--models", "wrn10_1,timm/resnet18"],
    ):
        assert main(command) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "torchvision" in line]
        assert line.startswith(f"moesaic {command[0]}: ")


def test_a_missing_torchvision_is_told_in_one_line(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, None)
    with pytest.raises(ModuleNotFoundError, match="timm needs torchvision, which is not installed; pip install torchv"):
        create_model("timm/resnet18", num_classes=2)


def test_other_errors_of_timm_are_its_own(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, "")
    (tmp_path / "timm" / "__init__.py").write_text("raise RuntimeError('of its own')\n")
    with pytest.raises(RuntimeError, match="of its own"):
        create_model("timm/resnet18", num_classes=2)


def test_a_transformer_that_was_built_for_other_images_is_run_on_those(timm):
    built = {"img_size": 32, "in_chans": 1, "depth": 2, "embed_dim": 24, "num_heads": 2}
    model = convert(timm.create_model("vit_tiny_patch16_224", **built), "last-1", experts=4)
    model = skip(model, "blocks.0")
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 1000)


def test_a_network_that_does_not_run_on_its_default_size_asks_for_another(timm):
    grey = timm.create_model("resnet10t", in_chans=1)
    for change in (lambda: convert(grey, "layer1.0.conv2", experts=4), lambda: skip(grey, "every-1")):
        with pytest.raises(ValueError, match=r"; give input_size=\(C, H, W\) if its images have another size$"):
            change()
