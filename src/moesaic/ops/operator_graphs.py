"""CUDA graphs of whole operators, by the addresses on which they work.

An operator launches up to some twenty kernels, of which each takes the host about as long as a graph of all of them. A
graph holds the addresses that its kernels had when it was captured, so most programs that use graphs copy their data to
fixed places. Here nothing is copied. A training loop gets the same addresses from torch's allocator step after step,
and each set of addresses that is seen again has a graph of its own. With addresses that were never seen, the work is
done launch by launch.

The workspaces of an operator are parts of one allocation, its arena, where those that are not needed at the same time
share memory; its outputs are allocations of their own, as they live on.

The driver is called by `ctypes`: torch's own graphs also advance random generators, which takes two launches at every
replay, and keep every workspace for as long as the graph lives.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.ops.graph_capture import matmul_settings

__all__ = ["Arrangement", "CapturedOperator", "Graph", "GraphDriver", "OutputMemory", "Workspace", "arrange", "driver"]

Launch = Callable[[list[Any], list[int], int], None]
"""``launch(slots, addresses, stream)``, as in `moesaic.ops.launch_plan`."""

_MOST = 128
"""Sets of input addresses of one plan: layers of one shape share it and differ in the addresses of their weights."""
_MOST_PER_INPUTS = 8
"""Graphs for one set of inputs, which differ in where the outputs lie."""
_TRIALS = 16
"""Graphs that are captured before it counts how often they were replayed."""
_WORTH = 4
"""Replays per capture below which capturing stops: addresses then change all the time."""
_RELAXED = 2
"""Capture mode: what other threads call is none of this capture's business."""
_NON_BLOCKING = 1
"""A stream that does not wait for the default one, which would end the capture."""
_ALIGNED = 512
"""As torch's allocator of GPU memory aligns."""


