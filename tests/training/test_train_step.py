"""A learner's state is all that it is: what is taken out and put into another makes the same of it."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training.squares import LONG, SCALE, TASK, dense, mixture, routed, same

from moesaic.training.recipe import Recipe
from moesaic.training.train_step import TrainStep

CPU = torch.device("cpu")
X, LABELS = SCALE(TASK.train.pixels), TASK.train.labels
RECIPES = {
    "sgd": LONG,
    "adamw, mean": replace(LONG, optimizer="adamw", learning_rate=0.01, ema=0.9),
    "normalized_gd, mean": replace(LONG, optimizer="normalized_gd", ema=0.9, balance=0.1),
    "float16": replace(LONG, precision="float16"),
}


def taught(learner: TrainStep, steps: int) -> list[float]:
    """The losses of so many steps."""
    learner.model.train()
    with learner.watching():
        return [float(learner.step(X, LABELS, 0.5)[0]) for _ in range(steps)]


@pytest.mark.parametrize("make", [dense, routed, mixture])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_taken_out_and_put_in_again_is_the_same_learner(recipe, make):
    with torch.random.fork_rng(devices=[]):
        learner, other = TrainStep(make(), recipe, CPU, 2), TrainStep(make(5), recipe, CPU, 2)
        spoil_one_gradient(learner)
        taught(learner, 3)
        tensors, content = learner.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        losses = taught(learner, 2)
        other.restore(tensors, json.loads(json.dumps(content)))
        restored, written = other.state()
        assert written == content
        assert restored.keys() == tensors.keys()
        assert all(torch.equal(restored[name], tensor) for name, tensor in tensors.items())
        assert taught(other, 2) == losses
        assert same(learner.model, other.model)


def spoil_one_gradient(learner: TrainStep) -> None:
    """In the first step, if the loss has a scale to be adapted."""
    if learner.recipe.precision != "float16":
        return
    calls = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * math.inf if calls == 1 else gradient

    next(learner.model.parameters()).register_hook(spoil)


def test_a_step_in_float16_whose_gradient_overflows_is_left_out_and_the_scale_halved():
    model, untouched = dense(), dense()
    learner = TrainStep(model, RECIPES["float16"], CPU, 2)
    spoil_one_gradient(learner)
    before: dict[str, Any] = learner.state()[1]["scaler"]
    taught(learner, 1)
    assert same(model, untouched)
    assert learner.state()[1]["scaler"]["scale"] == before["scale"] / 2
    taught(learner, 1)
    assert not same(model, untouched)
    assert learner.finite()


def test_the_mean_is_there_for_a_test_and_gone_after_it():
    learner = TrainStep(dense(), replace(LONG, ema=0.9), CPU, 2)
    taught(learner, 3)
    trained = dense()
    trained.load_state_dict(learner.model.state_dict())
    with learner.averaged():
        assert not same(learner.model, trained)
    assert same(learner.model, trained)
    learner.average()
    assert not same(learner.model, trained)


def test_all_weights_that_learn_have_an_optimizer_and_only_one():
    for make in (dense, routed, mixture):
        for optimizer in ("sgd", "adamw", "normalized_gd"):
            model = make()
            next(model.parameters()).requires_grad_(False)
            learner = TrainStep(model, Recipe(epochs=1, optimizer=optimizer), CPU, 2)
            groups = [group for each in learner._optimizers for group in each.param_groups]
            held = [id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad]
            assert sorted(held) == sorted(id(each) for each in model.parameters() if each.requires_grad)
