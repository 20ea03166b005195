"""Noise makes routing smooth (Chen et al. 2022, Lemmas 5.1, C.1 to C.4, Remark C.2, eq. 5.1).

A sample goes to the expert with the largest h_m + r_m. Without the noise r, the least change of the
scores h can change the expert; with it, the probabilities p_m of the experts change smoothly.

**The probabilities, exactly**, for noise from Unif[0, 1]. Expert m wins with r_m if all others lie below:

    p_m = ∫ over x from h_m to h_m + 1 of Π_{j≠m} clip(x − h_j, 0, 1) dx,        x = h_m + r_m.

Below the largest score the product is 0, and above it no factor is. What remains is a polynomial between
any two neighbours among the h_j + 1, of degree M − 1 at most, which Gauss's quadrature with ⌈M/2⌉ points
integrates without error but for rounding.

**The bound.** Print: if the density of the noise is at most κ, then |p_m − p̂_m| ≤ κ M² δ, where
δ = max_j |h_j − ĥ_j|. But M² is not needed:

    |p_m − p̂_m| ≤ 2 κ δ.

Fix all noise but r_m. Expert m wins if r_m > θ = max_{j≠m}(h_j + r_j) − h_m. The maximum moves by at most δ
and h_m too, so θ moves by at most 2δ; and r_m falls between the old and the new θ with probability at most
κ·2δ. The mean over the other noise keeps the inequality. ∎

**It is the best constant.** From h = 0, where training starts, to ĥ = δ for expert m and −δ for all others
(`steepest_scores`), Unif[0, 1] gives

    p̂_m − p_m = ∫ over u from 0 to 2δ of P(max_{j≠m} r_j > u) du = 2δ − (2δ)^M / M,     δ ≤ 1/2,

that is 2 − 2(2δ)^(M−1)/M times δ: as near to 2 as you like with small δ, for any M ≥ 2. The same step
with two scores exchanged (Lemma C.3) gives |p_m − p_m'| ≤ 2 κ |h_m − h_m'|, in place of M².
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = [
    "expected_load",
    "noise_density",
    "printed_smoothing_bound",
    "routing_probabilities",
    "smoothing_bound",
    "steepest_scores",
    "unreachable",
]

Distance = TypeVar("Distance", float, Tensor)

_BLOCK = 1 << 22  # numbers at once


def routing_probabilities(scores: Tensor, *, width: float = 1.0) -> Tensor:
    """(…, M) float64: P(argmax_j h_j + r_j = m) for scores (…, M) and noise from Unif[0, width], exactly.

    >>> routing_probabilities(torch.tensor([0.0, 0.0, 0.0, 0.0])).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> routing_probabilities(torch.tensor([0.5, 0.0])).tolist()                # 1 − (1 − 0.5)²/2
    [0.875, 0.125]
    """
    _check_scores("routing_probabilities", scores)
    require("routing_probabilities", 0 < width < math.inf, "0 < width < ∞", f"width={width}", "it is the noise's range")
    M = scores.shape[-1]
    # only differences count, and those beyond 1 do not: expert m is out, and its factor is 1
    below = ((scores.double() - scores.double().amax(-1, keepdim=True)) / width).clamp_(min=-1).view(-1, M)
    points = -(-M // 2)
    each = max(1, _BLOCK // (M * M * points))
    parts = [_integrate(some, points) for some in torch.split(below, each)]
    return torch.cat(parts).view(scores.shape) if parts else scores.double()


def expected_load(scores: Tensor, *, width: float = 1.0) -> Tensor:
    """(…, M) float64: eq. 5.1, the samples that each expert can expect of scores (…, B, M).

    >>> expected_load(torch.tensor([[0.0, 0.0], [3.0, 0.0]])).tolist()
    [1.5, 0.5]
    """
    if scores.ndim < 2:
        raise ValueError(f"expected_load: scores are {tuple(scores.shape)}; give (…, B, M): B samples, M experts")
    return routing_probabilities(scores, width=width).sum(-2)


def unreachable(scores: Tensor, *, width: float = 1.0) -> Tensor:
    """(…, M) bool: experts that Lemma C.4 rules out, as h_m ≤ max_j h_j − width; their probability is 0.

    >>> unreachable(torch.tensor([2.0, 1.0, 1.5])).tolist()
    [False, True, False]
    """
    _check_scores("unreachable", scores)
    return scores <= scores.amax(-1, keepdim=True) - width


def noise_density(noise: Literal["uniform", "gaussian"], scale: float = 1.0) -> float:
    """κ, the largest density (Remark C.2): of Unif[0, scale], or of N(0, scale²).

    >>> noise_density("uniform"), round(noise_density("gaussian", 0.5), 4)
    (1.0, 0.7979)
    """
    require("noise_density", 0 < scale < math.inf, "0 < scale < ∞", f"scale={scale}", "without noise nothing is smooth")
    if noise not in ("uniform", "gaussian"):
        raise ValueError(f"noise_density: noise={noise!r} is unknown; use 'uniform' or 'gaussian'")
    return 1 / scale if noise == "uniform" else 1 / (scale * math.sqrt(2 * math.pi))


def smoothing_bound(distance: Distance, *, density: float = 1.0) -> Distance:
    """2 κ δ: no expert's probability changes by more when no score changes by more than ``distance``.

    >>> smoothing_bound(0.01)
    0.02
    """
    return 2 * density * distance


def printed_smoothing_bound(distance: Distance, experts: int, *, density: float = 1.0) -> Distance:
    """κ M² δ: the same as Lemma 5.1 prints it.

    >>> printed_smoothing_bound(0.01, experts=8)
    0.64
    """
    check_counts("printed_smoothing_bound", experts=experts)
    return density * experts**2 * distance


def steepest_scores(experts: int, distance: float) -> tuple[Tensor, Tensor]:
    """Scores h and ĥ (M,) float64, δ = ``distance`` apart, that change p_0 by (2 − 2(2δ)^(M−1)/M)·δ.

    >>> h, moved = steepest_scores(experts=2, distance=0.001)
    >>> round((routing_probabilities(moved) - routing_probabilities(h))[0].item() / 0.001, 6)
    1.998
    """
    check_counts("steepest_scores", experts=experts)
    require("steepest_scores", experts >= 2, "M ≥ 2", f"experts={experts}", "a single expert is always chosen")
    require("steepest_scores", 0 < distance <= 0.5, "0 < δ ≤ 1/2", f"distance={distance}", "beyond, nothing changes")
    moved = torch.full((experts,), -float(distance), dtype=torch.float64)
    moved[0] = distance
    return torch.zeros_like(moved), moved


def _integrate(below: Tensor, points: int) -> Tensor:
    """(B, M): the probabilities for scores ``below`` the largest one, from −1 to 0."""
    node, weight = (torch.from_numpy(part).to(below) for part in np.polynomial.legendre.leggauss(points))
    ends = (below + 1).sort(dim=-1).values  # (B, M), from 0 to 1
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=-1)
    half = (ends - starts) / 2
    x = (starts + half)[..., None] + half[..., None] * node  # (B, pieces, points)
    factor = (x[..., None] - below[:, None, None, :]).clamp_(max=1)  # (B, pieces, points, M)
    # the product of all factors but one, from both sides: nothing is divided by
    one = torch.ones_like(factor[..., :1])
    before = torch.cat([one, factor[..., :-1]], dim=-1).cumprod(-1)
    after = torch.cat([one, factor[..., 1:].flip(-1)], dim=-1).cumprod(-1).flip(-1)
    wins = x[..., None] < below[:, None, None, :] + 1  # r_m ≤ 1
    return torch.einsum("bpqm,bp,q->bm", before * after * wins, half, weight)


def _check_scores(owner: str, scores: Tensor) -> None:
    if not scores.ndim or not scores.shape[-1] or not scores.is_floating_point():
        raise ValueError(
            f"{owner}: scores are {scores.dtype} of shape {tuple(scores.shape)}; give floating-point (…, M), "
            "one for each expert"
        )
    if not scores.isfinite().all():
        raise ValueError(f"{owner}: scores hold NaN or ∞; give finite ones")
