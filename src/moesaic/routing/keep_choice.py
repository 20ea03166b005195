"""Keep choice: one expert takes its top-scoring share of an image's tokens; all others are skipped.

Raposo et al. 2024 (mixture of depths): expert choice with a single expert, which is a block of a transformer. Each
image keeps the same number of tokens, so shapes are static.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.routing.router import Router, mask_scores, round_up, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing, Unit

__all__ = ["KeepChoice", "KeepGate"]

KeepGate = Literal["sigmoid", "one"]


class KeepChoice(Router):
    """Selects the ``ceil(keep · N)`` tokens of each image with the highest scores, in the order in which they lie.

    The gate of a selected token:

    - ``"sigmoid"``: 2 · sigmoid(score), which is 1 for a score of 0. Unlike a softmax over tokens it does not shrink
      with their number, nor depend on the other tokens.
    - ``"one"``: 1; the router then gets no gradient.

    Args:
        in_channels: Features of a token.
        keep: Share of the tokens behind the prefix that are selected: above 0, at most 1.
        gate: ``"sigmoid"`` or ``"one"``.
        prefix_tokens: Leading tokens that are always selected, with a gate of 1.

    >>> import torch
    >>> router = KeepChoice(3, keep=0.5, prefix_tokens=1)
    >>> scores = torch.tensor([[[-9.0], [1.0], [4.0], [0.0], [3.0]]])          # a class token and four others
    >>> router.choose(scores).index.tolist()
    [[[0, 2, 4]]]
    """

    def __init__(
        self,
        in_channels: int,
        keep: float = 0.5,
        *,
        gate: KeepGate = "sigmoid",
        prefix_tokens: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("KeepChoice", "above 0 and at most 1", lambda value: 0 < value <= 1, {"keep": keep})
        if prefix_tokens:
            check_positive("KeepChoice", prefix_tokens=prefix_tokens)
        super().__init__(in_channels, 1, device=device, dtype=dtype)
        self.keep = keep
        self.gate: KeepGate = check_choice("KeepChoice", "gate", gate, get_args(KeepGate))
        self.prefix_tokens = prefix_tokens

    def count(self, tokens: int) -> int:
        """Returns how many of so many tokens behind the prefix are selected; at least one.

        >>> KeepChoice(3, keep=0.7).count(10)
        7
        """
        return min(max(round_up(self.keep * tokens), 1), tokens)

    def choose(
        self, scores: Tensor, *, unit: Unit = "token", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        B, N, _ = scores.shape
        P = self.prefix_tokens
        compared_BN = mask_scores(scores[:, P:, 0], None if mask is None else mask[:, P:])
        # in ascending order, so that a block gets tokens in their order, and all tokens unchanged
        index_BL = stable_topk(compared_BN, self.count(N - P)).sort(-1).values + P
        if self.gate == "one":
            gate_BL = torch.ones_like(index_BL, dtype=scores.dtype)
        else:
            gate_BL = 2 * scores[..., 0].gather(1, index_BL).sigmoid()
        if P:
            first = torch.arange(P, device=scores.device).expand(B, P)
            index_BL = torch.cat([first, index_BL], 1)
            gate_BL = torch.cat([torch.ones_like(first, dtype=gate_BL.dtype), gate_BL], 1)
        if mask is not None:  # an image with more padding than it skips has empty places
            used = mask.gather(1, index_BL)
            index_BL, gate_BL = index_BL.where(used, UNASSIGNED), gate_BL.where(used, 0)
        index, gate = index_BL.unsqueeze(1), gate_BL.unsqueeze(1)
        may_drop = mask is not None
        return Routing(unit, scores, index, gate, "expert", grid=grid, may_drop=may_drop, unit_mask=mask)

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else ""
        return f"{self.in_channels}, keep={self.keep}, gate={self.gate!r}{prefix}"
