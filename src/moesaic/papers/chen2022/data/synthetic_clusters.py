"""The distribution of Chen et al. 2022, Definition 3.1: K clusters, each with its own linear rule.

A sample has P patches in d dimensions, in random order. Three of them carry signals:

- feature signal y·α·v_k: its sign is the label y
- centre signal β·c_k: it identifies the cluster k
- feature noise ε·γ·v_k': the feature of another cluster k' ≠ k, with a random sign ε

The other P − 3 are noise from N(0, σ_p²/d · I). The pair (k, k') is uniform over the K(K − 1) pairs,
y and ε are fair coins, and α, β, γ are uniform on their intervals; all of them are independent. The
2K vectors v and c are orthonormal.

A classifier that knows k can read y from a single patch. A network that sums over patches cannot distinguish the
feature signal from the feature noise (`moesaic.papers.chen2022.theory.additive_classifiers`).

Letters: T trials, B samples, N patches (the paper's P), D dimensions (its d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.splits import Split
from moesaic.papers.engine.trial_datasets import check_draw, key_blocks

__all__ = ["ClusterData", "ClusterPatches", "ClusterSetting"]

Interval = tuple[float, float]
ClusterSetting = Literal[1, 2, 3, 4, 7, "figure 1"]

# α, γ and σ_p; β is uniform on (1, 2) in all of them, and K = 4, P = 4, d = 50
_SETTINGS: dict[ClusterSetting, tuple[Interval, Interval, float]] = {
    1: ((0.5, 2.0), (0.5, 3.0), 1.0),
    2: ((0.5, 2.0), (0.5, 3.0), 2.0),
    3: ((0.5, 2.0), (0.5, 2.0), 1.0),
    4: ((0.5, 2.0), (0.5, 2.0), 2.0),
    7: ((1.0, 2.0), (1.0, 2.0), 1.0),
    "figure 1": ((0.5, 2.0), (1.0, 2.0), 1.0),
}


@dataclass(frozen=True, eq=False)
class ClusterData:
    """T datasets of B samples with N patches each, with their latent variables."""

    patches: Tensor
    """(T, B, N, D) float32, in random order."""
    labels: Tensor
    """(T, B) int64: 1 for y = +1 and 0 for y = −1."""
    clusters: Tensor
    """(T, B) int64: k, from 0."""
    noise_clusters: Tensor
    """(T, B) int64: k' ≠ k, whose feature the feature noise carries."""
    signs: Tensor
    """(T, B) int64: ε, the sign of the feature noise, +1 or −1."""
    strengths: Tensor
    """(T, B, 3) float32: α, β, γ."""
    places: Tensor
    """(T, B, 3) int64: patch indices of the feature signal, the centre signal and the feature noise."""

    def __len__(self) -> int:
        """T, the number of trials."""
        return len(self.patches)


