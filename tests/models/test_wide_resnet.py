"""Wide residual networks, dense and routed."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.experts import ConvExperts
from moesaic.models.wide_resnet.network import WideResNet, WideResNetPMoE

FIDELITIES = ("best", "print", "released")


def parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("size", [16, 28, 32, 60, 64])
@pytest.mark.parametrize("kind", [WideResNet, WideResNetPMoE])
def test_images_become_scores_and_every_weight_gets_a_gradient(kind, size, fidelity):
    torch.manual_seed(0)
    options = {"image_size": size} if kind is WideResNetPMoE else {}
    model = kind(10, 1, 3, fidelity=fidelity, **options)
    scores = model(torch.randn(4, 3, size, size))
    assert scores.shape == (4, 3)
    F.cross_entropy(scores, torch.tensor([0, 1, 2, 0])).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0 or "bias" in name, name  # a bias in front of BatchNorm has none


def test_the_released_network_is_built_as_in_the_authors_code():
    """WRN-10-10 for CelebA, counted layer by layer as Keras counts trainable weights."""
    conv = lambda before, after, kernel: before * after * kernel**2 + after  # noqa: E731
    norm = lambda channels: 2 * channels  # noqa: E731
    block = lambda before, after: (  # noqa: E731
        norm(before) + conv(before, after, 3) + norm(after) + conv(after, after, 3) + conv(before, after, 1)
    )
    stem, head = conv(3, 16, 3), norm(640) + 640 * 4 + 4
    dense = stem + block(16, 160) + block(160, 320) + block(320, 640) + head
    assert parameters(WideResNet(10, 10, 4, fidelity="released")) == dense
    gates, experts = 8 * 640 * 16, 8 * (norm(640) + conv(640, 80, 3))
    routed = stem + block(16, 160) + block(160, 320) + norm(320) + conv(320, 640, 3) + gates + experts + head
    assert parameters(WideResNetPMoE(10, 10, 4, image_size=64, fidelity="released")) == routed
    gates, experts = 4 * 640, 4 * (norm(640) + conv(640, 160, 1))
    routed = stem + block(16, 160) + block(160, 320) + norm(320) + conv(320, 640, 3) + gates + experts + head
    assert parameters(WideResNetPMoE(10, 10, 4, image_size=32, fidelity="released")) == routed


@pytest.mark.parametrize("size", [32, 64])
def test_as_printed_the_layer_has_as_many_parameters_as_the_convolution_it_replaces(size):
    routed = WideResNetPMoE(10, 2, 4, image_size=size, fidelity="print")
    dense = WideResNet(10, 2, 4, fidelity="print")
    moe = routed.moe
    assert moe.experts.weight.numel() == dense.get_submodule("body.group3.0.conv2").weight.numel()
    extra = moe.router.weight.numel() + moe.experts.bias.numel()
    assert parameters(routed) - parameters(dense) == extra


@pytest.mark.parametrize(("size", "patches", "dim"), [(32, 64, 128), (64, 16, 128 * 16)])
def test_as_printed_routers_start_as_in_equation_7(size, patches, dim):
    weight = WideResNetPMoE(10, 2, 4, image_size=size, fidelity="print").moe.router.weight
    expected = 1 / (patches**2 * math.log(patches) * math.sqrt(dim))
    assert float(weight.detach().std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * weight.numel()))
    own = WideResNetPMoE(10, 2, 4, image_size=size, fidelity="print", router="token-choice").moe.router.weight
    assert float(own.detach().std()) > 10 * expected


def test_a_map_of_one_patch_has_a_finite_router():
    weight = WideResNetPMoE(10, 1, 2, image_size=4, fidelity="print", experts=1).moe.router.weight
    assert 0 < float(weight.detach().abs().max()) < 1


def test_the_papers_shapes():
    for size, shape in ((64, (8, 2, 4, 3)), (32, (4, 16, 1, 1))):
        moe = WideResNetPMoE(10, 10, 4, image_size=size, fidelity="released").moe
        assert (len(moe.experts), moe.patches_per_expert, moe.patch_size, moe.kernel_size) == shape
        assert (moe.gate, moe.gate_on, moe.expert_norm) == ("softmax_all", "input", True)
        assert moe.in_channels == moe.out_channels == 640


def test_kerass_batchnorm_is_an_option():
    def settings(model: nn.Module) -> set[tuple[float, float]]:
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        own = [model.moe.experts.norm] if isinstance(model, WideResNetPMoE) else []
        return {(norm.momentum, norm.eps) for norm in [*norms, *own]}

    for kind in (WideResNet, WideResNetPMoE):
        assert settings(kind(10, 1, 2, fidelity="released")) == {(0.01, 1e-3)}
        assert settings(kind(10, 1, 2, fidelity="released", keras_norm=False)) == {(0.1, 1e-5)}
        assert settings(kind(10, 1, 2)) == {(0.1, 1e-5)}
        assert settings(kind(10, 1, 2, keras_norm=True)) == {(0.01, 1e-3)}


def test_a_residual_block_adds_its_input():
    for residual in (True, False):
        model = WideResNetPMoE(10, 1, 2, residual=residual)
        block = model.get_submodule("body.group3.0")
        x = torch.randn(2, 32, 16, 16)
        with torch.no_grad():
            model.moe.experts.weight.zero_()
        assert bool(block(x).abs().sum() > 0) is residual


def test_deeper_networks_have_more_blocks_and_route_in_the_last():
    model = WideResNetPMoE(22, 1, 2)
    assert [len(model.get_submodule(f"body.group{group}")) for group in (1, 2, 3)] == [3, 3, 3]
    assert model.get_submodule("body.group3.2.moe") is model.moe
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 2)


def test_the_same_seed_gives_the_same_weights():
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([weight.flatten() for weight in WideResNetPMoE(10, 1, 2).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def biased(model: nn.Module) -> nn.Module:
    """With a bias in every convolution but the one in front of experts with norms."""
    model = copy.deepcopy(model)
    front = next((block.conv1 for block in model.modules() if getattr(block, "norm2", block) is None), None)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None and module is not front:
            module.bias = nn.Parameter(torch.randn_like(module.weight[:, 0, 0, 0]))
        if isinstance(module, ConvExperts) and module.bias is None:
            module.bias = nn.Parameter(torch.randn_like(module.weight[:, :, 0, 0, 0]))
    return model


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"image_size": 64},
        {"gate_on": "output"},
        {"expert_norm": False},
        {"residual": True},
    ],
    ids=["dense", "1×1 experts", "3×3 experts", "gate on the output", "one norm", "residual"],
)
def test_at_their_best_networks_have_no_bias_that_batchnorm_cancels(options):
    torch.manual_seed(0)
    model = WideResNet(16, 1, 3) if options is None else WideResNetPMoE(16, 1, 3, **options)
    model = model.double()
    other = biased(model)
    assert parameters(other) > parameters(model)
    size = (options or {}).get("image_size", 32)
    x, label = torch.randn(4, 3, size, size, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for each in (model, other):
        F.cross_entropy(each(x), label).backward()
    assert torch.allclose(model(x), other(x), rtol=0, atol=1e-10)
    others = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, others.pop(name).grad, rtol=0, atol=1e-10), name
    for name, bias in others.items():
        assert bias.grad.abs().max() < 1e-10, name


def test_at_their_best_networks_have_a_bias_only_where_gates_take_part_in_it():
    for options in ({}, {"expert_norm": False}, {"gate_on": "output"}):
        body = WideResNetPMoE(10, 1, 3, **options).body
        biases = [
            name for name, _ in body.named_parameters() if name.endswith(("conv1.bias", "conv2.bias", "experts.bias"))
        ]
        assert biases == (["group3.0.moe.experts.bias"] if "gate_on" in options else [])


def test_a_seed_gives_the_best_network_the_weights_of_the_released_one():
    for kind in (WideResNet, WideResNetPMoE):
        torch.manual_seed(3)
        best = kind(10, 1, 2)
        torch.manual_seed(3)
        released = kind(10, 1, 2, fidelity="released").state_dict()
        for name, weight in best.state_dict().items():
            assert torch.equal(weight, released[name]), name


def test_bad_shapes_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"depth=12; it must be 6n \+ 4, such as 10"):
        WideResNet(12, 1, 2)
    with pytest.raises(
        ValueError, match=r"a 15×15 map, which is not divisible into 4×4 patches; use patch_size=3, pad=True, or images"
    ):
        WideResNetPMoE(10, 1, 2, image_size=60, patch_size=4)
    with pytest.raises(ValueError, match="did you mean 'released'"):
        WideResNet(10, 1, 2, fidelity="release")
    with pytest.raises(ValueError, match="cannot be shared by experts=7"):
        WideResNetPMoE(10, 1, 2, experts=7)


def test_maps_are_halved_at_the_start_of_the_second_and_third_group():
    model, sizes = WideResNet(16, 1, 2), {}
    for name in ("stem", "group1", "group2", "group3"):
        model.body.get_submodule(name).register_forward_hook(
            lambda _, __, y, name=name: sizes.__setitem__(name, tuple(y.shape[1:]))
        )
    model(torch.zeros(1, 3, 32, 32))
    assert sizes == {"stem": (16, 32, 32), "group1": (16, 32, 32), "group2": (32, 16, 16), "group3": (64, 8, 8)}
    strides = [block.conv1.stride[0] for group in (1, 2, 3) for block in model.body.get_submodule(f"group{group}")]
    assert strides == [1, 1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("size", "experts", "patches", "patch", "kernel"),
    [(16, 4, 4, 1, 1), (32, 4, 16, 1, 1), (36, 8, 1, 3, 3), (64, 8, 2, 4, 3), (100, 8, 3, 5, 3), (4, 4, 1, 1, 1)],
)
def test_patches_follow_the_size_of_the_map(size, experts, patches, patch, kernel):
    moe = WideResNetPMoE(10, 1, 2, image_size=size).moe
    assert (len(moe.experts), moe.patches_per_expert, moe.patch_size, moe.kernel_size) == (
        experts, patches, patch, kernel,
    )  # fmt: skip
    assert WideResNetPMoE(10, 1, 2, image_size=size, fidelity="print").moe.kernel_size == 3


def test_a_gate_on_the_input_leaves_experts_without_a_bias():
    experts = WideResNetPMoE(10, 1, 2, gate_on="input").moe.experts
    assert isinstance(experts, ConvExperts)
    assert (experts.bias, experts.has_bias) == (None, False)
    assert WideResNetPMoE(10, 1, 2, gate_on="output").moe.experts.bias is not None


@pytest.mark.parametrize(("depth", "near"), [(4, 10), (9, 10), (11, 10), (15, 16), (-3, 10)])
def test_a_depth_that_no_blocks_give_is_refused_with_the_nearest(depth, near):
    with pytest.raises(ValueError, match=f"depth={depth}; it must be 6n \\+ 4, such as {near}$"):
        WideResNet(depth, 1, 2)
