"""Watch the routing while a model runs: an alarm for experts that die, a check for scores that are not numbers.

Both listen to the routed layers through ``moesaic.layers.routing_hook`` and are gone when their block
ends; a model that nobody watches pays nothing. In a compiled model each routed layer breaks the
graph while it is watched, which ``fullgraph=True`` does not allow.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.insight.metrics import check_fraction, floats, mean_of_pairs, overlap, starved
from moesaic.layers import RoutedLayer, RoutingHook, routing_hook
from moesaic.routing_record import Routing

__all__ = ["CollapseAlarm", "CollapseWarning", "check_scores"]


_ROUNDING = 1e-6


class CollapseWarning(UserWarning):
    """Experts died during training, or became copies of one another."""


@dataclass
class _Window:
    """What a layer did since the alarm last looked, summed on the layer's device."""

    load: Tensor
    overlap: Tensor
    overlap_by_chance: Tensor
    images: int = 0


class CollapseAlarm:
    """Warn, once per layer and with the numbers, when experts collapse during training.

    Every ``every`` training passes of a layer the alarm looks at what happened since it last
    looked. It warns (`CollapseWarning`) when

    - experts are dead: their share of the load is below ``threshold`` times the equal share 1/E.
      This is how collapse looks where units choose experts, or where the router is soft.
    - experts are copies: where experts choose units, their load is equal by construction, and
      collapse means that they choose the same. The mean overlap (Jaccard) of pairs of experts is
      compared with that of random choices of the same sizes, which is about L / (2N − L). It is
      too high when it has come ``copies`` of the way from there to 1, identical choices. Experts
      that take all units are no copies: they have no choice.

    Passes in eval mode do not count. Between looks nothing waits for the device. An alarm may be
    entered again (once an epoch, say): it goes on counting and does not repeat itself.

    >>> import torch, warnings
    >>> from moesaic import PatchMoE
    >>> layer = PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=2)
    >>> with torch.no_grad():
    ...     _ = layer.router.weight.copy_(layer.router.weight[:1].expand_as(layer.router.weight))    # both choose alike
    >>> with warnings.catch_warnings(record=True) as caught, CollapseAlarm(layer, every=2):
    ...     warnings.simplefilter("always")
    ...     for step in range(10):
    ...         y = layer(torch.randn(8, 4, 8, 8))
    >>> [warning.category.__name__ for warning in caught]
    ['CollapseWarning']
    """

    def __init__(self, model: nn.Module, *, every: int = 100, threshold: float = 0.1, copies: float = 0.9) -> None:
        check_positive("CollapseAlarm", every=every)
        check_fraction("CollapseAlarm", "threshold", threshold)
        check_fraction("CollapseAlarm", "copies", copies)
        self.model = model
        self.every = every
        self.threshold = threshold
        self.copies = copies
        self._passes: dict[str, int] = {}
        self._windows: dict[str, _Window] = {}
        self._warned: set[str] = set()
        self._observing: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        if self._observing is not None:
            raise RuntimeError("CollapseAlarm: already watching; leave its `with` block before entering it again")
        observing = _watch(self.model, self._hear)
        observing.__enter__()
        self._observing = observing
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observing is not None:
            observing, self._observing = self._observing, None
            observing.__exit__(kind, error, trace)

    def _hear(self, name: str, layer: RoutedLayer, routing: Routing) -> None:
        if not layer.training or name in self._warned:
            return
        self._add(name, routing)
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] % self.every == 0:
            self._look(name, self._windows.pop(name))

    @torch.no_grad()
    def _add(self, name: str, routing: Routing) -> None:
        load_E = routing.load.detach()
        window = self._windows.get(name)
        if window is None:
            nothing = torch.zeros((), device=load_E.device)
            window = self._windows[name] = _Window(torch.zeros_like(load_E), nothing, nothing)
        window.load = window.load + load_E
        window.images += routing.batch
        if routing.chooser == "expert":
            window.overlap = window.overlap + routing.batch * mean_of_pairs(overlap(routing))
            window.overlap_by_chance = window.overlap_by_chance + _overlap_by_chance(routing)

    def _look(self, name: str, window: _Window) -> None:
        if window.images == 0:
            return
        finding = self._deaths(window) or self._copies(window)
        if finding:
            # first, for the warning may be an error that somebody catches
            self._warned.add(name)
            when = f"last {self.every} of {self._passes[name]} training passes"
            warnings.warn(f"CollapseAlarm: {_place(name)}, {when}: {finding}", CollapseWarning, stacklevel=2)

    def _deaths(self, window: _Window) -> str:
        load = floats(window.load)
        dead = starved(load, self.threshold)
        if not dead:
            return ""
        total = sum(load) or 1
        equal = 1 / len(load)
        named = ", ".join(f"{e} ({load[e] / total:.2%} of the load)" for e in dead)
        return (
            f"{len(dead)} of {len(load)} experts are dead: {named}; an equal share is {equal:.2%}, "
            f"the limit {self.threshold * equal:.2%}. Add a balance loss or noise to the router, lower its learning "
            "rate, or let experts choose (ExpertChoice), which gives each the same load"
        )

    def _copies(self, window: _Window) -> str:
        mean = window.overlap.item() / window.images
        chance = window.overlap_by_chance.item() / window.images
        limit = chance + self.copies * (1 - chance)
        # experts that take all units overlap fully by chance: they have no choice
        if mean < limit - _ROUNDING or chance > 1 - _ROUNDING:
            return ""
        return (
            f"the experts choose the same units: mean overlap {mean:.3f}, where random choices give {chance:.3f}, "
            f"identical ones 1, and the limit is {limit:.3f}. They learn as one expert, unless each image has only "
            "the few units that matter. Start the router's weights further apart, lower its learning rate, "
            "or use fewer experts or more patches_per_expert"
        )


