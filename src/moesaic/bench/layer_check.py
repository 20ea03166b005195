"""Is a routed layer right on this machine? Its output and every gradient against the reference in float64.

Inputs are drawn afresh, and memory that the layer may be given is filled with NaN before, so that what a kernel leaves
unwritten shows. An error is ‖found − true‖ / ‖true‖.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from moesaic.bench.layer_shape import Form, RoutedShape, random_maps, routed_layer
from moesaic.layers import PatchMoE
from moesaic.ops import backend

__all__ = ["TOLERANCE", "layer_errors", "poison"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""By dtype. That of float32 leaves room for TF32, which GPUs may use."""
_DRAWS = 5
_ZERO = 1e-3
"""A gradient that is smaller than this, on average, counts as one of this size: it may be zero."""


def layer_errors(
    shape: RoutedShape, form: Form, names: Iterable[str], device: str, dtype: torch.dtype, seed: int = 0
) -> dict[str, dict[str, float]]:
    """For each backend, the error of the output and of every gradient, in training.

    Rounding may swap two patches whose scores are nearly the same. Such inputs are drawn again.

    >>> shape = RoutedShape(2, 4, 4, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> errors = layer_errors(shape, Form(), ["torch"], "cpu", torch.float64)
    >>> list(errors["torch"])
    ['output', 'map', 'experts.weight', 'experts.bias', 'router.weight']
    >>> max(errors["torch"].values()) < 1e-12
    True
    """
    names = list(names)
    for attempt in range(_DRAWS):
        torch.default_generator.manual_seed(seed + attempt)
        layer = routed_layer(shape, form).to(device, dtype)
        x, wanted = random_maps(shape, device, dtype, torch.channels_last, seed + attempt)
        exact = copy.deepcopy(layer).double()
        if all(_same_choice(layer, exact, x, name) for name in names):
            break
    else:
        raise RuntimeError(f"routing differs from that in float64 in each of {_DRAWS} draws: {shape}")
    with backend("reference"):
        true = _results(exact, x.double(), wanted.double())
    errors: dict[str, dict[str, float]] = {}
    for name in names:
        poison(device)
        with backend(name):
            found = _results(copy.deepcopy(layer), x, wanted)
        errors[name] = {key: _error(found[key], true[key]) for key in true}
    return errors


def poison(device: str) -> None:
    """Fill memory that is given out next with NaN: blocks of all sizes are taken, filled and given back."""
    largest = 26 if torch.device(device).type == "cuda" else 20
    blocks = [
        torch.full((2**power // 4,), math.nan, dtype=torch.float32, device=device)
        for power in range(9, largest)
        for _ in range(4)
    ]
    del blocks


@torch.no_grad()
def _same_choice(layer: PatchMoE, exact: PatchMoE, x: Tensor, name: str) -> bool:
    with backend(name):
        chosen = layer.route(x).index
    with backend("reference"):
        true = exact.route(x.double()).index
    assert chosen is not None and true is not None  # experts choose here
    return bool((chosen.sort(-1).values == true.sort(-1).values).all())


def _results(layer: PatchMoE, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(wanted)
    found: dict[str, Tensor | None] = {"output": y.detach(), "map": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: torch.zeros((), device=x.device) if value is None else value for name, value in found.items()}


def _error(found: Tensor, true: Tensor) -> float:
    return _norm(found.double() - true) / max(_norm(true), _ZERO * math.sqrt(true.numel()))


def _norm(values: Tensor) -> float:
    return math.sqrt(float(values.square().sum()))
