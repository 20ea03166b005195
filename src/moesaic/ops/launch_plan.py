"""Launch plans: what an operator does on the device, recorded once per shape and replayed without its Python code.

An operator of ours computes grids, tiles, strides and sizes of workspaces in Python, from the metadata of its arguments
alone. In eager mode that takes the host several times as long as the GPU needs for the kernels. The first
call of a kind (`LaunchPlans`) is recorded: allocations, launches of kernels, and the torch operators between them.
Views are not: they are offsets in the addresses of launches. Later calls replay the list with other addresses.
Workspaces are released after their last use, so that memory is that of the recorded call or less.

Operators whose Python code reads values of tensors are noticed when they are recorded, and run as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.ops import tile_sizes

__all__ = ["LaunchPlans", "Place", "Recorder", "Step", "bypass_plans_if", "plan_on", "recorder"]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch.cuda's own functions take three times as long
_aten: Any = torch.ops.aten

Step = Callable[[list[Any], list[int], int], None]
"""``step(slots, addresses, stream)``: does a part of the work of a plan on the memory in its slots."""

_MOST = 256
"""Plans per operator; with more shapes, the oldest go."""
_SMALL = 1 << 18
"""Bytes up to which workspaces share an allocation, and stay until the end of the operator."""
_ALIGNED = 512
"""As torch's allocator of GPU memory aligns."""
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_FAST: dict[Any, Callable[..., Any]] = {_aten.bmm.default: torch.bmm, _aten.bmm.out: torch.bmm}
"""Functions whose arguments torch parses in C++, faster than those of an overload of an operator."""


class Place(NamedTuple):
    """Where a tensor lies: in the memory of a slot."""

    slot: int
    byte: int
    """From the start of the slot's tensor."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool
    """Whether it is the slot's tensor itself."""

    def tensor(self, slots: list[Any]) -> Tensor:
        """Returns the tensor."""
        base = slots[self.slot]
        return base if self.whole else base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()
_planned = {"cuda"}
"""Types of devices on which operators are planned."""
_bypass: list[Callable[[], bool]] = []


def recorder() -> Recorder | None:
    """Returns what records the operator that runs in this thread, or None."""
    return _active.recorder


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


class _Unplannable(Exception):
    """The operator does something that a plan cannot repeat."""


