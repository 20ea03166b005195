"""Two-dimensional t-SNE map of embeddings, with the nearest-neighbour accuracy in the embedding itself.

t-SNE may show clusters that do not exist. The map therefore comes with a number that is measured in the
embedding: how often the nearest neighbour of an image has its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moesaic.insight.class_routing import check_labels

__all__ = ["EmbeddingMap", "embedding_map", "tsne"]

_PERPLEXITY = 30.0
"""Number of neighbours that t-SNE aims at, if there are enough points; scikit-learn's default."""
MIN_IMAGES = 10
MAX_IMAGES = 2000
"""Only the first images are drawn: more would take minutes and overlap."""


@dataclass(frozen=True)
class EmbeddingMap:
    """A map of embeddings to the plane; made by `embedding_map`."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    """Of the first images, at most `MAX_IMAGES`; empty if there is no map."""
    why_not: str
    """Why there is no map; empty if there is one."""
    neighbours: float | None
    """Share of the images whose nearest neighbour in the embedding has their class."""
    by_chance: float | None
    """The same for random neighbours."""


def embedding_map(embedding: Tensor, labels: Tensor, *, seed: int = 0) -> EmbeddingMap:
    """Maps embeddings (B, D) of images with classes ``labels`` (B,) to the plane; deterministic for a seed.

    >>> points = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    >>> len(embedding_map(points, torch.zeros(12, dtype=torch.int64)).x)
    12
    >>> embedding_map(points[:2], torch.tensor([0, 1])).why_not
    'there are only 2 images, and a map needs at least 10'
    """
    labels = check_labels("embedding_map", labels, len(embedding), int(labels.max()) + 1 if len(labels) else 1)[
        :MAX_IMAGES
    ]
    points = embedding.detach().cpu().double()[:MAX_IMAGES]
    why_not = _why_not(points)
    if why_not:
        return EmbeddingMap((), (), why_not, None, None)
    distance_BB = torch.cdist(points, points)
    distance_BB.fill_diagonal_(torch.inf)
    share_K = labels.bincount().double() / len(labels)
    x, y = _tsne(points, seed).T
    return EmbeddingMap(
        tuple(round(float(value), 3) for value in x),
        tuple(round(float(value), 3) for value in y),
        "",
        neighbours=float((labels[distance_BB.argmin(1)] == labels).double().mean()),
        by_chance=float(share_K.square().sum()),
    )


def _why_not(points: Tensor) -> str:
    if len(points) < MIN_IMAGES:
        return (
            f"there {'is' if len(points) == 1 else 'are'} only {len(points)} image{'' if len(points) == 1 else 's'}, "
            f"and a map needs at least {MIN_IMAGES}"
        )
    if not bool(points.isfinite().all()):
        return "some embeddings are not finite: the network is broken"
    if float((points - points[0]).abs().max()) == 0:
        return "all images have the same embedding: the gates cannot distinguish them"
    return ""


def _tsne(points: Tensor, seed: int) -> NDArray[np.float64]:
    """(B, 2), initialised with the first two principal components."""
    points = points - points.mean(0)
    points = points / points.std(0).square().sum().sqrt()
    left, scale, _ = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.svd(points, full_matrices=False))
    start = torch.zeros(len(points), 2, dtype=torch.float64)
    directions = min(2, len(scale))
    start[:, :directions] = left[:, :directions] * scale[:directions]
    # the sign of a principal component is arbitrary
    start *= torch.where(start.gather(0, start.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)
    start = 1e-4 * start / start[:, 0].std()
    return tsne(points.float().numpy(), init=start.float().numpy(), seed=seed)


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
    layout: Any = TSNE(perplexity=min(_PERPLEXITY, (len(values) - 1) / 3), init=start, random_state=seed % (1 << 32))
    return np.asarray(layout.fit_transform(values), dtype=np.float64)
