import copy
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call, stack_module_state, vmap

import moesaic
from moesaic.experts import ConvExperts, MLPExperts
from moesaic.ops.weight_layout import is_taps_first

LAYER = {"experts": 4, "patches_per_expert": 2, "patch_size": 2}


def test_weights_are_stacked_under_their_checkpoint_names():
    layer = moesaic.PatchMoE(6, 8, experts=4, patches_per_expert=2, patch_size=2, kernel_size=3, expert_norm=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "router.weight": (4, 6, 2, 2),
        "experts.weight": (4, 2, 6, 3, 3),
        "experts.bias": (4, 2),
        "experts.norm.weight": (4, 6),
        "experts.norm.bias": (4, 6),
        "experts.norm.running_mean": (4, 6),
        "experts.norm.running_var": (4, 6),
    }


def test_arguments_are_readable_as_attributes():
    options = {
        "patches_per_expert": 3,
        "patch_size": 2,
        "kernel_size": 5,
        "gate": "softmax_all",
        "gate_on": "input",
        "context": "patch",
        "expert_norm": True,
        "combine": "sum",
        "bias": False,
    }
    layer = moesaic.PatchMoE(6, 8, experts=4, **options)
    assert {name: getattr(layer, name) for name in options} == options
    assert (layer.in_channels, layer.out_channels, len(layer.experts)) == (6, 8, 4)
    with pytest.raises(AttributeError):
        layer.gate = "one"  # it is the router's to change


def test_under_concat_each_expert_owns_its_channels_and_writes_only_on_its_patches():
    layer = moesaic.PatchMoE(3, 8, **LAYER)
    x = torch.randn(1, 3, 6, 6)
    mask = layer.route(x).mask[0]
    y = layer(x)[0].view(4, 2, 3, 2, 3, 2)
    touched = (y != 0).any(1).any(2).any(-1).flatten(1)
    assert torch.equal(touched.T, mask)


def test_under_sum_the_experts_add_up():
    layer = moesaic.PatchMoE(3, 5, **LAYER, combine="sum", dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    whole = layer(x)
    parts = torch.zeros_like(whole)
    for e in range(4):
        alone = copy.deepcopy(layer)
        with torch.no_grad():
            for other in set(range(4)) - {e}:
                alone.experts.weight[other] = 0
                alone.experts.bias[other] = 0
        parts += alone(x)
    torch.testing.assert_close(whole, parts)


def test_context_map_sees_a_selected_neighbour_and_context_patch_does_not():
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    for context, sees in (("map", True), ("patch", False)):
        layer = moesaic.PatchMoE(
            2, 2, experts=1, patches_per_expert=4, patch_size=2, kernel_size=3, gate="one", context=context
        )
        (gradient,) = torch.autograd.grad(layer(x)[0, :, 1, 1].sum(), x)
        assert bool(gradient[0, :, 2, 2].abs().sum() > 0) is sees


def test_a_batch_of_zero_works_forward_and_backward_and_leaves_statistics_alone():
    layer = moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3, expert_norm=True)
    before = copy.deepcopy(layer.state_dict())
    y = layer(torch.randn(0, 3, 6, 6))
    y.sum().backward()
    assert y.shape == (0, 8, 6, 6)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("router", [moesaic.TokenChoice(3, 4, 2, 2), moesaic.SoftRouter(3, 4, 2, 2)])
def test_another_router_takes_the_place_of_expert_choice(router):
    layer = moesaic.PatchMoE(3, 8, experts=4, router=router)
    assert layer.patch_size == 2
    layer(torch.randn(2, 3, 6, 6)).sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_mlp_experts_take_the_place_of_convolutions():
    layer = moesaic.PatchMoE(3, 8, **LAYER | {"experts": MLPExperts(4, 3, 7, 2)})
    x = torch.randn(2, 3, 6, 6)
    routing, y = layer.route(x), layer(x)
    e, n = 1, int(routing.index[0, 1, 0])
    row, column = 2 * (n // 3), 2 * (n % 3)
    expert = layer.experts
    pixel = x[0, :, row, column]
    hidden = torch.nn.functional.gelu(expert.weight_in[e] @ pixel + expert.bias_in[e])
    expected = routing.gate[0, e, 0] * (expert.weight_out[e] @ hidden + expert.bias_out[e])
    torch.testing.assert_close(y[0, 2 * e : 2 * e + 2, row, column], expected)


def test_a_model_moves_to_channels_last_and_back_with_its_numbers():
    layer = moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3)
    before = layer.experts.weight.clone()
    model = torch.nn.Sequential(layer).to(memory_format=torch.channels_last)
    assert layer.experts.weight.stride(2) == 1
    assert torch.equal(model[0].experts.weight, before)
    model.to(memory_format=torch.contiguous_format)
    assert layer.experts.weight.is_contiguous()


