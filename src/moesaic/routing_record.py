"""The ``Routing`` record: what a router chose, and all that the rest of the library knows of it.

Routers return it, backends run it, metrics, losses and pictures read it. It sits below every
room of the house so that each of them may import it.

Shapes are named by suffix letters, one legend for the whole project:

    T trials    B batch     N units (patches)         D dimension of a unit    E experts
    L patches per expert    K experts per unit        S slots per expert       M rows of a GEMM
    J hidden neurons of an expert    C channels in    O channels out    H W map    p patch size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.checks import check_choice

__all__ = ["UNASSIGNED", "Chooser", "Routing", "Unit"]

Unit = Literal["patch", "sample", "channel"]
Chooser = Literal["expert", "unit", "soft"]

UNASSIGNED = -1
"""The index of a place that went to nobody: a dropped unit, or padding of a ragged choice."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Who works on what, for one batch.

    ``chooser`` says how to read the compact fields:

    - ``"expert"``: expert e of image b takes the units ``index[b, e]`` (B, E, L)
    - ``"unit"``: unit n of image b goes to the experts ``index[b, n]`` (B, N, K)
    - ``"soft"``: nothing is chosen and ``index`` is None; slot s of expert e receives the convex
      mixture of units ``dispatch[b, :, e, s]``, and unit n receives back its mixture of slots
      ``gate[b, n]`` (B, N, E, S)

    An index of -1 (``UNASSIGNED``) marks a place that is not used; its gate is 0. No expert may hold
    the same unit twice.

    >>> import torch
    >>> scores = torch.tensor([[[3.0, 0.0], [1.0, 2.0], [0.0, 5.0]]])            # one image, N=3, E=2
    >>> routing = Routing("patch", scores, torch.tensor([[[0], [2]]]), torch.ones(1, 2, 1), "expert", grid=(1, 3))
    >>> routing.mask[0].int().tolist()                                           # patch 1 went to nobody
    [[1, 0], [0, 0], [0, 1]]
    >>> routing.load.tolist()
    [1, 1]
    """

    unit: Unit
    scores: Tensor
    """(B, N, E), or (B, N, E, S) where the router is soft; at least float32, before any noise."""
    index: Tensor | None
    gate: Tensor
    chooser: Chooser
    grid: tuple[int, int] | None = None
    """Rows and columns of patches on the map, for units that have a place; N = rows · columns."""
    dispatch: Tensor | None = None
    may_drop: bool = True
    """Whether ``index`` may hold -1. A router that never leaves a place unused says so and saves a mask."""

    def __post_init__(self) -> None:
        check_choice("Routing", "unit", self.unit, get_args(Unit))
        check_choice("Routing", "chooser", self.chooser, get_args(Chooser))

    @property
    def batch(self) -> int:
        return self.scores.shape[0]

    @property
    def units(self) -> int:
        """N, units in an image."""
        return self.scores.shape[1]

    @property
    def experts(self) -> int:
        return self.scores.shape[2]

    @property
    def used(self) -> Tensor:
        """Which places of ``index`` are used, in its shape."""
        return self._index != UNASSIGNED

    @property
    def weights(self) -> Tensor:
        """(B, N, E): the gate with which an expert's work on a unit counts, 0 where it does none."""
        return self.gate.sum(-1) if self.index is None else self._spread(self.gate)

    @property
    def mask(self) -> Tensor:
        """(B, N, E): whether the expert works on the unit."""
        if self.index is None:
            return torch.ones_like(self.weights, dtype=torch.bool)
        return self._spread(self.used)

    @property
    def load(self) -> Tensor:
        """(E,): how many units of the batch each expert works on; soft: their total weight."""
        return self.weights.sum((0, 1)) if self.index is None else self.mask.sum((0, 1))

    def detach(self) -> Routing:
        """The same record cut from the autograd graph.

        >>> import torch
        >>> scores = torch.zeros(1, 2, 1, requires_grad=True)
        >>> Routing("patch", scores, torch.tensor([[[0]]]), scores[:, :1], "expert").detach().gate.requires_grad
        False
        """
        return replace(
            self,
            scores=self.scores.detach(),
            gate=self.gate.detach(),
            dispatch=None if self.dispatch is None else self.dispatch.detach(),
        )

    @property
    def _index(self) -> Tensor:
        if self.index is None:
            raise ValueError("Routing: a soft routing has no index: every unit goes everywhere; read `weights`")
        return self.index

    def _spread(self, values: Tensor) -> Tensor:
        """Values in the shape of ``index``, laid out over (B, N, E)."""
        length = self.units if self.chooser == "expert" else self.experts
        rows, place = self._index.shape[:2], self._index
        if self.may_drop:
            # one column more takes what belongs to nobody
            place = torch.where(self.used, place, length)
            spread = values.new_zeros(*rows, length + 1).scatter(2, place, values)[..., :length]
        else:
            spread = values.new_zeros(*rows, length).scatter(2, place, values)
        return spread.transpose(1, 2) if self.chooser == "expert" else spread
