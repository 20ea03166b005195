"""Names of splits, and the stratified order in which subsets of a split are drawn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic import keyed_random

__all__ = ["Split", "stratified_order"]

Split = Literal["train", "test"]


def stratified_order(labels: Tensor, clusters: Tensor, seed: int) -> Tensor:
    """(B,) int64: a random order of images in which every prefix is stratified by class.

    Within a class, prefixes are stratified by cluster. One image of every class comes first.

    >>> labels = torch.tensor([0] * 6 + [1] * 3)
    >>> labels[stratified_order(labels, labels, seed=0)].view(3, 3).sum(1)
    tensor([1, 1, 1])
    """
    order = keyed_random.permutations(keyed_random.keys(seed, [0]), "subset", len(labels))[0]
    groups = labels * (int(clusters.max()) + 1) + clusters if len(labels) else labels
    order = order[_quantiles(groups[order]).argsort(stable=True)]
    quantiles = _quantiles(labels[order])
    first = quantiles * torch.bincount(labels)[labels[order]] < 1
    return order[quantiles.masked_fill(first, 0).argsort(stable=True)]


def _quantiles(groups: Tensor) -> Tensor:
    """(B,) float64 in (0, 1): the rank of each image within its group, over the size of the group."""
    sizes = torch.bincount(groups)
    by_group = groups.argsort(stable=True)
    rank = torch.empty_like(groups)
    rank[by_group] = torch.arange(len(groups)) - (sizes.cumsum(0) - sizes)[groups[by_group]]
    return (rank + 0.5).double() / sizes[groups]
