"""Recording of launch plans: the allocations, kernel launches and torch operators of an operator while it runs.

An operator whose Python code reads values of tensors has no plan.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.ops.launch_plan import Place, Plan, Step
from moesaic.ops.operator_graphs import CapturedOperator, OutputMemory, Workspace

__all__ = ["Recorder", "recorder"]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # some functions have no public name
_aten: Any = torch.ops.aten

_LAUNCHES_PER_GRAPH = 3
"""Kernel launches that take the host about as long as one launch of a graph."""
_LAUNCHES_PER_CALL = 3
"""Kernel launches that take the host about as long as one call of a torch operator."""
_MAX_ARENA_PART = 1 << 18
"""Bytes of the largest workspace in the arena, which is not released before the operator ends."""
_ALIGNMENT = 512
"""Bytes: the alignment of torch's CUDA caching allocator."""
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_FAST_CALLS: dict[Any, Callable[..., Any]] = {_aten.bmm.default: torch.bmm, _aten.bmm.out: torch.bmm}
"""Functions that parse their arguments in C++, faster than an operator overload, by the overload."""
_OUT_CALLS: dict[Any, Any] = {
    _aten.bmm.default: torch.bmm,
    _aten.mm.default: torch.mm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.sum.dim_IntList: torch.sum,
}
"""Functions with an ``out`` argument, by the operator that allocates its output."""
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default}
_MATMULS = {_aten.bmm.default, _aten.bmm.out, _aten.mm.default, _aten.mm.out}
_CAPTURABLE = {
    _aten.copy_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.add_.Tensor,
    _aten.mul_.Tensor,
    _aten.lerp_.Scalar,
    _aten.add.out,
    _aten.mul.out,
    _aten.bmm.out,
    _aten.mm.out,
}
"""Operators on given memory that can be captured: without random numbers and host syncs."""


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def recorder() -> Recorder | None:
    """Returns the active recorder of this thread, or None."""
    return _active.recorder


class _Unplannable(Exception):
    """The reason why an operator cannot have a plan."""


