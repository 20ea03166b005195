"""Training on many processes: the ranks of a job, data parallelism, and fully sharded data parallelism (FSDP2).

Every rank computes its part of every batch, and all together take the step of one process: the loss of a rank is its
share of the loss of the whole batch, so that gradients are *summed*, whatever the sizes of the parts; norms, router
noise, dropout and balance losses are those of the whole batch (`moesaic.ops.global_batch`).

`DataParallel` sums gradients itself, in buckets during the backward pass, as DistributedDataParallel does, and not by
it: the wrapper averages over ranks whose parts may differ in size, must be told of parameters without gradients, and
does not follow when layers are frozen during training. A gradient that is None on all ranks stays None, so that the
optimizer leaves the weight alone, as in one process.

Ranks talk over three groups: of norms and losses, of gradients, which may come in another order relative to those, and
of decisions on the CPU, for which no GPU has to be waited for.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from moesaic import launcher
from moesaic.checks import check_choice
from moesaic.layers.recording import RoutedLayer
from moesaic.ops.dispatch import Norm
from moesaic.ops.global_batch import GlobalBatch, global_batch_norm

__all__ = [
    "DataParallel",
    "OneProcess",
    "ParallelName",
    "RankError",
    "Ranks",
    "ShardedDataParallel",
    "create_parallel",
    "join_job",
    "spread_batch",
    "sync_batch_norm",
]

T = TypeVar("T")
ParallelName = Literal["ddp", "fsdp", "none"]

_BUCKET_BYTES = 25 * 1024**2
"""Gradients that are summed together, as in DistributedDataParallel."""
_WAIT = timedelta(hours=12)
"""How long ranks wait for a decision of the first, which may have a dataset to decode."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_dist: Any = torch.distributed  # torch types it in part


class RankError(RuntimeError):
    """Another rank of the job has failed."""


class Ranks:
    """The ranks of a job, one of which is this process; all call its methods in the same order.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.world: Any = _dist.group.WORLD
        self.rank: int = _dist.get_rank()
        self.size: int = _dist.get_world_size()
        self.device = device
        self.batch = GlobalBatch()
        """The batch whose samples are spread over the ranks."""
        self.gradients: Any = _dist.new_group()
        self.decisions: Any = _dist.new_group(backend="gloo", timeout=_WAIT)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files and reports progress."""
        return self.rank == 0

    def share(self, samples: int) -> slice:
        """Returns the part of this rank of so many samples.

        Parts differ by one sample at most; with fewer samples than ranks, some are empty.
        """
        least, over = divmod(samples, self.size)
        first = self.rank * least + min(self.rank, over)
        return slice(first, first + least + (self.rank < over))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Returns, for each flag, whether it is set on any rank."""
        values = torch.tensor(flags, dtype=torch.uint8)
        _dist.all_reduce(values, _dist.ReduceOp.MAX, group=self.decisions)
        return tuple(bool(value) for value in values.tolist())

    def run_first(self, work: Callable[[], T]) -> T | None:
        """Run something on the first rank; if it fails there, all ranks raise an error."""
        result, error = None, None
        if self.is_first:
            try:
                result = work()
            except BaseException as raised:
                error = raised
        (failed,) = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise RankError("fit: the first rank has stopped, and its message says why")
        return result

    def from_first(self, content: T) -> T:
        """Returns the JSON value that the first rank has."""
        blob = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        size = torch.tensor(len(blob))
        _dist.broadcast(size, 0, group=self.decisions)
        if not self.is_first:
            blob = torch.empty(int(size), dtype=torch.uint8)
        _dist.broadcast(blob, 0, group=self.decisions)
        return json.loads(blob.numpy().tobytes())

    def tensors_from_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the CPU tensors that the first rank has."""
        described = {name: (str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()}
        found: dict[str, Tensor] = {}
        for name, (dtype, shape) in self.from_first(described).items():
            tensor = tensors[name].contiguous() if self.is_first else torch.empty(shape, dtype=getattr(torch, dtype))
            _dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=self.decisions)
            found[name] = tensor
        return found

    def copy_first(self, model: nn.Module) -> None:
        """Give the model of every rank the weights and buffers of the first."""
        for tensor in _tensors(model):
            value = tensor.detach().contiguous()
            _dist.broadcast(value, 0)
            tensor.data.copy_(value)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse ranks that were called with other settings than the first."""
        own = json.loads(json.dumps(settings))
        first = self.from_first(own)
        other = next((name for name in {**own, **first} if own.get(name) != first.get(name)), None)
        if self.any(other is not None)[0]:
            differ = f"{other}={own.get(str(other))!r} here and {first.get(str(other))!r} on rank 0" if other else ""
            raise ValueError(
                f"fit: ranks have different settings ({differ or 'another rank says which'}); call fit with the same "
                "arguments on every rank"
            )


class _Joined:
    ranks: Ranks | None = None


def join_job(device: torch.device | str) -> Ranks | None:
    """Returns the ranks of the job that this process belongs to, or None if it is on its own.

    A job is what ``torchrun`` starts, or whoever calls ``torch.distributed.init_process_group``. The process group is
    made here unless there is one.
    """
    if not _dist.is_available():
        return None
    device = torch.device(device)
    if not _dist.is_initialized():
        if not launcher.in_job():
            return None
        _share_cores()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            _dist.init_process_group("gloo")
    if _dist.get_world_size() == 1:
        return None
    if _Joined.ranks is None or _Joined.ranks.world is not _dist.group.WORLD:
        _Joined.ranks = Ranks(device)
    return _Joined.ranks


def _share_cores() -> None:
    """Sets the number of CPU threads: the ranks of a machine share its cores.

    Without OMP_NUM_THREADS in its environment torchrun sets it to 1, so that 1 is nobody's choice.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        affinity: Any = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        torch.set_num_threads(max(cores // launcher.local_ranks(), 1))


