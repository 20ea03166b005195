"""Token choice: every unit goes to its top-k experts.

Shazeer et al. 2017 and Fedus et al. 2022 for tokens, Riquelme et al. 2021 for image patches (batch-prioritised
dropping), Chen et al. 2022 for whole samples (uniform noise). Dropless by default, however unequal the loads.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice, check_positive
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.router import Noise, Router, round_up, sample_noise, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing, Unit

__all__ = ["TokenChoice", "TokenGate"]

TokenGate = Literal["softmax_all", "softmax_selected", "one"]


class TokenChoice(Router):
    """Every unit selects its ``top_k`` experts.

    - ``gate``: softmax over all experts (``"softmax_all"``), over the selected ones (``"softmax_selected"``; constant
      for ``top_k=1``, so the router then gets no gradient), or ``"one"``
    - ``noise`` affects the choice but not the gate: Unif[0, 1], N(0, 1/E²) or standard Gumbel, times ``noise_scale``,
      from ``generator``
    - ``capacity_factor``: an expert takes at most ``ceil(capacity_factor · B·N·K / E)`` units of a batch. First choices
      precede second choices, and among them units with a larger softmax probability; units beyond the capacity are
      dropped there (index -1, gate 0)

    Noise and capacity apply in training only, unless ``in_eval=True``: the images of a batch share the capacity, so an
    image's output then depends on the rest of the batch.

    >>> import torch, moesaic
    >>> router = moesaic.TokenChoice(3, experts=4, top_k=1, patch_size=8)
    >>> routing = router(torch.randn(5, 3, 32, 32))
    >>> routing.index.shape, int(routing.load.sum())
    (torch.Size([5, 16, 1]), 80)
    """

    global_batch: GlobalBatch | None = None
    """The batch of which the maps are a part, in training on several processes."""

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

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        active = self.training or self.in_eval
        noisy = scores
        if self.noise is not None and active:
            noisy = scores + self.noise_scale * sample_noise(self.noise, scores, self.generator, self.global_batch)
        index_BNK = stable_topk(noisy, self.top_k)
        if self.gate == "softmax_all":
            gate_BNK = scores.softmax(-1).gather(-1, index_BNK)
        else:
            gate_BNK = scores.gather(-1, index_BNK)
            gate_BNK = gate_BNK.softmax(-1) if self.gate == "softmax_selected" else torch.ones_like(gate_BNK)
        if mask is not None:
            index_BNK = index_BNK.where(mask.unsqueeze(-1), UNASSIGNED)
            gate_BNK = gate_BNK.where(mask.unsqueeze(-1), 0.0)
        dropping = self.capacity_factor is not None and active
        if dropping:
            first_BN1 = index_BNK[..., :1].clamp_min(0)
            probability_BN1 = scores.detach().softmax(-1).gather(-1, first_BN1)
            if self.global_batch is None:
                within = self._within_capacity(index_BNK, probability_BN1, padded=mask is not None)
            else:  # all images of the batch share the capacity
                whole = self.global_batch.gather(index_BNK), self.global_batch.gather(probability_BN1)
                within = self.global_batch.own(self._within_capacity(*whole, padded=mask is not None))
            index_BNK = index_BNK.where(within, UNASSIGNED)
            gate_BNK = gate_BNK.where(within, 0.0)
        may_drop = dropping or mask is not None
        return Routing(unit, scores, index_BNK, gate_BNK, "unit", grid=grid, may_drop=may_drop, unit_mask=mask)

    def capacity(self, units: int) -> int:
        """Returns the capacity of an expert for a batch of ``units`` units."""
        if self.capacity_factor is None:
            return units
        return min(units, round_up(self.capacity_factor * units * self.top_k / self.experts))

    def _within_capacity(self, index_BNK: Tensor, probability_BN1: Tensor, padded: bool) -> Tensor:
        """Whether each choice is within capacity; first choices precede others, likelier units precede others.

        Unassigned units are padding: they take no place, and if there may be some, the capacity is that of the others.
        """
        B, N, K = index_BNK.shape
        capacity: int | Tensor = self.capacity(B * N)
        if padded:  # the same, without waiting for the device
            units = (index_BNK[..., 0] != UNASSIGNED).sum().double()
            assert self.capacity_factor is not None
            exact = self.capacity_factor * units * self.top_k / self.experts
            capacity = torch.minimum((1e6 * exact).round().div(1e6).ceil(), units)
        order = stable_topk(probability_BN1.flatten(), B * N)
        choice_KU = index_BNK.reshape(B * N, K)[order].T
        one_hot = (choice_KU.reshape(-1, 1) == torch.arange(self.experts, device=order.device)).long()
        position_KU = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1).view(K, B * N)
        within = torch.zeros_like(position_KU, dtype=torch.bool)
        within = within.scatter(1, order.expand(K, B * N), position_KU < capacity)
        return within.T.reshape(B, N, K)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, top_k={self.top_k}, gate={self.gate!r}, noise={self.noise!r}, "
            f"capacity_factor={self.capacity_factor}"
        )