def test_weights_stored_taps_first_stay_so_and_are_not_replaced(monkeypatch):
    monkeypatch.setattr("moesaic.experts.conv_experts._on_gpu", lambda tensor: True)
    layer = moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3)
    before, x = copy.deepcopy(layer), torch.randn(2, 3, 6, 6)
    model = torch.nn.Sequential(layer).to(memory_format=torch.channels_last)
    weight = layer.experts.weight
    assert is_taps_first(weight)
    assert torch.equal(weight, before.experts.weight)
    torch.testing.assert_close(model(x), before(x))
    place = weight.data_ptr()
    model.to("cpu", torch.float32, memory_format=torch.channels_last)
    assert weight.data_ptr() == place
    model.double()
    assert is_taps_first(weight)
    assert torch.equal(weight, before.experts.weight.double())
    model.to(memory_format=torch.contiguous_format)
    assert weight.is_contiguous()
    assert torch.equal(weight, before.experts.weight.double())


@pytest.mark.parametrize("options", [{}, {"gate": "softmax_all", "gate_on": "input", "expert_norm": True}])
def test_an_ensemble_of_layers_runs_at_once_under_vmap(options):
    layers = [moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3, **options).eval() for _ in range(3)]
    x = torch.randn(2, 3, 6, 6)
    weights, buffers = stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    together = vmap(lambda w, b: functional_call(skeleton, (w, b), (x,)))(weights, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


def test_gradients_of_gradients_are_right():
    layer = moesaic.PatchMoE(2, 4, experts=2, patches_per_expert=2, patch_size=2, kernel_size=3, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_weights_survive_safetensors(tmp_path):
    layer = moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3, expert_norm=True)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = moesaic.PatchMoE(3, 8, **LAYER, kernel_size=3, expert_norm=True)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(other(x), layer(x))


def test_layers_can_be_built_on_a_device_and_in_a_dtype():
    layer = moesaic.PatchMoE(3, 8, **LAYER, expert_norm=True, device="meta", dtype=torch.bfloat16)
    assert {(t.device.type, t.dtype) for t in layer.state_dict().values()} == {("meta", torch.bfloat16)}
    assert layer(torch.empty(2, 3, 6, 6, device="meta", dtype=torch.bfloat16)).shape == (2, 8, 6, 6)


def test_initialisation_repeats_with_its_seed():
    def drawn(seed: int) -> torch.Tensor:
        experts = ConvExperts(2, 3, 4, 3)
        experts.reset_parameters(torch.Generator().manual_seed(seed))
        return experts.weight

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


SOFT = moesaic.SoftRouter(3, 4, 1, 2)
PICKS_2, PICKS_3 = moesaic.ExpertChoice(3, 4, 2, 2), moesaic.ExpertChoice(3, 4, 3, 2)
MLP = MLPExperts(4, 3, 5, 2)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            ({"experts": 3}, ValueError, "out_channels=8 cannot be shared by experts=3 under combine='concat'"),
            ({"experts": 3}, ValueError, "use experts=2 or 4, out_channels=6 or 9, or combine='sum'"),
            ({"experts": 9}, ValueError, "use experts=4 or 8, out_channels=9, or"),
            ({"experts": 0}, ValueError, "PatchMoE: experts=0; it must be at least 1"),
            ({"experts": 2.0}, TypeError, "PatchMoE: experts=2.0 is a float; it must be a whole number"),
            ({"experts": MLPExperts(4, 5, 7, 2)}, ValueError, "experts map 5 to 2 channels each, but in_channels=3"),
            ({"patches_per_expert": None}, TypeError, "patches_per_expert is missing"),
            ({"patches_per_expert": 0}, ValueError, "patches_per_expert=0; it must be at least 1"),
            ({"kernel_size": 4}, ValueError, "kernel_size=4 has no centre pixel; use an odd size, 3 or 5"),
            (
                {"gate": "two"},
                ValueError,
                "gate='two' is unknown; use 'softmax_selected', 'softmax_all', ",
            ),
            ({"gate_on": "outputs"}, ValueError, "gate_on='outputs' is unknown; use 'output' or 'input'"),
            ({"context": "image"}, ValueError, "context='image' is unknown; use 'map' or 'patch'"),
            ({"combine": "cat"}, ValueError, "combine='cat' is unknown; use 'concat' or 'sum'"),
            (
                {"router": SOFT},
                ValueError,
                "patches_per_expert=2, but its router has none; leave patches_per_expert out",
            ),
            (
                {"router": "top1"},
                TypeError,
                "router='top1' is a str; give a router object such as moesaic.TokenChoice(3,",
            ),
            ({"router": PICKS_3}, ValueError, "patches_per_expert=2, but its router has patches_per_expert=3; leave"),
            ({"router": PICKS_2, "patch_size": 4}, ValueError, "patch_size=4, but its router has patch_size=2; leave"),
            ({"router": PICKS_2, "gate": "one"}, ValueError, "gate='one', but its router has gate='softmax_selected'"),
            (
                {"experts": MLP, "kernel_size": 3},
                ValueError,
                "kernel_size=3, but its experts have kernel_size=1; leave",
            ),
            (
                {"experts": MLP, "expert_norm": True},
                ValueError,
                "expert_norm=True, but its experts have expert_norm=Fal",
            ),
            ({"experts": MLP, "bias": False}, ValueError, "bias=False, but its experts have bias=True; leave bias out"),
        ],
    )
    def test_an_impossible_layer_is_refused_when_it_is_built(self, options, error, says):
        with pytest.raises(error, match=re.escape(says)):
            moesaic.PatchMoE(3, 8, **LAYER | options)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (
                {"kernel_size": 3},
                "context='map' has no meaning under SoftRouter: slots have no neighbours; use 'patch'",
            ),
            ({"expert_norm": True}, "expert_norm=True has no meaning under SoftRouter"),
            ({"gate_on": "input"}, "gate_on='input' has no meaning under SoftRouter"),
        ],
    )
    def test_what_has_no_meaning_for_mixtures_is_refused(self, options, says):
        with pytest.raises(ValueError, match=re.escape(says)):
            moesaic.PatchMoE(3, 8, experts=4, router=SOFT, **options)

    @pytest.mark.parametrize(
        ("x", "error", "says"),
        [
            (torch.randn(3, 6, 6), ValueError, "takes maps (B, C, H, W), got 3 axes (3, 6, 6); give a single image"),
            (torch.randn(1, 6, 6, 3), ValueError, "in_channels=3, got a map of 6 channels (1, 6, 6, 3); axes are"),
            (torch.ones(1, 3, 6, 6).byte(), TypeError, "takes floating-point maps, got torch.uint8"),
            (torch.randn(1, 3, 6, 6).double(), TypeError, "the map is torch.float64, the weights are torch.float32;"),
            (torch.randn(1, 3, 2, 2), ValueError, "patches_per_expert=2, but a 1×1 grid has only 1 patches"),
            (torch.randn(1, 3, 0, 2), ValueError, "a 0×2 map is not divisible into 2×2 patches; pad it to 2×2"),
        ],
    )
    def test_an_impossible_map_is_refused_with_the_way_out(self, x, error, says):
        with pytest.raises(error, match=re.escape(says)):
            moesaic.PatchMoE(3, 8, **LAYER)(x)

    @pytest.mark.parametrize(
        ("size", "p", "way_out"),
        [
            (
                (15, 15),
                4,
                "15×15 map is not divisible into 4×4 patches; pad it to 16×16 with pad=True or use patch_size=3 or 5",
            ),
            (
                (7, 7),
                2,
                "7×7 map is not divisible into 2×2 patches; pad it to 8×8 with pad=True or use patch_size=1 or 7",
            ),
            ((8, 12), 8, "pad it to 8×16 with pad=True or use patch_size=4"),
        ],
    )
    def test_a_map_that_does_not_divide_is_told_what_would(self, size, p, way_out):
        layer = moesaic.PatchMoE(3, 8, experts=2, patches_per_expert=1, patch_size=p)
        with pytest.raises(ValueError, match=re.escape(way_out)):
            layer(torch.randn(1, 3, *size))

    def test_a_router_for_other_experts_or_patches_is_named(self):
        x = torch.randn(1, 3, 6, 6)
        with pytest.raises(ValueError, match="the router routes to 5 experts, but the layer has 4"):
            moesaic.PatchMoE(3, 8, experts=4, router=moesaic.TokenChoice(3, 5, 1, 2))(x)

        class Elsewhere(moesaic.TokenChoice):
            def forward(self, x):
                return self.choose(self.scores(x), grid=(9, 1))

        with pytest.raises(ValueError, match=r"returned a grid of \(9, 1\) for a map of 3×3 patches"):
            moesaic.PatchMoE(3, 8, experts=4, router=Elsewhere(3, 4, 1, 2))(x)

    def test_a_variance_of_one_value_is_refused(self):
        layer = moesaic.PatchMoE(3, 8, experts=2, patches_per_expert=1, expert_norm=True)
        with pytest.raises(ValueError, match="one value per channel has no variance to train on"):
            layer(torch.randn(1, 3, 1, 1))
        layer.eval()(torch.randn(1, 3, 1, 1))
