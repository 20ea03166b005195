"""What routing could gain in a dense network on this machine: `advise`.

Each layer that `convert` can replace is timed dense and routed on its own input, one of each shape. From these times
follow the bound on the network's speed (Amdahl's law) and an estimate of it; where that promises a gain, the converted
network is timed against the dense one. Nothing is trained, and accuracy is not measured.

    patches   a convolution as `PatchMoE`: each of E experts has 1/E of the filters and takes 1/E of the patches
    split     an MLP as `TokenMoE`: each of E experts has 1/E of the hidden neurons; by default half of them run on a
              token, so that half of the multiply-adds remain
    experts   an MLP as `TokenMoE`: E experts as wide as the MLP, by default one for each token: more parameters at the
              same multiply-adds
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moesaic.bench.equal_layers import describe_layer, equal_layers, trace_shapes
from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.model_benchmark import check_patch_routing, routed_layers
from moesaic.bench.network_timer import (
    NOISE,
    LayerGain,
    LayerPair,
    Mode,
    NetworkGain,
    NetworkTimer,
    Shape,
    amdahl,
    share_of_macs,
)
from moesaic.models.convert import convert
from moesaic.models.convert_candidates import convertible_layers, find_layers
from moesaic.models.mlp_candidates import find_mlps
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.traced_inputs import trace_inputs

__all__ = ["Advice", "Plan", "RoutingOptions", "advise"]

_WARM_UP = 1


@dataclass(frozen=True)
class RoutingOptions:
    """How layers would be converted."""

    experts: int = 8
    capacity: float | None = None
    """Of MLPs, as in `convert`; None: half of the experts that are parts of an MLP, one of those as wide as it."""
    patches_per_expert: int | None = None
    trained: bool = False
    """Whether the network has trained weights, from which experts begin."""

    def of_way(self, way: str) -> dict[str, Any]:
        """Arguments of `convert`, without defaults."""
        start = {"init": "upcycle"} if self.trained else {}
        if way == "patches":
            count = {} if self.patches_per_expert is None else {"patches_per_expert": self.patches_per_expert}
            return {"experts": self.experts, **count, **start}
        if way == "split":
            return {"experts": self.experts, "capacity": self.capacity or max(self.experts / 2, 1), "init": "split"}
        return {"experts": self.experts, "capacity": self.capacity or 1, **start}


@dataclass(frozen=True)
class Plan:
    """Layers to convert, and what that is estimated and measured to give."""

    conversions: tuple[Mapping[str, Any], ...]
    """Arguments of `convert`."""
    macs: float
    """Multiply-adds of the network over those of the dense one."""
    parameters: float
    """Parameters of the network over those of the dense one."""
    estimated: Mapping[Pass, float]
    """Dense time over routed time in eager mode, by the times of the layers."""
    measured: tuple[NetworkGain, ...] = ()
    """The whole network; empty where the estimate promises no gain."""

    def gain(self, what: Pass) -> float | None:
        """The best measured gain of all modes; None if there is none."""
        return max((each.gain for each in self.measured if each.what == what and each.gain), default=None)


@dataclass(frozen=True)
class Advice:
    """Result of `advise`."""

    dense: Mapping[Pass, float]
    """Milliseconds of the dense network, eager."""
    share: float
    """Of the network's multiply-adds, in layers that can be routed."""
    bounds: Mapping[Pass, float]
    """How many times as fast the network would be if those layers took no time."""
    layers: tuple[LayerGain, ...]
    """One of each shape and way."""
    speed: Plan | None
    """With all layers that gain, as patches or split; None if none gains."""
    capacity: Plan | None
    """With all MLPs as experts of the same width; None of a network without MLPs."""

    @property
    def faster(self) -> tuple[Pass, ...]:
        """Passes in which the converted network is faster, as measured."""
        speed = self.speed
        return () if speed is None else tuple(what for what in self.dense if (speed.gain(what) or 0.0) > NOISE)

    def bound(self, layer: LayerGain, what: Pass) -> float:
        """How many times as fast the network would be if the layers of one shape took no time."""
        return amdahl(self.dense[what], len(layer.names) * layer.dense[what])


