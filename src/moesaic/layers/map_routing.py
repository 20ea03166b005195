"""Shared parts of `PatchMoE` and `TokenMoE`: routing of a map, and experts on the slots of soft routing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.experts import ConvExperts, Experts, MLPExperts
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import Combine, PatchChoice, PatchSelection, PatchSpec
from moesaic.ops.hook_detection import has_hooks
from moesaic.routing import ExpertChoice
from moesaic.routing_record import Routing

__all__ = ["check_agreement", "choice_for_experts", "route_map", "routing_is_internal", "run_fused", "run_slots"]


def route_map(
    owner: str,
    router: nn.Module,
    x: Tensor,
    experts: int,
    patch_size: int,
    mask: Tensor | None = None,
    *,
    detached: bool = False,
) -> tuple[Routing, PatchSelection | None]:
    """Returns the routing of a map (B, C, H, W), and the state of the choice where kernels made it.

    ``detached``: as in `ExpertChoice.select`.
    """
    selection = None
    if isinstance(router, ExpertChoice) and _is_plain(router) and mask is None:
        routing, selection = router.select(x, detached=detached)
    else:
        routing = router(x) if mask is None else router(x, mask=mask)
    if routing.experts != experts:
        raise ValueError(
            f"{owner}: the router routes to {routing.experts} experts, but the layer has {experts}; "
            "build both for the same number"
        )
    if routing.batch != x.shape[0]:
        raise ValueError(f"{owner}: the router returned {routing.batch} images for a batch of {x.shape[0]}")
    grid = (x.shape[2] // patch_size, x.shape[3] // patch_size)
    if routing.grid != grid:
        raise ValueError(
            f"{owner}: the router returned a grid of {routing.grid} for a map of {grid[0]}×{grid[1]} patches; "
            f"its patch_size must be the layer's, {patch_size}"
        )
    return routing, selection


def run_fused(layer: RoutedLayer, router: nn.Module, experts: Experts, x: Tensor, spec: PatchSpec) -> Tensor | None:
    """Routes a map (B, C, H, W) and runs the experts, as one operator; None where that is not possible."""
    choice = choice_for_experts(layer, router, experts, x, spec)
    return None if choice is None else experts.run_chosen(x, choice, spec)


def choice_for_experts(
    layer: RoutedLayer, router: nn.Module, experts: Experts, x: Tensor, spec: PatchSpec
) -> PatchChoice | None:
    """Returns the expert choice to make of a map if only the experts read its routing; else None."""
    if not (isinstance(router, ExpertChoice) and _is_plain(router) and routing_is_internal(layer, experts)):
        return None
    if router.experts != len(experts) or router.patch_size != spec.patch_size:
        return None
    return router.patch_choice(x)


def _is_plain(router: ExpertChoice) -> bool:
    """Whether the router need not be called as a module: it has no hooks, and no forward of its class or set on it."""
    return getattr(router.forward, "__func__", None) is ExpertChoice.forward and not has_hooks(router)


def routing_is_internal(layer: RoutedLayer, experts: Experts) -> bool:
    """Whether only the experts read the routing of a forward pass, so that only they need its gradients."""
    if layer.has_routing_hooks or experts.dispatcher is not None or has_hooks(experts):
        return False
    return type(experts).forward in (ConvExperts.forward, MLPExperts.forward)


def run_slots(experts: Experts, x: Tensor, routing: Routing, patch_size: int, combine: Combine) -> Tensor:
    """Mixes the patches of a map into slots, runs each expert on its slots as isolated patches, and mixes back."""
    assert routing.dispatch is not None and routing.grid is not None
    p, (rows, columns) = patch_size, routing.grid
    B, E, S = routing.batch, routing.experts, routing.dispatch.shape[3]
    patches = x.reshape(B, x.shape[1], rows, p, columns, p).movedim(4, 3).flatten(2, 3)
    slots = torch.einsum("bnes,bcnij->bciesj", routing.dispatch.to(x.dtype), patches).flatten(3)
    own = torch.arange(E * S, device=x.device).view(1, E, S).expand(B, E, S)
    scores, gate = routing.scores.new_zeros(B, E * S, E), torch.ones_like(own, dtype=routing.gate.dtype)
    slot_routing = Routing("patch", scores, own, gate, "expert", grid=(1, E * S), may_drop=False)
    y = experts(slots, slot_routing, PatchSpec(p, "output", "patch", "sum"))
    y = y.view(*y.shape[:3], E, S, p)
    axes = "eo" if combine == "concat" else "o"
    y = torch.einsum(f"bnes,boiesj->b{axes}nij", routing.gate.to(y.dtype), y)
    y = y.reshape(B, -1 if B else experts.out_channels * (E if combine == "concat" else 1), rows, columns, p, p)
    return y.movedim(4, 3).flatten(4, 5).flatten(2, 3)


def check_agreement(owner: str, owner_has: str, **options: tuple[object, object, object]) -> None:
    """Refuses options that contradict a given router or experts; each is (requested, default, the object's)."""
    for name, (requested, default, actual) in options.items():
        if requested not in (default, actual):
            its_own = "none" if actual is None else f"{name}={actual!r}"
            raise ValueError(f"{owner}: {name}={requested!r}, but {owner_has} {its_own}; leave {name} out")
