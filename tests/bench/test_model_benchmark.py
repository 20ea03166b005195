"""What routing gains in a network: counterparts, shares, bounds and candidates; times are of no concern here."""

import copy

import pytest
import torch
from torch import nn

import moesaic
from moesaic.bench import model_benchmark
from moesaic.bench.model_benchmark import benchmark_model, dense_counterpart
from moesaic.bench.timing import Timing
from moesaic.models.convert import ChannelsLastPatchMoE


def routed_network(**options) -> nn.Module:
    layer = moesaic.PatchMoE(8, 8, experts=2, patches_per_expert=1, patch_size=4, kernel_size=3, **options)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def dense_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds by candidate in place of measured ones; everything runs once."""
    times = {"dense": 4.0, "routed": 2.0, "": 20.0}

    def time_interleaved(runs, repetitions, *, gpu_clock=False):
        for run in runs.values():
            run()
        return {name: Timing(times[name], times[name], times[name]) for name in runs}

    monkeypatch.setattr(model_benchmark, "time_interleaved", time_interleaved)
    return times


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
    assert found.converted is None
    assert [layer.names for layer in found.layers] == [("1",)]
    assert found.routed_share == pytest.approx(8 * 8 / (8 * 8 + 3 * 8 + 8 * 2 / (9 * 64)))
    assert found.bounds == {"forward": pytest.approx(20 / 16), "step": pytest.approx(20 / 16)}
    assert [(each.mode, each.what, each.gain) for each in found.networks] == [
        ("eager", "forward", 2.0),
        ("eager", "step", 2.0),
    ]
    assert found.layers[0].gain("step") == 2.0
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_layers_of_a_dense_network_that_gain_are_converted(clock):
    model = dense_network()
    found = benchmark_model(model, (3, 8, 8), batch_size=1, experts=4, passes=["forward"])
    assert found.converted == ("0", "1")
    assert found.routed_macs < 0.6
    assert [each.gain for each in found.networks] == [2.0]
    assert all(isinstance(layer, nn.Conv2d) for layer in model), "the network is not changed"


def test_layers_that_cannot_be_shared_say_why(clock):
    clock["routed"] = 5.0
    found = benchmark_model(dense_network(), (3, 8, 8), batch_size=1, experts=4, passes=["forward"])
    (refused,) = (layer for layer in found.layers if layer.note is not None)
    assert refused.names == ("2",)
    assert refused.note.startswith("'2' has 6 output channels, which 4 experts cannot share")
    assert refused.gain("forward") is None


def test_nothing_is_converted_where_no_layer_gains(clock):
    clock["routed"] = 4.0
    found = benchmark_model(dense_network(), (3, 8, 8), batch_size=1, experts=2)
    assert found.converted == ()
    assert found.networks == ()


def test_layers_of_one_shape_are_timed_once(clock):
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
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
