"""What routing could gain in a dense network: layers, bounds, plans; times are made up."""

import copy

import pytest
import torch
from torch import nn

import moesaic
from moesaic.bench.advise import Advice, RoutingOptions, advise
from moesaic.bench.network_timer import NetworkTimer, amdahl
from moesaic.models import ModelSpec, convert, count_macs

IMAGE = (3, 8, 8)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1))


def vit(depth: int = 2) -> nn.Module:
    return moesaic.create_model("vit_tiny_patch4_32", num_classes=2, image_size=8, depth=depth)


def forward(model: nn.Module, **options) -> Advice:
    return advise(model, IMAGE, RoutingOptions(experts=4, **options), batch_size=2, passes=["forward"])


def test_convolutions_that_gain_are_planned_and_the_network_is_timed(clock):
    model = convolutions()
    weights = copy.deepcopy(model.state_dict())
    found = advise(model, IMAGE, RoutingOptions(experts=4), batch_size=1)
    (plan,) = found.plans
    assert plan.name == "convert"
    assert plan.conversions == ({"layer": ["0", "1"], "experts": 4},)
    assert plan.macs < 0.6
    assert plan.estimated == {"forward": pytest.approx(20 / 16), "step": pytest.approx(20 / 16)}
    assert [(each.what, each.gain) for each in plan.measured] == [("forward", 2.0), ("step", 2.0)]
    assert found.best is plan
    assert found.bounds == {"forward": pytest.approx(20 / 12), "step": pytest.approx(20 / 12)}
    assert all(isinstance(layer, nn.Conv2d) for layer in model), "the network is not changed"
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_layers_that_cannot_be_shared_say_why(clock):
    found = forward(convolutions())
    (refused,) = (layer for layer in found.layers if layer.note is not None)
    assert refused.names == ("2",)
    assert refused.note.startswith("'2' has 6 output channels, which 4 experts cannot share")
    assert refused.gain("forward") is None


def test_nothing_is_timed_whole_where_no_layer_gains(clock):
    clock["0"] = 4.0
    found = forward(convolutions())
    assert found.plans == ()
    assert found.best is None


def test_nothing_is_timed_whole_where_the_layers_are_a_small_part(clock):
    clock[""] = 1000.0
    (plan,) = forward(convolutions()).plans
    assert plan.estimated["forward"] == pytest.approx(1000 / 996)
    assert plan.measured == ()


def test_mlps_are_split_or_widened_and_blocks_skip(clock):
    found = forward(vit())
    assert {(layer.way, layer.names) for layer in found.layers} == {
        ("split", ("blocks.0.mlp", "blocks.1.mlp")),
        ("experts", ("blocks.0.mlp", "blocks.1.mlp")),
        ("skip", ("blocks.1",)),
    }
    plans = {plan.name: plan for plan in found.plans}
    assert plans["convert"].conversions == ({"layer": ["blocks.*.mlp"], "experts": 4, "capacity": 2, "init": "split"},)
    assert plans["skip"].conversions == ({"skip": ["every-2"], "keep": 0.5},)
    assert plans["experts"].conversions == ({"layer": ["blocks.*.mlp"], "experts": 4, "capacity": 1},)
    assert 0.6 < plans["convert"].macs < 0.8
    assert 0.7 < plans["skip"].macs < 0.9
    assert plans["experts"].macs == pytest.approx(1.0, abs=0.01)
    assert plans["experts"].parameters > 2.5
    assert plans["convert"].parameters == pytest.approx(1.0, abs=0.02)
    assert plans["experts"].measured == (), "it is not for speed"
    assert found.bounds["forward"] == pytest.approx(20 / 12)


def test_the_plans_are_conversions_of_a_specification(clock):
    (image_size,) = set(IMAGE[1:])
    arguments = {"num_classes": 2, "image_size": image_size, "depth": 2}
    for plan in forward(vit()).plans:
        model = ModelSpec("vit_tiny_patch4_32", arguments, plan.conversions).build()
        macs = moesaic.models.count_macs(model, IMAGE).macs / moesaic.models.count_macs(vit(), IMAGE).macs
        assert macs == pytest.approx(plan.macs, rel=1e-6)
        weights = sum(each.numel() for each in model.parameters()) / sum(each.numel() for each in vit().parameters())
        assert weights == pytest.approx(plan.parameters, rel=1e-6)


def test_experts_begin_with_trained_weights(clock):
    conversions = {plan.name: plan.conversions[0] for plan in forward(vit(), trained=True).plans}
    assert conversions["convert"]["init"] == "split"
    assert conversions["experts"]["init"] == "upcycle"
    (plan,) = forward(convolutions(), trained=True).plans
    assert plan.conversions[0]["init"] == "upcycle"


