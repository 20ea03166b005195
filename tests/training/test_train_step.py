"""The state of a train step is complete: restored into another one, it continues with the same numbers."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training.squares import LONG, SCALE, TASK, dense, mixture, routed, same

from moesaic.training.train_step import TrainStep

CPU = torch.device("cpu")
X, LABELS = SCALE(TASK.train.pixels), TASK.train.labels
RECIPES = {
    "sgd": LONG,
    "adamw, ema": replace(LONG, optimizer="adamw", lr=0.01, ema_decay=0.9),
    "normalized_gd, ema": replace(LONG, optimizer="normalized_gd", ema_decay=0.9),
    "float16": replace(LONG, precision="float16"),
}


def losses_of(train_step: TrainStep, steps: int) -> list[float]:
    """The losses of so many steps."""
    train_step.model.train()
    train_step.set_learning_rates(0.5)
    return [float(train_step.step(X, LABELS, 0.5)[0]) for _ in range(steps)]


@pytest.mark.parametrize("make", [dense, routed, mixture])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_restored_train_step_continues_with_the_same_numbers(recipe, make):
    with torch.random.fork_rng(devices=[]):
        train_step, other = TrainStep(make(), recipe, CPU, 2), TrainStep(make(5), recipe, CPU, 2)
        spoil_one_gradient(train_step)
        losses_of(train_step, 3)
        tensors, content = train_step.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        losses = losses_of(train_step, 2)
        other.restore(tensors, json.loads(json.dumps(content)))
        restored, written = other.state()
        assert written == content
        assert restored.keys() == tensors.keys()
        assert all(torch.equal(restored[name], tensor) for name, tensor in tensors.items())
        assert losses_of(other, 2) == losses
        assert same(train_step.model, other.model)


def spoil_one_gradient(train_step: TrainStep) -> None:
    """In the first step, if the loss has a scale to be adapted."""
    if train_step.recipe.precision != "float16":
        return
    calls = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * math.inf if calls == 1 else gradient

    next(train_step.model.parameters()).register_hook(spoil)


def test_a_step_in_float16_whose_gradient_overflows_is_left_out_and_the_scale_halved():
    model, untouched = dense(), dense()
    train_step = TrainStep(model, RECIPES["float16"], CPU, 2)
    spoil_one_gradient(train_step)
    before: dict[str, Any] = train_step.state()[1]["scaler"]
    losses_of(train_step, 1)
    assert same(model, untouched)
    assert train_step.state()[1]["scaler"]["scale"] == before["scale"] / 2
    losses_of(train_step, 1)
    assert not same(model, untouched)
    assert train_step.finite()


def test_the_ema_weights_are_there_for_a_test_and_gone_after_it():
    train_step = TrainStep(dense(), replace(LONG, ema_decay=0.9), CPU, 2)
    losses_of(train_step, 3)
    trained = dense()
    trained.load_state_dict(train_step.model.state_dict())
    with train_step.ema_weights():
        assert not same(train_step.model, trained)
    assert same(train_step.model, trained)
    train_step.load_ema()
    assert not same(train_step.model, trained)


def test_the_ema_follows_the_weights_at_the_decay_of_the_step():
    train_step = TrainStep(dense(), replace(LONG, ema_decay=0.25), CPU, 2)
    mean = next(train_step.model.parameters()).detach().clone()
    for steps in range(1, 4):
        losses_of(train_step, 1)
        decay = min(0.25, (1 + steps) / (10 + steps))
        mean = decay * mean + (1 - decay) * next(train_step.model.parameters()).detach()
    with train_step.ema_weights():
        torch.testing.assert_close(next(train_step.model.parameters()).detach(), mean)
