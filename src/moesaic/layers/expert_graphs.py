"""CUDA graphs of an expert's training passes: forward and backward pass are captured once per padded batch size.

Launching the kernels of a small network takes the host longer than running them takes the GPU: experts that run one
after the other wait for launches. Batches are padded to few sizes (`moesaic.ops.padded_samples`), so passes repeat, and
a replay is one launch in each direction. The number of samples without padding is on the device, where BatchNorm reads
it: a graph serves all batches up to its size. Weights are read in place; samples, outputs and gradients are copied to
and from static buffers.

The activations of a pass stay in the graphs' memory until its backward pass, and all graphs of an expert share that
memory. So a pass runs eagerly while an earlier pass of the expert waits for its gradient. Passes also run eagerly in
modes that intercept operators, with hooks on saved tensors and in captures of the user's own; so do a second backward
pass of the same forward pass, and a double backward.

Before graphs are used, outputs, gradients and statistics of a replay are compared with those of an eager pass. If they
differ by more than rounding, or the capture fails, the expert runs eagerly from then on, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from moesaic.layers.inference_graphs import CudaInference, InferenceDevice
from moesaic.ops.eager_conditions import in_mode
from moesaic.ops.graph_capture import capture_failure
from moesaic.ops.padded_batch_norm import batch_norm_of_counted

if TYPE_CHECKING:
    from moesaic.layers.padded_expert import BatchNormRule, PaddedExpert

__all__ = ["ExpertGraphs", "device_for"]

_EAGER_CALLS = 1
"""Eager calls with a key before its capture, in which kernels are compiled and cuDNN selects algorithms."""
_MAX_GRAPHS = 16
_ALIGNMENT = 64
"""Elements: the alignment of a parameter's gradient in the vector of all."""
_TOLERANCE = 0.05
"""Largest norm of the difference over that of the value: far above rounding, far below the error of a wrong graph."""

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def device_for(device: torch.device) -> InferenceDevice | None:
    """Returns an object that captures the graphs of one expert; None on devices without graphs."""
    return CudaInference(device) if device.type == "cuda" else None


class ExpertGraphs:
    """An expert that runs its training passes from graphs where possible.

    Args:
        expert: the expert; its graphs are dropped when its parameters or buffers are replaced.
        name: the name of the expert in warnings.
    """

    def __init__(self, expert: PaddedExpert, name: str) -> None:
        self.problem = ""
        """The reason why all passes run eagerly; empty while no capture has failed."""
        self._expert = expert
        self._name = name
        self._tensors = _LayerTensors(expert.layers())
        self._device: InferenceDevice | None = None
        self._passes: OrderedDict[Hashable, _RecordedPass] = OrderedDict()
        self._calls: dict[Hashable, int] = {}
        self._evicted = 0
        self._pending: ReferenceType[_PendingPass] | None = None
        self._lock = Lock()

    def run(self, rows: Tensor, count: int) -> Tensor:
        """Returns the outputs of the first ``count`` of the rows (S, …); the other rows repeat the last of these."""
        pending = _PendingPass()
        if count == 1 or self.problem or not _may_replay(rows) or not self._claim_memory(pending):
            return self._expert.run(rows, count)
        try:
            key = self._key(rows)
            recorded = self._passes.get(key)
            if recorded is not None:
                self._passes.move_to_end(key)
                return cast("Tensor", _Replay.apply(recorded, pending, count, rows, *self._tensors.parameters))
            if key is not None and self._is_due(key):
                self._add(key, rows, count)
        except BaseException:
            pending.done = True
            raise
        pending.done = True
        return self._expert.run(rows, count)

    def _claim_memory(self, pending: _PendingPass) -> bool:
        """Reserves the memory of the graphs for a pass; returns False while another pass needs it."""
        with self._lock:
            other = None if self._pending is None else self._pending()
            if other is not None and not other.done:
                return False
            self._pending = ref(pending)
            return True

    def _key(self, rows: Tensor) -> Hashable | None:
        """Returns the key of the graphs for such rows; None where graphs can be neither captured nor replayed."""
        if self._device is None:
            self._device = device_for(rows.device)
        state = None if self._device is None else self._device.state()
        if state is None or not self._may_read():
            return None
        trainable = tuple(each.requires_grad for each in self._tensors.parameters)
        if not (rows.requires_grad or any(trainable)):
            return None
        autocast = torch.is_autocast_enabled(rows.device.type), torch.get_autocast_dtype(rows.device.type)
        return rows.shape, rows.stride(), rows.dtype, rows.requires_grad, trainable, autocast, state

    def _may_read(self) -> bool:
        """Drops graphs of parameters and buffers that were replaced; returns whether graphs can read the new ones."""
        if not self._tensors.are_current():
            self._passes.clear()
            self._calls.clear()
            self._tensors = _LayerTensors(self._expert.layers())
        return self._tensors.are_plain

    def _is_due(self, key: Hashable) -> bool:
        """Counts a call with a key that has no graphs; returns whether to capture them now."""
        self._calls[key] = self._calls.get(key, 0) + 1
        # each eviction delays captures, so that keys that evict each other in turns are not captured all the time
        return self._calls[key] > _EAGER_CALLS + self._evicted

    def _add(self, key: Hashable, rows: Tensor, count: int) -> None:
        """Captures the graphs of a pass, and restores the buffers."""
        buffers = self._tensors.buffers
        before = [each.clone() for each in buffers]
        # eager passes that wait for their gradients may have saved the buffers
        with cast("Any", torch.autograd)._unsafe_preserve_version_counter(tuple(buffers)):
            try:
                recorded, problem = self._record(rows, count, before)
            except Exception as error:  # captures may raise any error
                recorded, problem = None, capture_failure(error)
            _set(buffers, before)
        del self._calls[key]
        if recorded is not None and not problem:
            self._passes[key] = recorded
            if len(self._passes) > _MAX_GRAPHS:
                self._passes.popitem(last=False)
                self._evicted += 1
        else:
            self._passes.clear()
            self.problem = problem
            warnings.warn(f"{self._name} runs without CUDA graphs from now on: {problem}", RuntimeWarning, stacklevel=2)

    def _record(self, rows: Tensor, count: int, buffers: Sequence[Tensor]) -> tuple[_RecordedPass | None, str]:
        """Captures a pass that starts from these buffers; returns it, and why it cannot be used, if so."""
        assert self._device is not None
        refusal = _refusal(self._expert, self._tensors.parameters)
        if refusal:
            return None, refusal
        with _no_autocast_cache():
            recorded = _RecordedPass(self._expert, self._tensors, rows, count, self._device.state())
            expected = recorded.run_eagerly(count)
            _set(self._tensors.buffers, buffers)
            recorded.capture(self._device)
        _set(self._tensors.buffers, buffers)  # some devices also run the work that they capture
        return recorded, _difference(recorded.run_replay(rows.detach(), count), expected)


