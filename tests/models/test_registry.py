"""Networks by name."""

import json
from dataclasses import replace

import pytest
import torch

from moesaic import PatchMoE
from moesaic.models.convert import applied_conversions
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.model_string import format_model_string, parse_model_string
from moesaic.models.registry import ModelSpec, create_model, list_models

SMALL = [name for name in list_models() if not name.endswith(("_10", "_10_pmoe", "_8", "_8_pmoe"))]


@pytest.mark.parametrize("name", SMALL)
def test_every_listed_network_can_be_created_and_run(name):
    narrow = {"width": 0.1} if name.startswith(("resnet", "vgg")) else {"depth": 2} if name.startswith("vit") else {}
    model = create_model(name, num_classes=7, **narrow).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_unlisted_wide_resnets_can_be_created():
    assert "wrn16_3_pmoe" not in list_models()
    assert create_model("wrn16_3_pmoe", num_classes=2, experts=6).moe.experts.weight.shape[0] == 6


def test_vgg_and_residual_networks_take_size_channels_and_width():
    widenings = ["", "_w13_all", "_w1_high", "_w1_mid", "_w4_low"]
    assert list_models("vgg16*") == sorted(f"vgg16{kind}{name}" for name in widenings for kind in ("", "_deepmoe"))
    depths = ["resnet18", "resnet34", "resnet50", "resnet56"]
    assert list_models("resnet*") == [f"{name}{kind}" for name in depths for kind in ("", "_deepmoe")]
    with torch.device("meta"):
        residual = create_model("resnet18", num_classes=7, image_size=224, in_channels=1, width=0.5)
        vgg = create_model("vgg16_w1_mid", num_classes=7, image_size=32, in_channels=1, width=2.0)
    assert residual.get_submodule("body.0.0").weight.shape == (32, 1, 7, 7)
    assert vgg.get_submodule("body.conv5").weight.shape == (5980, 256, 3, 3)
    assert vgg.get_submodule("body.conv1").weight.shape == (128, 1, 3, 3)


def test_patterns_filter_names():
    assert set(list_models("*_pmoe")) == {name for name in list_models() if name.endswith("_pmoe")} != set()


def test_a_network_can_be_rebuilt_from_json():
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 64, "fidelity": "released"})
    again = ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    torch.manual_seed(0)
    first = spec.build().state_dict()
    torch.manual_seed(0)
    second = again.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg16_deepmoe_w1_mid", {"block": 8, "mode": "topk", "keep": 0.5, "in_channels": 1, "embedding_share": 0.05}),
        ("resnet50_deepmoe", {"bottleneck": "b", "image_size": 64, "bias": None}),
    ],
)
def test_gated_networks_can_be_rebuilt_with_all_options(name, options):
    spec = ModelSpec(name, {"num_classes": 3, "width": 0.05, **options})
    model = ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))).build()
    assert isinstance(model, DeepMoE)
    size, channels = options.get("image_size", 32), options.get("in_channels", 3)
    output = model.eval().forward_with_routing(torch.zeros(2, channels, size, size))
    assert output.logits.shape == output.embedding_logits.shape == (2, 3)
    assert len(model.gated) == {"vgg16_deepmoe_w1_mid": 13, "resnet50_deepmoe": 16}[name]
    assert {gate.mode for gate in model.gates.values()} == {options.get("mode", "relu")}
    assert {gate.bias is None for gate in model.gates.values()} == {"bias" in options}
    model.load_state_dict(spec.build().state_dict())


