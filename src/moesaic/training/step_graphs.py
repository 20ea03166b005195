"""Training steps from graphs of a device: a step is recorded once, and replayed with other batches.

A replay does the work of a step on the device, at the same addresses and without its Python code. So batches are copied
into buffers of the graph, and whatever changes from step to step is in tensors: weights, learning rates, statistics,
counters of callbacks, and the states of random generators. There is a graph for each layout of a batch, each
`Callback.graph_key` and all settings that are in Python: options of optimizers, modes of modules, frozen weights.

Before a graph is used, two replays are compared with two eager steps from the same state, which is then restored. If
they differ by more than rounding, or the step cannot be recorded, it runs eagerly from there on, and a message says
why. `ops.graph_capture` has the graphs of GPUs; the tests have others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from moesaic.ops.graph_capture import DeviceGraph, capture_failure
from moesaic.training.step_state import StepState

if TYPE_CHECKING:
    from moesaic.training.callbacks import Callback
    from moesaic.training.recipe import Recipe

__all__ = ["DeviceGraphs", "GraphPlan", "StepGraphs", "graph_obstacle", "is_short"]

T = TypeVar("T")

Batch = tuple[Tensor, Tensor]
"""Images and labels."""
Outputs = tuple[Tensor, Tensor]
"""Loss and number of correct classifications."""
Work = Callable[[Tensor, Tensor], Outputs]
"""A step on images and labels."""

_COMPARED_STEPS = 2
"""Eager and replayed steps that are compared: the second one depends on the state that the first one leaves."""
_MIN_STEPS = 50
"""Steps of a run from which recording them saves more time than it takes."""
_MAX_GRAPHS = 24
"""Graphs of a run, at most: with more, settings in Python change all the time."""
_STEP_HOOKS = ("train_forward", "on_epoch_start", "epoch_context", "on_step_start", "extra_loss")
"""Hooks of callbacks that run within steps, or change what steps do."""


class DeviceGraphs(Protocol):
    """Makes graphs on a device."""

    def generators(self) -> list[torch.Generator]:
        """Returns the device's own random generators, and others that a step must not use."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Returns a context in which steps run, eager ones as well."""
        ...

    def no_waiting(self) -> AbstractContextManager[None]:
        """Returns a context in which whatever waits for the device raises an error."""
        ...

    def capture(self, work: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, T]:
        """Records ``work``, which may or may not run; returns its graph, and the tensors that a replay fills."""
        ...


@dataclass(frozen=True)
class GraphPlan:
    """The options with which the steps of a run are recorded."""

    graphs: DeviceGraphs
    callbacks: Sequence[Callback]
    log: Callable[[str], None]
    """Is called with the reason why steps run eagerly."""

    def key(self) -> Hashable:
        """Returns what the Python code of callbacks depends on in the step in progress."""
        return tuple(callback.graph_key() for callback in self.callbacks)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that callbacks change within steps."""
        return {
            f"{callback.name}.{name}": tensor
            for callback in self.callbacks
            for name, tensor in callback.step_tensors().items()
        }


class GraphedStep(Protocol):
    """The training step that is recorded."""

    model: nn.Module
    rounding: float
    """Rounding errors of a step, as a fraction of what it changes."""

    def step_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a step changes."""
        ...

    def settings(self) -> Hashable:
        """Returns the values in Python that a step depends on and a callback may change."""
        ...

    def layer_generators(self) -> Mapping[str, torch.Generator]:
        """Returns the random generators of layers."""
        ...


