"""Linear maps of experts: the values of expert e times its matrix W_e (O, C), stored as ``nn.Linear`` stores it.

    y = values · W_eᵀ,   dW_e = dyᵀ · values

The gradient has the layout of the weights. Autograd's own gradient of ``bmm(values, W.mT)`` is that of W.mT: it is
transposed, and the copy of it into ``W.grad`` takes a third of a training step of MLP experts on a CPU.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from moesaic.ops.cpu_gemm import expert_bmm, expert_mm
from moesaic.ops.eager_conditions import is_eager_cpu
from moesaic.ops.grouped_gemm import group_sizes, grouped_matmul

__all__ = ["expert_linear"]


def expert_linear(values: Tensor, weight_EOC: Tensor, ends_E: Tensor | None = None) -> Tensor:
    """Multiplies values by their expert's matrix.

    Args:
        values: (E, M, C), as many for each expert; or with ``ends_E`` (R, C), sorted by expert.
        weight_EOC: the matrices.
        ends_E: the values of expert e end before row ``ends_E[e]``.

    >>> expert_linear(torch.ones(2, 3, 4), torch.tensor([1.0, 10.0]).view(2, 1, 1).expand(2, 5, 4))[:, 0, 0].tolist()
    [4.0, 40.0]
    >>> expert_linear(torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor([1, 3])).shape
    torch.Size([3, 5])
    """
    eager = is_eager_cpu(values, weight_EOC) and values.dtype == weight_EOC.dtype
    if ends_E is None:
        if eager:
            return cast("Tensor", _EqualGroups.apply(values, weight_EOC))
        return torch.bmm(values, weight_EOC.transpose(1, 2))
    if eager and values.ndim == 2:
        return cast("Tensor", _UnequalGroups.apply(values, weight_EOC, group_sizes(ends_E)))
    return grouped_matmul(values, weight_EOC.transpose(1, 2), ends_E)


class _EqualGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return expert_bmm(values, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        values, weight = ctx.saved_tensors
        wants_values, wants_weight = ctx.needs_input_grad
        return (
            expert_bmm(grads[0], weight) if wants_values else None,
            expert_bmm(grads[0].transpose(1, 2), values) if wants_weight else None,
        )


class _UnequalGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.sizes = sizes
        groups = zip(_split(values, sizes), weight.unbind(), strict=True)
        return torch.cat([expert_mm(part, matrix.T) for part, matrix in groups])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weight = ctx.saved_tensors
        wants_values, wants_weight, _ = ctx.needs_input_grad
        parts = _split(grads[0], ctx.sizes)
        grad_values = grad_weight = None
        if wants_values:
            pairs = zip(parts, weight.unbind(), strict=True)
            grad_values = torch.cat([expert_mm(part, matrix) for part, matrix in pairs])
        if wants_weight:
            groups = zip(parts, _split(values, ctx.sizes), strict=True)
            grad_weight = torch.stack([expert_mm(part.T, own) for part, own in groups])
        return grad_values, grad_weight, None


def _split(rows: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", rows.split(sizes))