@dataclass(frozen=True)
class ClusterPatches:
    """Samples of P patches from K clusters; the label lies in a direction that depends on the cluster.

    The ``seed`` fixes v_1 … v_K and c_1 … c_K, and with them the distribution, which all trials share. Labels and
    clusters are random, as in the definition, so that a dataset has only about equally many of each.

    >>> source = ClusterPatches.setting(1)
    >>> source.clusters, source.patches, source.dim, source.gamma
    (4, 4, 50, (0.5, 3.0))
    >>> data = source.draw(keyed_random.keys(0, range(10)), samples=100, split="train")
    >>> data.patches.shape
    torch.Size([10, 100, 4, 50])
    >>> along = data.patches @ source.features.T                                   # (T, B, N, K)
    >>> own = along.gather(3, data.clusters[..., None, None].expand(10, 100, 4, 1))
    >>> feature = own.gather(2, data.places[..., :1, None]).flatten(1)               # y·α
    >>> torch.equal(feature > 0, data.labels == 1)
    True
    """

    clusters: int = 4
    """K, at least 2: the feature noise comes from another cluster."""
    patches: int = 4
    """P, number of patches in a sample; at least 3."""
    dim: int = 50
    """d, dimension of a patch; at least 2K."""
    alpha: Interval = (0.5, 2.0)
    """The interval of α, the strength of the feature signal."""
    beta: Interval = (1.0, 2.0)
    """The interval of β, the strength of the centre signal."""
    gamma: Interval = (0.5, 3.0)
    """The interval of γ, the strength of the feature noise."""
    sigma_p: float = 1.0
    """σ_p from 0: a noise patch has σ_p²/d as the variance of each number, and so about the norm σ_p."""
    seed: int = 0
    """Seed of the distribution."""

    def __post_init__(self) -> None:
        self._check_counts()
        for name, interval in (("alpha", self.alpha), ("beta", self.beta), ("gamma", self.gamma)):
            _check_interval(name, interval)
        if not 0 <= self.sigma_p < math.inf:
            raise ValueError(
                f"ClusterPatches: sigma_p={self.sigma_p}, but 0 ≤ sigma_p < ∞: it is a standard deviation; "
                "use 0 for noise patches that are blank"
            )

    @classmethod
    def setting(cls, which: ClusterSetting, *, seed: int = 0) -> ClusterPatches:
        """Returns a setting of the paper: 1 to 4 (Table 3), 7 (Table 7, α and γ from 1) or "figure 1".

        >>> ClusterPatches.setting(4).sigma_p
        2.0
        """
        alpha, gamma, sigma_p = _SETTINGS[check_choice("ClusterPatches", "setting", which, tuple(_SETTINGS))]
        return cls(alpha=alpha, gamma=gamma, sigma_p=sigma_p, seed=seed)

    @property
    def classes(self) -> int:
        """Two: y = −1 and y = +1."""
        return 2

    @property
    def features(self) -> Tensor:
        """(K, D) float32: v, the direction of each cluster's label."""
        return self._basis[: self.clusters].float()

    @property
    def centres(self) -> Tensor:
        """(K, D) float32: c, the direction that identifies each cluster."""
        return self._basis[self.clusters :].float()

    def draw(self, keys: Tensor, samples: int, split: Split) -> ClusterData:
        """Draws ``samples`` samples for every key (`moesaic.keyed_random`), independently of the other keys."""
        check_draw("ClusterPatches", keys, samples, split, classes=1)
        name, K = f"clusters/{split}", self.clusters
        clusters = keyed_random.integers(keys, f"{name}/clusters", K, samples)
        others = (clusters + 1 + keyed_random.integers(keys, f"{name}/noise clusters", K - 1, samples)) % K
        labels = keyed_random.integers(keys, f"{name}/labels", 2, samples)
        signs = 2 * keyed_random.integers(keys, f"{name}/signs", 2, samples) - 1
        low, high = (
            torch.tensor(ends, dtype=torch.float64, device=keys.device)
            for ends in zip(self.alpha, self.beta, self.gamma, strict=True)
        )
        strengths = (low + (high - low) * keyed_random.uniform(keys, f"{name}/strengths", samples, 3)).float()
        order = keyed_random.bits(keys, f"{name}/places", samples, self.patches).argsort(dim=-1, stable=True)

        rows = torch.stack([clusters, clusters + K, others], dim=-1)  # (T, B, 3) of the basis
        scales = strengths * torch.stack([2 * labels - 1, torch.ones_like(signs), signs], dim=-1)
        patches = torch.empty(*order.shape, self.dim, device=keys.device)
        basis = self._basis.float().to(keys.device)
        done = 0
        for some in key_blocks(keys, samples * self.patches * self.dim):
            part = slice(done, done := done + len(some))
            made = self._noise(some, name, samples)
            made[:, :, :3] = basis[rows[part]] * scales[part, ..., None]
            patches[part].scatter_(2, order[part, ..., None].expand_as(made), made)
        return ClusterData(patches, labels, clusters, others, signs, strengths, order[..., :3].contiguous())

    def _noise(self, keys: Tensor, name: str, samples: int) -> Tensor:
        """(T, B, N, D) float32: noise after the first three, which are left open."""
        made = torch.empty(len(keys), samples, self.patches, self.dim, device=keys.device)
        if self.patches > 3:
            std = self.sigma_p / math.sqrt(self.dim)
            made[:, :, 3:] = keyed_random.normal(keys, f"{name}/noise", samples, self.patches - 3, self.dim).mul_(std)
        return made

    @cached_property
    def _basis(self) -> Tensor:
        """(2K, D) float64, orthonormal and random: v_1 … v_K, c_1 … c_K."""
        key = keyed_random.keys(self.seed, [0])
        normal = keyed_random.normal(key, "clusters/basis", self.dim, 2 * self.clusters)[0]
        q, r = np.linalg.qr(normal.numpy())
        return torch.from_numpy(q * np.sign(np.diag(r))).T.contiguous()

    def _check_counts(self) -> None:
        check_positive("ClusterPatches", clusters=self.clusters, patches=self.patches, dim=self.dim)
        if self.clusters < 2:
            raise ValueError(
                f"ClusterPatches: clusters={self.clusters}, but clusters ≥ 2: the feature noise carries the feature "
                "of another cluster; use 2 or more"
            )
        if self.patches < 3:
            raise ValueError(
                f"ClusterPatches: patches={self.patches}, but patches ≥ 3: feature signal, centre signal and feature "
                "noise each take one; use 3 or more"
            )
        if self.dim < 2 * self.clusters:
            raise ValueError(
                f"ClusterPatches: dim={self.dim}, but dim ≥ 2·clusters = {2 * self.clusters}: every cluster has a "
                "feature and a centre, all orthogonal; use a larger dim or fewer clusters"
            )


def _check_interval(name: str, interval: object) -> None:
    if not isinstance(interval, tuple) or len(cast("tuple[object, ...]", interval)) != 2:
        raise TypeError(f"ClusterPatches: {name}={interval!r}; give its interval as a pair (low, high)")
    low, high = cast("Interval", interval)
    if not low > 0:
        raise ValueError(
            f"ClusterPatches: {name}={interval}, but 0 < low: a strength is positive; use a lower end above 0"
        )
    if not low <= high < math.inf:
        raise ValueError(
            f"ClusterPatches: {name}={interval}, but low ≤ high < ∞: nothing lies in it; exchange the ends, or give "
            "the same number twice for a strength that does not vary"
        )
