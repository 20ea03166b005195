"""The gates of all layers of a network in training, from a handful of operations.

Each head alone takes two dozen small operations forward and backward, and a network of thirteen gated layers then takes
nearly four times as many as the plain one: on a GPU the host's time to issue them is what a step takes. Here all scores
come from one matmul, and neighbouring layers with the same number of blocks are selected and expanded to channels at
once. Where Triton kernels run, one of them makes the top-k gates of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from moesaic.ops import autocast_off, kernels_available
from moesaic.ops.channel.joint_routing import JointRouting
from moesaic.ops.eager_conditions import is_plain_eager
from moesaic.ops.hook_detection import has_global_hooks, has_hooks
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
    if not _differ_in_sizes_alone(heads) or torch.onnx.is_in_onnx_export():
        return [head(embedding) for head in heads]
    with autocast_off(embedding):
        if _fits_kernels(heads, embedding):
            return _route_by_kernels(heads, embedding)
        scores = _scores(heads, embedding)
        noisy = _with_noise(heads, scores)
        found: list[Routing] = []
        first = 0
        for equal in _neighbours_of_equal_size(heads):
            columns = slice(first, first + len(equal) * equal[0].blocks)
            found += _route_equal(equal, scores[:, columns], noisy[:, columns], map_dtype)
            first = columns.stop
        return found


def _differ_in_sizes_alone(heads: Sequence[ChannelGate]) -> bool:
    """Whether heads differ in their sizes alone, and have no hooks."""
    kinds = {
        (type(head), head.mode, head.straight_through, head.temperature, head.training, head.bias is None)
        for head in heads
    }
    if len(kinds) > 1 or type(heads[0]) is not ChannelGate or has_global_hooks():
        return False
    return not any([has_hooks(head, include_global=False) for head in heads])  # noqa: C419  faster


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


_GEMM_MULTIPLE = 16
"""Rows and columns of a GEMM whose results do not depend on their number (`moesaic.routing.router`)."""
_MAX_BLOCKS = 1024
"""Of a layer, all of which one program compares."""


def _fits_kernels(heads: Sequence[ChannelGate], embedding: Tensor) -> bool:
    """Whether one kernel can make the gates of all layers."""
    head = heads[0]
    if head.mode != "topk" or (head.straight_through and head.training):  # in which closed gates have gradients
        return False
    if max(each.blocks for each in heads) > _MAX_BLOCKS or not is_plain_eager(embedding):
        return False
    return kernels_available(embedding)


def _route_by_kernels(heads: Sequence[ChannelGate], embedding: Tensor) -> list[Routing]:
    from moesaic.ops.triton.channel_ops import topk_gates

    sizes = [head.blocks for head in heads]
    keeps = [cast("int", head.keep) for head in heads]
    blocks = sum(sizes)
    scores = _padded_scores(heads, embedding)
    noisy = _with_noise(heads, scores, scores.shape[1] - blocks)
    layers = _layer_table(tuple(zip(sizes, keeps, strict=True)), embedding.device)
    index, gate, dense = topk_gates(noisy, layers, (blocks, max(sizes), sum(keeps)))
    parts = [
        *(each.unsqueeze(1).split_with_sizes(keeps, 2) for each in (index, gate)),
        dense.unsqueeze(1).split_with_sizes(sizes, 2),
    ]
    own = scores.unsqueeze(1)[:, :, :blocks].split_with_sizes(sizes, 2)
    return [
        JointRouting("channel", score, chosen, values, "unit", may_drop=False, block_gates=weights)
        for score, chosen, values, weights in zip(own, *parts, strict=True)
    ]


def _padded_scores(heads: Sequence[ChannelGate], embedding: Tensor) -> Tensor:
    """`_scores` with columns of padding, which is part of the weights: so their gradient is one matrix, not copied."""
    dtype = torch.promote_types(embedding.dtype, torch.float32)
    padding = -sum(head.blocks for head in heads) % _GEMM_MULTIPLE
    weights: list[Tensor] = [head.weight for head in heads]
    biases: list[Tensor] = [head.bias for head in heads if head.bias is not None]
    if padding:
        none = weights[0].new_zeros(padding, heads[0].embedding)
        weights.append(none)
        biases += [none[:, 0]] if biases else []
    weight = torch.cat(weights).to(dtype).T
    B = len(embedding)
    rows = embedding.to(dtype)
    rows = rows if B % _GEMM_MULTIPLE == 0 else torch.nn.functional.pad(rows, (0, 0, 0, -B % _GEMM_MULTIPLE))
    scores = torch.addmm(torch.cat(biases).to(dtype), rows, weight) if biases else rows @ weight
    return scores if len(scores) == B else scores[:B]


@lru_cache(maxsize=64)
def _layer_table(layers: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(layers, 4), of each: its first block, number of blocks, open blocks, and the first place of its open ones."""
    starts, places = ([0, *accumulate(each)] for each in zip(*layers, strict=True))
    rows = [[start, *layer, place] for start, layer, place in zip(starts, layers, places, strict=False)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _with_noise(heads: Sequence[ChannelGate], scores: Tensor, padding: int = 0) -> Tensor:
    """Returns the scores with the noise of each head; the last columns may be padding."""
    if not any(head.training and (isinstance(head.noise, Tensor) or head.noise) for head in heads):
        return scores
    sizes = [head.blocks for head in heads]
    parts = cast("tuple[Tensor, ...]", scores.split([*sizes, padding] if padding else sizes, 1))
    noisy = [head.with_noise(part) for head, part in zip(heads, parts, strict=False)]
    return torch.cat([*noisy, *parts[len(heads) :]], 1)


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
            closed_gradients=estimate is not None,
        )
        for score, chosen, values, dense, channels in zip(*parts, strict=True)
    ]


def _layers(values: Tensor) -> tuple[Tensor, ...]:
    """(B, …) of each layer, from (B, layers, …)."""
    return values.unbind(1)
