"""Checks of the conditions of theorems; errors name the inequality that fails."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_counts", "check_patch_indices", "check_samples", "require"]


def require(owner: str, holds: bool, inequality: str, found: str, way_out: str) -> None:
    """Raises ValueError unless the inequality holds.

    >>> require("Setting", False, "1 ≤ l ≤ n", "l=20, n=16", "an expert cannot take more patches than there are")
    Traceback (most recent call last):
    ValueError: Setting: 1 ≤ l ≤ n fails: l=20, n=16; an expert cannot take more patches than there are
    """
    if not holds:
        raise ValueError(f"{owner}: {inequality} fails: {found}; {way_out}")


def check_counts(owner: str, **counts: int) -> None:
    """Raises unless all counts are integers of at least 1.

    >>> check_counts("Setting", n=0)
    Traceback (most recent call last):
    ValueError: Setting: 1 ≤ n fails: n=0; give a whole number from 1 on
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a whole number")
        require(owner, value >= 1, f"1 ≤ {name}", f"{name}={value}", "give a whole number from 1 on")


def check_samples(owner: str, patches: Tensor, labels: Tensor, *, least: int = 1) -> int:
    """Returns the number of classes of samples (B, N, D) with labels (B,), of which each has at least ``least``."""
    if patches.ndim != 3 or not patches.is_floating_point() or not patches.numel():
        raise ValueError(
            f"{owner}: patches are {patches.dtype} of shape {tuple(patches.shape)}; give floating-point samples "
            "(B, N, D): B samples of N patches with D numbers each"
        )
    _check_integers(owner, "labels", labels, (len(patches),))
    counts = torch.bincount(labels.cpu() - labels.min().cpu().clamp(max=0))
    if labels.min() != 0 or len(counts) < 2 or counts.min() < least:
        raise ValueError(
            f"{owner}: labels run from {labels.min()} to {labels.max()}, with {counts.tolist()} samples of each class; "
            f"give two classes or more, counted from 0, with at least {least} of each"
        )
    return len(counts)


def check_patch_indices(owner: str, discriminative: Tensor, samples: int, patches: int) -> None:
    """Raises unless there is one patch index, from 0 to N − 1, for each sample."""
    _check_integers(owner, "discriminative", discriminative, (samples,))
    if ((discriminative < 0) | (discriminative >= patches)).any():
        raise ValueError(
            f"{owner}: discriminative names patches from {discriminative.min()} to {discriminative.max()}; "
            f"a sample has the patches 0 to {patches - 1}"
        )


def _check_integers(owner: str, name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{owner}: {name} are {values.dtype}; use {name}.long()")
    if values.shape != shape:
        raise ValueError(f"{owner}: {name} have shape {tuple(values.shape)}; give {shape}, one for each sample")
