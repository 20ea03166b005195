"""VGG-16 (Simonyan and Zisserman 2015) with BatchNorm, of any widths.

Thirteen 3×3 convolutions, ``conv1`` to ``conv13``, each followed by its BatchNorm (``norm1``, …) and ReLU; the map is
halved after the 2nd, 4th, 7th, 10th and 13th. For small images, such as CIFAR's, one linear layer reads the mean of
the last map, which is a single pixel at 32×32. For large ones two layers of 4096 neurons stand before it, as in print.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from moesaic.checks import at_least_one
from moesaic.models.backbone import GlobalMean, VectorNetwork
from moesaic.models.resnet import LARGE_IMAGE, widened
from moesaic.models.vgg_widths import VGG16_STAGES, VGG16_WIDTHS

__all__ = ["VGG16"]

_SMALLEST = 2 ** len(VGG16_STAGES)
_LAST_SIDE = 7
_HIDDEN = 4096


class VGG16(VectorNetwork):
    """VGG-16 for images (B, in_channels, H, W) with sides from 32 on.

    Args:
        classes: how many scores it gives.
        widths: channels of the thirteen convolutions; `moesaic.models.vgg_widths.WIDENINGS` has some.
        image_size: the side of the images it is made for; from 128 on it takes the form for ImageNet. Other sizes
            work too.
        in_channels: of the images.
        width: multiplies all widths.

    >>> import torch
    >>> VGG16(classes=10, width=0.25)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int,
        widths: Sequence[int] = VGG16_WIDTHS,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        width: float = 1.0,
    ) -> None:
        if len(widths) != len(VGG16_WIDTHS):
            raise ValueError(f"VGG16: {len(widths)} widths are given; it takes {len(VGG16_WIDTHS)}, one a convolution")
        given = {f"widths[{number}]": channels for number, channels in enumerate(widths)}
        at_least_one("VGG16", image_size=image_size, in_channels=in_channels, **given)
        if image_size < _SMALLEST:
            raise ValueError(
                f"VGG16: image_size={image_size}; it halves the map {len(VGG16_STAGES)} times, so the side must be at "
                f"least {_SMALLEST}; enlarge the images, or use a residual network"
            )
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        before, number = in_channels, 0
        for stage, convs in enumerate(VGG16_STAGES, start=1):
            for _ in range(convs):
                channels = widened("VGG16", widths[number], width)
                number += 1
                parts[f"conv{number}"] = nn.Conv2d(before, channels, 3, padding=1, bias=False)
                parts[f"norm{number}"] = nn.BatchNorm2d(channels)
                parts[f"relu{number}"] = nn.ReLU()
                before = channels
            parts[f"pool{stage}"] = nn.MaxPool2d(2)
        if image_size < LARGE_IMAGE:
            parts["mean"] = GlobalMean()
        else:
            parts |= {"resize": nn.AdaptiveAvgPool2d(_LAST_SIDE), "flatten": nn.Flatten()}
            for name, inputs in (("hidden1", before * _LAST_SIDE**2), ("hidden2", _HIDDEN)):
                parts[name] = nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Dropout())
            before = _HIDDEN
        super().__init__(nn.Sequential(parts), before, classes)
