"""Sharding of stacked experts over the ranks of a device mesh: ``shard_experts``, and the way back.

A stacked weight (E, …) becomes a DTensor with ``Shard(0)`` on the mesh's ``ep`` axis, as do the running statistics of
expert norms; everything else of the model stays replicated. `moesaic.ops.expert_parallel` sends patches to experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.experts.sample_experts import SampleExperts
from moesaic.experts.stacked_experts import Experts
from moesaic.ops.expert_parallel import ExpertDispatcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_grad_norm_", "expert_parameters", "shard_experts", "unshard_experts"]


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str = "ep",
    uneven_batches: bool = False,
    reduce_gradients: bool = True,
) -> nn.Module:
    """Shards the stacked experts of a model over the ranks of a mesh, in place, and returns the model.

    Every rank then runs its own images through the model, and its own experts on the patches or samples that all ranks
    route to them. Outputs, gradients of the mean loss and expert norms are those of one process with all images.

    Call it on every rank, with the same model, before the optimizer is made. Rank 0's expert weights count. Wrap the
    model in ``DistributedDataParallel`` or ``fully_shard`` afterwards, for its other parameters; DDP leaves the experts
    alone. Every rank must run every forward and backward pass.

    Give the optimizer two parameter groups, the experts and all else (`expert_parameters`): torch's optimizers update
    the tensors of a group in one call on CUDA, which fails ("got mixed torch.Tensor and DTensor") where experts and
    others share a group. ``foreach=False`` avoids it too, with a launch for every tensor.

    Sharded are `ConvExperts`, `MLPExperts`, `LinearExperts` and `PatchNetExperts`; a list of modules as experts of a
    ``SampleMoE`` stays on every rank.

    Args:
        model: a model with stacked experts. `state_dict` then has DTensors; ``load_state_dict`` takes full tensors too.
        mesh: device mesh with an axis for the experts. Along its other axes experts are replicated, with other images.
        dim: name of that axis.
        uneven_batches: whether ranks may have different numbers of images; they are then exchanged in each pass.
            Without it different numbers crash gloo ("Received data size doesn't match") and may hang NCCL.
        reduce_gradients: whether the experts' gradients are averaged over the mesh's other axes in the backward pass.
            False where ``fully_shard`` shards the experts over those axes, which does it then.

    >>> import torch, moesaic
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)      # torchrun does this for many
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    >>> layer = moesaic.PatchMoE(4, 8, experts=8, patches_per_expert=2, patch_size=2)
    >>> layer = moesaic.shard_experts(layer, mesh)
    >>> layer.experts.weight.placements, tuple(layer.experts.weight.to_local().shape)
    ((Shard(dim=0),), (8, 1, 4, 1, 1))
    >>> layer(torch.randn(2, 4, 8, 8)).shape
    torch.Size([2, 8, 8, 8])
    >>> destroy_process_group()
    """
    from torch.distributed.tensor import DTensor, Shard

    dispatcher = ExpertDispatcher(mesh, dim, uneven_batches=uneven_batches, reduce_gradients=reduce_gradients)
    stacks = dict(_stacks(model))
    if not stacks:
        raise ValueError(
            f"shard_experts: {type(model).__name__} has no stacked experts; build it with moesaic.PatchMoE, or with "
            "moesaic.SampleMoE and experts such as moesaic.experts.MLPExperts"
        )
    for name, stack in stacks.items():
        _check(name, stack, dispatcher, dim)
    names: list[str] = []
    for prefix, stack in stacks.items():
        for owner, name, tensor in _tensors(stack):
            full = _from_first_rank(tensor, mesh)
            shard = DTensor.from_local(_shard_of(full, dispatcher), dispatcher.mesh, [Shard(0)], run_check=False)
            _replace(owner, name, shard)
        for module in stack.modules():
            module.register_load_state_dict_pre_hook(_distribute_full_tensors)
        stack.dispatcher = dispatcher
        names += [".".join(filter(None, (prefix, name))) for name in _names(stack)]
    _hide_from_ddp(model, [*_hidden_from_ddp(model), *names])
    return model


def unshard_experts(model: nn.Module) -> nn.Module:
    """Gathers the experts that `shard_experts` sharded on every rank, in place, and returns the model.

    The model then runs, saves and exports as in one process. Call it on every rank.
    """
    names: set[str] = set()
    for prefix, stack in _stacks(model):
        if stack.dispatcher is None:
            continue
        for owner, name, tensor in _tensors(stack):
            _replace(owner, name, cast(Tensor, cast("Any", tensor).full_tensor()))
        stack.dispatcher = None
        names |= {".".join(filter(None, (prefix, name))) for name in _names(stack)}
    _hide_from_ddp(model, [name for name in _hidden_from_ddp(model) if name not in names])
    return model


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the sharded parameters of a model: a group of their own for an optimizer.

    Optimizers that update all tensors of a group in one call, as torch's do on CUDA, cannot mix DTensors with plain
    tensors ("got mixed torch.Tensor and DTensor"), so that experts and all else need a group each:

        experts = expert_parameters(model)
        others = [p for p in model.parameters() if all(p is not e for e in experts)]
        optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}])

    >>> from torch import nn
    >>> expert_parameters(nn.Linear(2, 2))
    []
    """
    return [
        parameter for _, stack in _stacks(model) if stack.dispatcher is not None for parameter in stack.parameters()
    ]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales gradients in place so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, which takes neither DTensors together with plain tensors, nor DTensors of
    several meshes. Every rank gets the norm over all experts.

    >>> weight = torch.ones(4, requires_grad=True)
    >>> weight.sum().backward()
    >>> clip_grad_norm_([weight], 1.0), weight.grad
    (tensor(2.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    total = nn.utils.get_total_norm([getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms])
    factor = (max_norm / (total + 1e-6)).clamp_max(1.0)
    for grads in by_mesh.values():
        for grad in grads:
            local = cast(Tensor, cast("Any", grad).to_local()) if hasattr(grad, "to_local") else grad
            local.mul_(factor.to(local.device, local.dtype))
    return total


Stack = Experts | SampleExperts


def _stacks(model: nn.Module) -> Iterator[tuple[str, Stack]]:
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())  # torch types it in part
    return ((name, module) for name, module in modules if isinstance(module, Stack))


def _names(stack: nn.Module) -> list[str]:
    """Names of the parameters and buffers of a stack."""
    return [name for name, _ in stack.named_parameters()] + [name for name, _ in stack.named_buffers()]


def _tensors(stack: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """The parameters and buffers of a stack, with their module and name in it."""
    return [
        (module, name, tensor)
        for module in stack.modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]


def _check(name: str, stack: Stack, dispatcher: ExpertDispatcher, dim: str) -> None:
    E, G = len(stack), dispatcher.ranks
    if stack.dispatcher is not None:
        raise ValueError(
            f"shard_experts: {name or 'the model'} is sharded already; call moesaic.experts.unshard_experts first"
        )
    if E % G:
        ranks = max(n for n in range(1, G) if E % n == 0)
        fits = " or ".join(str(n) for n in (E // G * G, (E // G + 1) * G) if n)
        raise ValueError(
            f"shard_experts: {name or 'the model'} has {E} expert{'s' * (E > 1)}, which the {G} ranks of axis {dim!r} "
            f"cannot share equally; use {ranks} rank{'s' * (ranks > 1)} for that axis, or {fits} experts"
        )
    for _, tensor_name, tensor in _tensors(stack):
        if tensor.ndim == 0 or tensor.shape[0] != E:
            raise ValueError(
                f"shard_experts: {tensor_name} of {name or 'the model'} has the shape {tuple(tensor.shape)}; stacked "
                f"tensors start with the number of experts, {E}"
            )


def _from_first_rank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the mesh's first rank."""
    full = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not full.is_meta:
        for axis in range(mesh.ndim):  # along one axis after the other
            group = mesh.get_group(axis)
            dist.broadcast(full, group=group, group_src=0)
    return torch.empty_like(tensor).copy_(full)  # in the memory format of the tensor


def _shard_of(full: Tensor, dispatcher: ExpertDispatcher) -> Tensor:
    own = full.shape[0] // dispatcher.ranks
    return full[dispatcher.rank * own : (dispatcher.rank + 1) * own].clone(memory_format=torch.preserve_format)


def _replace(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces a parameter or buffer, which keeps its ``requires_grad``."""
    old = getattr(owner, name)
    if isinstance(old, nn.Parameter):
        setattr(owner, name, nn.Parameter(tensor.detach(), requires_grad=old.requires_grad))
    else:
        setattr(owner, name, tensor)


def _distribute_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Turns full tensors that are to be loaded into DTensors like the module's own."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        full = state_dict.get(prefix + name)
        if isinstance(own, DTensor) and isinstance(full, Tensor) and not isinstance(full, DTensor):
            if full.shape != own.shape:
                continue  # load_state_dict reports it
            full = full.to(own.device, own.dtype)
            state_dict[prefix + name] = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)


def _hidden_from_ddp(model: nn.Module) -> list[str]:
    return list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))


def _hide_from_ddp(model: nn.Module, names: list[str]) -> None:
    """Keeps DDP from reducing the gradients of these parameters and from broadcasting these buffers."""
    DDP = nn.parallel.DistributedDataParallel
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)  # pyright: ignore[reportPrivateUsage]
