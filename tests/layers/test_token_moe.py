"""TokenMoE equals its definition, token by token, for every router, mask and prefix."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import moesaic
from moesaic.experts import ConvExperts, MLPExperts
from moesaic.layers.token_moe import _SPEC
from moesaic.models import count_macs

ROUTERS = {
    "capacity": {"capacity": 1.0},
    "a tiny capacity": {"capacity": 1e-3},
    "a capacity beyond all tokens": {"capacity": 100.0},
    "tokens per expert": {"tokens_per_expert": 1},
    "softmax over tokens": {"capacity": 2.0, "gate": "softmax_all"},
    "softmax over selected": {"capacity": 2.0, "gate": "softmax_selected"},
    "gate one": {"capacity": 2.0, "gate": "one"},
    "top 1": lambda: moesaic.TokenChoice(6, 4, 1, dtype=torch.float64),
    "top 2": lambda: moesaic.TokenChoice(6, 4, 2, gate="softmax_selected", dtype=torch.float64),
    "limited": lambda: moesaic.TokenChoice(6, 4, 2, capacity_factor=0.5, in_eval=True, dtype=torch.float64),
    "soft": lambda: moesaic.SoftRouter(6, 4, 2, dtype=torch.float64),
}


def build(router="capacity", **options):
    """A layer of four experts for tokens of six features in float64, with weights that are not small."""
    chosen = ROUTERS[router]
    own = chosen if isinstance(chosen, dict) else {"router": chosen()}
    layer = moesaic.TokenMoE(6, experts=4, hidden_dim=5, **own, **options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
    return layer.eval()


def expert_output(layer, e, x):
    """Expert e on tokens (…, C)."""
    experts = layer.experts
    hidden = F.gelu(F.linear(x, experts.weight_in[e], None if experts.bias_in is None else experts.bias_in[e]))
    return F.linear(hidden, experts.weight_out[e], None if experts.bias_out is None else experts.bias_out[e])


def defined(layer, x, mask=None):
    """The definition: a loop over tokens and experts, from the record of the routing."""
    routing = layer.route(x, mask)
    tokens = x.flatten(1, -2)
    skipped = tokens.shape[1] - routing.units
    rows = []
    for b in range(len(x)):
        own = tokens[b, skipped:]
        if routing.chooser == "soft":
            slots = torch.einsum("nes,nc->esc", routing.dispatch[b], own)
            outputs = torch.stack([expert_output(layer, e, slots[e]) for e in range(4)])
            out = torch.einsum("nes,eso->no", routing.gate[b], outputs)
        else:
            out = torch.stack(
                [
                    sum(
                        routing.weights[b, n, e] * expert_output(layer, e, own[n])
                        for e in range(4)
                        if routing.mask[b, n, e]
                    )
                    + torch.zeros(layer.out_dim, dtype=x.dtype)
                    for n in range(routing.units)
                ]
            )
        rows.append(F.pad(out, (0, 0, skipped, 0)))
    return torch.stack(rows).reshape(*x.shape[:-1], layer.out_dim)


def gradients(layer, x, run):
    x = x.clone().requires_grad_()
    y = run(layer, x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y, torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()], allow_unused=True)


def assert_same(found, expected):
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-10)
    for one, other in zip(found[1], expected[1], strict=True):
        other = torch.zeros_like(one) if other is None and one is not None else other
        one = torch.zeros_like(other) if one is None and other is not None else one
        assert one is other is None or torch.allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_outputs_and_gradients_are_the_definition_s(router, tokens, backend):
    layer = build(router)
    x = torch.randn(3, tokens, 6, dtype=torch.float64)
    with moesaic.backend(backend if router != "soft" else "torch"):
        found = gradients(layer, x, lambda layer, x: layer(x))
    assert_same(found, gradients(layer, x, defined))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_has_no_output_and_no_influence(router, backend):
    layer = build(router)
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([9, 4, 1, 0])[:, None]
    with moesaic.backend(backend if router != "soft" else "torch"):
        found = gradients(layer, x, lambda layer, x: layer(x, mask))
        changed = layer(x.where(mask.unsqueeze(-1), 1e3), mask)
    assert_same(found, gradients(layer, x, lambda layer, x: defined(layer, x, mask)))
    assert not found[0][~mask].any()
    assert not found[1][0][~mask].any()
    assert torch.equal(changed, found[0])
    assert layer.route(x, mask).mask[~mask].any() == (router == "soft")


@pytest.mark.parametrize("router", ["softmax over tokens", "softmax over selected", "top 2", "soft"])
def test_padded_tokens_give_what_fewer_tokens_give(router):
    # where the number of tokens that an expert takes does not depend on padding
    layer = build(router) if router in ("top 2", "soft") else build("tokens per expert", gate="softmax_all")
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    mask = (torch.arange(9) < 5).expand(2, 9)
    assert torch.allclose(layer(x, mask)[:, :5], layer(x[:, :5]), rtol=0, atol=1e-12)


def test_padding_does_not_count_for_the_capacity():
    router = moesaic.TokenChoice(6, 4, 2, capacity_factor=0.5, in_eval=True, dtype=torch.float64)
    layer = moesaic.TokenMoE(6, experts=4, hidden_dim=5, router=router, dtype=torch.float64)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    mask = (torch.arange(12) < 6).expand(2, 12)
    assert torch.equal(layer.route(x, mask).mask[:, :6], layer.route(x[:, :6]).mask)
    assert layer.route(x, mask).load.max() <= math.ceil(0.5 * 12 * 2 / 4)


@pytest.mark.parametrize("router", ["capacity", "top 1", "soft"])
@pytest.mark.parametrize("prefix", ["join", "bypass"])
def test_prefix_tokens_join_or_bypass(router, prefix):
    layer = build(router, prefix_tokens=2, prefix=prefix)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    assert_same(gradients(layer, x, lambda layer, x: layer(x)), gradients(layer, x, defined))
    routing = layer.route(x)
    assert (routing.unit, routing.grid, routing.prefix) == ("token", (3, 3), 2 if prefix == "join" else 0)
    assert routing.units == (11 if prefix == "join" else 9)
    assert layer(x)[:, :2].any() == (prefix == "join" and bool(routing.mask[:, :2].any()))
    assert routing.without_prefix().weights.shape == (2, 9, 4)
    assert torch.equal(routing.without_prefix().weights, routing.weights[:, -9:])
    assert torch.equal(routing.without_prefix().mask, routing.mask[:, -9:])


def test_maps_with_channels_last_are_tokens_on_a_grid():
    layer = build()
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    mask = torch.rand(2, 3, 5) < 0.7
    assert torch.equal(layer(x), layer(x.flatten(1, 2)).view(2, 3, 5, 6))
    assert torch.equal(layer(x, mask), layer(x.flatten(1, 2), mask.flatten(1)).view(2, 3, 5, 6))
    assert layer.route(x).grid == (3, 5)
    assert layer.route(x.flatten(1, 2)).grid is None  # 15 tokens are no square
    layer.grid = (5, 3)
    assert layer.route(x.flatten(1, 2)).grid == (5, 3)


@pytest.mark.parametrize("router", ROUTERS)
def test_an_empty_batch_has_an_empty_output(router):
    layer = build(router)
    assert layer(torch.zeros(0, 7, 6, dtype=torch.float64)).shape == (0, 7, 6)


@pytest.mark.parametrize("router", ["capacity", "softmax over selected", "top 2", "soft"])
def test_permuted_tokens_have_permuted_outputs(router):
    layer = build(router)
    x, order = torch.randn(2, 13, 6, dtype=torch.float64), torch.randperm(13)
    assert torch.allclose(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "limited"])
def test_an_image_does_not_depend_on_its_batch_mates(router):
    layer = build(router)
    x = torch.randn(5, 9, 6, dtype=torch.float64)
    assert torch.equal(layer(x)[2:3], layer(x[2:3])) or torch.allclose(layer(x)[2:3], layer(x[2:3]), atol=1e-14)


def test_equal_tokens_go_to_the_first_ones():
    routing = build("tokens per expert").route(torch.ones(1, 5, 6, dtype=torch.float64))
    assert routing.index.flatten().tolist() == [0, 0, 0, 0]


def test_gates_of_zhou_et_al_are_a_softmax_over_experts():
    layer = build("capacity")
    routing = layer.route(torch.randn(2, 8, 6, dtype=torch.float64))
    probability = routing.scores.softmax(-1)
    assert torch.allclose(routing.weights, probability * routing.mask, atol=1e-12)
    for e in range(4):
        taken, left = (probability[0, :, e][part] for part in (routing.mask[0, :, e], ~routing.mask[0, :, e]))
        assert taken.min() >= left.max()


@pytest.mark.parametrize(("tokens", "capacity", "taken"), [(10, 1.0, 3), (8, 1.0, 2), (3, 0.1, 1), (3, 9.0, 3)])
def test_a_capacity_is_a_multiple_of_an_equal_share(tokens, capacity, taken):
    layer = moesaic.TokenMoE(6, experts=4, capacity=capacity)
    assert layer.route(torch.randn(1, tokens, 6)).load.tolist() == [taken] * 4
    assert (layer.capacity, layer.tokens_per_expert) == (capacity, None)


def test_weights_round_trip_under_their_names(tmp_path):
    layer = build("capacity", prefix_tokens=1)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "router.weight": (4, 6, 1, 1),
        "experts.weight_in": (4, 5, 6),
        "experts.bias_in": (4, 5),
        "experts.weight_out": (4, 6, 5),
        "experts.bias_out": (4, 6),
    }
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    again = build("capacity", prefix_tokens=1)
    again.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(2, 10, 6, dtype=torch.float64)
    assert torch.equal(again(x), layer(x))


def test_tokens_are_read_in_place():
    layer = build()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    x_map, *_ = layer._map_of(x, None)
    assert x_map.data_ptr() == x.data_ptr()
    assert x_map.is_contiguous(memory_format=torch.channels_last)
    assert _SPEC.patch_size == 1
    odd = torch.randn(2, 6, 9, dtype=torch.float64).transpose(1, 2)
    assert torch.equal(layer(odd), layer(odd.contiguous()))


def test_experts_of_one_s_own():
    x = torch.randn(2, 9, 6)
    experts = MLPExperts(3, 6, 7, 4, activation="quick_gelu")
    assert moesaic.TokenMoE(6, experts=experts, capacity=1.0)(x).shape == (2, 9, 4)
    linear = moesaic.TokenMoE(6, experts=ConvExperts(3, 6, 5, 1), capacity=3.0, gate="one")
    expected = sum(F.linear(x, linear.experts.weight[e, :, :, 0, 0], linear.experts.bias[e]) for e in range(3))
    assert torch.allclose(linear(x), expected, atol=1e-5)
    with pytest.raises(ValueError, match="hidden_dim=8, but its experts have hidden_dim=7"):
        moesaic.TokenMoE(6, experts=experts, capacity=1.0, hidden_dim=8)
    with pytest.raises(ValueError, match="kernel_size=3"):
        moesaic.TokenMoE(6, experts=ConvExperts(3, 6, 5, 3), capacity=1.0)


def test_dropout_is_for_training():
    layer = moesaic.TokenMoE(6, experts=2, capacity=2.0, dropout=0.5)
    x = torch.randn(4, 9, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert layer.experts.dropout == 0.5
    hidden = MLPExperts(2, 6, 1000, 6, dropout=0.25)
    kept = hidden._activation()(torch.full((1000,), 3.0)) != 0
    assert 0.7 < float(kept.float().mean()) < 0.8


def test_half_precision_follows_float64():
    layer = build("capacity").float()
    x = torch.randn(4, 49, 6)
    exact = copy.deepcopy(layer).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(x) - exact).abs().max() < 0.05 * exact.abs().max()
    assert (layer(x) - exact).abs().max() < 1e-5 * exact.abs().max()
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_per_sample_gradients():
    layer = build("capacity")
    x = torch.randn(3, 9, 6, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, image):
        return functional_call(layer, parameters, (image[None],)).square().sum()

    each = vmap(grad(loss), (None, 0))(parameters, x)
    for name, value in each.items():
        expected = torch.stack([grad(loss)(parameters, image)[name] for image in x])
        assert torch.allclose(value, expected, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"prefix_tokens": 1}, {"prefix_tokens": 1, "prefix": "bypass"}])
def test_expert_choice_compiles_to_one_graph(options):
    layer = build("capacity", **options)
    x = torch.randn(2, 10, 6, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(gradients(layer, x, lambda _, x: compiled(x)), gradients(layer, x, lambda layer, x: layer(x)))


@pytest.mark.parametrize("router", ["capacity", "soft", "softmax over selected"])
def test_exported_layers_take_other_batches(router):
    layer = build(router, prefix_tokens=1).float()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(layer, (torch.randn(3, 10, 6),), dynamic_shapes=({0: batch},)).module()
    x = torch.randn(5, 10, 6)
    assert torch.allclose(exported(x), layer(x), atol=1e-6)


def test_multiply_adds_count_what_runs():
    layer = moesaic.TokenMoE(6, experts=4, hidden_dim=5, tokens_per_expert=2)
    cost = count_macs(layer, (2, 5, 6))  # a map (H, W, C)
    router, each = 10 * 4 * 6, 6 * 5 + 5 * 6
    assert cost.macs == router + 4 * 2 * each
    assert cost.dense_macs == 10 * 4 * each


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, TypeError, "tokens_per_expert and capacity: both are missing; give one of them, or a router"),
            ({"capacity": 1.0, "tokens_per_expert": 2}, TypeError, "both are given"),
            ({"capacity": 0.0}, ValueError, "capacity=0.0; it must be above 0"),
            ({"capacity": 1.0, "prefix": "drop"}, ValueError, "prefix='drop' is unknown; use 'join' or 'bypass'"),
            ({"capacity": 1.0, "dropout": 1.0}, ValueError, "dropout=1.0; it must be from 0 to below 1"),
            ({"capacity": 1.0, "prefix_tokens": -1}, ValueError, "prefix_tokens=-1; it must be at least 1"),
            ({"capacity": 1.0, "grid": (0, 3)}, ValueError, r"grid[0]=0; it must be at least 1"),
            ({"router": "soft"}, TypeError, "router='soft' is a str; give a router object"),
            ({"router": moesaic.SoftRouter(6, 4, patch_size=2)}, ValueError, "patch_size=2; a token is one position"),
            (
                {"router": moesaic.TokenChoice(6, 4), "capacity": 1.0},
                ValueError,
                "capacity=1.0, but its router",
            ),
            ({"capacity": 1.0, "gate": "two"}, ValueError, "gate='two' is unknown"),
        ],
    )
    def test_an_impossible_layer_is_refused_when_it_is_built(self, options, error, message):
        with pytest.raises(error) as refused:
            moesaic.TokenMoE(6, experts=4, **options)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        ("x", "mask", "error", "message"),
        [
            ([0.5], None, TypeError, "takes tokens (B, N, C) as a tensor, got a list"),
            (torch.zeros(9, 6), None, ValueError, "got 2 axes (9, 6); give a single image a batch axis"),
            (torch.zeros(2, 6, 9), None, ValueError, "dim=6, got tokens of 9 features (2, 6, 9)"),
            (torch.zeros(2, 9, 6, dtype=torch.long), None, TypeError, "takes floating-point tokens"),
            (torch.zeros(2, 9, 6, dtype=torch.float64), None, TypeError, "convert one of them"),
            (torch.zeros(2, 1, 6), None, ValueError, "1 tokens, of which prefix_tokens=1; at least one must follow"),
            (torch.zeros(2, 3, 3, 6), None, ValueError, "prefix_tokens=1, but a map (2, 3, 3, 6) has none"),
            (torch.zeros(2, 9, 6), torch.ones(2, 9), ValueError, "it must be torch.bool (2, 9), False for padding"),
            (torch.zeros(2, 9, 6), torch.ones(9, dtype=torch.bool), ValueError, "mask is torch.bool (9,)"),
        ],
    )
    def test_wrong_tokens_are_refused_in_one_line(self, x, mask, error, message):
        with pytest.raises(error) as refused:
            moesaic.TokenMoE(6, experts=4, capacity=1.0, prefix_tokens=1)(x, mask)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_a_grid_that_does_not_fit(self):
        with pytest.raises(ValueError, match="10 tokens, of which 10 follow the prefix, are no grid of 3×3"):
            moesaic.TokenMoE(6, experts=4, capacity=1.0, grid=(3, 3))(torch.zeros(1, 10, 6))

    def test_more_tokens_per_expert_than_tokens(self):
        with pytest.raises(ValueError, match="has only 3"):
            moesaic.TokenMoE(6, experts=4, tokens_per_expert=4)(torch.zeros(1, 3, 6))

    def test_a_router_without_a_mask(self):
        class Own(moesaic.ExpertChoice):
            def choose(self, scores, *, unit="patch", grid=None):
                return super().choose(scores, unit=unit, grid=grid)

        layer = moesaic.TokenMoE(6, experts=4, router=Own(6, 4, 2))
        x = torch.zeros(1, 5, 6)
        assert layer(x).shape == x.shape
        with pytest.raises(TypeError, match=r"Own: choose\(\) has no parameter mask"):
            layer(x, torch.ones(1, 5, dtype=torch.bool))
