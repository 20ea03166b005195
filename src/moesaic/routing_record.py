"""The ``Routing`` record: the assignment of units to experts that a router returns.

Backends execute it; losses, metrics and figures read it. The module imports no other package, so that all of them can
import it.

Shapes are named by suffix letters, one legend for the whole project:

    T trials    B batch     N units (patches, tokens) D dimension of a unit    E experts
    L patches per expert    K experts per unit        S slots per expert       M rows of a GEMM
    J hidden neurons of an expert    C channels in    O channels out    H W map    p patch size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice

__all__ = ["UNASSIGNED", "Chooser", "Routing", "Unit"]

Unit = Literal["patch", "token", "sample", "channel"]
Chooser = Literal["expert", "unit", "soft"]
_UNITS, _CHOOSERS = get_args(Unit), get_args(Chooser)

UNASSIGNED = -1
"""Index of an unassigned place: a dropped unit, or padding of a ragged choice."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Assignment of units to experts for one batch.

    ``chooser`` determines the meaning of ``index`` and ``gate``:

    - ``"expert"``: expert e takes the units ``index[b, e]`` of image b (B, E, L)
    - ``"unit"``: unit n of image b goes to the experts ``index[b, n]`` (B, N, K)
    - ``"soft"``: ``index`` is None; the input of slot s of expert e is the convex combination of units with weights
      ``dispatch[b, :, e, s]``, and the output for unit n is the combination of slots with weights ``gate[b, n]``
      (B, N, E, S)

    An index of -1 (``UNASSIGNED``) marks an unassigned place; its gate is 0. An expert has a unit at most once.

    >>> import torch
    >>> scores = torch.tensor([[[3.0, 0.0], [1.0, 2.0], [0.0, 5.0]]])            # one image, N=3, E=2
    >>> routing = Routing("patch", scores, torch.tensor([[[0], [2]]]), torch.ones(1, 2, 1), "expert", grid=(1, 3))
    >>> routing.mask[0].int().tolist()                                           # patch 1 is unassigned
    [[1, 0], [0, 0], [0, 1]]
    >>> routing.load.tolist()
    [1, 1]
    """

    unit: Unit
    scores: Tensor
    """(B, N, E), or (B, N, E, S) for a soft router; float32 at least, without noise."""
    index: Tensor | None
    gate: Tensor
    chooser: Chooser
    grid: tuple[int, int] | None = None
    """Rows and columns of units on the map, N = prefix + rows · columns; None for units without a position."""
    dispatch: Tensor | None = None
    may_drop: bool = True
    """Whether ``index`` may contain -1. False saves computing a mask."""
    extent: tuple[float, float] | None = None
    """Rows and columns of patches that the map fills if it was padded, as (3.75, 3.75) of a 4×4 grid; None: all."""
    prefix: int = 0
    """Leading units without a position on the grid: class and register tokens."""
    unit_mask: Tensor | None = None
    """(B, N): False for padding, which no expert gets and which does not count in losses; None: no padding."""

    def __post_init__(self) -> None:
        check_choice("Routing", "unit", self.unit, _UNITS)
        check_choice("Routing", "chooser", self.chooser, _CHOOSERS)

    def __repr__(self) -> str:
        """Shapes rather than tensors, which would fill the screen.

        >>> Routing("patch", torch.zeros(5, 4, 2), torch.zeros(5, 2, 1).long(), torch.ones(5, 2, 1), "expert", (2, 2))
        Routing(unit='patch', chooser='expert', scores=(5, 4, 2), index=(5, 2, 1), gate=(5, 2, 1), grid=(2, 2))
        """
        parts = [f"unit={self.unit!r}", f"chooser={self.chooser!r}"]
        for name in ("scores", "index", "gate", "dispatch", "unit_mask"):
            tensor: Tensor | None = getattr(self, name)
            parts += [] if tensor is None else [f"{name}={tuple(tensor.shape)}"]
        for name, absent in (("grid", None), ("extent", None), ("prefix", 0)):
            value = getattr(self, name)
            parts += [] if value == absent else [f"{name}={value}"]
        return f"Routing({', '.join(parts)})"

    @property
    def batch(self) -> int:
        return self.scores.shape[0]

    @property
    def units(self) -> int:
        """Number of units N per image."""
        return self.scores.shape[1]

    @property
    def experts(self) -> int:
        return self.scores.shape[2]

    @property
    def filled(self) -> tuple[float, float] | None:
        """Rows and columns of patches that the map fills; None for units without a position."""
        return self.grid if self.extent is None else self.extent

    @property
    def used(self) -> Tensor:
        """Whether each place of ``index`` is assigned, in the shape of ``index``."""
        return self._index != UNASSIGNED

    @property
    def weights(self) -> Tensor:
        """(B, N, E): the gate of each unit and expert, 0 where the unit is not assigned to the expert."""
        return self.gate.sum(-1) if self.index is None else self._scatter(self.gate)

    @property
    def mask(self) -> Tensor:
        """(B, N, E): whether the unit is assigned to the expert."""
        if self.index is None:
            return torch.ones_like(self.weights, dtype=torch.bool)
        return self._scatter(self.used)

    @property
    def load(self) -> Tensor:
        """(E,): number of units of the batch assigned to each expert; their total weight if the routing is soft."""
        return self.weights.sum((0, 1)) if self.index is None else self.mask.sum((0, 1))

    def without_prefix(self) -> Routing:
        """Returns the record of the units on the grid alone; what experts took of the prefix becomes unassigned.

        >>> import torch
        >>> scores, index = torch.zeros(1, 5, 2), torch.tensor([[[0, 3], [4, 1]]])                # a class token, 2×2
        >>> routing = Routing("token", scores, index, torch.ones(1, 2, 2), "expert", grid=(2, 2), prefix=1)
        >>> routing.without_prefix().index.tolist(), routing.without_prefix().units
        ([[[-1, 2], [3, 0]]], 4)
        """
        if not self.prefix:
            return self
        index, gate, dispatch, unit_mask = self.index, self.gate, self.dispatch, self.unit_mask
        if self.chooser == "expert":
            index = (self._index - self.prefix).clamp_min(UNASSIGNED)
            gate = gate.where(index != UNASSIGNED, 0)
        else:
            index = None if index is None else index[:, self.prefix :]
            gate = gate[:, self.prefix :]
            dispatch = None if dispatch is None else dispatch[:, self.prefix :]
        may_drop = self.may_drop or self.chooser == "expert"
        return replace(
            self,
            scores=self.scores[:, self.prefix :],
            index=index,
            gate=gate,
            dispatch=dispatch,
            may_drop=may_drop,
            prefix=0,
            unit_mask=None if unit_mask is None else unit_mask[:, self.prefix :],
        )

    def detach(self) -> Routing:
        """Returns the record detached from the autograd graph.

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
            raise ValueError("Routing: a soft routing has no index, as all units go to all experts; read `weights`")
        return self.index

    def _scatter(self, values: Tensor) -> Tensor:
        """Scatters values in the shape of ``index`` to (B, N, E)."""
        length = self.units if self.chooser == "expert" else self.experts
        rows, place = self._index.shape[:2], self._index
        if self.may_drop:
            # unassigned places go to one more column, which is dropped
            place = torch.where(self.used, place, length)
            dense = values.new_zeros(*rows, length + 1).scatter(2, place, values)[..., :length]
        else:
            dense = values.new_zeros(*rows, length).scatter(2, place, values)
        return dense.transpose(1, 2) if self.chooser == "expert" else dense
