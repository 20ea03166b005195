"""Experts of one architecture as one network: whether a list of modules is that, and how it runs.

Every expert is traced (`moesaic.experts.expert_trace`). Experts are of one architecture if they do the same operations
with layers of the same options and shapes; names count for nothing. All operations must be known to work on values
that are stacked along the channels (`moesaic.ops.stacked_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.experts.expert_trace import ModuleStates, Operation, Result, trace_expert
from moesaic.layers.recording import RoutedLayer
from moesaic.ops.hooks import has_hooks
from moesaic.ops.sample_groups import SampleGroup
from moesaic.ops.stacked_functions import UngroupableError, call_stacked, check_axes
from moesaic.ops.stacked_layers import StackedPass

__all__ = ["ExpertGrouping", "GroupedExperts"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STACKED: dict[type[nn.Module], Callable[[StackedPass, Sequence[Any], Tensor], Tensor]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), StackedPass.conv),
    **dict.fromkeys(_BATCH_NORMS, StackedPass.batch_norm),
    nn.Linear: StackedPass.linear,
    nn.GroupNorm: StackedPass.group_norm,
    nn.LayerNorm: StackedPass.layer_norm,
}
_ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_POOLING_AXES: dict[type[nn.Module], int] = {
    pooling: axes
    for axes, poolings in enumerate(
        (
            (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
            (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
            (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
        ),
        start=1,
    )
    for pooling in poolings
}


@dataclass(frozen=True)
class _Step:
    """An operation, and the layer of every expert that it calls."""

    operation: Operation
    modules: tuple[nn.Module, ...]
    """Empty for functions and methods."""
    done: tuple[int, ...]
    """Results that no later step reads."""


class GroupedExperts:
    """Experts of one architecture; raises `UngroupableError` if they are not, or do what cannot be grouped.

    >>> from moesaic.ops.sample_groups import SampleGroup
    >>> experts = [nn.Sequential(nn.Linear(4, 2), nn.ReLU()) for _ in range(3)]
    >>> group = SampleGroup((0, 2), (5, 4), 5, torch.device("cpu"))
    >>> GroupedExperts(experts)(group, torch.randn(5, 2 * 4)).shape
    torch.Size([5, 4])
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        experts = list(experts)
        _check_apart(experts)
        traces = [trace_expert(expert, _is_layer) for expert in experts]
        for e, trace in enumerate(traces[1:], start=1):
            _check_same(traces[0], trace, e)
        self._steps = [
            _Step(operations[0], modules, done) for operations, modules, done in zip(*_aligned(traces), strict=True)
        ]
        for step in self._steps:
            _check_step(step)
        self._norms = [step.modules for step in self._steps if step.modules and type(step.modules[0]) in _BATCH_NORMS]
        if len({id(norm[0]) for norm in self._norms}) < len(self._norms):
            raise UngroupableError("a BatchNorm runs more than once")

    def __call__(self, group: SampleGroup, stacked: Tensor) -> Tensor:
        """Runs the experts of the group on samples (S, E·C, …); returns outputs (S, E·O, …).

        Running statistics move once all has run: a pass that cannot be grouped leaves no trace.
        """
        stacked_pass = StackedPass(group)
        stacked_pass.stack_norms([[norm[e] for e in group.experts] for norm in self._norms])
        results: list[Any] = [stacked]
        for step in self._steps[:-1]:
            results.append(_run(step, stacked_pass, results))
            for number in step.done:
                results[number] = None
        output: Tensor = results[self._steps[-1].operation.args[0].number]
        stacked_pass.update_statistics()
        return output


class ExpertGrouping:
    """The `GroupedExperts` of a layer, made anew when a module is no longer as it was; copies of it are empty."""

    def __init__(self) -> None:
        self._found: tuple[ModuleStates, GroupedExperts | UngroupableError] | None = None

    def find(self, experts: nn.ModuleList) -> GroupedExperts | UngroupableError:
        """Returns the experts as one network, or the reason why they are not."""
        if has_hooks(experts):
            return UngroupableError("all modules have hooks")
        found = self._found
        if found is None or found[0].changed():
            states = ModuleStates(cast("Iterable[nn.Module]", experts.modules()))
            try:
                found = states, GroupedExperts(experts)
            except UngroupableError as error:
                found = states, error.with_traceback(None)
            self._found = found
        return found[1]

    def refuse(self, reason: UngroupableError) -> None:
        """Stores a reason that only a pass has shown, so that no other pass is begun in vain."""
        if self._found is not None:
            self._found = self._found[0], reason.with_traceback(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGrouping:
        return ExpertGrouping()

    def __reduce__(self) -> tuple[type[ExpertGrouping], tuple[()]]:
        return ExpertGrouping, ()


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, RoutedLayer):
        raise UngroupableError(f"a {type(module).__name__} routes")
    return type(module) in _STACKED or type(module) in (*_ELEMENTWISE, *_DROPOUTS, *_POOLING_AXES, nn.Flatten)


