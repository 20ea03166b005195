"""Inference from graphs of a device: what a frozen module does for an input is recorded once, and replayed.

A replay does the work on the device at the same addresses, without its Python code, which takes the host longer than
the kernels take a GPU. There is a graph for each layout of the input, and for each stream and setting of torch on which
the work depends. The first calls run eagerly: kernels are compiled in them, and plans of cuDNN made. Then the work is
recorded; later calls copy their input into a buffer, replay, and return a copy of the output.

Whatever a replay cannot show runs eagerly: hooks, modes that see operators, transforms, captures of the user's own. If
a capture fails, all later calls run eagerly, and `InferenceGraphs.problem` says why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from moesaic.ops import tile_sizes
from moesaic.ops.eager_conditions import in_mode, is_plain_eager, no_grad_needed
from moesaic.ops.graph_capture import DeviceGraph, capture, capture_failure, matmul_settings
from moesaic.ops.hook_detection import hook_tables

__all__ = ["CudaInference", "InferenceDevice", "InferenceGraphs"]

T = TypeVar("T")

Work = Callable[[Tensor], Tensor]
"""Inference on a batch, from and to tensors of the device."""

_EAGER_CALLS = 2
"""Calls of a kind that run eagerly; the work is recorded after the last of them."""
_MOST_GRAPHS = 16
_MOST_KINDS = 256
"""Kinds of calls that are counted; of those that are not among the latest, calls are forgotten."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch's own functions take a microsecond each


class InferenceDevice(Protocol):
    """Makes graphs on a device."""

    def state(self) -> Hashable:
        """Returns what, besides the input, determines the work; None where nothing can be recorded or replayed."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """Records ``work``, which may or may not run; returns its graph, and the tensors that a replay fills."""
        ...


@dataclass(frozen=True, eq=False)
class _InferenceGraph:
    graph: DeviceGraph
    x: Tensor
    y: Tensor

    def replay(self, x: Tensor) -> Tensor:
        with torch.inference_mode():  # the buffers are inference tensors
            self.x.copy_(x)
            self.graph.replay()
        return self.y.clone()


class InferenceGraphs:
    """The graphs of a module, for calls from any thread and on any stream. Copies of a module have their own.

    Args:
        device: makes the graphs.
    """

    def __init__(self, device: InferenceDevice) -> None:
        self.problem = ""
        """Why calls run eagerly from now on; empty while nothing has failed."""
        self._device = device
        self._lock = Lock()
        self._graphs: OrderedDict[Hashable, _InferenceGraph] = OrderedDict()
        self._calls: OrderedDict[Hashable, int] = OrderedDict()
        self._evicted = 0
        self._module: _ModuleState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._device,)

    def run(self, module: nn.Module, work: Work, x: Tensor) -> Tensor:
        """Returns what ``work`` returns for ``x``, in a tensor of its own.

        Args:
            module: whose work it is; the graphs are dropped when its submodules, parameters or buffers are replaced.
            work: the work, in inference mode.
            x: the input.
        """
        if self.problem or not x.numel() or in_mode() or not is_plain_eager(x) or not no_grad_needed(x):
            return work(x).clone()
        state = self._device.state()
        if state is None:
            return work(x).clone()
        kind = (x.shape, x.stride(), x.dtype, state)
        with self._lock:  # input, replay and output of a call stay together
            if self._replays(module):
                graph = self._graphs.get(kind)
                if graph is not None:
                    self._graphs.move_to_end(kind)
                    return graph.replay(x)
                if self._is_due(kind):
                    return self._add(kind, work, x)
        return work(x).clone()

    def release(self) -> None:
        """Drop all graphs and free their memory; later calls record new ones."""
        with self._lock:
            self._drop()

    def _replays(self, module: nn.Module) -> bool:
        if self._module is None or not self._module.is_current(module):
            self._drop()
            self._module = _ModuleState(module)
        return not self._module.needs_calls()

    def _drop(self) -> None:
        self._graphs.clear()
        self._calls.clear()
        self._module = None

    def _is_due(self, kind: Hashable) -> bool:
        """Counts a call of a kind without a graph; whether it is time to record one."""
        calls = self._calls.pop(kind, 0) + 1
        self._calls[kind] = calls
        if len(self._calls) > _MOST_KINDS:
            self._calls.popitem(last=False)
        # where more kinds take turns than there is room for, recording them again and again would take the time
        return calls >= _EAGER_CALLS + self._evicted

    def _add(self, kind: Hashable, work: Work, x: Tensor) -> Tensor:
        """Runs the work eagerly, then records it."""
        with torch.inference_mode():
            buffer = torch.empty_like(x).copy_(x)
        # in this thread, whose handles of libraries must exist, and on this memory, whose alignment kernels look at
        result = work(buffer).clone()
        try:
            graph, y = self._device.capture(lambda: work(buffer))
        except Exception as error:  # a device fails in ways of its own
            self._drop()
            self.problem = capture_failure(error)
            return result
        del self._calls[kind]
        self._graphs[kind] = _InferenceGraph(graph, buffer, y)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
            self._evicted += 1
        return result


class _ModuleState:
    """The submodules of a module, their tensors and hooks, to be compared at every call."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(cast("Iterable[nn.Module]", module.modules()))
        self._hooks = [table for each in self._modules for table in hook_tables(each)]
        # registered ones alone: what others have, such as the weights of a FusedConv, cannot be replaced
        names = ("_modules", "_parameters", "_buffers")
        self._tables: list[dict[str, object]] = [vars(each)[name] for each in self._modules for name in names]
        self._values = self._current()
        self._tensors = [each for each in self._values if isinstance(each, Tensor)]
        self._addresses = [each.data_ptr() for each in self._tensors]

    def is_current(self, module: nn.Module) -> bool:
        """Whether it is the state of this module, of which nothing was replaced."""
        now = self._current()
        return (
            self._modules[0] is module
            and len(now) == len(self._values)
            and all(map(is_, now, self._values))
            and [each.data_ptr() for each in self._tensors] == self._addresses
        )

    def needs_calls(self) -> bool:
        """Whether its modules must be called: for hooks, or because one is in training mode."""
        return any(self._hooks) or any(each.training for each in self._modules)

    def _current(self) -> list[object]:
        return [value for table in self._tables for value in table.values()]


class _Stream:
    """What the graphs that are replayed on one stream share; those of another may run at the same time."""

    def __init__(self) -> None:
        self.capture_stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


class CudaInference:
    """CUDA graphs. Those for one stream share their memory: the device replays them one after the other.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, _Stream] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._device,)

    def state(self) -> Hashable:
        tiles = tile_sizes.version()
        index = self._device.index
        if tiles is None or torch.cuda.is_current_stream_capturing():
            return None
        if index != _C._cuda_getDevice():
            with torch.cuda.device(index):
                if torch.cuda.is_current_stream_capturing():
                    return None
        return (
            _C._cuda_getCurrentRawStream(index),
            tiles,
            _C._get_fp32_precision_getter("cuda", "conv"),
            _C._get_deterministic_algorithms(),
            _C._get_cudnn_enabled(),
            _C._get_cudnn_benchmark(),
            _C._get_cudnn_deterministic(),
            *matmul_settings(),
        )

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        with torch.cuda.device(self._device):
            key = torch.cuda.current_stream().cuda_stream
            stream = self._streams.get(key)
            if stream is None or not stream.graphs:  # a pool whose last graph is gone cannot be used again
                stream = self._streams[key] = _Stream()
            graph, found = capture(work, stream.pool, stream.capture_stream)
            stream.graphs.add(graph)
        return graph, found
