"""Routing hooks: callables that receive the ``Routing`` of every forward pass of a routed layer.

Hooks belong to the context that registered them (`moesaic.context_stacks`): a thread or an asyncio task gets the
routing of its own forward passes, whoever else runs the same model at the same time. Layers keep no hooks, and without
one they pay a lookup: no copies, no synchronisation with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn

from moesaic import context_stacks
from moesaic.argument_checks import check_choice
from moesaic.routing_record import Routing

__all__ = ["RoutedLayer", "RoutingHook", "record_routing", "routed_layers", "routing_hook"]

RoutingHook = Callable[[str, "RoutedLayer", Routing], None]
"""``hook(name, layer, routing)``: called at every forward pass with the layer's name in the model."""


class RoutedLayer(nn.Module):
    """Base class of the routed layers; ``forward`` passes each ``Routing`` to ``_call_routing_hooks``."""

    @property
    def selects_units(self) -> bool:
        """Whether layers inside of this one see some of its units only, whose grid is then unknown."""
        return False

    @property
    def has_routing_hooks(self) -> bool:
        """Whether the current context has a routing hook on this layer."""
        return any(id(self) in hook.layers for hook in context_stacks.routing_hooks)

    def _call_routing_hooks(self, routing: Routing) -> Routing:
        for hook in context_stacks.routing_hooks:
            found = hook.layers.get(id(self))
            if found is not None and hook.in_backward == _in_backward():
                name, layer = found
                hook.call(name, layer, replace(routing, grid=None) if id(self) in hook.without_grid else routing)
        return routing


class _RegisteredHook:
    """A routing hook on the layers of a model."""

    def __init__(self, layers: Mapping[str, RoutedLayer], call: RoutingHook) -> None:
        self.layers = {id(layer): (name, layer) for name, layer in layers.items()}
        """Name and layer, by the layer's ``id``; the references keep the ids from being reused."""
        self.call = call
        self.in_backward = _in_backward()
        """Whether the hook is for a forward pass inside of a backward pass, and not for one that is repeated there."""
        self.without_grid = {
            id(inner)
            for layer in layers.values()
            if layer.selects_units
            for inner in cast("Iterable[nn.Module]", layer.modules())
            if inner is not layer
        }
        """Ids of modules that see some of the units of a layer around them."""


def _in_backward() -> bool:
    """Whether a backward pass runs, in which gradient checkpointing repeats forward passes."""
    return not torch.compiler.is_compiling() and cast("Any", torch)._C._current_autograd_node() is not None


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
    """Calls ``hook(name, layer, routing)`` whenever a routed layer of ``model`` runs inside the block.

    Forward passes of other threads and asyncio tasks do not call it, unless they run in a copy of this context
    (``contextvars.copy_context().run``, `asyncio.to_thread`); the hook is then called in their thread. A forward pass
    that gradient checkpointing repeats in the backward pass does not call it again.
    """
    layers = routed_layers(model)
    if not layers:
        raise ValueError(
            f"routing_hook: {type(model).__name__} has no routed layer; "
            "build one with moesaic.PatchMoE, or convert a convolution into one"
        )
    registered = _RegisteredHook(layers, hook)
    context_stacks.push("routing_hooks", registered)
    try:
        yield
    finally:
        context_stacks.pop("routing_hooks", registered)


class _Records(dict[str, Routing]):
    """Routing by layer. Metrics and overlays take that of one layer, so given all of them they name the layers."""

    def __missing__(self, name: str) -> Routing:
        raise KeyError(f"record_routing: no routed layer {name!r} has run; {self._layers()}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"record_routing: {name!r} is an attribute of the routing of one layer; {self._layers()}")

    def _layers(self) -> str:
        if not self:
            return "run the model inside the block first"
        return f"take one, as routing[{next(iter(self))!r}], of {', '.join(map(repr, self))}"


@contextmanager
def record_routing(model: nn.Module, keep: Literal["last", "all"] = "last") -> Generator[dict[str, Routing]]:
    """Collects the routing of every routed layer of ``model``: ``{module name: Routing}``.

    Forward passes of the current thread or asyncio task are recorded. A worker thread that runs the model has its own
    recorder, or none; to record it here, run it in a copy of this context:
    ``executor.submit(contextvars.copy_context().run, model, x)``.

    Gradient checkpointing does not record a pass again when it repeats it. Its variant with ``use_reentrant=True`` runs
    the first pass without gradients: a balance loss of that record has none.

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
    records = _Records()
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
        unit_mask=_concatenate_masks(parts),
    )


def _concatenate_masks(parts: list[Routing]) -> Tensor | None:
    if all(part.unit_mask is None for part in parts):
        return None
    masks = (
        part.scores.new_ones(part.scores.shape[:2], dtype=torch.bool) if part.unit_mask is None else part.unit_mask
        for part in parts
    )
    return torch.cat(list(masks))
