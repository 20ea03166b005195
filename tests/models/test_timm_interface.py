"""timm's interface on every registered network: features, heads, maps, checkpointing."""

import copy
import math
from functools import partial
from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from moesaic import ExpertChoice, TokenChoice, record_routing
from moesaic.layers.recording import RoutedLayer
from moesaic.models import (
    VGG16,
    FeatureMaps,
    HeadedNetwork,
    ImageClassifier,
    count_macs,
    create_model,
    deepmoe,
    list_models,
)
from moesaic.models.layer_groups import classifier_names
from moesaic.models.timm_registry import register_with_timm
from moesaic.models.wide_resnet import network

NAMES = list_models()
# one of each architecture, with every kind of routed layer
KINDS = ["cifar_cnn", "cifar_mobilenetv2", "resnet18", "resnet50", "resnet18_deepmoe", "vgg16", "vgg16_deepmoe"]
KINDS += ["wrn10_1", "wrn16_1", "wrn10_1_pmoe", "vit_tiny_patch4_32_moe", "vit_tiny_patch4_32_skip"]


def narrow(name: str, num_classes: int = 3, **options) -> nn.Module:
    small = {"width": 0.1} if name.startswith(("resnet", "vgg")) else {"depth": 3} if name.startswith("vit") else {}
    return create_model(name, num_classes=num_classes, **small, **options)


def images(name: str, batch: int = 2) -> torch.Tensor:
    side = 16 if name.startswith(("wrn", "cifar_mobilenet")) else 32
    return torch.randn(batch, 3, side, side)


