"""Masked execution of a convolution with gated channels: the definition.

    y = g ⊙ activation(BatchNorm(conv(x)))

The gate follows BatchNorm, whose shift would make a closed channel nonzero again. As g ≥ 0, it commutes with ReLU, and
it comes last: ReLU has no gradient at 0, so a closed gate before it would have none, whatever its estimate.
Everything is computed and closed channels are multiplied by zero: exact gradients, any device, any dtype. Inference
that computes only open channels is `moesaic.freeze`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.joint_routing import JointRouting
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.eager_conditions import in_vmap
from moesaic.routing_record import Routing

__all__ = [
    "apply_gates",
    "channel_gates",
    "check_closed",
    "closed_gradients",
    "dense_conv",
    "masked_conv",
    "open_channels",
    "scale_channels",
]


def closed_gradients(routing: Routing) -> bool:
    """Whether the gates have gradients where they are closed: those of a straight-through estimate."""
    return bool(getattr(routing, "closed_gradients", False))


def channel_gates(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): the gate of every channel, 0 where it is closed."""
    if isinstance(routing, JointRouting) and routing.channel_gates is not None:
        return routing.channel_gates
    return _expand_blocks(routing.weights[:, 0], channels, block)


def open_channels(routing: Routing, channels: int, block: int) -> Tensor:
    """(B, C): whether a channel is open."""
    return _expand_blocks(routing.mask[:, 0], channels, block)


def masked_conv(x: Tensor, gate_out: Routing, conv: ChannelConv) -> Tensor:
    """The definition: a dense convolution, BatchNorm, and the gates as a mask."""
    return apply_gates(dense_conv(x, conv), gate_out, conv)


def dense_conv(x: Tensor, conv: ChannelConv) -> Tensor:
    """The convolution alone."""
    return F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def apply_gates(y: Tensor, gate_out: Routing, conv: ChannelConv) -> Tensor:
    """Applies BatchNorm, activation and gates to the output of the convolution."""
    if conv.norm is not None:
        conv.norm.count()
        y = conv.norm.apply(y)
    y = F.relu(y) if conv.activation == "relu" else y
    return scale_channels(y, gate_out, conv)


def scale_channels(y: Tensor, gate_out: Routing, conv: ChannelConv) -> Tensor:
    """The map times the gate of each channel."""
    return y * channel_gates(gate_out, y.shape[1], conv.block_out).to(y.dtype)[:, :, None, None]


def check_closed(x: Tensor, gate_in: Routing, conv: ChannelConv) -> None:
    """Raise if a map is nonzero in a channel that ``gate_in`` closes: a frozen layer would not read it."""
    if x.is_meta or torch.compiler.is_compiling() or in_vmap():
        return
    nonzero = (x.detach() != 0).flatten(2).any(2)
    wrong = nonzero & ~open_channels(gate_in, x.shape[1], conv.block_in)
    if wrong.any():
        sample, channel = (int(place) for place in wrong.nonzero()[0])
        raise ValueError(
            f"ChannelMoE: channel {channel} of sample {sample} is not zero, but gate_in says that it is closed; "
            "pass the gates of the layer that produced this map, or gate_in=None where something was added to it"
        )


def _expand_blocks(values_BE: Tensor, channels: int, block: int) -> Tensor:
    return values_BE if block == 1 else values_BE.repeat_interleave(block, 1)[:, :channels]
