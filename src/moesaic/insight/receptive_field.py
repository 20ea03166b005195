"""Receptive field of the patches of a routed layer, measured by gradients.

A patch is a square of the feature map in front of a routed layer and is drawn as the square of the image
below it. Earlier layers have mixed neighbouring pixels into it, so it depends on more than that square.
The extent and the weight of this dependence are measured by the gradient of the patch with respect to
the image, which works for any network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice
from moesaic.layers.recording import RoutedLayer, routed_layers, routing_hook
from moesaic.models.inspection import eval_mode
from moesaic.routing_record import Routing

__all__ = ["ReceptiveField", "receptive_field"]


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive field of the centre patch; made by `receptive_field`."""

    patch_size: tuple[float, float]
    """Height and width of the square below the patch, in pixels of the image."""
    margin: int
    """Largest distance in pixels by which the receptive field extends beyond the square."""
    covers_image: bool
    """Whether the receptive field is the whole image."""
    own_share: float
    """Share of the squared gradient inside the square; 1 if nothing else matters."""


def receptive_field(model: nn.Module, layer: str, images: Tensor) -> ReceptiveField | None:
    """Measures the receptive field of the patches in front of the routed layer ``layer``.

    ``images`` (B, C, H, W) are inputs of the model; a few are enough. Returns None if units have no position in the
    image, or do not depend on it.

    >>> import torch, moesaic
    >>> from torch import nn
    >>> moe = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), moe)
    >>> field = receptive_field(model, "1", torch.rand(2, 3, 16, 16))
    >>> field.patch_size, field.margin, field.covers_image                           # a 5×5 kernel adds 2 pixels
    ((4.0, 4.0), 2, False)
    """
    layers = routed_layers(model)
    inputs: list[Tensor] = []
    routings: list[Routing] = []

    def record_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    def record_routing(name: str, module: RoutedLayer, routing: Routing) -> None:
        if name == layer:
            routings.append(routing)

    # the input of the router is (B, C, H, W) even if that of the layer is channels-last
    router = cast("nn.Module", layers[check_choice("receptive_field", "layer", layer, tuple(layers))].router)
    hook = router.register_forward_pre_hook(record_input)
    try:
        with eval_mode(model), torch.enable_grad(), routing_hook(model, record_routing):
            x = images.detach().clone().requires_grad_()
            model(x)
            return _measured(x, inputs[-1], routings[-1]) if inputs and routings else None
    finally:
        hook.remove()


def _measured(x: Tensor, features: Tensor, routing: Routing) -> ReceptiveField | None:
    if routing.grid is None or routing.filled is None or features.ndim != 4 or not features.requires_grad:
        return None
    (H, W), (rows, columns) = x.shape[2:], routing.grid
    tall, wide = H / routing.filled[0], W / routing.filled[1]
    row, column = rows // 2, columns // 2
    if routing.unit == "token":  # a router sees tokens as a map (B, C, 1, N)
        patch = features[..., routing.prefix + row * columns + column]
    else:
        h, w = features.shape[2] // rows, features.shape[3] // columns
        patch = features[:, :, row * h : (row + 1) * h, column * w : (column + 1) * w]
    # a random direction, so that channels do not cancel
    weight = torch.randn(patch.shape, generator=torch.Generator().manual_seed(0)).to(patch)
    (gradient,) = torch.autograd.grad((patch * weight).sum(), x, materialize_grads=True)
    power_HW = gradient.double().square().sum((0, 1)).cpu()
    nonzero = power_HW.nonzero()
    if not len(nonzero):
        return None
    low_y, low_x = map(int, nonzero.min(0).values)
    high_y, high_x = map(int, nonzero.max(0).values + 1)
    top, left = round(row * tall), round(column * wide)
    bottom, right = min(round((row + 1) * tall), H), min(round((column + 1) * wide), W)
    own_share = power_HW[top:bottom, left:right].sum() / power_HW.sum()
    return ReceptiveField(
        patch_size=(tall, wide),
        margin=max(0, top - low_y, left - low_x, high_y - bottom, high_x - right),
        covers_image=(low_y, low_x, high_y, high_x) == (0, 0, H, W),
        own_share=float(own_share),
    )