def lively(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Moves running statistics away from 0 and 1, and gates away from the same value for all images."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gates" in name:
                weight.add_(torch.randn_like(weight))
        model.train()(x + 0.1)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_forward_is_the_head_of_the_features(name):
    x = images(name)
    model = narrow(name)
    model = (model if "28" in name or "16_8" in name else lively(model, x)).eval()
    features = model.forward_features(x)
    assert features.shape[:2] == (2, model.num_features)
    vectors = model.forward_head(features, pre_logits=True)
    assert vectors.shape == (2, model.head_hidden_size)
    logits = model(x)
    assert torch.equal(model.forward_head(features), logits)
    assert torch.equal(model.get_classifier()(vectors), logits)
    last, maps = model.forward_intermediates(x)
    assert torch.equal(last, features)
    assert torch.equal(maps[-1], features)
    assert len(maps) == len(model.feature_info)
    for map_, about in zip(maps, model.feature_info, strict=True):
        assert map_.shape[1] == about["num_chs"]
        if name != "cifar_cnn":  # its convolutions have no padding
            assert map_.shape[2] == x.shape[2] / about["reduction"]
        model.get_submodule(about["module"])
    assert (model.num_classes, classifier_names(model)) == (3, ("backbone.head" if "deepmoe" in name else "head",))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16", "vgg16_deepmoe"])
@torch.no_grad()
def test_large_images_have_their_own_reductions_and_pooling(name):
    model = narrow(name, image_size=128).eval()
    x = torch.randn(1, 3, 128, 128)
    _, maps = model.forward_intermediates(x)
    assert [128 // each.shape[2] for each in maps] == [about["reduction"] for about in model.feature_info]
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    assert model.num_features == features.shape[1]
    assert (model.head_hidden_size == 4096) == name.startswith("vgg16")


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_classifier_is_reset_and_taken_away(name):
    model, x = narrow(name).eval(), images(name)
    head = model.get_classifier()
    vectors = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(5)
    assert model.get_classifier() is not head
    assert model(x).shape == (2, 5)
    assert model.num_classes == 5
    assert torch.equal(model.forward_head(model.forward_features(x), pre_logits=True), vectors), "the rest is as it was"
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert torch.equal(model(x), vectors)
    torch.manual_seed(1)
    first = narrow(name, num_classes=0).eval()
    assert first.num_classes == 0
    assert first(x).shape == vectors.shape


def test_costs_of_a_gated_network_follow_its_classifiers():
    model = narrow("vgg16_deepmoe", num_classes=3)
    model.reset_classifier(7)
    expected = create_model("vgg16_deepmoe", num_classes=7, width=0.1)
    output = model.forward_with_routing(torch.zeros(1, 3, 32, 32))
    assert output.embedding_logits.shape == (1, 7)
    dense = count_macs(create_model("vgg16", num_classes=7, width=0.1), (3, 32, 32)).macs
    assert model.dense_macs == expected.dense_macs == dense
    assert model.gate_macs - expected.gate_macs == model.fixed_macs - expected.fixed_macs
    assert int(model.macs(output.routing)) == count_macs(model, (3, 32, 32)).macs


@torch.no_grad()
def test_the_pooling_can_be_changed():
    model, x = narrow("wrn10_1_pmoe").eval(), images("wrn10_1_pmoe")
    features = model.forward_features(x)
    model.reset_classifier(4, global_pool="max")
    torch.testing.assert_close(model(x), model.head(features.amax((2, 3))))
    model.reset_classifier(0, global_pool="")
    assert torch.equal(model(x), features)
    model.reset_classifier(2, global_pool="avg")
    torch.testing.assert_close(model(x), model.head(features.mean((2, 3))))
    with pytest.raises(
        ValueError, match=r"global_pool='' leaves num_classes=2 without vectors to read; use num_classes"
    ):
        model.reset_classifier(2, global_pool="")
    with pytest.raises(ValueError, match="global_pool='mean' is unknown; use 'avg', 'max' or ''"):
        model.reset_classifier(2, global_pool="mean")
    with pytest.raises(ValueError, match="SmallCNN: global_pool='max', but its classifier reads 4608 values"):
        narrow("cifar_cnn").reset_classifier(2, global_pool="max")


def steps(model: nn.Module, batches: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list]:
    """Gradients of the last step, all buffers, and the routings that hooks received, after steps in training mode."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        optimizer.zero_grad()
        torch.manual_seed(3)  # of dropout
        with record_routing(model, keep="all") if has_routing(model) else torch.enable_grad() as records:
            loss = F.cross_entropy(model(x), torch.arange(len(x)) % 3)
            loss.backward()
        optimizer.step()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    counted = [each.batch for each in records.values()] if isinstance(records, dict) else []
    return gradients, dict(model.named_buffers()), counted


def has_routing(model: nn.Module) -> bool:
    return any(isinstance(module, RoutedLayer) for module in model.modules())


@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_gradients_and_statistics_equal_plain_ones(name):
    x = images(name, 4)
    model = lively(narrow(name), x).double()
    again = copy.deepcopy(model)
    again.set_grad_checkpointing()
    batches = [images(name, 4).double() for _ in range(2)]
    (plain, buffers, calls), (computed_again, others, other_calls) = steps(model, batches), steps(again, batches)
    assert plain
    for first, second in zip(plain, computed_again, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)
    for key, buffer in buffers.items():
        torch.testing.assert_close(others[key], buffer, rtol=1e-10, atol=1e-12, msg=key)
    assert calls == other_calls, "hooks are called once a step"
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batches[0]), model.eval()(batches[0]))


def test_a_large_vgg_with_dropout_is_checkpointed():
    model = narrow("vgg16", image_size=128)
    again = copy.deepcopy(model)
    again.set_grad_checkpointing()
    batches = [torch.randn(2, 3, 128, 128)]
    for first, second in zip(steps(model, batches)[0], steps(again, batches)[0], strict=True):
        torch.testing.assert_close(first, second)


def test_noise_of_a_routers_own_generator_is_the_same_in_the_second_pass():
    def made(checkpoint: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        noisy = partial(TokenChoice, noise="gumbel", generator=torch.Generator().manual_seed(2))
        model = create_model("wrn10_1_pmoe", num_classes=3, router=noisy)
        model.set_grad_checkpointing(checkpoint)
        gradients, _, _ = steps(model, [torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))] * 2)
        return gradients

    for first, second in zip(made(False), made(True), strict=True):
        torch.testing.assert_close(first, second)


def test_checkpointing_stores_less_and_runs_blocks_twice():
    model = narrow("wrn16_1").train()
    saved: list[int] = []
    runs: list[int] = []
    model.body.group2[1].register_forward_pre_hook(lambda *given: runs.append(1))

    def bytes_saved() -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            model(torch.randn(4, 3, 16, 16)).sum().backward()
        return sum(saved)

    plain = bytes_saved()
    assert len(runs) == 1
    model.set_grad_checkpointing()
    assert bytes_saved() < plain / 2
    assert len(runs) == 3
    with torch.no_grad():
        model(torch.randn(4, 3, 16, 16))
    assert len(runs) == 4, "without gradients nothing runs twice"


def test_a_compiled_network_can_be_checkpointed():
    model, x = narrow("wrn10_1_pmoe").eval(), torch.randn(2, 3, 16, 16)
    expected = model(x)
    expected.sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    torch._dynamo.reset()
    logits = torch.compile(model, backend="aot_eager")(x)
    logits.sum().backward()
    torch.testing.assert_close(logits, expected)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_features_only_returns_the_maps_of_the_network(name):
    torch.manual_seed(0)
    model = narrow(name).eval()
    x = images(name)
    _, maps = model.forward_intermediates(x)
    torch.manual_seed(0)
    backbone = narrow(name, features_only=True).eval()
    backbone.model.load_state_dict(model.state_dict(), strict=False)
    found = backbone(x)
    assert isinstance(found, list)
    assert all(torch.equal(*pair) for pair in zip(found, maps, strict=True))
    assert backbone.feature_info.channels() == [each.shape[1] for each in maps]
    assert backbone.feature_info.reduction() == [about["reduction"] for about in model.feature_info]
    some = narrow(name, features_only=True, out_indices=(2, -3)).eval()
    some.model.load_state_dict(model.state_dict(), strict=False)
    count = len(maps)
    assert some.feature_info.out_indices == (2, count - 3)
    assert torch.equal(some(x)[0], maps[2])
    assert torch.equal(some(x)[1], maps[count - 3])
    assert some.feature_info.channels() == [maps[2].shape[1], maps[count - 3].shape[1]]
    assert some.feature_info.get_dicts(["reduction"])[0]["reduction"] == some.feature_info[2]["reduction"]


def test_features_only_has_no_parameter_behind_its_last_map():
    backbone = narrow("wrn10_1", features_only=True, out_indices=(1, 2))
    maps = backbone(torch.randn(2, 3, 16, 16))
    sum(each.sum() for each in maps).backward()
    assert all(weight.grad is not None for weight in backbone.parameters())
    assert {name.split(".")[2] for name, _ in backbone.named_parameters()} == {"stem", "group1", "group2"}
    last = narrow("wrn10_1", features_only=True, out_indices=2)
    assert last.feature_info.module_name() == ["body.group2", "body.relu"]
    last.set_grad_checkpointing()
    assert [tuple(each.shape[1:]) for each in last(torch.randn(2, 3, 16, 16))] == [(32, 8, 8), (64, 4, 4)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"out_indices": (4,), "features_only": True}, ValueError, r"out_indices=\(4,\); the network has 4 maps"),
        ({"out_indices": 5, "features_only": True}, ValueError, "out_indices=5; .* 4 maps: use the last 1 to 4"),
        ({"out_indices": (1,)}, ValueError, r"out_indices=\(1,\) needs features_only=True"),
        ({"features_only": True, "head": "routed"}, ValueError, "features_only=True has no head, got head='routed'"),
    ],
)  # fmt: skip
def test_maps_that_a_network_does_not_have_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        create_model("wrn10_1", num_classes=0, **options)


def test_networks_that_do_not_describe_their_maps_are_refused():
    with pytest.raises(TypeError, match="FeatureMaps: Linear does not describe its maps in feature_info"):
        FeatureMaps(nn.Linear(2, 2))
    plain = ImageClassifier(nn.Flatten(), 12, 2)
    assert plain.forward_features(torch.zeros(1, 3, 2, 2)).shape == (1, 12)
    assert plain(torch.zeros(1, 3, 2, 2)).shape == (1, 2)
    with pytest.raises(TypeError, match="has no feature_info, so its maps are unknown; give an"):
        plain.set_grad_checkpointing()


def test_stacked_norms_and_biases_have_no_weight_decay():
    printed = create_model("wrn10_1_pmoe", num_classes=2, fidelity="print")
    assert printed.no_weight_decay() == {"body.group3.0.moe.experts.bias"}
    for name in ("wrn10_1_pmoe", "resnet18_deepmoe"):
        model = narrow(name)
        spared = model.no_weight_decay()
        parameters = dict(model.named_parameters())
        assert spared <= parameters.keys()
        norms = [key for key in parameters if "norm" in key and parameters[key].ndim > 1]
        assert set(norms) <= spared
    assert create_model("wrn10_1", num_classes=2).no_weight_decay() == set()


@pytest.mark.parametrize(
    "name", ["wrn10_1", "wrn10_1_pmoe", "resnet18", "vgg16", "cifar_cnn", "vit_tiny_patch4_32_moe"]
)
def test_every_network_without_channel_gates_takes_a_head_of_ours(name, tmp_path):
    side = 64 if name == "vgg16" else 32  # a map of more than one position
    source, x = narrow(name, num_classes=5).eval(), torch.randn(2, 3, side, side)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = narrow(
        name, head="routed", experts=2, patches_per_expert=2, weights=tmp_path / "weights.safetensors"
    ).eval()
    assert isinstance(model, HeadedNetwork)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), source.forward_features(x))
        assert model(x).shape == (2, 3)
    assert len(model.head.moe.experts) == 2
    assert classifier_names(model) == ("head",)
    assert model.num_features == source.num_features
    model.reset_classifier(4)
    assert model(x).shape == (2, 4)
    model.set_grad_checkpointing()
    model.train()(torch.cat([x, -x])).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    assert model.no_weight_decay() == {f"backbone.{each}" for each in source.no_weight_decay()}
    assert model.feature_info[-1]["module"].startswith("backbone.norm" if "vit" in name else "backbone.body.")


def test_a_head_of_a_large_vgg_reads_its_last_map_without_hidden_layers():
    model = create_model("vgg16", num_classes=3, width=0.1, image_size=128, head="mean")
    assert not any("hidden" in key for key, _ in model.named_parameters())
    assert model(torch.zeros(1, 3, 128, 128)).shape == (1, 3)


def test_classifiers_cast_and_move_with_the_network():
    model = VGG16(2, width=0.1).double().eval()
    model.reset_classifier(3)
    assert model.head.weight.dtype == torch.float64
    assert not model.head.training


def test_a_gated_foreign_backbone_says_what_it_cannot():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)
    model = deepmoe(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)), num_classes=2)
    assert model.get_classifier() is model.backbone[5]
    with pytest.raises(TypeError, match="its backbone is a Sequential, whose maps and classifier it does not know"):
        model.forward_features(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["wrn10_1_pmoe", "vgg16_deepmoe", "cifar_mobilenetv2", "vit_tiny_patch4_32_moe"])
@torch.no_grad()
def test_timm_creates_backbones_and_reads_our_configuration(timm, name):
    register_with_timm()
    backbone = timm.create_model(name, features_only=True, out_indices=(1, 2), img_size=32)
    maps = backbone(torch.zeros(1, 3, 32, 32))
    assert [each.shape[1] for each in maps] == backbone.feature_info.channels()
    assert [32 // each.shape[2] for each in maps] == backbone.feature_info.reduction()
    model = timm.create_model(name, num_classes=0, global_pool="", in_chans=3).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), model.forward_features(x))
    model = timm.create_model(name, num_classes=6)
    model.get_submodule(model.default_cfg["first_conv"])
    assert model.pretrained_cfg["classifier"] == (("backbone.head",) if "deepmoe" in name else ("head",))
    assert math.prod(model.get_classifier().weight.shape) == 6 * model.head_hidden_size
    spared = import_module("timm.optim").param_groups_weight_decay
    groups = spared(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(each) for each in groups[1]["params"]}
    assert all(
        id(each) not in decayed for key, each in model.named_parameters() if key.endswith(("norm.weight", "bias"))
    )


def test_our_features_only_spelling_works_for_networks_of_timm(timm, tmp_path):
    full = timm.create_model("test_resnet", num_classes=4).eval()
    save_file(full.state_dict(), tmp_path / "weights.safetensors")
    backbone = create_model(
        "timm/test_resnet",
        num_classes=0,
        features_only=True,
        out_indices=(-1,),
        weights=tmp_path / "weights.safetensors",
    ).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        (last,) = backbone(x)
        assert torch.equal(last, full.forward_features(x))


def test_the_pooled_fast_path_of_a_wide_network_is_left_to_forward(monkeypatch):
    called = []
    pooled = network.pooled_head
    monkeypatch.setattr(network, "kernels_available", lambda x: True)
    monkeypatch.setattr(network, "pooled_head", lambda *given: called.append(1) or pooled(*given))
    model, x = narrow("wrn10_1_pmoe").eval(), torch.randn(2, 3, 16, 16)
    assert isinstance(model.moe.router, ExpertChoice)
    with torch.no_grad():
        logits = model(x)
        assert called == [1]
        torch.testing.assert_close(model.forward_head(model.forward_features(x)), logits)
    assert called == [1]


def test_statistics_move_once_a_step_where_those_of_timm_move_twice(timm):
    def moved(model: nn.Module) -> int:
        model.train().set_grad_checkpointing()
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        return max(int(each) for name, each in model.named_buffers() if name.endswith("num_batches_tracked"))

    assert moved(timm.create_model("test_resnet", num_classes=2)) == 2
    assert moved(narrow("resnet18")) == 1
