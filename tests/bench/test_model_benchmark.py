"""What routing gains in a network: counterparts, shares, bounds and candidates; times are of no concern here."""

import copy

import pytest
import torch
from torch import nn

import moesaic
from moesaic.bench.model_benchmark import benchmark_model, dense_counterpart
from moesaic.models.convert import ChannelsLastPatchMoE


def routed_network(**options) -> nn.Module:
    layer = moesaic.PatchMoE(8, 8, experts=2, patches_per_expert=1, patch_size=4, kernel_size=3, **options)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Tokens(nn.Module):
    """Maps as tokens, through an MLP beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Conv2d(3, 8, 2, 2), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return tokens + self.mlp(tokens)


@pytest.mark.parametrize("expert_norm", [True, False])
def test_a_dense_counterpart_takes_the_same_images_and_does_all_of_the_work(expert_norm: bool):
    model = routed_network(expert_norm=expert_norm, bias=False)
    dense = dense_counterpart(model)
    assert dense(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    assert not any(isinstance(layer, moesaic.PatchMoE) for layer in dense.modules())
    assert isinstance(model[1], moesaic.PatchMoE), "the network is not changed"
    costs = (moesaic.models.count_macs(each, (3, 8, 8)) for each in (dense, model))
    assert next(costs).macs == next(costs).dense_macs
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in dense.modules()) == expert_norm


def test_a_linear_layer_comes_back_as_one():
    layer = ChannelsLastPatchMoE(8, 16, experts=4, patches_per_expert=2)
    dense = dense_counterpart(layer)
    assert isinstance(dense, nn.Linear)
    assert dense(torch.zeros(1, 4, 4, 8)).shape == (1, 4, 4, 16)


def test_a_routed_network_has_its_share_and_the_bound_that_it_sets(clock):
    model = routed_network()
    weights = copy.deepcopy(model.state_dict())
    found = benchmark_model(model, (3, 8, 8), batch_size=2)
    assert [layer.names for layer in found.layers] == [("1",)]
    assert found.routed_share == pytest.approx(8 * 8 / (8 * 8 + 3 * 8 + 8 * 2 / (9 * 64)))
    assert found.bounds == {"forward": pytest.approx(20 / 16), "step": pytest.approx(20 / 16)}
    assert [(each.mode, each.what, each.gain) for each in found.networks] == [
        ("eager", "forward", 2.0),
        ("eager", "step", 2.0),
    ]
    assert found.layers[0].gain("step") == 2.0
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(("init", "hidden"), [("split", 16), ("upcycle", 16), ("scratch", 16)])
def test_the_counterpart_of_experts_is_the_mlp_that_they_replaced(init, hidden):
    model = moesaic.convert(Tokens(), "mlp", experts=4, init=init, input_size=8)
    dense = dense_counterpart(model)
    first, last = (layer for layer in dense.mlp if isinstance(layer, nn.Linear))
    assert (first.in_features, first.out_features, last.out_features) == (8, hidden, 8)
    assert dense(torch.zeros(2, 3, 8, 8)).shape == (2, 16, 8)


def test_an_mlp_of_convolutions_comes_back_as_one():
    mlp = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 1))
    model = moesaic.convert(nn.Sequential(nn.Conv2d(3, 8, 1), mlp), "1", experts=2, init="split", input_size=4)
    dense = dense_counterpart(model)
    assert [layer.out_channels for layer in dense[1] if isinstance(layer, nn.Conv2d)] == [16, 8]
    assert "relu" in str(dense[1])


def test_a_block_that_skips_tokens_has_itself_as_counterpart(clock):
    model = moesaic.create_model("vit_tiny_patch4_32", num_classes=2, image_size=8, depth=2)
    moesaic.convert(model, "blocks.1.mlp", experts=4, init="split")
    moesaic.skip(model, "every-2")
    dense = dense_counterpart(model)
    assert [str(each) for each in dense.blocks[1].modules() if isinstance(each, nn.Linear)] == [
        str(each) for each in dense.blocks[0].modules() if isinstance(each, nn.Linear)
    ]
    found = benchmark_model(model, (3, 8, 8), batch_size=1, passes=["forward"])
    assert [layer.names for layer in found.layers] == [("blocks.1",)]
    assert found.layers[0].shape == "Block, 192 features on 4 tokens"
    assert 0.4 < found.routed_share < 0.6


def test_experts_on_tokens_are_timed(clock):
    model = moesaic.convert(Tokens(), "mlp", experts=4, init="split", input_size=8)
    found = benchmark_model(model, (3, 8, 8), batch_size=2)
    assert [(layer.names, layer.shape) for layer in found.layers] == [(("mlp",), "MLP 8→16→8 on 16 tokens")]
    assert found.routed_macs < 0.7


def test_a_dense_network_is_for_advise():
    with pytest.raises(ValueError, match=r"^Conv2d has no routed layers; moesaic advise finds those"):
        benchmark_model(nn.Conv2d(3, 8, 3), (3, 8, 8))


def test_layers_of_one_shape_are_timed_once(clock):
    options = {"experts": 2, "patches_per_expert": 1, "patch_size": 4, "kernel_size": 3}
    model = nn.Sequential(*(moesaic.PatchMoE(8, 8, **options) for _ in range(3)))
    found = benchmark_model(model, (8, 8, 8), batch_size=1, passes=["forward"])
    assert [layer.names for layer in found.layers] == [("0", "1", "2")]
    assert found.bounds == {"forward": pytest.approx(20 / (20 - 3 * 4))}


def test_a_bound_is_infinite_where_the_layers_take_all_of_the_time(clock):
    clock[""] = 3.0
    found = benchmark_model(routed_network(), (3, 8, 8), batch_size=1, passes=["forward"])
    assert found.bounds == {"forward": float("inf")}


def test_what_cannot_run_here_has_a_note(clock, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: (_ for _ in ()).throw(RuntimeError("no compiler\nmore")))
    found = benchmark_model(
        routed_network(), (3, 8, 8), batch_size=1, passes=["forward"], modes=["compiled", "captured"]
    )
    assert [each.note for each in found.networks] == ["RuntimeError: no compiler", "CUDA graphs need a GPU"]
    assert found.best("forward") is None


def test_other_kinds_of_routing_are_refused():
    with pytest.raises(ValueError, match=r"has channel gates; only networks that route.*benchmarks/channel\.py"):
        benchmark_model(nn.Sequential(moesaic.ChannelMoE(3, 8, 3)), (3, 8, 8))


@pytest.mark.gpu
def test_captured_networks_are_timed():
    found = benchmark_model(routed_network().cuda(), (3, 8, 8), batch_size=2, modes=["captured"], repetitions=2)
    assert [each.note for each in found.networks] == [None, None]
