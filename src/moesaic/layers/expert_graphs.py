"""Training passes of an expert from graphs of a device: a pass is recorded once for each size, and replayed.

A small network keeps the host busy for longer than a GPU: several of them, one after the other, wait for launches. As
samples fill up few sizes (`moesaic.ops.padded_samples`), passes repeat, and a replay is one launch in either direction.
The number of samples that count is on the device, where BatchNorm reads it, so that a graph is for all numbers up to
its size. Weights are read where they lie; samples, outputs and gradients are copied from and to tensors of their own.

The activations of a pass stay in the memory of its graphs until its backward pass, and graphs of one expert share
their memory. So a pass runs eagerly while an earlier one of the same expert waits for its gradient. Whatever a replay
cannot show runs eagerly, too: modes that see operators, hooks on saved tensors, captures of the user's own; and so does
the second backward pass of one forward pass, and one that is differentiated itself.

Before a graph is used its outputs, gradients and statistics are compared with those of the same work done eagerly. If
they differ by more than rounding, or a pass cannot be recorded, the expert runs eagerly from there on, and a warning
says why.
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
"""Calls of a kind that run eagerly: kernels are compiled in them, and plans of cuDNN made."""
_MOST_GRAPHS = 16
_ALIGNED = 64
_MOST_DIFFERENCE = 0.05
"""Norm of a difference over that of the value: far above rounding, far below what a wrong graph gives."""

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def device_for(device: torch.device) -> InferenceDevice | None:
    """What makes the graphs of one expert on a device; None: it has none."""
    return CudaInference(device) if device.type == "cuda" else None


class ExpertGraphs:
    """The graphs of an expert.

    Args:
        expert: the expert; its graphs are dropped when its parameters or buffers are replaced.
        name: what warnings call it.
    """

    def __init__(self, expert: PaddedExpert, name: str) -> None:
        self.problem = ""
        """Why passes run eagerly from now on; empty while nothing has failed."""
        self._expert = expert
        self._name = name
        self._tensors = _LayerTensors(expert.layers())
        self._device: InferenceDevice | None = None
        self._passes: OrderedDict[Hashable, _RecordedPass] = OrderedDict()
        self._calls: dict[Hashable, int] = {}
        self._evicted = 0
        self._pending: ReferenceType[_Waiting] | None = None
        self._lock = Lock()

    def run(self, rows: Tensor, count: int) -> Tensor:
        """Returns the outputs of the first ``count`` of the rows (S, …); the others repeat the last one."""
        waiting = _Waiting()
        if count == 1 or self.problem or not _may_replay(rows) or not self._claim(waiting):
            return self._expert.run(rows, count)
        try:
            kind = self._kind(rows)
            found = self._passes.get(kind)
            if found is not None:
                self._passes.move_to_end(kind)
                return cast("Tensor", _Replay.apply(found, waiting, count, rows, *self._tensors.parameters))
            if kind is not None and self._is_due(kind):
                self._add(kind, rows, count)
        except BaseException:
            waiting.done = True
            raise
        waiting.done = True
        return self._expert.run(rows, count)

    def _claim(self, waiting: _Waiting) -> bool:
        """Makes a pass the one to which the memory of the graphs belongs, unless that is another one's."""
        with self._lock:
            other = None if self._pending is None else self._pending()
            if other is not None and not other.done:
                return False
            self._pending = ref(waiting)
            return True

    def _kind(self, rows: Tensor) -> Hashable | None:
        """What passes of one graph have in common; None where nothing can be recorded or replayed."""
        if self._device is None:
            self._device = device_for(rows.device)
        state = None if self._device is None else self._device.state()
        if state is None or not self._may_read():
            return None
        learning = tuple(each.requires_grad for each in self._tensors.parameters)
        if not (rows.requires_grad or any(learning)):
            return None
        autocast = torch.is_autocast_enabled(rows.device.type), torch.get_autocast_dtype(rows.device.type)
        return rows.shape, rows.stride(), rows.dtype, rows.requires_grad, learning, autocast, state

    def _may_read(self) -> bool:
        """Drops graphs of parameters and buffers that were replaced; whether graphs can read those of now."""
        if not self._tensors.are_current():
            self._passes.clear()
            self._calls.clear()
            self._tensors = _LayerTensors(self._expert.layers())
        return self._tensors.are_plain

    def _is_due(self, kind: Hashable) -> bool:
        """Counts a pass of a kind without a graph; whether it is time to record one."""
        self._calls[kind] = self._calls.get(kind, 0) + 1
        # where more kinds take turns than there is room for, recording them again and again would take the time
        return self._calls[kind] > _EAGER_CALLS + self._evicted

    def _add(self, kind: Hashable, rows: Tensor, count: int) -> None:
        """Records a pass, and leaves buffers as they were."""
        buffers = self._tensors.buffers
        before = [each.clone() for each in buffers]
        # eager passes that wait for their gradients may have saved the buffers
        with cast("Any", torch.autograd)._unsafe_preserve_version_counter(tuple(buffers)):
            try:
                found, problem = self._record(rows, count, before)
            except Exception as error:  # a device fails in ways of its own
                found, problem = None, capture_failure(error)
            _set(buffers, before)
        del self._calls[kind]
        if found is not None and not problem:
            self._passes[kind] = found
            if len(self._passes) > _MOST_GRAPHS:
                self._passes.popitem(last=False)
                self._evicted += 1
        else:
            self._passes.clear()
            self.problem = problem
            warnings.warn(f"{self._name} runs without CUDA graphs from now on: {problem}", RuntimeWarning, stacklevel=2)

    def _record(self, rows: Tensor, count: int, buffers: Sequence[Tensor]) -> tuple[_RecordedPass | None, str]:
        """Records a pass that begins with these buffers; returns it, and what differs from an eager one."""
        assert self._device is not None
        refusal = _refusal(self._expert, self._tensors.parameters)
        if refusal:
            return None, refusal
        with _no_autocast_cache():
            found = _RecordedPass(self._expert, self._tensors, rows, count, self._device.state())
            expected = found.run_eagerly(count)
            _set(self._tensors.buffers, buffers)
            found.capture(self._device)
        _set(self._tensors.buffers, buffers)  # Python may have counted, and some devices work while they record
        return found, _difference(found.run_replay(rows.detach(), count), expected)


