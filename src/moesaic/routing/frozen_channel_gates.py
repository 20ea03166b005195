"""The gates of all layers of a frozen network from one GEMM.

A head per layer costs a dozen operations, which for one image is more than their arithmetic, so the heads are joined
into one matrix. Under ``mode="relu"`` scores may differ from a single head's by rounding: where that changes the sign
of a score, the gate is as good as 0 either way. Under ``"topk"`` and ``"hard"`` rounding could change which blocks are
open, so rows and columns come in multiples of sixteen, as in a single head.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.gpu_conv_operands import LayerBlocks, OpenBlockLists
from moesaic.routing.channel_gate import ChannelGate, hard_gates
from moesaic.routing_record import Routing

__all__ = ["FrozenHeads", "OpenBlockList"]

_GEMM_MULTIPLE = 16
"""Rows and columns of a GEMM whose results do not depend on their number (`moesaic.routing.router`)."""


class OpenBlockList(NamedTuple):
    """The open blocks of one image, the blocks of all layers numbered consecutively."""

    blocks: NDArray[np.intp]
    gates: NDArray[np.floating[Any]]
    """One per open block."""
    offsets: list[int]
    """Where each layer's blocks begin in ``blocks``, and the total number."""


class FrozenHeads:
    """The heads of several layers as one matrix: from an embedding (B, D) to the gates of all blocks.

    The weights are copied. All heads must have the same mode and embedding size.

    >>> heads = FrozenHeads([ChannelGate(8, 16), ChannelGate(8, 4)])
    >>> heads.gates(heads.scores(torch.randn(3, 8))).shape
    torch.Size([3, 20])
    """

    @torch.no_grad()
    def __init__(self, heads: Sequence[ChannelGate]) -> None:
        if len({(head.mode, head.embedding) for head in heads}) != 1:
            raise ValueError("FrozenHeads: the gates of all layers must have the same mode and embedding size")
        self._heads = [deepcopy(head).eval() for head in heads]
        self._mode = heads[0].mode
        biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
        dtype = torch.promote_types(heads[0].weight.dtype, torch.float32)
        weight, bias = torch.cat([head.weight for head in heads]).to(dtype), torch.cat(biases).to(dtype)
        self.blocks = len(bias)
        """Of all layers."""
        starts = np.cumsum([0, *(head.blocks for head in heads)]).tolist()
        layers = [(start, head.blocks, head.keep or head.blocks) for start, head in zip(starts, heads, strict=False)]
        self._layers = torch.tensor(layers, dtype=torch.int32, device=weight.device)
        # at least one column of padding, with a score that is never among the best
        padding = _GEMM_MULTIPLE - self.blocks % _GEMM_MULTIPLE
        self._weight = F.pad(weight, (0, 0, 0, padding)).T.contiguous()
        self._bias = F.pad(bias, (0, padding), value=-torch.inf)
        self._table = _table(tuple((head.blocks, head.keep or 0) for head in heads))

    def scores(self, embedding: Tensor) -> Tensor:
        """The scores of all layers, (B, blocks and padding)."""
        embedding = embedding.to(self._weight.dtype)
        if self._mode == "relu":
            return torch.addmm(self._bias, embedding, self._weight)
        return torch.addmm(self._bias, _whole_rows(embedding), self._weight)[: len(embedding)]

    def routings(self, scores: Tensor) -> list[Routing]:
        """The routing of each layer."""
        parts = cast("tuple[Tensor, ...]", scores[:, : self.blocks].split([head.blocks for head in self._heads], 1))
        return [head.choose(part) for head, part in zip(self._heads, parts, strict=True)]

    def gates(self, scores: Tensor) -> Tensor:
        """(B, blocks): the gates of all layers, 0 where closed."""
        if self._mode != "topk":
            own = scores[:, : self.blocks]
            return own.relu() if self._mode == "relu" else hard_gates(own)
        return torch.cat([routing.weights[:, 0] for routing in self.routings(scores)], 1)

    def layer_blocks(self) -> list[LayerBlocks]:
        """Where the blocks of each layer are among those of all."""
        layers = cast("list[list[int]]", self._layers.tolist())
        return [LayerBlocks(number, *layer) for number, layer in enumerate(layers)]

    def open_lists(self, scores: Tensor) -> OpenBlockLists:
        """The open blocks of a batch, listed by a kernel: on a GPU."""
        from moesaic.ops.triton.open_channel_blocks import list_open_blocks

        most = max(head.blocks for head in self._heads)
        return list_open_blocks(scores, self._layers, self.blocks, most, self._mode)

    def open_blocks(self, scores_1E: Tensor) -> OpenBlockList:
        """The open blocks of one image, computed in numpy, where a dozen small operations take the time of one."""
        scores: NDArray[np.floating[Any]] = scores_1E.numpy()[0]
        table = self._table
        real = scores[: table.total]
        if self._mode != "topk":  # a gate that is NaN is not closed
            blocks = np.flatnonzero(~(real <= 0))
            gates = real[blocks]
            if self._mode == "hard":
                gates = np.where(np.isnan(gates), gates, np.ones_like(gates))
            return OpenBlockList(blocks, gates, np.searchsorted(blocks, table.starts).tolist())
        rows = scores[table.place]
        least = np.sort(rows, 1)[table.layer, table.best]
        blocks = np.flatnonzero(real >= least[table.layer_of])
        if blocks.size != table.total_open:  # ties, or scores that are NaN
            rank = np.argsort(np.argsort(-rows, 1, kind="stable"), 1)
            blocks = np.flatnonzero((rank < table.keep).ravel()[table.filled])
        return OpenBlockList(blocks, np.logaddexp(0, real[blocks]), table.offsets)  # softplus


