"""Cache of an operator's launch plans (`moesaic.ops.launch_plan`).

Its key has all that an operator's Python code depends on: dtypes, devices, sizes, strides and alignment of tensors, the
values of other arguments, and the tile sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moesaic.ops import tile_sizes
from moesaic.ops.launch_plan import Plan
from moesaic.ops.launch_recorder import Recorder, recorder

__all__ = ["FlatArguments", "LaunchPlans", "bypass_plans_if", "flatten", "plan_on"]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch.cuda's own functions take three times as long

_MAX_PLANS = 256
"""Plans per operator; the oldest is dropped for a new one."""
_MAX_GUARDED = 8
"""Guarded plans per shape of the first tensor."""
_MAX_SHAPES = 64
"""Shapes of the first tensor that have guarded plans."""
_device_types = {"cuda"}
"""Types of devices on which operators are planned."""
_bypass_conditions: list[Callable[[], bool]] = []


def plan_on(device: str) -> None:
    """Plans operators on another type of device too."""
    _device_types.add(device)


def bypass_plans_if(condition: Callable[[], bool]) -> None:
    """Registers a condition under which operators run without plans, such as a profiler with launch hooks."""
    _bypass_conditions.append(condition)


def _is_bypassed() -> bool:
    for condition in _bypass_conditions:  # noqa: SIM110  any() takes longer
        if condition():
            return True
    return False


class FlatArguments(NamedTuple):
    """Arguments of an operator without their nesting."""

    tensors: list[Tensor]
    others: list[Any]
    """All other values, lengths of lists, and ``Tensor`` at the places of the tensors: a part of the key."""


class _GuardedPlan(NamedTuple):
    """A plan whose key is compared by the guards of `torch.compile`: one call for all tensors."""

    others: list[Any]
    check: Callable[..., bool]
    plan: Plan


class LaunchPlans:
    """An operator's implementation with a launch plan for each kind of arguments.

    Args:
        implementation: takes tensors, lists of tensors, and numbers; returns a tensor or several.
        mutates: whether it changes arguments in place.
    """

    def __init__(self, implementation: Callable[..., Any], *, mutates: bool = False) -> None:
        self._implementation = implementation
        self.mutates = mutates
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._lock = Lock()
        self._guarded: dict[torch.Size, tuple[_GuardedPlan, ...]] = {}
        """The latest plans by the shape of the first tensor, in which most layers of a network differ."""

    def __call__(self, *arguments: Any) -> Any:
        return self.call(arguments, flatten(arguments))

    def call(self, arguments: tuple[Any, ...], flat: FlatArguments) -> Any:
        """Replays the plan for arguments of this kind, or records it; ``flat``: the same arguments."""
        tiles = tile_sizes.version()
        tensors, others = flat
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
        others.append(
            tuple([each & 15 == 0 for each in addresses]) if bits & 15 else True
        )  # kernels are compiled for either alignment
        for guarded in self._guarded.get(tensors[0].shape, ()):
            if guarded.others == others and guarded.check(*tensors) and guarded.plan.fits(addresses):
                return guarded.plan.run(tensors, addresses)
        return self._look_up(arguments, tensors, others, addresses)

    def _look_up(
        self, arguments: tuple[Any, ...], tensors: list[Tensor], others: list[Any], addresses: list[int]
    ) -> Any:
        """Runs the plan with this key, and guards it; records a new plan if there is none."""
        if tensors[0].device.type not in _device_types:
            return self._implementation(*arguments)
        values = list(others)
        for each in tensors:
            values += (each.dtype, each.shape, each.stride(), each.get_device())
        key = tuple(values)
        try:
            plan = self._plans[key]
        except KeyError:
            return self._record(key, tensors, arguments)
        if plan is None or not plan.fits(addresses):
            return self._implementation(*arguments)
        check = _guards(tensors)
        if check is not None:
            self._add_guarded(tensors[0].shape, _GuardedPlan(others, check, plan))
        return plan.run(tensors, addresses)

    def _add_guarded(self, shape: torch.Size, guarded: _GuardedPlan) -> None:
        if len(self._guarded) >= _MAX_SHAPES:
            self._guarded = {}
        self._guarded[shape] = (guarded, *self._guarded.get(shape, ())[: _MAX_GUARDED - 1])

    def _record(self, key: tuple[Any, ...], tensors: list[Tensor], arguments: tuple[Any, ...]) -> Any:
        with Recorder(tensors) as recorded:
            result = self._implementation(*arguments)
        plan = recorded.plan(result)
        with self._lock:  # another thread must not add a plan while the oldest one is looked up
            while len(self._plans) >= _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return result


def flatten(arguments: Sequence[Any]) -> FlatArguments:
    """Returns the tensors and other values among arguments, and in lists among them."""
    flat = FlatArguments([], [])
    _flatten_into(arguments, *flat)
    return flat


def _flatten_into(arguments: Sequence[Any], tensors: list[Tensor], others: list[Any]) -> None:
    for each in arguments:
        if each is None or type(each) is int:
            others.append(each)
        elif isinstance(each, Tensor):
            tensors.append(each)
            others.append(Tensor)
        elif isinstance(each, (float, bool)):  # 1 == 1.0 == True and 0.0 == -0.0, which give other results
            others += (type(each), each or repr(each))
        elif isinstance(each, (list, tuple)):
            values = cast("Sequence[Any]", each)
            if values and type(values[0]) is int:  # numbers, which are compared faster in a tuple
                others.append(tuple(values))
                continue
            others.append(len(values))
            _flatten_into(values, tensors, others)
        else:
            others.append(each)


def _guards(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """Returns a check that tensors have the types, dtypes, devices, sizes and strides of these.

    None where torch has no such guards, and for a tensor that occurs twice, which they do not allow.
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
