"""Points of many dimensions in a plane, by t-SNE: what Figures 1, 7 and 8 of Chen et al. 2022 are drawn with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["in_plane"]


def in_plane(points: ArrayLike) -> NDArray[np.float64]:
    """(B, D) → (B, 2), the same for the same points; those that were near each other are so again.

    >>> in_plane(np.random.default_rng(0).normal(size=(20, 5))).shape
    (20, 2)
    """
    from sklearn.manifold import TSNE

    values = np.asarray(points, dtype=np.float32)
    layout: Any = TSNE(perplexity=min(30.0, (len(values) - 1) / 3), init="pca", random_state=0)
    return np.asarray(layout.fit_transform(values), dtype=np.float64)
