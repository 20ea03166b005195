"""Splits of a dataset, and the order in which few labels are taken from it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic import keyed_random

__all__ = ["Split", "stratified_order"]

Split = Literal["train", "test"]


def stratified_order(labels: Tensor, clusters: Tensor, seed: int) -> Tensor:
    """(B,) int64: a random order of images of which every beginning has the classes in their shares.

    The beginnings of each class have its clusters in their shares. One image of every class comes first.

    >>> labels = torch.tensor([0] * 6 + [1] * 3)
    >>> labels[stratified_order(labels, labels, seed=0)].view(3, 3).sum(1)
    tensor([1, 1, 1])
    """
    order = keyed_random.permutations(keyed_random.keys(seed, [0]), "subset", len(labels))[0]
    groups = labels * (int(clusters.max()) + 1) + clusters if len(labels) else labels
    order = order[_turns(groups[order]).argsort(stable=True)]
    turns = _turns(labels[order])
    first = turns * torch.bincount(labels)[labels[order]] < 1
    return order[turns.masked_fill(first, 0).argsort(stable=True)]


def _turns(groups: Tensor) -> Tensor:
    """(B,) float64: when each comes if the groups, each in the order given, are to be spread evenly from 0 to 1."""
    sizes = torch.bincount(groups)
    by_group = groups.argsort(stable=True)
    rank = torch.empty_like(groups)
    rank[by_group] = torch.arange(len(groups)) - (sizes.cumsum(0) - sizes)[groups[by_group]]
    return (rank + 0.5).double() / sizes[groups]
