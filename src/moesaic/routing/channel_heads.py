"""The gates of all layers of a network from one product.

A head for each layer costs a dozen operations, which for one image is more than what they compute. In evaluation the
heads are one matrix. Under ``mode="relu"`` the product is taken as it comes: where rounding falls on the other side of
a score of 0, the gate is as good as 0 either way. Under ``"topk"`` a rounded score could change which block is open,
so rows and columns come in sixteens, as they do in a head by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops import autocast_dtype
from moesaic.ops.kept import Held, Kept
from moesaic.ops.listeners import Listeners
from moesaic.record import Routing
from moesaic.routing.channel_gate import ChannelGate

__all__ = ["ChannelHeads", "JointGates"]


class ChannelHeads:
    """Heads of several layers, by name: called with an embedding (B, D), it gives the gates of each.

    In training, where gradients are wanted and where heads have hooks, each works by itself. In evaluation a copy of
    their weights, as one matrix, is kept until they change, see `moesaic.ops.kept.Kept`.

    >>> heads = ChannelHeads({"a": ChannelGate(8, 16).eval(), "b": ChannelGate(8, 4).eval()})
    >>> with torch.no_grad():
    ...     {name: tuple(routing.gate.shape) for name, routing in heads(torch.randn(3, 8)).items()}
    {'a': (3, 1, 16), 'b': (3, 1, 4)}
    """

    def __init__(self, heads: Mapping[str, ChannelGate]) -> None:
        self.heads = dict(heads)
        first = next(iter(self.heads.values()))
        self._alike = all((head.mode, head.embedding) == (first.mode, first.embedding) for head in self.heads.values())
        self._joined = Kept[tuple[Tensor, Tensor]]()
        self._held = Held(self.heads.values())
        self._listeners = Listeners(self.heads.values())

    def __call__(self, embedding: Tensor) -> Mapping[str, Routing]:
        heads = list(self.heads.values())
        if not self._may_join(embedding, heads):
            return {name: head(embedding) for name, head in self.heads.items()}
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        weight, bias = self._joined.of(self._held.now(), lambda: _joined(heads, dtype))
        rows = embedding.to(dtype)
        scores = torch.addmm(bias, _whole(rows) if heads[0].mode == "topk" else rows, weight)
        return JointGates(self.heads, scores[: len(embedding)])

    def _may_join(self, embedding: Tensor, heads: list[ChannelGate]) -> bool:
        if not self._alike or self._listeners or any(head.training for head in heads):
            return False
        if embedding.is_meta or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return False
        if embedding.ndim != 2 or embedding.shape[1] != heads[0].embedding or autocast_dtype(embedding) is not None:
            return False
        if not torch.is_grad_enabled():
            return True
        return not (embedding.requires_grad or any(head.weight.requires_grad for head in heads))


def _joined(heads: list[ChannelGate], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(D, all gates) and (all gates,), with gates behind them that nobody has and nobody would open.

    There is one at least, and as many as make a multiple of sixteen.
    """
    biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
    weight, bias = torch.cat([head.weight for head in heads]).to(dtype), torch.cat(biases).to(dtype)
    more = 16 - len(bias) % 16
    return F.pad(weight, (0, 0, 0, more)).T.contiguous(), F.pad(bias, (0, more), value=-torch.inf)


def _whole(rows: Tensor) -> Tensor:
    """Rows up to a multiple of sixteen, for equal results of equal rows (`moesaic.routing.router.steady_product`)."""
    return F.pad(rows, (0, 0, 0, -len(rows) % 16))


class JointGates(Mapping[str, Routing]):
    """The gates of several layers as one, each layer's record being made when somebody asks for it."""

    def __init__(self, heads: Mapping[str, ChannelGate], scores: Tensor) -> None:
        self._scores = scores  # with one behind the last at least that is never among the best
        self._heads = heads
        self._made: dict[str, Routing] = {}

    @property
    def scores(self) -> Tensor:
        """Those of the blocks of all layers, (B, blocks)."""
        return self._scores[:, : sum(head.blocks for head in self._heads.values())]

    def __getitem__(self, name: str) -> Routing:
        if not self._made:
            sizes = [head.blocks for head in self._heads.values()]
            parts = cast("tuple[Tensor, ...]", self.scores.split(sizes, 1))
            self._made = {
                each: head.choose(part) for (each, head), part in zip(self._heads.items(), parts, strict=True)
            }
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)

    def on_host(self) -> NDArray[np.floating[Any]]:
        """(B, blocks of all layers): the gate of each block, 0 where it is closed.

        On the host, where a dozen small operations take the time of one on tensors.
        """
        heads = list(self._heads.values())
        scores: NDArray[np.floating[Any]] = self._scores.cpu().numpy()
        table = _table(tuple((head.blocks, head.keep or 0) for head in heads))
        if heads[0].mode == "relu":
            return np.maximum(scores[:, : table.total], 0)
        rows = scores[:, table.place]
        least = np.sort(rows, 2)[:, table.layer, table.best]
        scores = scores[:, : table.total]
        is_open = scores >= least[:, table.layer_of]
        if np.count_nonzero(is_open) != len(scores) * table.kept:  # scores are equal, or not numbers
            rank = np.argsort(np.argsort(-rows, 2, kind="stable"), 2)
            is_open = (rank < table.keep).reshape(len(scores), -1)[:, table.filled]
        return np.logaddexp(0, scores) * is_open  # softplus


class _Table(NamedTuple):
    """Where the scores of layers stand that have unequally many."""

    place: NDArray[np.intp]
    """(layers, most blocks): of each score among those of all layers, and of those that are none behind the last."""
    keep: NDArray[np.intp]
    """(layers, 1): how many of a layer are kept."""
    kept: int
    """And of all."""
    best: NDArray[np.intp]
    """Of each layer, where in rising order the least of those is that are kept."""
    layer: NDArray[np.intp]
    """The numbers of the layers."""
    layer_of: NDArray[np.intp]
    """Of each score."""
    filled: NDArray[np.intp]
    """Which of the table's places have a score, the table being read row by row."""
    total: int
    """Of all scores."""


@lru_cache(maxsize=64)
def _table(heads: tuple[tuple[int, int], ...]) -> _Table:
    """Of layers with so many blocks, of which so many are kept."""
    blocks = np.array([[number] for number, _ in heads])
    keep = np.array([[number] for _, number in heads])
    numbers = np.arange(max(number for number, _ in heads))
    layer, total = np.arange(len(heads)), int(blocks.sum())
    return _Table(
        place=np.where(numbers < blocks, np.cumsum(blocks)[:, None] - blocks + numbers, total),
        keep=keep,
        kept=int(keep.sum()),
        best=len(numbers) - keep[:, 0],
        layer=layer,
        layer_of=np.repeat(layer, blocks[:, 0]),
        filled=np.flatnonzero(numbers < blocks),
        total=total,
    )
