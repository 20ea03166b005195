"""Training steps shared by processes: data parallelism, and fully sharded data parallelism (FSDP2).

Every rank computes its part of every batch, and all together take the step of one process: the loss of a rank is its
share of the loss of the whole batch, so that gradients are *summed*, whatever the sizes of the parts; norms, router
noise, dropout and balance losses are those of the whole batch (`moesaic.ops.global_batch`).

`DataParallel` sums gradients itself, in buckets during the backward pass, as DistributedDataParallel does, and not by
it: the wrapper averages over ranks whose parts may differ in size, must know unused parameters in advance, and
does not follow when layers are frozen during training. A gradient that is None on all ranks stays None, so that the
optimizer leaves the weight alone, as in one process.

State is gathered for checkpoints, which one process writes: they load on any number of ranks. The checkpoints of
torch.distributed.checkpoint would do so as well, but their metadata is a pickle.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice
from moesaic.layers.recording import RoutedLayer
from moesaic.training.global_batch_layers import spread_batch
from moesaic.training.gradient_reducer import GradientReducer
from moesaic.training.ranks import Ranks, join_job, tensors_of
from moesaic.training.recipe import Recipe

__all__ = [
    "DataParallel",
    "OneProcess",
    "ParallelName",
    "ShardedDataParallel",
    "assign",
    "attached",
    "check_parallel",
    "create_parallel",
    "full",
    "is_sharded",
    "local",
    "shard_like",
]

ParallelName = Literal["ddp", "fsdp", "none"]


class OneProcess:
    """Training in one process, which has all weights and all samples of a batch."""

    ranks: Ranks | None = None
    loss_factor = 1.0
    """Factor of the loss in the backward pass."""

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to where it is trained."""
        model.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part

    def share(self, samples: int) -> slice:
        """Returns this process' part of so many samples."""
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
        """Returns whole tensors, for a file; of several ranks the first one gets them, others get none."""
        return dict(tensors)

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of whole tensors."""
        model.load_state_dict(dict(state))


class DataParallel(OneProcess):
    """All weights on every rank; a rank computes its part of a batch, and gradients are summed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = self._job = ranks
        self._reducer: GradientReducer | None = None

    @property
    def job(self) -> Ranks:
        """The ranks that share a step."""
        return self._job

    def attach(self, model: nn.Module) -> nn.Module:
        """Returns the model to train, with the weights of the first rank."""
        self._job.copy_first(model)
        self._reducer = GradientReducer(list(model.parameters()), self._job)
        return model

    def detach(self) -> None:
        """Remove the hooks from the model."""
        if self._reducer is not None:
            self._reducer.remove()

    def share(self, samples: int) -> slice:
        return self._job.share(samples)

    @contextmanager
    def part(self, samples: int, *, last: bool = True) -> Generator[None]:
        share = self.share(samples)
        if last and self._reducer is not None:
            self._reducer.begin()
        with self._job.batch.part(share.start, share.stop - share.start, samples):
            yield

    def finish_gradients(self) -> None:
        assert self._reducer is not None
        self._reducer.finish()

    def sum(self, values: Tensor) -> Tensor:
        return self._job.batch.sum(values)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors) if self._job.is_first else {}