class Workspace(NamedTuple):
    """Memory that an operator needs while it runs."""

    slot: int
    bytes: int
    first: int
    """Step that allocates it."""
    last: int
    """Step that uses it last."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_tensor: bool
    """Whether a step needs it as a tensor: kernels take addresses."""


class OutputMemory(NamedTuple):
    """Memory that an operator returns."""

    slot: int
    bytes: int
    first: int
    """Step that allocates it."""
    empty: Callable[[], Tensor]
    is_view: bool
    """Whether it is allocated as the view that is returned."""


class Arrangement(NamedTuple):
    """Where the workspaces of an operator lie."""

    places: dict[int, tuple[int, int]]
    """By slot: number of the output in whose memory it lies, or -1 for the arena; and the byte there."""
    bytes: int
    """Size of the arena."""


def arrange(workspaces: Sequence[Workspace], outputs: Sequence[OutputMemory] = ()) -> Arrangement:
    """Gives each workspace a place in the memory of an output that is not written yet, or else in an arena.

    Those that live at different times may lie at one place. Large ones are placed first, each at the first place that
    is free while it lives.
    """
    taken: dict[int, list[tuple[int, int, Workspace]]] = {}
    places: dict[int, tuple[int, int]] = {}
    size = 0
    for each in sorted(workspaces, key=lambda each: -each.bytes):
        before = [number for number, output in enumerate(outputs) if each.last < output.first]
        for number in (*before, -1):
            start = 0
            for low, high, other in sorted(taken.get(number, ()), key=lambda found: found[0]):
                if each.first > other.last or other.first > each.last:
                    continue
                if start + each.bytes <= low:
                    break
                start = max(start, high)
            if number >= 0 and start + each.bytes > outputs[number].bytes:
                continue
            end = start + -(-each.bytes // _ALIGNED) * _ALIGNED
            taken.setdefault(number, []).append((start, end, each))
            places[each.slot] = number, start
            size = max(size, end) if number < 0 else size
            break
    return Arrangement(places, size)


class Graph:
    """An executable graph of the driver."""

    def __init__(self, executable: Any, destroy: Callable[[Any], Any]) -> None:
        self.executable = executable
        self._destroy = destroy

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._destroy(self.executable)  # one that still runs is freed when it is through


class GraphDriver:
    """The driver's functions for graphs on one device.

    Captures run in a thread of their own: cuBLAS has a workspace for each thread and stream, so that there is one for
    all graphs. What torch allocates meanwhile comes from a pool that is never released, because graphs go on using it.
    They may share it, as all of them run on the default stream, one after another.
    """

    def __init__(self, device: int, library: Any = None) -> None:
        self._cuda = cuda = library or ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._launch, self._destroy = cuda.cuGraphLaunch, cuda.cuGraphExecDestroy
        self._capture_functions = (
            cuda.cuThreadExchangeStreamCaptureMode,
            cuda.cuStreamBeginCapture_v2,
            cuda.cuStreamEndCapture,
            cuda.cuGraphInstantiateWithFlags,
            cuda.cuGraphDestroy,
        )
        handle = ctypes.c_void_p()
        if cuda.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) or not handle.value:
            raise OSError("no stream")
        # not one of torch's streams, which it gives to several users
        self._stream = torch.cuda.ExternalStream(handle.value, device)
        self._pool = torch.cuda.MemPool()
        self._default = ctypes.c_void_p(0)
        self._device = device
        self._thread = ThreadPoolExecutor(1, "moesaic-capture")

    def capture(self, record: Callable[[int], None], multiplies: torch.dtype | None) -> Graph | None:
        """Returns a graph of what ``record(stream)`` launches, or None if there can be none.

        ``multiplies``: the dtype of matrices that it multiplies by cuBLAS, if it does.
        """
        try:
            return self._thread.submit(self._capture, record, multiplies).result()
        except RuntimeError:  # no memory; or the interpreter ends, and starts no work in threads any more
            return None

    def launch(self, graph: Graph) -> bool:
        """Launches on the default stream; returns whether it was launched."""
        return self._launch(graph.executable, self._default) == 0

    def _capture(self, record: Callable[[int], None], multiplies: torch.dtype | None) -> Graph | None:
        exchange, begin, end, instantiate, destroy = self._capture_functions
        device, stream, mode = self._device, self._stream, ctypes.c_int(_RELAXED)
        if exchange(ctypes.byref(mode)):
            return None
        try:
            context = torch.inference_mode()  # in which memory of either kind may be written
            with torch.cuda.device(device), torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool), context:
                if multiplies is not None:  # allocates the workspace, where torch does not have it already
                    small = torch.ones(1, 8, 8, dtype=multiplies, device=f"cuda:{device}")
                    torch.bmm(small, small)
                handle, graph, executable = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
                if begin(handle, _RELAXED):
                    return None
                problem = False
                try:
                    record(stream.cuda_stream)
                except Exception:  # something that cannot be captured; kernels raise errors of their own
                    problem = True
                finally:
                    failed = end(handle, ctypes.byref(graph))
                if failed or not graph:
                    return None
                failed = problem or instantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
                destroy(graph)
                return None if failed else Graph(executable, self._destroy)
        finally:
            exchange(ctypes.byref(mode))


@lru_cache
def driver(device: int) -> GraphDriver | None:
    """The functions for a device; None where there is no such library, or it or torch's allocator is another one."""
    if device < 0:
        return None
    try:
        return GraphDriver(device)
    except (OSError, AttributeError, RuntimeError):
        return None