def _check_apart(experts: Sequence[nn.Module]) -> None:
    """Refuses modules and buffers of several experts: their running statistics would move several times at once."""
    owner: dict[int, int] = {}
    for e, expert in enumerate(experts):
        for each in (*expert.modules(), *expert.buffers()):
            if owner.setdefault(id(each), e) != e:
                raise UngroupableError(f"experts {owner[id(each)]} and {e} share a {type(each).__name__}")


def _check_same(first: Sequence[Operation], other: Sequence[Operation], e: int) -> None:
    """Refuses an expert e whose operations are not those of expert 0."""
    if len(first) != len(other):
        raise UngroupableError(f"experts 0 and {e} have {len(first) - 1} and {len(other) - 1} operations")
    for one, two in zip(first, other, strict=True):
        same = (one.kind, one.args, one.kwargs) == (two.kind, two.args, two.kwargs)
        if one.kind == "call_module":
            same = same and _description(one.target) == _description(two.target)
        else:
            same = same and one.target == two.target
        if not same:
            names = [each.target if each.kind == "call_module" else each.kind for each in (one, two)]
            raise UngroupableError(f"experts 0 and {e} differ: {names[0]} and {names[1]}")
    # one layer that runs twice is not two layers
    calls = [[op.target for op in each if op.kind == "call_module"] for each in (first, other)]
    places = [[names.index(id(target)) for target in each] for each in calls for names in [list(map(id, each))]]
    if places[0] != places[1]:
        raise UngroupableError(f"experts 0 and {e} run their layers in other places")


def _description(layer: nn.Module) -> tuple[Any, ...]:
    """What layers of one architecture have in common: type, options, mode, shapes."""
    options = tuple(getattr(layer, name) for name in getattr(layer, "__constants__", ()) if hasattr(layer, name))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors)
    return type(layer), layer.training, options, shapes


def _aligned(
    traces: Sequence[Sequence[Operation]],
) -> tuple[list[tuple[Operation, ...]], list[tuple[nn.Module, ...]], list[tuple[int, ...]]]:
    """The operations of all experts, the layers that they call, and the results that they use last, step by step."""
    operations = list(zip(*traces, strict=True))
    modules = [
        tuple(cast("nn.Module", each.target) for each in step) if step[0].kind == "call_module" else ()
        for step in operations
    ]
    last = {result.number: place for place, step in enumerate(operations) for result in _results(step[0])}
    done = [tuple(number for number, at in last.items() if at == place) for place in range(len(operations))]
    return operations, modules, done


def _results(operation: Operation) -> Iterator[Result]:
    for each in (*operation.args, *operation.kwargs.values()):
        for value in cast("Iterable[Any]", each) if isinstance(each, (tuple, list)) else (each,):
            if isinstance(value, Result):
                yield value


def _check_step(step: _Step) -> None:
    """Refuses what cannot be grouped, as far as that is known before it runs."""
    operation = step.operation
    if step.modules:
        if len(operation.args) != 1 or operation.kwargs or not isinstance(operation.args[0], Result):
            raise UngroupableError(f"a {type(step.modules[0]).__name__} has several inputs")
        _check_layer(step.modules[0])
    elif operation.kind == "get_attr" or (operation.kind == "output" and not isinstance(operation.args[0], Result)):
        raise UngroupableError(f"{operation.target} is no operation on samples")


def _check_layer(layer: Any) -> None:
    name = type(layer).__name__
    if type(layer) in _DROPOUTS and layer.training and layer.p:
        raise UngroupableError(f"a {name} draws random numbers")
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        raise UngroupableError(f"a {name} has padding_mode={layer.padding_mode!r}")
    if getattr(layer, "return_indices", False):
        raise UngroupableError(f"a {name} returns indices")
    if type(layer) in _BATCH_NORMS and layer.training and layer.running_mean is not None and layer.momentum is None:
        raise UngroupableError(f"a {name} has momentum=None")


def _run(step: _Step, stacked_pass: StackedPass, results: Sequence[Any]) -> Any:
    operation = step.operation
    if step.modules:
        return _run_layer(step.modules, stacked_pass, results[operation.args[0].number])
    args = tuple(_value(each, results) for each in operation.args)
    return call_stacked(
        operation.target, args, {name: _value(each, results) for name, each in operation.kwargs.items()}
    )


def _run_layer(modules: Sequence[nn.Module], stacked_pass: StackedPass, x: Tensor) -> Tensor:
    kind = type(modules[0])
    if kind in _STACKED:
        return _STACKED[kind](stacked_pass, [modules[e] for e in stacked_pass.group.experts], x)
    if kind in _POOLING_AXES:
        check_axes(x, _POOLING_AXES[kind])
    if kind is nn.Flatten:
        return call_stacked(torch.flatten, (x, *(getattr(modules[0], name) for name in ("start_dim", "end_dim"))), {})
    return x if kind in _DROPOUTS else modules[0](x)


def _value(argument: Any, results: Sequence[Any]) -> Any:
    if isinstance(argument, Result):
        return results[argument.number]
    if isinstance(argument, (tuple, list)):
        return tuple(_value(each, results) for each in cast("Sequence[Any]", argument))
    return argument
