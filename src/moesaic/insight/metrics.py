"""Metrics of a routing: load, entropy, coverage, overlap of experts, agreement with known patches.

Every function reads one ``Routing`` (``record_routing(model, keep="all")`` concatenates the batches of a
dataset). Functions that return tensors do not synchronise with the device; functions that return Python
numbers do. None of them builds an autograd graph: losses are in ``moesaic.routing``.

The *load* of an expert is the number of its units. A soft router sends every unit to every expert; its load
is the total weight, and every set of units is the set of all units.

For an empty batch numbers are 0, lists are empty and the overlap is the identity matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.routing_record import Chooser, Routing, Unit

__all__ = [
    "Agreement",
    "Summary",
    "agreement",
    "coverage",
    "dead_experts",
    "dispatch_entropy",
    "load_share",
    "overlap",
    "routing_entropy",
    "summary",
    "utilisation",
]

Labels = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]]


def load_share(routing: Routing) -> Tensor:
    """(E,): load share of each expert, load_e / Σ load; 1/E if the load is balanced.

    Where experts choose, shares are equal by construction; `overlap` is more informative there.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0], [0], [0], [1]]])                     # four units choose one expert each
    >>> routing = Routing("patch", torch.zeros(1, 4, 3), index, torch.ones(1, 4, 1), "unit", grid=(2, 2))
    >>> load_share(routing).tolist()
    [0.75, 0.25, 0.0]
    """
    load_E = routing.load.detach()
    total = load_E.sum()
    return load_E / torch.where(total > 0, total, 1)


def dead_experts(routing: Routing, threshold: float = 0.1) -> list[int]:
    """The experts whose share of the load is below ``threshold`` times the equal share 1/E.

    An expert without units is dead at every threshold. If all units are dropped, all experts are dead.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0], [0], [0], [1]]])
    >>> routing = Routing("patch", torch.zeros(1, 4, 3), index, torch.ones(1, 4, 1), "unit", grid=(2, 2))
    >>> dead_experts(routing), dead_experts(routing, threshold=0.8)      # the equal share is a third
    ([2], [1, 2])
    """
    check_fraction("dead_experts", "threshold", threshold)
    if routing.batch * routing.units == 0:
        return []
    return starved(floats(routing.load), threshold)


def utilisation(routing: Routing) -> float:
    """The effective number of experts over their number: exp(H(load shares)) / E, H the entropy.

    1 if the load is balanced, 1/E if one expert has all of it, 0 without load. Always 1 where experts choose a fixed
    number of units.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0], [0], [1], [1]]])                     # two of four experts share the work
    >>> utilisation(Routing("patch", torch.zeros(1, 4, 4), index, torch.ones(1, 4, 1), "unit", grid=(2, 2)))
    0.5
    """
    share_E = load_share(routing).cpu().double()
    if not share_E.any():
        return 0.0
    return min(_entropy(share_E, 0).exp().item() / routing.experts, 1.0)


def routing_entropy(routing: Routing, *, normalised: bool = False) -> float:
    """Mean entropy, in nats, of the softmax of the scores over the options of each chooser.

    - where experts choose: over the units of an image, for each expert; at most log N
    - where units choose: over the experts, for each unit; at most log E
    - soft: over all slots of all experts, for each unit; at most log (E·S)

    Scores are those before noise. ``normalised`` divides by the maximum: 0 for certain choices, 1 for uniform ones,
    0 for a single option. NaN scores give NaN; `check_scores` finds them.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> undecided = Routing("patch", torch.zeros(1, 4, 2), torch.tensor([[[0], [1]]]), torch.ones(1, 2, 1), "expert")
    >>> round(routing_entropy(undecided), 4), routing_entropy(undecided, normalised=True)    # log 4
    (1.3863, 1.0)
    """
    if routing.batch * routing.units == 0:
        return 0.0
    options = _options(routing)
    highest = math.log(options.shape[-1])
    # rounding may exceed the maximum; min in this order propagates NaN
    entropy = min(_entropy(options.softmax(-1), -1).mean().item(), highest)
    if not normalised:
        return entropy
    return entropy / highest if highest else 0.0


def dispatch_entropy(routing: Routing, clusters: Labels) -> float:
    """Dispatch entropy of Chen et al. 2022 (eq. 6.1) in nats: how mixed the clusters of each expert are.

    With n_km the number of units of cluster k that expert m gets, n_m = Σ_k n_km and n = Σ_m n_m,

        entropy = − Σ_{m: n_m ≠ 0} (n_m / n) Σ_k (n_km / n_m) log (n_km / n_m)

    It is 0 if each expert gets a single cluster, and the log of the number of clusters if each expert gets equal
    shares of all. It does not depend on idle experts, nor on how many experts share a cluster. A unit with several
    experts counts for each of them.

    ``clusters`` holds integer labels: (B,) for images, whose units all have the label of the image, or (B, N) for
    units.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0]], [[0]], [[1]], [[1]]])               # four samples, two to each expert
    >>> routing = Routing("sample", torch.zeros(4, 1, 2), index, torch.ones(4, 1, 1), "unit")
    >>> dispatch_entropy(routing, [7, 7, 9, 9])
    0.0
    >>> round(dispatch_entropy(routing, [7, 9, 7, 9]), 4)                # log 2
    0.6931
    """
    return entropy_of_counts(cluster_counts("dispatch_entropy", routing, clusters)[1])


def coverage(routing: Routing) -> float:
    """Share of units that at least one expert gets; 1 for a soft router.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0, 1], [1, 2]]])                         # two experts take two of four patches each
    >>> coverage(Routing("patch", torch.zeros(1, 4, 2), index, torch.ones(1, 2, 2), "expert", grid=(2, 2)))
    0.75
    """
    units = routing.batch * routing.units if routing.unit_mask is None else int(routing.unit_mask.sum())
    return routing.mask.any(-1).sum().item() / units if units else 0.0


def overlap(routing: Routing) -> Tensor:
    """(E, E): Jaccard similarity of the units of two experts, |U_e ∩ U_f| / |U_e ∪ U_f|, averaged over images.

    1 if two experts always have the same units, 0 if they never share one; the diagonal is 1. Two experts that choose
    L of N units at random overlap by about L / (2N − L). Images in which both experts are idle are ignored.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0, 1], [1, 2], [0, 1]]])
    >>> routing = Routing("patch", torch.zeros(1, 4, 3), index, torch.ones(1, 3, 2), "expert", grid=(2, 2))
    >>> [[round(value, 2) for value in row] for row in overlap(routing).tolist()]
    [[1.0, 0.33, 1.0], [0.33, 1.0, 0.33], [1.0, 0.33, 1.0]]
    """
    works_BNE = routing.mask.to(routing.scores.dtype)
    # counts of units are not exact in bfloat16
    with torch.autocast(works_BNE.device.type, enabled=False):
        both_BEE = works_BNE.mT @ works_BNE
    size_BE = works_BNE.sum(1)
    either_BEE = size_BE[:, :, None] + size_BE[:, None, :] - both_BEE
    jaccard_BEE = both_BEE / either_BEE.clamp(min=1)
    overlap_EE = jaccard_BEE.sum(0) / (either_BEE > 0).sum(0).clamp(min=1)
    return torch.where(torch.eye(routing.experts, dtype=torch.bool, device=overlap_EE.device), 1.0, overlap_EE)


@dataclass(frozen=True, eq=False)
class Agreement:
    """Agreement of the routing with discriminative patches; made by `agreement`, on the CPU."""

    images: int
    """Number of images with a discriminative patch; others are ignored."""
    reached: float
    """Share of images in which some expert selects a discriminative patch."""
    hit_rate: Tensor
    """(E,): share of images in which the expert selects a discriminative patch."""
    chance: Tensor
    """(E,): the hit rate of a random selection of the same size."""
    precision: Tensor
    """(E,): share of discriminative patches among the patches of the expert; 0 for an idle expert."""

    def __str__(self) -> str:
        columns = zip(floats(self.hit_rate), floats(self.chance), floats(self.precision), strict=True)
        rows = [f"{e:6d}  {hit:8.3f}  {chance:6.3f}  {right:9.3f}" for e, (hit, chance, right) in enumerate(columns)]
        return "\n".join(
            [
                f"some expert selects a discriminative patch in {self.reached:.1%} of {self.images} images",
                "expert  hit rate  chance  precision",
                *rows,
            ]
        )


def agreement(routing: Routing, discriminative: Labels) -> Agreement:
    """Compares the routing with patches that are known to be discriminative.

    ``discriminative`` is (B,) integers, the discriminative patch of each image, or (B, N) booleans; images without
    any are ignored. Compare ``hit_rate`` with ``chance``: an expert with many patches hits often by chance.

    With L patches per expert and one discriminative patch per image, precision is at most 1/L.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0], [3]], [[2], [3]]])                   # two images, two experts, one patch each
    >>> routing = Routing("patch", torch.zeros(2, 4, 2), index, torch.ones(2, 2, 1), "expert", grid=(2, 2))
    >>> print(agreement(routing, torch.tensor([0, 2])))                  # patch 0 of the first, patch 2 of the second
    some expert selects a discriminative patch in 100.0% of 2 images
    expert  hit rate  chance  precision
         0     1.000   0.250      1.000
         1     0.000   0.250      0.000
    """
    marked_BN = _marked_units(routing, discriminative)
    known_B = marked_BN.any(1)
    marked_BN, mask_BNE = marked_BN[known_B], routing.mask.cpu()[known_B]
    images = len(mask_BNE)
    found_BNE = mask_BNE & marked_BN[:, :, None]
    hit_BE = found_BNE.any(1)
    chance_BE = _chance_of_a_hit(mask_BNE.sum(1), marked_BN.sum(1), routing.units)
    return Agreement(
        images=images,
        reached=hit_BE.any(1).sum().item() / max(1, images),
        hit_rate=hit_BE.sum(0) / max(1, images),
        chance=chance_BE.sum(0).float() / max(1, images),
        precision=found_BNE.sum((0, 1)) / mask_BNE.sum((0, 1)).clamp(min=1),
    )


@dataclass(frozen=True)
class Summary:
    """The main metrics of a routing; made by `summary`, printed as a small table."""

    unit: Unit
    chooser: Chooser
    batch: int
    units: int
    load_share: tuple[float, ...]
    dead_experts: tuple[int, ...]
    utilisation: float
    routing_entropy: float
    """Normalised: 0 for certain choices, 1 for uniform ones."""
    coverage: float
    overlap: float
    """Mean over the pairs of different experts; 0 for one expert."""

    def __str__(self) -> str:
        plural = plural_unit(self.unit)
        who = {"expert": "experts choose", "unit": f"{plural} choose", "soft": "soft routing"}
        experts = len(self.load_share)
        dead = ", ".join(map(str, self.dead_experts)) or "none"
        shares = " ".join(f"{share:.3f}" for share in self.load_share)
        return "\n".join(
            [
                f"{self.batch} images × {self.units} {plural}, {experts} experts; {who[self.chooser]}",
                f"load share       {shares}  (balanced {1 / experts:.3f})",
                f"dead experts     {dead}",
                f"utilisation      {self.utilisation:.3f}",
                f"routing entropy  {self.routing_entropy:.3f}  (0 certain, 1 uniform)",
                f"coverage         {self.coverage:.3f}",
                f"overlap          {self.overlap:.3f}  (mean over pairs of experts)",
            ]
        )


def plural_unit(unit: Unit) -> str:
    """The plural of a unit's name, for texts."""
    return "patches" if unit == "patch" else f"{unit}s"


