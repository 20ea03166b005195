"""Units choose: every unit goes to its top-k experts.

Shazeer et al. 2017 and Fedus et al. 2022 for tokens, Riquelme et al. 2021 for image patches
(batch-prioritised dropping), Chen et al. 2022 for whole samples (uniform noise on the choice).
Dropless by default: every unit is served, however uneven the loads.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.checks import check_choice, check_positive
from moesaic.routing.noise import Noise, draw_noise
from moesaic.routing.router import Router, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing, Unit

__all__ = ["TokenChoice", "TokenGate"]

TokenGate = Literal["softmax_all", "softmax_selected", "one"]


class TokenChoice(Router):
    """Every unit picks its ``top_k`` best experts.

    - ``gate``: softmax over all experts (``"softmax_all"``), over the picked ones
      (``"softmax_selected"``; constant for ``top_k=1``, so the router then does not learn through
      it), or ``"one"``
    - ``noise`` moves the choice, never the gate: Unif[0, 1], N(0, 1/E²) or standard Gumbel, times
      ``noise_scale``; drawn from ``generator``
    - ``capacity_factor``: an expert serves at most ``ceil(capacity_factor · B·N·K / E)`` units of
      a batch. First choices go before second ones, and among them the unit with the larger softmax
      probability; who finds its expert full is dropped there (index -1, gate 0)

    Noise and capacity act while training only, unless ``in_eval=True``: capacity is shared by the
    images of a batch, so an image's result then depends on its batch-mates.

    >>> import torch, moesaic
    >>> router = moesaic.TokenChoice(3, experts=4, top_k=1, patch_size=8)
    >>> routing = router(torch.randn(5, 3, 32, 32))
    >>> routing.index.shape, int(routing.load.sum())
    (torch.Size([5, 16, 1]), 80)
    """

    def __init__(
        self,
        in_channels: int,
        experts: int,
        top_k: int = 1,
        patch_size: int = 1,
        *,
        gate: TokenGate = "softmax_all",
        noise: Noise | None = None,
        noise_scale: float = 1.0,
        capacity_factor: float | None = None,
        in_eval: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, experts, patch_size, device=device, dtype=dtype)
        check_positive("TokenChoice", top_k=top_k)
        if top_k > experts:
            raise ValueError(f"TokenChoice: top_k={top_k}, but there are {experts} experts; use 1 to {experts}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                f"TokenChoice: capacity_factor={capacity_factor}; it must be above 0, or None for dropless"
            )
        self.top_k = top_k
        self.gate: TokenGate = check_choice("TokenChoice", "gate", gate, get_args(TokenGate))
        self.noise: Noise | None = check_choice("TokenChoice", "noise", noise, (*get_args(Noise), None))
        self.noise_scale = noise_scale
        self.capacity_factor = capacity_factor
        self.in_eval = in_eval
        self.generator = generator

    def choose(self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None) -> Routing:
        acting = self.training or self.in_eval
        noisy = scores
        if self.noise is not None and acting:
            noisy = scores + self.noise_scale * draw_noise(self.noise, scores, self.generator)
        index_BNK = stable_topk(noisy, self.top_k)
        if self.gate == "softmax_all":
            gate_BNK = scores.softmax(-1).gather(-1, index_BNK)
        else:
            gate_BNK = scores.gather(-1, index_BNK)
            gate_BNK = gate_BNK.softmax(-1) if self.gate == "softmax_selected" else torch.ones_like(gate_BNK)
        dropping = self.capacity_factor is not None and acting
        if dropping:
            served = self._served(index_BNK, scores.detach().softmax(-1).gather(-1, index_BNK[..., :1]))
            index_BNK = index_BNK.where(served, UNASSIGNED)
            gate_BNK = gate_BNK.where(served, 0.0)
        return Routing(unit, scores, index_BNK, gate_BNK, "unit", grid=grid, may_drop=dropping)

    def capacity(self, units: int) -> int:
        """How many of ``units`` routed units one expert serves at most."""
        if self.capacity_factor is None:
            return units
        exact = self.capacity_factor * units * self.top_k / self.experts
        return min(units, math.ceil(round(exact, 6)))  # 1.1 · 100 / 10 is 11, not the 11.000000000000002 of floats

    def _served(self, index_BNK: Tensor, sureness_BN1: Tensor) -> Tensor:
        """Which choices find room: first choices first, and those of the surest units of the batch before others."""
        B, N, K = index_BNK.shape
        order = stable_topk(sureness_BN1.flatten(), B * N)
        choice_KU = index_BNK.reshape(B * N, K)[order].T
        asked = (choice_KU.reshape(-1, 1) == torch.arange(self.experts, device=order.device)).long()
        turn_KU = ((asked.cumsum(0) - 1) * asked).sum(-1).view(K, B * N)
        served = torch.empty_like(turn_KU, dtype=torch.bool)
        served[:, order] = turn_KU < self.capacity(B * N)
        return served.T.reshape(B, N, K)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, top_k={self.top_k}, gate={self.gate!r}, noise={self.noise!r}, "
            f"capacity_factor={self.capacity_factor}"
        )
