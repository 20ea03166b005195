"""Samples sorted by the experts they go to, and their answers put back in order.

One stable sort of the batch's B·K places brings each expert's samples together; its inverse brings
the answers back, where each sample sums those of its K experts. Sums are taken in float32 at least,
and no result depends on the order in which threads finish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moesaic.ops.grouped_gemm import grouped_matmul, loads_of
from moesaic.routing_record import Routing

__all__ = ["SortedSamples", "check_answers", "gated_sum", "run_each"]


@dataclass(frozen=True)
class SortedSamples:
    """R = B·K rows, those of expert 0 first, in the order of the batch; values of rows are (R, …)."""

    order_R: Tensor
    """Which of the B·K places a row is: sample · K + its k-th choice."""
    expert_R: Tensor
    ends_E: Tensor
    """Before which row each expert's samples end."""
    gate_BK: Tensor

    @staticmethod
    def chosen(routing: Routing) -> SortedSamples:
        assert routing.index is not None
        expert_R, order_R = routing.index.flatten().sort(stable=True)
        each = torch.arange(routing.experts, device=expert_R.device)
        return SortedSamples(order_R, expert_R, torch.searchsorted(expert_R, each, right=True), routing.gate.flatten(1))

    def take(self, x: Tensor) -> Tensor:
        """Every row's sample out of a batch (B, …)."""
        K = self.gate_BK.shape[1]
        sample_R = self.order_R if K == 1 else self.order_R // K
        if _is_channels_last(x):  # index_select would not keep the format
            return x.movedim(1, 3).index_select(0, sample_R).movedim(3, 1)
        return x.index_select(0, sample_R)

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        y = grouped_matmul(values, weight_EOC.to(values.dtype).transpose(1, 2), self.ends_E)
        if bias_EO is None:
            return y
        bias_RO = bias_EO.to(y.dtype).index_select(0, self.expert_R)
        return y + bias_RO.view(-1, *[1] * (y.ndim - 2), y.shape[-1])

    def combine(self, answers: Tensor) -> Tensor:
        """The gated sum of each sample's answers, (B, …)."""
        if _is_channels_last(answers):
            return self.combine(answers.movedim(1, 3)).movedim(3, 1)
        B, K = self.gate_BK.shape
        back = torch.empty_like(self.order_R).scatter_(0, self.order_R, torch.arange(B * K, device=answers.device))
        return gated_sum(answers.index_select(0, back).view(B, K, *answers.shape[1:]), self.gate_BK)


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def gated_sum(answers_BK: Tensor, gate_BK: Tensor) -> Tensor:
    """Σ_k gate · answer (B, …), in the dtype of the answers."""
    wide = torch.promote_types(answers_BK.dtype, torch.float32)
    gate = gate_BK.to(wide).view(*gate_BK.shape, *[1] * (answers_BK.ndim - 2))
    return (answers_BK.to(wide) * gate).sum(1).to(answers_BK.dtype)


def run_each(x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Call every expert that has samples once, on its samples; one host sync tells how many each has.

    An empty batch goes to expert 0, whose answer has the shape that is asked for.
    """
    samples = SortedSamples.chosen(routing)
    loads = loads_of(samples.ends_E)
    parts = cast("tuple[Tensor, ...]", samples.take(x).split(loads))
    used = [e for e, load in enumerate(loads) if load] or [0]
    answers = {e: call(e, parts[e]) for e in used}
    check_answers(answers)
    return samples.combine(torch.cat(list(answers.values())))


def check_answers(answers: dict[int, Tensor]) -> None:
    """Refuse answers that cannot stand in one tensor."""
    first = next(iter(answers))
    for e, answer in answers.items():
        if answer.shape[1:] != answers[first].shape[1:]:
            raise ValueError(
                f"SampleMoE: expert {first} answers each sample with a tensor of {tuple(answers[first].shape[1:])}, "
                f"expert {e} with {tuple(answer.shape[1:])}; give all experts outputs of one shape"
            )