def summary(routing: Routing) -> Summary:
    """Computes the main metrics of a routing with default settings.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0, 1], [1, 2]]])
    >>> print(summary(Routing("patch", torch.zeros(1, 4, 2), index, torch.ones(1, 2, 2), "expert", grid=(2, 2))))
    1 images × 4 patches, 2 experts; experts choose
    load share       0.500 0.500  (balanced 0.500)
    dead experts     none
    utilisation      1.000
    routing entropy  1.000  (0 certain, 1 uniform)
    coverage         0.750
    overlap          0.333  (mean over pairs of experts)
    """
    return Summary(
        unit=routing.unit,
        chooser=routing.chooser,
        batch=routing.batch,
        units=routing.units,
        load_share=tuple(floats(load_share(routing))),
        dead_experts=tuple(dead_experts(routing)),
        utilisation=utilisation(routing),
        routing_entropy=routing_entropy(routing, normalised=True),
        coverage=coverage(routing),
        overlap=mean_of_pairs(overlap(routing)).item(),
    )


def cluster_counts(owner: str, routing: Routing, clusters: Labels) -> tuple[NDArray[np.int64], Tensor]:
    """The sorted labels, and (K, E) on the CPU: the number of units of each label per expert.

    Counts are int64; for a soft router they are total weights.
    """
    labels, cluster = np.unique(_cluster_labels(owner, routing, clusters).flatten().long().numpy(), return_inverse=True)
    work_BNE = routing.weights.detach() if routing.chooser == "soft" else routing.mask.long()
    count_KE = work_BNE.new_zeros(len(labels), routing.experts, device="cpu")
    return labels, count_KE.index_add(0, torch.from_numpy(cluster), work_BNE.flatten(0, 1).cpu())


