"""All weights that are trained have one optimizer."""

from typing import get_args

import torch
from training.squares import dense, mixture, routed

from moesaic.training.optimizers import build_optimizers
from moesaic.training.recipe import OptimizerName, Recipe

CPU = torch.device("cpu")


def test_all_weights_that_learn_have_an_optimizer_and_only_one():
    for make in (dense, routed, mixture):
        for optimizer in get_args(OptimizerName):
            model = make()
            next(model.parameters()).requires_grad_(False)
            optimizers = build_optimizers(model, Recipe(epochs=1, optimizer=optimizer), CPU)
            groups = [group for each in optimizers for group in each.param_groups]
            held = [id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad]
            assert sorted(held) == sorted(id(each) for each in model.parameters() if each.requires_grad)
