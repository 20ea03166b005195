"""How far apart patterns are (Chowdhury et al. 2023, eq. 9, Definitions D.1 to D.3, Section M), and on real data.

The paper's samples hold one of the class patterns o_1 … o_c and otherwise class-irrelevant patterns,
all of them unit vectors. δ_d is the inner product of class patterns, δ_r the largest, in size, of a
class pattern with an irrelevant one, and δ = 1/(1 − max(δ_d², δ_r²)). An irrelevant pattern q is
δ'-closer to o_a than to o_b if ⟨o_a − o_b, q⟩ > δ'. No more than l* − 1 patches of a sample are, for
δ' = (1 − δ_d)/2: these may outrank the discriminative patch, whose own value is ⟨o_a − o_b, o_a⟩ = 1 − δ_d;
all others are below it by half of that, which is the room for noise in a trained router.

Three points on the print. Section 4.2 has δ' = Θ(1 − δ_d); Definition D.3 fixes the constant 1/2, the
default of `measure_separation`. Definition D.3 counts patches that are closer to *either*
pattern; the router of class a competes only with those closer to o_a, so its own, one-sided l* is
enough for Lemma 4.1, and both are measured. And δ grows with δ_d², so patterns that point away from
each other (δ_d < 0) count as less separated in δ though their distance √(2(1 − δ_d)) is larger.
(Section 4.3.1 puts the distance of class patterns and irrelevant ones at 2√(1 − δ_r); it is
√(2(1 − δ_r)).)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.theory.closed_form_router import opponents
from moesaic.papers.engine.theory_conditions import check_patch_indices, check_samples, require

__all__ = ["Closeness", "Separation", "measure_separation", "separation"]

QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)


def separation(delta_d: float | Sequence[float], delta_r: float) -> float:
    """δ of eq. (9): 1/(1 − max(δ_d², δ_r²)); for more than two classes with δ_d of every pair (Section M).

    >>> separation(0.5, 0.1), separation([0.1, -0.6, 0.2], 0.3)
    (1.333..., 1.5625)
    >>> separation(1.0, 0.1)
    Traceback (most recent call last):
    ValueError: separation: −1 < δ_d < 1 fails: delta_d=1.0; two patterns that agree up to sign cannot be told apart
    """
    pairs = [delta_d] if isinstance(delta_d, (int, float)) else list(delta_d)
    for value in pairs:
        require(
            "separation",
            -1 < value < 1,
            "−1 < δ_d < 1",
            f"delta_d={value}",
            "two patterns that agree up to sign cannot be told apart",
        )
    require(
        "separation",
        0 <= delta_r < 1,
        "0 ≤ δ_r < 1",
        f"delta_r={delta_r}",
        "it bounds the size of an inner product of two different directions",
    )
    return 1 / (1 - max(*(value**2 for value in pairs), delta_r**2))


@dataclass(frozen=True)
class Closeness:
    """Class-irrelevant patches that are closer to one class pattern than to another; made by `measure_separation`.

    Counts are per sample. Quantiles over samples stand beside every maximum: on real data the maximum
    over a thousand samples is one odd digit.
    """

    pair: tuple[int, int]
    """Classes a and b."""
    delta_d: float
    delta_prime: float
    """(1 − δ_d)/2 by default."""
    share: tuple[float, float]
    """Of all class-irrelevant patches, the share closer to a, and the share closer to b."""
    l_star: int
    """Definition D.3: 1 + the most patches in a sample that are closer to either."""
    one_sided: tuple[int, int]
    """1 + the most patches in a sample that are closer to a, and to b: what router a, and router b, must take."""
    quantiles: dict[float, tuple[int, int, int]]
    """For a share of the samples: what (l_star, *one_sided) would be without the rest."""


@dataclass(frozen=True, eq=False)
class Separation:
    """The data model's constants, measured; made by `measure_separation`."""

    patterns: Tensor
    """(c, D) float64: the class patterns o_c, of unit norm."""
    alignment: Tensor
    """(c,): mean of ⟨o_c, x⟩ over the discriminative patches x of class c; 1 where the data model holds."""
    inner: Tensor
    """(c, c): inner products of the class patterns."""
    delta_d: float
    """The largest inner product of two class patterns (Section M)."""
    delta_r: float
    """The largest |⟨o_c, q⟩| over all classes and class-irrelevant patches."""
    delta_r_quantiles: dict[float, float]
    """For a share of the class-irrelevant patches: the largest |⟨o_c, q⟩| without the rest."""
    delta: float
    """δ of eq. (9), from the maxima; infinite where an irrelevant patch is a class pattern or two classes share one."""
    closeness: tuple[Closeness, ...]
    """For every pair of classes a < b."""

    @property
    def l_star(self) -> int:
        """The largest l* of the pairs that routers are trained in (see `closed_form_router.opponents`)."""
        trained = {tuple(sorted(pair)) for pair in enumerate(opponents(len(self.patterns)))}
        return max(close.l_star for close in self.closeness if close.pair in trained)


