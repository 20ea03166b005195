"""Heads on frozen backbones have learning rates of their own; whatever else is trained keeps the recipe's."""

from dataclasses import replace

import pytest

from moesaic.layers.heads import Pooling
from moesaic.training.head_recipe import HEAD_LRS, head_recipe
from moesaic.training.recipe import Recipe

RECIPE = Recipe(epochs=3, trainable="head")


def test_every_head_has_a_learning_rate() -> None:
    assert set(HEAD_LRS) == set(Pooling.__args__)


@pytest.mark.parametrize("head", sorted(HEAD_LRS))
def test_a_head_gets_its_learning_rate(head: str) -> None:
    found = head_recipe(RECIPE, head)
    assert found.lr == HEAD_LRS[head]
    assert found == replace(RECIPE, lr=found.lr)


def test_the_classifier_of_a_network_counts_as_mean_pooling() -> None:
    assert head_recipe(RECIPE) == head_recipe(RECIPE, "mean")


@pytest.mark.parametrize("changes", [{"trainable": "all"}, {"trainable": "last-2"}, {"optimizer": "sgd", "lr": 0.03}])
def test_other_recipes_stay_as_they_are(changes: dict[str, str]) -> None:
    recipe = replace(RECIPE, **changes)
    assert head_recipe(recipe, "routed") is recipe