def entropy_of_counts(count_KE: Tensor) -> float:
    """`dispatch_entropy` (eq. 6.1 of Chen et al. 2022) of counts (K, E)."""
    count_KE = count_KE.double()
    count_E = count_KE.sum(0)
    total = count_E.sum()
    if total == 0:
        return 0.0
    entropy_E = _entropy(count_KE / torch.where(count_E > 0, count_E, 1), 0)
    return (count_E / total @ entropy_E).item()


def score_entropy(routing: Routing) -> Tensor:
    """`routing_entropy`, normalised, as a tensor on the device."""
    options = _options(routing)
    highest = math.log(options.shape[-1])
    return _entropy(options.softmax(-1), -1).mean().clamp(max=highest) / (highest or 1.0)


def overlap_by_chance(routing: Routing) -> Tensor:
    """The sum over images of the mean overlap that random choices of the same sizes would have."""
    size_BE = routing.mask.sum(1).float()
    size_BEE, other_BEE = size_BE[:, :, None], size_BE[:, None, :]
    both_BEE = size_BEE * other_BEE / max(1, routing.units)
    overlap_BEE = both_BEE / (size_BEE + other_BEE - both_BEE).clamp(min=1)
    return mean_of_pairs(overlap_BEE.sum(0))


def floats(values_E: Tensor) -> list[float]:
    return [float(value) for value in values_E.cpu()]


