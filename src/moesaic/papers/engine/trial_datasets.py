"""Datasets of many trials at once: each trial has its own samples, made of patches from a common pool.

The functions help sources to draw them: checks of arguments, balanced labels, digits or images in shuffled order, and
the place of the patch that determines the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.splits import Split

__all__ = [
    "PatchSource",
    "TrialData",
    "balanced_labels",
    "check_draw",
    "check_patches",
    "insert_patch",
    "key_blocks",
    "shuffled_cycles",
]

_BLOCK = 1 << 22  # random numbers at a time: bounds the memory, does not change the numbers


@dataclass(frozen=True, eq=False)
class TrialData:
    """T datasets of B samples with N patches each.

    Samples refer to their patches by row of the pool, so that all trials share the memory of the patches.
    """

    pool: Tensor
    """(P, D) float32: all patches."""
    index: Tensor
    """(T, B, N) int64: row of the pool of each patch."""
    labels: Tensor
    """(T, B) int64: the class, from 0; for two classes, 1 is the paper's y = +1 and 0 its y = −1."""
    discriminative: Tensor
    """(T, B) int64: index of the patch that determines the class."""

    def __len__(self) -> int:
        """T, the number of trials."""
        return len(self.index)

    @property
    def patches(self) -> Tensor:
        """(T, B, N, D): the samples. Large; training gathers one minibatch at a time instead."""
        return self.pool[self.index]


class PatchSource(Protocol):
    """A distribution of samples for trials."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def patches(self) -> int:
        """N, number of patches in a sample."""
        ...

    @property
    def dim(self) -> int:
        """D, dimension of a patch."""
        ...

    def draw(self, keys: Tensor, samples: int, split: Split) -> TrialData:
        """Draws ``samples`` samples for every key (see `moesaic.keyed_random`), equally many of each class.

        The samples of a key do not depend on the other keys. The two splits share no source patch
        where the source is finite.
        """
        ...


def check_patches(owner: str, patches: int) -> None:
    """Raises unless a sample has at least two patches."""
    check_positive(owner, patches=patches)
    if patches < 2:
        raise ValueError(
            f"{owner}: patches={patches} leaves no room for patches around the discriminative one; use 2 or more"
        )


def check_draw(owner: str, keys: Tensor, samples: int, split: Split, classes: int) -> None:
    """Raises for invalid keys, unknown splits, and sample sizes that are not divisible by the number of classes."""
    if keys.ndim != 1 or keys.dtype != torch.int64:
        raise ValueError(
            f"{owner}: keys have the shape {tuple(keys.shape)} and are {keys.dtype}; "
            "make them with keyed_random.keys: (T,) torch.int64"
        )
    check_choice(owner, "split", split, get_args(Split))
    check_positive(owner, samples=samples)
    if samples % classes:
        below = samples - samples % classes
        ways = f"{below} or {below + classes}" if below else f"{classes}"
        raise ValueError(
            f"{owner}: samples={samples} is not divisible by classes={classes}, "
            f"so the classes cannot be balanced; use {ways}"
        )


def balanced_labels(keys: Tensor, stream: str, samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns labels (T, B), balanced and in random order, and the index (T, B) of each sample within its class.

    >>> labels, ranks = balanced_labels(keyed_random.keys(0, [0]), "labels", samples=6, classes=2)
    >>> labels.sum().item(), sorted(ranks[labels == 1].tolist())
    (3, [0, 1, 2])
    """
    order = keyed_random.permutations(keys, stream, samples)
    return order % classes, order // classes


def shuffled_cycles(keys: Tensor, stream: str, size: int, count: int) -> Tensor:
    """Returns (T, count) numbers from 0 to ``size`` − 1; none repeats before all others have occurred.

    >>> shuffled_cycles(keyed_random.keys(0, [0]), "orders", size=3, count=6).view(2, 3).sort().values.tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    rounds = -(-count // size)
    parts = [
        keyed_random.bits(some, stream, rounds, size).argsort(dim=-1, stable=True).flatten(1)[:, :count].clone()
        for some in key_blocks(keys, rounds * size)
    ]
    return torch.cat(parts)


def key_blocks(keys: Tensor, each: int) -> tuple[Tensor, ...]:
    """Splits the keys into blocks, so that drawing ``each`` numbers per key needs bounded memory."""
    return torch.split(keys, max(1, _BLOCK // each))


def insert_patch(decisive: Tensor, others: Tensor, place: Tensor) -> Tensor:
    """Returns (…, N): ``decisive`` (…) at the index ``place`` (…), and ``others`` (…, N − 1) around it in order.

    >>> insert_patch(torch.tensor([7]), torch.tensor([[1, 2, 3]]), torch.tensor([2])).tolist()
    [[1, 2, 7, 3]]
    """
    N = others.shape[-1] + 1
    n, place = torch.arange(N, device=others.device), place.unsqueeze(-1)
    source = torch.where(n == place, 0, n + (n < place))
    return torch.cat([decisive.unsqueeze(-1), others], dim=-1).gather(-1, source)
