"""Times of networks, and of their layers on their inputs in the network; dense and routed alternate.

"forward" is a pass in eval mode without gradients, "step" forward and backward in training mode; of a layer with the
gradient of its input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moesaic.argument_checks import first_line
from moesaic.bench.layer_benchmark import Pass
from moesaic.bench.timing import Timing, capture_cuda_graph, time_interleaved
from moesaic.models.inspection import eval_mode, first_tensor, first_weight, input_hooks
from moesaic.models.model_cost import ModelCost

__all__ = [
    "MODES",
    "NOISE",
    "LayerGain",
    "LayerPair",
    "Mode",
    "NetworkGain",
    "NetworkTimer",
    "Shape",
    "Way",
    "amdahl",
    "share_of_macs",
]

Mode = Literal["eager", "compiled", "captured"]
Way = Literal["patches", "split", "skip", "experts"]
"""How a layer of a dense network is routed; see `moesaic.bench.advise`."""
MODES: tuple[Mode, ...] = ("eager", "compiled", "captured")
NOISE = 1.05
"""Smaller ratios count as equal."""
Shape = tuple[int, int, int]
_LAYER_REPETITIONS = 3
"""Timed runs of a layer for each of a network."""


@dataclass(frozen=True)
class NetworkGain:
    """Times of the routed network and of its dense counterpart in one mode."""

    mode: Mode
    what: Pass
    dense: Timing | None
    routed: Timing | None
    note: str | None = None
    """Why there are no times."""

    @property
    def gain(self) -> float | None:
        """Dense time over routed time; above 1 routing is faster."""
        return None if self.dense is None or self.routed is None else self.dense.median / self.routed.median


@dataclass(frozen=True)
class LayerGain:
    """Times of layers of one shape on their inputs in the network: one of them, dense and routed."""

    names: tuple[str, ...]
    shape: str
    """Kernel, channels and map; of an MLP its features and tokens."""
    share: float
    """Of the dense network's multiply-adds, all layers of this shape together."""
    dense: Mapping[Pass, float] = field(default_factory=dict[Pass, float])
    """Milliseconds."""
    routed: Mapping[Pass, float] = field(default_factory=dict[Pass, float])
    note: str | None = None
    """Why it cannot be routed."""
    way: Way | None = None
    """How a layer of a dense network was routed."""

    def gain(self, what: Pass) -> float | None:
        """Dense time over routed time of the layer."""
        return self.dense[what] / self.routed[what] if what in self.routed else None

    def gains(self, passes: Iterable[Pass]) -> bool:
        """Whether the layer is faster routed, in every pass."""
        return self.note is None and all((self.gain(what) or 0.0) > NOISE for what in passes)

    def saved(self, what: Pass) -> float:
        """Milliseconds that all layers of this shape save together; negative where routing takes longer."""
        return len(self.names) * (self.dense[what] - self.routed[what]) if what in self.routed else 0.0


@dataclass(frozen=True)
class LayerPair:
    """Layers of one shape: one of them as it is, and routed."""

    names: tuple[str, ...]
    shape: str
    dense: nn.Module
    routed: nn.Module
    way: Way | None = None


def amdahl(total: float, layers: float) -> float:
    """Amdahl's law: the speedup of a network of time ``total`` if layers of time ``layers`` took none.

    >>> amdahl(10.0, 5.0), amdahl(10.0, 10.5)
    (2.0, inf)
    """
    return total / (total - layers) if layers < total else math.inf


