"""Invariant 2: every backend equals ``reference`` in output, every gradient and every running statistic."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import BACKENDS, Case, PickyChoice, assert_same, cases, run

import moesaic
from moesaic.experts import MLPExperts
from moesaic.ops import PatchSpec

FAST = [name for name in BACKENDS if name != "reference"]
# an empty batch, with a background output
EMPTY = {
    "experts": 2, "width": 2, "patches_per_expert": 1, "patch_size": 1, "kernel_size": 3, "gate": "softmax_all",
    "gate_on": "input", "context": "map", "expert_norm": True, "combine": "concat", "bias": True,
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=150)
@given(case=cases(), training=st.booleans())
@example(case=Case((0, 2, 4, 4), EMPTY), training=False)
@example(case=Case((0, 2, 4, 4), EMPTY | {"kernel_size": 1, "patch_size": 2}), training=True)
def test_a_fast_backend_equals_the_reference(backend, device, case: Case, training):
    layer, x = case.build().train(training).to(device), case.map().to(device)
    assert_same(run(layer, x, backend, steps=2), run(layer, x, "reference", steps=2), tolerance=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(case=cases(batch=st.integers(0, 2), bias=True))
def test_low_precision_is_within_its_rounding_error_of_float64(backend, device, dtype, case: Case):
    exact, x = case.build().to(device), case.map().to(device)
    # the same numbers in both, so that all that differs is the arithmetic
    rounded = case.build().to(device, dtype)
    exact.load_state_dict(rounded.state_dict())
    x = x.to(dtype)
    with moesaic.record_routing(rounded) as low, moesaic.backend(backend):
        y = rounded(x)
    with moesaic.record_routing(exact) as high, moesaic.backend("reference"):
        expected = exact(x.double())
    if not torch.equal(low[""].mask, high[""].mask):
        return  # a near-tie fell the other way: scores are float32 in one and float64 in the other
    assert y.dtype == dtype
    scale = expected.abs().amax().clamp_min(1).item() if expected.numel() else 1
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=64 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("experts", [4, MLPExperts(4, 8, 16, 2, norm=True)], ids=["conv", "mlp"])
@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_autocast_applies_to_experts_and_not_to_routing(backend, experts):
    layer = moesaic.PatchMoE(8, 8, experts=experts, patches_per_expert=2, patch_size=2, expert_norm=True)
    x = torch.randn(2, 8, 6, 6)
    with moesaic.backend(backend), moesaic.record_routing(layer) as plain:
        expected = layer(x)
    with (
        moesaic.backend(backend),
        torch.autocast("cpu", torch.bfloat16),
        moesaic.record_routing(layer) as low,
    ):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(low[""].scores, plain[""].scores)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    y.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_statistics_of_a_low_precision_map_are_computed_in_float32(backend):
    layer = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=6, patch_size=2, expert_norm=True).bfloat16()
    layer.experts.norm.float()
    exact = copy.deepcopy(layer).double()
    x = (torch.randn(8, 4, 8, 8) + 3).bfloat16()
    with moesaic.backend(backend):
        layer(x)
    exact(x.double())
    torch.testing.assert_close(
        layer.experts.norm.running_var.double(), exact.experts.norm.running_var, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_autocast_does_not_change_float64(backend):
    layer = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=2, kernel_size=3, dtype=torch.float64)
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    with moesaic.backend(backend), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.clone()))
        assert layer(x).dtype == torch.float64


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("expert_norm", [False, True])
def test_a_dropped_patch_does_not_affect_gradients_even_if_it_is_nan(backend, expert_norm):
    router = PickyChoice(2, 2, 4, 2)
    layer = moesaic.PatchMoE(2, 4, experts=2, kernel_size=3, router=router, expert_norm=expert_norm)
    x = torch.randn(1, 2, 4, 4)
    routing = router(x)
    wanted = torch.tensor([[[1, 2, -1, -1], [2, -1, -1, -1]]])  # patch 0 is unassigned
    routing = replace(routing, index=wanted, gate=torch.ones(1, 2, 4) * (wanted >= 0))
    x[:, :, :2, :2] = torch.nan
    with moesaic.backend(backend):
        y = layer.experts(x, routing, PatchSpec(2, "output", "map", "concat"))
    y.sum().backward()
    assert y.isfinite().all()
    assert layer.experts.weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_a_soft_routing_runs_in_low_precision(backend):
    router = moesaic.SoftRouter(4, 2, 2, 2)
    layer = moesaic.PatchMoE(4, 4, experts=2, router=router).bfloat16()
    x = torch.randn(2, 4, 4, 4).bfloat16()
    with moesaic.backend(backend):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), copy.deepcopy(layer).double()(x.double()), rtol=0.05, atol=0.05)


def test_a_soft_routing_equals_its_definition_on_every_backend():
    E, S, p = 3, 2, 2
    for combine, out in (("concat", 6), ("sum", 2)):
        layer = moesaic.PatchMoE(
            4,
            out,
            experts=E,
            kernel_size=3,
            context="patch",
            combine=combine,
            router=moesaic.SoftRouter(4, E, S, p, dtype=torch.float64),
            dtype=torch.float64,
        )
        x = torch.randn(2, 4, 4, 6, dtype=torch.float64)
        routing = layer.route(x)
        patches = x.view(2, 4, 2, p, 3, p).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        expected = torch.zeros(2, 6, out, p, p, dtype=torch.float64)
        for e in range(E):
            channels = slice(2 * e, 2 * e + 2) if combine == "concat" else slice(None)
            for s in range(S):
                slot = torch.einsum("bn,bncij->bcij", routing.dispatch[:, :, e, s], patches)
                output = torch.nn.functional.conv2d(slot, layer.experts.weight[e], layer.experts.bias[e], padding=1)
                expected[:, :, channels] += routing.gate[:, :, e, s, None, None, None] * output[:, None]
        expected = expected.view(2, 2, 3, out, p, p).permute(0, 3, 1, 4, 2, 5).reshape(2, out, 4, 6)
        for backend in ("reference", *FAST):
            with moesaic.backend(backend):
                torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