def _may_replay(rows: Tensor) -> bool:
    """Whether a pass is for training, and nothing has to see its operators."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    eager = not torch.is_grad_enabled() or in_mode() or torch.is_anomaly_enabled() or torch.is_inference(rows)
    return hooks is None and not eager


class _Waiting:
    """A pass whose gradient has not come yet: it lives as long as the pass can be differentiated."""

    done = False
    """Whether its activations are gone."""


_Results = dict[str, list[Tensor]]
"""Outputs, statistics and gradients of a pass."""


class _RecordedPass:
    """The graphs of passes of one kind."""

    def __init__(self, expert: PaddedExpert, tensors: _LayerTensors, rows: Tensor, count: int, state: Hashable) -> None:
        self._autocast = _autocast_now(rows.device.type)
        self._device_type = rows.device.type
        self._buffers = tensors.buffers
        self._counters = [each for each in tensors.buffers if not each.is_floating_point()]
        self._addresses = [each.data_ptr() for each in tensors.parameters]
        # leaves of their own: autograd may have accumulated the gradients of the expert's on another stream
        self._leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors.parameters]
        twins = {id(each): leaf for each, leaf in zip(tensors.parameters, self._leaves, strict=True)}
        self._expert = expert.with_parameters(twins)
        self._x = torch.empty_like(rows).copy_(rows.detach()).requires_grad_(rows.requires_grad)
        self._count = torch.full((), count, dtype=torch.float64, device=rows.device)
        self._learning = [each for each in self._leaves if each.requires_grad]
        self._flat = tensors.flat_gradients(self._learning, state)

    def capture(self, device: InferenceDevice) -> None:
        """Records both directions."""
        self._forward, y = device.capture(self._work)
        self._grad_y = torch.zeros_like(y)
        self._backward, grads = device.capture(lambda: self._store(self._grads(y, self._grad_y)))
        self._y = y.detach()
        self._grad_x, self._is_used = grads[0], [each is not None for each in grads[1:]]

    def run_eagerly(self, count: int) -> _Results:
        """Does what is to be recorded: in this thread, whose handles of libraries must exist, and on this memory."""
        y = self._work()[:count]
        grads = self._grads(y, _probe(y))
        return {
            "outputs": [y.detach()],
            "statistics": [each.clone() for each in self._buffers],
            "gradients": [each for each in grads if each is not None],
        }

    def run_replay(self, rows: Tensor, count: int) -> _Results:
        """The same from the graphs."""
        y = self.forward(rows, count)
        grad_x, grads = self.backward(_probe(y))
        return {
            "outputs": [y],
            "statistics": [each.clone() for each in self._buffers],
            "gradients": [each for each in (grad_x, *grads) if each is not None],
        }

    def forward(self, rows: Tensor, count: int) -> Tensor:
        """Replays a pass; returns the outputs of the samples that count."""
        with torch.no_grad():
            self._x.copy_(rows)
        self._count.fill_(count)
        self._forward.replay()
        # as in torch's BatchNorm, whose update of running statistics is not counted: gradients may need them
        torch.autograd.graph.increment_version(self._counters)
        return self._y[:count].clone(memory_format=torch.preserve_format)

    def backward(self, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Replays the backward pass of the last pass; returns the gradients of the rows and of the parameters."""
        count = len(grad)
        self._grad_y[:count].copy_(grad)
        self._grad_y[count:].zero_()
        self._backward.replay()
        grad_x = None if self._grad_x is None else self._grad_x.clone(memory_format=torch.preserve_format)
        views = iter(zip(_views(self._flat.clone(), self._learning), self._is_used, strict=True))
        grads: list[Tensor | None] = []
        for leaf in self._leaves:
            view, used = next(views) if leaf.requires_grad else (None, False)
            grads.append(view if used else None)
        return grad_x, grads

    def reads(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the graphs read these parameters: fully_shard allocates weights anew for the backward pass."""
        return [each.data_ptr() for each in parameters] == self._addresses

    def eager(
        self, grad: Tensor, rows: Tensor, parameters: Sequence[Tensor], create_graph: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of an eager pass, which leaves the statistics as they are."""
        wanted = [each for each in (rows, *parameters) if each.requires_grad]
        twins = {id(leaf): each for leaf, each in zip(self._leaves, parameters, strict=True)}
        with torch.enable_grad(), self._autocast():
            y = self._expert.with_parameters(twins).run(rows, len(grad), update=False)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=create_graph, allow_unused=True))
        grads = [next(found) if each.requires_grad else None for each in (rows, *parameters)]
        return grads[0], grads[1:]

    def _work(self) -> Tensor:
        return self._expert.call(self._x, _counted_rule(self._count, len(self._x)))

    def _grads(self, y: Tensor, grad: Tensor) -> list[Tensor | None]:
        """The gradients of the samples and of all parameters that learn."""
        wanted = [*([self._x] if self._x.requires_grad else []), *self._learning]
        with torch.autocast(self._device_type, enabled=False):  # as outside of the user's autocast
            found = cast("list[Tensor | None]", list(torch.autograd.grad(y, wanted, grad, allow_unused=True)))
        return found if self._x.requires_grad else [None, *found]

    def _store(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Writes the gradients of parameters to the vector of all."""
        views = _views(self._flat, self._learning)
        pairs = [(view, grad) for view, grad in zip(views, grads[1:], strict=True) if grad is not None]
        if pairs:
            cast("Any", torch)._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        return grads


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: _RecordedPass, waiting: _Waiting, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # which also notices weights that are changed before the backward pass
        ctx.recorded, ctx.waiting = recorded, waiting
        return recorded.forward(tensors[0], count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled() or ctx.waiting.done or not ctx.recorded.reads(parameters):
            grad_x, own = ctx.recorded.eager(grads[0], rows, parameters, torch.is_grad_enabled())
        else:
            grad_x, own = ctx.recorded.backward(grads[0])
            ctx.waiting.done = True
        return None, None, None, grad_x, *own


_Table = dict[str, Tensor | None]


class _LayerTensors:
    """The parameters and buffers of layers, to be compared at every pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        layers = list(layers)
        parameters: list[_Table] = [vars(layer)["_parameters"] for layer in layers]
        buffers: list[_Table] = [vars(layer)["_buffers"] for layer in layers]
        # torch.func.functional_call puts other tensors in the place of parameters
        self.parameters, self.buffers = _distinct(parameters), _distinct(buffers)
        self._tables = parameters + buffers
        self._values = self._current()
        self._all = [*self.parameters, *self.buffers]
        self.are_plain = all(type(each) in (Tensor, nn.Parameter) for each in self._all)
        """Whether graphs can read them: those of fully_shard, for one, are parts of tensors."""
        self._addresses = [each.data_ptr() for each in self._all] if self.are_plain else []
        self._flat: dict[Hashable, Tensor] = {}

    def are_current(self) -> bool:
        """Whether none of them was replaced or moved."""
        now = self._current()
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            return False
        return not self.are_plain or [each.data_ptr() for each in self._all] == self._addresses

    def flat_gradients(self, learning: Sequence[Tensor], state: Hashable) -> Tensor:
        """Memory for the gradients of all parameters of a dtype; graphs of one stream share it, as one runs at a time.

        ``state``: that of the device, with its stream.
        """
        if not learning:
            return torch.zeros(0)
        key, size = (learning[0].dtype, state), sum(map(_aligned, learning))
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = learning[0].new_zeros(size)
        return flat[:size]

    def _current(self) -> list[Tensor | None]:
        return [value for table in self._tables for value in table.values()]


def _distinct(tables: Iterable[_Table]) -> list[Tensor]:
    return list({id(each): each for table in tables for each in table.values() if each is not None}.values())


def _refusal(expert: PaddedExpert, parameters: Sequence[Tensor]) -> str:
    """Why passes of an expert cannot be recorded; empty if nothing is known against it."""
    learning = [each for each in parameters if each.requires_grad]
    if len({each.dtype for each in learning}) > 1:
        return "its parameters have several dtypes"
    if not all(_is_dense(each) for each in learning):
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
    """BatchNorm over as many of the rows as a tensor says, with its updates of running statistics."""
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
    """Elements for a tensor in a vector of which each part is aligned as torch's vectorized kernels need it."""
    return -(-tensor.numel() // _ALIGNED) * _ALIGNED


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a vector in the shapes and strides of these tensors."""
    first, found = 0, list[Tensor]()
    for each in like:
        found.append(flat.as_strided(each.size(), each.stride(), first))
        first += _aligned(each)
    return found


def _probe(y: Tensor) -> Tensor:
    """A gradient of outputs that is not the same for all, which a norm might set to zero."""
    return torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape)


def _difference(found: _Results, expected: _Results) -> str:
    """What differs between a replay and the same work done eagerly; empty: nothing."""
    for name, theirs in expected.items():
        if len(found[name]) != len(theirs) or not _distance(found[name], theirs) <= _MOST_DIFFERENCE:  # NaN is not
            return f"the {name} of a replay differ from those of an eager pass"
    return ""


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the value, of all tensors together."""
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
    """Makes contexts with the autocast of now."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: cast("Any", torch.autocast(device_type, dtype, enabled))


@contextmanager
def _no_autocast_cache() -> Any:
    """Inside, weights are converted anew: a graph must not read conversions that are freed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
