"""t-SNE: points of many dimensions as a map in two dimensions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PERPLEXITY", "tsne"]

PERPLEXITY = 30.0
"""Number of neighbours that t-SNE aims at, if there are enough points; scikit-learn's default."""


def tsne(
    points: ArrayLike, *, init: Literal["pca"] | NDArray[np.float32] = "pca", seed: int = 0
) -> NDArray[np.float64]:
    """Maps points (B, D) to (B, 2) so that neighbours stay neighbours; deterministic.

    Args:
        points: At least two points; computed in float32.
        init: Initial positions: "pca" for the principal components, or an array (B, 2).
        seed: Seed of scikit-learn's random numbers.

    >>> tsne(np.random.default_rng(0).normal(size=(20, 5))).shape
    (20, 2)
    """
    from sklearn.manifold import TSNE

    values = np.asarray(points, dtype=np.float32)
    start: Any = init  # scikit-learn types it as a name only
    layout: Any = TSNE(perplexity=min(PERPLEXITY, (len(values) - 1) / 3), init=start, random_state=seed % (1 << 32))
    return np.asarray(layout.fit_transform(values), dtype=np.float64)
