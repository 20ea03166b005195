"""Plans of an operator by the kind of its arguments: types, sizes, strides and numbers (`moesaic.ops.launch_plan`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moesaic.ops import tile_sizes
from moesaic.ops.launch_plan import Plan
from moesaic.ops.launch_recorder import Recorder, recorder

__all__ = ["LaunchPlans", "Parts", "bypass_plans_if", "parts_of", "plan_on"]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch.cuda's own functions take three times as long

_MAX_PLANS = 256
"""Plans per operator; with more shapes, the oldest go."""
_RECENT = 8
"""Kinds of arguments with a first tensor of one shape that are compared first."""
_SHAPES = 64
"""Shapes of first tensors of which recent kinds are remembered."""
_planned = {"cuda"}
"""Types of devices on which operators are planned."""
_bypass: list[Callable[[], bool]] = []


def plan_on(device: str) -> None:
    """Plans operators on another type of device as well."""
    _planned.add(device)


def bypass_plans_if(condition: Callable[[], bool]) -> None:
    """Registers a condition in which operators run their Python code, such as a profiler that watches launches."""
    _bypass.append(condition)


def _is_bypassed() -> bool:
    for condition in _bypass:  # noqa: SIM110  any() takes longer
        if condition():
            return True
    return False


class Parts(NamedTuple):
    """Arguments of an operator: tensors, wherever they stand, and everything else with the places of the tensors."""

    tensors: list[Tensor]
    others: list[Any]


class _Recent(NamedTuple):
    """A kind of arguments, as torch's guards of compiled code compare it: in one call for all tensors."""

    others: list[Any]
    fits: Callable[..., bool]
    plan: Plan


class LaunchPlans:
    """An operator's implementation that replays what it did for arguments of the same kind.

    Args:
        implementation: takes tensors, lists of tensors, and numbers; returns a tensor or several.
        mutates: whether it changes its arguments.
    """

    def __init__(self, implementation: Callable[..., Any], *, mutates: bool = False) -> None:
        self._implementation = implementation
        self.mutates = mutates
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._lock = Lock()
        self._recent: dict[torch.Size, tuple[_Recent, ...]] = {}
        """By the shape of the first tensor: layers of a network that differ do so in that, more often than not."""

    def __call__(self, *arguments: Any) -> Any:
        return self.call(arguments, parts_of(arguments))

    def call(self, arguments: tuple[Any, ...], parts: Parts) -> Any:
        """Replays the plan for such arguments, or records one; ``parts`` are those of the arguments."""
        tiles = tile_sizes.version()
        tensors, others = parts
        if tiles is None or recorder() is not None or _is_bypassed() or not tensors:
            return self._implementation(*arguments)
        others.append(tiles)
        device = tensors[0].get_device()
        if device >= 0 and (_C._cuda_isCurrentStreamCapturing() or device != _C._cuda_getDevice()):
            return self._implementation(*arguments)
        addresses = [each.data_ptr() for each in tensors]
        bits = 0
        for each in addresses:
            bits |= each
        others.append(tuple([each & 15 == 0 for each in addresses]) if bits & 15 else True)  # kernels differ in that
        for recent in self._recent.get(tensors[0].shape, ()):
            if recent.others == others and recent.fits(*tensors) and recent.plan.fits(addresses):
                return recent.plan.run(tensors, addresses)
        return self._find(arguments, tensors, others, addresses)

    def _find(self, arguments: tuple[Any, ...], tensors: list[Tensor], others: list[Any], addresses: list[int]) -> Any:
        """Runs the plan for arguments that are not of a recent kind."""
        if tensors[0].device.type not in _planned:
            return self._implementation(*arguments)
        key = list(others)
        for each in tensors:
            key += (each.dtype, each.shape, each.stride(), each.get_device())
        found = tuple(key)
        try:
            plan = self._plans[found]
        except KeyError:
            return self._record(found, tensors, arguments)
        if plan is None or not plan.fits(addresses):
            return self._implementation(*arguments)
        fits = _guards(tensors)
        if fits is not None:
            self._remember(tensors[0].shape, _Recent(others, fits, plan))
        return plan.run(tensors, addresses)

    def _remember(self, shape: torch.Size, recent: _Recent) -> None:
        if len(self._recent) >= _SHAPES:
            self._recent = {}
        self._recent[shape] = (recent, *self._recent.get(shape, ())[: _RECENT - 1])

    def _record(self, key: tuple[Any, ...], tensors: list[Tensor], arguments: tuple[Any, ...]) -> Any:
        with Recorder(tensors) as recorded:
            result = self._implementation(*arguments)
        plan = recorded.plan(result)
        with self._lock:  # another thread must not add a plan while the oldest one is looked up
            while len(self._plans) >= _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return result


def parts_of(arguments: Sequence[Any]) -> Parts:
    """Returns what an operator's arguments consist of."""
    parts = Parts([], [])
    _sort(arguments, *parts)
    return parts


def _sort(arguments: Sequence[Any], tensors: list[Tensor], others: list[Any]) -> None:
    for each in arguments:
        if each is None or type(each) is int:
            others.append(each)
        elif isinstance(each, Tensor):
            tensors.append(each)
            others.append(Tensor)
        elif isinstance(each, (float, bool)):  # 1 == 1.0 == True and 0.0 == -0.0, which give other results
            others += (type(each), each or repr(each))
        elif isinstance(each, (list, tuple)):
            several = cast("Sequence[Any]", each)
            if several and type(several[0]) is int:  # numbers, of which a tuple is compared faster than one by one
                others.append(tuple(several))
                continue
            others.append(len(several))
            _sort(several, tensors, others)
        else:
            others.append(each)


def _guards(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """Returns what tells whether tensors have the same types, dtypes, devices, sizes and strides as these.

    None if torch has no such guards, or if a tensor is there twice, which they do not allow.
    """
    try:
        guards = _C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(each.shape) for each in tensors],
            dynamic_dims_strides=[list(each.stride()) for each in tensors],
        )
        return guards.check if guards.check(*tensors) else None
    except (AttributeError, TypeError):
        return None