@dataclass(frozen=True)
class _StepGraph:
    """A recorded step."""

    graph: DeviceGraph
    batch: Batch
    outputs: Outputs
    changed: list[Tensor]
    gradients: list[tuple[nn.Parameter, Tensor | None]]

    def replay(self, x: Tensor, labels: Tensor) -> Outputs:
        self.batch[0].copy_(x)
        self.batch[1].copy_(labels)
        self.graph.replay()
        # caches of converted weights compare versions, which a replay does not raise
        torch.autograd.graph.increment_version(self.changed)
        return self.outputs[0].clone(), self.outputs[1].clone()

    def set_gradients(self) -> None:
        """Give the parameters the gradients of this graph."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


class StepGraphs:
    """Runs training steps, from graphs where possible.

    Args:
        plan: how steps are recorded.
        step: the step.
    """

    def __init__(self, plan: GraphPlan, step: GraphedStep) -> None:
        self._plan = plan
        self._step = step
        self._graphs: dict[Hashable, _StepGraph] = {}
        self._last: _StepGraph | None = None
        self._eager = False

    def run(self, work: Work, x: Tensor, labels: Tensor) -> Outputs:
        """Does a step of ``work`` on a batch, from its graph if there is one or can be one."""
        with self._plan.graphs.stream():
            if self._eager:
                return work(x, labels)
            key = (_layout(x), _layout(labels), self._plan.key(), self._step.settings())
            graph = self._graphs.get(key) or self._add(key, work, x, labels)
            if graph is None:
                return work(x, labels)
            if graph is not self._last:
                graph.set_gradients()
                self._last = graph
            return graph.replay(x, labels)

    def release(self) -> None:
        """Free the memory of all graphs."""
        if self._graphs:
            self._step.model.zero_grad()
        self._graphs.clear()
        self._last = None

    def _add(self, key: Hashable, work: Work, x: Tensor, labels: Tensor) -> _StepGraph | None:
        """Records and checks the step; None if steps run eagerly from now on."""
        start, graph, problem = None, None, ""
        try:
            if len(self._graphs) < _MAX_GRAPHS:
                start = StepState(self._tensors(), self._generators())
                graph, problem = self._record(work, (x, labels), start)
            else:
                problem = f"settings of steps have changed {_MAX_GRAPHS} times; keep them in tensors"
        except Exception as error:  # a device fails in ways of its own
            problem = capture_failure(error)
        if problem:
            graph = None
            self.release()
            self._eager = True
            self._plan.log(f"training goes on in eager mode, without CUDA graphs: {problem}")
        if start is not None:
            start.restore(self._tensors())
        if graph is not None:
            self._graphs[key], self._last = graph, None
        return graph

    def _record(self, work: Work, batch: Batch, start: StepState) -> tuple[_StepGraph | None, str]:
        """Records the step after ``start``; returns its graph, and how replays differ from eager steps."""
        expected = StepState(self._run_steps(work, batch), self._generators())
        replaced = start.replaced(self._tensors())
        if replaced is not None:
            return None, f"steps replace the tensor of {replaced}; change it in place, with copy_ or add_"
        start.restore(self._tensors())
        with self._plan.graphs.no_waiting():
            again = self._run_steps(work, batch)
        noise = expected.distances(again)
        start.restore(self._tensors())
        graph = self._capture(work, batch)
        start.restore(self._tensors())  # Python may have counted, and some devices work while they record
        replayed = self._run_steps(graph.replay, batch)
        difference = expected.difference(start, replayed, noise, self._step.rounding)
        return graph, difference and f"after {_COMPARED_STEPS} replays of a step, {difference}"

    def _run_steps(self, work: Work, batch: Batch) -> dict[str, Tensor]:
        """Does a few steps; returns what they change and what they return."""
        outputs: dict[str, Tensor] = {}
        for number in range(1, _COMPARED_STEPS + 1):
            outputs[f"loss {number}"], outputs[f"correct {number}"] = work(*batch)
        return {**self._tensors(), **outputs}

    def _capture(self, work: Work, batch: Batch) -> _StepGraph:
        x, labels = (torch.empty_like(tensor).copy_(tensor) for tensor in batch)
        graph, outputs = self._plan.graphs.capture(lambda: work(x, labels), self._generators())
        gradients = [(parameter, parameter.grad) for parameter in self._step.model.parameters()]
        return _StepGraph(graph, (x, labels), outputs, list(self._tensors().values()), gradients)

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._step.step_tensors(), **self._plan.tensors()}

    def _generators(self) -> list[torch.Generator]:
        return [*self._plan.graphs.generators(), *self._step.layer_generators().values()]


def graph_obstacle(recipe: Recipe, device: torch.device, callbacks: Sequence[Callback], processes: int) -> str:
    """Returns why the steps of a run cannot be replayed from CUDA graphs; empty if nothing is known against it."""
    if device.type != "cuda":
        return f"device {str(device)!r} has none"
    if processes > 1:
        return f"{processes} processes share a step"
    if recipe.compile:
        return "compile=True compiles the network"
    if recipe.autocast_dtype(device) is torch.float16:
        return "precision='float16' adapts its loss scale after every step; bfloat16 has none"
    for callback in callbacks:
        hooks = [name for name in _STEP_HOOKS if _overrides(callback, name)]
        if hooks and not callback.capturable:
            return f"{hooks[0]} of the callback {callback.name} may change steps; set capturable=True if it does not"
    return ""


def is_short(recipe: Recipe, images: int) -> bool:
    """Whether a run has so few steps that recording them does not pay."""
    return recipe.epochs * len(recipe.batch_sizes(images)) < _MIN_STEPS


def _overrides(callback: Callback, name: str) -> bool:
    from moesaic.training.callbacks import Callback

    return getattr(type(callback), name) is not getattr(Callback, name)


def _layout(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