class Recorder(TorchDispatchMode):
    """Notes what an operator does with its tensors.

    Args:
        inputs: tensors among the operator's arguments, in the order in which a replay gets them.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.problem = ""
        self._steps: list[Step] = []
        self._used: list[set[int]] = []
        """By step: slots that it reads, writes or makes."""
        self._allocated: dict[int, _Memory] = {}
        """By step that allocates."""
        self._as_tensors: set[int] = set()
        """Slots that are needed as tensors; kernels take addresses."""
        self._slots: dict[int, tuple[int, int, int, torch.dtype]] = {}
        self._storages: list[Any] = []
        self._metadata: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._inputs = len(inputs)
        self.aliases: list[tuple[int, int]] = []
        """Pairs of inputs that lie at one address."""
        for number, each in enumerate(inputs):
            known = self._slots.get(_storage_of(each).cdata)
            if known is not None and each.numel():
                first = inputs[known[0]]
                if each.data_ptr() != first.data_ptr() or each.dtype != first.dtype:
                    self.problem = "inputs lie in one memory"
                self.aliases.append((known[0], number))
                self._metadata.append((tuple(each.shape), each.stride()))
            else:
                self._add(each)

    def __enter__(self) -> Recorder:
        _active.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self.problem:
            try:
                self._note(func, args, kwargs, found)
            except _Unplannable as error:
                self.problem = str(error)
        return found

    def place(self, tensor: Tensor) -> Place:
        """Returns where a tensor lies."""
        known = self._slots.get(_storage_of(tensor).cdata)
        if known is None:
            raise _Unplannable("a tensor comes from outside of the operator")
        slot, address, offset, dtype = known
        size, stride = tuple(tensor.shape), tensor.stride()
        if tensor.dtype != dtype:
            raise _Unplannable("a tensor is read as another dtype")
        start = int(tensor.storage_offset()) - offset
        whole = start == 0 and self._metadata[slot] == (size, stride)
        return Place(slot, tensor.data_ptr() - address if tensor.numel() else 0, start, size, stride, whole)

    def add_step(self, step: Step, places: Sequence[Place]) -> None:
        """Notes a step on such tensors."""
        self._steps.append(step)
        self._used.append({each.slot for each in places})

    def add_launch(
        self, make: Callable[[list[Any]], Step], arguments: Sequence[Any], *, as_tensors: bool = False
    ) -> None:
        """Notes the launch of a kernel: ``make`` gets the arguments with places instead of tensors.

        ``as_tensors``: its step reads the slots, not only their addresses.
        """
        if self.problem:
            return
        try:
            placed = [self.place(each) if isinstance(each, Tensor) else each for each in arguments]
        except _Unplannable as error:
            self.problem = str(error)
            return
        places = [each for each in placed if isinstance(each, Place)]
        if as_tensors:
            self._as_tensors.update(each.slot for each in places)
        self.add_step(make(placed), places)

    def fail(self, problem: str) -> None:
        """Notes why there is no plan."""
        self.problem = problem

    def plan(self, result: Any) -> _Plan | None:
        """Returns the plan of the operator that has returned ``result``, or None if there is none."""
        if self.problem:
            return None
        try:
            outputs = [self.place(each) for each in _as_tensors(result)]
        except _Unplannable:
            return None
        retained = {each.slot for each in outputs} | set(range(self._inputs))
        arena = _Arena()
        steps: list[Step] = [arena.allocate]
        last: dict[int, int] = {}
        for number, used in enumerate(self._used):
            last.update(dict.fromkeys(used, number))
        for number, step in enumerate(self._steps):
            memory = self._allocated.get(number)
            if memory is None or not arena.takes(memory, memory.place.slot in retained | self._as_tensors):
                steps.append(step)
            released = [
                slot for slot in self._used[number] if last[slot] == number and slot not in retained | arena.slots
            ]
            if released:
                steps.append(_release(tuple(released)))
        if not arena.slots:
            del steps[0]
        return _Plan(steps, len(self._metadata), outputs, isinstance(result, Tensor), self.aliases)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        outputs = _as_tensors(found)
        if not outputs and not _tensors_in((args, kwargs)):
            return  # a rule about dtypes or sizes, the same for all arguments of the kind
        if not outputs:
            raise _Unplannable(f"{func} returns something else than tensors")
        known = [_storage_of(each).cdata in self._slots for each in outputs]
        if all(known):
            if func._schema.is_mutable:
                self._call(func, args, kwargs, [])
            return  # otherwise a view
        if any(known):
            raise _Unplannable(f"{func} returns views and new tensors")
        if func in _ALLOCATIONS:
            (tensor,) = outputs
            place = self._add(tensor)
            self._allocated[len(self._steps)] = _Memory(place, tensor.dtype, tensor.device)
            self.add_step(self._allocated[len(self._steps)].allocate, [place])
            return
        self._call(func, args, kwargs, outputs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Tensor]) -> None:
        places: list[Place] = []

        def placed(value: Any) -> Any:
            if isinstance(value, Tensor):
                places.append(self.place(value))
                self._as_tensors.add(places[-1].slot)
                return places[-1]
            if isinstance(value, (list, tuple)):
                return [placed(each) for each in cast("Sequence[Any]", value)]
            return value

        given = [placed(each) for each in args]
        named = {name: placed(each) for name, each in kwargs.items()}
        made = [self._add(each) for each in new]
        slots = [each.slot for each in made]
        self.add_step(_call(_FAST.get(func) or func, given, named, slots), [*places, *made])

    def _add(self, tensor: Tensor) -> Place:
        """A slot for a tensor whose memory is new."""
        storage = _storage_of(tensor)
        slot = len(self._metadata)
        self._storages.append(storage)  # a weak reference: another storage must not get its number
        self._slots[storage.cdata] = slot, tensor.data_ptr(), int(tensor.storage_offset()), tensor.dtype
        size, stride = tuple(tensor.shape), tensor.stride()
        self._metadata.append((size, stride))
        return Place(slot, 0, 0, size, stride, True)


class _Plan:
    """The recorded work of an operator."""

    def __init__(
        self, steps: list[Step], slots: int, outputs: list[Place], single: bool, aliases: list[tuple[int, int]]
    ) -> None:
        self._steps = steps
        self._slots = slots
        self._outputs = outputs
        self._single = single
        self._aliases = aliases

    def fits(self, inputs: list[Tensor]) -> bool:
        """Whether the inputs that were one tensor are one again."""
        return all(inputs[a].data_ptr() == inputs[b].data_ptr() for a, b in self._aliases)

    def run(self, inputs: list[Tensor]) -> Any:
        """Does the work on other inputs of the same kind."""
        slots: list[Any] = [*inputs, *[None] * (self._slots - len(inputs))]
        addresses = [each.data_ptr() for each in inputs]
        addresses += [0] * (self._slots - len(inputs))
        device = inputs[0].get_device()
        stream = _C._cuda_getCurrentRawStream(device) if device >= 0 else 0
        for step in self._steps:
            step(slots, addresses, stream)
        if self._single:
            return self._outputs[0].tensor(slots)
        return tuple([each.tensor(slots) for each in self._outputs])


class LaunchPlans:
    """An operator's implementation that replays what it did for arguments of the same kind.

    Args:
        implementation: takes tensors, lists of tensors, and numbers; returns a tensor or several.
        mutates: whether it changes its arguments.
    """

    def __init__(self, implementation: Callable[..., Any], *, mutates: bool = False) -> None:
        self._implementation = implementation
        self.mutates = mutates
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}

    def __call__(self, *arguments: Any) -> Any:
        tiles = tile_sizes.version()
        if tiles is None or _active.recorder is not None or _is_bypassed():
            return self._implementation(*arguments)
        tensors: list[Tensor] = []
        key: list[Any] = [tiles]
        _describe(arguments, tensors, key)
        if not tensors or tensors[0].device.type not in _planned:
            return self._implementation(*arguments)
        device = tensors[0].get_device()
        if device >= 0 and (_C._cuda_isCurrentStreamCapturing() or device != _C._cuda_getDevice()):
            return self._implementation(*arguments)
        found = tuple(key)
        try:
            plan = self._plans[found]
        except KeyError:
            return self._record(found, tensors, arguments)
        if plan is None or not plan.fits(tensors):
            return self._implementation(*arguments)
        return plan.run(tensors)

    def _record(self, key: tuple[Any, ...], tensors: list[Tensor], arguments: tuple[Any, ...]) -> Any:
        with Recorder(tensors) as recorded:
            result = self._implementation(*arguments)
        while len(self._plans) >= _MOST:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = recorded.plan(result)
        return result


def _describe(arguments: Sequence[Any], tensors: list[Tensor], key: list[Any]) -> None:
    """Collects the tensors among the arguments, and all that an implementation may read of the arguments."""
    for each in arguments:
        if isinstance(each, Tensor):
            tensors.append(each)
            key += (each.dtype, each.shape, each.stride(), each.get_device(), not each.data_ptr() & 15)
        elif isinstance(each, (list, tuple)):
            key.append(len(cast("Sequence[Any]", each)))
            _describe(cast("Sequence[Any]", each), tensors, key)
        else:
            key.append(each)


def _as_tensors(found: Any) -> list[Tensor]:
    """The tensors that an operator has returned; none if it has returned something else as well."""
    outputs: list[Any] = list(cast("Sequence[Any]", found)) if isinstance(found, (list, tuple)) else [found]
    return outputs if all(isinstance(each, Tensor) for each in outputs) else []


def _tensors_in(value: Any) -> bool:
    """Whether a tensor is among arguments."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, (list, tuple)):
        return any(_tensors_in(each) for each in cast("Sequence[Any]", value))
    return isinstance(value, Tensor)


