"""Dispatch of samples to experts: sort by expert, run, and combine in the order of the batch.

    y_b = Σ_k gate_bk · expert_{index_bk}(x_b)

A stable sort of the B·K assignments groups the samples by expert; its inverse restores the order of the batch, where
the gated sum over K is taken in float32 at least. Results do not depend on the order in which threads finish.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moesaic.ops.eager_conditions import has_host_values, in_vmap
from moesaic.ops.grouped_gemm import group_ends, group_sizes, grouped_matmul
from moesaic.routing_record import Routing

__all__ = ["SortedSamples", "check_outputs", "gated_sum", "is_channels_last", "run_all", "run_each", "select_rows"]


@dataclass(frozen=True)
class SortedSamples:
    """The R = B·K assignments of samples to experts, sorted by expert; values are (R, …)."""

    order_R: Tensor
    """Assignment of each row: sample · K + k."""
    expert_R: Tensor
    ends_E: Tensor
    """The rows of expert e end before row ``ends_E[e]``."""
    gate_BK: Tensor

    @staticmethod
    def from_routing(routing: Routing) -> SortedSamples:
        assert routing.index is not None
        expert_R, order_R = routing.index.flatten().sort(stable=True)
        return SortedSamples(order_R, expert_R, group_ends(expert_R, routing.experts), routing.gate.flatten(1))

    def gather(self, x: Tensor) -> Tensor:
        """Gathers the sample of every row from a batch (B, …)."""
        K = self.gate_BK.shape[1]
        return select_rows(x, self.order_R if K == 1 else self.order_R // K)

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        y = grouped_matmul(values, weight_EOC.to(values.dtype).transpose(1, 2), self.ends_E)
        if bias_EO is None:
            return y
        bias_RO = bias_EO.to(y.dtype).index_select(0, self.expert_R)
        return y + bias_RO.view(-1, *[1] * (y.ndim - 2), y.shape[-1])

    def combine(self, outputs: Tensor) -> Tensor:
        """Returns the gated sum of each sample's outputs, (B, …)."""
        if is_channels_last(outputs):
            return self.combine(outputs.movedim(1, 3)).movedim(3, 1)
        B, K = self.gate_BK.shape
        row_R = torch.arange(B * K, device=outputs.device)
        inverse = torch.zeros_like(self.order_R).scatter(0, self.order_R, row_R)
        return gated_sum(outputs.index_select(0, inverse).view(B, K, *outputs.shape[1:]), self.gate_BK)


def is_channels_last(x: Tensor) -> bool:
    """Whether maps (B, C, H, W) are in channels_last alone, so that a gather has to be told to preserve it."""
    if x.ndim != 4 or in_vmap():
        return False
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def select_rows(x: Tensor, index_R: Tensor) -> Tensor:
    """Returns the rows of ``x`` with these numbers, in its memory format."""
    if is_channels_last(x):  # index_select would return a contiguous tensor
        return x.movedim(1, 3).index_select(0, index_R).movedim(3, 1)
    return x.index_select(0, index_R)


def gated_sum(outputs_BK: Tensor, gate_BK: Tensor) -> Tensor:
    """Returns Σ_k gate · output (B, …), in the dtype of the outputs."""
    acc_dtype = torch.promote_types(outputs_BK.dtype, torch.float32)
    gate = gate_BK.to(acc_dtype).view(*gate_BK.shape, *[1] * (outputs_BK.ndim - 2))
    return (outputs_BK.to(acc_dtype) * gate).sum(1).to(outputs_BK.dtype)


def run_each(x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor], also: Collection[int] = ()) -> Tensor:
    """Calls every expert that has samples once, on all of its samples; needs one host sync for the group sizes.

    Experts in ``also`` are called without samples too. An empty batch goes to expert 0, whose output gives the shape of
    the result.
    """
    if in_vmap():
        return run_all(x, routing, call)
    if torch.compiler.is_exporting():
        return _run_each_exported(x, routing, call)
    if not torch.compiler.is_compiling() and not has_host_values(x):
        return run_all(x, routing, call)
    samples = SortedSamples.from_routing(routing)
    sizes = group_sizes(samples.ends_E)
    parts = cast("tuple[Tensor, ...]", samples.gather(x).split(sizes))
    used = [e for e, size in enumerate(sizes) if size or e in also] or [0]
    outputs = {e: call(e, parts[e]) for e in used}
    check_outputs(outputs)
    return samples.combine(torch.cat(list(outputs.values())))


def run_all(x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Calls every expert on all samples, where the experts of a sample are not known on the host."""
    outputs = {e: call(e, x) for e in range(routing.experts)}
    check_outputs(outputs)
    stacked = torch.stack(list(outputs.values()), 1)
    mask_BE = routing.mask[:, 0]
    mask = mask_BE.view(*mask_BE.shape, *[1] * (stacked.ndim - 2))
    return gated_sum(torch.where(mask, stacked, 0), routing.weights[:, 0])


def _run_each_exported(x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
    """`run_each` without a host sync: every expert is a branch of the graph that runs if it has samples."""
    assert routing.index is not None
    shapes = {e: call(e, x[:1]) for e in range(routing.experts)}  # unused otherwise, so that the export drops it
    check_outputs(shapes)
    weights_BE = routing.weights[:, 0]
    like = shapes[0]

    def zeros(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], *like.shape[1:], dtype=like.dtype)

    total = None
    for e in range(routing.experts):

        def run(x: Tensor, chosen: Tensor, weights: Tensor, e: int = e) -> Tensor:
            sample_n = chosen.nonzero()[:, 0]
            torch._check(sample_n.shape[0] > 0)  # pyright: ignore[reportPrivateUsage]
            outputs = call(e, x.index_select(0, sample_n))
            gated = gated_sum(outputs.unsqueeze(1), weights.index_select(0, sample_n).unsqueeze(1))
            return zeros(x, chosen, weights).index_put((sample_n,), gated)

        chosen_B = (routing.index[:, 0] == e).any(1)
        output = torch.cond(chosen_B.any(), run, zeros, (x, chosen_B, weights_BE[:, e]))
        total = output if total is None else total + output
    assert total is not None
    return total


def check_outputs(outputs: dict[int, Tensor]) -> None:
    """Raises an error if the experts' outputs differ in shape."""
    first = next(iter(outputs))
    shape = tuple(outputs[first].shape[1:])
    for e, output in outputs.items():
        if output.shape[1:] != shape:
            raise ValueError(
                f"SampleMoE: the output of expert {first} for a sample has the shape {shape}, "
                f"that of expert {e} {tuple(output.shape[1:])}; give all experts outputs of one shape"
            )
