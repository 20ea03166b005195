"""Datasets of many trials at once: each trial has its own samples, made of patches from a common pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.data.splits import Split

__all__ = ["PatchSource", "TrialData"]


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
