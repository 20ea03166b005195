"""BatchNorm of a batch that is spread over processes: its statistics are those of all parts.

    y = (x − mean) / √(var + eps) · weight + bias
    dx = weight / √(var + eps) · (dy − Σ dy / n − x̂ · Σ dy x̂ / n),   sums and n over all ranks

Maps are (B, C, …), statistics (C,). Maps are large, and every pass over one costs as much as a part of the convolution
in front of it: so each half of the formulas is one kernel of torch. Those of ``nn.SyncBatchNorm`` are for GPUs only;
on a CPU the same comes from the kernels of BatchNorm in eval mode, which take statistics as given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moesaic.ops.global_batch import merge_moments

if TYPE_CHECKING:
    from moesaic.ops.dispatch import Norm
    from moesaic.ops.global_batch import GlobalBatch

__all__ = ["global_batch_norm"]

_torch: Any = torch  # kernels that torch does not type


def global_batch_norm(x: Tensor, norm: Norm) -> Tensor:
    """BatchNorm of maps (B, C, …) with the statistics of the whole batch; updates the running ones."""
    assert norm.batch is not None
    y, mean, var, count = cast(
        "tuple[Tensor, Tensor, Tensor, Tensor]",
        _BatchNorm.apply(x, norm.weight, norm.bias, norm.eps, norm.batch),
    )
    if x.device.type == "cpu" and int(count) == 1:  # elsewhere the host would wait for the device
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if norm.running_mean is not None:  # pyright: ignore[reportUnnecessaryComparison] # of a module without statistics
        with torch.no_grad():
            any_values = count.clamp_max(1)  # no value anywhere changes nothing
            unbiased = var * (count / (count - 1).clamp_min(1))
            for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                running.lerp_(value.to(running.dtype), (norm.momentum * any_values).to(running.dtype))
    return y


class _BatchNorm(torch.autograd.Function):
    """The normalised map, mean, variance and count of the whole batch; weights get the gradient of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: GlobalBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        channels = x.shape[1]
        number = x.numel() // max(channels, 1)
        own_mean, squares = _moments(x, number, dtype, eps)
        parts = batch.stack(torch.stack([torch.full_like(squares, number), own_mean, squares]))
        total, mean, squares = merge_moments(parts)
        var = squares / total.clamp_min(1)
        weight_C = torch.ones_like(mean) if weight is None else weight.to(dtype)
        ctx.save_for_backward(x, weight_C, mean, var, total)
        ctx.batch, ctx.eps = batch, eps
        ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        y = _normalize(x, mean, var, weight_C, None if bias is None else bias.to(dtype), eps)
        count = total[0].clone() if channels else total.sum()
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # of the decorator's type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors, eps=ctx.eps)
        grad = grads[0].contiguous(memory_format=_memory_format(saved.x))
        grad_x, *own = _backward_cuda(grad, saved, ctx.batch) if grad.is_cuda else _backward_cpu(grad, saved, ctx.batch)
        of_weights = (None if dtype is None else each.to(dtype) for each, dtype in zip(own, ctx.dtypes, strict=True))
        return grad_x, *of_weights, None, None


class _Saved(NamedTuple):
    """Values saved for the backward pass; all tensors but the map are (C,)."""

    x: Tensor
    weight: Tensor
    mean: Tensor
    var: Tensor
    total: Tensor
    """The number of values of the whole batch."""
    eps: float

    @property
    def inverse(self) -> Tensor:
        return torch.rsqrt(self.var + self.eps)


def _moments(x: Tensor, number: int, dtype: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of this rank's part."""
    unused = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
    if not number:
        return unused[0], unused[1]
    if x.is_cuda:
        mean, inverse = _torch.batch_norm_stats(x, eps)
        return mean, (inverse.pow(-2) - eps).clamp_min(0) * number
    # the dtype of running statistics is that in which the kernel computes
    mean, var = _torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
    return mean, var * number


def _normalize(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    if x.is_cuda:
        return _torch.batch_norm_elemt(x, weight, bias, mean, torch.rsqrt(var + eps), eps)
    return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)


def _backward_cuda(grad: Tensor, saved: _Saved, batch: GlobalBatch) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, mean, _, total, _ = saved
    if not x.numel():
        return _backward_nothing(saved, batch)
    common = (grad, x, mean, saved.inverse, weight)
    *own, grad_weight, grad_bias = _torch.batch_norm_backward_reduce(*common, True, True, True)
    sums = batch.sum(torch.stack(own))
    grad_x = _torch.batch_norm_backward_elemt(*common, sums[0], sums[1], total[:1].to(torch.int32))
    return grad_x, grad_weight, grad_bias


def _backward_cpu(grad: Tensor, saved: _Saved, batch: GlobalBatch) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, mean, var, total, eps = saved
    if not x.numel():
        return _backward_nothing(saved, batch)
    # in eval mode: dy · weight / √(var + eps), Σ dy x̂, Σ dy
    grad_x, grad_weight, grad_bias = _torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, None, None, False, eps, [True, True, True]
    )
    slope, offset = batch.sum(torch.stack([grad_weight, grad_bias])) / total.clamp_min(1)
    scale = -weight * saved.inverse
    grad_x += F.batch_norm(x, mean, var, scale * slope, scale * offset, training=False, eps=eps)
    return grad_x, grad_weight, grad_bias


def _backward_nothing(saved: _Saved, batch: GlobalBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Of a rank without samples, which takes part in the sum."""
    zeros = torch.zeros(2, *saved.mean.shape, dtype=saved.mean.dtype, device=saved.mean.device)
    batch.sum(zeros)
    return torch.empty_like(saved.x), zeros[0], zeros[1]


def _memory_format(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