def starved(load: Sequence[float], threshold: float) -> list[int]:
    """Experts whose load is 0 or below ``threshold`` times the mean load."""
    limit = threshold * sum(load)
    return [e for e, units in enumerate(load) if units == 0 or units * len(load) < limit]


def mean_of_pairs(matrix_EE: Tensor) -> Tensor:
    """Mean over pairs of different experts; 0 for one expert."""
    experts = len(matrix_EE)
    return (matrix_EE.sum() - matrix_EE.trace()) / max(1, experts * (experts - 1))


def check_fraction(owner: str, name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{owner}: {name}={value} is out of range; use a number above 0 and at most 1")


def _options(routing: Routing) -> Tensor:
    """The scores with the options of each chooser on the last axis."""
    scores = routing.scores.detach()
    return scores.transpose(1, 2) if routing.chooser == "expert" else scores.flatten(2)


def _entropy(share: Tensor, axis: int) -> Tensor:
    """− Σ p log p along an axis, in nats."""
    return 0 - torch.xlogy(share, share).sum(axis)


def _cluster_labels(who: str, routing: Routing, clusters: Labels) -> Tensor:
    """(B, N) integer labels of units, on the CPU."""
    labels = torch.as_tensor(clusters).cpu()
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{who}: clusters are {labels.dtype}; labels are integers: use clusters.long()")
    B, N = routing.batch, routing.units
    if labels.shape not in ((B,), (B, N)):
        raise ValueError(
            f"{who}: clusters have shape {tuple(labels.shape)}; give ({B},), a label for each image, "
            f"or ({B}, {N}), a label for each unit"
        )
    return labels if labels.ndim == 2 else labels[:, None].expand(B, N)


def _marked_units(routing: Routing, discriminative: Labels) -> Tensor:
    """(B, N) booleans on the CPU: the discriminative units."""
    given = torch.as_tensor(discriminative).cpu()
    B, N = routing.batch, routing.units
    marks = given.dtype == torch.bool
    if given.shape != ((B, N) if marks else (B,)) or given.is_floating_point() or given.is_complex():
        wrong = TypeError if given.shape in ((B,), (B, N)) else ValueError
        raise wrong(
            f"agreement: discriminative is {given.dtype} of shape {tuple(given.shape)}; give integers of shape ({B},), "
            f"the discriminative patch of each image, or booleans of shape ({B}, {N}), True on each such patch"
        )
    if marks:
        return given
    if ((given < 0) | (given >= N)).any():
        raise ValueError(
            f"agreement: discriminative names patches from {given.min()} to {given.max()}; an image has the "
            f"patches 0 to {N - 1}, counted row by row"
        )
    return given[:, None] == torch.arange(N)


def _chance_of_a_hit(taken_BE: Tensor, marked_B: Tensor, units: int) -> Tensor:
    """(B, E): 1 − C(N−d, l) / C(N, l), the probability that l of N random units contain one of d marked ones."""
    taken = taken_BE.double()
    spared = units - marked_B[:, None].double()
    log_miss = torch.lgamma(spared + 1) - torch.lgamma((spared - taken).clamp(min=0) + 1)
    log_miss = log_miss - math.lgamma(units + 1) + torch.lgamma(units - taken + 1)
    return torch.where(taken > spared, 1.0, 1 - log_miss.exp())