def one_per_machine_first(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Returns what ``work`` returns; the first rank of every machine runs it before the others, and fills caches."""
    if ranks is None:
        return work()
    first, result, error = launcher.local_rank() == 0, None, None
    if first:
        try:
            result = work()
        except BaseException as raised:
            error = raised
    (failed,) = ranks.any(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RankError("the first rank of a machine has stopped, and its message says why")
    return cast("T", result) if first else work()


def local_device(device: torch.device) -> torch.device:
    """Returns the device of this rank: GPUs are numbered by the local rank."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", launcher.local_rank()) if launcher.in_job() else device


# batches that are spread over ranks


@contextmanager
def spread_batch(model: nn.Module, batch: GlobalBatch) -> Generator[None]:
    """Inside, layers of the model compute for the whole batch: norms, routers, dropout."""
    _bind(model, batch, random=True)
    try:
        yield
    finally:
        for module in model.modules():
            if "global_batch" in vars(module):
                del module.global_batch
            plain = getattr(type(module), "_plain_class", None)
            if plain is not None:
                module.__class__ = plain


def sync_batch_norm(model: nn.Module, group: Any = None) -> nn.Module:
    """Makes norms of a model use the statistics of the batch on all ranks of a process group; returns the model.

    It is for training loops of your own, before the model is wrapped in DistributedDataParallel or sharded; `fit` does
    it by itself. Unlike ``nn.SyncBatchNorm.convert_sync_batchnorm`` it runs on every device, counts unequal parts by
    their samples, and includes the norms of experts and of gated channels. Names in the state dict stay as they are.

    Args:
        model: the model, which is changed in place.
        group: the process group; None: the default one.
    """
    return _bind(model, GlobalBatch(group), random=False)