class Recorder(TorchDispatchMode):
    """Records the steps of an operator's launch plan.

    Args:
        inputs: tensors among the operator's arguments, in the order in which replays get them.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.problem = ""
        self._steps: list[Step] = []
        self._used: list[set[int]] = []
        """Slots that each step reads, writes or allocates."""
        self._allocated: dict[int, _Memory] = {}
        """Memory of allocations, by step."""
        self._returned: dict[int, list[_Memory]] = {}
        """Memory that torch operators allocate for their outputs, by step."""
        self._in_graph: list[Step | None] = []
        """Each step as it is captured, on memory that is allocated beforehand; None for nothing."""
        self.uncapturable = ""
        """Why the operator cannot be captured in a graph; empty if it can."""
        self._matmul_dtype: torch.dtype | None = None
        self._devices = {each.device for each in inputs}
        self._as_tensors: set[int] = set()
        """Slots that torch operators read as tensors; kernels read addresses."""
        self._slots: dict[int, tuple[int, int, int, torch.dtype]] = {}
        self._storages: list[Any] = []
        self._metadata: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._inputs = len(inputs)
        self.aliases: list[tuple[int, int]] = []
        """Pairs of inputs at one address."""
        for number, each in enumerate(inputs):
            known = self._slots.get(_storage_of(each).cdata)
            if known is not None:
                first = inputs[known[0]]
                if each.data_ptr() != first.data_ptr() or each.dtype != first.dtype:
                    self.problem = "inputs lie in one memory"
                self.aliases.append((known[0], number))
                self._metadata.append((tuple(each.shape), each.stride()))
            else:
                self._add_slot(each)

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
                self._add_operator(func, args, kwargs, found)
            except _Unplannable as error:
                self.problem = str(error)
        return found

    def place(self, tensor: Tensor) -> Place:
        """Returns the position of a tensor in a slot."""
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

    def add_step(self, step: Step, places: Sequence[Place], in_graph: Step | None = None) -> None:
        """Adds a step on tensors at these places; ``in_graph``: the step as it is captured."""
        self._steps.append(step)
        self._in_graph.append(in_graph)
        self._used.append({each.slot for each in places})

    def add_launch(
        self, make: Callable[[list[Any]], Step], arguments: Sequence[Any], *, as_tensors: bool = False
    ) -> None:
        """Adds the launch of a kernel: ``make`` returns its step, given the arguments with places for tensors.

        ``as_tensors``: the step reads the tensors in the slots, not only their addresses.
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
        launch = make(placed)
        self.add_step(launch, places, launch)

    def fail(self, problem: str) -> None:
        """Sets the reason why the operator has no plan."""
        self.problem = problem

    def plan(self, result: Any) -> Plan | None:
        """Returns the plan of the operator, given what it has returned; None if it cannot have one."""
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
            if memory is None or not arena.add(memory, memory.place.slot in retained | self._as_tensors):
                steps.append(step)
            released = [
                slot for slot in self._used[number] if last[slot] == number and slot not in retained | arena.slots
            ]
            if released:
                steps.append(_release(tuple(released)))
        if not arena.slots:
            del steps[0]
        captured = self._captured(outputs, last)
        return Plan(steps, len(self._metadata), outputs, isinstance(result, Tensor), self.aliases, captured)

    def _captured(self, places: list[Place], last: dict[int, int]) -> CapturedOperator | None:
        """Returns the work for CUDA graphs, given the outputs' places and the last step that uses each slot."""
        returned = {each.slot for each in places} - set(range(self._inputs))
        memories = [(number, each) for number, each in self._allocated.items()]
        memories += [(number, each) for number, several in self._returned.items() for each in several]
        devices = self._devices | {each.device for _, each in memories}
        if self.uncapturable or len(devices) != 1:
            return None
        workspaces = [
            each.workspace(number, last[each.place.slot], each.place.slot in self._as_tensors)
            for number, each in memories
            if each.place.slot not in returned
        ]
        outputs: list[OutputMemory] = []
        for number, memory in memories:
            if memory.place.slot in returned:
                views = [each for each in places if each.slot == memory.place.slot]
                outputs.append(memory.output(number, views, memory.place.slot in self._as_tensors))
        steps = [each for each in self._in_graph if each is not None]
        launches = sum(step is each for step, each in zip(self._steps, self._in_graph, strict=True))
        pays = launches + _LAUNCHES_PER_CALL * (len(steps) - launches) >= _LAUNCHES_PER_GRAPH
        return CapturedOperator(
            steps, len(self._metadata), workspaces, outputs, self._matmul_dtype, *devices, pays=pays
        )

    def _add_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        outputs = _as_tensors(found)
        if not outputs and not _tensors_in((args, kwargs)):
            return  # such as the promotion of dtypes, which depends on the key of the plan alone
        if not outputs:
            raise _Unplannable(f"{func} returns something else than tensors")
        known = [_storage_of(each).cdata in self._slots for each in outputs]
        if all(known):
            if func._schema.is_mutable:
                self._add_call(func, args, kwargs, [])
            return  # otherwise a view
        if any(known):
            raise _Unplannable(f"{func} returns views and new tensors")
        if func in _ALLOCATIONS:
            (tensor,) = outputs
            place = self._add_slot(tensor)
            self._allocated[len(self._steps)] = _Memory(place, tensor.dtype, tensor.device)
            self.add_step(self._allocated[len(self._steps)].allocate, [place])
            return
        self._add_call(func, args, kwargs, outputs)

    def _add_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Tensor]) -> None:
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
        number, made = len(self._steps), [self._add_slot(each) for each in new]
        slots = [each.slot for each in made]
        self._returned[number] = [
            _Memory(place, each.dtype, each.device) for place, each in zip(made, new, strict=True)
        ]
        if func in _MATMULS:
            self._matmul_dtype = args[0].dtype
        in_graph = None
        if not new and func in _CAPTURABLE:
            in_graph = _call(_FAST_CALLS.get(func) or func, given, named, [])
        elif new and func in _ZEROS:
            in_graph = _call(Tensor.zero_, [made[0]], {}, [])
        elif new and func in _COPIES:
            in_graph = _call(Tensor.copy_, [made[0], given[0]], {}, [])
        elif new and func in _OUT_CALLS:
            in_graph = _call(_OUT_CALLS[func], given, {**named, "out": made[0]}, [])
        else:
            self.uncapturable = f"{func} in a graph"
        self._as_tensors.update(slots)
        self.add_step(_call(_FAST_CALLS.get(func) or func, given, named, slots), [*places, *made], in_graph)

    def _add_slot(self, tensor: Tensor) -> Place:
        """Adds a slot for a tensor with a storage of its own."""
        storage = _storage_of(tensor)
        slot = len(self._metadata)
        self._storages.append(storage)  # while this weak reference lives, no other storage has its address
        self._slots[storage.cdata] = slot, tensor.data_ptr(), int(tensor.storage_offset()), tensor.dtype
        size, stride = tuple(tensor.shape), tensor.stride()
        self._metadata.append((size, stride))
        return Place(slot, 0, 0, size, stride, True)


