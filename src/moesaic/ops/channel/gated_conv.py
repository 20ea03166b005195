"""What it means that a convolution's channels are gated, and what it costs in multiply-adds.

    y = activation(g ⊙ BatchNorm(conv(x)))

The gate comes after BatchNorm, whose shift would open a closed channel again; as g ≥ 0 it may stand on either side of
ReLU. `masked_dense` computes that as it stands. How closed channels are left out is the matter of `skipping`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ChannelConv
from moesaic.routing_record import Routing

__all__ = [
    "channel_gates",
    "channel_macs",
    "check_closed",
    "masked_dense",
    "may_skip",
    "norm_as_scale_and_shift",
    "open_channels",
]


def channel_macs(
    active_in: int | Tensor, active_out: int | Tensor, kernel_size: int, map_size: tuple[int, int]
) -> int | Tensor:
    """Multiply-adds of a gated convolution for a sample: active_in × active_out × ks² × the pixels of its result.

    Counts may be tensors (B,), one for each sample.

    >>> channel_macs(32, 16, 3, (8, 8))
    294912
    """
    return active_in * active_out * (kernel_size**2 * map_size[0] * map_size[1])


def channel_gates(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): the gate of every channel, 0 where it is closed."""
    return _over_channels(routing.weights[:, 0], channels, block)


def open_channels(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): whether a channel is open."""
    return _over_channels(routing.mask[:, 0], channels, block)


def norm_as_scale_and_shift(
    weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float | Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """BatchNorm with fixed statistics as scale · z + shift, for the bare result z of a convolution with bias ``added``.

    >>> one = torch.ones(1)
    >>> norm_as_scale_and_shift(2 * one, one, mean=3 * one, var=4 * one, eps=0.0)
    (tensor([1.]), tensor([-2.]))
    """
    scale = weight * torch.rsqrt(var + eps)
    return scale, torch.addcmul(bias, mean if added is None else mean - added, scale, value=-1)


def masked_dense(x: Tensor, gate_out: Routing, conv: ChannelConv) -> Tensor:
    """The definition: everything is computed, and the gates close what they close."""
    y = F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)
    if conv.norm is not None:
        norm = conv.norm
        y = F.batch_norm(
            y,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            training=norm.training,
            momentum=norm.momentum,
            eps=norm.eps,
        )
    y = y * channel_gates(gate_out, y.shape[1], conv.block_out).to(y.dtype)[:, :, None, None]
    return F.relu(y) if conv.activation == "relu" else y


def check_closed(x: Tensor, gate_in: Routing, conv: ChannelConv) -> None:
    """Refuse a map that is not zero where the gates of its channels are closed: whoever skips them would err."""
    if x.is_meta or torch.compiler.is_compiling():
        return
    there = (x.detach() != 0).flatten(2).any(2)
    wrong = there & ~open_channels(gate_in, x.shape[1], conv.block_in)
    if wrong.any():
        sample, channel = (int(place) for place in wrong.nonzero()[0])
        raise ValueError(
            f"ChannelMoE: channel {channel} of sample {sample} is not zero, but gate_in says that it is closed; "
            "give the gates of the layer that made this map, or gate_in=None where something was added to it"
        )


def may_skip(x: Tensor, gates: Sequence[Tensor], convs: Sequence[ChannelConv]) -> bool:
    """Whether closed channels of layers may be left out: nobody learns from them, and the host can read the gates."""
    if x.is_meta or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return False
    if any(conv.norm is not None and conv.norm.training for conv in convs):
        return False
    if not torch.is_grad_enabled():
        return True
    learned = [x, *gates]
    for conv in convs:
        learned += [conv.weight, *([] if conv.bias is None else [conv.bias])]
        learned += [] if conv.norm is None else [conv.norm.weight, conv.norm.bias]
    return not any(tensor.requires_grad for tensor in learned)


def _over_channels(values_BE: Tensor, channels: int, block: int) -> Tensor:
    return values_BE if block == 1 else values_BE.repeat_interleave(block, 1)[:, :channels]
