"""The routing of tokens: explained on the grid, with class and register tokens apart, and without a grid too."""

from collections.abc import Sequence

import pytest
import torch
from tiny_vit import TinyViT
from torch import Tensor, nn

import moesaic
from moesaic.insight import overlay
from moesaic.insight.explain import ForwardPass, LayerExplanation, collect_outputs, explain
from moesaic.insight.overlays import prefix_text
from moesaic.insight.receptive_field import receptive_field
from moesaic.report.explorer_data import prefix_rates
from moesaic.routing import SoftRouter, TokenChoice
from moesaic.routing_record import Routing

LABELS = torch.arange(6) % 2


def found(moe: moesaic.TokenMoE, prefix: int = 1) -> ForwardPass:
    torch.manual_seed(0)
    model = TinyViT(2, moe, prefix=prefix)
    pixels = torch.randint(0, 256, (6, 3, 24, 24), dtype=torch.uint8)
    return collect_outputs(model, pixels, lambda x: x / 255)


def layer_of(outputs: ForwardPass) -> LayerExplanation:
    return explain(outputs, ["cat", "dog"], labels=LABELS).layers[0]


def same(rate_EN: Sequence[Sequence[float]], selected_BNE: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(rate_EN).double(), selected_BNE.double().mean(0).T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", [1, 3])
def test_maps_are_of_the_tokens_on_the_grid_and_prefix_tokens_stand_apart(prefix: int):
    moe = moesaic.TokenMoE(8, experts=3, hidden_dim=4, tokens_per_expert=4, prefix_tokens=prefix)
    outputs = found(moe, prefix)
    layer, mask = layer_of(outputs), outputs.routing["mlp"].mask
    assert (layer.unit, layer.grid, layer.units, layer.prefix) == ("token", (3, 3), 9, prefix)
    for k in range(2):
        same(layer.selection_rate[k], mask[LABELS.eq(k), prefix:])
        same(layer.prefix_rate[k], mask[LABELS.eq(k), :prefix])
    for e, top in enumerate(layer.top_patches):
        assert top
        assert all(mask[each.image, prefix + each.patch, e] for each in top)
    assert layer.field is not None
    assert layer.field.patch_size == (8, 8)
    explanation = explain(outputs, ["cat", "dog"], labels=LABELS)
    means = mask[:, :prefix].double().mean(0)
    assert prefix_rates(layer, 1, explanation) == pytest.approx(means[:, 1].tolist(), abs=1e-4)


def test_tokens_choose_experts_and_soft_routers_mix_them():
    chosen = layer_of(found(moesaic.TokenMoE(8, experts=3, prefix_tokens=1, router=TokenChoice(8, 3, top_k=2))))
    assert [sum(each[0] for each in rates) for rates in chosen.prefix_rate] == pytest.approx([2, 2], abs=1e-4)
    mixed = layer_of(found(moesaic.TokenMoE(8, experts=3, prefix_tokens=1, router=SoftRouter(8, 3))))
    assert (mixed.grid, mixed.units, mixed.prefix) == ((3, 3), 9, 1)


def test_tokens_without_a_grid_are_explained_as_they_are():
    # a class token that the layer does not know of leaves ten tokens, which are no square
    layer = layer_of(found(moesaic.TokenMoE(8, experts=3, hidden_dim=4, tokens_per_expert=2)))
    assert (layer.grid, layer.units, layer.prefix, layer.field) == (None, 10, 0, None)
    assert torch.tensor(layer.selection_rate).sum(-1) == pytest.approx(torch.full((2, 3), 2.0), abs=1e-3)


def test_the_receptive_field_of_a_token_is_that_of_the_patch_it_began_as():
    moe = moesaic.TokenMoE(4, experts=2, hidden_dim=4, tokens_per_expert=2, prefix_tokens=1)

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.moe = nn.Conv2d(3, 4, 8, stride=8), moe

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.embed(x).flatten(2).mT
            return self.moe(torch.cat([tokens.new_zeros(len(x), 1, 4), tokens], 1))

    field = receptive_field(Embedded(), "moe", torch.rand(2, 3, 24, 24))
    assert field is not None
    assert (field.patch_size, field.margin) == ((8, 8), 0)
    assert field.own_share == pytest.approx(1)


def routing(index: list[list[int]], prefix: int) -> Routing:
    chosen = torch.tensor([index])
    gate, scores = torch.full(chosen.shape, 0.5), torch.zeros(1, 4 + prefix, len(index))
    return Routing("token", scores, chosen, gate, "expert", grid=(2, 2), prefix=prefix)


def test_an_overlay_draws_the_grid_and_names_the_experts_of_the_class_token():
    figure = overlay(torch.rand(1, 3, 8, 8), routing([[0, 4], [1, 2], [0, 3]], 1), titles=["a cat"])
    assert figure.axes[0].get_title(loc="left") == "a cat · class token: experts 0, 2"
    assert [text.get_text() for text in figure.texts] == ["Selected tokens", "Tokens of each expert, with gates"]
    plain = overlay(torch.rand(1, 3, 8, 8), routing([[3], [0], [2]], 0))
    assert plain.axes[0].get_title(loc="left") == ""


def test_prefix_tokens_are_named_together():
    assert prefix_text(routing([[5], [5], [2]], 2), 0) == "2 prefix tokens: experts none"
    assert prefix_text(routing([[1], [5], [0]], 2), 0) == "2 prefix tokens: experts 0, 2"
    assert prefix_text(routing([[0], [5]], 1), 0) == "class token: expert 0"