def measure_separation(
    patches: Tensor,
    labels: Tensor,
    discriminative: Tensor,
    *,
    patterns: Literal["mean", "nearest"] = "mean",
    closeness: float = 0.5,
) -> Separation:
    """δ_d, δ_r, δ, δ'-closeness and l* of samples (B, N, D) with labels (B,) and known places (B,).

    The data model wants unit vectors, so every patch is scaled to unit norm first (blank ones stay
    blank), and one pattern for each class. It is estimated as the "mean": the direction of the mean of
    the class's discriminative patches, as the gradient of the router points along the difference of
    these means (Lemma E.1). It is blurred where a class varies, and then lies closer to everything; "nearest"
    takes the real patch nearest to it instead. `Separation.alignment` says how well one pattern does
    for the class. ``closeness`` is δ'/(1 − δ_d).

    >>> patches = torch.eye(3)[torch.tensor([[0, 2], [2, 1]])]           # o_1, o_2 and one irrelevant pattern
    >>> found = measure_separation(patches, torch.tensor([1, 0]), torch.tensor([0, 1]))
    >>> found.delta_d, found.delta_r, found.delta, found.l_star
    (0.0, 0.0, 1.0, 1)
    """
    owner = "measure_separation"
    classes = check_samples(owner, patches, labels)
    B, N, _ = patches.shape
    check_patch_indices(owner, discriminative, B, N)
    require(owner, N >= 2, "N ≥ 2", f"N={N}", "without class-irrelevant patches there is nothing to separate")
    require(owner, closeness > 0, "δ' > 0", f"closeness={closeness}", "the paper takes 0.5")
    if patterns not in ("mean", "nearest"):
        raise ValueError(f"{owner}: patterns={patterns!r} is unknown; use 'mean' or 'nearest'")

    unit = torch.nn.functional.normalize(patches.detach().double(), dim=-1)
    own = unit.gather(1, discriminative[:, None, None].expand(B, 1, unit.shape[-1])).squeeze(1)
    o = torch.stack([_pattern(own[labels == s], patterns, s) for s in range(classes)])
    alignment = torch.stack([(own[labels == s] @ o[s]).mean() for s in range(classes)])
    inner = o @ o.T
    between = {pair: float(inner[pair]) for pair in combinations(range(classes), 2)}
    elsewhere = torch.arange(N, device=patches.device) != discriminative[:, None]
    toward = (unit @ o.T)[elsewhere].view(B, N - 1, classes)
    delta_r_quantiles = _quantiles(toward.abs().amax(-1).flatten())
    delta_r = delta_r_quantiles[1.0]
    worst = max(*(value**2 for value in between.values()), delta_r**2)
    return Separation(
        patterns=o,
        alignment=alignment,
        inner=inner,
        delta_d=max(between.values()),
        delta_r=delta_r,
        delta_r_quantiles=delta_r_quantiles,
        delta=1 / (1 - worst) if worst < 1 else math.inf,
        closeness=tuple(_closeness(toward, pair, value, closeness) for pair, value in between.items()),
    )


def _pattern(own: Tensor, kind: str, s: int) -> Tensor:
    mean = own.mean(0)
    if not mean.any():
        raise ValueError(
            f"measure_separation: the discriminative patches of class {s} average to 0; they have no pattern"
        )
    mean = mean / mean.square().sum().sqrt()
    return own[(own @ mean).argmax()] if kind == "nearest" else mean


def _closeness(toward: Tensor, pair: tuple[int, int], delta_d: float, closeness: float) -> Closeness:
    delta_prime = closeness * (1 - delta_d)
    lead = toward[..., pair[0]] - toward[..., pair[1]]
    first, second = lead > delta_prime, -lead > delta_prime
    either, a, b = (_quantiles(1 + close.sum(1)) for close in (first | second, first, second))
    return Closeness(
        pair=pair,
        delta_d=delta_d,
        delta_prime=delta_prime,
        share=(first.double().mean().item(), second.double().mean().item()),
        l_star=int(either[1.0]),
        one_sided=(int(a[1.0]), int(b[1.0])),
        quantiles={q: (int(either[q]), int(a[q]), int(b[q])) for q in QUANTILES},
    )


def _quantiles(values: Tensor) -> dict[float, float]:
    """For each share, the smallest value that this share of the values does not exceed."""
    ordered = values.double().sort().values
    # 0.95 · 20 is 19.000000000000004 in floating point
    return {q: ordered[math.ceil(q * len(ordered) - 1e-9) - 1].item() for q in QUANTILES}
