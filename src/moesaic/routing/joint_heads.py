"""The gates of all layers of a network in training, from a handful of operations.

Each head alone takes two dozen small operations forward and backward, and a network of thirteen gated layers then takes
nearly four times as many as the plain one: on a GPU the host's time to issue them is what a step takes. Here all scores
come from one matmul, and neighbouring layers with the same number of blocks are selected and expanded to channels at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from moesaic.ops import autocast_off
from moesaic.ops.channel.joint_routing import JointRouting
from moesaic.ops.hooks import has_hooks
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.router import batch_invariant_matmul
from moesaic.routing_record import Routing

__all__ = ["route_channels"]


def route_channels(heads: Sequence[ChannelGate], embedding: Tensor, map_dtype: torch.dtype) -> list[Routing]:
    """The routing of each head for a batch of embeddings (B, D), as the heads one by one return it.

    Args:
        heads: of gated layers in execution order.
        embedding: (B, D).
        map_dtype: the dtype in which gates are multiplied with maps.

    >>> heads = [ChannelGate(8, 16, block=4), ChannelGate(8, 16, block=4), ChannelGate(8, 6, block=4)]
    >>> embedding = torch.randn(3, 8)
    >>> joint = route_channels(heads, embedding, torch.float32)
    >>> all(torch.allclose(one.weights, head(embedding).weights) for one, head in zip(joint, heads))
    True
    """
    if not _alike(heads) or torch.onnx.is_in_onnx_export():
        return [head(embedding) for head in heads]
    with autocast_off(embedding):
        scores = _scores(heads, embedding)
        noisy = _with_noise(heads, scores)
        found: list[Routing] = []
        first = 0
        for equal in _neighbours_of_equal_size(heads):
            columns = slice(first, first + len(equal) * equal[0].blocks)
            found += _route_equal(equal, scores[:, columns], noisy[:, columns], map_dtype)
            first = columns.stop
        return found


def _alike(heads: Sequence[ChannelGate]) -> bool:
    """Whether heads differ in their sizes alone, and nothing watches a call of one of them."""
    kinds = {
        (type(head), head.mode, head.straight_through, head.temperature, head.training, head.bias is None)
        for head in heads
    }
    return len(kinds) == 1 and type(heads[0]) is ChannelGate and not any(has_hooks(head) for head in heads)


def _neighbours_of_equal_size(heads: Sequence[ChannelGate]) -> list[list[ChannelGate]]:
    groups: list[list[ChannelGate]] = []  # not itertools.groupby, which torch.compile cannot trace
    for head in heads:
        last = groups[-1][-1] if groups else None
        if last is not None and (last.channels, last.block, last.keep) == (head.channels, head.block, head.keep):
            groups[-1].append(head)
        else:
            groups.append([head])
    return groups


def _scores(heads: Sequence[ChannelGate], embedding: Tensor) -> Tensor:
    """(B, blocks of all layers), in float32 at least."""
    dtype = torch.promote_types(embedding.dtype, torch.float32)
    weight = torch.cat([head.weight for head in heads]).to(dtype)
    scores = batch_invariant_matmul(embedding.to(dtype), weight.T)
    biases: list[Tensor] = [head.bias for head in heads if head.bias is not None]
    return scores + torch.cat(biases).to(dtype) if biases else scores


def _with_noise(heads: Sequence[ChannelGate], scores: Tensor) -> Tensor:
    """The scores that select; each head draws its own noise."""
    if not any(head.training and (isinstance(head.noise, Tensor) or head.noise) for head in heads):
        return scores
    parts = cast("tuple[Tensor, ...]", scores.split([head.blocks for head in heads], 1))
    return torch.cat([head.with_noise(part) for head, part in zip(heads, parts, strict=True)], 1)


def _route_equal(heads: Sequence[ChannelGate], scores: Tensor, noisy: Tensor, map_dtype: torch.dtype) -> list[Routing]:
    """The routing of neighbouring layers of equal size, from their scores (B, layers · E)."""
    head, n = heads[0], len(heads)
    B = scores.shape[0]
    scores, noisy = scores.view(B, n, head.blocks), noisy.view(B, n, head.blocks)
    index, gate = head.select(noisy)
    block_gates = gate
    if head.mode == "topk":
        block_gates = torch.zeros_like(noisy).scatter(2, index, gate)
    estimate = head.gradient_estimate(noisy, index)
    if estimate is not None:
        block_gates = block_gates + estimate
    wide = block_gates if head.block == 1 else block_gates.repeat_interleave(head.block, 2)[:, :, : head.channels]
    parts = [_layers(each) for each in (scores, index, gate, block_gates, wide.to(map_dtype))]
    return [
        JointRouting(
            "channel",
            score[:, None],
            chosen[:, None],
            values[:, None],
            "unit",
            may_drop=head.mode != "topk",
            block_gates=dense[:, None],
            channel_gates=channels,
        )
        for score, chosen, values, dense, channels in zip(*parts, strict=True)
    ]


def _layers(values: Tensor) -> tuple[Tensor, ...]:
    """(B, …) of each layer, from (B, layers, …)."""
    return values.unbind(1)