def _whole_rows(rows: Tensor) -> Tensor:
    """Rows padded to a multiple of sixteen."""
    if len(rows) == 1:  # the values of the others do not matter
        return rows.expand(_GEMM_MULTIPLE, -1).contiguous()
    return F.pad(rows, (0, 0, 0, -len(rows) % _GEMM_MULTIPLE))


class _Table(NamedTuple):
    """Index tables for top-k over layers with different numbers of blocks."""

    place: NDArray[np.intp]
    """(layers, most blocks): the column of each layer's scores; that of the padding beyond its last block."""
    keep: NDArray[np.intp]
    """(layers, 1): open blocks of each layer."""
    total_open: int
    """Open blocks of all layers."""
    best: NDArray[np.intp]
    """The rank, in ascending order, of each layer's lowest open score."""
    layer: NDArray[np.intp]
    """Layer numbers."""
    layer_of: NDArray[np.intp]
    """The layer of each score."""
    filled: NDArray[np.intp]
    """Places of ``place`` that have a score, flattened."""
    total: int
    """Scores of all layers."""
    starts: NDArray[np.intp]
    """The first score of each layer, and the total."""
    offsets: list[int]
    """The first open block of each layer, and the total."""


@lru_cache(maxsize=64)
def _table(heads: tuple[tuple[int, int], ...]) -> _Table:
    """The tables for layers of (blocks, open blocks)."""
    blocks = np.array([[number] for number, _ in heads])
    keep = np.array([[number] for _, number in heads])
    numbers = np.arange(max(number for number, _ in heads))
    layer, total = np.arange(len(heads)), int(blocks.sum())
    return _Table(
        place=np.where(numbers < blocks, np.cumsum(blocks)[:, None] - blocks + numbers, total),
        keep=keep,
        total_open=int(keep.sum()),
        best=len(numbers) - keep[:, 0],
        layer=layer,
        layer_of=np.repeat(layer, blocks[:, 0]),
        filled=np.flatnonzero(numbers < blocks),
        total=total,
        starts=np.cumsum([0, *blocks[:, 0]]),
        offsets=np.cumsum([0, *keep[:, 0]]).tolist(),
    )
