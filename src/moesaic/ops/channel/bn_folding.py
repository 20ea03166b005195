"""BatchNorm with fixed statistics, folded into the convolution before it: BatchNorm(conv(x)) = conv'(x) + shift."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.ops.dispatch import ChannelConv, Norm

__all__ = ["batch_norm_tensors", "fold_norm"]


def batch_norm_tensors(norm: nn.BatchNorm2d) -> Norm:
    """Returns weights, statistics and settings of a BatchNorm module."""
    module: Any = norm  # whose attributes torch finds ten times as slowly
    parameters, buffers = module._parameters, module._buffers
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or bias is None:  # are computed from others
        weight, bias = norm.weight, norm.bias
    mean, var = buffers.get("running_mean"), buffers.get("running_var")
    assert mean is not None and var is not None and norm.momentum is not None
    batch, counter = norm.__dict__.get("global_batch"), buffers.get("num_batches_tracked")
    return Norm(weight, bias, mean, var, norm.momentum, norm.eps, norm.training, batch, counter)


@torch.no_grad()
def fold_norm(conv: ChannelConv) -> ChannelConv:
    """Returns a copy of a convolution without BatchNorm and with the same output, in float32 at least.

    Its bias is always a tensor.

    >>> from moesaic.layers import ChannelMoE
    >>> layer, x = ChannelMoE(3, 8, 3).eval(), torch.randn(1, 3, 5, 5)
    >>> folded = fold_norm(layer.weights())
    >>> y = torch.conv2d(x, folded.weight, folded.bias, padding=1)
    >>> torch.allclose(y, layer.norm(layer.conv(x)), atol=1e-5)
    True
    """
    dtype = torch.promote_types(conv.weight.dtype, torch.float32)
    weight, norm = conv.weight.detach().to(dtype), conv.norm
    bias: Tensor = weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.detach().to(dtype).clone()
    if norm is None:
        return replace(conv, weight=weight.clone(memory_format=torch.contiguous_format), bias=bias)
    scale = norm.weight.to(dtype) * torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    weight = (weight * scale[:, None, None, None]).contiguous()
    shift = norm.bias.to(dtype) + (bias - norm.running_mean.to(dtype)) * scale
    return replace(conv, weight=weight, bias=shift, norm=None)
