"""How much of the image a patch of a deep map has seen.

A patch is a square of the map in front of a routed layer, and is drawn as the square of the image
that lies under it. But the layers before have mixed neighbouring pixels into it, so it knows more
than that square. Both the reach and its weight are measured, by the gradient of the patch with
respect to the image; so they hold for any network, whatever its layers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice
from moesaic.layers.recording import RoutedLayer, routed_layers, routing_hook
from moesaic.routing_record import Routing

__all__ = ["Field", "receptive_field"]


@dataclass(frozen=True)
class Field:
    """What the middle patch of a map depends on; made by `receptive_field`."""

    patch: tuple[float, float]
    """Height and width of the square under the patch, in pixels of the image."""
    beyond: int
    """How many pixels it sees beyond the square, in the direction in which it sees farthest."""
    whole: bool
    """Whether it sees all of the image."""
    own: float
    """The share of its dependence, as squared gradient, that lies on its own square; 1: it sees nothing else."""


def receptive_field(model: nn.Module, layer: str, images: Tensor) -> Field | None:
    """Measure the receptive field of the patches that the routed layer of this name gets.

    ``images`` (B, C, H, W) are as the model takes them; a few are enough. None where what is routed
    has no place on the image, or what arrives does not depend on it.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), moe)
    >>> field = receptive_field(model, "1", torch.rand(2, 3, 16, 16))
    >>> field.patch, field.beyond, field.whole                           # a 5×5 kernel reaches 2 pixels further
    ((4.0, 4.0), 2, False)
    """
    layers = routed_layers(model)
    seen: list[Tensor] = []
    grids: list[tuple[int, int] | None] = []

    def keep_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    def keep_grid(name: str, module: RoutedLayer, routing: Routing) -> None:
        if name == layer:
            grids.append(routing.grid)

    # the router's input is the map (B, C, H, W), also where that of the layer has its channels elsewhere
    router = cast("nn.Module", layers[check_choice("receptive_field", "layer", layer, tuple(layers))].router)
    hook = router.register_forward_pre_hook(keep_input)
    training = model.training
    try:
        model.eval()
        with torch.enable_grad(), routing_hook(model, keep_grid):
            x = images.detach().clone().requires_grad_()
            model(x)
            return _measured(x, seen[-1], grids[-1]) if seen and grids else None
    finally:
        model.train(training)
        hook.remove()


def _measured(x: Tensor, features: Tensor, grid: tuple[int, int] | None) -> Field | None:
    if grid is None or features.ndim != 4 or not features.requires_grad:
        return None
    (H, W), (rows, columns) = x.shape[2:], grid
    row, column = rows // 2, columns // 2
    h, w = features.shape[2] // rows, features.shape[3] // columns
    patch = features[:, :, row * h : (row + 1) * h, column * w : (column + 1) * w]
    # a random direction, so that no two channels cancel
    weight = torch.randn(patch.shape, generator=torch.Generator().manual_seed(0)).to(patch)
    (gradient,) = torch.autograd.grad((patch * weight).sum(), x, materialize_grads=True)
    power_HW = gradient.double().square().sum((0, 1)).cpu()
    touched = power_HW.nonzero()
    if not len(touched):
        return None
    (low_y, low_x), (high_y, high_x) = _pair(touched.min(0).values), _pair(touched.max(0).values + 1)
    top, left = round(row * H / rows), round(column * W / columns)
    bottom, right = round((row + 1) * H / rows), round((column + 1) * W / columns)
    own = power_HW[top:bottom, left:right].sum() / power_HW.sum()
    return Field(
        patch=(H / rows, W / columns),
        beyond=max(0, top - low_y, left - low_x, high_y - bottom, high_x - right),
        whole=(low_y, low_x, high_y, high_x) == (0, 0, H, W),
        own=float(own),
    )


def _pair(values: Tensor) -> tuple[int, int]:
    return int(values[0]), int(values[1])
