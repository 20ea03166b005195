"""Gated convolutions of a batch in which every sample opens blocks of its own, as products of block pairs.

Where samples open different blocks, those that any of them opens are soon all of them. But every sample that has
block i open on the inside and block o on the outside needs the same product: its unfolded map of block i times the
weights from i to o. So the rows of all samples are sorted by their pair of blocks, one grouped product
(`grouped_matmul`) does all pairs, and what a sample's input blocks contribute to an output block is added up. With
``mode="topk"`` gates no shape depends on what is open, and the host never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.grouped import grouped_matmul
from moesaic.record import Routing

__all__ = ["block_pairs", "pairs_fit"]


def pairs_fit(gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> bool:
    """Whether every sample opens equally many whole blocks on either side."""
    if gate_in is None or gate_out.may_drop or gate_in.may_drop:
        return False
    O, C = conv.weight.shape[:2]
    return O % conv.block_out == 0 and C % conv.block_in == 0 and gate_out.chooser == gate_in.chooser == "unit"


def block_pairs(x: Tensor, gate_out: Routing, gate_in: Routing, conv: ChannelConv) -> tuple[Tensor, Tensor]:
    """(B, K, channels of a block, H', W'): the bare convolution in the K open blocks of each sample, and their numbers.

    >>> from moesaic.layers import ChannelMoE
    >>> from moesaic.routing import ChannelGate
    >>> gate, layer = ChannelGate(1, channels=8, block=2, mode="topk", keep=1), ChannelMoE(8, 8, 3, block=2)
    >>> routing = gate.choose(torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]]))
    >>> with torch.no_grad():
    ...     z, blocks = block_pairs(torch.zeros(2, 8, 5, 5), routing, routing, layer.weights())
    >>> z.shape, blocks.tolist()
    (torch.Size([2, 1, 2, 5, 5]), [[3], [0]])
    """
    assert gate_out.index is not None and gate_in.index is not None
    outs_BK, ins_BL = gate_out.index[:, 0], gate_in.index[:, 0]
    O, C, ks, _ = conv.weight.shape
    b_out, b_in = conv.block_out, conv.block_in
    (B, K), L = outs_BK.shape, ins_BL.shape[1]
    H, W = x.shape[2:]
    # the open input blocks of each sample, unfolded: (B · L, pixels, channels of a block · ks²)
    place = (torch.arange(B, device=x.device).unsqueeze(1) * (C // b_in) + ins_BL).flatten()
    open_blocks = x.reshape(B * (C // b_in), b_in, H, W).index_select(0, place)
    values = F.unfold(open_blocks, ks, padding=conv.padding, stride=conv.stride).transpose(1, 2)
    # every pair of an open output and an open input block, sorted by which blocks they are
    pairs = O // b_out * (C // b_in)
    pair_BKL = outs_BK.unsqueeze(2) * (C // b_in) + ins_BL.unsqueeze(1)
    sorted_, order = pair_BKL.flatten().sort()
    ends = torch.searchsorted(sorted_, torch.arange(pairs, device=x.device), right=True)
    row = order // (K * L) * L + order % L  # b · L + l of (b · K + k) · L + l
    weight = conv.weight.reshape(O // b_out, b_out, C // b_in, -1).permute(0, 2, 3, 1).reshape(pairs, -1, b_out)
    products = grouped_matmul(values.index_select(0, row), weight, ends)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    z = products.index_select(0, back).view(B, K, L, -1, b_out).sum(2).transpose(2, 3)
    rows = (H + 2 * conv.padding - ks) // conv.stride + 1
    return z.reshape(B, K, b_out, rows, -1), outs_BK