def _overlap_by_chance(routing: Routing) -> Tensor:
    """The sum over images of the mean overlap that random choices of the same sizes would have."""
    size_BE = routing.mask.sum(1).float()
    size_BEE, other_BEE = size_BE[:, :, None], size_BE[:, None, :]
    both_BEE = size_BEE * other_BEE / max(1, routing.units)
    overlap_BEE = both_BEE / (size_BEE + other_BEE - both_BEE).clamp(min=1)
    return mean_of_pairs(overlap_BEE.sum(0))


@contextmanager
def check_scores(model: nn.Module) -> Generator[None]:
    """Raise FloatingPointError, naming the layer, as soon as a router's scores are NaN or infinite inside the block.

    It waits for the device at every pass of every routed layer: for finding a fault, not for training.

    >>> import torch
    >>> from moesaic import PatchMoE
    >>> model = torch.nn.Sequential(torch.nn.Identity(), PatchMoE(4, 4, experts=2, patches_per_expert=1))
    >>> x = torch.zeros(1, 4, 2, 2)
    >>> x[0, 0, 1, 0] = float("inf")
    >>> with check_scores(model):
    ...     y = model(x)
    Traceback (most recent call last):
    FloatingPointError: check_scores: layer '1': 2 of 8 scores are not finite (...), shape (1, 4, 2), ...
    """
    with _watch(model, _refuse_bad_scores):
        yield


def _refuse_bad_scores(name: str, layer: RoutedLayer, routing: Routing) -> None:
    scores = routing.scores.detach()
    bad = ~scores.isfinite()
    if not bad.any():
        return
    nans = int(scores.isnan().sum())
    count = int(bad.sum())
    first = tuple(int(place) for place in bad.nonzero()[0])
    raise FloatingPointError(
        f"check_scores: {_place(name)}: {count} of {scores.numel()} scores are not finite ({nans} NaN, "
        f"{count - nans} infinite), shape {tuple(scores.shape)}, first at {first}; look at the layer's input and at "
        "router.weight: a learning rate or a loss scale that is too high is the usual cause"
    )


def _watch(model: nn.Module, observer: RoutingHook) -> AbstractContextManager[None]:
    # Compiled, an observer's counters would be constants of the graph, and each pass a new compilation.
    way_out = "compile without fullgraph=True while somebody watches the routing"
    return routing_hook(model, cast("RoutingHook", torch.compiler.disable(observer, reason=way_out)))


def _place(name: str) -> str:
    """The layer in words; the name is empty where the model is itself the layer."""
    return f"layer {name!r}" if name else "the layer"
