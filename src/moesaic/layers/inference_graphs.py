"""CUDA graphs of a frozen module's inference: captured once per layout of the input, and replayed.

A replay runs the kernels at the captured addresses without the module's Python code, which takes the host longer than
the kernels take the GPU. There is a graph for each layout of the input, each stream, and each of torch's settings on
which the work depends. In the first calls, which run eagerly, kernels are compiled and cuDNN selects algorithms. Then
the work is captured; later calls copy their input into a static buffer, replay, and return a copy of the output.

Calls with hooks, in modes that intercept operators, in transforms and in captures of the user's own run eagerly. If a
capture fails, all later calls run eagerly, and `InferenceGraphs.problem` says why.
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
"""Inference on a batch, from input to output on the device."""

_EAGER_CALLS = 2
"""Eager calls with a key; the work is captured after the last of them."""
_MAX_GRAPHS = 16
_MAX_COUNTED_KEYS = 256
"""Keys whose calls are counted; the least recently used key is forgotten."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] # torch's own functions take a microsecond each


class InferenceDevice(Protocol):
    """A device on which graphs are captured."""

    def state(self) -> Hashable:
        """Returns what besides the input determines the work; None where no graph can be captured or replayed."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[DeviceGraph, T]:
        """Captures ``work``, which may run or not; returns its graph and its outputs, to which replays write."""
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
        device: the device of the graphs.
    """

    def __init__(self, device: InferenceDevice) -> None:
        self.problem = ""
        """The reason why all calls run eagerly; empty while no capture has failed."""
        self._device = device
        self._lock = Lock()
        self._graphs: OrderedDict[Hashable, _InferenceGraph] = OrderedDict()
        self._calls: OrderedDict[Hashable, int] = OrderedDict()
        self._evicted = 0
        self._module: _ModuleState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._device,)

    def run(self, module: nn.Module, work: Work, x: Tensor) -> Tensor:
        """Returns the output of ``work`` for ``x``, in a tensor of its own.

        Args:
            module: the module that does the work; graphs are dropped when its submodules, parameters or buffers are
                replaced.
            work: the work, in inference mode.
            x: the input.
        """
        if self.problem or not x.numel() or in_mode() or not is_plain_eager(x) or not no_grad_needed(x):
            return work(x).clone()
        state = self._device.state()
        if state is None:
            return work(x).clone()
        key = (x.shape, x.stride(), x.dtype, state)
        with self._lock:  # another thread must not write the buffers between replay and copy of the output
            if self._may_replay(module):
                graph = self._graphs.get(key)
                if graph is not None:
                    self._graphs.move_to_end(key)
                    return graph.replay(x)
                if self._is_due(key):
                    return self._add(key, work, x)
        return work(x).clone()

    def release(self) -> None:
        """Drop all graphs and free their memory; later calls capture new ones."""
        with self._lock:
            self._drop()

    def _may_replay(self, module: nn.Module) -> bool:
        """Drops the graphs of a module that has changed; returns whether its submodules need not be called."""
        if self._module is None or not self._module.is_current(module):
            self._drop()
            self._module = _ModuleState(module)
        return not self._module.needs_calls()

    def _drop(self) -> None:
        self._graphs.clear()
        self._calls.clear()
        self._module = None

    def _is_due(self, key: Hashable) -> bool:
        """Counts a call with a key that has no graph; returns whether to capture one now."""
        calls = self._calls.pop(key, 0) + 1
        self._calls[key] = calls
        if len(self._calls) > _MAX_COUNTED_KEYS:
            self._calls.popitem(last=False)
        # each eviction delays captures, so that keys that evict each other in turns are not captured all the time
        return calls >= _EAGER_CALLS + self._evicted

    def _add(self, key: Hashable, work: Work, x: Tensor) -> Tensor:
        """Runs the work eagerly, then captures it; returns the output."""
        with torch.inference_mode():
            buffer = torch.empty_like(x).copy_(x)
        # in this thread, whose library handles a capture cannot create, and on memory of the same alignment
        result = work(buffer).clone()
        try:
            graph, y = self._device.capture(lambda: work(buffer))
        except Exception as error:  # captures may raise any error
            self._drop()
            self.problem = capture_failure(error)
            return result
        del self._calls[key]
        self._graphs[key] = _InferenceGraph(graph, buffer, y)
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
            self._evicted += 1
        return result


class _ModuleState:
    """The submodules of a module, their tensors and hooks, which are compared with the current ones at every call."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(cast("Iterable[nn.Module]", module.modules()))
        self._hooks = [table for each in self._modules for table in hook_tables(each)]
        # other attributes are not compared: those of frozen modules, such as weights of a FusedConv, do not change
        names = ("_modules", "_parameters", "_buffers")
        self._tables: list[dict[str, object]] = [vars(each)[name] for each in self._modules for name in names]
        self._values = self._current()
        self._tensors = [each for each in self._values if isinstance(each, Tensor)]
        self._addresses = [each.data_ptr() for each in self._tensors]

    def is_current(self, module: nn.Module) -> bool:
        """Whether this is the state of the module, with no submodule, parameter or buffer replaced."""
        now = self._current()
        return (
            self._modules[0] is module
            and len(now) == len(self._values)
            and all(map(is_, now, self._values))
            and [each.data_ptr() for each in self._tensors] == self._addresses
        )

    def needs_calls(self) -> bool:
        """Whether submodules must be called: for hooks, or because one is in training mode."""
        return any(self._hooks) or any(each.training for each in self._modules)

    def _current(self) -> list[object]:
        return [value for table in self._tables for value in table.values()]


class _Stream:
    """The capture stream and memory pool of graphs for one stream; graphs of other streams may run concurrently."""

    def __init__(self) -> None:
        self.capture_stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


class CudaInference:
    """A GPU. The graphs for one stream share their memory, as the GPU runs them one after another.

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
