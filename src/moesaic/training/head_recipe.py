"""Learning rates of heads on a frozen backbone, chosen on tasks with few labels (``docs/heads.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moesaic.training.recipe import Recipe

__all__ = ["HEAD_LRS", "head_recipe"]

HEAD_LRS: Mapping[str, float] = MappingProxyType({"mean": 3e-3, "max": 3e-3, "attention": 1e-2, "routed": 3e-2})
"""Peak learning rate of each head under AdamW."""


def head_recipe(recipe: Recipe, head: str | None = None) -> Recipe:
    """Returns the recipe with the learning rate of a head, for ``trainable="head"`` under AdamW.

    Args:
        recipe: the recipe; with another optimizer or other trainable layers, it is returned as it is.
        head: as in `create_head`; None: the network's own classifier, which mostly follows mean pooling.

    >>> head_recipe(Recipe(epochs=50, trainable="head"), "routed").lr
    0.03
    """
    if recipe.optimizer != "adamw" or recipe.trainable != "head":
        return recipe
    return replace(recipe, lr=HEAD_LRS.get(head or "mean", HEAD_LRS["mean"]))
