"""Routers whose gates are rescaled for experts that start with weights trained without gates.

Layers that `convert` fills with trained weights have them, so that the output has the mean of the original's while all
scores are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moesaic.routing import ExpertChoice, TokenChoice
from moesaic.routing_record import Routing, Unit

__all__ = ["RescaledExpertChoice", "RescaledTokenChoice"]


class RescaledExpertChoice(ExpertChoice):
    """Expert choice with gates rescaled to a mean of 1 over the map, for filters that were trained without gates.

    While all patches have equal scores, each of an expert's L patches has the gate N / L, for every kind of ``gate``,
    which preserves the mean output of the filters over the map. If the experts are ``summed``, the sum of their gates
    has a mean of 1.

    >>> import torch
    >>> router = RescaledExpertChoice(3, experts=4, patches_per_expert=2)
    >>> router(torch.zeros(1, 3, 4, 4)).gate[0, 0].tolist()  # two of 16 patches
    [8.0, 8.0]
    """

    def __init__(self, *args: Any, summed: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.summed = summed

    def gate_factor(self, units: int) -> float:
        L = self.count(units)
        even = {"one": 1, "softmax_selected": 1 / L, "softmax_all": 1 / units, "softmax_experts": 1 / self.experts}
        return units / (L * even[self.gate] * (self.experts if self.summed else 1))


class RescaledTokenChoice(TokenChoice):
    """Token choice with gates rescaled for experts that were trained without gates.

    While all experts have equal scores, the gates of a unit's K experts are E / K each, for every kind of ``gate``,
    which preserves the mean output of experts that are parts of a layer. If each expert is a copy of the layer and
    their outputs are ``summed``, the gates sum to 1: with ``gate="softmax_selected"`` they do so for all scores.

    >>> import torch
    >>> router = RescaledTokenChoice(3, experts=4, top_k=2, gate="softmax_all", summed=True)
    >>> router(torch.zeros(1, 3, 1, 1)).gate[0, 0].tolist()
    [0.5, 0.5]
    """

    def __init__(self, *args: Any, summed: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.summed = summed

    def choose(
        self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Routing:
        routing = super().choose(scores, unit=unit, grid=grid, mask=mask)
        even = {"one": 1, "softmax_selected": 1 / self.top_k, "softmax_all": 1 / self.experts}[self.gate]
        factor = (1 if self.summed else self.experts) / (self.top_k * even)
        return replace(routing, gate=routing.gate * factor)
