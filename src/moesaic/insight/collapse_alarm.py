"""Watch the routing of a model during training: an alarm for collapsing experts, a check for non-finite scores.

Both are routing hooks (``moesaic.layers.routing_hook``) that are removed at the end of their block; a model without
hooks pays nothing. In a compiled model each routed layer breaks the graph while it has hooks, which
``fullgraph=True`` does not allow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.insight.metrics import check_fraction, floats, mean_of_pairs, overlap, overlap_by_chance, starved
from moesaic.layers import RoutedLayer, RoutingHook, routing_hook
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Routing

__all__ = ["CollapseAlarm", "CollapseEvent", "CollapseWarning", "check_scores"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class CollapseEvent:
    """A collapse of experts that a `CollapseAlarm` found."""

    layer: str
    """Name of the layer in the model; empty where the model is itself the layer."""
    kind: Literal["dead", "copies"]
    """``"dead"``: experts without load; ``"copies"``: experts that choose the same units."""
    experts: tuple[int, ...]
    """The experts concerned: the dead ones, or all that are copies of one another."""
    load: tuple[float, ...]
    """Share of the load of each expert."""
    overlap: float
    """Mean overlap (Jaccard) of pairs of experts; 0 where units choose."""
    chance: float
    """The overlap of random choices of the same sizes."""
    limit: float
    """The limit that was passed: of the load of an expert, or of the overlap."""
    window: int
    """Training passes over which it was measured."""
    passes: int
    """Training passes of the layer so far."""

    @property
    def message(self) -> str:
        """The layer, the numbers and what to do about it."""
        return f"{_layer_text(self.layer)}: {self.finding}"

    @property
    def finding(self) -> str:
        """The message without the layer."""
        if self.kind == "dead":
            named = ", ".join(f"{e} ({self.load[e]:.2%} of the load)" for e in self.experts)
            return (
                f"{len(self.experts)} of {len(self.load)} experts are dead: {named}; an equal share is "
                f"{1 / len(self.load):.2%}, the limit {self.limit:.2%}. Add a balance loss or noise to the router, "
                "lower its learning rate, or let experts choose (ExpertChoice), which gives each the same load"
            )
        return (
            f"the experts choose the same units: mean overlap {self.overlap:.3f}, where random choices give "
            f"{self.chance:.3f}, identical ones 1, and the limit is {self.limit:.3f}. They learn as one expert, unless "
            "each image has only the few units that matter. Start the router's weights further apart, lower its "
            "learning rate, or use fewer experts or more patches_per_expert"
        )


class CollapseWarning(UserWarning):
    """Experts died during training, or became copies of one another; ``event`` has the numbers."""

    def __init__(self, message: str, event: CollapseEvent | None = None) -> None:
        super().__init__(message)
        self.event = event


@dataclass
class _Window:
    """Sums over the passes of a layer since the last check, on the layer's device.

    They are changed in place and nothing is counted in Python, so that a CUDA graph can replay the passes.
    """

    load: Tensor
    sums: Tensor
    """(4,): passes, images, and over images the overlap and the overlap by chance."""

    def clear(self) -> None:
        self.load.zero_()
        self.sums.zero_()


class CollapseAlarm:
    """Reports, once per layer and with the numbers, when experts collapse during training.

    Every ``every`` training passes of a layer the alarm checks what happened since its last check. There is a
    `CollapseEvent` when

    - experts are dead: their share of the load is below ``threshold`` times the equal share 1/E. This is how
      collapse shows where units choose experts, or where the router is soft.
    - experts are copies: where experts choose units, their load is equal by construction, and collapse means that
      they choose the same. The mean overlap (Jaccard) of pairs of experts is compared with that of random choices of
      the same sizes, which is about L / (2N − L). It is too high when it has come ``copies`` of the way from there
      to 1, identical choices. Experts that take all units are no copies: they have no choice.

    Passes in eval mode do not count. Between checks nothing waits for the device. An alarm may be entered again
    (once an epoch, say): it goes on counting and does not repeat itself. With ``every=None`` it checks when `check` is
    called, as a loop must whose steps are replayed from a CUDA graph: hooks are not called in these.

    Args:
        model: a model with routed layers.
        every: training passes from one check of a layer to the next; None: `check` is called.
        threshold: share of the equal load below which an expert is dead.
        copies: from 0, random choices, to 1, identical ones: the overlap from which experts are copies.
        on_collapse: is called with each event; by default it is a `CollapseWarning`.
        batch: the batch whose images are spread over processes; its ranks then check what happened on all of them.

    >>> import torch
    >>> from moesaic import PatchMoE
    >>> layer = PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=2)
    >>> with torch.no_grad():
    ...     _ = layer.router.weight.copy_(layer.router.weight[:1].expand_as(layer.router.weight))    # both choose alike
    >>> events = []
    >>> with CollapseAlarm(layer, every=2, on_collapse=events.append):
    ...     for step in range(10):
    ...         y = layer(torch.randn(8, 4, 8, 8))
    >>> [(event.kind, event.experts) for event in events]
    [('copies', (0, 1))]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | None = 100,
        threshold: float = 0.1,
        copies: float = 0.9,
        on_collapse: Callable[[CollapseEvent], None] | None = None,
        batch: GlobalBatch | None = None,
    ) -> None:
        if every is not None:
            check_positive("CollapseAlarm", every=every)
        check_fraction("CollapseAlarm", "threshold", threshold)
        check_fraction("CollapseAlarm", "copies", copies)
        self.model = model
        self.every = every
        self.threshold = threshold
        self.copies = copies
        self.on_collapse = on_collapse or _warn
        self._batch = batch
        self._passes: dict[str, int] = {}
        self._unchecked: dict[str, int] = {}
        self._windows: dict[str, _Window] = {}
        self._reported: set[str] = set()
        self._hooked: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        if self._hooked is not None:
            raise RuntimeError("CollapseAlarm: already watching; leave its `with` block before entering it again")
        hooked = _hook(self.model, self._on_routing)
        hooked.__enter__()
        self._hooked = hooked
        return self

    def __exit__(self, *error: object) -> None:
        if self._hooked is not None:
            hooked, self._hooked = self._hooked, None
            hooked.__exit__(None, None, None)

    def _on_routing(self, name: str, layer: RoutedLayer, routing: Routing) -> None:
        if not layer.training or name in self._reported:
            return
        self._add(name, routing)
        self._unchecked[name] = self._unchecked.get(name, 0) + 1
        if self._unchecked[name] == self.every:
            self._check(name)

    def check(self) -> None:
        """Check the passes since the last check of every layer; waits for the device."""
        for name in self._windows:
            if name not in self._reported:
                self._check(name)

    def clear(self) -> None:
        """Forget the passes since the last check."""
        self._unchecked.clear()
        for window in self._windows.values():
            window.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that training passes change in place."""
        windows = self._windows.items()
        return {f"{kind}/{name}": getattr(window, kind) for name, window in windows for kind in ("load", "sums")}

    @torch.no_grad()
    def _add(self, name: str, routing: Routing) -> None:
        load_E = routing.load.detach()
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(torch.zeros_like(load_E), torch.zeros(4, device=load_E.device))
        window.load += load_E
        window.sums[0] += 1
        window.sums[1] += routing.batch
        if routing.chooser == "expert":
            window.sums[2] += routing.batch * mean_of_pairs(overlap(routing))
            window.sums[3] += overlap_by_chance(routing)

    def _check(self, name: str) -> None:
        window = self._windows[name]
        load, sums = window.load, window.sums
        if self._batch is not None:
            load, sums = _sum_over_ranks(load, sums, self._batch)
        load_E, sums_4 = floats(load), floats(sums)
        window.clear()
        self._unchecked[name] = 0
        self._passes[name] = self._passes.get(name, 0) + int(sums_4[0])
        event = self._find(name, load_E, sums_4) if sums_4[1] else None
        if event is not None:
            # first, because on_collapse may raise an error that a caller catches
            self._reported.add(name)
            self.on_collapse(event)

    def _find(self, name: str, load: list[float], sums: list[float]) -> CollapseEvent | None:
        passes, images, overlaps, overlaps_by_chance = sums
        counts = (int(passes), self._passes[name])
        total = sum(load) or 1
        shares = tuple(each / total for each in load)
        dead = starved(load, self.threshold)
        if dead:
            limit = self.threshold / len(load)
            return CollapseEvent(name, "dead", tuple(dead), shares, 0.0, 0.0, limit, *counts)
        mean, chance = overlaps / images, overlaps_by_chance / images
        limit = chance + self.copies * (1 - chance)
        # experts that take all units overlap fully by chance: they have no choice
        if mean < limit - _ROUNDING or chance > 1 - _ROUNDING:
            return None
        experts = tuple(range(len(load)))
        return CollapseEvent(name, "copies", experts, shares, mean, chance, limit, *counts)


def _sum_over_ranks(load: Tensor, sums: Tensor, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """Load and sums of all ranks; each has made the same passes."""
    total = batch.sum(torch.cat([load.double(), sums[1:].double()]))
    return total[: len(load)], torch.cat([sums[:1].double(), total[len(load) :]])


def _warn(event: CollapseEvent) -> None:
    when = f"last {event.window} of {event.passes} training passes"
    text = f"CollapseAlarm: {_layer_text(event.layer)}, {when}: {event.finding}"
    warnings.warn(CollapseWarning(text, event), stacklevel=2)


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
    with _hook(model, _refuse_bad_scores):
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
        f"check_scores: {_layer_text(name)}: {count} of {scores.numel()} scores are not finite ({nans} NaN, "
        f"{count - nans} infinite), shape {tuple(scores.shape)}, first at {first}; look at the layer's input and at "
        "router.weight: a learning rate or a loss scale that is too high is the usual cause"
    )


def _hook(model: nn.Module, hook: RoutingHook) -> AbstractContextManager[None]:
    # Compiled, a hook's counters would be constants of the graph, and each pass a new compilation.
    reason = "compile without fullgraph=True while the routing is watched"
    return routing_hook(model, cast("RoutingHook", torch.compiler.disable(hook, reason=reason)))


def _layer_text(name: str) -> str:
    """The layer in words; the name is empty where the model is itself the layer."""
    return f"layer {name!r}" if name else "the layer"
