"""The distribution of Chowdhury et al. 2023, Section 4.2 (c classes: Section M).

A sample has n patches, unit vectors in d dimensions. One, at a random place, is o_i and makes the
class i. The others are class-irrelevant patterns from p disjoint sets, each a small ball on the
sphere with infinitely many patterns in it, drawn alike for all classes. Two numbers say how far
things lie apart: <o_i, o_j> = δ_d for all i ≠ j, and |<o_i, q>| ≤ δ_r for every irrelevant q.

An irrelevant pattern q *leans* when it is δ'-closer to one class's pattern than to another's:
|<o_i − o_j, q>| > δ' = (1 − δ_d)/2 for some i and j (Definitions D.1 to D.3). The theory's l* is
one more than the most leaning patches in a sample. Here every sample has ``close`` of them, neither
more nor fewer, each towards a class drawn at random, so l* = close + 1.

All of it holds by construction. The span of the o_i is set apart from p orthonormal directions, one
for each set. A set's centre has an inner product with each o_i that was chosen for it, and the rest
of its length along its own direction. In a ball of radius r no inner product with o_i moves by more
than r, and none with o_i − o_j by more than r·|o_i − o_j| = r·√(2(1 − δ_d)): centres keep these
distances from the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_positive
from moesaic.data.splits import Split
from moesaic.papers.engine.trial_datasets import (
    TrialData,
    balanced_labels,
    check_draw,
    check_patches,
    insert_patch,
    key_blocks,
)

__all__ = ["PatternPatches"]

_MAX_IN_SPAN = 0.9  # largest part of a centre's length in the span of the o_i; the rest separates the sets
_MARGIN = 1e-6  # margin to every limit, because patches are stored in float32


@dataclass(frozen=True)
class PatternPatches:
    """Samples of n unit vectors, of which one decides the class; `PatchSource` of synthetic data.

    One ``seed`` is one distribution: it fixes the class patterns and the centres of the sets. Trials
    draw their samples from it, by keys. Every irrelevant patch is a new point of its ball, so the
    pool of a draw holds T · B · (N − 1) + c rows: for small ``dim``, or few trials at a time.

    >>> source = PatternPatches(patches=8, dim=32, delta_d=0.2, delta_r=0.5, close=2)
    >>> source.l_star
    3
    >>> data = source.draw(keyed_random.keys(0, range(5)), samples=20, split="train")
    >>> data.patches.shape
    torch.Size([5, 20, 8, 32])
    >>> one, zero = source.class_patterns[1], source.class_patterns[0]  # the paper's o_1 (y = +1) and o_2
    >>> round((one @ zero).item(), 6)
    0.2
    >>> closer = ((data.patches @ (one - zero)).abs() > (1 - 0.2) / 2).sum(2) - 1  # but for the class pattern
    >>> closer.unique().tolist()
    [2]
    """

    patches: int = 16
    """n, number of patches in a sample."""
    dim: int = 64
    """d, dimension of a patch; at least classes + pattern_sets."""
    delta_d: float = 0.0
    """δ_d, the inner product of two class patterns, above −1/(classes − 1) and below 1."""
    delta_r: float = 0.5
    """δ_r from 0, below 1: no irrelevant pattern has a larger inner product with a class pattern, by size."""
    pattern_sets: int = 8
    """p, number of sets of irrelevant patterns."""
    classes: int = 2
    """c. Row i of `class_patterns` decides class i; of two classes, class 1 is the paper's y = +1."""
    close: int = 0
    """Number of patches of a sample that lean to a class; l* − 1."""
    diameter: float | None = None
    """Diameter of the balls that contain the sets; None for the paper's √((1 − δ_r²)/(d p²))."""
    seed: int = 0
    """Seed of the distribution."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_deltas()
        self._check_ball()
        if self.close:
            self._check_lean()
        self._check_disjoint()

    @property
    def l_star(self) -> int:
        """l*, one more than the leaning patches of a sample: routers that take l ≥ l* can find the decisive one."""
        return self.close + 1

    @property
    def ball_diameter(self) -> float:
        """``diameter`` as given, or the paper's."""
        if self.diameter is not None:
            return self.diameter
        return math.sqrt((1 - self.delta_r**2) / (self.dim * self.pattern_sets**2))

    @property
    def class_patterns(self) -> Tensor:
        """(c, D) float32: the pattern of each class."""
        return self._class_patterns.float()

    @property
    def centres(self) -> Tensor:
        """(p, D) float32: centre of each set."""
        return self._centres.float()

    @property
    def leans(self) -> Tensor:
        """(p,) int64: the class to which the patterns of each set lean, −1 for those that do not."""
        sets = torch.arange(self.pattern_sets)
        return torch.where(sets < self._leaning_sets, sets % self.classes, -1)

    def draw(self, keys: Tensor, samples: int, split: Split) -> TrialData:
        """Draws ``samples`` samples for every key, equally many of each class; see `PatchSource`."""
        check_draw("PatternPatches", keys, samples, split, self.classes)
        name, beside = f"patterns/{split}", self.patches - 1
        labels, _ = balanced_labels(keys, f"{name}/labels", samples, self.classes)
        place = keyed_random.integers(keys, f"{name}/places", self.patches, samples)
        fresh = [self._irrelevant(some, name, samples) for some in key_blocks(keys, samples * beside * self.dim)]
        pool = torch.cat([self.class_patterns.to(keys.device), *fresh])
        others = torch.arange(self.classes, len(pool), device=keys.device).view(len(keys), samples, beside)
        return TrialData(pool=pool, index=insert_patch(labels, others, place), labels=labels, discriminative=place)

    def _irrelevant(self, keys: Tensor, name: str, samples: int) -> Tensor:
        """(T · B · (N − 1), D) float32: new points, each from the ball of a set drawn for it."""
        shape = (samples, self.patches - 1)
        leaning, neutral = self._leaning_sets, self.pattern_sets - self._leaning_sets
        sets = torch.where(
            keyed_random.bits(keys, f"{name}/lean", *shape).argsort(dim=-1, stable=True) < self.close,
            keyed_random.integers(keys, f"{name}/leaning", max(leaning, 1), *shape),
            keyed_random.integers(keys, f"{name}/neutral", max(neutral, 1), *shape) + leaning,
        )
        centre = self._centres.to(keys.device)[sets]
        direction = keyed_random.normal(keys, f"{name}/directions", *shape, self.dim).double()
        direction = F.normalize(direction - (direction * centre).sum(-1, keepdim=True) * centre, dim=-1)
        # On the sphere, at most the angle of the ball's radius from the centre, as dense as a ball of d − 1 dimensions
        widest = 2 * math.asin(self.ball_diameter / 4)
        angle = widest * keyed_random.uniform(keys, f"{name}/angles", *shape, 1).double() ** (1 / (self.dim - 1))
        return (angle.cos() * centre + angle.sin() * direction).float().flatten(0, -2)

    @property
    def _radius(self) -> float:
        return self.ball_diameter / 2

    @property
    def _max_inner(self) -> float:
        """The largest inner product a centre may have with a class pattern."""
        return max(self.delta_r - self._radius - _MARGIN, 0.0)

    @property
    def _change_in_ball(self) -> float:
        """How much <o_i − o_j, q> can change within a ball."""
        return self._radius * math.sqrt(2 * (1 - self.delta_d))

    @property
    def _delta_prime(self) -> float:
        """δ'."""
        return (1 - self.delta_d) / 2

    @property
    def _leaning_product(self) -> float:
        """<o_i − o_j, z> for a centre z that leans to class i: as far as δ_r and the sphere allow.

        Such a centre has its part in the span along o_i minus the mean of all: the shortest way.
        """
        share = 1 - 1 / self.classes
        return min(self._max_inner / share, _MAX_IN_SPAN * math.sqrt((1 - self.delta_d) / share))

    @property
    def _leaning_sets(self) -> int:
        """How many sets lean, as many to each class: about their share among the patches."""
        if self.close in (0, self.patches - 1):
            return self.pattern_sets if self.close else 0
        each = round(self.pattern_sets * self.close / (self.patches - 1) / self.classes)
        return self.classes * min(max(each, 1), (self.pattern_sets - 1) // self.classes)

    @cached_property
    def _basis(self) -> Tensor:
        """(c + p, D) float64, orthonormal and random."""
        key = keyed_random.keys(self.seed, [0])
        normal = keyed_random.normal(key, "basis", self.dim, self.classes + self.pattern_sets)[0].double()
        q, r = np.linalg.qr(normal.numpy())
        return torch.from_numpy(q * np.sign(np.diag(r))).T

    @cached_property
    def _class_patterns(self) -> Tensor:
        """(c, D) float64: the square root of the matrix of inner products, on the first rows of the basis."""
        apart, along = math.sqrt(1 - self.delta_d), math.sqrt(1 + (self.classes - 1) * self.delta_d)
        root = apart * torch.eye(self.classes, dtype=torch.float64) + (along - apart) / self.classes
        return root @ self._basis[: self.classes]

    @cached_property
    def _centres(self) -> Tensor:
        """(p, D) float64."""
        leans, mean = self.leans, 1 / self.classes
        towards = torch.eye(self.classes, dtype=torch.float64)[leans.clamp(min=0)]
        products = torch.where(leans[:, None] < 0, self._neutral_products(), self._leaning_product * (towards - mean))
        gram = self._class_patterns @ self._class_patterns.T
        inside = products @ gram.inverse() @ self._class_patterns
        length = inside.square().sum(1, keepdim=True).sqrt()
        inside = inside * (_MAX_IN_SPAN / length.clamp(min=_MAX_IN_SPAN))
        outside = (1 - inside.square().sum(1, keepdim=True)).sqrt()
        return inside + outside * self._basis[self.classes :]

    def _neutral_products(self) -> Tensor:
        """(p, c) float64: inner products with the class patterns that differ by too little to lean."""
        key = keyed_random.keys(self.seed, [0])
        spread = min(self._max_inner, max(self._delta_prime - self._change_in_ball - _MARGIN, 0.0) / 2)
        common = (2 * keyed_random.uniform(key, "common", self.pattern_sets, 1)[0] - 1) * (self._max_inner - spread)
        own = (2 * keyed_random.uniform(key, "own", self.pattern_sets, self.classes)[0] - 1) * spread
        return (common + own).double()

    def _check_counts(self) -> None:
        check_patches("PatternPatches", self.patches)
        check_positive("PatternPatches", dim=self.dim, pattern_sets=self.pattern_sets, classes=self.classes)
        if self.classes < 2:
            raise ValueError(f"PatternPatches: classes={self.classes}; there must be two at least")
        if not 0 <= self.close <= self.patches - 1:
            raise ValueError(
                f"PatternPatches: close={self.close}, but 0 ≤ close ≤ patches − 1 = {self.patches - 1}: "
                "one patch of a sample is the class pattern"
            )
        if self.close:
            check_positive("PatternPatches", close=self.close)
        if self.close == self.patches - 1 and self.pattern_sets % self.classes:
            raise ValueError(
                f"PatternPatches: with close = patches − 1 = {self.close} all sets lean, and "
                f"pattern_sets={self.pattern_sets} is not divisible by classes={self.classes}, so they cannot "
                "lean to all classes alike; change one of the three"
            )
        if 0 < self.close < self.patches - 1 and self.pattern_sets <= self.classes:
            raise ValueError(
                f"PatternPatches: pattern_sets={self.pattern_sets}, but pattern_sets > classes = {self.classes} "
                f"for close={self.close}: a set leans to each class and one to none"
            )
        if self.dim < self.classes + self.pattern_sets:
            raise ValueError(
                f"PatternPatches: dim={self.dim}, but dim ≥ classes + pattern_sets = "
                f"{self.classes} + {self.pattern_sets}: class patterns and sets need directions of their own"
            )

    def _check_deltas(self) -> None:
        if not -1 / (self.classes - 1) < self.delta_d < 1:
            least = "−1" if self.classes == 2 else f"−1/(classes − 1) = −1/{self.classes - 1}"
            raise ValueError(
                f"PatternPatches: delta_d={self.delta_d}, but {least} < delta_d < 1: no {self.classes} different "
                "unit vectors have such inner products"
            )
        if not 0 <= self.delta_r < 1:
            raise ValueError(f"PatternPatches: delta_r={self.delta_r}, but 0 ≤ delta_r < 1: it bounds |<o_i, q>|")

    def _check_ball(self) -> None:
        if not 0 <= self.ball_diameter < math.inf:
            raise ValueError(f"PatternPatches: diameter={self.diameter}; it must be 0 or more")
        whose = "" if self.diameter is not None else ", the default √((1 − delta_r²)/(dim·pattern_sets²)),"
        if self._radius > self.delta_r:
            raise ValueError(
                f"PatternPatches: a ball of diameter={self.ball_diameter:.4g}{whose} is larger than "
                f"delta_r={self.delta_r} allows: diameter/2 ≤ delta_r fails, so |<o_i, q>| ≤ delta_r would fail in it; "
                f"use {f'diameter={2 * self.delta_r:g} or less' if self.delta_r else 'diameter=0'}, or a larger delta_r"
            )
        if self.close < self.patches - 1 and self._change_in_ball > self._delta_prime:
            raise ValueError(
                f"PatternPatches: a ball of diameter={self.ball_diameter:.4g}{whose} is too large for patterns that "
                f"lean to no class: √(2(1 − delta_d))·diameter/2 ≤ (1 − delta_d)/2 fails, "
                f"{self._change_in_ball:.4g} > {self._delta_prime:.4g}; use "
                f"diameter={math.sqrt((1 - self.delta_d) / 2):.4g} or less, or a smaller delta_d"
            )

    def _check_lean(self) -> None:
        needed = self._delta_prime + self._change_in_ball + _MARGIN
        if self._leaning_product <= needed:
            factor = "2" if self.classes == 2 else f"{self.classes}/{self.classes - 1}"
            raise ValueError(
                f"PatternPatches: close={self.close} needs patterns with <o_i − o_j, q> > δ' = (1 − delta_d)/2, and "
                f"there are none: {factor}·(delta_r − diameter/2) > (1 − delta_d)/2 + √(2(1 − delta_d))·diameter/2 "
                f"fails, {self._leaning_product:.4g} ≤ {needed:.4g}; use a larger delta_r or delta_d, a smaller "
                "diameter, or close=0"
            )

    def _check_disjoint(self) -> None:
        if self.pattern_sets == 1:
            return
        nearest = torch.pdist(self._centres).min().item()
        if self.ball_diameter >= nearest:
            raise ValueError(
                f"PatternPatches: balls of diameter={self.ball_diameter:.4g} overlap: diameter < {nearest:.4g}, the "
                "distance of the two nearest centres, fails; use a smaller diameter"
            )
