"""Expert choice: every expert takes its top-scoring patches or tokens of each image.

Chowdhury et al. 2023, Section 3.1 (J_s(x), the top-l patches of expert s) and eqs. 3 and 4, the latter with the
exponential in the denominator that is missing in print. Each image is routed on its own and every expert takes the same
number of patches, so shapes are static and loads are balanced. Zhou et al. 2022 for tokens: a softmax over experts
comes first, and the number is a capacity.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.ops import ExpertGate, PatchChoice, PatchSelection, run_expert_choice
from moesaic.routing.router import Router, mask_scores, round_up, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing, Unit
from moesaic.tensor_checks import check_feature_map

__all__ = ["ExpertChoice", "ExpertGate"]


class ExpertChoice(Router):
    """Every expert selects its top ``patches_per_expert`` patches of each image.

    The gate of a selected patch:

    - ``"softmax_selected"``: softmax over the expert's selected patches; sums to 1 (print)
    - ``"softmax_all"``: softmax over all patches; the selected ones sum to less than 1 (the released code)
    - ``"softmax_experts"``: softmax over the experts, which also decides the choice (Zhou et al. 2022); about 1/E
    - ``"one"``: 1; the router then gets no gradient (separate training, eq. 3)

    With ``capacity`` in place of ``patches_per_expert``, an expert selects ``ceil(capacity · N / E)`` of N patches, at
    least one and at most all: with a capacity of 1, all experts together select as many patches as there are.

    >>> import torch, moesaic
    >>> router = moesaic.ExpertChoice(3, experts=4, patches_per_expert=2, patch_size=8)
    >>> routing = router(torch.randn(5, 3, 32, 32))
    >>> routing.index.shape, routing.grid, routing.load.tolist()
    (torch.Size([5, 4, 2]), (4, 4), [10, 10, 10, 10])
    """

    def __init__(
        self,
        in_channels: int,
        experts: int,
        patches_per_expert: int | None = None,
        patch_size: int = 1,
        *,
        capacity: float | None = None,
        gate: ExpertGate = "softmax_selected",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, experts, patch_size, device=device, dtype=dtype)
        if (patches_per_expert is None) == (capacity is None):
            given = "both are given" if capacity is not None else "both are missing"
            raise TypeError(f"ExpertChoice: patches_per_expert and capacity: {given}; give one of them")
        if patches_per_expert is not None:
            check_positive("ExpertChoice", patches_per_expert=patches_per_expert)
        if capacity is not None:
            check_numbers("ExpertChoice", "above 0", lambda value: 0 < value < math.inf, {"capacity": capacity})
        self.patches_per_expert = patches_per_expert
        self.capacity = capacity
        self.gate: ExpertGate = check_choice("ExpertChoice", "gate", gate, get_args(ExpertGate))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        if mask is not None:
            return super().forward(x, mask)
        routing, _ = self.select(x)
        return routing

    def select(self, x: Tensor, *, detached: bool = False) -> tuple[Routing, PatchSelection | None]:
        """Returns the routing of a map and the state of the backend's kernels, if they computed it, for reuse.

        ``detached``: only the experts, which get both results, need the gradient of scores and gates. Kernels that
        compute this gradient with that of the experts then return scores and gates without gradient.
        """
        selection, factor = None, 1.0
        if type(self).scores is Router.scores and type(self).choose is ExpertChoice.choose:
            check_feature_map(type(self).__name__, x, self.in_channels, self.patch_size, self.weight)
            units = (x.shape[2] // self.patch_size) * (x.shape[3] // self.patch_size)
            factor = self.gate_factor(units)
            only_experts = detached and factor == 1
            selection = run_expert_choice(x, self.weight, self.count(units), self.gate, detached=only_experts)
        if selection is None:
            return super().forward(x), None
        if factor != 1:  # not the gates that the kernels made, so that these cannot be reused
            return replace(selection.routing, gate=selection.routing.gate * factor), None
        return selection.routing, selection

    def patch_choice(self, x: Tensor) -> PatchChoice | None:
        """Returns the choice for kernels to make of a map (B, C, H, W); None for subclasses that override it."""
        if type(self).scores is not Router.scores or type(self).choose is not ExpertChoice.choose:
            return None
        units = (x.shape[2] // self.patch_size) * (x.shape[3] // self.patch_size)
        if x.shape[1] != self.in_channels or self.gate_factor(units) != 1:
            return None
        return PatchChoice(self.weight, self.count(units), self.gate)

    def gate_factor(self, units: int) -> float:
        """Returns what gates are multiplied by, for so many patches or tokens of an image; subclasses may rescale."""
        return 1.0

    def count(self, units: int) -> int:
        """Returns L, how many of so many patches or tokens of an image an expert selects.

        >>> ExpertChoice(3, experts=4, capacity=1.0).count(49)
        13
        """
        if self.patches_per_expert is not None:
            return self.patches_per_expert
        assert self.capacity is not None
        return min(max(round_up(self.capacity * units / self.experts), 1), units)

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        N = scores.shape[1]
        L = self.count(N)
        if L > N:
            where = f"a {grid[0]}×{grid[1]} grid" if grid else "the input"
            raise ValueError(
                f"ExpertChoice: patches_per_expert={self.patches_per_expert}, but {where} has only {N} patches; "
                f"take at most {N}, or cut the map into more patches with a smaller patch_size"
            )
        compared = scores.softmax(-1) if self.gate == "softmax_experts" else scores
        compared_BEN = mask_scores(compared, mask).transpose(1, 2)
        index_BEL = stable_topk(compared_BEN, L)
        if self.gate == "softmax_all":
            gate_BEL = compared_BEN.softmax(-1).gather(-1, index_BEL)
        else:
            gate_BEL = compared_BEN.gather(-1, index_BEL)
            if self.gate == "softmax_selected":
                gate_BEL = gate_BEL.softmax(-1)
            elif self.gate == "one":
                gate_BEL = torch.ones_like(gate_BEL)
        factor = self.gate_factor(N)
        if factor != 1:
            gate_BEL = gate_BEL * factor
        if mask is not None:  # fewer units than L leave places empty
            used = mask.unsqueeze(1).expand(compared_BEN.shape).gather(-1, index_BEL)
            index_BEL, gate_BEL = index_BEL.where(used, UNASSIGNED), gate_BEL.where(used, 0)
        may_drop = mask is not None
        return Routing(unit, scores, index_BEL, gate_BEL, "expert", grid=grid, may_drop=may_drop, unit_mask=mask)

    def extra_repr(self) -> str:
        if self.capacity is not None:
            count = f"capacity={self.capacity}"
        else:
            count = f"patches_per_expert={self.patches_per_expert}"
        return f"{super().extra_repr()}, {count}, gate={self.gate!r}"
