"""Samples of each expert, padded to one of few batch sizes: cuDNN selects algorithms once per size.

The samples of an expert become S rows: its own samples, and padding that repeats the last of them. S is a multiple of a
quarter of the mean load, so that a training run has few sizes, and at most a quarter more rows in all. The outputs of
padding are dropped, so that its gradient is zero, and BatchNorm excludes it (`moesaic.ops.padded_batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor

from moesaic.ops.grouped_gemm import group_sizes
from moesaic.ops.sample_dispatch import SortedSamples, check_outputs, select_rows
from moesaic.routing_record import Routing

__all__ = ["padded_size", "run_padded"]

_SIZES = 4
"""Sizes up to the mean load."""


def padded_size(load: int, samples: int, experts: int) -> int:
    """Returns the number of rows, with padding, of an expert that has ``load`` of the samples of all experts.

    >>> [padded_size(load, 512, 4) for load in (0, 1, 120, 128, 129, 160, 500)]
    [0, 32, 128, 128, 160, 160, 512]
    """
    step = max(-(-samples // (_SIZES * experts)), 1)
    return -(-load // step) * step


def run_padded(
    x: Tensor, routing: Routing, call: Callable[[int, Tensor, int], Tensor], padded: Collection[int]
) -> tuple[Tensor, frozenset[int]]:
    """Runs every expert that has samples, once; needs one host sync, for the loads.

    Args:
        x: a batch (B, …) of one sample or more.
        routing: its routing.
        call: ``call(e, rows, count)`` returns the outputs of expert e for the first ``count`` of the rows (S, …).
        padded: the experts whose samples are padded.

    Returns:
        The gated sum of each sample's outputs (B, …), and the experts that ran.
    """
    samples = SortedSamples.from_routing(routing)
    loads = group_sizes(samples.ends_E)
    used = [e for e, load in enumerate(loads) if load]
    sizes = {e: padded_size(loads[e], sum(loads), len(loads)) if e in padded else loads[e] for e in used}
    rows: list[Tensor] = []
    for e in used:
        first = sum(loads[:e])  # loads are on the host: a tensor of them would wait for the device
        row_S = torch.arange(first, first + sizes[e], device=x.device)
        rows.append(row_S if sizes[e] == loads[e] else row_S.clamp_max_(first + loads[e] - 1))
    order = samples.order_R[torch.cat(rows)]
    gathered = select_rows(x, order // samples.gate_BK.shape[1])
    parts = cast("tuple[Tensor, ...]", gathered.split(list(sizes.values())))
    outputs = {e: call(e, part, loads[e]) for e, part in zip(used, parts, strict=True)}
    check_outputs(outputs)
    return samples.combine(torch.cat(list(outputs.values()))), frozenset(used)
