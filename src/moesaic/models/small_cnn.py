"""A small CNN for 32×32 images (Chen et al. 2022, Appendix A.3)."""

from __future__ import annotations

from torch import nn

from moesaic.models.feature_maps import FeatureDict
from moesaic.models.image_classifier import ImageClassifier

__all__ = ["SmallCNN"]


class SmallCNN(ImageClassifier):
    """Two 3×3 convolutions with ReLU, each followed by 2×2 max-pooling, and a linear head.

    Args:
        num_classes: number of logits.
        filters: output channels of the two convolutions.
        side: height and width of the images.

    >>> import torch
    >>> SmallCNN(num_classes=10)(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    def __init__(self, num_classes: int, filters: tuple[int, int] = (64, 128), side: int = 32) -> None:
        first, second = filters
        body = nn.Sequential(
            nn.Conv2d(3, first, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        last_side = ((side - 2) // 2 - 2) // 2
        maps: list[FeatureDict] = [
            {"num_chs": first, "reduction": 1, "module": "body.1"},
            {"num_chs": second, "reduction": 2, "module": "body.4"},
            {"num_chs": second, "reduction": 4, "module": "body.5"},
        ]
        super().__init__(body, second * last_side * last_side, num_classes, feature_info=maps)
