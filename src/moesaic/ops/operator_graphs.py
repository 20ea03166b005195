"""CUDA graphs of whole operators, one for each set of addresses of its tensors.

An operator launches up to some twenty kernels, each of which takes the host about as long as one graph of all. A graph
has fixed addresses, so most programs that use graphs copy their data to static buffers. Here nothing is copied: in a
training loop torch's allocator returns the same addresses step after step, and each set of addresses that occurs again
gets a graph of its own. On new addresses the work is launched kernel by kernel.

The workspaces of an operator are parts of one allocation, its arena, where workspaces that are not used at the same
time share memory. Outputs have allocations of their own, as they outlive the operator.

The CUDA driver is called by `ctypes`: torch's own graphs also advance random generators, by two launches per replay,
and hold the memory of every workspace for as long as the graph lives.
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

_MAX_INPUT_SETS = 128
"""Sets of input addresses per plan: layers of one shape share a plan, and have weights at different addresses."""
_MAX_GRAPHS_PER_INPUTS = 8
"""Graphs per set of input addresses, with outputs at different addresses."""
_MIN_CAPTURES = 16
"""Captures before the number of replays decides whether further graphs are captured."""
_MIN_REPLAYS_PER_CAPTURE = 4
"""With fewer replays per capture, addresses change all the time, and capturing stops."""
_CAPTURE_MODE_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: calls of other threads do not invalidate the capture."""
_STREAM_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: no synchronisation with the default stream, which would invalidate the capture."""
_ALIGNMENT = 512
"""Bytes: the alignment of torch's CUDA caching allocator."""


class Workspace(NamedTuple):
    """Memory that an operator uses while it runs."""

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
    """Whether a step reads it as a tensor; kernels read addresses."""


class OutputMemory(NamedTuple):
    """Memory that an operator returns as outputs."""

    slot: int
    bytes: int
    first: int
    """Step that allocates it."""
    empty: Callable[[], Tensor]
    is_view: bool
    """Whether it is allocated in the shape and strides of the output."""


class Arrangement(NamedTuple):
    """The places of an operator's workspaces."""

    places: dict[int, tuple[int, int]]
    """By slot: the number of the output whose memory the workspace uses, or -1 for the arena; and its first byte."""
    bytes: int
    """Size of the arena."""


def arrange(workspaces: Sequence[Workspace], outputs: Sequence[OutputMemory] = ()) -> Arrangement:
    """Places each workspace in the memory of an output that is not written yet, or else in an arena.

    Workspaces with disjoint lifetimes may share memory. Large ones are placed first, each at the first place that is
    free during its lifetime.
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
            end = start + -(-each.bytes // _ALIGNMENT) * _ALIGNMENT
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
            self._destroy(self.executable)  # the driver frees a graph that still runs when it ends


class GraphDriver:
    """The functions of the CUDA driver for graphs on one device.

    Captures run in a thread of their own: cuBLAS has one workspace per thread and stream, which all graphs then share.
    Memory that torch allocates in captures comes from a pool that is never released, because the graphs use it. They
    may share it, as they run one after another on the default stream.
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
        if cuda.cuStreamCreate(ctypes.byref(handle), _STREAM_NON_BLOCKING) or not handle.value:
            raise OSError("no stream")
        # torch's own streams come from a pool, so that others may use them during a capture
        self._stream = torch.cuda.ExternalStream(handle.value, device)
        self._pool = torch.cuda.MemPool()
        self._default = ctypes.c_void_p(0)
        self._device = device
        self._thread = ThreadPoolExecutor(1, "moesaic-capture")

    def capture(self, record: Callable[[int], None], matmul_dtype: torch.dtype | None) -> Graph | None:
        """Returns a graph of what ``record(stream)`` launches, or None if the capture fails.

        ``matmul_dtype``: the dtype of its matmuls, if it has any.
        """
        try:
            return self._thread.submit(self._capture, record, matmul_dtype).result()
        except RuntimeError:  # out of memory; or the interpreter exits, and threads accept no work any more
            return None

    def launch(self, graph: Graph) -> bool:
        """Launches a graph on the default stream; returns whether that succeeded."""
        return self._launch(graph.executable, self._default) == 0

    def _capture(self, record: Callable[[int], None], matmul_dtype: torch.dtype | None) -> Graph | None:
        exchange, begin, end, instantiate, destroy = self._capture_functions
        device, stream, mode = self._device, self._stream, ctypes.c_int(_CAPTURE_MODE_RELAXED)
        if exchange(ctypes.byref(mode)):
            return None
        try:
            context = torch.inference_mode()  # in which both normal and inference tensors may be written
            with torch.cuda.device(device), torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool), context:
                if matmul_dtype is not None:  # allocates the workspace of cuBLAS before the capture
                    small = torch.ones(1, 8, 8, dtype=matmul_dtype, device=f"cuda:{device}")
                    torch.bmm(small, small)
                handle, graph, executable = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
                if begin(handle, _CAPTURE_MODE_RELAXED):
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
    """Returns the driver of a device; None without a CUDA driver, or without memory pools in torch's allocator."""
    if device < 0:
        return None
    try:
        return GraphDriver(device)
    except (OSError, AttributeError, RuntimeError):
        return None


