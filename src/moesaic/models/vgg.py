"""VGG-16 (Simonyan and Zisserman 2015) with BatchNorm and configurable widths.

Thirteen 3×3 convolutions, ``conv1`` to ``conv13``, each followed by BatchNorm (``norm1``, …) and ReLU; 2×2 max-pooling
after the 2nd, 4th, 7th, 10th and 13th. For small images (CIFAR) the head is global average pooling and one linear
layer; for large images two hidden layers of 4096 neurons precede it, as in the paper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from moesaic.argument_checks import check_positive
from moesaic.models.feature_maps import FeatureDict
from moesaic.models.image_classifier import GlobalAvgPool, ImageClassifier
from moesaic.models.resnet import LARGE_IMAGE, scale_width

__all__ = ["VGG16", "VGG16_STAGES", "VGG16_WIDENINGS", "VGG16_WIDTHS"]

VGG16_STAGES = (2, 2, 3, 3, 3)
"""Number of convolutions before each max-pooling."""
VGG16_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
"""Channels of VGG-16's convolutions (Simonyan and Zisserman 2015, configuration D)."""
VGG16_WIDENINGS = {
    "w1_high": (*VGG16_WIDTHS[:12], 2565),
    "w1_mid": (*VGG16_WIDTHS[:4], 2990, *VGG16_WIDTHS[5:]),
    "w4_low": (512, 512, 615, 615, *VGG16_WIDTHS[4:]),
    "w13_all": (128, 128, 256, 256, *3 * (405,), *6 * (615,)),
}
"""Wider versions of equally many weights from Wang et al. 2019, Table 1 of the supplement."""

_MIN_IMAGE_SIZE = 2 ** len(VGG16_STAGES)
_LAST_SIDE = 7
_HIDDEN = 4096


class VGG16(ImageClassifier):
    """VGG-16 for images (B, in_channels, H, W) of at least 32×32 pixels.

    Args:
        num_classes: number of logits.
        widths: channels of the thirteen convolutions; `moesaic.models.vgg.VGG16_WIDENINGS` has some.
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
        if image_size < _MIN_IMAGE_SIZE:
            raise ValueError(
                f"VGG16: image_size={image_size}; it pools {len(VGG16_STAGES)} times, so image_size must be at "
                f"least {_MIN_IMAGE_SIZE}; enlarge the images, or use a residual network"
            )
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        maps: list[FeatureDict] = []
        previous, number = in_channels, 0
        for stage, convs in enumerate(VGG16_STAGES, start=1):
            for _ in range(convs):
                channels = scale_width("VGG16", widths[number], width)
                number += 1
                parts[f"conv{number}"] = nn.Conv2d(previous, channels, 3, padding=1, bias=False)
                parts[f"norm{number}"] = nn.BatchNorm2d(channels)
                parts[f"relu{number}"] = nn.ReLU()
                previous = channels
            maps.append({"num_chs": previous, "reduction": 2 ** (stage - 1), "module": f"body.relu{number}"})
            parts[f"pool{stage}"] = nn.MaxPool2d(2)
        maps.append({"num_chs": previous, "reduction": _MIN_IMAGE_SIZE, "module": f"body.pool{len(VGG16_STAGES)}"})
        if image_size < LARGE_IMAGE:
            parts["mean"] = GlobalAvgPool()
        else:
            parts |= {"resize": nn.AdaptiveAvgPool2d(_LAST_SIDE), "flatten": nn.Flatten()}
            for name, inputs in (("hidden1", previous * _LAST_SIDE**2), ("hidden2", _HIDDEN)):
                parts[name] = nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Dropout())
            previous = _HIDDEN
        super().__init__(nn.Sequential(parts), previous, num_classes, feature_info=maps)
