"""Whether routers find the patch that decides the class (Chowdhury et al. 2023, Lemma 4.1, Assumption 4.4).

Both are statements on ranks: where, among the N patches of a sample in the order of their scores,
does the class-discriminative one come. Rank 0 is the highest score; of equal scores the lower patch
index comes first, as in routing itself. A patch is routed when its rank is below l, so one pass gives
the result for every l. The gate is increasing in the score: the largest gate is rank 0 (the
assumption lets a tie pass, which rank 0 does only for the lower index).

Scores are (…, B, N, E), labels and places (…, B), with any leading axes, such as trials.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ProperRouting", "discriminative_ranks", "proper_routing", "routed_share"]


def discriminative_ranks(scores: Tensor, discriminative: Tensor) -> Tensor:
    """(…, B, E): the rank of the discriminative patch for each expert, from 0; a score of NaN ranks last.

    >>> scores = torch.tensor([[[0.2], [0.9], [0.2]]])                    # one sample, three patches, one expert
    >>> [discriminative_ranks(scores, torch.tensor([place])).item() for place in range(3)]
    [1, 0, 2]
    """
    N = scores.shape[-2]
    place = _like_samples("discriminative_ranks", "discriminative", discriminative, scores)
    if ((place < 0) | (place >= N)).any():
        raise ValueError(
            f"discriminative_ranks: discriminative names patches from {place.min()} to {place.max()}; "
            f"a sample has the patches 0 to {N - 1}"
        )
    at = place[..., None, None]
    own = scores.gather(-2, at.expand(*place.shape, 1, scores.shape[-1]))
    number = torch.arange(N, device=scores.device)[:, None]
    beaten = (own > scores) | ((own == scores) & (at < number))
    return N - 1 - beaten.sum(-2)


def routed_share(scores: Tensor, labels: Tensor, discriminative: Tensor) -> Tensor:
    """(…, c, N): of the samples of class s, the share whose discriminative patch is in the top l of router s.

    Entry [..., s, l − 1] is for l patches per expert; Lemma 4.1 says that for l ≥ l* it is 1. Scores
    are (…, B, N, c), router s that of class s. A class without samples has NaN.

    >>> scores = torch.tensor([[[0.9, 0.0], [0.1, 0.0]], [[0.0, 0.7], [0.0, 0.8]]])
    >>> routed_share(scores, torch.tensor([0, 1]), torch.tensor([0, 0])).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    classes = scores.shape[-1]
    label = _check_labels("routed_share", labels, scores, classes)
    shares = _share_within(scores, label, discriminative, classes)
    return shares.diagonal(dim1=-3, dim2=-2).transpose(-1, -2)


@dataclass(frozen=True, eq=False)
class ProperRouting:
    """How far Assumption 4.4 holds; made by `proper_routing`. Leading axes are those of the scores."""

    expert: Tensor
    """(…, c) int64: for each class the expert that gives the largest gate to the class's patch most often."""
    largest_gate: Tensor
    """(…, c): the share of the class's samples for which this expert does; the assumption says 1."""
    within: Tensor
    """(…, c, N): for l = 1 … N, the share for which the patch is among the top l of the same expert."""
    by_expert: Tensor
    """(…, c, E): the share with the largest gate, for every expert."""


def proper_routing(
    scores: Tensor, labels: Tensor, discriminative: Tensor, *, classes: int | None = None
) -> ProperRouting:
    """Assumption 4.4 as a measurement, on scores (…, B, N, E) of k = E experts.

    The assumption wants, for each class, one expert that receives the discriminative patch of *every*
    sample of the class with the largest gate. Here: the best expert's share of the samples. It may be
    the same expert for several classes; the assumption allows that. ``classes`` is only needed where
    the highest class may be missing from the labels.

    >>> scores = torch.tensor([[[0.9, 0.5], [0.1, 0.6]], [[0.3, 0.7], [0.8, 0.2]]])
    >>> found = proper_routing(scores, torch.tensor([0, 1]), torch.tensor([0, 0]))
    >>> found.expert.tolist(), found.largest_gate.tolist()
    ([0, 1], [1.0, 1.0])
    """
    count = int(labels.max()) + 1 if classes is None else classes
    label = _check_labels("proper_routing", labels, scores, count)
    within = _share_within(scores, label, discriminative, count)
    by_expert = within[..., 0]
    expert = by_expert.argmax(-1)
    of_best = expert[..., None, None].expand(*expert.shape, 1, within.shape[-1])
    return ProperRouting(
        expert=expert,
        largest_gate=by_expert.gather(-1, expert[..., None]).squeeze(-1),
        within=within.gather(-2, of_best).squeeze(-2),
        by_expert=by_expert,
    )


def _share_within(scores: Tensor, label: Tensor, discriminative: Tensor, classes: int) -> Tensor:
    """(…, c, E, N): the share of a class's samples whose rank is below 1, 2, … N."""
    rank = discriminative_ranks(scores, discriminative)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    member = torch.nn.functional.one_hot(label, classes).to(dtype)
    at_rank = torch.nn.functional.one_hot(rank, scores.shape[-2]).to(dtype)
    count = torch.einsum("...bc,...ben->...cen", member, at_rank).cumsum(-1)
    return count / member.sum(-2)[..., None, None]


def _check_labels(owner: str, labels: Tensor, scores: Tensor, classes: int) -> Tensor:
    label = _like_samples(owner, "labels", labels, scores)
    if ((label < 0) | (label >= classes)).any():
        raise ValueError(
            f"{owner}: labels run from {label.min()} to {label.max()}; there are {classes} classes, counted from 0"
        )
    return label


def _like_samples(owner: str, name: str, values: Tensor, scores: Tensor) -> Tensor:
    """Whole numbers for each sample of scores (…, B, N, E)."""
    if scores.ndim < 3:
        raise ValueError(f"{owner}: scores have shape {tuple(scores.shape)}; give (…, samples, patches, experts)")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{owner}: {name} are {values.dtype}; use {name}.long()")
    samples = scores.shape[:-2]
    if values.shape != samples[-values.ndim :] or not values.ndim:
        raise ValueError(
            f"{owner}: {name} have shape {tuple(values.shape)}, scores {tuple(scores.shape)}; "
            f"give {tuple(samples)}, one number for each sample"
        )
    return values.long().expand(samples)
