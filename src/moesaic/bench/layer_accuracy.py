"""Numerical accuracy of a routed layer: output and all gradients against the reference in float64.

Free memory is filled with NaN before each run, so that elements that a kernel does not write are noticed. The error
is ‖found − expected‖ / ‖expected‖.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from moesaic.bench.layer_shape import LayerOptions, LayerShape, random_inputs, routed_layer
from moesaic.layers import PatchMoE
from moesaic.ops import backend

__all__ = ["TOLERANCE", "layer_errors", "poison"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Largest error by dtype; that of float32 allows for TF32."""
_MAX_ATTEMPTS = 5
_MIN_MAGNITUDE = 1e-3
"""Lower bound of the mean magnitude of a gradient, as it may be zero."""


def layer_errors(
    shape: LayerShape, options: LayerOptions, names: Iterable[str], device: str, dtype: torch.dtype, seed: int = 0
) -> dict[str, dict[str, float]]:
    """For each backend, the error of the output and of every gradient in training mode.

    If rounding changes the selected patches, other inputs are drawn.

    >>> shape = LayerShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> errors = layer_errors(shape, LayerOptions(), ["torch"], "cpu", torch.float64)
    >>> list(errors["torch"])
    ['output', 'map', 'experts.weight', 'experts.bias', 'router.weight']
    >>> max(errors["torch"].values()) < 1e-12
    True
    """
    names = list(names)
    for attempt in range(_MAX_ATTEMPTS):
        torch.default_generator.manual_seed(seed + attempt)
        layer = routed_layer(shape, options).to(device, dtype)
        x, grad_output = random_inputs(shape, device, dtype, torch.channels_last, seed + attempt)
        reference = copy.deepcopy(layer).double()
        if all(_same_selection(layer, reference, x, name) for name in names):
            break
    else:
        raise RuntimeError(f"the routing differs from float64 in each of {_MAX_ATTEMPTS} attempts: {shape}")
    with backend("reference"):
        expected = _results(reference, x.double(), grad_output.double())
    errors: dict[str, dict[str, float]] = {}
    for name in names:
        poison(device)
        with backend(name):
            found = _results(copy.deepcopy(layer), x, grad_output)
        errors[name] = {key: _error(found[key], expected[key]) for key in expected}
    return errors


def poison(device: str) -> None:
    """Fills free memory with NaN: allocates blocks of all sizes, fills and frees them."""
    largest = 26 if torch.device(device).type == "cuda" else 20
    blocks = [
        torch.full((2**power // 4,), math.nan, dtype=torch.float32, device=device)
        for power in range(9, largest)
        for _ in range(4)
    ]
    del blocks


@torch.no_grad()
def _same_selection(layer: PatchMoE, reference: PatchMoE, x: Tensor, name: str) -> bool:
    with backend(name):
        found = layer.route(x).index
    with backend("reference"):
        expected = reference.route(x.double()).index
    assert found is not None and expected is not None  # experts choose here
    return bool((found.sort(-1).values == expected.sort(-1).values).all())


def _results(layer: PatchMoE, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(grad_output)
    found: dict[str, Tensor | None] = {"output": y.detach(), "map": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: torch.zeros((), device=x.device) if value is None else value for name, value in found.items()}


def _error(found: Tensor, expected: Tensor) -> float:
    wrong, right = (float(values.square().sum().sqrt()) for values in (found.double() - expected, expected))
    return wrong / max(right, _MIN_MAGNITUDE * math.sqrt(expected.numel()))