class ShardedDataParallel(DataParallel):
    """A part of the weights, gradients and optimizer states on every rank (``fully_shard``, FSDP2).

    Weights of a block are gathered when it runs. The model to train is a sharded copy, which moves to the device block
    by block; the original stays where it is, and gets its weights in the end.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.loss_factor = float(ranks.size)  # fully_shard averages gradients
        self._parameters: list[nn.Parameter] = []

    def place(self, model: nn.Module, device: torch.device) -> None:
        pass

    def attach(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        self._job.copy_first(model)
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other memory format
        mesh = DeviceMesh.from_group(self._job.world, self._job.device.type)  # to which fully_shard moves the weights
        for block in _blocks(model):
            block.register_forward_hook(_clone_view)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for name in ("forward_with_routing", "forward_head"):
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._parameters = list(model.parameters())
        return model

    @contextmanager
    def part(self, samples: int, *, last: bool = True) -> Generator[None]:
        with super().part(samples, last=last), warnings.catch_warnings():
            # no layer changes the outputs of the whole network in place; for those of its blocks see _clone_view
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield

    def finish_gradients(self) -> None:
        for parameter in self._parameters:
            if not parameter.requires_grad:  # frozen since the model was sharded
                parameter.grad = None

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        return not self._job.any(not super().all_finite(tensors))[0]

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
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = full(tensor)  # all ranks take part in it
            if self._job.is_first:
                gathered[name] = whole.cpu()
        return gathered

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        targets = cast("Mapping[str, Tensor]", model.state_dict())
        different = set(targets) ^ set(state)
        if different:
            raise ValueError(f"the state dict has not the tensors of the network: {sorted(different)[0]}")
        for name, target in targets.items():
            assign(target, state[name])


def check_parallel(recipe: Recipe, parallel: ParallelName, ranks: int) -> None:
    """Refuses what several processes cannot do."""
    if recipe.compile:
        raise ValueError(
            f"fit: compile=True is for one process, and there are {ranks} ranks, whose norms exchange statistics; "
            "use compile=False"
        )
    if parallel == "fsdp" and recipe.precision == "float16":
        raise ValueError(
            "fit: precision='float16' with parallel='fsdp': ranks would scale the loss of their shards differently; "
            "use 'bfloat16', or parallel='ddp'"
        )
    if parallel == "fsdp" and recipe.optimizer == "normalized_gd":
        raise ValueError(
            "fit: optimizer='normalized_gd' with parallel='fsdp': the norm of an expert's gradient needs all of it, "
            "and a rank has a shard; use 'adamw' or 'sgd', or parallel='ddp'"
        )


@contextmanager
def attached(model: nn.Module, parallel: OneProcess) -> Generator[nn.Module]:
    """Yields the model that is trained in place of ``model``, which has its weights in the end."""
    if not isinstance(parallel, DataParallel):
        yield model
        return
    with ExitStack() as stack:
        trained = parallel.attach(model)
        stack.callback(parallel.detach)
        stack.enter_context(spread_batch(trained, parallel.job.batch))
        yield trained
        if trained is not model:  # not after an error, when other ranks may be elsewhere
            for tensor, value in zip(tensors_of(model), tensors_of(trained), strict=True):
                tensor.data.copy_(full(value))
            model.train(trained.training)


def create_parallel(name: ParallelName, device: torch.device) -> OneProcess:
    """Returns how this process takes part in training."""
    check_choice("fit", "parallel", name, get_args(ParallelName))
    ranks = None if name == "none" else join_job(device)
    if ranks is None:
        return OneProcess()
    return ShardedDataParallel(ranks) if name == "fsdp" else DataParallel(ranks)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor; all ranks take part."""
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank has a part of the tensor."""
    return hasattr(tensor, "full_tensor")  # a DTensor, whose import takes half a second


def shard_like(like: Tensor, value: Tensor) -> Tensor:
    """Returns a whole tensor in the layout of another, of which this rank may have a part."""
    if not is_sharded(like):
        return torch.empty_like(like, dtype=value.dtype).copy_(value)
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("Any", like)
    return distribute_tensor(value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Set a tensor, of which this rank may have a part, to a whole one."""
    local(target).copy_(local(shard_like(target, value)))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one: those in sequences that have parameters and submodules.

    Modules inside of a routed layer are not: experts need not run on every rank, and other modules read their weights.
    """
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, RoutedLayer):
                continue
            is_sequence = isinstance(child, nn.Sequential | nn.ModuleList)
            in_sequence = isinstance(module, nn.Sequential | nn.ModuleList)
            is_block = in_sequence and not is_sequence and any(True for _ in child.children())
            if is_block and any(True for _ in child.parameters()):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    return blocks


def _clone_view(module: nn.Module, args: object, output: Any) -> Any:
    """Clones views: a layer that changes one in place would cut the block off from the hooks of fully_shard."""
    return output.clone() if isinstance(output, Tensor) and cast("Any", output)._is_view() else output
