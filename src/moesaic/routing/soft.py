"""Soft MoE: the input of each slot of an expert is a convex combination of all units (Puigcerver et al. 2024).

Dispatch is a softmax over units, combine a softmax over slots, both of the same scores; units and slot kernels are
normalised to length 1, with one learned scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.routing.router import Router, mask_scores
from moesaic.routing_record import Routing, Unit

__all__ = ["SoftRouter"]


class SoftRouter(Router):
    """Fills ``slots_per_expert`` slots per expert with convex combinations of patches; ``weight`` is (E·S, C, p, p).

    >>> import torch, moesaic
    >>> router = moesaic.SoftRouter(3, experts=4, slots_per_expert=2, patch_size=8)
    >>> routing = router(torch.randn(5, 3, 32, 32))
    >>> routing.dispatch.shape                                      # weights of 16 patches in each slot
    torch.Size([5, 16, 4, 2])
    >>> bool(torch.allclose(routing.dispatch.sum(1), torch.ones(())))
    True
    """

    def __init__(
        self,
        in_channels: int,
        experts: int,
        slots_per_expert: int = 1,
        patch_size: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive("SoftRouter", experts=experts, slots_per_expert=slots_per_expert)
        super().__init__(in_channels, experts * slots_per_expert, patch_size, device=device, dtype=dtype)
        self.experts = experts
        self.slots_per_expert = slots_per_expert
        self.scale = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises small random kernels and a scale of 1."""
        super().reset_parameters(generator)
        if hasattr(self, "scale"):  # not yet set when the base class initialises
            nn.init.ones_(self.scale)

    def scores(self, x: Tensor) -> Tensor:
        """Returns (B, N, E·S): cosine similarities of patches and slot kernels, times the scale."""
        p = self.patch_size
        dtype = torch.promote_types(x.dtype, torch.float32)
        dots = super().scores(x)
        B, C, H, W = x.shape
        squares = x.to(dtype).reshape(B, C, H // p, p, W // p, p).square().sum((1, 3, 5))
        patch_norm = squares.flatten(1).unsqueeze(-1).clamp_min(1e-12).sqrt()
        kernel_norm = self.weight.to(dtype).square().sum((1, 2, 3)).clamp_min(1e-12).sqrt()
        return dots / patch_norm / kernel_norm * self.scale.to(dtype)

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        shape = (*scores.shape[:2], self.experts, self.slots_per_expert)
        gate, dispatch = scores.softmax(2), mask_scores(scores, mask).softmax(1)
        if mask is not None:
            gate, dispatch = (each.where(mask.unsqueeze(-1), 0) for each in (gate, dispatch))
        return Routing(
            unit,
            scores=scores.view(shape),
            index=None,
            gate=gate.view(shape),
            chooser="soft",
            grid=grid,
            dispatch=dispatch.view(shape),
            may_drop=False,
            unit_mask=mask,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, slots_per_expert={self.slots_per_expert}"