def _storage_of(tensor: Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


class _Memory:
    """Memory that an operator allocates."""

    def __init__(self, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        self.place, self.device = place, device
        reach = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
        self.bytes = reach * dtype.itemsize if all(place.size) else 0
        self._empty = partial(torch.empty_strided, place.size, place.stride, dtype=dtype, device=device)
        # there is nothing in it that one call could leave to the next
        self._nothing = self._empty() if not self.bytes else None

    def allocate(self, slots: list[Any], addresses: list[int], stream: int) -> None:
        tensor = self._empty() if self._nothing is None else self._nothing
        slots[self.place.slot] = tensor
        addresses[self.place.slot] = tensor.data_ptr()


class _Arena:
    """One allocation for the small workspaces of a plan, of which kernels need the addresses alone."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self._starts: list[tuple[int, int]] = []
        self._bytes = 0
        self._device: torch.device | None = None

    def takes(self, memory: _Memory, needed: bool) -> bool:
        """Whether the memory is part of it; not if it is ``needed`` as a tensor or after the plan."""
        if needed or not 0 < memory.bytes <= _SMALL:
            return False
        self.slots.add(memory.place.slot)
        self._starts.append((memory.place.slot, self._bytes))
        self._bytes += -(-memory.bytes // _ALIGNED) * _ALIGNED
        self._device = memory.device
        return True

    def allocate(self, slots: list[Any], addresses: list[int], stream: int) -> None:
        arena = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        base, first = arena.data_ptr(), self._starts[0][0]
        slots[first] = arena
        for slot, start in self._starts:
            addresses[slot] = base + start


def _release(released: tuple[int, ...]) -> Step:
    def release(slots: list[Any], addresses: list[int], stream: int) -> None:
        for slot in released:
            slots[slot] = None

    return release


def _call(func: Callable[..., Any], given: list[Any], named: dict[str, Any], made: list[int]) -> Step:
    if func is _aten._to_copy.default and set(named) == {"dtype"}:
        func, given, named = Tensor.to, [*given, named["dtype"]], {"copy": True}

    def filled(value: Any, slots: list[Any]) -> Any:
        if isinstance(value, Place):
            return value.tensor(slots)
        return [filled(each, slots) for each in cast("list[Any]", value)] if isinstance(value, list) else value

    def call(slots: list[Any], addresses: list[int], stream: int) -> None:
        found = func(
            *[filled(each, slots) for each in given], **{name: filled(each, slots) for name, each in named.items()}
        )
        if made:
            for slot, tensor in zip(made, _as_tensors(found), strict=True):
                slots[slot] = tensor
                addresses[slot] = tensor.data_ptr()

    return call
