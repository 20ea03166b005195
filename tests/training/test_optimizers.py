"""All weights that are trained have one optimizer; fused SGD has the steps of the plain one."""

import math
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn
from training.squares import LONG, dense, mixture, routed

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


def test_fused_sgd_takes_weights_whose_first_gradient_comes_later():
    """As those of an expert that gets no sample in the first step."""

    def trained(fused: bool) -> list[Tensor]:
        model = dense()
        (optimizer,) = build_optimizers(model, LONG, CPU, capturable=fused)
        for part in (model[1], model, model):
            for parameter in part.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
        return list(model.parameters())

    torch.testing.assert_close(trained(fused=True), trained(fused=False))


def test_fused_sgd_goes_on_after_a_first_gradient_that_overflows():
    parameter = nn.Parameter(torch.ones(3))
    recipe = replace(LONG, weight_decay=0.0)
    (optimizer,) = build_optimizers(nn.ParameterList([parameter]), recipe, CPU, capturable=True)
    scaler = torch.amp.GradScaler("cpu")
    torch.use_deterministic_algorithms(True)  # memory that is not initialised is then NaN
    for gradient in (math.inf, 1.0):
        parameter.grad = scaler.scale(torch.full((3,), gradient))
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - LONG.lr))
