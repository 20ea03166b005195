"""What one network can do that adds up its patches (Chen et al. 2022, Theorem 4.1), and one that does it.

Data are those of Definition 3.1: a sample holds y·α·v_k, β·c_k, ε·γ·v_k' and noise. A classifier is
*additive* if F(x) = Σ_p f(x_p) for some function f; every two-layer CNN is, with any activation and any
width. It errs where y·F(x) ≤ 0. The theorem: if α and γ have the same distribution, it errs on 1/8.

**The bound for any α and γ.** Take a sample with ε = −y, and exchange the two clusters, with the
strengths of their features. With both labels that makes four samples (`orbit`):

    y·s·v_k,  β·c_k,  −y·t·v_k'    y = ±1: α = s and γ = t
    y·t·v_k', β·c_k', −y·s·v_k     y = ±1: α = t and γ = s

Every patch lies in as many of them with y = +1 as with y = −1, so the four y·F(x) sum to 0 whatever f
is, and at least one is not positive. The first two have the density p_α(s)·p_γ(t), the others
p_α(t)·p_γ(s). The error that cannot be avoided is the smaller of the two, for one of four:

    P(error) ≥ 1/2 · 1/4 · ∫∫ min(p_α(s) p_γ(t), p_α(t) p_γ(s)) ds dt,

where 1/2 is P(ε = −y). It is the paper's 1/8 if α and γ are distributed alike. If they are uniform on
intervals, both densities are the same where s and t lie in both intervals, and one of them is 0
elsewhere: the bound is P(α in both) · P(γ in both) / 8 (`additive_error`).

**A classifier that attains it**, for all uniform α and γ (`AdditiveClassifier`). Let f depend on the
direction of a patch, on its sign and on which intervals its strength lies in:

    f(±s·v_k) = ±a_k if s may be an α and a γ;  0 if only a γ;  ±A, with A large, if only an α
    f(β·c_k)  = b_k
    f = 0 in all other directions.

Noise lies in none of the 2K directions, with probability 1, so it adds nothing, however large σ_p is.
A sample where either strength is in one interval only has the sign of y if A and the a_k outweigh the
b_k. So has one with ε = y. What remains is ε = −y with both strengths in both intervals, where y·F(x)
is a_k − a_k' + y·b_k. Let a_1 > a_2 > … > a_K. Of the four samples of an orbit with k < k', two are right if
|b_k| < a_k − a_k', and exactly one of the others is if |b_k'| > a_k − a_k'. For all pairs at once:

    a_1 − a_k < b_k < a_k − a_(k+1),

which has solutions, as long as each gap of the a is larger than all gaps before it together. Here the
gaps are 1, 2, 4, …: a_k = 2^K − 2^(k−1) and b_k = 2^(k−1) − 1/2, and every |F| is at least 1/2.

So nothing is left open for Definition 3.1 with uniform strengths: the best additive accuracy is 87.5 %
in settings 3 and 4 and Table 7, 92.5 % in settings 1 and 2, and 91.7 % in the setting of Figure 1. Noise does
not change it, though it does change what a network of a given width finds by training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import require

__all__ = ["AdditiveClassifier", "additive_error", "orbit"]

Interval = tuple[float, float]

_SLACK = 1e-5  # of a strength, measured on patches in float32


def additive_error(alpha: Interval, gamma: Interval) -> float:
    """The least error of any F(x) = Σ_p f(x_p), for α and γ uniform on these intervals.

    A bound from below by Theorem 4.1's argument, and from above by `AdditiveClassifier`; the module
    has both proofs. An interval of no length is a strength that does not vary.

    >>> additive_error((1.0, 2.0), (1.0, 2.0))                             # the theorem: 87.5 %
    0.125
    >>> round(additive_error((0.5, 2.0), (0.5, 3.0)), 12)                  # settings 1 and 2: 92.5 %
    0.075
    """
    _check_interval("additive_error", "alpha", alpha)
    _check_interval("additive_error", "gamma", gamma)
    require("additive_error", alpha[1] < math.inf, "high < ∞", f"alpha={alpha}", "a uniform α needs an upper end")
    require("additive_error", gamma[1] < math.inf, "high < ∞", f"gamma={gamma}", "a uniform γ needs an upper end")
    both = max(alpha[0], gamma[0]), min(alpha[1], gamma[1])
    return _share(alpha, both) * _share(gamma, both) / 8


@dataclass(frozen=True, eq=False)
class AdditiveClassifier:
    """F(x) = Σ_p f(x_p) with the least error there is; the module derives it.

    Without intervals it uses no strengths, and errs on 1/8 of the data whatever α and γ are.

    >>> v, c = torch.eye(6)[:3], torch.eye(6)[3:]
    >>> best = AdditiveClassifier(v, c)
    >>> best.feature_weights.tolist(), best.centre_weights.tolist()
    ([7.0, 6.0, 4.0], [0.5, 1.5, 3.5])
    >>> best(torch.stack([-2 * v[1], c[1], 3 * v[2]])).item()               # y = −1 in cluster 1: −6 + 1.5 + 4
    -0.5
    """

    features: Tensor
    """(K, D): v_1 … v_K, orthonormal with the centres."""
    centres: Tensor
    """(K, D): c_1 … c_K."""
    alpha: Interval = (0.0, math.inf)
    """The interval of α; all positive numbers where nothing is known of it."""
    gamma: Interval = (0.0, math.inf)
    """The interval of γ."""
    tolerance: float = 0.01
    """The sine of the largest angle between a patch and a direction it is taken for."""

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.features.shape != self.centres.shape or len(self.features) < 2:
            raise ValueError(
                f"AdditiveClassifier: features are {tuple(self.features.shape)}, centres {tuple(self.centres.shape)}; "
                "give (K, D) each, of the same K ≥ 2 clusters"
            )
        K = len(self.features)
        require("AdditiveClassifier", K <= 50, "K ≤ 50", f"K={K}", "float64 does not hold 2^K − 1/2 beyond")
        basis = torch.cat([self.features, self.centres]).double()
        furthest = (basis @ basis.T - torch.eye(len(basis), device=basis.device)).abs().max().item()
        require(
            "AdditiveClassifier",
            furthest < 1e-4,
            "|<u, w> − [u = w]| < 1e-4",
            f"{furthest:.2g} for two of the features and centres",
            "they must be orthonormal",
        )
        for name, interval in (("alpha", self.alpha), ("gamma", self.gamma)):
            _check_interval("AdditiveClassifier", name, interval)
        require(
            "AdditiveClassifier",
            0 < self.tolerance < 0.7,
            "0 < tolerance < 0.7",
            f"tolerance={self.tolerance}",
            "above 1/√2 a patch may lie in two directions at once",
        )

    @property
    def feature_weights(self) -> Tensor:
        """(K,) float64: a, what a feature adds whose strength does not tell signal from noise."""
        return 2.0 ** len(self.features) - self._powers

    @property
    def centre_weights(self) -> Tensor:
        """(K,) float64: b, what a centre adds."""
        return self._powers - 0.5

    @property
    def noise_limit(self) -> float:
        """Noise patches that are taken for a signal are a smaller share than this.

        The angle θ of a Gaussian vector to a line has a density in proportion to sin(θ)^(d−2), so
        P(sin θ ≤ t) ≤ t^(d−1), whatever its variance. There are 2K lines.
        """
        K, D = self.features.shape
        return min(2 * K * self.tolerance ** (D - 1), 1.0)

    def patch_scores(self, patches: Tensor) -> Tensor:
        """f: patches (…, D) to (…) float64."""
        v, c = self.features.to(patches), self.centres.to(patches)
        length = patches.square().sum(-1, keepdim=True).sqrt()
        near = length * math.sqrt(1 - self.tolerance**2)
        along_v, along_c = patches @ v.T, patches @ c.T
        on_v = (along_v.abs() >= near) & (length > 0)
        on_c = (along_c >= near) & (length > 0)
        from_features = (on_v * along_v.sign() * self._weight(along_v.abs())).sum(-1)
        return from_features + on_c.double() @ self.centre_weights.to(patches.device)

    def __call__(self, patches: Tensor) -> Tensor:
        """F: samples (…, N, D) to (…); positive for y = +1. Never 0 on Definition 3.1's data, but for noise."""
        return self.patch_scores(patches).sum(-1)

    @property
    def _powers(self) -> Tensor:
        """(K,) float64: 1, 2, 4 and so on."""
        return 2.0 ** torch.arange(len(self.features), dtype=torch.float64, device=self.features.device)

    def _weight(self, strength: Tensor) -> Tensor:
        """(…, K) float64: |f| on the lines of the features."""
        sure = 2.0 ** (len(self.features) + 1)  # more than any a and b together
        undecided = self.feature_weights.to(strength.device).expand_as(strength)
        weight = torch.where(_within(strength, self.gamma), undecided, sure)
        return torch.where(_within(strength, self.alpha), weight, 0.0)


