"""Base class of image classifiers: a body that maps images to feature vectors, and a linear head."""

from __future__ import annotations

from torch import Tensor, nn

from moesaic.checks import check_positive

__all__ = ["GlobalAvgPool", "ImageClassifier"]


class ImageClassifier(nn.Module):
    """Maps images (B, C, H, W) to logits (B, num_classes): ``head(body(x))``.

    Args:
        body: maps images to feature vectors (B, num_features).
        num_features: length of a feature vector.
        num_classes: number of logits.
    """

    def __init__(self, body: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        check_positive(type(self).__name__, num_classes=num_classes)
        self.body = body
        self.head = nn.Linear(num_features, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Returns the feature vectors (B, num_features) that the head reads."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class GlobalAvgPool(nn.Module):
    """Mean over height and width: (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
