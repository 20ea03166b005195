"""Residual networks (He et al. 2016): ResNet-18, 34 and 50 for small and large images, ResNet-56 for small images.

- Stem: for small images (CIFAR) a 3×3 convolution at stride 1 without pooling; for large images a 7×7 convolution at
  stride 2, followed by 3×3 max-pooling at stride 2.
- Every convolution is followed by BatchNorm (`conv_bn`): the BatchNorm of ``body.2.first.0`` is ``body.2.first.1``.
- Where the shape changes, the shortcut is a 1×1 convolution, in ResNet-56 too.
- A bottleneck has its stride in the 3×3 convolution, as torchvision's and timm's do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.models.feature_maps import FeatureDict
from moesaic.models.image_classifier import GlobalAvgPool, ImageClassifier

__all__ = ["LARGE_IMAGE", "RESNET_DEPTHS", "ResNet", "ResNet18", "conv_bn", "scale_width"]

LARGE_IMAGE = 128
"""Smallest image side for which networks are built in their ImageNet form."""

_SAFE_CHANNELS = 16
"""Input channels from which oneDNN's strided 1×1 convolutions are safe; see `_subsampled_conv`."""

_EXPANSION = 4
"""Output channels of a bottleneck, as a multiple of those of its 3×3 convolution."""


@dataclass(frozen=True)
class _Plan:
    """Blocks and width of each stage; every stage after the first starts with stride 2."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512)
    bottleneck: bool = False
    small_only: bool = False


_PLANS: Mapping[int, _Plan] = MappingProxyType(
    {
        18: _Plan((2, 2, 2, 2)),
        34: _Plan((3, 4, 6, 3)),
        50: _Plan((3, 4, 6, 3), bottleneck=True),
        56: _Plan((9, 9, 9), widths=(16, 32, 64), small_only=True),
    }
)
RESNET_DEPTHS = tuple(_PLANS)


class ResNet(ImageClassifier):
    """ResNet-18, 34, 50 or 56 for images (B, in_channels, H, W).

    Args:
        depth: 18, 34, 50 or 56.
        num_classes: number of logits.
        image_size: height and width of the images; from 128 on the network has the ImageNet form. The network also
            runs on images of other sizes.
        in_channels: channels of the images.
        width: width multiplier of every convolution.

    >>> import torch
    >>> ResNet(56, num_classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> with torch.device("meta"):
    ...     network = ResNet(50, num_classes=1000, image_size=224)
    >>> sum(weight.numel() for weight in network.parameters())
    25557032
    """

    def __init__(
        self, depth: int, num_classes: int, *, image_size: int = 32, in_channels: int = 3, width: float = 1.0
    ) -> None:
        plan = _PLANS[check_choice("ResNet", "depth", depth, RESNET_DEPTHS)]
        check_positive("ResNet", image_size=image_size, in_channels=in_channels)
        large = image_size >= LARGE_IMAGE
        if large and plan.small_only:
            raise ValueError(
                f"ResNet: depth={depth} is for small images, got image_size={image_size}; "
                f"use a side below {LARGE_IMAGE}, or depth=50"
            )
        widths = [scale_width("ResNet", channels, width) for channels in plan.widths]
        previous = widths[0]
        layers: list[nn.Module] = [conv_bn(in_channels, previous, 7 if large else 3, 2 if large else 1), nn.ReLU()]
        reduction = 2 if large else 1
        maps: list[FeatureDict] = [{"num_chs": previous, "reduction": reduction, "module": "body.1"}]
        if large:
            reduction *= 2
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        kind, expansion = (_Bottleneck, _EXPANSION) if plan.bottleneck else (_BasicBlock, 1)
        for stage, (channels, blocks) in enumerate(zip(widths, plan.blocks, strict=True)):
            for block in range(blocks):
                layers.append(kind(previous, channels, 2 if stage > 0 and block == 0 else 1))
                previous = expansion * channels
            reduction *= 2 if stage > 0 else 1
            maps.append({"num_chs": previous, "reduction": reduction, "module": f"body.{len(layers) - 1}"})
        super().__init__(nn.Sequential(*layers, GlobalAvgPool()), previous, num_classes, feature_info=maps)


class ResNet18(ResNet):
    """ResNet-18 for 32×32 images with three channels.

    >>> sum(weight.numel() for weight in ResNet18(num_classes=10).parameters())
    11173962
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(18, num_classes)


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(in_channels, channels, 3, stride)
        self.second = conv_bn(channels, channels, 3)
        self.shortcut = _shortcut(in_channels, channels, stride)
        self.relu1 = nn.ReLU()  # a module, so that gates of its channels can come after it

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.relu1(self.first(x))) + self.shortcut(x))


class _Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(in_channels, channels, 1)
        self.second = conv_bn(channels, channels, 3, stride)
        self.third = conv_bn(channels, _EXPANSION * channels, 1)
        self.shortcut = _shortcut(in_channels, _EXPANSION * channels, stride)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu2(self.second(self.relu1(self.first(x))))
        return F.relu(self.third(y) + self.shortcut(x))


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    if in_channels == channels and stride == 1:
        return nn.Identity()
    shortcut = conv_bn(in_channels, channels, 1, stride)
    if stride == 2 and in_channels < _SAFE_CHANNELS:
        vars(shortcut[0])["_conv_forward"] = _subsampled_conv
    return shortcut


def _subsampled_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1×1 convolution at stride 2, as one at stride 1 of every second pixel.

    In channels_last, the weight gradient of strided 1×1 convolutions with few input channels overruns a buffer of
    oneDNN (https://github.com/uxlfoundation/oneDNN/issues/6035): the process ends, or its memory is corrupt. This takes
    the place of a method of ``nn.Conv2d``; traces would look into a subclass.
    """
    return F.conv2d(x[:, :, ::2, ::2], weight, bias)


def conv_bn(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Returns a convolution without bias, with "same" padding at stride 1, and its BatchNorm.

    >>> conv_bn(3, 8, 3)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
      (1): BatchNorm2d(8, ...)
    )
    """
    conv = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


def scale_width(owner: str, channels: int, width: float) -> int:
    """Returns ``channels`` times the multiplier ``width``, rounded, at least 1.

    >>> scale_width("ResNet", 64, 0.3)
    19
    """
    limit = "above 0: 1 is the usual width, 0.5 halves all channels"
    check_numbers(owner, limit, lambda value: 0 < value < math.inf, {"width": width})
    return max(round(channels * width), 1)
