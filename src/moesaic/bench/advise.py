"""``advise``: the speed that routing could gain in a dense network on this machine.

Each layer that could be routed is timed dense and routed on its own input, one of each shape. From these times follow
the bound on the network's speed (Amdahl's law) and an estimate of it; where that promises a gain, the routed network is
timed against the dense one. Nothing is trained, and accuracy is not measured.

    patches   a convolution as `PatchMoE`: each of E experts has 1/E of the filters and takes 1/E of the patches
    split     an MLP as `TokenMoE`: each of E experts has 1/E of the hidden neurons; by default half of them run on a
              token, so that half of the multiply-adds remain
    skip      every second block of a transformer as `TokenSkip`, which processes half of the tokens by default
    experts   an MLP as `TokenMoE`: E experts as wide as the MLP, by default one for each token: more parameters at the
              same multiply-adds
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import nn

from moesaic.bench.identical_layers import describe_layer, equal_layers, trace_shapes
from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.model_benchmark import check_patch_routing, outermost_routed_layers
from moesaic.bench.network_timer import (
    NOISE,
    LayerGain,
    LayerPair,
    Mode,
    NetworkGain,
    NetworkTimer,
    Shape,
    Way,
    amdahl,
    share_of_macs,
)
from moesaic.layers import TokenSkip
from moesaic.models.convert import convert
from moesaic.models.convert_candidates import convertible_layers, find_layers
from moesaic.models.input_shapes import LayerInputs, trace_inputs
from moesaic.models.mlp_candidates import MLPUnit, find_mlps
from moesaic.models.model_cost import ModelCost, count_macs
from moesaic.models.skip import skip

__all__ = ["Advice", "Plan", "RoutingOptions", "advise"]

PlanName = Literal["convert", "skip", "experts"]

_WARM_UP_RUNS = 1
_PLAN_OF_WAY: Mapping[Way, PlanName] = {"patches": "convert", "split": "convert", "skip": "skip", "experts": "experts"}
_SKIP_RULE = "every-2"


@dataclass(frozen=True)
class RoutingOptions:
    """Options of the routed layers."""

    experts: int = 8
    capacity: float | None = None
    """Of MLPs, as in `convert`; None: half of the experts that are parts of an MLP, one of those as wide as it."""
    keep: float = 0.5
    """Share of the tokens that blocks process, as in `moesaic.skip`."""
    trained: bool = False
    """Whether the network has trained weights, from which experts begin."""

    def of_way(self, way: Way) -> dict[str, Any]:
        """Arguments of `convert` and `skip`, without defaults."""
        start = {"init": "upcycle"} if self.trained else {}
        if way == "skip":
            return {"keep": self.keep}
        if way == "patches":
            return {"experts": self.experts, **start}
        if way == "split":
            return {"experts": self.experts, "capacity": self.capacity or max(self.experts / 2, 1), "init": "split"}
        return {"experts": self.experts, "capacity": self.capacity or 1, **start}


@dataclass(frozen=True)
class Plan:
    """Layers to route, with the estimated and the measured speed of the network."""

    name: PlanName
    """``"convert"``: all layers that gain as patches or split; ``"skip"``; ``"experts"``: all MLPs in that way."""
    conversions: tuple[Mapping[str, Any], ...]
    """As in `ModelSpec`: arguments of `convert`, or of `skip` with the blocks under the key ``"skip"``."""
    macs: float
    """Multiply-adds of the network over those of the dense one."""
    parameters: float
    """Parameters of the network over those of the dense one."""
    estimated: Mapping[Pass, float]
    """Dense time over routed time in eager mode, by the times of the layers."""
    measured: tuple[NetworkGain, ...] = ()
    """The whole network; empty where the estimate promises no gain."""

    def best(self, what: Pass) -> NetworkGain | None:
        """The measured times in the mode in which the routed network is fastest; None if there are none."""
        timed = [(each.routed.median, each) for each in self.measured if each.what == what and each.routed is not None]
        return min(timed, key=lambda each: each[0])[1] if timed else None


@dataclass(frozen=True)
class Advice:
    """Result of `advise`."""

    dense: Mapping[Pass, float]
    """Milliseconds of the dense network, eager."""
    share: float
    """Of the network's multiply-adds, in convolutions and MLPs that can be routed."""
    bounds: Mapping[Pass, float]
    """How many times as fast the network would be if those layers took no time."""
    layers: tuple[LayerGain, ...]
    """One of each shape and way."""
    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan | None:
        """The plan by which the network is fastest, as measured, over all passes; None if it is faster in none."""
        faster = [plan for plan in self.plans if self.faster(plan)]
        return max(faster, key=lambda plan: math.prod(self._gains(plan).values()), default=None)

    def faster(self, plan: Plan) -> tuple[Pass, ...]:
        """The passes in which the network is faster by a plan, as measured."""
        return tuple(what for what, gain in self._gains(plan).items() if gain > NOISE)

    def _gains(self, plan: Plan) -> dict[Pass, float]:
        """Measured gains; 0 of passes that were not timed."""
        return {what: (best.gain or 0.0) if (best := plan.best(what)) else 0.0 for what in self.dense}

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
    repetitions: int = 3,
    autocast: torch.dtype | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Times the layers of a dense network that could be routed, and the network with those that gain.

    Args:
        model: a network without routed layers, on its device; unchanged.
        image: (C, H, W).
        options: how layers would be routed.
        batch_size: images per batch.
        modes: how whole networks run; layers run in eager mode.
        passes: forward pass in eval mode without gradients, or training step (forward and backward).
        repetitions: timed runs of networks, three times as many of layers; routed and dense alternate.
        autocast: dtype of mixed precision.
        log: is called with lines of progress.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.Flatten(2), nn.Linear(16, 8), mlp)
    >>> found = advise(model, (3, 8, 8), RoutingOptions(experts=4), batch_size=1, repetitions=1, passes=["forward"])
    >>> [(layer.names, layer.shape, layer.way) for layer in found.layers]
    [(('3',), 'MLP 8→32→8 on 8 tokens', 'split'), (('3',), 'MLP 8→32→8 on 8 tokens', 'experts')]
    >>> found.plans[-1].conversions, round(found.share, 2)
    (({'layer': ['3'], 'experts': 4, 'capacity': 1},), 0.62)
    """
    check_patch_routing(model)
    routed = outermost_routed_layers(model)
    if routed:
        raise ValueError(
            f"{next(iter(routed))!r} is routed already; moesaic bench model times a network with routed layers, and "
            "advise is for dense ones"
        )
    options = options or RoutingOptions()
    timer = NetworkTimer(image, batch_size, tuple(passes), repetitions, autocast, _WARM_UP_RUNS)
    network = copy.deepcopy(model)
    candidates, refused, cost = _candidates(network, image, options)
    log(f"timing the network, and {len({each.pair.names for each in candidates})} layers, one of each shape")
    dense = timer.time_network(network)
    layers = timer.time_layers([each.pair for each in candidates], network, cost)
    timed = {layer.names: layer for layer in layers if layer.way != "skip"}.values()
    inside = {what: sum(len(layer.names) * layer.dense[what] for layer in timed) for what in passes}
    planner = _Planner(network, image, options, dense, cost)
    plans = planner.plans([each for each in zip(layers, candidates, strict=True) if _is_planned(each[0], passes)])
    return Advice(
        dense,
        sum(layer.share for layer in timed),
        {what: amdahl(dense[what], inside[what]) for what in passes},
        tuple(sorted([*layers, *refused], key=lambda layer: -layer.share)),
        planner.measure(plans, timer, modes, log),
    )


def _is_planned(layer: LayerGain, passes: Sequence[Pass]) -> bool:
    """Whether a plan has the layer: those for speed only where it gains."""
    return layer.way == "experts" or layer.gains(passes)


@dataclass(frozen=True)
class _Candidate:
    """A layer of a shape, dense and routed, and the cost that one more such routed layer adds to the network."""

    pair: LayerPair
    way: Way
    macs: float
    parameters: float


def _candidates(
    network: nn.Module, image: Shape, options: RoutingOptions
) -> tuple[list[_Candidate], list[LayerGain], ModelCost]:
    """Layers dense and routed, one of each shape and way; those that cannot be routed, each with its reason."""
    units = find_mlps(network)
    convertible = convertible_layers(network, input_size=image)
    parts = tuple(f"{name}." for name in convertible if name in units)
    names = [name for name in convertible if not name.startswith(parts)]
    shapes, cost = trace_shapes(network, names, image)
    found: list[_Candidate] = []
    refused: list[LayerGain] = []
    alike = equal_layers(network, shapes)
    ways: dict[Way, list[str]] = {"patches": [], "split": [], "experts": []}
    for name, *_ in alike:
        for way in _ways(name, units):
            ways[way].append(name)
    routed = {way: _routed_layers(network, image, names, options.of_way(way)) for way, names in ways.items() if names}
    for each in alike:
        name = each[0]
        layer = network.get_submodule(name)
        shape = describe_layer(layer, shapes[name])
        for way in _ways(name, units):
            converted = routed[way][name]
            if isinstance(converted, str):
                refused.append(LayerGain(each, shape, share_of_macs(cost, each), note=converted, way=way))
                continue
            output = units[name].output_name if name in units else None
            own = [name] if output is None else [name, output]
            before = sum(weight.numel() for part in own for weight in network.get_submodule(part).parameters())
            more = converted.macs - _macs(cost, own), converted.parameters - before
            found.append(_Candidate(LayerPair(each, shape, layer, converted.layer, way), way, *more))
    return [*found, *_skipping(network, image, options, cost)], refused, cost


def _ways(name: str, units: Mapping[str, MLPUnit]) -> tuple[Way, ...]:
    return ("split", "experts") if name in units else ("patches",)


@dataclass(frozen=True)
class _RoutedLayer:
    layer: nn.Module
    macs: int
    parameters: int


def _routed_layers(
    network: nn.Module, image: Shape, names: Sequence[str], options: Mapping[str, Any]
) -> dict[str, _RoutedLayer | str]:
    """Layers routed in one copy of the network, or why one of them cannot be.

    Each conversion runs the network, so that layers are converted together; those with a refused one among them, in
    halves.
    """
    try:
        converted = convert(copy.deepcopy(network), names, input_size=image, **options)
    except ValueError as refusal:
        if len(names) == 1:
            return {names[0]: str(refusal).removeprefix("convert: ")}
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        return {name: each for half in halves for name, each in _routed_layers(network, image, half, options).items()}
    cost = count_macs(converted, image)
    layers = {name: converted.get_submodule(name) for name in names}
    return {
        name: _RoutedLayer(layer, _macs(cost, [name]), sum(weight.numel() for weight in layer.parameters()))
        for name, layer in layers.items()
    }


def _macs(cost: ModelCost, names: Collection[str]) -> int:
    """Multiply-adds of layers and of whatever is inside of them."""
    return sum(layer.macs for layer in cost.within(names))


def _skipping(network: nn.Module, image: Shape, options: RoutingOptions, cost: ModelCost) -> list[_Candidate]:
    """Blocks that could skip tokens, one of each shape; none in networks that are no transformers."""
    try:
        skipping = skip(copy.deepcopy(network), _SKIP_RULE, input_size=image, **options.of_way("skip"))
    except ValueError:
        return []
    modules = cast("Iterable[tuple[str, nn.Module]]", skipping.named_modules())
    names = [name for name, block in modules if isinstance(block, TokenSkip)]
    shapes, _ = trace_shapes(network, names, image)
    after = count_macs(skipping, image)
    more = (after.macs - cost.macs) / len(names), (after.parameters - cost.parameters) / len(names)
    found: list[_Candidate] = []
    for alike in equal_layers(network, shapes):
        block = network.get_submodule(alike[0])
        shape = describe_layer(block, shapes[alike[0]])
        found.append(
            _Candidate(LayerPair(alike, shape, block, skipping.get_submodule(alike[0]), "skip"), "skip", *more)
        )
    return found


@dataclass(frozen=True)
class _Planner:
    network: nn.Module
    image: Shape
    options: RoutingOptions
    dense: Mapping[Pass, float]
    cost: ModelCost

    def plans(self, rows: Sequence[tuple[LayerGain, _Candidate]]) -> list[Plan]:
        """The plans that have layers, with the cost of the network and its estimated speed."""
        found: list[Plan] = []
        for plan in dict.fromkeys(_PLAN_OF_WAY.values()):
            own = [each for each in rows if _PLAN_OF_WAY[each[1].way] == plan]
            if not own:
                continue
            more_macs = sum(len(layer.names) * each.macs for layer, each in own)
            more_parameters = sum(len(layer.names) * each.parameters for layer, each in own)
            saved = {what: sum(layer.saved(what) for layer, _ in own) for what in self.dense}
            found.append(
                Plan(
                    plan,
                    self._conversions([each for _, each in own]),
                    1 + more_macs / max(self.cost.macs, 1),
                    1 + more_parameters / max(self.cost.parameters, 1),
                    {what: amdahl(total, saved[what]) for what, total in self.dense.items()},
                )
            )
        return found

    def measure(
        self, plans: Sequence[Plan], timer: NetworkTimer, modes: Sequence[Mode], log: Callable[[str], None]
    ) -> tuple[Plan, ...]:
        """The plans, with times of the network for those with an estimated gain."""
        routed = {plan.name: self._routed(plan) for plan in plans if max(plan.estimated.values()) > NOISE}
        found: dict[str, list[NetworkGain]] = {name: [] for name in routed}
        for mode in modes if routed else ():
            for what in timer.passes:
                log(f"timing the routed network: {'training step' if what == 'step' else 'forward pass'}, {mode}")
                for name, gain in timer.compare(mode, what, self.network, routed).items():
                    found[name].append(gain)
        return tuple(replace(plan, measured=tuple(found.get(plan.name, ()))) for plan in plans)

    def _routed(self, plan: Plan) -> nn.Module:
        model = copy.deepcopy(self.network)
        for conversion in plan.conversions:
            if "skip" in conversion:
                others = {name: value for name, value in conversion.items() if name != "skip"}
                skip(model, conversion["skip"], input_size=self.image, **others)
            else:
                convert(model, input_size=self.image, **conversion)
        return model

    def _conversions(self, candidates: Sequence[_Candidate]) -> tuple[dict[str, Any], ...]:
        names: dict[Way, list[str]] = {}
        for each in candidates:
            names.setdefault(each.way, []).extend(each.pair.names)
        return tuple(
            {"skip": [_SKIP_RULE], **self.options.of_way(way)}
            if way == "skip"
            else {"layer": self._patterns(each), **self.options.of_way(way)}
            for way, each in names.items()
        )

    @cached_property
    def _inputs(self) -> tuple[dict[str, MLPUnit], LayerInputs]:
        """The MLPs, and the inputs of the layers."""
        units = find_mlps(self.network)
        return units, trace_inputs(self.network, self.image, units)

    def _patterns(self, names: Sequence[str]) -> list[str]:
        """Names of layers for `convert`, by patterns where these match the same layers and no others."""
        units, traced = self._inputs
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(".".join("*" if part.isdecimal() else part for part in name.split(".")), []).append(name)
        found: list[str] = []
        for pattern, group in groups.items():
            try:
                exact = len(group) > 1 and set(find_layers(self.network, pattern, units, traced)) == set(group)
            except ValueError:  # it matches layers that cannot be converted
                exact = False
            found += [pattern] if exact else group
        return found