class CapturedOperator:
    """The work of a plan, from a graph once its addresses have been seen before.

    Args:
        steps: what it does, allocations left out.
        slots: number of its slots.
        workspaces: memory that it needs while it runs.
        outputs: memory that it returns.
        multiplies: dtype of the matrices that it multiplies by cuBLAS, if it does.
        device: the GPU.
        pays: whether a graph takes the host less time than the steps.
    """

    def __init__(
        self,
        steps: Sequence[Launch],
        slots: int,
        workspaces: Sequence[Workspace],
        outputs: Sequence[OutputMemory],
        multiplies: torch.dtype | None,
        device: torch.device,
        *,
        pays: bool,
    ) -> None:
        self._steps = list(steps)
        self._slots = slots
        self._workspaces = list(workspaces)
        self.arrangement = arrange(workspaces, outputs)
        self._empty_arena = _empty_bytes(self.arrangement.bytes, device)
        self.outputs = list(outputs)
        self.output_slots = [each.slot for each in outputs]
        self._empties = [each.empty for each in outputs]
        self._multiplies = multiplies
        self._known: dict[tuple[int, ...], dict[Any, Graph | None]] = {}
        """By addresses of inputs: graphs by addresses of arena and outputs, None for those that were seen once."""
        self._captured = self._replayed = 0
        self._driver: GraphDriver | None = None
        self._device = device
        self.is_on = pays and device.type == "cuda"
        """Whether the plan asks for a graph."""

    def run(self, inputs: list[Tensor], addresses: list[int]) -> list[Tensor] | None:
        """Does the work on the default stream and returns the outputs; None if these inputs are new, or it is off."""
        at = tuple(addresses)
        graphs = self._known.get(at)
        if graphs is None:
            if len(self._known) >= _MOST:
                self._known = {}
            self._known[at] = {}
            return None
        arena = self._empty_arena()
        outputs = [empty() for empty in self._empties]
        key: Any = (arena.data_ptr(), *[each.data_ptr() for each in outputs])
        if self._multiplies is not None:
            key = key, matmul_settings()
        graph = graphs.get(key)
        if graph is None and key in graphs:
            graph = graphs[key] = self._capture(inputs, arena, outputs)
        if graph is None:
            if len(graphs) >= _MOST_PER_INPUTS:
                graphs.clear()
            graphs[key] = None
            self.work(inputs, arena, outputs, 0)
        elif self._driver is not None and self._driver.launch(graph):
            self._replayed += 1
        else:
            self.work(inputs, arena, outputs, 0)
        return outputs

    def work(self, inputs: list[Tensor], arena: Tensor, outputs: list[Tensor], stream: int) -> None:
        """Does the work step by step."""
        slots: list[Any] = [*inputs, *[None] * (self._slots - len(inputs))]
        addresses = [0 if each is None else each.data_ptr() for each in slots]
        memories = [*outputs, arena]  # so that -1 is the arena
        for each in self._workspaces:
            number, start = self.arrangement.places[each.slot]
            memory = memories[number]
            addresses[each.slot] = memory.data_ptr() + start
            if each.is_tensor:
                tensor = torch.empty(0, dtype=each.dtype, device=arena.device)
                slots[each.slot] = tensor.set_(
                    memory.untyped_storage(), start // each.dtype.itemsize, each.size, each.stride
                )
        for slot, tensor in zip(self.output_slots, outputs, strict=True):
            slots[slot] = tensor
            addresses[slot] = tensor.data_ptr()
        for step in self._steps:
            step(slots, addresses, stream)

    def allocate(self) -> tuple[Tensor, list[Tensor]]:
        """An arena, and memory for outputs."""
        return self._empty_arena(), [empty() for empty in self._empties]

    def _capture(self, inputs: list[Tensor], arena: Tensor, outputs: list[Tensor]) -> Graph | None:
        """Captures a graph, if graphs are worth while."""
        graph = None
        if self._captured < _TRIALS or self._replayed >= _WORTH * self._captured:
            if self._driver is None:
                self._driver = driver(self._device.index)
            if self._driver is not None:
                graph = self._driver.capture(lambda stream: self.work(inputs, arena, outputs, stream), self._multiplies)
        if graph is None:
            self.is_on = False
            self._known = {}
        else:
            self._captured += 1
        return graph


def _empty_bytes(size: int, device: torch.device) -> Callable[[], Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return (lambda: torch.empty(size, dtype=torch.uint8, device=device)) if size else (lambda: nothing)
