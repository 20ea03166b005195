"""Functions and methods of tensors whose output for a sample of a batch (S, …) does not depend on other samples.

These are elementwise functions, and functions over other axes than the first. All others raise `NotPerSampleError`, as
padding would change the outputs of other samples.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["NotPerSampleError", "call_per_sample", "check_axes"]


class NotPerSampleError(Exception):
    """The reason why the samples of an expert cannot be padded, as the end of a sentence."""


class _BatchSize(int):
    """The size S of a padded batch: allowed as the first axis of a shape, but not as a number of samples."""


_POOLING_OPTIONS = 6
"""Positional arguments of poolings before ``return_indices``."""

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any]


def call_per_sample(target: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Calls a function, or the method of that name, on a batch.

    >>> call_per_sample("flatten", (torch.zeros(5, 8, 2, 2), 1), {}).shape
    torch.Size([5, 32])
    >>> call_per_sample(torch.cumsum, (torch.zeros(5, 8), 1), {})
    Traceback (most recent call last):
    moesaic.ops.per_sample_functions.NotPerSampleError: cumsum is not known to leave samples apart
    """
    args, kwargs = _with_positional_input(args, kwargs)
    rule = _RULES.get(target)
    if rule is None:
        raise NotPerSampleError(f"{_name(target)} is not known to leave samples apart")
    if not rule(target, args, kwargs):
        raise NotPerSampleError(f"{_name(target)} with these arguments is not known to leave samples apart")
    found = getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
    return _BatchSize(found) if isinstance(found, int) else found


def _with_positional_input(args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """Returns arguments with the first one by position, where rules look for it."""
    if args:
        return args, kwargs
    first = [kwargs[name] for name in ("input", "tensors") if name in kwargs]
    return first, {name: value for name, value in kwargs.items() if name not in ("input", "tensors")}


def check_axes(x: Tensor, axes: int) -> None:
    """Raises an error for maps without a batch axis: convolutions and poolings would read samples as channels."""
    if x.ndim != axes + 2:
        raise NotPerSampleError(f"a layer for {axes} axes and channels gets samples of {x.ndim - 1} axes")


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def _each_value(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    others = (*args[1:], *kwargs.values())
    return isinstance(args[0], Tensor) and not any(isinstance(each, (Tensor, _BatchSize)) for each in others)


def _arithmetic(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """Numbers and tensors of equally many axes: others would broadcast over samples."""
    operands = (*args, *kwargs.values())
    tensors = [each for each in operands if isinstance(each, Tensor)]
    numbers = [each for each in operands if isinstance(each, (int, float)) and not isinstance(each, _BatchSize)]
    return len({each.ndim for each in tensors}) == 1 and len(tensors) + len(numbers) == len(operands)


def _pooling(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    check_axes(args[0], 2)
    return len(args) <= _POOLING_OPTIONS and not kwargs.get("return_indices", False)


def _reduction(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    return bool(dims) and all(dim % args[0].ndim for dim in cast("Sequence[int]", dims))


def _concatenation(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return bool(dim % args[0][0].ndim)


def _flattening(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    first = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    return bool(first % args[0].ndim)


def _dropout(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    bound = inspect.signature(F.dropout).bind(*args, **kwargs)
    bound.apply_defaults()
    return not (bound.arguments["training"] and bound.arguments["p"])


def _shape(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    given = (*args[1:], *kwargs.values())
    return given == ("shape",) if target is getattr else given in ((), (0,))


def _batch_size(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    return isinstance(args[0], torch.Size) and args[1] == 0


def _reshaping(target: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """To (S, …), where S is the size of the batch and not an equal number."""
    given = (*args[1:], *kwargs.values())
    shape = cast("_Args", given[0]) if given and isinstance(given[0], (tuple, list)) else given
    first = [isinstance(each, _BatchSize) for each in shape]
    return isinstance(args[0], Tensor) and first == [True] + [False] * (len(shape) - 1)


_RULES: dict[Any, Callable[[Any, _Args, _Kwargs], bool]] = {
    **dict.fromkeys((F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.mish, F.hardswish), _each_value),
    **dict.fromkeys((F.hardsigmoid, F.sigmoid, F.tanh, torch.relu, torch.tanh, torch.sigmoid), _each_value),
    **dict.fromkeys(("relu", "relu_", "tanh", "sigmoid", "clone", "contiguous"), _each_value),
    **dict.fromkeys(
        cast("_Args", (operator.add, operator.iadd, operator.sub, operator.mul, operator.truediv)), _arithmetic
    ),
    **dict.fromkeys((torch.add, torch.sub, torch.mul, "add", "add_", "sub", "mul", "mul_"), _arithmetic),
    **dict.fromkeys((F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d), _pooling),
    **dict.fromkeys((torch.mean, torch.sum, torch.amax, "mean", "sum", "amax"), _reduction),
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), _reduction),
    **dict.fromkeys((torch.flatten, "flatten"), _flattening),
    **dict.fromkeys((getattr, "size"), _shape),
    **dict.fromkeys(("view", "reshape"), _reshaping),
    torch.cat: _concatenation,
    F.dropout: _dropout,
    operator.getitem: _batch_size,
}
