"""BatchNorm over the first n of S samples; the others are padding that repeats sample n, outside of the statistics.

`batch_norm_of_first` has n on the host. The first samples are contiguous in either memory format, so that torch's own
kernels run on them and write to the padded output; the padding is copied.

`batch_norm_of_counted` has n on the device, as the weights of samples in their mean: 1 / n, and 0 for padding. Its
operators have the same arguments for every n, as a CUDA graph needs. The moments of each sample's map are merged (Chan
et al. 1979):

    mean = Σ_s share_s mean_s,   var = Σ_s share_s (var_s + (mean_s − mean)²)

Gradients of the outputs of padding must be zero.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["batch_norm_of_counted", "batch_norm_of_first"]


def batch_norm_of_first(
    x: Tensor,
    count: int,
    running: tuple[Tensor, Tensor] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalises samples (S, C, …) by the statistics of the first ``count``.

    Args:
        x: the samples; those from ``count`` on are padding, and repeat the last one before.
        count: the number of samples without padding.
        running: running mean and variance, which are updated in place.
        weight: scale of each channel.
        bias: shift of each channel.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.

    >>> batch_norm_of_first(torch.tensor([[1.0], [3.0], [3.0]]), 2, None, None, None, 0.1, 0.0).flatten().tolist()
    [-1.0, 1.0, 1.0]
    """
    return cast("Tensor", _BatchNormOfFirst.apply(x, weight, bias, count, running, momentum, eps))


class _BatchNormOfFirst(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: int,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        mean_var = running or (None, None)
        y = torch.empty_like(x)
        like = next((each for each in (weight, *mean_var) if each is not None), x)
        dtype = torch.promote_types(x.dtype, torch.float32) if x.is_cuda else like.dtype  # those of the kernels
        mean, inverse = (torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
        out = y[:count], mean, inverse
        torch.native_batch_norm(x[:count], weight, bias, *mean_var, True, momentum, eps, out=out)
        if count < len(x):
            y[count:] = y[count - 1 : count]
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.eps = count, eps
        ctx.needs_affine = weight is not None, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        count: int = ctx.count
        # torch's double backward: mean and inverse deviation are functions of the batch, not inputs
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0][:count], x[:count], weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        padded = F.pad(grad_x, (0, 0) * (x.ndim - 1) + (0, len(x) - count))
        has_weight, has_bias = ctx.needs_affine
        return padded, grad_weight if has_weight else None, grad_bias if has_bias else None, *[None] * 4


def batch_norm_of_counted(
    x: Tensor, share_S: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises samples (S, C, …) by the statistics of those without padding.

    Args:
        x: the samples.
        share_S: weight of a sample in the mean: 1 / count, or 0 for padding. The statistics are computed in its dtype,
            float32 at least. The first sample is not padding.
        weight: scale of each channel.
        bias: shift of each channel.
        eps: added to the variance.

    Returns:
        The normalised samples, and mean and biased variance (C,) without gradients, in the dtype of the shares.

    >>> x, share = torch.tensor([[1.0], [3.0], [3.0]]), torch.tensor([0.5, 0.5, 0.0])
    >>> [each.flatten().tolist() for each in batch_norm_of_counted(x, share, None, None, 0.0)]
    [[-1.0, 1.0, 1.0], [2.0], [1.0]]
    """
    return cast("tuple[Tensor, Tensor, Tensor]", _BatchNormOfCounted.apply(x, weight, bias, share_S, eps))


class _BatchNormOfCounted(torch.autograd.Function):
    """BatchNorm in eval mode with the moments as running statistics, an operator of torch for either direction.

    The gradient of that operator lacks the gradient through the moments, which is subtracted beforehand.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, share_S: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _moments(x, share_S)
        y = F.batch_norm(x, mean, var, _filled(weight, mean, 1), _filled(bias, mean, 0), False, 0.0, eps)
        ctx.save_for_backward(x, weight, bias, share_S, mean, var)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None
        x, weight, bias, share_S, mean, var = ctx.saved_tensors
        inverse = torch.rsqrt(var + ctx.eps)
        scale = _filled(weight, mean, 1)
        # in eval mode the kernel reads running statistics on a CPU, and saved ones on CUDA
        _, slope, offset = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
        )
        # grad − (offset + normalised x · slope) / (values per channel without padding); then as in eval mode
        one_value = share_S[:1] / x.shape[2:].numel()
        grad_x = F.batch_norm(x, mean, var, slope * one_value, offset * one_value, False, 0.0, ctx.eps)
        used = (share_S != 0).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        torch.addcmul(grad, grad_x, used, value=-1, out=grad_x)
        grad_x.mul_((scale * inverse).view(-1, *[1] * (x.ndim - 2)))
        grad_weight = None if weight is None else slope.to(weight.dtype)
        return grad_x, grad_weight, None if bias is None else offset.to(bias.dtype), None, None


def _moments(x: Tensor, share_S: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance (C,) of the samples without padding."""
    values, share_S1 = x.to(share_S.dtype), share_S.unsqueeze(1)
    if x.ndim == 2:
        mean = (share_S1 * values).sum(0)  # a matmul would be in the dtype of autocast
        return mean, (share_S1 * (values - mean).square()).sum(0)
    var_SC, mean_SC = torch.var_mean(values, list(range(2, x.ndim)), correction=0)
    mean = (share_S1 * mean_SC).sum(0)
    deviation_SC = mean_SC - mean
    return mean, (share_S1 * torch.addcmul(var_SC, deviation_SC, deviation_SC)).sum(0)


def _filled(values: Tensor | None, like: Tensor, default: float) -> Tensor:
    """Returns scale or shift in the dtype of the statistics; ``default`` for a norm without."""
    return torch.full_like(like, default) if values is None else values.to(like.dtype)