class CapturedOperator:
    """The work of a launch plan, replayed from graphs at addresses that occur again.

    Args:
        steps: the steps of the plan without allocations.
        slots: the number of slots.
        workspaces: memory that the operator uses while it runs.
        outputs: memory that the operator returns.
        matmul_dtype: the dtype of its matmuls, if it has any.
        device: the GPU.
        pays: whether a graph takes the host less time than the steps.
    """

    def __init__(
        self,
        steps: Sequence[Launch],
        slots: int,
        workspaces: Sequence[Workspace],
        outputs: Sequence[OutputMemory],
        matmul_dtype: torch.dtype | None,
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
        self._matmul_dtype = matmul_dtype
        self._graphs: dict[tuple[int, ...], dict[Any, Graph | None]] = {}
        """By addresses of inputs: graphs by addresses of arena and outputs; None for addresses that occurred once."""
        self._captured = self._replayed = 0
        self._driver: GraphDriver | None = None
        self._device = device
        self.is_on = pays and device.type == "cuda"
        """Whether graphs are used: the plan calls `run` only then."""

    def run(self, inputs: list[Tensor], addresses: list[int]) -> list[Tensor] | None:
        """Runs the work on the default stream and returns the outputs; None, without running it, for new inputs."""
        at = tuple(addresses)
        graphs = self._graphs.get(at)
        if graphs is None:
            if len(self._graphs) >= _MAX_INPUT_SETS:
                self._graphs = {}
            self._graphs[at] = {}
            return None
        arena = self._empty_arena()
        outputs = [empty() for empty in self._empties]
        key: Any = (arena.data_ptr(), *[each.data_ptr() for each in outputs])
        if self._matmul_dtype is not None:
            key = key, matmul_settings()
        graph = graphs.get(key)
        if graph is None and key in graphs:
            graph = graphs[key] = self._capture(inputs, arena, outputs)
        if graph is None:
            if len(graphs) >= _MAX_GRAPHS_PER_INPUTS:
                graphs.clear()
            graphs[key] = None
            self.work(inputs, arena, outputs, 0)
        elif self._driver is not None and self._driver.launch(graph):
            self._replayed += 1
        else:
            self.work(inputs, arena, outputs, 0)
        return outputs

    def work(self, inputs: list[Tensor], arena: Tensor, outputs: list[Tensor], stream: int) -> None:
        """Runs the work step by step."""
        slots: list[Any] = [*inputs, *[None] * (self._slots - len(inputs))]
        addresses = [0 if each is None else each.data_ptr() for each in slots]
        memories = [*outputs, arena]  # the arena has the number -1
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
        """Allocates the arena and the memory of the outputs."""
        return self._empty_arena(), [empty() for empty in self._empties]

    def _capture(self, inputs: list[Tensor], arena: Tensor, outputs: list[Tensor]) -> Graph | None:
        """Captures a graph; None, and no more graphs, if that fails or too few graphs are replayed."""
        graph = None
        if self._captured < _MIN_CAPTURES or self._replayed >= _MIN_REPLAYS_PER_CAPTURE * self._captured:
            if self._driver is None:
                self._driver = driver(self._device.index)
            if self._driver is not None:
                graph = self._driver.capture(
                    lambda stream: self.work(inputs, arena, outputs, stream), self._matmul_dtype
                )
        if graph is None:
            self.is_on = False
            self._graphs = {}
        else:
            self._captured += 1
        return graph


def _empty_bytes(size: int, device: torch.device) -> Callable[[], Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return (lambda: torch.empty(size, dtype=torch.uint8, device=device)) if size else (lambda: nothing)
