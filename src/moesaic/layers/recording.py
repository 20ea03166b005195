"""What every routed layer shares: it tells whoever asks how it routed.

Observers cost nothing when there are none: no copies, no synchronisation with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn

from moesaic.checks import one_of
from moesaic.routing_record import Routing

__all__ = ["Observer", "Routed", "observe", "record_routing", "routed_layers"]

Observer = Callable[[str, "Routed", Routing], None]
"""Called with the layer's name in the model, the layer and what it routed, at every forward pass."""


class Routed(nn.Module):
    """Base of the routed layers: a layer passes each ``Routing`` it makes through ``_emit``."""

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Callable[[Routing], None]] = []

    def _emit(self, routing: Routing) -> Routing:
        for tell in self._observers:
            tell(routing)
        return routing


def routed_layers(model: nn.Module) -> dict[str, Routed]:
    """The routed layers of a model by name; a compiled model's layers keep the names they had.

    >>> from torch import nn
    >>> import moesaic
    >>> model = nn.Sequential(nn.ReLU(), moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1))
    >>> list(routed_layers(model))
    ['1']
    """

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part != "_orig_mod")

    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # torch types it in part
    return {plain(name): layer for name, layer in modules if isinstance(layer, Routed)}


@contextmanager
def observe(model: nn.Module, observer: Observer) -> Generator[None]:
    """Call ``observer(name, layer, routing)`` whenever a routed layer of ``model`` runs inside the block."""
    layers = routed_layers(model)
    if not layers:
        raise ValueError(
            f"observe: {type(model).__name__} has no routed layer to look at; "
            "build one with moesaic.PatchMoE, or convert a convolution into one"
        )
    listening: list[tuple[Routed, Callable[[Routing], None]]] = []
    for name, layer in layers.items():

        def tell(routing: Routing, name: str = name, layer: Routed = layer) -> None:
            observer(name, layer, routing)

        layer._observers.append(tell)  # pyright: ignore[reportPrivateUsage]
        listening.append((layer, tell))
    try:
        yield
    finally:
        for layer, told in listening:
            layer._observers.remove(told)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def record_routing(model: nn.Module, keep: Literal["last", "all"] = "last") -> Generator[dict[str, Routing]]:
    """Collect what the routed layers of ``model`` choose: ``{module name: Routing}``.

    ``keep="last"`` holds each layer's latest forward pass with its autograd graph, so that a
    balance loss can be taken on it. ``keep="all"`` joins all passes inside the block along the
    batch, cut from the graph: what the metrics of a whole data set want.

    >>> import torch, moesaic
    >>> model = torch.nn.Sequential(moesaic.PatchMoE(4, 8, experts=2, patches_per_expert=3, patch_size=2))
    >>> with moesaic.record_routing(model) as routing:
    ...     y = model(torch.randn(5, 4, 8, 8))
    >>> routing["0"].index.shape, routing["0"].grid
    (torch.Size([5, 2, 3]), (4, 4))
    """
    one_of("record_routing", "keep", keep, ("last", "all"))
    records: dict[str, Routing] = {}
    passes: dict[str, list[Routing]] = {}

    def collect(name: str, layer: Routed, routing: Routing) -> None:
        if keep == "last":
            records[name] = routing
        else:
            passes.setdefault(name, []).append(routing.detach())

    with observe(model, collect):
        yield records
    for name, parts in passes.items():
        records[name] = _join(name, parts)


def _join(name: str, parts: list[Routing]) -> Routing:
    first = parts[0]
    for part in parts:
        if part.scores.shape[1:] != first.scores.shape[1:] or part.grid != first.grid:
            raise ValueError(
                f"record_routing: {name} routed {first.units} units in one pass and {part.units} in another; "
                "keep='all' joins passes over maps of one size: use keep='last' for the others"
            )

    def cat(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return Routing(
        unit=first.unit,
        scores=torch.cat([part.scores for part in parts]),
        index=cat([part.index for part in parts]),
        gate=torch.cat([part.gate for part in parts]),
        chooser=first.chooser,
        grid=first.grid,
        dispatch=cat([part.dispatch for part in parts]),
        may_drop=any(part.may_drop for part in parts),
    )
