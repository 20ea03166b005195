"""Groups of experts that run in one pass, each on as many rows as the others.

The samples of an expert get S slots, of which the first are its own and the others repeat its last one. S is a multiple
of a quarter of the mean load, so that a training run has few sizes, for each of which a library plans its convolutions
once. A repeated sample has no output, so its gradient is zero, and BatchNorm leaves it out (`masked_batch_norm`).

Values of a group are stacked along the channels, (S, E·C, …): a grouped convolution reads them where they lie, and
whatever works channel by channel runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.ops.grouped_gemm import group_sizes
from moesaic.ops.sample_dispatch import SortedSamples, is_channels_last, select_rows
from moesaic.routing_record import Routing

__all__ = ["SampleGroup", "by_expert", "capacity_groups", "run_grouped"]

_CLASSES = 4
"""Capacities up to the mean load, and for as many rows again above it."""
_MOST_ROWS = 1.5
"""Rows of one group over all samples beyond which experts of different capacities run apart."""


@dataclass(frozen=True)
class SampleGroup:
    """Experts that run in one pass, with the number of samples of each; every expert has at least one."""

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    capacity: int
    """S, the slots of each expert."""
    device: torch.device
    _used: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _share: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def used_SE(self, dtype: torch.dtype) -> Tensor:
        """Returns 1 for slots that have a sample of their own, else 0."""
        if dtype not in self._used:
            slot_S = torch.arange(self.capacity, device=self.device)
            # counts are on the host: a tensor of them would wait for the device
            self._used[dtype] = torch.stack([(slot_S < count).to(dtype) for count in self.counts], 1)
        return self._used[dtype]

    def share_SE(self, dtype: torch.dtype) -> Tensor:
        """Returns the share of a slot in the mean of its expert: 1 / count, or 0 of a repeated sample."""
        if dtype not in self._share:
            used_SE = self.used_SE(dtype)
            self._share[dtype] = used_SE / used_SE.sum(0)
        return self._share[dtype]

    def gather(self, x: Tensor, samples: SortedSamples, starts: Sequence[int]) -> Tensor:
        """Returns the samples of the experts, (S, E·C, …), in the memory format of the batch (B, C, …).

        Args:
            x: the batch.
            samples: its samples, sorted by expert.
            starts: the first sorted row of each expert of the routing.
        """
        slot_S = torch.arange(self.capacity, device=x.device)
        pairs = zip(self.experts, self.counts, strict=True)
        row_SE = torch.stack([starts[e] + slot_S.clamp_max(count - 1) for e, count in pairs], 1)
        samples_SE = (samples.order_R[row_SE] // samples.gate_BK.shape[1]).flatten()
        if is_channels_last(x):
            gathered = x.movedim(1, 3).index_select(0, samples_SE)
            return gathered.view(*row_SE.shape, *gathered.shape[1:]).movedim(1, 3).flatten(3).movedim(3, 1)
        return x.index_select(0, samples_SE).view(self.capacity, -1, *x.shape[2:])

    def rows(self, outputs: Tensor) -> Tensor:
        """Returns outputs (S, E·O, …) as rows (S·E, O, …)."""
        split = by_expert(outputs, len(self.experts))
        if is_channels_last(outputs):
            return split.permute(0, 1, 3, 4, 2).flatten(0, 1).movedim(3, 1)
        return split.flatten(0, 1)


def by_expert(stacked: Tensor, experts: int) -> Tensor:
    """Returns stacked values (S, E·C, …) as (S, E, C, …)."""
    return stacked.view(stacked.shape[0], experts, stacked.shape[1] // experts, *stacked.shape[2:])


def capacity_groups(sizes: Sequence[int], device: torch.device) -> list[SampleGroup]:
    """Returns the groups in which experts with so many samples run; experts without samples are in none.

    They are one group, unless a few large experts would cost the others too many unused slots: then experts of
    different capacities run apart.

    >>> [(group.experts, group.capacity) for group in capacity_groups([30, 36, 0, 34], torch.device("cpu"))]
    [((0, 1, 3), 42)]
    >>> [(group.experts, group.capacity) for group in capacity_groups([80, 8, 0, 12], torch.device("cpu"))]
    [((1, 3), 14), ((0,), 84)]
    """
    used = [e for e, size in enumerate(sizes) if size]
    step = max(-(-sum(sizes) // (_CLASSES * len(sizes))), 1)
    capacity = {e: -(-sizes[e] // step) * step for e in used}
    largest = max(capacity.values(), default=0)
    if largest * len(used) <= _MOST_ROWS * sum(sizes):
        capacity = dict.fromkeys(used, largest)
    groups: list[SampleGroup] = []
    for slots in sorted(set(capacity.values())):
        experts = tuple(e for e in used if capacity[e] == slots)
        groups.append(SampleGroup(experts, tuple(sizes[e] for e in experts), slots, device))
    return groups


def run_grouped(
    x: Tensor, routing: Routing, call: Callable[[SampleGroup, Tensor], Tensor]
) -> tuple[Tensor, frozenset[int]]:
    """Calls each group of experts once; needs one host sync for the group sizes.

    Args:
        x: a batch (B, …) of one sample or more.
        routing: its routing.
        call: ``call(group, stacked)`` returns the outputs (S, E·O, …) of samples (S, E·C, …).

    Returns:
        The gated sum of each sample's outputs (B, …), and the experts that ran.
    """
    samples = SortedSamples.from_routing(routing)
    sizes = group_sizes(samples.ends_E)
    starts = [sum(sizes[:e]) for e in range(len(sizes))]
    parts: list[Tensor] = []
    place: dict[int, Tensor] = {}
    rows = 0
    for group in capacity_groups(sizes, x.device):
        parts.append(group.rows(call(group, group.gather(x, samples, starts))))
        step = len(group.experts)
        for number, (e, count) in enumerate(zip(group.experts, group.counts, strict=True)):
            first = rows + number
            place[e] = torch.arange(first, first + step * count, step, device=x.device)
        rows += step * group.capacity
    place_R = torch.cat([place[e] for e in sorted(place)])
    outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
    return samples.combine(select_rows(outputs, place_R)), frozenset(place)
