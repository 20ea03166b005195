"""``pooled_head``: a routed layer, BatchNorm, ReLU and the mean over the map."""

import copy

import pytest
import torch
from torch import nn

import moesaic
from moesaic.experts import MLPExperts
from moesaic.models.wide_resnet.pooled_head import pooled_head

OPTIONS = {
    "plain": {"patches_per_expert": 2, "patch_size": 2, "kernel_size": 3},
    "gate on the input": {"patches_per_expert": 3, "patch_size": 2, "gate_on": "input", "expert_norm": True},
    "summed": {"patches_per_expert": 2, "patch_size": 4, "combine": "sum"},
    "MLPs": {"patches_per_expert": 2, "patch_size": 2},
    "soft": {"context": "patch", "patch_size": 2},
}
NORMS = {
    "BatchNorm": {},
    "an average of all batches": {"momentum": None},
    "no weights": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


def run_step(layer, norm, means):
    """The means, gradients and buffers after a backward pass."""
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = means(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    modules = nn.ModuleList([layer, norm])
    gradients = {name: weight.grad for name, weight in modules.named_parameters()}
    return {"means": y.detach(), "x": x.grad} | gradients | {f"now {k}": v for k, v in modules.named_buffers()}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_equals_layer_norm_relu_and_mean(options, norm, training, backend):
    torch.manual_seed(0)
    experts = MLPExperts(3, 4, 5, 2) if options == "MLPs" else 3
    router = moesaic.SoftRouter(4, 3, 2, patch_size=2) if options == "soft" else None
    layer = moesaic.PatchMoE(4, 6, experts=experts, router=router, **OPTIONS[options]).double().train(training)
    after = nn.BatchNorm2d(6, **NORMS[norm]).double().train(training)
    other_layer, other_after = copy.deepcopy(layer), copy.deepcopy(after)
    with moesaic.backend(backend):
        got = run_step(layer, after, lambda x: pooled_head(layer, x, after))
        expected = run_step(other_layer, other_after, lambda x: other_after(other_layer(x)).relu().mean((2, 3)))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_routing_hooks_are_called():
    layer = moesaic.PatchMoE(4, 6, experts=3, patches_per_expert=2, patch_size=2)
    with moesaic.record_routing(layer) as routing:
        pooled_head(layer, torch.randn(2, 4, 8, 8), nn.BatchNorm2d(6))
    assert routing[""].index.shape == (2, 3, 2)


def test_under_autocast_means_are_narrow():
    layer, norm = moesaic.PatchMoE(4, 6, experts=3, patches_per_expert=2, patch_size=2), nn.BatchNorm2d(6)
    x = torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        means, expected = pooled_head(layer, x, norm.eval()), norm(layer(x)).relu().mean((2, 3))
    assert means.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(means, expected)


def test_a_map_that_does_not_fit_is_refused_as_by_the_layer():
    layer = moesaic.PatchMoE(4, 6, experts=3, patches_per_expert=2, patch_size=2)
    with pytest.raises(ValueError, match="not divisible into 2×2 patches"):
        pooled_head(layer, torch.randn(2, 4, 7, 7), nn.BatchNorm2d(6))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", ["plain", "gate on the input", "summed"])
@torch.no_grad()
def test_in_onnx_files_it_equals_layer_norm_relu_and_mean(options, bias, monkeypatch):
    layer = moesaic.PatchMoE(4, 6, experts=3, bias=bias, **OPTIONS[options]).double().eval()
    after, x = nn.BatchNorm2d(6).double().eval(), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    for tensor in (after.weight, after.bias, after.running_mean, after.running_var):
        tensor.uniform_(0.2, 2)
    expected = after(layer(x)).relu().mean((2, 3))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr(after, "forward", lambda x: pytest.fail("the norm is not a module of its own"))
    torch.testing.assert_close(pooled_head(layer, x, after), expected, rtol=1e-10, atol=1e-10)
