"""VGG-16 (Simonyan and Zisserman 2015) with BatchNorm and configurable widths.

Thirteen 3×3 convolutions, ``conv1`` to ``conv13``, each followed by BatchNorm (``norm1``, …) and ReLU; 2×2 max-pooling
after the 2nd, 4th, 7th, 10th and 13th. For small images (CIFAR) the head is global average pooling and one linear
layer; for large images two hidden layers of 4096 neurons precede it, as in the paper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from moesaic.checks import check_positive
from moesaic.models.image_classifier import GlobalAvgPool, ImageClassifier
from moesaic.models.resnet import LARGE_IMAGE, scale_width
from moesaic.models.vgg_widths import VGG16_STAGES, VGG16_WIDTHS

__all__ = ["VGG16"]

_SMALLEST = 2 ** len(VGG16_STAGES)
_LAST_SIDE = 7
_HIDDEN = 4096


class VGG16(ImageClassifier):
    """VGG-16 for images (B, in_channels, H, W) of at least 32×32 pixels.

    Args:
        num_classes: number of logits.
        widths: channels of the thirteen convolutions; `moesaic.models.vgg_widths.WIDENINGS` has some.
        image_size: height and width of the images; from 128 on the network has the ImageNet form. The network also
            runs on images of other sizes.
        in_channels: channels of the images.
        width: width multiplier of every convolution.

    >>> import torch
    >>> VGG16(num_classes=10, width=0.25)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int,
        widths: Sequence[int] = VGG16_WIDTHS,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        width: float = 1.0,
    ) -> None:
        if len(widths) != len(VGG16_WIDTHS):
            raise ValueError(f"VGG16: got {len(widths)} widths; give {len(VGG16_WIDTHS)}, one per convolution")
        given = {f"widths[{number}]": channels for number, channels in enumerate(widths)}
        check_positive("VGG16", image_size=image_size, in_channels=in_channels, **given)
        if image_size < _SMALLEST:
            raise ValueError(
                f"VGG16: image_size={image_size}; it pools {len(VGG16_STAGES)} times, so image_size must be at "
                f"least {_SMALLEST}; enlarge the images, or use a residual network"
            )
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        previous, number = in_channels, 0
        for stage, convs in enumerate(VGG16_STAGES, start=1):
            for _ in range(convs):
                channels = scale_width("VGG16", widths[number], width)
                number += 1
                parts[f"conv{number}"] = nn.Conv2d(previous, channels, 3, padding=1, bias=False)
                parts[f"norm{number}"] = nn.BatchNorm2d(channels)
                parts[f"relu{number}"] = nn.ReLU()
                previous = channels
            parts[f"pool{stage}"] = nn.MaxPool2d(2)
        if image_size < LARGE_IMAGE:
            parts["mean"] = GlobalAvgPool()
        else:
            parts |= {"resize": nn.AdaptiveAvgPool2d(_LAST_SIDE), "flatten": nn.Flatten()}
            for name, inputs in (("hidden1", previous * _LAST_SIDE**2), ("hidden2", _HIDDEN)):
                parts[name] = nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Dropout())
            previous = _HIDDEN
        super().__init__(nn.Sequential(parts), previous, num_classes)
