"""Features of patches and tokens as routers read them, to find patches that look alike to a layer.

The features of a patch are the mean of the map in front of the router over the patch. Where they are many, a fixed
random projection keeps their distances about (Johnson and Lindenstrauss 1984), so that thousands of images fit into
memory; `principal_components` reduces them further.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.layers.recording import RoutedLayer

__all__ = ["FEATURES", "principal_components", "record_features"]

FEATURES = 32
"""Numbers per patch that are recorded, at most."""


@contextmanager
def record_features(layers: Mapping[str, RoutedLayer]) -> Generator[dict[str, list[Tensor]]]:
    """Records the features (B, N, F) of what routers read, pass by pass, on the CPU; F is at most `FEATURES`.

    Tokens are a map of one row, so that class and register tokens come first.

    >>> import moesaic
    >>> moe = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> with record_features({"moe": moe}) as found:
    ...     y = moe(torch.ones(5, 3, 8, 8))
    >>> found["moe"][0].shape
    torch.Size([5, 4, 3])
    """
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def record(name: str, router: nn.Module, args: tuple[object, ...]) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.ndim == 4:
            found[name].append(_pooled(x.detach(), cast("int", getattr(router, "patch_size", 1))))

    routers = {name: cast("nn.Module | None", getattr(layer, "router", None)) for name, layer in layers.items()}
    hooks = [
        router.register_forward_pre_hook(partial(record, name))
        for name, router in routers.items()
        if isinstance(router, nn.Module)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def principal_components(features: Tensor, count: int) -> Tensor:
    """(B, N, count): the coordinates of features (B, N, F) along the directions in which they vary most.

    Distances of the coordinates are those of the features, less what the other directions add.

    >>> features = torch.tensor([[[1.0, 0.0, 2.0], [3.0, 0.0, 2.0]]])
    >>> principal_components(features, 1).abs().tolist()
    [[[1.0], [1.0]]]
    """
    flat = features.double().flatten(0, -2)
    flat = flat - flat.mean(0) if len(flat) else flat
    # ascending by how much the features vary along them
    directions = cast("Tensor", torch.linalg.eigh(flat.T @ flat)[1]).flip(-1)[:, :count]
    return (flat @ directions).reshape(*features.shape[:-1], directions.shape[1]).float()


def _pooled(x: Tensor, patch_size: int) -> Tensor:
    grid = (-(-x.shape[2] // patch_size), -(-x.shape[3] // patch_size))
    pooled = nn.functional.adaptive_avg_pool2d(x.float(), grid).flatten(2).mT
    C = x.shape[1]
    if C > FEATURES:
        generator = torch.Generator().manual_seed(0)
        pooled = pooled @ (torch.randn(C, FEATURES, generator=generator) / FEATURES**0.5).to(x.device)
    return pooled.cpu()