@dataclass(frozen=True)
class NetworkTimer:
    """Times networks and their layers with one batch, set of passes and precision."""

    image: Shape
    batch_size: int
    passes: tuple[Pass, ...]
    repetitions: int
    autocast: torch.dtype | None = None
    warm_up: int = 3

    def time_network(self, network: nn.Module) -> dict[Pass, float]:
        """Milliseconds of each pass in eager mode."""
        x, network = self.images(network), copy.deepcopy(network)
        return {what: self._time(what, {"": network}, x)[""].median for what in self.passes}

    def time_layers(self, pairs: Sequence[LayerPair], network: nn.Module, cost: ModelCost) -> list[LayerGain]:
        """Times one layer of each pair on the input that the first of them gets in the network.

        Ways to route the same layers, one after the other, are timed in turns.
        """
        inputs = self._inputs(network, {pair.names[0] for pair in pairs})
        rows: list[LayerGain] = []
        for names, group in groupby(pairs, lambda pair: pair.names):
            same = list(group)
            layers = {str(place): copy.deepcopy(pair.routed) for place, pair in enumerate(same)}
            layers["dense"] = copy.deepcopy(same[0].dense)
            times = {what: self._time(what, layers, inputs[names[0]], inside=True) for what in self.passes}
            share = share_of_macs(cost, names)
            dense: dict[Pass, float] = {what: times[what]["dense"].median for what in self.passes}
            for place, pair in enumerate(same):
                routed: dict[Pass, float] = {what: times[what][str(place)].median for what in self.passes}
                rows.append(LayerGain(names, pair.shape, share, dense, routed, way=pair.way))
        return rows

    def compare(
        self, mode: Mode, what: Pass, dense: nn.Module, routed: Mapping[str, nn.Module]
    ) -> dict[str, NetworkGain]:
        """The dense network and the routed ones in turns; gains by the names of the routed ones."""
        x = self.images(dense)
        if mode == "captured" and not x.is_cuda:
            return {name: NetworkGain(mode, what, None, None, "CUDA graphs need a GPU") for name in routed}
        networks = {name: copy.deepcopy(network) for name, network in {"dense": dense, **routed}.items()}
        try:
            times = self._time(what, networks, x, mode)
        except Exception as error:  # compilers raise anything
            note = f"{type(error).__name__}: {first_line(error)}"
            return {name: NetworkGain(mode, what, None, None, note) for name in routed}
        return {name: NetworkGain(mode, what, times["dense"], times[name]) for name in routed}

    def images(self, model: nn.Module) -> Tensor:
        """A batch of random images for a network."""
        like = first_weight(model)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch_size, *self.image, generator=generator).to(like)
        return images.contiguous(memory_format=torch.channels_last) if like.is_cuda else images

    def _inputs(self, network: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
        """The inputs of layers in a forward pass of the network."""
        found: dict[str, Tensor] = {}

        def record(name: str, x: Tensor) -> None:
            found[name] = x.detach().clone()

        x = self.images(network)
        layers = {name: network.get_submodule(name) for name in names}
        with input_hooks(layers, record), eval_mode(network), torch.no_grad(), self._precision(x):
            network(x)
        return found

    def _time(
        self,
        what: Pass,
        models: Mapping[str, nn.Module],
        x: Tensor,
        mode: Mode = "eager",
        *,
        inside: bool = False,
    ) -> dict[str, Timing]:
        """Medians in turns; layers ``inside`` of a network take little time, and are timed more often."""
        runs: dict[str, Callable[[], object]] = {}
        for name, model in models.items():
            run = self._run(what, model, x.clone().requires_grad_() if inside else x, compiled=mode == "compiled")
            runs[name] = capture_cuda_graph(run) if mode == "captured" else run
        repetitions = _LAYER_REPETITIONS * self.repetitions if inside else self.repetitions
        return time_interleaved(runs, repetitions, self.warm_up, gpu_clock=mode == "captured")

    def _run(self, what: Pass, model: nn.Module, x: Tensor, *, compiled: bool) -> Callable[[], object]:
        model.train(what == "step")
        called: Callable[[Tensor], Any] = torch.compile(model) if compiled else model

        def forward() -> None:
            with torch.no_grad(), self._precision(x):
                called(x)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            x.grad = None
            with self._precision(x):
                y = first_tensor(called(x))
            y.float().sum().backward()

        return step if what == "step" else forward

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(x.device.type, self.autocast)


def share_of_macs(cost: ModelCost, names: Collection[str]) -> float:
    """The share of a network's multiply-adds in layers and in the layers inside of them."""
    return sum(layer.dense_macs for layer in cost.within(names)) / max(cost.dense_macs, 1)
