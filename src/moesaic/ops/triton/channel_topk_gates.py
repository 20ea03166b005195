"""Top-k gates of the channels of all layers in training, from the scores of all heads.

    open where fewer than keep blocks of the layer have a higher score, or an equal one and a lower number
    dense = softplus(score) where open, 0 elsewhere;   grad_score = grad_dense · sigmoid(score) where open

Layouts: scores (B, ≥ blocks), the blocks of all layers one layer after the other; layers (layers, 4), of each the first
block, the number of blocks, ``keep``, and its first place among the open ones; index and gate (B, Σ keep), highest
score first; dense (B, blocks). A program ranks the blocks of one layer of one image.

    topk_gates_kernel           scores → index, gate, dense
    topk_gates_backward_kernel  gradients of gate and dense → gradient of scores
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import power_of_2
from moesaic.ops.triton.open_channel_blocks import ranking_tile, softplus

__all__ = ["topk_gates", "topk_gates_backward"]

_SOFTPLUS_THRESHOLD = tl.constexpr(20.0)
"""Above this score `torch.nn.functional.softplus` is the score itself."""


@triton.jit
def ranks(at, key, e, number, BE: tl.constexpr, BJ: tl.constexpr):
    """How many blocks come before each; NaN is the highest score, as in torch.topk."""
    rank = tl.zeros((BE,), tl.int32)
    for j0 in range(0, BE, BJ):
        j = j0 + tl.arange(0, BJ)
        other = tl.load(at + j, mask=j < number, other=0)
        other_nan = (other != other)[None, :]
        nan = (key != key)[:, None]
        higher = (other_nan & ~nan) | (other[None, :] > key[:, None])
        equal = (other_nan & nan) | (other[None, :] == key[:, None])
        before = higher | (equal & (j[None, :] < e[:, None]))
        rank += tl.sum((before & (j < number)[None, :]).to(tl.int32), 1)
    return rank


@cached_launch
@triton.jit
def topk_gates_kernel(
    scores, layers, index, gate, dense, STEP, BLOCKS, OPEN, BE: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """The blocks of one layer of one image."""
    b = tl.program_id(0).to(tl.int64)
    layer = layers + tl.program_id(1) * 4
    start = tl.load(layer)
    number = tl.load(layer + 1)
    keep = tl.load(layer + 2)
    place = tl.load(layer + 3)
    e = tl.arange(0, BE)
    real = e < number
    at = scores + b * STEP + start
    score = tl.load(at + e, mask=real, other=0)
    rank = ranks(at, score, e, number, BE, BJ)
    opened = real & (rank < keep)
    value = tl.where(score > _SOFTPLUS_THRESHOLD, score, softplus(score))
    to = b * OPEN + place + rank
    tl.store(index + to, e.to(tl.int64), mask=opened)
    tl.store(gate + to, value, mask=opened)
    tl.store(dense + b * BLOCKS + start + e, tl.where(opened, value, 0.0), mask=real)


@cached_launch
@triton.jit
def topk_gates_backward_kernel(
    grad_gate, grad_dense, scores, layers, out, STEP, BLOCKS, OPEN, LAYERS,
    HAS_GATE: tl.constexpr, HAS_DENSE: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """The blocks of one layer of one image; the last layer's program also writes zeros to the columns of padding."""
    b = tl.program_id(0).to(tl.int64)
    layer = layers + tl.program_id(1) * 4
    start = tl.load(layer)
    number = tl.load(layer + 1)
    keep = tl.load(layer + 2)
    place = tl.load(layer + 3)
    e = tl.arange(0, BE)
    real = e < number
    at = scores + b * STEP + start
    score = tl.load(at + e, mask=real, other=0)
    rank = ranks(at, score, e, number, BE, BJ)
    opened = real & (rank < keep)
    total = tl.zeros_like(score)
    if HAS_GATE:
        total += tl.load(grad_gate + b * OPEN + place + rank, mask=opened, other=0)
    if HAS_DENSE:
        total += tl.load(grad_dense + b * BLOCKS + start + e, mask=opened, other=0)
    slope = tl.where(score > _SOFTPLUS_THRESHOLD, 1.0, 1.0 / (1.0 + tl.exp(-score)))
    tl.store(out + b * STEP + start + e, tl.where(opened, total * slope, 0.0), mask=real)
    if tl.program_id(1) == LAYERS - 1:
        x = BLOCKS + tl.arange(0, BX)
        tl.store(out + b * STEP + x, tl.zeros((BX,), out.dtype.element_ty), mask=x < STEP)


def topk_gates(scores: Tensor, layers: Tensor, blocks: int, most: int, opened: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index and gate (B, opened) of the open blocks, and the gates (B, blocks) of all.

    Args:
        scores: (B, ≥ blocks), contiguous.
        layers: (layers, 4) int32: the first block, the number of blocks, ``keep`` and the first open place of each.
        blocks: of all layers.
        most: of one layer.
        opened: open blocks of all layers.
    """
    B = scores.shape[0]
    index = torch.empty(B, opened, dtype=torch.int64, device=scores.device)
    gate = torch.empty(B, opened, dtype=scores.dtype, device=scores.device)
    dense = torch.empty(B, blocks, dtype=scores.dtype, device=scores.device)
    topk_gates_kernel[(B, len(layers))](
        scores, layers, index, gate, dense, scores.shape[1], blocks, opened, **ranking_tile(most),
    )  # fmt: skip
    return index, gate, dense


def topk_gates_backward(
    grad_gate: Tensor | None, grad_dense: Tensor | None, scores: Tensor, layers: Tensor, blocks: int, most: int,
    opened: int,
) -> Tensor:  # fmt: skip
    """The gradient of scores, from those of gate and dense."""
    out = torch.empty_like(scores)
    topk_gates_backward_kernel[(scores.shape[0], len(layers))](
        grad_gate, grad_dense, scores, layers, out, scores.shape[1], blocks, opened, len(layers),
        HAS_GATE=grad_gate is not None, HAS_DENSE=grad_dense is not None, BX=power_of_2(scores.shape[1] - blocks),
        **ranking_tile(most),
    )  # fmt: skip
    return out
