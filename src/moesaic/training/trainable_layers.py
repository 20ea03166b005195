"""Frozen layers and layer-wise learning rates: ``Recipe(trainable=…, layer_decay=…)``."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import cast

from torch import nn

from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.layer_groups import layer_groups
from moesaic.models.registry import ModelSpec

__all__ = ["default_trainable", "eval_frozen", "freeze_layers", "frozen_parameters", "layer_factors"]


FEW_IMAGES = 5000
"""Training images below which the backbone of a pretrained network is frozen by default."""


def default_trainable(specs: Iterable[ModelSpec], images: int) -> str:
    """Returns ``"head"`` for pretrained networks and few training images, else ``"all"``.

    A converted layer begins with random weights or another input, so that a network with one is trained as a whole;
    beside it, so are all networks that it is compared with.

    >>> default_trainable([ModelSpec.parse("timm/resnet18:pretrained")], 200)
    'head'
    >>> default_trainable([ModelSpec.parse("timm/resnet18:pretrained:convert=layer4.1.conv2:experts=8")], 200)
    'all'
    """
    pretrained = [spec for spec in specs if spec.is_pretrained]
    converted = any(spec.conversions for spec in pretrained)
    return "head" if pretrained and not converted and images < FEW_IMAGES else "all"


def frozen_parameters(model: nn.Module, trainable: str) -> frozenset[str]:
    """Returns the names of the parameters that ``Recipe(trainable=…)`` freezes.

    >>> from moesaic.models import create_model
    >>> model = create_model("wrn10_1", num_classes=2)
    >>> sorted({name.split(".")[1] for name in frozen_parameters(model, "last-1")})
    ['group1', 'group2', 'stem']
    """
    if trainable == "all":
        return frozenset()
    if isinstance(model, DeepMoE):
        raise ValueError(
            f"fit: trainable={trainable!r}, but channel gates and their network are trained together; use "
            "trainable='all' for networks with channel gates"
        )
    groups = layer_groups(model)
    last = 0 if trainable == "head" else int(trainable.removeprefix("last-"))
    if last >= len(groups) - 1 and last:
        raise ValueError(
            f"fit: trainable={trainable!r}, but {type(model).__name__} has {len(groups) - 1} layers before its "
            "classifier; use fewer, or trainable='all'"
        )
    return frozenset(name for group in groups[: len(groups) - 1 - last] for name in group)


@contextmanager
def freeze_layers(model: nn.Module, trainable: str) -> Generator[None]:
    """Inside, frozen parameters need no gradients."""
    names = frozen_parameters(model, trainable)
    frozen = [parameter for name, parameter in model.named_parameters() if name in names and parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def eval_frozen(model: nn.Module) -> None:
    """Puts modules whose parameters are all frozen into eval mode: BatchNorm keeps its statistics."""
    trained: set[str] = set()  # names of modules with a parameter to train somewhere inside
    for name, parameter in cast("Iterable[tuple[str, nn.Parameter]]", model.named_parameters()):
        if parameter.requires_grad:
            parts = name.split(".")
            trained.update(".".join(parts[:depth]) for depth in range(len(parts)))
    _eval_frozen(model, "", trained)


def _eval_frozen(module: nn.Module, name: str, trained: set[str]) -> None:
    if name in trained:
        for part, child in module.named_children():
            _eval_frozen(child, f"{name}.{part}" if name else part, trained)
    elif next(module.parameters(), None) is not None:
        module.eval()


def layer_factors(model: nn.Module, layer_decay: float | None) -> dict[int, float]:
    """Returns the factors of layer-wise learning rates by the id of the parameter; empty: all are 1."""
    if layer_decay is None:
        return {}
    groups, parameters = layer_groups(model), dict(model.named_parameters())
    return {
        id(parameters[name]): layer_decay ** (len(groups) - 1 - depth)
        for depth, group in enumerate(groups)
        for name in group
    }
