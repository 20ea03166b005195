"""The gates of all layers of a network from one product.

A head for each layer costs a dozen operations, which for one image is more than what they compute. In evaluation the
heads are one matrix. Under ``mode="relu"`` the product is taken as it comes: where rounding falls on the other side of
a score of 0, the gate is as good as 0 either way. Under ``"topk"`` a rounded score could change which block is open,
so rows and columns come in sixteens, as they do in a head by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops import autocast_dtype
from moesaic.ops.hooks import Listeners
from moesaic.ops.weight_cache import CachedValue, TensorRefs
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing_record import Routing

__all__ = ["ChannelHeads", "JoinedHeads", "JointGates", "OpenOnHost", "open_on_host"]


class ChannelHeads:
    """Heads of several layers, by name: called with an embedding (B, D), it gives the gates of each.

    In training, where gradients are wanted and where heads have hooks, each works by itself. In evaluation a copy of
    their weights, as one matrix, is kept until they change, see `moesaic.ops.weight_cache.CachedValue`.

    >>> heads = ChannelHeads({"a": ChannelGate(8, 16).eval(), "b": ChannelGate(8, 4).eval()})
    >>> with torch.no_grad():
    ...     {name: tuple(routing.gate.shape) for name, routing in heads(torch.randn(3, 8)).items()}
    {'a': (3, 1, 16), 'b': (3, 1, 4)}
    """

    def __init__(self, heads: Mapping[str, ChannelGate]) -> None:
        self.heads = dict(heads)
        first = next(iter(self.heads.values()))
        self.alike = all((head.mode, head.embedding) == (first.mode, first.embedding) for head in self.heads.values())
        """Whether they can be one."""
        self._joined = CachedValue[JoinedHeads]()
        self._held = TensorRefs(self.heads.values())
        self._listeners = Listeners(self.heads.values())

    def __call__(self, embedding: Tensor) -> Mapping[str, Routing]:
        heads = list(self.heads.values())
        if not self._may_join(embedding, heads):
            return {name: head(embedding) for name, head in self.heads.items()}
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        return JointGates(self.heads, self.joined(dtype).scores(embedding.to(dtype)))

    def joined(self, dtype: torch.dtype) -> JoinedHeads:
        """All heads as one, in that dtype, for evaluation; they must have the same mode and take the same embedding."""
        heads = list(self.heads.values())
        return self._joined.of(self._held.now(), lambda: _joined(heads, dtype))

    def _may_join(self, embedding: Tensor, heads: list[ChannelGate]) -> bool:
        if not self.alike or self._listeners or any(head.training for head in heads):
            return False
        if embedding.is_meta or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return False
        if embedding.ndim != 2 or embedding.shape[1] != heads[0].embedding or autocast_dtype(embedding) is not None:
            return False
        if not torch.is_grad_enabled():
            return True
        return not (embedding.requires_grad or any(head.weight.requires_grad for head in heads))


class JoinedHeads(NamedTuple):
    """Heads of several layers as one product.

    Behind the last gate there are gates that nobody has and nobody would open: one at least, and as many as make a
    multiple of sixteen.
    """

    weight: Tensor
    """(D, gates)"""
    bias: Tensor
    whole: bool
    """Whether rows come in sixteens."""

    def scores(self, embedding: Tensor) -> Tensor:
        """Those of all gates, (B, gates)."""
        if not self.whole:
            return torch.addmm(self.bias, embedding, self.weight)
        return torch.addmm(self.bias, _whole(embedding), self.weight)[: len(embedding)]


def _joined(heads: list[ChannelGate], dtype: torch.dtype) -> JoinedHeads:
    biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
    weight, bias = torch.cat([head.weight for head in heads]).to(dtype), torch.cat(biases).to(dtype)
    more = 16 - len(bias) % 16
    weight, bias = F.pad(weight, (0, 0, 0, more)).T.contiguous(), F.pad(bias, (0, more), value=-torch.inf)
    return JoinedHeads(weight, bias, whole=heads[0].mode == "topk")


def _whole(rows: Tensor) -> Tensor:
    """Rows up to a multiple of sixteen, for equal results of equal rows (see `batch_invariant_matmul`)."""
    if len(rows) == 1:  # what the others are does not matter
        return rows.expand(16, -1).contiguous()
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

    def opened(self) -> OpenOnHost:
        """Of one image, the open blocks of all layers."""
        if len(self._scores) != 1:
            raise ValueError(f"JointGates: there are gates for {len(self._scores)} images; `opened` is for one")
        return open_on_host(self._scores, list(self._heads.values()))


def open_on_host(scores_1E: Tensor, heads: Sequence[ChannelGate]) -> OpenOnHost:
    """The blocks that one image opens by the scores of `JoinedHeads`.

    On the host, where a dozen small operations take the time of one on tensors.
    """
    scores: NDArray[np.floating[Any]] = scores_1E.cpu().numpy()[0]
    table = _table(tuple([(head.blocks, head.keep or 0) for head in heads]))
    real = scores[: table.total]
    if not table.kept:  # mode="relu", in which a gate that is not a number is not closed
        blocks = np.flatnonzero(~(real <= 0))
        return OpenOnHost(blocks, real[blocks], np.searchsorted(blocks, table.starts).tolist())
    rows = scores[table.place]
    least = np.sort(rows, 1)[table.layer, table.best]
    blocks = np.flatnonzero(real >= least[table.layer_of])
    if blocks.size != table.kept:  # scores are equal, or not numbers
        rank = np.argsort(np.argsort(-rows, 1, kind="stable"), 1)
        blocks = np.flatnonzero((rank < table.keep).ravel()[table.filled])
    return OpenOnHost(blocks, np.logaddexp(0, real[blocks]), table.cuts)  # softplus


class OpenOnHost(NamedTuple):
    """The open blocks of one image, those of all layers numbered through."""

    blocks: NDArray[np.intp]
    gates: NDArray[np.floating[Any]]
    """Of each."""
    cuts: list[int]
    """Of each layer where its blocks begin in the two, and where the last end."""


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
    starts: NDArray[np.intp]
    """Of each layer the first of its scores, and behind the last the number of all."""
    cuts: list[int]
    """The same of the scores that are kept."""


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
        starts=np.cumsum([0, *blocks[:, 0]]),
        cuts=np.cumsum([0, *keep[:, 0]]).tolist(),
    )
