"""Heads: from the last map (B, C, H, W) or the last tokens (B, N, C) of a backbone to logits (B, num_classes).

`RoutedHead` routes; its peers here pool, by attention, mean or maximum, in front of one linear layer.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers.routed_head import RoutedHead, as_map

__all__ = ["HEAD_OPTIONS", "AttentionHead", "PooledHead", "Pooling", "create_head", "resize_head"]

Pooling = Literal["routed", "attention", "mean", "max"]

HEAD_OPTIONS = ("experts", "patches_per_expert", "gate")
"""Options of the routed head; the others have none."""


class PooledHead(nn.Module):
    """Mean or maximum over all positions, then a linear layer.

    >>> PooledHead(64, 10, pooling="max")(torch.zeros(2, 64, 7, 7)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        pooling: Literal["mean", "max"] = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("PooledHead", in_channels=in_channels, num_classes=num_classes)
        self.pooling: Literal["mean", "max"] = check_choice("PooledHead", "pooling", pooling, ("mean", "max"))
        self.classifier = nn.Linear(in_channels, num_classes, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        positions = as_map("PooledHead", x, self.classifier.in_features, self.classifier.weight).flatten(2)
        return self.classifier(positions.mean(2) if self.pooling == "mean" else positions.amax(2))

    def extra_repr(self) -> str:
        return f"pooling={self.pooling!r}"


class AttentionHead(nn.Module):
    """Attention pooling with one learned query, then a linear layer.

        logits = W Σₙ aₙ xₙ,  a = softmaxₙ(⟨q, xₙ⟩)

    The attention of Ilse et al. 2018 (eq. 8) without a hidden layer: what `RoutedHead` is with one expert that takes
    all positions.

    >>> AttentionHead(64, 10)(torch.zeros(2, 49, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("AttentionHead", in_channels=in_channels, num_classes=num_classes)
        self.query = nn.Linear(in_channels, 1, bias=False, device=device, dtype=dtype)
        self.classifier = nn.Linear(in_channels, num_classes, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        positions_BNC = (
            as_map("AttentionHead", x, self.classifier.in_features, self.classifier.weight).flatten(2).transpose(1, 2)
        )
        attention_BN1 = self.query(positions_BNC).softmax(1)
        return self.classifier((attention_BN1 * positions_BNC).sum(1))


def create_head(pooling: Pooling, in_channels: int, num_classes: int, **options: Any) -> nn.Module:
    """Creates a head by name: ``"routed"``, ``"attention"``, ``"mean"`` or ``"max"``.

    ``options`` are those of `RoutedHead`.

    >>> type(create_head("routed", 64, 10, experts=4)).__name__, type(create_head("mean", 64, 10)).__name__
    ('RoutedHead', 'PooledHead')
    """
    check_choice("create_head", "head", pooling, get_args(Pooling))
    if pooling == "routed":
        return RoutedHead(in_channels, num_classes, **options)
    if options:
        given, value = next(iter(options.items()))
        raise TypeError(
            f"create_head: head={pooling!r} has no option {given!r}, got {given}={value!r}; leave it out, or use "
            "head='routed'"
        )
    if pooling == "attention":
        return AttentionHead(in_channels, num_classes)
    return PooledHead(in_channels, num_classes, pooling=pooling)


def resize_head(head: nn.Module, num_classes: int) -> nn.Module:
    """Returns a new head of the same kind and options for another number of classes.

    >>> resize_head(create_head("routed", 64, 10, experts=4), 3)(torch.zeros(2, 64, 7, 7)).shape
    torch.Size([2, 3])
    """
    if isinstance(head, RoutedHead):
        own = head.moe
        options = {"experts": len(own.experts), "patches_per_expert": own.patches_per_expert, "gate": own.gate}
        made = create_head("routed", own.in_channels, num_classes, **options)
    elif isinstance(head, AttentionHead):
        made = create_head("attention", head.classifier.in_features, num_classes)
    elif isinstance(head, PooledHead):
        made = create_head(head.pooling, head.classifier.in_features, num_classes)
    else:
        raise TypeError(f"resize_head: {type(head).__name__} is not a head of create_head; replace it by one of yours")
    weight = next(head.parameters())
    return made.to(weight.device, weight.dtype).train(head.training)
