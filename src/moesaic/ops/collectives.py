"""Differentiable collectives of a process group, on gloo and NCCL.

The gradient of a collective is a collective too, so every rank must run the backward pass. A gradient is that of the
sum of the ranks' losses; `average_gradient` turns it into that of their mean, which DDP and FSDP2 compute.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_rows", "all_reduce_sum", "all_to_all_rows", "average_gradient"]


def all_to_all_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first ``sent[0]`` rows to rank 0, the next ``sent[1]`` to rank 1, …; returns what the ranks sent.

    ``received[r]`` is the number of rows that rank r sends to this one.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = dist.distributed_c10d._get_default_group()
    >>> all_to_all_rows(torch.tensor([[1.0], [2.0]]), [2], [2], group).flatten().tolist()    # all to itself
    [1.0, 2.0]
    >>> dist.destroy_process_group()
    """
    return cast(Tensor, _AllToAll.apply(rows, sent, received, group))


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the rows of all ranks, which have equally many."""
    return cast(Tensor, _AllGather.apply(rows, group))


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor over the ranks."""
    return cast(Tensor, _AllReduce.apply(tensor, group))


def average_gradient(weight: Tensor, divisor: int, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Returns the weight; its gradient is divided by ``divisor`` and averaged over the ranks of each group.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = torch.ones(2, requires_grad=True)
    >>> average_gradient(weight, 4, (dist.distributed_c10d._get_default_group(),)).sum().backward()
    >>> weight.grad
    tensor([0.2500, 0.2500])
    >>> dist.destroy_process_group()
    """
    return cast(Tensor, _AverageGradient.apply(weight, divisor, groups))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_rows(grad_outputs[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group
        grads = all_reduce_sum(grad_outputs[0], group)
        own = grads.shape[0] // group.size()
        return grads[group.rank() * own : (group.rank() + 1) * own], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad_outputs[0], ctx.group), None


class _AverageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.divisor, ctx.groups = divisor, groups
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        dtype, divisor = grad_outputs[0].dtype, ctx.divisor
        # summed in float32 at least: under autocast gradients come in low precision
        grad = grad_outputs[0].to(torch.promote_types(dtype, torch.float32)) if ctx.groups else grad_outputs[0]
        for group in ctx.groups:
            grad, divisor = all_reduce_sum(grad, group), divisor * group.size()
        return (grad / divisor).to(dtype), None, None
