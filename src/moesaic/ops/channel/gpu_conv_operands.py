"""Weights of a folded convolution in blocks, and lists of the open blocks of a batch, as the GPU's kernels read them.

Layouts: weight (output blocks, input blocks, ks², channels of an output block, channels of an input block), the last
block of either side filled up with zeros, so that what a pair of open blocks needs is contiguous; bias (O,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ChannelConv

__all__ = ["BlockedConv", "ConvGeometry", "Epilogue", "Gating", "LayerBlocks", "OpenBlockLists"]

_UNGATED_BLOCK = 64
"""Channels that are not gated are in blocks of at most this many, and of at least 16: the sides of a tile."""


class OpenBlockLists(NamedTuple):
    """The open blocks of all gated layers for each image of a batch, on its device.

    The blocks of all layers are numbered one layer after the other; each layer's own numbers begin with 0.
    """

    order: Tensor
    """(B, blocks): of each layer the numbers of its open blocks in ascending order, then those of its closed ones."""
    gates: Tensor
    """(B, blocks): their gates in that order, 0 where closed."""
    counts: Tensor
    """(B, layers): open blocks of each layer."""


@dataclass(frozen=True)
class LayerBlocks:
    """Where the blocks of a gated layer are in `OpenBlockLists`."""

    layer: int
    start: int
    """Its first block among those of all layers."""
    blocks: int
    most: int
    """The largest number of blocks that an image opens."""


@dataclass(frozen=True)
class Gating:
    """Which channels of a convolution are gated."""

    ins: LayerBlocks | None
    """The layer whose gates select its input channels; None where all are read."""
    outs: LayerBlocks | None
    """The layer whose gates select its output channels; None where all are written."""
    write_closed: bool
    """Whether closed output channels are written."""


@dataclass(frozen=True)
class Epilogue:
    """Operations that the kernel of a convolution applies to its output."""

    relu: bool = False
    pool: bool = False
    """Max pooling of 2×2 at stride 2, without padding."""


class ConvGeometry(NamedTuple):
    """Sizes of a `BlockedConv`, as kernels read them."""

    out_channels: int
    in_channels: int
    kernel_size: int
    stride: int
    padding: int
    block_out: int
    block_in: int

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for a map of that size."""
        rows, columns = ((side + 2 * self.padding - self.kernel_size) // self.stride + 1 for side in (height, width))
        return rows, columns


@dataclass(frozen=True, eq=False)
class BlockedConv:
    """A folded convolution whose weights are laid out in blocks.

    >>> from moesaic.layers import ChannelMoE
    >>> from moesaic.ops.channel.bn_folding import fold_norm
    >>> conv = fold_norm(ChannelMoE(20, 40, 3, norm=False, block=16).weights())
    >>> BlockedConv.of(conv, torch.float32, gated_input=True, gated_output=True).weight.shape
    torch.Size([3, 2, 9, 16, 16])
    """

    weight: Tensor
    bias: Tensor
    """(O,), in float32 at least."""
    geometry: ConvGeometry

    @staticmethod
    def of(conv: ChannelConv, dtype: torch.dtype, *, gated_input: bool, gated_output: bool) -> BlockedConv:
        """Lay out the weights of a convolution without BatchNorm, whose channels are gated in blocks or not at all."""
        assert conv.bias is not None and conv.norm is None
        O, C, ks, _ = conv.weight.shape
        out = conv.block_out if gated_output else _ungated_block(O)
        in_ = conv.block_in if gated_input else _ungated_block(C)
        padded = F.pad(conv.weight, (0, 0, 0, 0, 0, -C % in_, 0, -O % out))
        pieces = padded.view(len(padded) // out, out, padded.shape[1] // in_, in_, ks * ks).permute(0, 2, 4, 1, 3)
        bias = conv.bias.to(torch.promote_types(dtype, torch.float32))
        geometry = ConvGeometry(O, C, ks, conv.stride, conv.padding, out, in_)
        return BlockedConv(pieces.to(dtype).contiguous(), bias.contiguous(), geometry)


def _ungated_block(channels: int) -> int:
    return min(_UNGATED_BLOCK, max(16, 1 << (channels - 1).bit_length()))