def orbit(
    features: Tensor,
    centres: Tensor,
    *,
    clusters: tuple[int, int],
    strengths: tuple[float, float, float],
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The four samples (4, N, D) of Theorem 4.1's proof, and their y = ±1 (4,): the y·F(x) sum to 0.

    ``clusters`` are k and k', ``strengths`` s, β and t, and ``noise`` (N − 3, D) is the same for all.

    >>> v, c = torch.eye(4)[:2], torch.eye(4)[2:]
    >>> samples, y = orbit(v, c, clusters=(0, 1), strengths=(0.7, 1.5, 2.0))
    >>> (y * AdditiveClassifier(v, c)(samples)).tolist()                           # 1/4 is wrong, and must be
    [1.5, 0.5, 0.5, -2.5]
    """
    k, other = clusters
    K = len(features)
    require(
        "orbit",
        min(clusters) >= 0 and max(clusters) < K and k != other,
        f"0 ≤ k ≠ k' < K = {K}",
        f"clusters={clusters}",
        "the feature noise comes from another cluster",
    )
    s, beta, t = strengths
    require("orbit", min(strengths) > 0, "0 < s, β, t", f"strengths={strengths}", "strengths are positive")
    rest = features.new_zeros(0, features.shape[1]) if noise is None else noise.to(features)
    y = features.new_tensor([1.0, -1.0, 1.0, -1.0])
    first, second = s * features[k], t * features[other]
    samples = [torch.cat([torch.stack([sign * first, beta * centres[k], -sign * second]), rest]) for sign in y[:2]] + [
        torch.cat([torch.stack([sign * second, beta * centres[other], -sign * first]), rest]) for sign in y[2:]
    ]
    return torch.stack(samples), y


def _share(interval: Interval, part: Interval) -> float:
    """P(a uniform number of the interval lies in the part), which is inside it, or empty."""
    if part[0] > part[1]:
        return 0.0
    return (part[1] - part[0]) / (interval[1] - interval[0]) if interval[0] < interval[1] else 1.0


def _within(strength: Tensor, interval: Interval) -> Tensor:
    return (strength >= interval[0] * (1 - _SLACK)) & (strength <= interval[1] * (1 + _SLACK))


def _check_interval(owner: str, name: str, interval: Interval) -> None:
    low, high = interval
    require(owner, low >= 0, "0 ≤ low", f"{name}={interval}", "strengths are positive")
    require(owner, low <= high, "low ≤ high", f"{name}={interval}", "exchange the ends")
