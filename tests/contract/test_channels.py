"""Invariants 2 and 3 for gated channels: every backend and the frozen layer equal the definition."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BACKENDS
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import moesaic
from moesaic.layers import channel_moe
from moesaic.layers.channel_moe import ChannelMoE
from moesaic.ops.channel import costs, masked
from moesaic.ops.channel.costs import ConvCosts, UnitCosts
from moesaic.ops.channel.gathered_conv import open_conv
from moesaic.routing.channel_gate import ChannelGate

FREE = UnitCosts(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0)
UNIT_COSTS = {"gathered": FREE, "dense": replace(FREE, copy=1e30), "measured": costs.CPU_COSTS}
"""Unit costs under which weights are always gathered, or never; and the real ones."""


@pytest.fixture(params=list(UNIT_COSTS))
def execution(request, monkeypatch) -> str:
    monkeypatch.setattr(costs, "CPU_COSTS", UNIT_COSTS[request.param])
    return request.param


def closed_or_open(blocks: int) -> st.SearchStrategy[list[float]]:
    some = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=blocks, max_size=blocks)
    return some | st.just([-1.0] * blocks) | st.just([1.0] * blocks)


@dataclass
class Case:
    """A layer, a map that is zero in closed channels, and the gates of both."""

    layer: ChannelMoE
    x: Tensor
    gate_out: moesaic.Routing
    gate_in: moesaic.Routing | None

    def definition(self) -> Tensor:
        """Written as the paper's sum over channels, without any of the library."""
        y = F.conv2d(self.x, self.layer.conv.weight, self.layer.conv.bias, self.layer.stride, self.layer.padding)
        norm = self.layer.norm
        if norm is not None:
            mean, var = norm.running_mean, norm.running_var
            if norm.training:
                mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
            y = (y - mean[:, None, None]) / (var + norm.eps).sqrt()[:, None, None]
            y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
        if self.layer.activation == "relu":
            y = y.clamp(min=0)
        parts = []
        for channel in range(y.shape[1]):
            gate = self.gate_out.scores[:, 0, channel // self.layer.block].clamp(min=0).to(y.dtype)
            parts.append(y[:, channel] * gate[:, None, None])
        return torch.stack(parts, 1)

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(self.layer.to(dtype), self.x.to(dtype), self.gate_out, self.gate_in)


def build(
    gates_out: list[list[float]],
    gates_in: list[list[float]] | None,
    size: tuple[int, int] = (5, 6),
    channels_out: int = 7,
    channels_in: int = 5,
    seed: int = 0,
    **options: Any,
) -> Case:
    torch.manual_seed(seed)
    layer = ChannelMoE(channels_in, channels_out, options.pop("kernel_size", 3), dtype=torch.float64, **options).eval()
    if layer.norm is not None:
        for values in (layer.norm.weight, layer.norm.bias, layer.norm.running_mean):
            torch.nn.init.normal_(values)
        torch.nn.init.uniform_(layer.norm.running_var, 0.5, 2)
    x = torch.randn(len(gates_out), channels_in, *size, dtype=torch.float64)

    def routing(gates: list[list[float]], width: int, block: int) -> moesaic.Routing:
        gate = ChannelGate(1, width, block=block)
        return gate.choose(torch.tensor(gates, dtype=torch.float64).view(-1, gate.blocks))

    gate_out, gate_in = routing(gates_out, channels_out, layer.block), None
    if gates_in is not None:
        gate_in = routing(gates_in, channels_in, layer.block_in)
        x = x * masked.open_channels(gate_in, channels_in, layer.block_in)[:, :, None, None]
    return Case(layer, x, gate_out, gate_in)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, block, block_in = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    out, ins = draw(st.integers(block, 9)), draw(st.integers(block_in, 6))
    few = draw(st.lists(closed_or_open(-(-out // block)), min_size=1, max_size=3))
    few_in = draw(st.lists(closed_or_open(-(-ins // block_in)), min_size=1, max_size=3))
    patterns = st.lists(st.sampled_from(few), min_size=batch, max_size=batch)
    patterns_in = st.lists(st.sampled_from(few_in), min_size=batch, max_size=batch)
    kernel = draw(st.sampled_from([1, 2, 3]))
    return build(
        draw(patterns),
        draw(st.none() | patterns_in),
        size=draw(st.sampled_from([(3, 3), (4, 7), (1, 2)])),
        channels_out=out,
        channels_in=ins,
        kernel_size=kernel,
        stride=draw(st.integers(1, 2)),
        padding="same" if kernel != 2 else 1,
        norm=draw(st.booleans()),
        activation=draw(st.sampled_from(["relu", "identity"])),
        bias=draw(st.booleans()),
        block=block,
        block_in=block_in,
    )


@torch.no_grad()
def run(case: Case, backend: str) -> Tensor:
    with moesaic.backend(backend):
        return case.layer(case.x, case.gate_out, case.gate_in)


def run_frozen(case: Case) -> Tensor:
    return moesaic.freeze(case.layer)(case.x, case.gate_out, case.gate_in)


@pytest.mark.parametrize("chosen", UNIT_COSTS)
@settings(max_examples=40)
@given(case=cases())
def test_a_frozen_layer_equals_the_definition_for_every_pattern(chosen, case: Case):
    measured = costs.CPU_COSTS
    costs.CPU_COSTS = UNIT_COSTS[chosen]
    try:
        y = run_frozen(case)
    finally:
        costs.CPU_COSTS = measured
    with torch.no_grad():
        torch.testing.assert_close(y, case.definition(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y, run(case, "reference"), rtol=1e-10, atol=1e-10)


PATTERNS = [[1.0, -1.0, 0.5, 2.0], [1.0, -1.0, 0.5, -1.0], [-1.0] * 4, [0.1, 0.2, 0.3, 0.4]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_every_backend_and_the_frozen_layer_equal_the_definition_in_eval(batch, stride, dtype, tolerance, execution):
    for first in range(4):
        out = [PATTERNS[(first + b) % 4] for b in range(batch)]
        ins = [PATTERNS[(first + b * 2) % 4] for b in range(batch)]
        case = build(out, ins, channels_out=31, channels_in=29, block=8, stride=stride).to(dtype)
        with torch.no_grad():
            expected = case.definition()
        for backend in BACKENDS:
            torch.testing.assert_close(run(case, backend), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(run_frozen(case), expected, rtol=tolerance, atol=tolerance)


def test_a_layer_that_is_closed_for_a_sample_is_zero_there_and_only_there(execution):
    y = run_frozen(build([[-1.0] * 7, [1.0] * 7], None))
    assert not y[0].any()
    assert y[1].any()
    assert not run_frozen(build([[-1.0] * 7], None)).any()


def test_the_output_of_a_layer_whose_input_is_closed_is_its_shift(execution):
    case = build([[1.0] * 7], [[-1.0] * 5])
    with torch.no_grad():
        torch.testing.assert_close(run_frozen(case), case.definition())
    assert run_frozen(case).any()


def test_closed_channels_are_exactly_zero_in_training_too():
    case = build([[1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0]] * 3, None, activation="identity")
    y = case.layer.train()(case.x, case.gate_out)
    assert y.flatten(2).any(2).tolist() == [[True, False, True, True, False, True, True]] * 3


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"norm": False, "bias": True, "stride": 2}, {"activation": "identity"}])
def test_gradients_are_those_of_the_definition(backend, training, options):
    gates = [[1.0, -1.0, 0.5, 2.0], [-1.0] * 4, [0.5, 0.5, -1.0, -1.0]]
    case = build(gates, [row[:3] for row in gates], block=2, **options)
    scores = case.gate_out.scores[:, 0].clone().requires_grad_()
    case.gate_out = ChannelGate(1, 7, block=2).choose(scores)
    case.layer.train(training)
    case.x.requires_grad_()
    learned = [scores, case.x, *case.layer.parameters()]
    towards = torch.randn(3, 7, *case.layer.map_size(5, 6), dtype=torch.float64)

    def gradients(y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((y * towards).sum(), learned))

    expected = gradients(case.definition())
    with moesaic.backend(backend):
        found = gradients(case.layer(case.x, case.gate_out, case.gate_in))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_running_statistics_are_those_of_batch_norm():
    case = build([[1.0] * 7, [-1.0] * 7, [1.0] * 7], None)
    plain = torch.nn.BatchNorm2d(7, dtype=torch.float64)
    plain.load_state_dict(case.layer.norm.state_dict())
    case.layer.train()(case.x, case.gate_out)
    plain(case.layer.conv(case.x))
    for name, values in plain.state_dict().items():
        torch.testing.assert_close(case.layer.norm.state_dict()[name], values)


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_memory_format_changes_nothing_and_is_preserved(batch, weights_too, execution):
    case = build((PATTERNS * 2)[:batch], (PATTERNS * 2)[1 : batch + 1], channels_out=8, channels_in=8, block=2)
    expected = run_frozen(case)
    assert expected.is_contiguous()
    case.x = case.x.contiguous(memory_format=torch.channels_last)
    if weights_too:
        case.layer.to(memory_format=torch.channels_last)
    for y in (run_frozen(case), run(case, "torch")):
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_a_sample_does_not_depend_on_its_batch_mates(execution):
    case = build(PATTERNS, PATTERNS, channels_out=8, channels_in=8, block=2)
    y = run_frozen(case)
    for b in range(4):
        alone = build(PATTERNS[b : b + 1], PATTERNS[b : b + 1], channels_out=8, channels_in=8, block=2)
        alone.x = case.x[b : b + 1]
        torch.testing.assert_close(run_frozen(alone), y[b : b + 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_computes_in_bfloat16(backend):
    case = build(PATTERNS, PATTERNS, channels_out=8, channels_in=8, block=2).to(torch.float32)
    expected = run(case, backend)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(case, backend)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.1)


def convolutions(case: Case, monkeypatch) -> list[tuple[int, list[int], list[int]]]:
    """The batch size, open inputs and open outputs of each convolution that a frozen layer runs."""
    seen: list[tuple[int, list[int], list[int]]] = []

    def recorded(x: Tensor, conv: Any, ins: Any, outs: Any) -> Tensor:
        seen.append((len(x), ins.index.tolist(), outs.index.tolist()))
        return open_conv(x, conv, ins, outs)

    monkeypatch.setattr(channel_moe, "open_conv", recorded)
    y = run_frozen(case)
    with torch.no_grad():
        torch.testing.assert_close(y, case.definition(), rtol=1e-10, atol=1e-10)
    return seen


def test_samples_that_open_the_same_channels_run_together(monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    half, other = [1.0] * 4 + [-1.0] * 3, [-1.0] * 4 + [1.0] * 3
    every = list(range(5))
    assert convolutions(build([half, other, half], None), monkeypatch) == [
        (2, every, [0, 1, 2, 3]),
        (1, every, [4, 5, 6]),
    ]


def test_samples_that_open_the_same_outputs_of_different_inputs_run_apart(monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    half, other = [1.0] * 4 + [-1.0] * 3, [-1.0] * 4 + [1.0] * 3
    first, last = [1.0, 1.0, -1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, 1.0, 1.0]
    case = build([half, other, half], [first, first, last])
    assert convolutions(case, monkeypatch) == [
        (1, [0, 1], [0, 1, 2, 3]),
        (1, [0, 1], [4, 5, 6]),
        (1, [3, 4], [0, 1, 2, 3]),
    ]


def test_samples_run_together_with_every_channel_that_any_opens_where_that_is_cheaper(monkeypatch):
    case = build([[1.0] * 2 + [-1.0] * 5, [-1.0, 1.0, 1.0] + [-1.0] * 4], None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(costs, "CPU_COSTS", replace(FREE, call=9e3))
    assert convolutions(case, monkeypatch) == [(2, list(range(5)), [0, 1, 2])]


@pytest.mark.parametrize(
    ("width", "side", "share", "block", "cheapest"),
    [
        (128, 16, 0.5, 1, "gathered"),
        (512, 2, 0.25, 1, "gathered"),
        (512, 2, 0.625, 1, "dense"),  # to gather single channels costs more than to read all weights
        (512, 2, 0.625, 64, "gathered"),
        (512, 2, 1.0, 64, "dense"),
    ],
)
def test_the_cheapest_execution_depends_on_map_gates_and_block(width, side, share, block, cheapest, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    conv = ChannelMoE(width, width, 3, block=block).weights()
    opened = int(width * share)
    assert ConvCosts.of(conv, side * side).cheapest(opened, opened)[0] == cheapest


def test_the_work_done_is_that_of_open_channels(monkeypatch):
    monkeypatch.setattr(costs, "CPU_COSTS", FREE)
    case = build(PATTERNS, PATTERNS, channels_out=8, channels_in=8, block=2)
    with FlopCounterMode(display=False) as counter:
        run_frozen(case)
    counted = case.layer.macs(5, 6, case.gate_out, case.gate_in)
    assert counted.tolist() == [6 * 6 * 9 * 30, 4 * 4 * 9 * 30, 0, 8 * 8 * 9 * 30]
    assert counter.get_total_flops() == 2 * int(counted.sum())


def test_the_reference_refuses_a_map_that_is_not_zero_where_it_is_said_to_be():
    case = build([[1.0] * 7] * 2, [[1.0] * 5, [1.0, 1.0, -1.0, 1.0, 1.0]])
    case.x[1, 2, 0, 0] = 1
    with pytest.raises(ValueError, match="channel 2 of sample 1 is not zero, but gate_in says that it is closed"):
        run(case, "reference")