def test_without_weights_removes_pretrained():
    spec = ModelSpec("timm/resnet18", {"num_classes": 2, "pretrained": True})
    assert spec.without_weights() == ModelSpec("timm/resnet18", {"num_classes": 2})


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match="did you mean 'wrn10_4_pmoe'"):
        create_model("wrn10_pmoe", num_classes=2)
    with pytest.raises(TypeError, match="wrn10_1 has no option 'experts'; it takes in_channels, fidelity, keras_norm"):
        create_model("wrn10_1", num_classes=2, experts=4)
    with pytest.raises(TypeError, match="vgg16 has no option 'experts'; it takes image_size, in_channels, width"):
        create_model("vgg16", num_classes=2, experts=4)
    with pytest.raises(TypeError, match="wrn10_1 has no option 'width'"):
        create_model("wrn10_1", num_classes=2, width=2)
    with pytest.raises(TypeError, match="cifar_cnn has no option 'fidelity'; it takes head"):
        create_model("cifar_cnn", num_classes=2, fidelity="best")
    with pytest.raises(TypeError, match="vgg16_deepmoe has no option 'head'"):
        create_model("vgg16_deepmoe", num_classes=2, head="routed")
    with pytest.raises(ValueError, match="num_classes=-1; it must be 1 or more, or 0 for a network without classifier"):
        create_model("wrn10_1", num_classes=-1)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("wrn10_1", ModelSpec("wrn10_1")),
        ("timm/resnet18:pretrained", ModelSpec("timm/resnet18", {"pretrained": True})),
        ("timm/resnet18:pretrained=True", ModelSpec("timm/resnet18", {"pretrained": True})),
        ("timm/resnet18:pretrained=false", ModelSpec("timm/resnet18", {"pretrained": False})),
        (
            "wrn10_2_pmoe:experts=8:gate=one:bias=1e-1:name=null",
            ModelSpec("wrn10_2_pmoe", {"experts": 8, "gate": "one", "bias": 0.1, "name": "null"}),
        ),
        (
            "timm/resnet18:convert=layer4.1.conv2:experts=8:init=upcycle:pretrained",
            ModelSpec(
                "timm/resnet18",
                {"pretrained": True},
                ({"layer": ["layer4.1.conv2"], "experts": 8, "init": "upcycle"},),
            ),
        ),
        (
            "timm/x:convert=a+b.*:experts=8:convert=c:experts=2:head=routed:experts=4",
            ModelSpec(
                "timm/x",
                {"head": "routed", "experts": 4},
                ({"layer": ["a", "b.*"], "experts": 8}, {"layer": ["c"], "experts": 2}),
            ),
        ),
    ],
)
def test_a_spelling_is_read_as_name_options_and_conversions(text, spec):
    assert ModelSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrn10_1:", "has '' where option or option=value belongs"),
        ("wrn10_1:=3", "has '=3' where"),
        ("wrn10_1:convert:experts=3", "has convert without a layer; use convert=LAYER"),
        ("wrn10_1:convert=+", "has convert without a layer"),
        ("wrn10_1:convert=a:patch_size=2", r"convert=a without experts=.*\(after it: patches_per_expert, "),
        ("wrn10_1:convert=a:experts=2:experts=2", "the option 'experts' twice"),
        ("wrn10_1:fidelity=best:fidelity=best", "the option 'fidelity' twice"),
    ],
)
def test_a_spelling_that_cannot_be_read_says_why(text, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.parse(text)


def test_a_spelled_conversion_is_built_with_the_seed_it_is_given():
    spec = ModelSpec.parse("wrn10_1:convert=body.group3.0.conv2:experts=4:input_size=32")
    spec = replace(spec, arguments={"num_classes": 2})
    layers = [spec.with_seed(seed).build().get_submodule("body.group3.0.conv2") for seed in (3, 3, 4)]
    assert isinstance(layers[0], PatchMoE)
    assert torch.equal(layers[0].experts.weight, layers[1].experts.weight)
    assert not torch.equal(layers[0].experts.weight, layers[2].experts.weight)
    assert spec.with_seed(3).with_seed(4) == spec.with_seed(3)


def test_networks_without_classifier_need_no_number_of_classes():
    (first, *_) = create_model("wrn10_1", features_only=True)(torch.zeros(1, 3, 16, 16))
    assert first.shape[0] == 1
    with pytest.raises(TypeError, match="num_classes is missing; give it, or 0 for a network without classifier"):
        create_model("wrn10_1")


@pytest.mark.parametrize(
    ("option", "value"),
    [("input_size", [3, 32, 32]), ("seed", 7), ("pad", True), ("pad", False), ("gate", "one"), ("router", "a+b")],
)
def test_model_strings_are_read_as_they_are_written(option, value):
    conversion = {"layer": ["body.1"], "experts": 4, option: value}
    text = format_model_string("resnet18", {"width": 0.5, "head": None}, [{"kernel_size": None, **conversion}])
    assert parse_model_string(text) == ("resnet18", {"width": 0.5}, [conversion])


def test_an_image_shape_can_be_given_in_a_model_string():
    spec = ModelSpec.parse("resnet18:width=0.1:convert=body.2.first.0:experts=2:input_size=3+16+16")
    model = replace(spec, arguments={**spec.arguments, "num_classes": 2}).build()
    assert applied_conversions(model)[0]["input_size"] == [3, 16, 16]
