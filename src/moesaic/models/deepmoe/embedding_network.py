"""The shallow network that looks at an image first, so that gates know which channels to open for it.

Wang et al. 2019 (DeepMoE): a few 3×3 convolutions at stride 2, four for small images and five for large ones, about
2 % of the work of the network that they steer. A classifier of its own makes the embedding tell classes apart, without
which gates are nearly the same for every image. Widths double with every convolution up to eight times the first, as
maps shrink to a quarter: that spreads the work evenly, and the embedding gets most of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.models.resnet import LARGE_IMAGE, conv_bn
from moesaic.ops import autocast_dtype
from moesaic.ops.channel.bn_folding import FoldedConvs
from moesaic.ops.hooks import Listeners

__all__ = ["EmbeddingNetwork", "embedding_macs", "embedding_widths"]

_LEAST_WIDTH = 8
_WIDEST = 8
"""The last convolutions have this many times the channels of the first."""


class EmbeddingNetwork(nn.Module):
    """3×3 convolutions at stride 2, each with BatchNorm and ReLU, and the mean over the map: an embedding (B, D).

    A linear layer gives scores (B, num_classes) from it.

    Args:
        in_channels: of the images.
        widths: channels of its convolutions; the last is D.
        num_classes: how many scores it gives.

    >>> import torch
    >>> embedding, scores = EmbeddingNetwork(3, (8, 16, 32), num_classes=10)(torch.zeros(2, 3, 32, 32))
    >>> embedding.shape, scores.shape
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
        self.head = nn.Linear(widths[-1], num_classes)
        self.dimension = widths[-1]
        self._listeners = Listeners(self.body.modules())
        self.folded = FoldedConvs([cast("tuple[nn.Conv2d, nn.BatchNorm2d]", tuple(conv)) for conv in convs])
        """Its convolutions, for networks that have learned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed(x)
        return embedding, self.head(embedding)

    def embed(self, x: Tensor) -> Tensor:
        """(B, D): the embedding alone."""
        return self.folded.mean(x) if self._may_fold(x) else self.body(x).mean((2, 3))

    def _may_fold(self, x: Tensor) -> bool:
        """Whether BatchNorm is a scale and a shift for good, which saves half of the time for one image."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export() or x.is_meta:
            return False
        if autocast_dtype(x) is not None or self._listeners:
            return False
        return not any(norm.training for _, norm in self.folded.layers)


def embedding_macs(widths: Sequence[int], *, in_channels: int, image_size: int, num_classes: int, gates: int) -> int:
    """Multiply-adds for one image: of the convolutions, of the classifier and of heads with so many gates in all.

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
    """The widest convolutions whose `embedding_macs` stay within a budget, but never fewer than 8 channels.

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
        return tuple(first * min(2**place, _WIDEST) for place in range(number))

    def cost(first: int) -> int:
        return embedding_macs(
            widths(first), in_channels=in_channels, image_size=image_size, num_classes=num_classes, gates=gates
        )

    first = _LEAST_WIDTH
    while cost(first + 1) <= budget:
        first += 1
    return widths(first)
