"""Experts on padded samples, and the conditions under which an expert can run on them.

An expert is traced (`moesaic.experts.expert_trace`). Each of its operations must treat samples independently, except
for BatchNorm, which excludes the padding (`moesaic.ops.padded_batch_norm`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.experts.expert_trace import Operation, Result, trace_expert
from moesaic.layers.recording import RoutedLayer
from moesaic.ops.padded_batch_norm import batch_norm_of_first
from moesaic.ops.per_sample_functions import NotPerSampleError, call_per_sample, check_axes

__all__ = ["BatchNormRule", "PaddedExpert"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MAP_AXES: dict[type[nn.Module], int] = {
    layer: axes
    for axes, layers in enumerate(
        (
            (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
            (nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
            (nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
        ),
        start=1,
    )
    for layer in layers
}
_LAYERS = {*_BATCH_NORMS, *_ELEMENTWISE, *_DROPOUTS, *_MAP_AXES, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.Flatten}

BatchNormRule = Callable[[Any, Tensor], Tensor]
"""``rule(norm, x)`` returns the output of a BatchNorm in training on padded samples."""


class PaddedExpert:
    """The operations of an expert; raises `NotPerSampleError` if not all are known to treat samples independently.

    >>> expert = PaddedExpert(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    >>> x = torch.randn(5, 4)
    >>> expert.run(torch.cat([x, x[4:], x[4:]]), 5).shape
    torch.Size([5, 2])
    """

    def __init__(self, expert: nn.Module) -> None:
        self.module = expert
        self.operations = trace_expert(expert, _is_layer)
        for operation in self.operations:
            _check(operation)
        last: dict[int, int] = {}
        for place, operation in enumerate(self.operations):
            for number in _numbers((operation.args, operation.kwargs)):
                last[number] = place
        self._released = [
            [number for number, at in last.items() if at == place] for place in range(len(self.operations))
        ]
        """Results that are read by this operation last, by operation."""
        self._supported: set[tuple[torch.Size, torch.dtype]] = set()
        """Shapes and dtypes of samples on which the expert has run."""

    def layers(self) -> list[nn.Module]:
        """Returns the layers that the expert calls."""
        found = [operation.target for operation in self.operations if operation.kind == "call_module"]
        return list({id(layer): layer for layer in found}.values())

    def with_parameters(self, replaced: Mapping[int, Tensor]) -> PaddedExpert:
        """Returns the expert with other parameters, by the ids of those that they replace."""
        copies: dict[int, nn.Module] = {}
        for layer in self.layers():
            copied = copies[id(layer)] = copy.copy(layer)
            parameters = cast("dict[str, Tensor | None]", vars(layer)["_parameters"])
            vars(copied)["_parameters"] = {name: replaced.get(id(each), each) for name, each in parameters.items()}
        found = copy.copy(self)
        found.operations = [
            replace(each, target=copies[id(each.target)]) if each.kind == "call_module" else each
            for each in self.operations
        ]
        return found

    def run(self, rows: Tensor, count: int, *, update: bool = True) -> Tensor:
        """Returns the outputs of the first ``count`` of the rows (S, …); the other rows repeat the last of these.

        ``update``: whether running statistics are updated.
        """

        def batch_norm(norm: Any, x: Tensor) -> Tensor:
            return _norm_first(norm, x, count, update)

        layout = rows.shape[1:], rows.dtype
        before = [] if layout in self._supported else [(each, each.clone()) for each in self.module.buffers()]
        try:
            output = self.call(rows, batch_norm)
        except NotPerSampleError:
            with torch.no_grad():  # undo the updates of the operations before
                for buffer, value in before:
                    buffer.copy_(value)
            raise
        self._supported.add(layout)
        return output[:count]

    def call(self, rows: Tensor, batch_norm: BatchNormRule) -> Tensor:
        """Returns the outputs of all rows (S, …); ``batch_norm`` is the rule for BatchNorms in training."""
        results: list[Any] = [rows]
        for operation, released in zip(self.operations[:-1], self._released, strict=False):
            args, kwargs = _values((operation.args, operation.kwargs), results)
            if operation.kind == "call_module":
                results.append(_call_layer(operation.target, args[0], batch_norm))
            else:
                results.append(call_per_sample(operation.target, args, kwargs))
            for number in released:
                results[number] = None
        output = results[self.operations[-1].args[0].number]
        if not isinstance(output, Tensor):
            raise NotPerSampleError(f"it returns a {type(output).__name__}")
        return output


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, RoutedLayer):
        raise NotPerSampleError(f"a {type(module).__name__} routes")
    return type(module) in _LAYERS


def _check(operation: Operation) -> None:
    """Raises `NotPerSampleError` for a call that is known to mix samples or to draw random numbers."""
    if operation.kind == "call_module":
        layer = operation.target
        name = type(layer).__name__
        if len(operation.args) != 1 or operation.kwargs or not isinstance(operation.args[0], Result):
            raise NotPerSampleError(f"a {name} has several inputs")
        if type(layer) in _DROPOUTS and layer.training and layer.p:
            raise NotPerSampleError(f"a {name} draws random numbers")
        if getattr(layer, "return_indices", False):
            raise NotPerSampleError(f"a {name} returns indices")
    elif operation.kind == "get_attr" or (operation.kind == "output" and not isinstance(operation.args[0], Result)):
        raise NotPerSampleError(f"{operation.target} is no operation on samples")


def _call_layer(layer: Any, x: Any, batch_norm: BatchNormRule) -> Tensor:
    kind = cast("type[nn.Module]", type(layer))
    if not isinstance(x, Tensor):
        raise NotPerSampleError(f"a {kind.__name__} gets a {type(x).__name__}")
    if kind in _MAP_AXES:
        check_axes(x, _MAP_AXES[kind])
    elif kind is nn.Flatten:
        return call_per_sample(torch.flatten, (x, layer.start_dim, layer.end_dim), {})
    elif x.ndim < 2 or (kind is nn.LayerNorm and len(layer.normalized_shape) >= x.ndim):
        raise NotPerSampleError(f"a {kind.__name__} works on the batch")
    if kind in _BATCH_NORMS and (layer.training or layer.running_mean is None):
        return batch_norm(layer, x)
    return layer(x)


def _norm_first(norm: Any, x: Tensor, count: int, update: bool) -> Tensor:
    """Returns the output of a BatchNorm in training, with the statistics of the first ``count`` samples."""
    if update and count == len(x):
        return norm(x)
    if count * x.shape[2:].numel() == 1:
        norm(x[:count])  # raises torch's own error
    norm._check_input_dim(x)
    momentum, running = norm.momentum, None
    if update and norm.running_mean is not None and (norm.track_running_stats or not norm.training):
        running = norm.running_mean, norm.running_var
    if update and norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    return batch_norm_of_first(x, count, running, norm.weight, norm.bias, momentum or 0.0, norm.eps)


def _numbers(argument: Any) -> Iterable[int]:
    """Yields the numbers of all results among arguments."""
    if isinstance(argument, Result):
        yield argument.number
    elif isinstance(argument, dict):
        yield from _numbers(tuple(cast("dict[str, Any]", argument).values()))
    elif isinstance(argument, (tuple, list)):
        for each in cast("Sequence[Any]", argument):
            yield from _numbers(each)


def _values(argument: Any, results: Sequence[Any]) -> Any:
    """Returns arguments with the values of results."""
    if isinstance(argument, Result):
        return results[argument.number]
    if isinstance(argument, dict):
        return {name: _values(each, results) for name, each in cast("dict[str, Any]", argument).items()}
    if isinstance(argument, (tuple, list)):
        return tuple(_values(each, results) for each in cast("Sequence[Any]", argument))
    return argument
