"""BatchNorm of stacked experts (S, E·C, …), each over its own samples, as if every expert ran alone.

Each sample has the moments of its own map, which are merged over the samples of an expert (Chan et al. 1979):

    mean = Σ_s share_s mean_s,   var = Σ_s share_s (var_s + (mean_s − mean)²)

with shares of 1 / count, and 0 for repeated samples. However many experts there are, maps are read by a few operators
of torch; everything else is of the size (S, E·C).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.sample_groups import by_expert

__all__ = ["masked_batch_norm"]


def masked_batch_norm(
    x: Tensor, weight_EC: Tensor | None, bias_EC: Tensor | None, used_SE: Tensor, share_SE: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises stacked samples by the statistics of their expert.

    Args:
        x: samples (S, E·C, …).
        weight_EC: scale of each expert's channels.
        bias_EC: their shift.
        used_SE: 1, or 0 of samples that do not count, in the dtype of ``x``. The first sample of an expert counts;
            gradients of the outputs of those that do not must be zero.
        share_SE: share of a sample in the mean of its expert: 1 / count or 0. The statistics are computed in its dtype,
            float32 at least.
        eps: added to the variance.

    Returns:
        The normalised samples, and mean and biased variance (E, C) without gradients, in float32 at least.

    >>> x = torch.tensor([[1.0, 10.0], [3.0, 99.0]])                # two experts; the last sample does not count
    >>> used, share = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 1.0], [0.5, 0.0]])
    >>> y, mean, var = masked_batch_norm(x, None, None, used, share, 1e-5)
    >>> mean.flatten().tolist(), var.flatten().tolist()
    ([2.0, 10.0], [1.0, 0.0])
    """
    return cast("tuple[Tensor, Tensor, Tensor]", _MaskedBatchNorm.apply(x, weight_EC, bias_EC, used_SE, share_SE, eps))


class _MaskedBatchNorm(torch.autograd.Function):
    """BatchNorm in eval mode with the moments as running statistics, an operator of torch for either direction.

    Its gradient lacks what flows through the moments: that is taken from the incoming gradient first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_EC: Tensor | None,
        bias_EC: Tensor | None,
        used_SE: Tensor,
        share_SE: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean_EC, var_EC = _moments(x, share_SE)
        scale, shift = _filled(weight_EC, mean_EC, 1), _filled(bias_EC, mean_EC, 0)
        y = F.batch_norm(x, mean_EC.flatten(), var_EC.flatten(), scale, shift, False, 0.0, eps)
        ctx.save_for_backward(x, weight_EC, bias_EC, share_SE, mean_EC, var_EC)
        ctx.eps, ctx.used_SE = eps, used_SE
        ctx.mark_non_differentiable(mean_EC, var_EC)
        ctx.set_materialize_grads(False)
        return y, mean_EC, var_EC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None, None
        if torch.is_grad_enabled():  # gradients of gradients: through the definition
            return *_differentiable_grads(ctx, grad), None, None, None
        x, weight_EC, bias_EC, share_SE, mean_EC, var_EC = ctx.saved_tensors
        moments = mean_EC.flatten(), var_EC.flatten()
        inverse = torch.rsqrt(moments[1] + ctx.eps)
        scale = _filled(weight_EC, mean_EC, 1)
        # torch reads the moments from the running statistics on a CPU, from the saved ones on CUDA
        _, slope, offset = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, *moments, moments[0], inverse, False, ctx.eps, [False, True, True]
        )
        # grad − (offset + normalised x · slope) / values of the expert; then in eval mode
        S, E = share_SE.shape
        one_value_E1 = share_SE[0].unsqueeze(1) / x.shape[2:].numel()
        slope_mean, offset_mean = ((each.view(E, -1) * one_value_E1).flatten() for each in (slope, offset))
        grad_x = F.batch_norm(x, *moments, slope_mean, offset_mean, False, 0.0, ctx.eps)  # what follows is in place
        through_moments, used = by_expert(grad_x, E), ctx.used_SE.view(S, E, *[1] * (x.ndim - 1))
        torch.addcmul(by_expert(grad, E), through_moments, used, value=-1, out=through_moments)
        grad_x.mul_(_per_channel(scale * inverse, x))
        grad_weight = None if weight_EC is None else slope.view_as(weight_EC).to(weight_EC.dtype)
        grad_bias = None if bias_EC is None else offset.view_as(bias_EC).to(bias_EC.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _differentiable_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight_EC, bias_EC, share_SE, _, _ = ctx.saved_tensors
    mean_EC, var_EC = _moments(x, share_SE)
    y = (x - _per_channel(mean_EC, x)) * _per_channel(torch.rsqrt(var_EC + ctx.eps), x)
    for values, operation in ((weight_EC, torch.mul), (bias_EC, torch.add)):
        y = y if values is None else operation(y, _per_channel(values, x))
    inputs = [x, weight_EC, bias_EC]
    needed = [each for each, needs in zip(inputs, ctx.needs_input_grad[:3], strict=True) if needs]
    found = iter(torch.autograd.grad(y.to(x.dtype), needed, grad, create_graph=True))
    return tuple(next(found) if needs else None for needs in ctx.needs_input_grad[:3])


def _moments(x: Tensor, share_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (E, C) of each expert's samples."""
    S, E = share_SE.shape
    values = x.to(share_SE.dtype)
    share_SE1 = share_SE.unsqueeze(2)
    if x.ndim == 2:
        mean_SEC = values.view(S, E, -1)
        mean_EC = (share_SE1 * mean_SEC).sum(0)
        return mean_EC, (share_SE1 * (mean_SEC - mean_EC).square()).sum(0)
    var, mean = torch.var_mean(values, list(range(2, x.ndim)), correction=0)
    var_SEC, mean_SEC = var.view(S, E, -1), mean.view(S, E, -1)
    mean_EC = (share_SE1 * mean_SEC).sum(0)
    deviation_SEC = mean_SEC - mean_EC
    return mean_EC, (share_SE1 * torch.addcmul(var_SEC, deviation_SEC, deviation_SEC)).sum(0)


def _filled(values_EC: Tensor | None, like_EC: Tensor, default: float) -> Tensor:
    """The values of all channels (E·C) in the dtype of the statistics; a norm without scale and shift has defaults."""
    if values_EC is None:
        return torch.full_like(like_EC, default).flatten()
    return values_EC.to(like_EC.dtype).flatten()


def _per_channel(values_EC: Tensor, x: Tensor) -> Tensor:
    return values_EC.reshape(1, -1, *[1] * (x.ndim - 2))