def test_the_fastest_plan_is_the_best(clock):
    clock["skip"] = 1.0
    assert forward(vit()).best.name == "skip"
    clock["skip"] = clock["convert"] = 4.0
    assert forward(vit()).best is None


def test_a_plan_is_faster_in_the_passes_in_which_it_was_measured(clock):
    found = advise(vit(), IMAGE, RoutingOptions(experts=4), batch_size=1)
    assert found.faster(found.plans[0]) == ("forward", "step")
    assert found.faster(found.plans[-1]) == (), "not measured"


def test_layers_get_what_they_get_in_the_network():
    timer = NetworkTimer(IMAGE, 3, ("forward",), 1)
    network = vit()
    inputs = timer._inputs(network, ["blocks.0.mlp", "blocks.1"])
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {
        "blocks.0.mlp": (3, 4, 192),
        "blocks.1": (3, 4, 192),
    }
    x = timer.images(network)
    with torch.no_grad():
        expected = network.eval().blocks[0](network.pos_embed + network.patch_embed(x))
    torch.testing.assert_close(inputs["blocks.1"], expected)


def test_a_step_of_a_layer_has_the_gradient_of_its_input(monkeypatch):
    inputs: list[torch.Tensor] = []
    run = NetworkTimer._run

    def record(self, what, model, x, *, compiled):
        inputs.append(x)
        return run(self, what, model, x, compiled=compiled)

    monkeypatch.setattr(NetworkTimer, "_run", record)
    advise(convolutions(), IMAGE, RoutingOptions(experts=4), batch_size=1, passes=["step"], repetitions=1)
    assert {x.grad is not None for x in inputs if x.requires_grad} == {True}
    assert any(not x.requires_grad for x in inputs), "images have none"


def test_patterns_match_the_layers_and_no_others(clock):
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)), nn.Conv2d(8, 2, 1))
    (plan,) = advise(model, (8, 8, 8), RoutingOptions(experts=4), batch_size=1, passes=["forward"]).plans
    assert plan.conversions[0]["layer"] == ["*.*"]
    model.insert(2, nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, stride=2)))
    (plan,) = advise(model, (8, 8, 8), RoutingOptions(experts=4), batch_size=1, passes=["forward"]).plans
    assert plan.conversions[0]["layer"] == ["0.0", "1.0"]


def test_routed_networks_are_for_bench_model():
    model = moesaic.convert(convolutions(), "1", experts=4, input_size=8)
    with pytest.raises(ValueError, match=r"^'1' is routed already; moesaic bench model"):
        advise(model, IMAGE)
    with pytest.raises(ValueError, match="has channel gates"):
        advise(nn.Sequential(moesaic.ChannelMoE(3, 8, 3)), IMAGE)


def test_a_bound_is_infinite_where_layers_take_all_of_the_time():
    assert amdahl(3.0, 4.0) == float("inf")


def test_layers_are_converted_together(clock, monkeypatch):
    """Each conversion runs the network three times, which is slow for a network of many shapes."""
    conversions = []

    def logged(model, layer, **options):
        conversions.append(layer)
        return convert(model, layer, **options)

    monkeypatch.setattr("moesaic.bench.advise.convert", logged)
    model = nn.Sequential(*[nn.Conv2d(C, C + 4, 3, padding=1) for C in range(4, 36, 4)])
    found = advise(model, (4, 8, 8), RoutingOptions(experts=4), batch_size=2, passes=["forward"])
    assert conversions[0] == [str(place) for place in range(8)]
    assert len(conversions) == 2, "once for the layers, once for the whole network"
    (plan,) = found.plans
    dense, routed = count_macs(model, (4, 8, 8)), count_macs(convert(model, "*", experts=4, input_size=8), (4, 8, 8))
    assert plan.macs == pytest.approx(routed.macs / dense.macs)
    assert plan.parameters == pytest.approx(routed.parameters / dense.parameters)


def test_a_layer_that_cannot_be_routed_leaves_the_others_as_they_are(clock):
    model = nn.Sequential(*[nn.Conv2d(C, C + 4, 3, padding=1) for C in (4, 8, 12)], nn.Conv2d(16, 6, 1))
    found = advise(model, (4, 8, 8), RoutingOptions(experts=4), batch_size=2, passes=["forward"])
    notes = {layer.names: layer.note for layer in found.layers}
    assert [notes[name,] for name in "012"] == [None] * 3
    assert notes["3",].startswith("'3' has 6 output channels")


def test_a_network_without_parameters_has_nothing_to_route():
    found = forward(nn.ReLU())
    assert (found.layers, found.plans, found.share) == ((), (), 0)
