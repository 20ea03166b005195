"""The shallow network whose embedding of an image determines the channel gates.

Wang et al. 2019 (DeepMoE): a few 3×3 convolutions at stride 2, four for small images and five for large ones, about
2 % of the backbone's multiply-adds. A classifier of its own trains the embedding to separate classes; without it, gates
are nearly the same for every image. Widths double with every convolution up to eight times the first, as maps shrink to
a quarter: that spreads the work evenly, and the embedding gets most of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.models.resnet import LARGE_IMAGE, conv_bn

__all__ = ["EmbeddingNetwork", "embedding_macs", "embedding_widths"]

_MIN_WIDTH = 8
_MAX_FACTOR = 8
"""The last convolutions have this many times the channels of the first."""


class EmbeddingNetwork(nn.Module):
    """3×3 convolutions at stride 2, each with BatchNorm and ReLU, and the mean over the map: an embedding (B, D).

    A linear layer computes logits (B, num_classes) from it.

    Args:
        in_channels: channels of the images.
        widths: output channels of its convolutions; the last is D.
        num_classes: number of classes.

    >>> import torch
    >>> embedding, logits = EmbeddingNetwork(3, (8, 16, 32), num_classes=10)(torch.zeros(2, 3, 32, 32))
    >>> embedding.shape, logits.shape
    (torch.Size([2, 32]), torch.Size([2, 10]))
    """

    def __init__(self, in_channels: int, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        if not widths:
            raise ValueError("EmbeddingNetwork: widths is empty; give the channels of one convolution or more")
        given = {f"widths[{number}]": width for number, width in enumerate(widths)}
        check_positive("EmbeddingNetwork", in_channels=in_channels, num_classes=num_classes, **given)
        convs = [conv_bn(before, width, 3, stride=2) for before, width in pairwise((in_channels, *widths))]
        self.body = nn.Sequential(*(layer for conv in convs for layer in (*conv, nn.ReLU())))
        self.head: nn.Module = nn.Linear(widths[-1], num_classes)
        self.dimension = widths[-1]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.body(x).mean((2, 3))
        return embedding, self.head(embedding)


def embedding_macs(widths: Sequence[int], *, in_channels: int, image_size: int, num_classes: int, gates: int) -> int:
    """Multiply-adds for one image: the convolutions, the classifier and heads with ``gates`` gates in all.

    >>> embedding_macs((8, 16), in_channels=3, image_size=32, num_classes=10, gates=100)
    130784
    """
    macs, side = widths[-1] * (num_classes + gates), image_size
    for before, width in pairwise((in_channels, *widths)):
        side = (side + 1) // 2
        macs += before * width * 9 * side**2
    return macs


def embedding_widths(
    budget: float, *, in_channels: int, image_size: int, num_classes: int, gates: int
) -> tuple[int, ...]:
    """The widest convolutions whose `embedding_macs` stay within a budget; at least 8 channels.

    >>> embedding_widths(6.3e6, in_channels=3, image_size=32, num_classes=10, gates=4224)
    (37, 74, 148, 296)
    """
    number = 4 if image_size < LARGE_IMAGE else 5
    if image_size < 2**number:
        raise ValueError(
            f"EmbeddingNetwork: image_size={image_size}; {number} convolutions halve the map {number} times, so the "
            f"side must be at least {2**number}; enlarge the images"
        )

    def widths(first: int) -> tuple[int, ...]:
        return tuple(first * min(2**place, _MAX_FACTOR) for place in range(number))

    def cost(first: int) -> int:
        return embedding_macs(
            widths(first), in_channels=in_channels, image_size=image_size, num_classes=num_classes, gates=gates
        )

    first = _MIN_WIDTH
    while cost(first + 1) <= budget:
        first += 1
    return widths(first)