def _bind(model: nn.Module, batch: GlobalBatch, *, random: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage] # of all axes
            if isinstance(module, nn.SyncBatchNorm):
                continue
            module.__class__ = _global_class(type(module), _batch_norm_forward)
        elif random and type(module) in _DROPOUTS:
            module.__class__ = _global_class(type(module), _dropout_forward)
        if hasattr(type(module), "global_batch"):
            cast("Any", module).global_batch = batch
    return model


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _global_class(plain: type[nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    """A subclass for modules whose parameters, buffers, hooks and names stay: only ``forward`` differs."""
    if hasattr(plain, "_plain_class"):
        return plain
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *_DROPOUTS)
    if not any(plain.forward is norm.forward for norm in norms) and plain.__name__ != "BatchNormAct2d":
        raise ValueError(
            f"fit: {plain.__name__} has a BatchNorm of its own, whose statistics several processes cannot share; use "
            "nn.BatchNorm2d or a norm without batch statistics, or train in one process"
        )
    if plain not in _classes:
        content = {"forward": forward, "global_batch": None, "_plain_class": plain}
        _classes[plain] = type(plain.__name__, (plain,), content)
    return _classes[plain]


def _batch_norm_forward(self: Any, x: Tensor) -> Tensor:
    if not self.training and self.running_mean is not None:
        return self._plain_class.forward(self, x)
    self._check_input_dim(x)
    momentum: float = 0.0 if self.momentum is None else self.momentum
    running = self.running_mean, self.running_var
    if self.training and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1 / int(self.num_batches_tracked)
    y = global_batch_norm(x, Norm(self.weight, self.bias, *running, momentum, self.eps, True, self.global_batch))
    return self.act(self.drop(y)) if hasattr(self, "act") and hasattr(self, "drop") else y  # timm's BatchNormAct2d


def _dropout_forward(self: Any, x: Tensor) -> Tensor:
    if not (self.training and self.p):
        return x
    return x * self.global_batch.draw(x, lambda ones: self._plain_class.forward(self, ones))


# how a step is shared


class OneProcess:
    """All samples of a batch, all weights: no other process takes part."""

    ranks: Ranks | None = None
    loss_factor = 1.0
    """Of the loss in the backward pass."""

    def share(self, samples: int) -> slice:
        """Returns the part of this process of so many samples."""
        return slice(0, samples)

    @contextmanager
    def part(self, samples: int, *, last: bool = True) -> Generator[None]:
        """Inside, this process computes its part of so many samples; after the ``last``, gradients are summed."""
        yield

    def finish_gradients(self) -> None:
        """Called after the backward pass of the last part."""

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        return values

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all values are numbers; waits for the device."""
        return bool(nn.utils.get_total_norm([local(tensor.detach()) for tensor in tensors]).isfinite())

    @contextmanager
    def full_weights(self, model: nn.Module) -> Generator[None]:
        """Inside, modules of the model may be called one by one; changes of weights would be lost."""
        yield

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns whole tensors, for a file; nothing on processes that write none."""
        return dict(tensors)

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of whole tensors."""
        model.load_state_dict(dict(state))


class DataParallel(OneProcess):
    """All weights on every rank; a rank computes its part of a batch, and gradients are summed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks: Ranks = ranks
        self._reducer: _GradientReducer | None = None

    def attach(self, model: nn.Module) -> nn.Module:
        """Returns the model to train, with the weights of the first rank."""
        self.ranks.copy_first(model)
        self._reducer = _GradientReducer(list(model.parameters()), self.ranks)
        return model

    def detach(self) -> None:
        """Remove the hooks from the model."""
        if self._reducer is not None:
            self._reducer.remove()

    def share(self, samples: int) -> slice:
        return self.ranks.share(samples)

    @contextmanager
    def part(self, samples: int, *, last: bool = True) -> Generator[None]:
        own = self.share(samples)
        if last and self._reducer is not None:
            self._reducer.begin()
        with self.ranks.batch.part(own.start, own.stop - own.start, samples):
            yield

    def finish_gradients(self) -> None:
        assert self._reducer is not None
        self._reducer.finish()

    def sum(self, values: Tensor) -> Tensor:
        return self.ranks.batch.sum(values)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors) if self.ranks.is_first else {}


class ShardedDataParallel(DataParallel):
    """A part of the weights, gradients and optimizer states on every rank (``fully_shard``, FSDP2).

    Weights of a block are gathered when it runs. The model to train is a sharded copy; the weights of the original are
    set in the end.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.loss_factor = float(ranks.size)  # fully_shard averages gradients
        self._parameters: list[nn.Parameter] = []

    def attach(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        self.ranks.copy_first(model)
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other memory format
        mesh = DeviceMesh.from_group(self.ranks.world, self.ranks.device.type)
        for block in _blocks(model):
            block.register_forward_hook(_own_memory)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for name in ("forward_with_routing", "forward_features", "forward_head"):
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._parameters = list(model.parameters())
        return model

    @contextmanager
    def part(self, samples: int, *, last: bool = True) -> Generator[None]:
        with super().part(samples, last=last), warnings.catch_warnings():
            # of the whole network, whose outputs no layer changes in place; see _own_memory for its blocks
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield

    def finish_gradients(self) -> None:
        for parameter in self._parameters:
            if not parameter.requires_grad:  # frozen since the model was sharded
                parameter.grad = None

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        return not self.ranks.any(not super().all_finite(tensors))[0]

    @contextmanager
    def full_weights(self, model: nn.Module) -> Generator[None]:
        from torch.distributed.fsdp import FSDPModule

        shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in shards:
            module.unshard()
        try:
            yield
        finally:
            for module in shards:
                module.reshard()

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = full(tensor)  # all ranks take part in it
            if self.ranks.is_first:
                found[name] = whole.cpu()
        return found

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        targets = cast("Mapping[str, Tensor]", model.state_dict())
        different = set(targets) ^ set(state)
        if different:
            raise ValueError(f"the state dict has not the tensors of the network: {sorted(different)[0]}")
        for name, target in targets.items():
            assign(target, state[name])


@contextmanager
def attached(model: nn.Module, parallel: OneProcess) -> Generator[nn.Module]:
    """Yields the model that is trained in place of ``model``; in the end this one has its weights."""
    if not isinstance(parallel, DataParallel):
        yield model
        return
    with ExitStack() as stack:
        trained = parallel.attach(model)
        stack.callback(parallel.detach)
        stack.enter_context(spread_batch(trained, parallel.ranks.batch))
        yield trained
        if trained is not model:  # not after an error, when other ranks may be elsewhere
            for own, value in zip(_tensors(model), _tensors(trained), strict=True):
                own.data.copy_(full(value))
            model.train(trained.training)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def create_parallel(name: ParallelName, device: torch.device) -> OneProcess:
    """Returns how this process takes part in training."""
    check_choice("fit", "parallel", name, get_args(ParallelName))
    ranks = None if name == "none" else join_job(device)
    if ranks is None:
        return OneProcess()
    return ShardedDataParallel(ranks) if name == "fsdp" else DataParallel(ranks)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has."""
    return cast("Any", tensor).to_local() if _is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor; all ranks take part."""
    return cast("Any", tensor).full_tensor() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, without the half second that its import takes


def shard_like(like: Tensor, value: Tensor) -> Tensor:
    """Returns a whole tensor in the layout of another, of which this rank may have a part."""
    if not _is_sharded(like):
        return torch.empty_like(like, dtype=value.dtype).copy_(value)
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("Any", like)
    return distribute_tensor(value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Set a tensor, of which this rank may have a part, to a whole one."""
    local(target).copy_(local(shard_like(target, value)))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one: those in sequences that have parameters and parts.

    Nothing inside of a routed layer is: its experts need not run on every rank, and other modules read its weights.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, RoutedLayer):
                continue
            holds = isinstance(child, nn.Sequential | nn.ModuleList)
            in_sequence = isinstance(module, nn.Sequential | nn.ModuleList)
            is_block = in_sequence and not holds and any(True for _ in child.children())
            if is_block and any(True for _ in child.parameters()):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def _own_memory(module: nn.Module, args: object, output: Any) -> Any:
    """A layer that changes a view in place would cut the block off from the hooks of fully_shard."""
    return output.clone() if isinstance(output, Tensor) and cast("Any", output)._is_view() else output


