"""Expert choice: every expert takes its top-scoring patches of each image.

Chowdhury et al. 2023, Section 3.1 (J_s(x), the top-l patches of expert s) and eqs. 3 and 4, the latter with the
exponential in the denominator that is missing in print. Each image is routed on its own and every expert takes the same
number of patches, so shapes are static and loads are balanced.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from moesaic.checks import check_choice, check_positive
from moesaic.input_checks import check_feature_map
from moesaic.ops import PatchSelection, Softmax, run_expert_choice
from moesaic.routing.router import Router, stable_topk
from moesaic.routing_record import Routing, Unit

__all__ = ["ExpertChoice", "ExpertGate"]

ExpertGate = Softmax


class ExpertChoice(Router):
    """Every expert selects its top ``patches_per_expert`` patches of each image.

    The gate of a selected patch:

    - ``"softmax_selected"``: softmax over the expert's selected patches; sums to 1 (print)
    - ``"softmax_all"``: softmax over all patches; the selected ones sum to less than 1 (the released code)
    - ``"one"``: 1; the router then gets no gradient (separate training, eq. 3)

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
        patches_per_expert: int,
        patch_size: int = 1,
        *,
        gate: ExpertGate = "softmax_selected",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, experts, patch_size, device=device, dtype=dtype)
        check_positive("ExpertChoice", patches_per_expert=patches_per_expert)
        self.patches_per_expert = patches_per_expert
        self.gate: ExpertGate = check_choice("ExpertChoice", "gate", gate, get_args(ExpertGate))

    def forward(self, x: Tensor) -> Routing:
        routing, _ = self.select(x)
        return routing

    def select(self, x: Tensor) -> tuple[Routing, PatchSelection | None]:
        """Returns the routing of a map and the state of the backend's kernels, if they computed it, for reuse."""
        selection = None
        if type(self).scores is Router.scores and type(self).choose is ExpertChoice.choose:
            check_feature_map(type(self).__name__, x, self.in_channels, self.patch_size, self.weight)
            selection = run_expert_choice(x, self.weight, self.patches_per_expert, self.gate)
        return (super().forward(x), None) if selection is None else (selection.routing, selection)

    def choose(self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None) -> Routing:
        N = scores.shape[1]
        if self.patches_per_expert > N:
            where = f"a {grid[0]}×{grid[1]} grid" if grid else "the input"
            raise ValueError(
                f"ExpertChoice: patches_per_expert={self.patches_per_expert}, but {where} has only {N} patches; "
                f"take at most {N}, or cut the map into more patches with a smaller patch_size"
            )
        scores_BEN = scores.transpose(1, 2)
        index_BEL = stable_topk(scores_BEN, self.patches_per_expert)
        if self.gate == "softmax_all":
            gate_BEL = scores_BEN.softmax(-1).gather(-1, index_BEL)
        else:
            gate_BEL = scores_BEN.gather(-1, index_BEL)
            gate_BEL = gate_BEL.softmax(-1) if self.gate == "softmax_selected" else torch.ones_like(gate_BEL)
        return Routing(unit, scores, index_BEL, gate_BEL, "expert", grid=grid, may_drop=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, patches_per_expert={self.patches_per_expert}, gate={self.gate!r}"