def advise(
    model: nn.Module,
    image: Shape,
    options: RoutingOptions | None = None,
    *,
    batch_size: int = 8,
    modes: Sequence[Mode] = ("eager",),
    passes: Sequence[Pass] = ("forward", "step"),
    repetitions: int = 5,
    autocast: torch.dtype | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Times the layers of a dense network that could be routed, and the network with those that gain.

    Args:
        model: a network without routed layers, on its device; unchanged.
        image: (C, H, W).
        options: how layers would be converted.
        batch_size: images per batch.
        modes: how whole networks run; layers run in eager mode.
        passes: forward pass in eval mode without gradients, or training step (forward and backward).
        repetitions: timed runs; routed and dense alternate.
        autocast: dtype of mixed precision.
        log: is called with lines of progress.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.Flatten(2), nn.Linear(16, 8), mlp)
    >>> found = advise(model, (3, 8, 8), RoutingOptions(experts=4), batch_size=1, repetitions=1, passes=["forward"])
    >>> [(layer.names, layer.shape, layer.way) for layer in found.layers]
    [(('3',), 'MLP 8→32→8 on 8 tokens', 'split'), (('3',), 'MLP 8→32→8 on 8 tokens', 'experts')]
    >>> found.capacity.conversions, round(found.share, 2)
    (({'layer': ['3'], 'experts': 4, 'capacity': 1},), 0.57)
    """
    check_patch_routing(model)
    routed = routed_layers(model)
    if routed:
        raise ValueError(
            f"{next(iter(routed))!r} is routed already; moesaic bench model times a network with routed layers, and "
            "advise is for dense ones"
        )
    options = options or RoutingOptions()
    timer = NetworkTimer(image, batch_size, tuple(passes), repetitions, autocast, _WARM_UP)
    network = copy.deepcopy(model)
    candidates, refused, cost = _candidates(network, image, options)
    log(f"timing the network, and {len({each.pair.names for each in candidates})} layers, one of each shape")
    dense = timer.time_network(network)
    layers = timer.time_layers([each.pair for each in candidates], network, cost)
    timed = {layer.names: layer for layer in layers}.values()
    inside = {what: sum(len(layer.names) * layer.dense[what] for layer in timed) for what in passes}
    rows = list(zip(layers, candidates, strict=True))
    faster = [each for each in rows if each[0].way != "experts" and each[0].gains(passes)]
    speed = _plan(network, image, faster, options, dense, cost)
    if speed is not None and max(speed.estimated.values()) > NOISE:
        converted = copy.deepcopy(network)
        for conversion in speed.conversions:
            convert(converted, **conversion, input_size=image)
        measured: list[NetworkGain] = []
        for mode in modes:
            for what in passes:
                log(f"timing the converted network: {'training step' if what == 'step' else 'forward pass'}, {mode}")
                measured.append(timer.compare(mode, what, network, converted))
        speed = replace(speed, measured=tuple(measured))
    return Advice(
        dense,
        sum(layer.share for layer in timed),
        {what: amdahl(dense[what], inside[what]) for what in passes},
        tuple(sorted([*layers, *refused], key=lambda layer: -layer.share)),
        speed,
        _plan(network, image, [each for each in rows if each[0].way == "experts"], options, dense, cost),
    )


@dataclass(frozen=True)
class _Candidate:
    """A layer of a shape dense and routed, and what one more such layer adds to the network."""

    pair: LayerPair
    macs: int
    parameters: int


def _candidates(
    network: nn.Module, image: Shape, options: RoutingOptions
) -> tuple[list[_Candidate], list[LayerGain], ModelCost]:
    """Layers dense and routed, one of each shape and way; those that cannot be routed say why."""
    units = find_mlps(network)
    convertible = convertible_layers(network, input_size=image)
    parts = tuple(f"{name}." for name in convertible if name in units)
    names = [name for name in convertible if not name.startswith(parts)]
    shapes, cost = trace_shapes(network, names, image)
    found: list[_Candidate] = []
    refused: list[LayerGain] = []
    for alike in equal_layers(network, shapes):
        layer = network.get_submodule(alike[0])
        shape = describe_layer(layer, shapes[alike[0]])
        for way in ("split", "experts") if alike[0] in units else ("patches",):
            try:
                converted = convert(copy.deepcopy(network), alike[0], input_size=image, **options.of_way(way))
            except ValueError as refusal:
                note = str(refusal).removeprefix("convert: ")
                refused.append(LayerGain(alike, shape, share_of_macs(cost, alike), note=note, way=way))
                continue
            after = count_macs(converted, image)
            pair = LayerPair(alike, shape, layer, converted.get_submodule(alike[0]), way)
            found.append(_Candidate(pair, after.macs - cost.macs, after.parameters - cost.parameters))
    return found, refused, cost


def _plan(
    network: nn.Module,
    image: Shape,
    rows: Sequence[tuple[LayerGain, _Candidate]],
    options: RoutingOptions,
    dense: Mapping[Pass, float],
    cost: ModelCost,
) -> Plan | None:
    """The conversion of layers, with its cost and the speed that their times promise; None without layers."""
    if not rows:
        return None
    names: dict[str, list[str]] = {}
    for layer, _ in rows:
        names.setdefault(layer.way, []).extend(layer.names)
    conversions = ({"layer": _patterns(network, image, each), **options.of_way(way)} for way, each in names.items())
    more_macs = sum(len(layer.names) * each.macs for layer, each in rows)
    more_parameters = sum(len(layer.names) * each.parameters for layer, each in rows)
    return Plan(
        tuple(conversions),
        1 + more_macs / max(cost.macs, 1),
        1 + more_parameters / max(cost.parameters, 1),
        {what: amdahl(total, sum(layer.saved(what) for layer, _ in rows)) for what, total in dense.items()},
    )


def _patterns(network: nn.Module, image: Shape, names: Sequence[str]) -> list[str]:
    """Names of layers for `convert`, by patterns where these match the same layers and no others."""
    units = find_mlps(network)
    traced = trace_inputs(network, image, units)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join("*" if part.isdecimal() else part for part in name.split(".")), []).append(name)
    found: list[str] = []
    for pattern, group in groups.items():
        try:
            exact = len(group) > 1 and set(find_layers(network, pattern, units, traced)) == set(group)
        except ValueError:  # it matches layers that cannot be converted
            exact = False
        found += [pattern] if exact else group
    return found
