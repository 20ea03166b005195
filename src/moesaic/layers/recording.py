"""Routing hooks: callables that receive the ``Routing`` of every forward pass of a routed layer.

A layer without hooks pays nothing for them: no copies, no synchronisation with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice
from moesaic.routing_record import Routing

__all__ = ["RoutedLayer", "RoutingHook", "record_routing", "routed_layers", "routing_hook"]

RoutingHook = Callable[[str, "RoutedLayer", Routing], None]
"""``hook(name, layer, routing)``: called at every forward pass with the layer's name in the model."""


class RoutedLayer(nn.Module):
    """Base class of the routed layers; ``forward`` passes each ``Routing`` to ``_call_routing_hooks``."""

    def __init__(self) -> None:
        super().__init__()
        self._routing_hooks: list[Callable[[Routing], None]] = []

    def _call_routing_hooks(self, routing: Routing) -> Routing:
        for hook in self._routing_hooks:
            hook(routing)
        return routing


def routed_layers(model: nn.Module) -> dict[str, RoutedLayer]:
    """Returns the routed layers of a model by name, without the ``_orig_mod`` of compiled modules.

    >>> from torch import nn
    >>> import moesaic
    >>> model = nn.Sequential(nn.ReLU(), moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1))
    >>> list(routed_layers(model))
    ['1']
    """

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # torch types it in part
    return {plain(name): layer for name, layer in modules if isinstance(layer, RoutedLayer)}


@contextmanager
def routing_hook(model: nn.Module, hook: RoutingHook) -> Generator[None]:
    """Calls ``hook(name, layer, routing)`` whenever a routed layer of ``model`` runs inside the block."""
    layers = routed_layers(model)
    if not layers:
        raise ValueError(
            f"routing_hook: {type(model).__name__} has no routed layer; "
            "build one with moesaic.PatchMoE, or convert a convolution into one"
        )
    registered = [(layer, partial(hook, name, layer)) for name, layer in layers.items()]
    for layer, call in registered:
        layer._routing_hooks.append(call)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for layer, call in registered:
            layer._routing_hooks.remove(call)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def record_routing(model: nn.Module, keep: Literal["last", "all"] = "last") -> Generator[dict[str, Routing]]:
    """Collects the routing of every routed layer of ``model``: ``{module name: Routing}``.

    Args:
        model: any model that contains routed layers.
        keep: ``"last"``: the latest forward pass of each layer, with its autograd graph, so that a balance loss can
            be computed from it. ``"all"``: all forward passes inside the block, detached and concatenated along the
            batch, for metrics over a whole data set.

    >>> import torch, moesaic
    >>> model = torch.nn.Sequential(moesaic.PatchMoE(4, 8, experts=2, patches_per_expert=3, patch_size=2))
    >>> with moesaic.record_routing(model) as routing:
    ...     y = model(torch.randn(5, 4, 8, 8))
    >>> routing["0"].index.shape, routing["0"].grid
    (torch.Size([5, 2, 3]), (4, 4))
    """
    check_choice("record_routing", "keep", keep, ("last", "all"))
    records: dict[str, Routing] = {}
    passes: dict[str, list[Routing]] = {}

    def collect(name: str, layer: RoutedLayer, routing: Routing) -> None:
        if keep == "last":
            records[name] = routing
        else:
            passes.setdefault(name, []).append(routing.detach())

    with routing_hook(model, collect):
        yield records
    for name, parts in passes.items():
        records[name] = _concatenate(name, parts)


def _concatenate(name: str, parts: list[Routing]) -> Routing:
    first = parts[0]
    for part in parts:
        if part.scores.shape[1:] != first.scores.shape[1:] or (part.grid, part.extent) != (first.grid, first.extent):
            raise ValueError(
                f"record_routing: {name} routed {first.units} units in one pass and {part.units} in another; "
                "keep='all' concatenates passes over maps of one size; use keep='last' for maps of several sizes"
            )

    def cat(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return replace(
        first,
        scores=torch.cat([part.scores for part in parts]),
        index=cat([part.index for part in parts]),
        gate=torch.cat([part.gate for part in parts]),
        dispatch=cat([part.dispatch for part in parts]),
        may_drop=any(part.may_drop for part in parts),
    )
