"""Heads that are computed together give what they give one by one, gradients included."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16
from moesaic.ops.channel.joint_routing import JointRouting
from moesaic.ops.channel.masked import channel_gates
from moesaic.routing.channel_gate import ChannelGate, gate_l1, gate_l1_of_layers
from moesaic.routing.joint_channel_gates import route_channels
from moesaic.routing_record import Routing

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": None},
    {"mode": "topk", "keep": 2},
    {"mode": "topk", "keep": 2, "straight_through": True},
    {"mode": "topk", "keep": 1, "bias": None},
    {"mode": "hard"},
]
SIZES = [(8, 4), (8, 4), (10, 4), (12, 1), (6, 3)]


def some_heads(**options: Any) -> list[ChannelGate]:
    torch.manual_seed(0)
    heads = [ChannelGate(5, channels, block=block, dtype=torch.float64, **options) for channels, block in SIZES]
    for head in heads:
        nn.init.normal_(head.weight)
        if head.bias is not None:
            nn.init.normal_(head.bias)
    return heads


def separate(heads: list[ChannelGate], embedding: Tensor, dtype: torch.dtype) -> list[Routing]:
    return [head(embedding) for head in heads]


def everything(route, heads: list[ChannelGate], embedding: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What routings say, and gradients of all that has one."""
    torch.manual_seed(1)
    routings = route(heads, embedding, torch.float64)
    values = [value for each in routings for value in (each.scores, each.gate, each.weights)]
    values += [channel_gates(each, *size) for each, size in zip(routings, SIZES, strict=True)]
    chosen = [value for each in routings for value in (each.index, each.mask)]
    leaves = [embedding, *(parameter for head in heads for parameter in head.parameters())]
    loss = sum((value * torch.randn_like(value)).sum() for value in values)
    return [*values, *torch.autograd.grad(loss, leaves)], chosen


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_together_heads_give_what_they_give_alone(options, training, noise):
    heads = some_heads(**options)
    for head in heads:
        head.train(training).noise = noise
    embedding = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    found, chosen = everything(route_channels, heads, embedding)
    expected, expected_chosen = everything(separate, heads, embedding)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    for mine, right in zip(chosen, expected_chosen, strict=True):
        assert torch.equal(mine, right)


def test_a_head_that_something_watches_is_called():
    heads = some_heads()
    seen: list[Routing] = []
    handle = heads[1].register_forward_hook(lambda module, args, routing: seen.append(routing))
    routings = route_channels(heads, torch.randn(2, 5, dtype=torch.float64), torch.float64)
    assert routings[1] is seen[0]
    handle.remove()
    assert all(isinstance(each, JointRouting) for each in route_channels(heads, torch.randn(2, 5), torch.float32))


def test_gates_come_in_the_dtype_of_the_map_and_a_detached_record_shares_nothing():
    routing = route_channels(some_heads(), torch.randn(2, 5, dtype=torch.float64), torch.bfloat16)[0]
    assert channel_gates(routing, 8, 4).dtype == torch.bfloat16
    assert routing.weights.dtype == torch.float64
    assert type(routing.detach()) is Routing
    torch.testing.assert_close(routing.detach().weights, routing.weights)


def test_the_penalties_of_layers_are_those_of_each():
    routings = route_channels(some_heads(), torch.randn(3, 5, dtype=torch.float64), torch.float64)
    expected = torch.stack([gate_l1(each) for each in routings])
    torch.testing.assert_close(gate_l1_of_layers(routings), expected, rtol=1e-12, atol=0)
    other = moesaic.Routing("patch", torch.zeros(1, 2, 1), torch.tensor([[[0]]]), torch.ones(1, 1, 1), "expert")
    for wrong in ([other], [other, other]):
        with pytest.raises(ValueError, match="gate_l1: takes the routing of channels, got that of a patch"):
            gate_l1_of_layers(wrong)


def gradients(model: DeepMoE, x: Tensor) -> list[Tensor]:
    output = model.forward_with_routing(x)
    loss = output.logits.square().sum() + output.embedding_logits.sum()
    loss = loss + gate_l1_of_layers(list(output.routing.values())).sum()
    return [output.logits, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("options", [{}, {"mode": "topk", "keep": 0.5}], ids=str)
def test_a_training_step_equals_one_with_separate_heads(options, monkeypatch):
    torch.manual_seed(0)
    model = deepmoe(VGG16(4, width=0.125), num_classes=4, block=4, **options).double().train()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    found = gradients(copy.deepcopy(model), x)
    monkeypatch.setattr(importlib.import_module("moesaic.models.deepmoe.network"), "route_channels", separate)
    for mine, right in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
