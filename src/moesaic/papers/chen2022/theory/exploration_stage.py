"""Before routers learn (Chen et al. 2022, Section 5, Definition D.3, Lemma D.4), and what Theorem 4.2 asks for.

While scores are near 0, noise alone routes, and every expert sees all clusters. With cubic experts the
features nearest to their initial filters grow fastest: expert m becomes good at the cluster

    k_m = argmax_k max_j <v_k, w_mj(0)>,        M_k = {m : k_m = k}.

The stage ends at T_1 = ⌊η⁻¹ σ_0^½⌋ steps. Then an expert is good on its own cluster and bad on the others
(Lemma 5.2), and from there the router learns, if no M_k is empty.

*Whether one is empty* needs no order of growth. Filters are Gaussian and features orthonormal, so each
expert's cluster is uniform and independent of the others', and the probability that all K clusters have
an expert is that of M balls filling K boxes (`all_groups_probability`). The paper bounds it from below
by 1 − K·exp(−M/K). For the 8 experts and 4 clusters of its experiments it is 0.62: their accuracies,
98 % and more, are better than this argument promises.

*The other conditions* are orders of growth, without constants. `sample_moe_conditions` puts them beside
numbers with every constant 1 and every logarithm as printed. **It cannot say whether the theorem covers
them**: the theorem speaks of d → ∞. It shows which are near and which are far. Two for d = 50 and M = 8:

- σ_0 ≥ d^(−1/3) = 0.27, where the released code starts with 0.0008, in the units of the definition
- the proof's router stage ends at T_2 = ⌊η⁻¹ M⁻²⌋, and T_1 ≤ T_2 asks for σ_0 ≤ M⁻⁴ = 0.00024; both together
  ask for d ≥ M¹², about 7·10¹⁰
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = [
    "GrowthCondition",
    "all_groups_probability",
    "exploration_steps",
    "initial_groups",
    "sample_moe_conditions",
]


def exploration_steps(learning_rate: float, init_std: float) -> int:
    """T_1 = ⌊η⁻¹ σ_0^½⌋, the steps of the exploration stage.

    >>> exploration_steps(learning_rate=0.001, init_std=0.04)
    200
    """
    _positive("exploration_steps", learning_rate=learning_rate, init_std=init_std)
    return math.floor(math.sqrt(init_std) / learning_rate * (1 + 1e-12))  # 200 is 200, not 199.99…


def initial_groups(weights: Tensor, features: Tensor) -> Tensor:
    """(…, E) int64: k_m of each expert with initial filters (…, E, J, D), for features (K, D).

    >>> import torch
    >>> filters = torch.tensor([[[0.1, -0.9], [0.3, 0.2]], [[0.1, 0.4], [0.0, 0.0]]])    # two experts of two
    >>> initial_groups(filters, torch.eye(2)).tolist()
    [0, 1]
    """
    if weights.ndim < 3 or features.ndim != 2 or weights.shape[-1] != features.shape[-1] or not features.numel():
        raise ValueError(
            f"initial_groups: weights are {tuple(weights.shape)}, features {tuple(features.shape)}; give (…, E, J, D) "
            "and (K, D) with the same D"
        )
    return (weights @ features.to(weights).T).amax(-2).argmax(-1)


def all_groups_probability(experts: int, clusters: int) -> float:
    """P(no M_k is empty), exactly: that ``experts`` balls thrown at random leave none of ``clusters`` boxes empty.

    >>> round(all_groups_probability(experts=8, clusters=4), 4)
    0.6229
    >>> all_groups_probability(experts=3, clusters=4)
    0.0
    """
    check_counts("all_groups_probability", experts=experts, clusters=clusters)
    # over those that are surely empty, in whole numbers: the terms cancel almost entirely
    ways = sum((-1) ** empty * math.comb(clusters, empty) * (clusters - empty) ** experts for empty in range(clusters))
    return ways / clusters**experts


@dataclass(frozen=True)
class GrowthCondition:
    """One condition of Theorem 4.2, with constants 1; made by `sample_moe_conditions`."""

    quantity: str
    """What is bounded, as the paper writes it."""
    formula: str
    """The condition as printed."""
    given: float
    low: float | None
    """What it should be at least, or None."""
    high: float | None
    """What it should be at most, or None; equal to ``low`` where the paper gives an order from both sides (Θ)."""

    @property
    def off_by(self) -> float:
        """The factor by which it is too large (above 1) or too small (below 1); 1 within the limits."""
        if self.low is not None and self.given < self.low:
            return self.given / self.low
        if self.high is not None and self.given > self.high:
            return self.given / self.high
        return 1.0


def sample_moe_conditions(
    *,
    dim: int,
    samples: int,
    clusters: int,
    experts: int,
    neurons: int,
    init_std: float,
    learning_rate: float,
    router_learning_rate: float,
) -> tuple[GrowthCondition, ...]:
    """Theorem 4.2's conditions beside the numbers given, with constants 1: orders of growth, not limits.

    ``neurons`` are J, those of one expert. The last condition is the proof's, that the exploration stage
    ends before the router's.

    >>> found = sample_moe_conditions(
    ...     dim=50, samples=16_000, clusters=4, experts=8, neurons=16,
    ...     init_std=0.01, learning_rate=0.001, router_learning_rate=0.1,
    ... )
    >>> for one in found:
    ...     print(f"{one.formula:26} {one.given:<9.3g} off by {one.off_by:.2g}")
    n = Ω(d)                   1.6e+04   off by 1
    M = Θ(K log K log log d)   8         off by 1.1
    J = Θ(log M log log d)     16        off by 5.6
    d^(−1/3) ≤ σ_0 ≤ d^(−0.01) 0.01      off by 0.037
    η = Õ(σ_0)                 0.001     off by 1
    η_r = Θ(M² η)              0.1       off by 1.6
    T_1 ≤ T_2: σ_0^½ ≤ M⁻²     0.1       off by 6.4
    """
    owner = "sample_moe_conditions"
    check_counts(owner, dim=dim, samples=samples, clusters=clusters, experts=experts, neurons=neurons)
    _positive(owner, init_std=init_std, learning_rate=learning_rate, router_learning_rate=router_learning_rate)
    require(owner, dim >= 3, "d ≥ 3", f"dim={dim}", "log log d must be positive")
    require(owner, clusters >= 2, "K ≥ 2", f"clusters={clusters}", "one cluster needs no router")
    require(owner, experts >= 2, "M ≥ 2", f"experts={experts}", "one expert needs no router")
    slow = math.log(math.log(dim))
    wide, deep = clusters * math.log(clusters) * slow, math.log(experts) * slow
    return (
        GrowthCondition("n", "n = Ω(d)", samples, dim, None),
        GrowthCondition("M", "M = Θ(K log K log log d)", experts, wide, wide),
        GrowthCondition("J", "J = Θ(log M log log d)", neurons, deep, deep),
        GrowthCondition("σ_0", "d^(−1/3) ≤ σ_0 ≤ d^(−0.01)", init_std, dim ** (-1 / 3), dim**-0.01),
        GrowthCondition("η", "η = Õ(σ_0)", learning_rate, None, init_std),
        GrowthCondition(
            "η_r", "η_r = Θ(M² η)", router_learning_rate, experts**2 * learning_rate, experts**2 * learning_rate
        ),
        GrowthCondition("T_1", "T_1 ≤ T_2: σ_0^½ ≤ M⁻²", math.sqrt(init_std), None, experts**-2),
    )


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        require(owner, 0 < value < math.inf, f"0 < {name} < ∞", f"{name}={value}", "give a positive number")