class _Bucket:
    """Gradients that are summed in one message."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting = 0
        """Gradients that the backward pass has not computed yet."""
        self.values: Tensor | None = None
        self.work: Any = None

    def begin(self) -> None:
        self.waiting, self.values, self.work = len(self.parameters), None, None

    def send(self, group: Any) -> None:
        gradients = [_gradient(parameter) for parameter in self.parameters]
        self.values = torch.cat([each.detach().contiguous().view(-1) for each in gradients])
        self.work = _dist.all_reduce(self.values, group=group, async_op=True)

    def receive(self, exists: Iterable[bool]) -> None:
        assert self.values is not None
        self.work.wait()
        parts = self.values.split([parameter.numel() for parameter in self.parameters])
        for parameter, part, is_there in zip(self.parameters, parts, exists, strict=True):
            if not is_there:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view(parameter.shape))
        self.values = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _GradientReducer:
    """Sums gradients over ranks, bucket by bucket, each as soon as the backward pass has filled it.

    Buckets are sent in one order on all ranks; those with a gradient that this rank does not have wait for the end of
    the backward pass.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._parameters = list(reversed(parameters))  # the order in which gradients are computed, more or less
        self._trained: tuple[bool, ...] = ()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._sent = 0
        self._active = False
        with ExitStack() as stack:
            for parameter in self._parameters:
                hook = cast("Any", parameter).register_post_accumulate_grad_hook(self._computed)
                stack.callback(hook.remove)
            self._hooks = stack.pop_all()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self._hooks.close()

    def begin(self) -> None:
        """The backward pass that comes now is the last of the step."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        if trained != self._trained:
            self._trained, self._buckets = trained, _make_buckets(self._parameters)
            self._bucket_of = {id(each): bucket for bucket in self._buckets for each in bucket.parameters}
        for bucket in self._buckets:
            bucket.begin()
        self._sent, self._active = 0, True

    def _computed(self, parameter: Tensor) -> None:
        if not self._active:
            return
        self._bucket_of[id(parameter)].waiting -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send_next()

    def finish(self) -> None:
        """Wait for the sums, and make them the gradients."""
        self._active = False
        own = torch.tensor([each.grad is not None for bucket in self._buckets for each in bucket.parameters])
        while self._sent < len(self._buckets):
            self._send_next()
        values = own.to(torch.uint8)
        _dist.all_reduce(values, _dist.ReduceOp.MAX, group=self._ranks.decisions)
        exists = iter(values.bool().tolist())
        for bucket in self._buckets:
            bucket.receive([next(exists) for _ in bucket.parameters])

    def _send_next(self) -> None:
        self._buckets[self._sent].send(self._ranks.gradients)
        self._sent += 1


def _make_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Buckets of neighbouring parameters that are trained, each of one dtype and of a limited size."""
    buckets: list[_Bucket] = []
    size, dtype = 0, None
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        length = parameter.numel() * parameter.element_size()
        if not buckets or parameter.dtype != dtype or size + length > _BUCKET_BYTES:
            buckets.append(_Bucket([]))
            size, dtype = 0, parameter.dtype
        buckets[-1].parameters.append(parameter)
        size += length
    return buckets
