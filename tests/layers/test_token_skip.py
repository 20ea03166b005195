"""Skipped tokens: the definition, what passes by, gates, prefixes, padding, and mixtures of experts inside."""

import copy
import io
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.layers import TokenMoE, TokenSkip
from moesaic.models.vit import Block
from moesaic.routing import KeepChoice

DIM = 8


def block(dim: int = DIM, **options) -> nn.Module:
    return Block(dim, heads=2, **options)


def spread(layer: TokenSkip) -> TokenSkip:
    """Gates far from 1."""
    nn.init.normal_(layer.router.weight)
    return layer


def definition(layer: TokenSkip, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Image by image, by Python's sort; what is padding is not even there."""
    images = []
    P = layer.prefix_tokens if layer.prefix == "always" else 0
    for b, image in enumerate(x):
        scores = F.layer_norm(image, (layer.dim,)) @ layer.router.weight[0, :, 0, 0]
        tokens = [n for n in range(P, len(image)) if mask is None or mask[b, n]]
        places = layer.router.count(len(image) - P)
        best = sorted(sorted(tokens, key=lambda n: -scores[n].item())[:places])
        chosen = [n for n in range(P) if mask is None or mask[b, n]] + best
        gates = [1.0 if n < P or layer.gate == "one" else 2 * torch.sigmoid(scores[n]) for n in chosen]
        rows = list(image)
        if chosen:
            for n, gate, y in zip(chosen, gates, layer.block(image[chosen][None])[0], strict=True):
                rows[n] = image[n] + gate * (y - image[n])
        images.append(torch.stack(rows))
    return torch.stack(images)


@pytest.mark.parametrize("gate", ["sigmoid", "one"])
@pytest.mark.parametrize("prefix", ["always", "join"])
@pytest.mark.parametrize(("tokens", "first", "keep"), [(9, 0, 0.5), (11, 2, 0.3), (1, 0, 0.5), (5, 1, 1.0)])
def test_it_computes_the_definition_and_its_gradients(gate, prefix, tokens, first, keep):
    layer = TokenSkip(block(), DIM, keep=keep, gate=gate, prefix_tokens=first, prefix=prefix).double()
    x = torch.randn(3, tokens, DIM, dtype=torch.float64, requires_grad=True)
    weights = [x, *spread(layer).parameters()]
    y, expected = layer(x), definition(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(y)
    found = torch.autograd.grad((y * direction).sum(), weights, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad((expected * direction).sum(), weights, allow_unused=True, materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert bool(found[1].any()) == (gate == "sigmoid" and tokens > first), "the router learns from its gates"


def test_tokens_that_are_not_selected_pass_by_unchanged():
    layer, x = TokenSkip(block(), DIM, keep=0.4, prefix_tokens=1), torch.randn(2, 11, DIM)
    y, taken = layer(x), layer.route(x).mask[..., 0]
    assert taken.sum(1).tolist() == [5, 5]
    assert taken[:, 0].all()
    assert torch.equal(y[~taken], x[~taken])
    assert (y[taken] != x[taken]).any(-1).all()


def test_all_tokens_with_a_gate_of_one_are_the_block_exactly():
    inner, x = block(), torch.randn(3, 10, DIM)
    assert torch.equal(TokenSkip(inner, DIM, keep=1, gate="one")(x), inner(x))
    assert torch.equal(TokenSkip(inner, DIM, keep=1, gate="one", prefix_tokens=2)(x), inner(x))
    small = TokenSkip(inner, DIM, keep=1)
    torch.testing.assert_close(small(x), inner(x), rtol=0.2, atol=0.2)  # gates begin near 1


def test_ties_go_to_the_lower_token_and_an_empty_batch_passes():
    layer = TokenSkip(block(), DIM, keep=0.5)
    assert layer.route(torch.ones(2, 6, DIM)).index.tolist() == [[[0, 1, 2]]] * 2
    assert layer(torch.zeros(0, 6, DIM)).shape == (0, 6, DIM)
    assert layer(torch.randn(2, 1, DIM)).shape == (2, 1, DIM)


def test_an_image_does_not_depend_on_its_batch():
    layer, x = TokenSkip(block(), DIM, keep=0.5).eval(), torch.randn(5, 9, DIM)
    torch.testing.assert_close(layer(x)[2:3], layer(x[2:3]))


@pytest.mark.parametrize("first", [0, 1])
def test_padding_passes_by_and_changes_nothing(first):
    layer = spread(TokenSkip(block(), DIM, keep=0.6, prefix_tokens=first).double())
    x, mask = torch.randn(4, 9, DIM, dtype=torch.float64), torch.ones(4, 9, dtype=torch.bool)
    mask[1, 4:], mask[2, 2:], mask[3] = False, False, False  # places left empty, and an image of padding alone
    y = layer(x, mask)
    torch.testing.assert_close(y, definition(layer, x, mask), rtol=1e-10, atol=1e-10)
    assert torch.equal(y[~mask], x[~mask])
    other = torch.where(mask[..., None], x, torch.randn_like(x))
    assert torch.equal(layer(other, mask)[mask], y[mask])
    expected = 6 + 4 + 2 if not first else (1 + 5) + (1 + 3) + (1 + 1)
    assert layer.route(x, mask).load.tolist() == [expected]


def test_padding_is_left_out_of_the_attention_of_timms_blocks(timm):
    inner = import_module("timm.models.vision_transformer").Block(DIM, 2)
    layer = spread(TokenSkip(inner, DIM, keep=0.7).double())
    x, mask = torch.randn(2, 7, DIM, dtype=torch.float64), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 3:] = False
    torch.testing.assert_close(layer(x, mask), definition(layer, x, mask), rtol=1e-10, atol=1e-10)


def test_the_record_is_one_expert_over_tokens_on_their_grid():
    layer, x = TokenSkip(block(), DIM, keep=0.5, prefix_tokens=1, grid=(2, 3)), torch.randn(2, 7, DIM)
    with moesaic.record_routing(layer) as routing:
        layer(x)
    found = routing[""]
    assert (found.unit, found.chooser, found.experts, found.units, found.grid, found.prefix) == (
        "token",
        "expert",
        1,
        7,
        (2, 3),
        1,
    )
    assert found.load.tolist() == [8]
    assert found.gate[:, 0, 0].tolist() == [1, 1]
    assert found.without_prefix().units == 6
    assert TokenSkip(block(), DIM).route(torch.randn(1, 9, DIM)).grid == (3, 3)
    assert TokenSkip(block(), DIM).route(torch.randn(1, 8, DIM)).grid is None


def test_a_mixture_inside_sees_the_selected_tokens_and_knows_no_grid():
    mixture = TokenMoE(DIM, experts=2, capacity=1.0, grid=(3, 3), prefix_tokens=1)
    inner = block(mlp=mixture)
    layer, x = TokenSkip(inner, DIM, keep=0.4, prefix_tokens=1, grid=(3, 3)), torch.randn(2, 10, DIM)
    with moesaic.record_routing(nn.Sequential(layer)) as routing:
        layer(x)
    assert set(routing) == {"0", "0.block.mlp"}
    assert routing["0"].grid == (3, 3)
    assert routing["0.block.mlp"].grid is None  # four of nine tokens would pass for a square
    assert routing["0.block.mlp"].units == 5
    assert routing["0.block.mlp"].index.shape == (2, 2, 3)
    whole = TokenSkip(block(mlp=TokenMoE(DIM, experts=2, capacity=1.0)), DIM, keep=1)
    with moesaic.record_routing(whole) as routing:
        whole(torch.randn(2, 9, DIM))
    assert routing["block.mlp"].grid == (3, 3)


def test_padding_reaches_a_mixture_inside():
    mixture = TokenMoE(DIM, experts=2, capacity=2.0)
    layer = TokenSkip(block(mlp=mixture), DIM, keep=1)
    mask = torch.tensor([[True, True, False, False]])
    with moesaic.record_routing(layer) as routing:
        layer(torch.randn(1, 4, DIM), mask)
    assert routing["block.mlp"].load.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0; it must be above 0 and at most 1"),
        ({"keep": 1.5}, "keep=1.5; it must be above 0 and at most 1"),
        ({"gate": "softmax"}, "gate='softmax' is unknown; use 'sigmoid' or 'one'"),
        ({"prefix": "bypass"}, "prefix='bypass' is unknown; use 'always' or 'join'"),
        ({"prefix_tokens": -1}, "prefix_tokens=-1; it must be at least 1"),
        ({"prefix_tokens": 1, "prefix": "join"}, "TokenMoE in the block has prefix_tokens=1, which must come first"),
        ({}, "prefix_tokens=0, prefix='always', but a TokenMoE in the block has prefix_tokens=1"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_the_block_alone(options, message):
    mixture = TokenMoE(DIM, experts=2, capacity=1.0, prefix_tokens=1, grid=(2, 2))
    with pytest.raises(ValueError, match=message):
        TokenSkip(block(mlp=mixture), DIM, **options)
    assert mixture.grid == (2, 2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, DIM), r"takes tokens \(B, N, C\), got 2 axes \(3, 8\); give a single image a batch axis"),
        (torch.zeros(1, 2, 2, DIM), r"got 4 axes .*flatten a map \(B, H, W, C\) with x.flatten\(1, 2\)"),
        (torch.zeros(1, 4, DIM + 1), "dim=8, got tokens of 9 features"),
        (torch.zeros(1, 1, DIM), "1 tokens, of which prefix_tokens=1; at least one must follow"),
    ],
)
def test_other_inputs_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        TokenSkip(block(), DIM, prefix_tokens=1)(x)


def test_it_is_copied_stored_and_compiled():
    layer = spread(TokenSkip(block(mlp=TokenMoE(DIM, experts=2, capacity=1.0)), DIM, keep=0.5, prefix_tokens=1)).eval()
    x = torch.randn(2, 10, DIM)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x), layer(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    other = TokenSkip(block(mlp=TokenMoE(DIM, experts=2, capacity=1.0)), DIM, keep=0.5, prefix_tokens=1).eval()
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(other(x), layer(x))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)).module()
    torch.testing.assert_close(exported(x[:1]), layer(x[:1]))


def test_under_autocast_the_router_computes_in_float32():
    layer, x = TokenSkip(block(), DIM, keep=0.5), torch.randn(2, 9, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = layer(x), layer.route(x.bfloat16())
    assert y.dtype == torch.float32
    assert routing.scores.dtype == torch.float32
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_the_router_selects_alone():
    routing = KeepChoice(3, keep=0.5)(torch.randn(2, 3, 1, 5))
    assert routing.index.shape == (2, 1, 3)
    assert replace(routing, unit="patch").load.tolist() == [6]
