"""The operations of an expert: which layers and functions its ``forward`` calls, in order.

An expert is traced without running its layers. Its containers are copied without their tensors, and each layer of
torch in them is replaced by one that records the call; so neither the expert nor modules of other threads are touched,
as they would be by `torch.fx.symbolic_trace`, which replaces ``nn.Module.__call__`` for the process.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer

from moesaic.ops.hook_detection import has_hooks
from moesaic.ops.per_sample_functions import NotPerSampleError

__all__ = ["ModuleStates", "Operation", "Result", "trace_expert"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TENSOR_ATTRIBUTES = {"_parameters", "_buffers", "_non_persistent_buffers_set"}
"""Attributes of modules that may change from step to step."""
_MODULE_ATTRIBUTES = set(vars(nn.Module()))
"""Attributes that every module has."""
_COPIED_TYPES = (dict, OrderedDict, list, set)


@dataclass(frozen=True)
class Result:
    """The result of an operation, by its number; 0 is the input of the expert."""

    number: int


@dataclass(frozen=True)
class Operation:
    """A call of a layer, a function or a method of a tensor."""

    kind: str
    """Of `torch.fx.Node.op`: ``"call_module"``, ``"call_function"``, ``"call_method"`` or ``"output"``."""
    target: Any
    """The layer, the function, or the name of the method."""
    args: tuple[Any, ...]
    """Numbers and the like, and a `Result` for each tensor."""
    kwargs: dict[str, Any]


def trace_expert(expert: nn.Module, known: Callable[[nn.Module], bool]) -> list[Operation]:
    """Returns the operations of an expert, the output last; raises `NotPerSampleError` if it cannot be traced.

    Args:
        expert: the expert.
        known: whether a layer can be an operation; other modules are traced through if they are not torch's.

    >>> network = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> [operation.kind for operation in trace_expert(network, lambda module: module is not network)]
    ['call_module', 'call_module', 'output']
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    copies: dict[int, nn.Module] = {}
    layers: dict[str, nn.Module] = {}
    traced = _copy(expert, "expert", known, tracer, copies, layers)
    states = ModuleStates(copies.values())
    generators = _generator_states()
    try:
        output = traced(fx.Proxy(graph.placeholder("x"), tracer))
    except Exception as error:  # tracing runs the expert's own forward, which may raise anything
        reason = " ".join(str(error).split())
        raise NotPerSampleError(f"{type(expert).__name__} cannot be traced ({reason})") from error
    finally:
        drawn = _restore(generators)
    if drawn or states.changed():
        raise NotPerSampleError(f"{type(expert).__name__} {'draws random numbers' if drawn else 'has a state'}")
    if not isinstance(output, fx.Proxy):
        raise NotPerSampleError(f"{type(expert).__name__} returns a {type(output).__name__}")
    graph.output(output.node)
    return _operations(graph, layers)


class ModuleStates:
    """The states of modules without their tensors: attributes, children, hooks and training mode.

    A trace is valid while they do not change, such as the stride of a layer or the momentum of a norm.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._states = [_ModuleState(module) for module in modules]

    def changed(self) -> bool:
        """Whether the state of a module has changed."""
        try:
            return any(state.changed() for state in self._states)
        except (RuntimeError, ValueError):  # arrays, whose comparison has no truth value, were replaced
            return True


class _ModuleState:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.type = type(module)
        attributes = vars(module)
        self.number = len(attributes)
        names = [name for name in attributes if name not in _TENSOR_ATTRIBUTES]
        self.get: Callable[[Any], tuple[Any, ...]] = itemgetter("training", *names)
        # containers are copied as they may change; objects of other types are compared by identity first
        self.values = tuple(_copied(value) for value in self.get(attributes))

    def changed(self) -> bool:
        attributes = vars(self.module)
        if type(self.module) is not self.type or len(attributes) != self.number:
            return True
        return self.get(attributes) != self.values


def _copied(value: Any) -> Any:
    if type(value) not in _COPIED_TYPES:
        return value
    make = cast("Callable[[Iterable[Any]], Any]", type(value))
    if isinstance(value, dict):
        return make((key, _copied(each)) for key, each in cast("dict[Any, Any]", value).items())
    return make(map(_copied, value))


def _copy(
    module: nn.Module,
    path: str,
    known: Callable[[nn.Module], bool],
    tracer: GraphAppendingTracer,
    copies: dict[int, nn.Module],
    layers: dict[str, nn.Module],
) -> nn.Module:
    """A copy of a container, in which layers record their calls."""
    if id(module) in copies:
        return copies[id(module)]
    if has_hooks(module):
        raise NotPerSampleError(f"a {type(module).__name__} has hooks")
    if known(module):
        layers[path] = module
        made: nn.Module = _Recorder(path, tracer)
    elif type(module).__module__.startswith("torch.") and type(module) not in _CONTAINERS:
        raise NotPerSampleError(f"a {type(module).__name__} is not known to leave samples apart")
    else:
        made = copy.copy(module)
        children = cast("Iterable[tuple[str, nn.Module | None]]", module._modules.items())  # pyright: ignore[reportPrivateUsage]
        made.__dict__["_modules"] = {
            name: None if child is None else _copy(child, f"{path}.{name}", known, tracer, copies, layers)
            for name, child in children
        }
        for tensors in ("_parameters", "_buffers"):
            made.__dict__[tensors] = dict(vars(module)[tensors])
        for name in vars(module).keys() - _MODULE_ATTRIBUTES:
            made.__dict__[name] = _copied(vars(module)[name])
    copies[id(module)] = made
    return made


class _Recorder(nn.Module):
    """Stands for a layer: a call of it is recorded."""

    def __init__(self, path: str, tracer: GraphAppendingTracer) -> None:
        super().__init__()
        self.path = path
        self._tracer = tracer

    def forward(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_module", self.path, args, kwargs)


def _operations(graph: fx.Graph, layers: dict[str, nn.Module]) -> list[Operation]:
    nodes = list(cast("Iterable[fx.Node]", graph.nodes))
    numbers = {node: number for number, node in enumerate(nodes)}

    def result(node: fx.Node) -> Any:
        return Result(numbers[node])

    found: list[Operation] = []
    for node in nodes[1:]:
        target = layers[cast("str", node.target)] if node.op == "call_module" else node.target
        args, kwargs = (fx.map_arg(each, result) for each in (node.args, node.kwargs))
        found.append(Operation(node.op, target, cast("tuple[Any, ...]", args), dict(cast("dict[str, Any]", kwargs))))
    return found


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 # the ones that networks use


def _restore(states: Sequence[Any]) -> bool:
    """Sets Python's, numpy's and torch's generators to their states; returns whether they had changed."""
    python, numpy, torchs = states
    now = _generator_states()
    numpy_is_same = all(np.array_equal(one, other) for one, other in zip(now[1], numpy, strict=True))
    if now[0] == python and numpy_is_same and torch.equal(now[2], torchs):
        return False
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torchs)
    return True
