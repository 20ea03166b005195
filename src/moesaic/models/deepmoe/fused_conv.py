"""A folded convolution of a frozen network on a GPU, with the residual, ReLU and max pooling that follow it.

Where the kernels apply (`moesaic.ops.triton.channel_conv`) only open blocks are read and computed; elsewhere everything
is computed and closed channels are multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.layers.recording import RoutedLayer
from moesaic.ops.channel.bn_folding import batch_norm_tensors, fold_norm
from moesaic.ops.channel.gpu_conv_operands import BlockedConv, Epilogue, Gating, LayerBlocks, OpenBlockLists
from moesaic.ops.dispatch import ChannelConv
from moesaic.routing_record import Routing

__all__ = ["FusedConv", "OpenedBlocks"]

OpenedBlocks = OpenBlockLists | Tensor
"""What the images of a batch open: lists for the kernels, or the gates (B, blocks) of all layers, 0 where closed."""


@dataclass(frozen=True)
class _DenseWeights:
    weight: Tensor
    bias: Tensor


class FusedConv(RoutedLayer):
    """A convolution with gated output channels, gated input channels, or neither.

    It is built with the convolution alone; ``absorb_…`` adds what follows, and ``lay_out`` makes it ready to run.

    Args:
        conv: the convolution, without BatchNorm, in float32 at least.
        outs: the gated layer that it is; None where its output channels are not gated.
        ins: the gated layer whose channels it reads; None where these are not gated.
        compact: whether consumers read the open channels of its output alone, so that closed ones need no value.
    """

    def __init__(
        self, conv: ChannelConv, outs: LayerBlocks | None = None, ins: LayerBlocks | None = None, compact: bool = False
    ) -> None:
        super().__init__()
        self.conv = conv
        self.outs = outs
        self.ins = ins
        self.compact = compact
        self.adds = False
        """Whether a map is added to its output."""
        self.relu = conv.activation == "relu"
        self.pool = False
        """Whether max pooling of 2×2 at stride 2 follows."""
        self._weights: BlockedConv | _DenseWeights | None = None
        self._gating: Gating | None = None
        self._epilogue: Epilogue | None = None

    def absorb_norm(self, norm: nn.BatchNorm2d) -> bool:
        """Fold a BatchNorm that reads its output; False where that would change the network."""
        if self.outs is not None or self.adds or self.relu or self.pool:
            return False
        self.conv = fold_norm(replace(self.conv, norm=batch_norm_tensors(norm)))
        return True

    def absorb_add(self) -> bool:
        """Add a map to its output; False where that would change the network."""
        if self.compact or self.adds or self.relu or self.pool:
            return False
        self.adds = True
        return True

    def absorb_relu(self) -> bool:
        """Apply ReLU; False where that would change the network."""
        if self.pool:
            return False
        self.relu = True
        return True

    def absorb_pool(self) -> bool:
        """Apply max pooling of 2×2; False where there is one already."""
        if self.pool:
            return False
        self.pool = True
        return True

    def lay_out(self, dtype: torch.dtype, *, kernels: bool) -> None:
        """Store the weights in a dtype and in the form in which they are read."""
        if kernels:
            gated = {"gated_input": self.ins is not None, "gated_output": self.outs is not None}
            self._weights = BlockedConv.of(self.conv, dtype, **gated)
            self._gating = Gating(self.ins, self.outs, write_closed=not self.compact)
            self._epilogue = Epilogue(self.relu, self.pool)
        else:
            assert self.conv.bias is not None
            self._weights = _DenseWeights(self.conv.weight.to(dtype), self.conv.bias.to(dtype))
        # only the geometry is read from now on
        self.conv = replace(self.conv, weight=torch.empty(self.conv.weight.shape, device="meta"), bias=None)

    def forward(self, x: Tensor, opened: OpenedBlocks | None, residual: Tensor | None = None) -> Tensor:
        weights = self._weights
        if not isinstance(weights, BlockedConv):
            assert weights is not None and not isinstance(opened, OpenBlockLists)
            return self._masked(x, weights, opened, residual)
        from moesaic.ops.triton.channel_conv import channel_conv

        assert not isinstance(opened, Tensor) and self._gating is not None and self._epilogue is not None
        if residual is not None:
            geometry = weights.geometry
            size = x.shape[0], geometry.out_channels, *geometry.output_size(*x.shape[2:])
            residual = residual.expand(size).contiguous(memory_format=torch.channels_last)
        return channel_conv(x, weights, self._gating, opened, self._epilogue, residual)

    def call_routing_hooks(self, routing: Routing) -> None:
        """Report the gates of a batch."""
        self._call_routing_hooks(routing)

    def _masked(self, x: Tensor, weights: _DenseWeights, gates: Tensor | None, residual: Tensor | None) -> Tensor:
        y = F.conv2d(x, weights.weight, weights.bias, self.conv.stride, self.conv.padding)
        if self.outs is not None:
            assert gates is not None
            own = gates[:, self.outs.start : self.outs.start + self.outs.blocks].to(y.dtype)
            y = y * own.repeat_interleave(self.conv.block_out, 1)[:, : y.shape[1], None, None]
        y = y if residual is None else y + residual
        y = F.relu(y) if self.relu else y
        return F.max_pool2d(y, 2) if self.pool else y
