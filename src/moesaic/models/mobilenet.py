"""MobileNetV2 (Sandler et al. 2018) for 32×32 images.

The form usual for CIFAR: a 3×3 stem at stride 1, no stride in the first two stages, and a 1×1 shortcut convolution
where a block of stride 1 changes the number of channels.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.feature_maps import FeatureDict
from moesaic.models.image_classifier import GlobalAvgPool, ImageClassifier
from moesaic.models.resnet import conv_bn

__all__ = ["MobileNetV2"]


class MobileNetV2(ImageClassifier):
    """Seventeen inverted residual blocks between two convolutions; the last map of a 32×32 image is 4×4.

    >>> sum(weight.numel() for weight in MobileNetV2(num_classes=10).parameters())
    2296922
    """

    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = [conv_bn(3, 32, 3), nn.ReLU()]
        in_channels = 32
        # expansion, channels, blocks, stride of the first block: Table 2 of Sandler et al. without two of its strides
        stages = (
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        maps: list[FeatureDict] = []
        reduction = 1
        for expansion, channels, blocks, stride in stages:
            if stride > 1:  # the last map of a resolution
                maps.append({"num_chs": in_channels, "reduction": reduction, "module": f"body.{len(layers) - 1}"})
                reduction *= stride
            for block in range(blocks):
                layers.append(_InvertedResidual(in_channels, channels, expansion, stride if block == 0 else 1))
                in_channels = channels
        layers += [conv_bn(in_channels, 1280, 1), nn.ReLU()]
        maps.append({"num_chs": 1280, "reduction": reduction, "module": f"body.{len(layers) - 1}"})
        super().__init__(nn.Sequential(*layers, GlobalAvgPool()), 1280, num_classes, feature_info=maps)


class _InvertedResidual(nn.Module):
    """1×1 expansion, 3×3 depthwise convolution, 1×1 projection without ReLU; a shortcut where the stride is 1."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.widen = conv_bn(in_channels, hidden, 1)
        self.filter = conv_bn(hidden, hidden, 3, stride, groups=hidden)
        self.narrow = conv_bn(hidden, channels, 1)
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = nn.Identity() if in_channels == channels else conv_bn(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(F.relu(self.filter(F.relu(self.widen(x)))))
        return y if self.shortcut is None else y + self.shortcut(x)
