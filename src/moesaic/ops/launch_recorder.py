"""Recording of launch plans: notes what an operator allocates, launches and calls while it runs.

Operators whose Python code reads values of tensors are noticed, and have no plan.
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
"""Launches of kernels that take the host about as long as that of a graph."""
_LAUNCHES_PER_CALL = 3
"""Launches that take the host about as long as the call of a torch operator."""
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
_OUT: dict[Any, Any] = {
    _aten.bmm.default: torch.bmm,
    _aten.mm.default: torch.mm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.sum.dim_IntList: torch.sum,
}
"""Functions that write to given memory, by what does the same to new memory."""
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default}
_MATMULS = {_aten.bmm.default, _aten.bmm.out, _aten.mm.default, _aten.mm.out}
_IN_GRAPHS = {
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
"""Operators on given memory that a CUDA graph can repeat: they draw no numbers and ask the device nothing."""


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def recorder() -> Recorder | None:
    """Returns what records the operator that runs in this thread, or None."""
    return _active.recorder


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
        self._returned: dict[int, list[_Memory]] = {}
        """By step that calls a torch operator: what that allocates."""
        self._in_graph: list[Step | None] = []
        """By step: what it does in a graph, whose memory is there from the start."""
        self.uncapturable = ""
        """Why there can be no graph."""
        self._multiplies: torch.dtype | None = None
        self._devices = {each.device for each in inputs}
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
            if known is not None:
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

    def add_step(self, step: Step, places: Sequence[Place], in_graph: Step | None = None) -> None:
        """Notes a step on such tensors, and what it does in a graph, if anything."""
        self._steps.append(step)
        self._in_graph.append(in_graph)
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
        launch = make(placed)
        self.add_step(launch, places, launch)

    def fail(self, problem: str) -> None:
        """Notes why there is no plan."""
        self.problem = problem

    def plan(self, result: Any) -> Plan | None:
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
        captured = self._captured(outputs, last)
        return Plan(steps, len(self._metadata), outputs, isinstance(result, Tensor), self.aliases, captured)

    def _captured(self, places: list[Place], last: dict[int, int]) -> CapturedOperator | None:
        """The same for CUDA graphs, with the places that are returned and the step that uses each slot last."""
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
        return CapturedOperator(steps, len(self._metadata), workspaces, outputs, self._multiplies, *devices, pays=pays)

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
        number, made = len(self._steps), [self._add(each) for each in new]
        slots = [each.slot for each in made]
        self._returned[number] = [
            _Memory(place, each.dtype, each.device) for place, each in zip(made, new, strict=True)
        ]
        if func in _MATMULS:
            self._multiplies = args[0].dtype
        in_graph = None
        if not new and func in _IN_GRAPHS:
            in_graph = _call(_FAST.get(func) or func, given, named, [])
        elif new and func in _ZEROS:
            in_graph = _call(Tensor.zero_, [made[0]], {}, [])
        elif new and func in _COPIES:
            in_graph = _call(Tensor.copy_, [made[0], given[0]], {}, [])
        elif new and func in _OUT:
            in_graph = _call(_OUT[func], given, {**named, "out": made[0]}, [])
        else:
            self.uncapturable = f"{func} in a graph"
        self._as_tensors.update(slots)
        self.add_step(_call(_FAST.get(func) or func, given, named, slots), [*places, *made], in_graph)

    def _add(self, tensor: Tensor) -> Place:
        """A slot for a tensor whose memory is new."""
        storage = _storage_of(tensor)
        slot = len(self._metadata)
        self._storages.append(storage)  # a weak reference: another storage must not get its number
        self._slots[storage.cdata] = slot, tensor.data_ptr(), int(tensor.storage_offset()), tensor.dtype
        size, stride = tuple(tensor.shape), tensor.stride()
        self._metadata.append((size, stride))
        return Place(slot, 0, 0, size, stride, True)


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


def _empty(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Returns what allocates a tensor; on a GPU it is the current one."""
    # what compiled code calls, without the dispatcher
    direct = getattr(_C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if direct is not None:
        return partial(direct, size, stride, dtype)
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def _reach(place: Place) -> int:
    """Elements from a tensor's first to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True)) + 1
    return reach if all(place.size) else 0


class _Memory:
    """Memory that an operator allocates."""

    def __init__(self, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        self.place, self.dtype, self.device = place, dtype, device
        self.bytes = _reach(place) * dtype.itemsize
        empty = self.empty = _empty(place.size, place.stride, dtype, device)
        if place.size == (0,):  # a placeholder for no output: all calls share one, which never gets a gradient
            with torch.inference_mode(False):  # autograd does not save inference tensors
                shared = empty()
            self.empty: Callable[[], Tensor] = lambda: shared

    def allocate(self, slots: list[Any], addresses: list[int], stream: int) -> None:
        slots[self.place.slot] = tensor = self.empty()
        addresses[self.place.slot] = tensor.data_ptr()

    def output(self, first: int, views: list[Place], is_tensor: bool) -> OutputMemory:
        """The same as memory that is returned, as these views; ``is_tensor``: a step needs it as it was allocated."""
        place, (view, *others) = self.place, views
        elements = self.bytes // self.dtype.itemsize
        whole = not others and not view.offset and elements == _reach(view) == math.prod(view.size)
        if is_tensor or not whole or not self.bytes:
            return OutputMemory(place.slot, self.bytes, first, self.empty, False)
        empty = _empty(view.size, view.stride, self.dtype, self.device)
        return OutputMemory(place.slot, self.bytes, first, empty, True)

    def workspace(self, first: int, last: int, is_tensor: bool) -> Workspace:
        """The same as a part of an arena."""
        slot, _, _, size, stride, _ = self.place
        return Workspace(slot, self.bytes, first, last, self.dtype, size, stride, is_tensor)


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
