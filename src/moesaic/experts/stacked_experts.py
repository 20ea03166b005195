"""Base class of the experts for patches: E networks of one shape, with weights stacked along the first axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.experts.expert_norm import ExpertNorm
from moesaic.ops import Norm, PatchSelection, PatchSpec
from moesaic.routing_record import Routing

__all__ = ["Experts"]


class Experts(nn.Module):
    """E experts that map C channels to O on the patches routed to them; ``len(experts)`` is E."""

    norm: ExpertNorm | None
    kernel_size: int = 1
    has_bias: bool

    def __init__(
        self,
        experts: int,
        in_channels: int,
        out_channels: int,
        *,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, experts=experts, in_channels=in_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.norm = ExpertNorm(experts, in_channels, device=device, dtype=dtype) if norm else None
        self._experts = experts

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def __len__(self) -> int:
        return self._experts

    def forward(self, x: Tensor, routing: Routing, spec: PatchSpec, selection: PatchSelection | None = None) -> Tensor:
        """Runs the experts on the routed patches of a map (B, C, H, W).

        ``selection`` is the state of an expert choice by kernels, for the ``run_`` functions of `moesaic.ops`.
        """
        raise TypeError(f"{type(self).__name__} does not implement forward(x, routing, spec, selection)")

    def norm_tensors(self, x: Tensor) -> Norm | None:
        """The experts' norm as backends take it, or None."""
        return None if self.norm is None else self.norm.tensors(x.shape[0] * x.shape[2] * x.shape[3])
