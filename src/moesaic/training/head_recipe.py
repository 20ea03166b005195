"""Learning rates of heads on a frozen backbone, chosen on tasks with few labels (``docs/heads.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moesaic.training.recipe import Recipe

__all__ = ["HEAD_LRS", "head_recipe"]

HEAD_LRS: Mapping[str, float] = MappingProxyType({"mean": 3e-3, "max": 3e-3, "attention": 1e-2, "routed": 1e-2})
"""Peak learning rate of each head under AdamW."""


def head_recipe(recipe: Recipe, head: str | None = None) -> Recipe:
    """Returns the recipe with the learning rates of a head, for ``trainable="head"`` under AdamW.

    Routers of the routed head learn as fast as its experts: the features they score are already learned.

    Args:
        recipe: the recipe; with another optimizer or other trainable layers, it is returned as it is.
        head: as in `create_head`; None: the network's own classifier, which mostly follows mean pooling.

    >>> recipe = head_recipe(Recipe(epochs=50, trainable="head"), "routed")
    >>> recipe.lr, recipe.router_lr
    (0.01, 0.01)
    """
    if recipe.optimizer != "adamw" or recipe.trainable != "head":
        return recipe
    lr = HEAD_LRS.get(head or "mean", HEAD_LRS["mean"])
    return replace(recipe, lr=lr, router_lr=lr if head == "routed" else recipe.router_lr)
