"""Data for many trials at once: every trial has samples of its own, drawn from patches they may share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.data.splits import Split

__all__ = ["PatchSource", "TrialData"]


@dataclass(frozen=True, eq=False)
class TrialData:
    """T data sets of B samples with N patches each.

    Samples refer to their patches by row number: T trials on one collection of digits need that
    collection once, and B · N numbers each.
    """

    pool: Tensor
    """(P, D) float32: all patches there are."""
    index: Tensor
    """(T, B, N) int64: which row of the pool lies on each place of each sample."""
    labels: Tensor
    """(T, B) int64: the class, from 0; for two classes, 1 is the paper's y = +1 and 0 its y = −1."""
    discriminative: Tensor
    """(T, B) int64: the place of the patch that decides the class."""

    def __len__(self) -> int:
        """T, the number of trials."""
        return len(self.index)

    @property
    def patches(self) -> Tensor:
        """(T, B, N, D): the samples themselves. Large; the trial engine gathers a minibatch at a time instead."""
        return self.pool[self.index]


class PatchSource(Protocol):
    """Where trials get their samples from."""

    @property
    def classes(self) -> int:
        """How many classes there are."""
        ...

    @property
    def patches(self) -> int:
        """N, patches in a sample."""
        ...

    @property
    def dim(self) -> int:
        """D, numbers in a patch."""
        ...

    def draw(self, keys: Tensor, samples: int, split: Split) -> TrialData:
        """``samples`` samples for every key (see `moesaic.keyed_random`), as many of each class.

        What a key gets does not depend on the other keys. The two splits share no source patch
        where the source is finite.
        """
        ...
