"""The routed convolution as ONNX files have it equals the definition."""

import itertools

import pytest
import torch

import moesaic
from moesaic.ops.patch.onnx_conv import can_run_onnx_conv, onnx_conv
from moesaic.ops.reference_backend import ReferenceBackend


def layer_with(expert_norm: bool = True, **options) -> moesaic.PatchMoE:
    """A layer with gates on its input whose norm has a background, as after training."""
    options = {"patch_size": 2, "kernel_size": 3} | options
    layer = moesaic.PatchMoE(
        6, 8, experts=4, patches_per_expert=3, gate_on="input", expert_norm=expert_norm, dtype=torch.float64, **options
    ).eval()
    if layer.experts.norm is not None:
        for name, tensor in layer.experts.norm.state_dict().items():
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.5).sub_(0.0 if name.endswith("var") else 0.7)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("expert_norm", "context", "combine", "sizes", "bias"),
    [*itertools.product((True, False), ("map", "patch"), ("concat", "sum"), ((2, 3), (1, 1), (3, 5)), (True, False))],
)
def test_it_equals_the_definition(batch, expert_norm, context, combine, sizes, bias):
    layer = layer_with(
        expert_norm, context=context, combine=combine, patch_size=sizes[0], kernel_size=sizes[1], bias=bias
    )
    x = torch.randn(batch, 6, 6, 12, dtype=torch.float64)
    routing, weights, norm = layer.route(x), layer.experts.weights, layer.experts.norm_tensors(x)
    expected = ReferenceBackend().conv(x, routing, weights, norm, layer.spec)
    torch.testing.assert_close(onnx_conv(x, routing, weights, norm, layer.spec), expected, rtol=1e-10, atol=1e-10)


def test_it_runs_in_onnx_files_alone(monkeypatch):
    layer, x = layer_with(), torch.randn(1, 6, 4, 4, dtype=torch.float64)
    routing, norm = layer.route(x), layer.experts.norm_tensors(x)
    assert not can_run_onnx_conv(routing, norm, layer.spec)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert can_run_onnx_conv(routing, norm, layer.spec)
    assert not can_run_onnx_conv(routing, layer.train().experts.norm_tensors(x), layer.spec), "statistics of a batch"
    gated_output = moesaic.PatchMoE(6, 8, experts=4, patches_per_expert=3, patch_size=2)
    assert not can_run_onnx_conv(routing, None, gated_output.spec)
    by_patches = moesaic.TokenChoice(6, 4, 1, 2, dtype=torch.float64)(x)
    assert not can_run_onnx_conv(by_patches, norm, layer.spec)
