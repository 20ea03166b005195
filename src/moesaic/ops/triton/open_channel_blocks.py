"""The open blocks of channels of all gated layers, from the scores of all heads.

    relu     open where score > 0, gate = score
    hard     open where score > 0, gate = 1
    top-k    open where fewer than keep blocks have a higher score, or an equal one and a lower number;
             gate = softplus(score)

Layouts: scores (B, ≥ blocks), the blocks of all layers one layer after the other; layers (layers, 3), of each the first
block, the number of blocks and ``keep``; order and gates (B, blocks) and counts (B, layers) as in `OpenBlockLists`.
A program ranks the blocks of one layer of one image. Nothing is known on the host, so that nothing waits for the GPU.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.channel.gpu_conv_operands import OpenBlockLists
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import num_warps, power_of_2

__all__ = ["list_open_blocks", "ranking_tile", "softplus"]

_MAX_COMPARED = 32
"""Blocks, at most, that all blocks of a layer are compared with at a time."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact also where exp(x) is lost beside 1."""
    small = tl.exp(-tl.abs(x))
    one_more = 1 + small
    near_one = one_more == 1
    log1p = tl.log(one_more) * (small / tl.where(near_one, 1, one_more - 1))
    return tl.maximum(x, 0) + tl.where(near_one, small, log1p)


@cached_launch
@triton.jit
def list_open_blocks_kernel(
    scores, layers, order, gates, counts, STEP, BLOCKS, LAYERS,
    TOPK: tl.constexpr, HARD: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """The blocks of one layer of one image: open ones first."""
    b = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    start = tl.load(layers + layer * 3)
    number = tl.load(layers + layer * 3 + 1)
    e = tl.arange(0, BE)
    real = e < number
    at = scores + b * STEP + start
    score = tl.load(at + e, mask=real, other=0)
    if TOPK:
        keep = tl.load(layers + layer * 3 + 2)
        # NaN counts as the highest score, so that it stays visible
        key = tl.where(score != score, float("inf"), score)
        rank = tl.zeros((BE,), tl.int32)
        for j0 in range(0, BE, BJ):
            j = j0 + tl.arange(0, BJ)
            other = tl.load(at + j, mask=j < number, other=0)
            other = tl.where(other != other, float("inf"), other)[None, :]
            before = (other > key[:, None]) | ((other == key[:, None]) & (j[None, :] < e[:, None]))
            rank += tl.sum((before & (j < number)[None, :]).to(tl.int32), 1)
        is_open = real & (rank < keep)
        gate = softplus(score)
    else:
        is_open = real & ((score > 0) | (score != score))
        gate = score
        if HARD:
            gate = tl.where(score == score, 1.0, score)  # NaN stays visible
    opened = is_open.to(tl.int32)
    closed = (real & (is_open == 0)).to(tl.int32)
    count = tl.sum(opened, 0)
    place = tl.where(is_open, tl.cumsum(opened, 0) - 1, count + tl.cumsum(closed, 0) - 1)
    to = b * BLOCKS + start + place
    tl.store(order + to, e, mask=real)
    tl.store(gates + to, tl.where(is_open, gate, 0), mask=real)
    tl.store(counts + b * LAYERS + layer, count)


def ranking_tile(most: int) -> dict[str, int]:
    """Sides of a tile of blocks and those they are compared with, for layers of up to so many blocks; and warps."""
    side = power_of_2(most)
    return {"BE": side, "BJ": min(side, _MAX_COMPARED), **num_warps(1 if side <= _MAX_COMPARED else 4)}


def list_open_blocks(scores: Tensor, layers: Tensor, blocks: int, most: int, mode: str) -> OpenBlockLists:
    """The open blocks of each image.

    Args:
        scores: (B, ≥ blocks), in float32 at least.
        layers: (layers, 3) int32: the first block, the number of blocks and ``keep`` of each.
        blocks: of all layers.
        most: of one layer.
        mode: of the gates: ``"relu"``, ``"topk"`` or ``"hard"``.
    """
    B = scores.shape[0]
    order = torch.empty(B, blocks, dtype=torch.int32, device=scores.device)
    gates = torch.empty(B, blocks, dtype=scores.dtype, device=scores.device)
    counts = torch.empty(B, len(layers), dtype=torch.int32, device=scores.device)
    if not B:
        return OpenBlockLists(order, gates, counts)
    list_open_blocks_kernel[(B, len(layers))](
        scores, layers, order, gates, counts, scores.stride(0), blocks, len(layers),
        TOPK=mode == "topk", HARD=mode == "hard", **ranking_tile(most),
    )  # fmt: skip
    return OpenBlockLists(order, gates, counts)
