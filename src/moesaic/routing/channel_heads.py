"""The gates of all layers of a network from one product.

A head for each layer costs a dozen operations, which for one image is more than what they compute. In evaluation the
heads are one matrix. Under ``mode="relu"`` the product is taken as it comes: where rounding falls on the other side of
a score of 0, the gate is as good as 0 either way. Under ``"topk"`` a rounded score could change which block is open,
so rows and columns come in sixteens, as they do in a head by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops import autocast_off
from moesaic.ops.kept import Kept
from moesaic.ops.listeners import Listeners
from moesaic.record import Routing
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.router import best

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
        self._joined = Kept[tuple[Tensor, Tensor]]()
        self._listeners = Listeners(heads.values())

    def __call__(self, embedding: Tensor) -> Mapping[str, Routing]:
        heads = list(self.heads.values())
        if not self._may_join(embedding, heads):
            return {name: head(embedding) for name, head in self.heads.items()}
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        tensors = [tensor for head in heads for tensor in vars(head)["_parameters"].values() if tensor is not None]
        weight, bias = self._joined.of(tensors, lambda: _joined(heads, dtype))
        with autocast_off(embedding):
            rows = embedding.to(dtype)
            if heads[0].mode == "topk":
                rows = _whole(rows)
            scores = torch.addmm(bias, rows, weight)
        return JointGates(self.heads, scores[: len(embedding), : sum(head.blocks for head in heads)])

    def _may_join(self, embedding: Tensor, heads: list[ChannelGate]) -> bool:
        if embedding.is_meta or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return False
        if self._listeners:
            return False
        mode, width = heads[0].mode, embedding.shape[-1]
        if embedding.ndim != 2 or any(head.training or head.mode != mode or head.embedding != width for head in heads):
            return False
        if not torch.is_grad_enabled():
            return True
        return not (embedding.requires_grad or any(head.weight.requires_grad for head in heads))


def _joined(heads: list[ChannelGate], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(D, all gates) and (all gates,), with gates that nobody has up to a multiple of sixteen."""
    biases = [head.weight.new_zeros(head.blocks) if head.bias is None else head.bias for head in heads]
    weight, bias = torch.cat([head.weight for head in heads]).to(dtype), torch.cat(biases).to(dtype)
    return _whole(weight).T.contiguous(), F.pad(bias, (0, -len(bias) % 16))


def _whole(rows: Tensor) -> Tensor:
    """Rows up to a multiple of sixteen, for equal results of equal rows (`moesaic.routing.router.steady_product`)."""
    return F.pad(rows, (0, 0, 0, -len(rows) % 16))


class JointGates(Mapping[str, Routing]):
    """The gates of several layers as one, each layer's record being made when somebody asks for it."""

    def __init__(self, heads: Mapping[str, ChannelGate], scores: Tensor) -> None:
        self.scores = scores
        """(B, blocks of all layers)"""
        self._heads = heads
        self._made: dict[str, Routing] = {}

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

    def gates(self) -> Tensor:
        """(B, blocks of all layers): the gate of each block, 0 where it is closed."""
        if next(iter(self._heads.values())).mode == "relu":
            return F.relu(self.scores)
        parts: list[Tensor] = []
        column = 0
        for (blocks, keep), alike in groupby(self._heads.values(), lambda head: (head.blocks, head.keep)):
            number = len(list(alike))
            assert keep is not None
            some = self.scores[:, column : column + number * blocks].view(-1, number, blocks)
            index = best(some, keep)
            parts.append(torch.zeros_like(some).scatter_(2, index, F.softplus(some.gather(2, index))).flatten(1))
            column += number * blocks
        return torch.cat(parts, 1)