def _may_replay(rows: Tensor) -> bool:
    """Whether gradients are recorded, without modes or hooks that intercept operators or saved tensors."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    eager = not torch.is_grad_enabled() or in_mode() or torch.is_anomaly_enabled() or torch.is_inference(rows)
    return hooks is None and not eager


class _PendingPass:
    """A forward pass before its backward pass; it lives as long as the autograd graph of the pass."""

    done = False
    """Whether the backward pass has run, so that the activations may be overwritten."""


_Results = dict[str, list[Tensor]]
"""Outputs, statistics and gradients of a pass."""


class _RecordedPass:
    """The graphs of forward and backward pass for one key."""

    def __init__(self, expert: PaddedExpert, tensors: _LayerTensors, rows: Tensor, count: int, state: Hashable) -> None:
        self._autocast = _autocast_now(rows.device.type)
        self._device_type = rows.device.type
        self._buffers = tensors.buffers
        self._counters = [each for each in tensors.buffers if not each.is_floating_point()]
        self._addresses = [each.data_ptr() for each in tensors.parameters]
        # separate leaves: autograd may have accumulated gradients of the parameters themselves on another stream
        self._leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors.parameters]
        leaf_by_id = {id(each): leaf for each, leaf in zip(tensors.parameters, self._leaves, strict=True)}
        self._expert = expert.with_parameters(leaf_by_id)
        self._x = torch.empty_like(rows).copy_(rows.detach()).requires_grad_(rows.requires_grad)
        self._count = torch.full((), count, dtype=torch.float64, device=rows.device)
        self._trainable = [each for each in self._leaves if each.requires_grad]
        self._flat = tensors.flat_gradients(self._trainable, state)

    def capture(self, device: InferenceDevice) -> None:
        """Captures the graphs of forward and backward pass."""
        self._forward, y = device.capture(self._work)
        self._grad_y = torch.zeros_like(y)
        self._backward, grads = device.capture(lambda: self._store(self._grads(y, self._grad_y)))
        self._y = y.detach()
        self._grad_x, self._is_used = grads[0], [each is not None for each in grads[1:]]

    def run_eagerly(self, count: int) -> _Results:
        """Runs the work of the capture eagerly, in this thread, whose library handles a capture cannot create."""
        y = self._work()[:count]
        grads = self._grads(y, _probe(y))
        return {
            "outputs": [y.detach()],
            "statistics": [each.clone() for each in self._buffers],
            "gradients": [each for each in grads if each is not None],
        }

    def run_replay(self, rows: Tensor, count: int) -> _Results:
        """Returns the results of `run_eagerly` from the graphs."""
        y = self.forward(rows, count)
        grad_x, grads = self.backward(_probe(y))
        return {
            "outputs": [y],
            "statistics": [each.clone() for each in self._buffers],
            "gradients": [each for each in (grad_x, *grads) if each is not None],
        }

    def forward(self, rows: Tensor, count: int) -> Tensor:
        """Replays the forward pass; returns the outputs without those of the padding."""
        with torch.no_grad():
            self._x.copy_(rows)
        self._count.fill_(count)
        self._forward.replay()
        # torch's BatchNorm too raises the version of its counter alone: eager passes may have saved the statistics
        torch.autograd.graph.increment_version(self._counters)
        return self._y[:count].clone(memory_format=torch.preserve_format)

    def backward(self, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Replays the backward pass after `forward`; returns the gradients of the rows and of the parameters."""
        count = len(grad)
        self._grad_y[:count].copy_(grad)
        self._grad_y[count:].zero_()
        self._backward.replay()
        grad_x = None if self._grad_x is None else self._grad_x.clone(memory_format=torch.preserve_format)
        views = iter(zip(_views(self._flat.clone(), self._trainable), self._is_used, strict=True))
        grads: list[Tensor | None] = []
        for leaf in self._leaves:
            view, used = next(views) if leaf.requires_grad else (None, False)
            grads.append(view if used else None)
        return grad_x, grads

    def reads(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the graphs read the memory of these parameters: fully_shard moves it before the backward pass."""
        return [each.data_ptr() for each in parameters] == self._addresses

    def eager(
        self, grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], create_graph: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Returns the gradients of `backward` from an eager pass, which does not update the statistics."""
        wanted = [each for each in (rows, *parameters) if each.requires_grad]
        parameter_by_id = {id(leaf): each for leaf, each in zip(self._leaves, parameters, strict=True)}
        with torch.enable_grad(), self._autocast():
            y = self._expert.with_parameters(parameter_by_id).run(rows, len(grad), update=False)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=create_graph, allow_unused=True))
        grads = [next(found) if each.requires_grad else None for each in (rows, *parameters)]
        return grads[0], grads[1:]

    def _work(self) -> Tensor:
        return self._expert.call(self._x, _counted_rule(self._count, len(self._x)))

    def _grads(self, y: Tensor, grad: Tensor) -> list[Tensor | None]:
        """Returns the gradients of the rows and of all trainable parameters."""
        wanted = [*([self._x] if self._x.requires_grad else []), *self._trainable]
        with torch.autocast(self._device_type, enabled=False):  # backward passes run outside of autocast
            found = cast("list[Tensor | None]", list(torch.autograd.grad(y, wanted, grad, allow_unused=True)))
        return found if self._x.requires_grad else [None, *found]

    def _store(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Copies the gradients of parameters into one vector."""
        views = _views(self._flat, self._trainable)
        pairs = [(view, grad) for view, grad in zip(views, grads[1:], strict=True) if grad is not None]
        if pairs:
            cast("Any", torch)._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        return grads


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _RecordedPass, pending: _PendingPass, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # autograd raises an error if weights change before the backward pass
        ctx.recorded, ctx.pending = recorded, pending
        return recorded.forward(tensors[0], count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled() or ctx.pending.done or not ctx.recorded.reads(parameters):
            grad_x, own = ctx.recorded.eager(grads[0], rows, parameters, torch.is_grad_enabled())
        else:
            grad_x, own = ctx.recorded.backward(grads[0])
        ctx.pending.done = True  # after an eager backward pass too: any further one is eager
        return None, None, None, grad_x, *own


_Table = dict[str, Tensor | None]


class _LayerTensors:
    """The parameters and buffers of layers, which are compared with the current ones at every pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        layers = list(layers)
        parameters: list[_Table] = [vars(layer)["_parameters"] for layer in layers]
        buffers: list[_Table] = [vars(layer)["_buffers"] for layer in layers]
        # tables instead of attributes: torch.func.functional_call replaces the values in them
        self.parameters, self.buffers = _distinct(parameters), _distinct(buffers)
        self._tables = parameters + buffers
        self._values = self._current()
        self._all = [*self.parameters, *self.buffers]
        self.are_plain = all(type(each) in (Tensor, nn.Parameter) for each in self._all)
        """Whether graphs can read them: no tensor subclasses, such as the sharded parameters of fully_shard."""
        self._addresses = [each.data_ptr() for each in self._all] if self.are_plain else []
        self._flat: dict[Hashable, Tensor] = {}

    def are_current(self) -> bool:
        """Whether no tensor was replaced or moved."""
        now = self._current()
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            return False
        return not self.are_plain or [each.data_ptr() for each in self._all] == self._addresses

    def flat_gradients(self, trainable: Sequence[Tensor], state: Hashable) -> Tensor:
        """Returns memory for the gradients of these parameters, of one dtype.

        Graphs of one stream share it, as only one of them runs at a time; ``state`` is that of the device and stream.
        """
        if not trainable:
            return torch.zeros(0)
        key, size = (trainable[0].dtype, state), sum(map(_aligned, trainable))
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = trainable[0].new_zeros(size)
        return flat[:size]

    def _current(self) -> list[Tensor | None]:
        return [value for table in self._tables for value in table.values()]


def _distinct(tables: Iterable[_Table]) -> list[Tensor]:
    return list({id(each): each for table in tables for each in table.values() if each is not None}.values())


def _refusal(expert: PaddedExpert, parameters: Sequence[Tensor]) -> str:
    """Returns why the passes of an expert cannot be captured; empty if they can."""
    trainable = [each for each in parameters if each.requires_grad]
    if len({each.dtype for each in trainable}) > 1:
        return "its parameters have several dtypes"
    if not all(_is_dense(each) for each in trainable):
        return "a parameter has gaps in its memory"
    if any(getattr(layer, "momentum", 0.1) is None and layer.training for layer in expert.layers()):
        return "a BatchNorm has momentum=None"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    size, stride = tensor.size(), tensor.stride()
    values = 1
    for axis in sorted(range(tensor.ndim), key=lambda axis: stride[axis]):
        if size[axis] > 1 and stride[axis] != values:
            return False
        values *= size[axis]
    return True


def _counted_rule(count: Tensor, rows: int) -> BatchNormRule:
    """Returns BatchNorm over the first ``count`` rows, a tensor, with updates of running statistics."""
    share: dict[torch.dtype, Tensor] = {}

    def batch_norm(norm: Any, x: Tensor) -> Tensor:
        norm._check_input_dim(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if dtype not in share:
            slot_S = torch.arange(rows, device=x.device)
            share[dtype] = ((slot_S < count) / count).to(dtype)
        y, mean, var = batch_norm_of_counted(x, share[dtype], norm.weight, norm.bias, norm.eps)
        if norm.training and norm.running_mean is not None and norm.track_running_stats:
            with torch.no_grad():
                values = count * x.shape[2:].numel()
                unbiased = var * (values / (values - 1)).to(var.dtype)
                for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                    running.lerp_(value.to(running.dtype), norm.momentum)
                norm.num_batches_tracked.add_(1)
        return y

    return batch_norm


def _aligned(tensor: Tensor) -> int:
    """Returns the elements of a tensor's part of a vector, aligned for torch's vectorized kernels."""
    return -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns parts of a vector as views with the shapes and strides of these tensors."""
    first, found = 0, list[Tensor]()
    for each in like:
        found.append(flat.as_strided(each.size(), each.stride(), first))
        first += _aligned(each)
    return found


def _probe(y: Tensor) -> Tensor:
    """Returns a gradient of outputs that differs between values: norms set that of a constant to zero."""
    return torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape)


def _difference(found: _Results, expected: _Results) -> str:
    """Returns how a replay differs from an eager pass; empty if it does not."""
    for name, eager in expected.items():
        if len(found[name]) != len(eager) or not _distance(found[name], eager) <= _TOLERANCE:  # also for NaN
            return f"the {name} of a replay differ from those of an eager pass"
    return ""


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the norm of the difference over the norm of the value, of all tensors together."""
    if not found:
        return 0.0
    differences = [one.double() - other.double() for one, other in zip(found, expected, strict=True)]
    difference, size = cast("list[float]", torch.stack([_norm(differences), _norm(expected)]).tolist())
    return difference / size if size else difference


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    norms = [cast("Tensor", torch.linalg.vector_norm(each.double())) for each in tensors]
    return cast("Tensor", torch.linalg.vector_norm(torch.stack(norms)))


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _autocast_now(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that returns a context with the present state of autocast."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: cast("Any", torch.autocast(device_type, dtype, enabled))


@contextmanager
def _no_autocast_cache() -> Any:
    """Disables autocast's cache of converted weights, which a graph must not read, as it is freed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
