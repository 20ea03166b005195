"""The shallow network whose embedding of an image determines the channel gates.

Wang et al. 2019 (DeepMoE): a few 3×3 convolutions at stride 2, four for small images and five for large ones, about
2 % of the backbone's multiply-adds. A classifier of its own trains the embedding to separate classes; without it, gates
are nearly the same for every image. Widths double with every convolution up to eight times the first, as maps shrink to
a quarter: that spreads the work evenly, and the embedding gets most of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeGuard

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.models.resnet import LARGE_IMAGE, conv_bn
from moesaic.ops import kernels_available
from moesaic.ops.channel.bn_folding import batch_norm_tensors
from moesaic.ops.eager_conditions import is_plain_eager
from moesaic.ops.hook_detection import has_hooks
from moesaic.ops.triton_backend import norm_relu

__all__ = ["ConstantEmbedding", "EmbeddingNetwork", "embedding_macs", "embedding_widths", "unit_scale"]

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
        center: whether a BatchNorm without affine parameters follows, for the gate heads alone: every number of the
            embedding then has mean 0 and variance 1 over images, and a head's bias is the mean score of its gate.

    >>> import torch
    >>> embedding, logits = EmbeddingNetwork(3, (8, 16, 32), num_classes=10)(torch.zeros(2, 3, 32, 32))
    >>> embedding.shape, logits.shape
    (torch.Size([2, 32]), torch.Size([2, 10]))
    """

    center: nn.BatchNorm1d | None

    def __init__(self, in_channels: int, widths: Sequence[int], num_classes: int, *, center: bool = False) -> None:
        super().__init__()
        if not widths:
            raise ValueError("EmbeddingNetwork: widths is empty; give the channels of one convolution or more")
        given = {f"widths[{number}]": width for number, width in enumerate(widths)}
        check_positive("EmbeddingNetwork", in_channels=in_channels, num_classes=num_classes, **given)
        convs = [conv_bn(before, width, 3, stride=2) for before, width in pairwise((in_channels, *widths))]
        self.body = nn.Sequential(*(layer for conv in convs for layer in (*conv, nn.ReLU())))
        self.head: nn.Module = nn.Linear(widths[-1], num_classes)
        self.center = nn.BatchNorm1d(widths[-1], affine=False) if center else None
        self.dimension = widths[-1]
        self.in_channels = in_channels

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self._map(x).mean((2, 3))
        logits = self.head(embedding)
        return embedding if self.center is None else self.center(embedding), logits

    def _map(self, x: Tensor) -> Tensor:
        """What ``body`` computes; where GPU kernels run, BatchNorm and ReLU in one pass."""
        if not (is_plain_eager(x) and kernels_available(x)) or has_hooks(self.body):
            return self.body(x)
        layers = list(self.body)
        for conv, norm, relu in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = conv(x)
            if _is_plain_norm(norm) and type(relu) is nn.ReLU and not (has_hooks(norm) or has_hooks(relu)):
                x = norm_relu(x, batch_norm_tensors(norm))
            else:
                x = relu(norm(x))
        return x


def _is_plain_norm(norm: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """Whether a layer is torch's BatchNorm with weights and running statistics."""
    return type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None


class ConstantEmbedding(nn.Module):
    """The number 1 as the embedding of every image: gates do not depend on the image, and each has a learned score.

    It has no classifier; its logits are 0.

    >>> embedding, logits = ConstantEmbedding(3, num_classes=10)(torch.rand(2, 3, 32, 32))
    >>> embedding.tolist(), logits.shape
    ([[1.0], [1.0]], torch.Size([2, 10]))
    """

    dimension = 1

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(len(x), 1), x.new_zeros(len(x), self.num_classes)


def unit_scale(center: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Mean and factor (D,) with which a centred embedding is (e − mean) · factor in eval mode.

    >>> unit_scale(nn.BatchNorm1d(2, affine=False, eps=0.0))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    assert center.running_mean is not None and center.running_var is not None
    return center.running_mean, torch.rsqrt(center.running_var + center.eps)


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