def _as_tensors(found: Any) -> list[Tensor]:
    """Returns the outputs of an operator as a list; an empty one if not all of them are tensors."""
    outputs: list[Any] = list(cast("Sequence[Any]", found)) if isinstance(found, (list, tuple)) else [found]
    return outputs if all(isinstance(each, Tensor) for each in outputs) else []


def _tensors_in(value: Any) -> bool:
    """Whether there is a tensor among arguments, in containers too."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, (list, tuple)):
        return any(_tensors_in(each) for each in cast("Sequence[Any]", value))
    return isinstance(value, Tensor)


def _storage_of(tensor: Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def _empty(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Returns a function that allocates a tensor, on the current device of its type."""
    # the functions that code of torch.compile calls, without the dispatcher
    direct = getattr(_C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if direct is not None:
        return partial(direct, size, stride, dtype)
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def _span(place: Place) -> int:
    """Returns the number of elements from a tensor's first to its last."""
    span = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
    return span if all(place.size) else 0


class _Memory:
    """Memory that an operator allocates for a tensor."""

    def __init__(self, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        self.place, self.dtype, self.device = place, dtype, device
        self.bytes = _span(place) * dtype.itemsize
        empty = self.empty = _empty(place.size, place.stride, dtype, device)
        if not self.bytes:  # one address for all calls, by which graphs of the operators that read it are found
            with torch.inference_mode(False):  # autograd does not save inference tensors
                shared = empty()
            # a placeholder for no output never gets a gradient; other outputs are tensors of their own
            self.empty: Callable[[], Tensor] = (lambda: shared) if place.size == (0,) else lambda: shared.data

    def allocate(self, slots: list[Any], addresses: list[int], stream: int) -> None:
        slots[self.place.slot] = tensor = self.empty()
        addresses[self.place.slot] = tensor.data_ptr()

    def output(self, first: int, views: list[Place], is_tensor: bool) -> OutputMemory:
        """Returns the memory as that of outputs, which are these views.

        Args:
            first: the step that allocates it.
            views: places of the outputs in it.
            is_tensor: whether a step needs the tensor as it is allocated here.
        """
        place, (view, *others) = self.place, views
        elements = self.bytes // self.dtype.itemsize
        whole = not others and not view.offset and elements == _span(view) == math.prod(view.size)
        if is_tensor or not whole or not self.bytes:
            return OutputMemory(place.slot, self.bytes, first, self.empty, False)
        empty = _empty(view.size, view.stride, self.dtype, self.device)
        return OutputMemory(place.slot, self.bytes, first, empty, True)

    def workspace(self, first: int, last: int, is_tensor: bool) -> Workspace:
        """Returns the memory as a part of an arena; arguments are those of `Workspace`."""
        slot, _, _, size, stride, _ = self.place
        return Workspace(slot, self.bytes, first, last, self.dtype, size, stride, is_tensor)


class _Arena:
    """One allocation for the small workspaces of a plan of which only addresses are needed."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self._starts: list[tuple[int, int]] = []
        self._bytes = 0
        self._device: torch.device | None = None

    def add(self, memory: _Memory, needed: bool) -> bool:
        """Adds small memory that is not ``needed`` as a tensor or after the plan; returns whether it was added."""
        if needed or not 0 < memory.bytes <= _MAX_ARENA_PART:
            return False
        self.slots.add(memory.place.slot)
        self._starts.append((memory.place.slot, self._bytes))
        self._bytes += -(-memory.bytes // _ALIGNMENT) * _ALIGNMENT
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
