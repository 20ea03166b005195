"""Whether a hyperplane can tell the classes apart (Chowdhury et al. 2023, Section 4.2 and Lemma K.1).

Lemma K.1 says that the data model is not linearly separable as long as l* = Ω(1). As printed that
cannot stand: l* ≥ 1 by definition, so it would hold for all data, orthogonal patterns among them, which
a hyperplane does separate. The proof writes every part of the hyperplane in the span of o_1 and o_2,
which need not hold, and where it needs a lower bound it has an upper one, O(l*√((1−δ_d)/n)).

What does hold has a short proof. Let the discriminative patch lie at any of n ≥ 2 places and the others
hold any class-irrelevant patterns q of a finite (or compact) set Q. Then

    a hyperplane separates the classes  ⟺  o_1 − o_2 ∉ (n − 1) · (conv Q − conv Q).

For a hyperplane h = (h_1, …, h_n), let W_i be the difference of the largest and the smallest ⟨h_i, q⟩.
Samples with their discriminative patch at place i are separated at the worst choice of the others only
if ⟨h_i, o_1 − o_2⟩ > Σ_{j≠i} W_j. The sum over i says that some h_i has ⟨h_i, o_1 − o_2⟩ > (n − 1)·W_i;
and one such vector, put at all places, separates everything. Such a vector exists if and only if
o_1 − o_2 lies outside the convex set (n − 1)·(conv Q − conv Q), whose support function is (n − 1)·W.

So l* does not decide:

- a single irrelevant pattern, as close to o_1 as you like, leaves the data separable with l* = n; and so
  do d or fewer patterns in general position. Nor is any finite *training set* of fewer than nd + 2 samples
  in general position ever inseparable: one that is separated says nothing on the distribution
- patterns q, q' with q − q' = (o_1 − o_2)/2 make it inseparable for n ≥ 3, with l* = 1
  (`inseparable_samples`)
- for δ_r = 0 it is always separable, by h_i = o_1 − o_2 for all i

`linearly_separable` decides on samples, with a certificate either way; `patterns_separable` on the
distribution with patterns o_1, o_2 and Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = ["InseparableSamples", "Separability", "inseparable_samples", "linearly_separable", "patterns_separable"]


@dataclass(frozen=True, eq=False)
class Separability:
    """The verdict with its proof; made by `linearly_separable`.

    With a_i = ±(x_i, 1) / ‖(x_i, 1)‖, plus for class 1 and minus for class 0, a hyperplane z separates the
    classes if ⟨z, a_i⟩ > 0 for all i. If a convex combination of the a_i is 0, none does (Gordan's
    theorem). More generally, no hyperplane of unit norm has ⟨z, a_i⟩ above ‖Σ λ_i a_i‖ for all i: the
    largest margin lies between ``margin`` and ``residual``.
    """

    separable: bool
    hyperplane: Tensor
    """(D + 1,): normal and bias of unit norm: class 1 where ⟨normal, x⟩ + bias > 0. Zeros where none was found."""
    margin: float
    """The smallest ⟨hyperplane, a_i⟩: positive proves that the classes are separable."""
    weights: Tensor
    """(B,): λ, not negative, with sum 1."""
    residual: float
    """‖Σ λ_i a_i‖: zero, up to rounding, proves that they are not."""


def linearly_separable(
    samples: Tensor, labels: Tensor, *, tolerance: float = 1e-9, max_steps: int = 10_000
) -> Separability:
    """Whether a hyperplane with bias separates samples (B, …) of classes 0 and 1, and a proof.

    Looks for the point of least norm in the convex hull of the a_i by Wolfe's method (1976), which
    ends after finitely many steps: that point is 0, or it is a separating hyperplane. Stops at the first
    of the two; a margin is therefore a proof, not the largest one. ``tolerance`` is how small a residual
    proves the one and how large a margin the other, in the presence of rounding.

    >>> square = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    >>> linearly_separable(square, torch.tensor([0, 0, 1, 1])).separable             # exclusive or
    False
    >>> linearly_separable(square, torch.tensor([0, 1, 1, 1])).separable             # or
    True
    """
    full = _signed_rows(samples, labels)
    # fewer samples than dimensions: the same inner products in as many dimensions as there are samples
    basis, rows = _compact(full)
    hull = _Hull(rows)
    for _ in range(max_steps):
        point = hull.point
        norm = _length(point)
        if norm <= tolerance:
            residual = _length(hull.all_weights @ full)
            return Separability(False, torch.zeros_like(full[0]), 0.0, hull.all_weights, residual)
        lead = rows @ point
        worst = lead.argmin()
        if lead[worst] > tolerance * norm:
            hyperplane = (point if basis is None else basis @ point) / norm
            margin = float((full @ hyperplane).min())
            return Separability(True, hyperplane, margin, hull.all_weights, norm)
        if (hull.members == worst).any():
            break
        hull.add(worst)
    raise ArithmeticError(
        f"linearly_separable: undecided; no hyperplane with a margin above tolerance={tolerance:.2g} was found, and "
        f"none has more than {_length(hull.point):.2g}; give more than max_steps={max_steps}, or count so little as "
        "none with a larger tolerance"
    )


def patterns_separable(patterns: Tensor, irrelevant: Tensor, places: int, *, tolerance: float = 1e-9) -> Separability:
    """Whether the distribution with class patterns (2, D) and irrelevant patterns (P, D) is linearly separable.

    All samples with one class pattern at any of ``places`` places and any irrelevant patterns at the others
    are separable if and only if the 2P points o_1 + (n − 1)q and o_0 + (n − 1)q are: see the module for
    the proof. The certificate is about these points, those of class 1 first.

    Where a class has many patterns, any average of them will do to show that the data is *not*
    separable, as a hyperplane that separates them all separates their averages.

    >>> o = torch.eye(3)[:2]
    >>> patterns_separable(o, torch.eye(3)[2:], places=16).separable                 # orthogonal
    True
    """
    check_counts("patterns_separable", places=places)
    require("patterns_separable", places >= 2, "n ≥ 2", f"places={places}", "one place leaves no irrelevant patterns")
    if patterns.ndim != 2 or irrelevant.ndim != 2 or len(patterns) != 2 or not len(irrelevant):
        raise ValueError(
            f"patterns_separable: patterns are {tuple(patterns.shape)}, irrelevant ones {tuple(irrelevant.shape)}; "
            "give (2, D) and (P, D)"
        )
    others = (places - 1) * irrelevant.double()
    points = torch.cat([patterns[1].double() + others, patterns[0].double() + others])
    labels = torch.arange(2).flip(0).repeat_interleave(len(irrelevant))
    return linearly_separable(points, labels, tolerance=tolerance)


@dataclass(frozen=True, eq=False)
class InseparableSamples:
    """Samples of the data model that no hyperplane separates; made by `inseparable_samples`."""

    patches: Tensor
    """(2n, n, d) float64."""
    labels: Tensor
    """(2n,): n of class 1, then n of class 0. The two sums of samples are equal."""
    discriminative: Tensor
    """(2n,)."""
    patterns: Tensor
    """(2, d): o_0 and o_1 (the paper's o_2 and o_1)."""
    irrelevant: Tensor
    """(3, d): q with ⟨o_1 − o_0, q⟩ = (1 − δ_d)/copies, q' with minus that, and a filler orthogonal to o_1 and o_0."""
    delta_r: float
    """(1 − δ_d)/(2·copies)."""


def inseparable_samples(n: int, d: int, *, delta_d: float = 0.0, copies: int = 1) -> InseparableSamples:
    """2n samples of the data model whose classes have the same sum, so that no hyperplane separates them.

    Take irrelevant patterns with q − q' = (o_1 − o_0)/copies, and at every place j one sample of class 1
    with o_1 there and ``copies`` times q' on the next places, and one of class 0 with o_0 and q instead;
    fillers elsewhere. Summed over j, every place holds o_1 + copies·q' + fillers in one class and
    o_0 + copies·q + fillers in the other, and these are equal.

    With ``copies`` = 1, every sample has one δ'-closer patch, so l* = 2. With more, there is none at all:
    l* = 1, and the classes are inseparable all the same.

    >>> made = inseparable_samples(4, 3, delta_d=0.5)
    >>> bool((made.patches[:4].sum(0) - made.patches[4:].sum(0)).abs().max() < 1e-12)
    True
    """
    check_counts("inseparable_samples", n=n, d=d, copies=copies)
    require("inseparable_samples", copies <= n - 1, "copies ≤ n − 1", f"copies={copies}, n={n}", "use fewer copies")
    require("inseparable_samples", d >= 3, "d ≥ 3", f"d={d}", "o_1, o_0 and the fillers need three dimensions")
    require("inseparable_samples", -1 < delta_d < 1, "−1 < δ_d < 1", f"delta_d={delta_d}", "patterns must differ")
    o = torch.zeros(2, d, dtype=torch.float64)
    o[0, 0], o[0, 1], o[1, 0] = delta_d, math.sqrt(1 - delta_d**2), 1
    filler = torch.zeros(d, dtype=torch.float64)
    filler[2] = 1
    half = (o[1] - o[0]) / (2 * copies)
    rest = math.sqrt(1 - (1 - delta_d) / (2 * copies**2)) * filler
    irrelevant = torch.stack([rest + half, rest - half, filler])

    place = torch.arange(n)
    behind = (place - place[:, None]) % n  # row j: how far each place lies behind j
    kind = torch.where(behind <= copies, 0, 2)
    patches = torch.cat([irrelevant[kind + (kind == 0)], irrelevant[kind]])
    labels = torch.arange(2).flip(0).repeat_interleave(n)
    discriminative = place.repeat(2)
    patches[torch.arange(2 * n), discriminative] = o[labels]
    return InseparableSamples(patches, labels, discriminative, o, irrelevant, (1 - delta_d) / (2 * copies))


def _signed_rows(samples: Tensor, labels: Tensor) -> Tensor:
    """(B, D + 1): the a_i."""
    if samples.ndim < 2 or not len(samples) or labels.shape != (len(samples),):
        raise ValueError(
            f"linearly_separable: samples are {tuple(samples.shape)}, labels {tuple(labels.shape)}; "
            "give (B, …) and (B,)"
        )
    classes = {int(label) for label in labels}
    if classes != {0, 1}:
        raise ValueError(f"linearly_separable: labels are {sorted(classes)}; give samples of both classes, 0 and 1")
    flat = samples.detach().cpu().double().flatten(1)
    if not flat.isfinite().all():
        raise ValueError("linearly_separable: samples hold NaN or infinity; drop them first")
    extended = torch.cat([flat, torch.ones(len(flat), 1, dtype=torch.float64)], dim=1)
    sign = torch.where(labels.cpu() == 1, 1.0, -1.0).double()
    return torch.nn.functional.normalize(extended, dim=1) * sign[:, None]


def _length(vector: Tensor) -> float:
    return math.sqrt(float(vector @ vector))


def _compact(rows: Tensor) -> tuple[Tensor | None, Tensor]:
    """A basis of the rows' span and the rows in it, where there are fewer rows than columns."""
    if len(rows) >= rows.shape[1]:
        return None, rows
    basis, coordinates = cast("tuple[Tensor, Tensor]", torch.linalg.qr(rows.T))
    return basis, coordinates.T.contiguous()


class _Hull:
    """A few of the rows, and the point of least norm in their convex hull: what Wolfe's method carries along."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.members = torch.tensor([0])
        self.weights = torch.ones(1, dtype=torch.float64)
        self.gram = (rows[:1] @ rows[:1].T) + 1

    @property
    def point(self) -> Tensor:
        return self.weights @ self.rows[self.members]

    @property
    def all_weights(self) -> Tensor:
        weights = torch.zeros(len(self.rows), dtype=torch.float64)
        weights[self.members] = self.weights
        return weights

    def add(self, row: Tensor) -> None:
        """Let a row in, and drop others until the nearest point of the affine hull lies in the convex hull."""
        self.members = torch.cat([self.members, row[None]])
        self.weights = torch.cat([self.weights, torch.zeros(1, dtype=torch.float64)])
        border = self.rows[self.members] @ self.rows[row] + 1
        self.gram = torch.cat([torch.cat([self.gram, border[None, :-1]]), border[:, None]], dim=1)
        while True:
            affine = self._affine_weights()
            falling = affine <= 1e-12
            if not falling.any():
                self.weights = affine
                return
            fall = (self.weights - affine).clamp(min=1e-300)
            ratio = torch.where(falling, self.weights / fall, 1.0).clamp(max=1)
            moved = self.weights + ratio.min() * (affine - self.weights)
            keep = moved > 1e-12
            keep[ratio.argmin()] = False  # rounding must not keep the row that stopped the move
            self.members, self.gram = self.members[keep], self.gram[keep][:, keep]
            self.weights = moved[keep] / moved[keep].sum()

    def _affine_weights(self) -> Tensor:
        """The weights, with sum 1 and of any sign, of least norm: (Gram + 1) u = 1, scaled."""
        ones = torch.ones(len(self.gram), 1, dtype=torch.float64)
        factor, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(self.gram))
        if failed:  # rows that depend on each other
            solved = cast("Tensor", torch.linalg.lstsq(self.gram, ones)[0])
        else:
            solved = torch.cholesky_solve(ones, factor)
        return (solved / solved.sum())[:, 0]
