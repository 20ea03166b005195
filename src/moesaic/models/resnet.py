"""Residual networks (He et al. 2016): ResNet-18, 34 and 50 for small and for large images, ResNet-56 for small ones.

For small images, such as CIFAR's, the stem is a 3×3 convolution at stride 1 without pooling, since they have no
pixels to give away; for large ones it is 7×7 at stride 2, followed by 3×3 max-pooling at stride 2. Every convolution
has its BatchNorm behind it: `conv_norm` pairs them, and at ``body.2.first.0`` is a convolution whose BatchNorm is
``body.2.first.1``. Where the shape changes, a block adds a 1×1 convolution of its input in place of the input, in
ResNet-56 as well; bottlenecks halve the map in their 3×3 convolution, as is usual now, rather than in the 1×1 one
before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.checks import at_least_one, one_of
from moesaic.models.backbone import GlobalMean, VectorNetwork

__all__ = ["LARGE_IMAGE", "RESNET_DEPTHS", "ResNet", "conv_norm", "widened"]

LARGE_IMAGE = 128
"""From this side on, networks that have two forms take the one for ImageNet."""

_EXPANSION = 4
"""A bottleneck gives four times the channels that its 3×3 convolution has."""


@dataclass(frozen=True)
class _Plan:
    """How many blocks each stage has, and of which width; stages after the first halve the map."""

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


class ResNet(VectorNetwork):
    """ResNet-18, 34, 50 or 56 for images (B, in_channels, H, W).

    Args:
        depth: 18, 34, 50 or 56.
        classes: how many scores it gives.
        image_size: the side of the images it is made for; from 128 on it takes the form for ImageNet. Other sizes
            work too.
        in_channels: of the images.
        width: multiplies the channels of every convolution.

    >>> import torch
    >>> ResNet(56, classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> with torch.device("meta"):
    ...     network = ResNet(50, classes=1000, image_size=224)
    >>> sum(weight.numel() for weight in network.parameters())
    25557032
    """

    def __init__(
        self, depth: int, classes: int, *, image_size: int = 32, in_channels: int = 3, width: float = 1.0
    ) -> None:
        plan = _PLANS[one_of("ResNet", "depth", depth, RESNET_DEPTHS)]
        at_least_one("ResNet", image_size=image_size, in_channels=in_channels)
        large = image_size >= LARGE_IMAGE
        if large and plan.small_only:
            raise ValueError(
                f"ResNet: depth={depth} is made for small images, got image_size={image_size}; "
                f"use a side below {LARGE_IMAGE}, or depth=50"
            )
        widths = [widened("ResNet", channels, width) for channels in plan.widths]
        before = widths[0]
        layers: list[nn.Module] = [conv_norm(in_channels, before, 7 if large else 3, 2 if large else 1), nn.ReLU()]
        if large:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        for stage, (channels, blocks) in enumerate(zip(widths, plan.blocks, strict=True)):
            for number in range(blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                if plan.bottleneck:
                    layers.append(_Bottleneck(before, channels, stride))
                    before = _EXPANSION * channels
                else:
                    layers.append(_BasicBlock(before, channels, stride))
                    before = channels
        super().__init__(nn.Sequential(*layers, GlobalMean()), before, classes)


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions beside the identity, or beside a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(before, channels, 3, stride)
        self.second = conv_norm(channels, channels, 3)
        self.shortcut = _shortcut(before, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class _Bottleneck(nn.Module):
    """A 3×3 convolution between a 1×1 one that narrows and one that widens, beside the identity or a 1×1 one."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(before, channels, 1)
        self.second = conv_norm(channels, channels, 3, stride)
        self.third = conv_norm(channels, _EXPANSION * channels, 1)
        self.shortcut = _shortcut(before, _EXPANSION * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(F.relu(self.first(x))))
        return F.relu(self.third(y) + self.shortcut(x))


def _shortcut(before: int, channels: int, stride: int) -> nn.Module:
    same = before == channels and stride == 1
    return nn.Identity() if same else conv_norm(before, channels, 1, stride)


def conv_norm(before: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps the size of the map but for its stride, and BatchNorm.

    >>> conv_norm(3, 8, 3)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
      (1): BatchNorm2d(8, ...)
    )
    """
    conv = nn.Conv2d(before, channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


def widened(owner: str, channels: int, width: float) -> int:
    """``channels`` times ``width``, rounded, and never none.

    >>> widened("ResNet", 64, 0.3)
    19
    """
    if not 0 < width < float("inf"):
        raise ValueError(f"{owner}: width={width}; it must be above 0: 1 leaves channels as they are, 0.5 halves them")
    return max(round(channels * width), 1)
