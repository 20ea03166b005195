"""A small network with channel gates, and images large enough for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from training.squares import TASK as SQUARES
from training.squares import seeded

from moesaic.data.image_dataset import LabelledImages
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

LONG = Recipe(epochs=4, batch_size=12, lr=0.003, gates=GateRecipe(target_macs=0.5, joint_fraction=0.5))


def _enlarged(images: LabelledImages) -> LabelledImages:
    return replace(images, pixels=images.pixels.repeat_interleave(2, 2).repeat_interleave(2, 3))


TASK = replace(SQUARES, train=_enlarged(SQUARES.train), test=_enlarged(SQUARES.test))


def backbone(width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for before, stride in ((3, 1), (width, 2), (width, 1)):
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


def gated(seed: int = 0, **options: Any) -> DeepMoE:
    model = seeded(lambda: deepmoe(backbone(), num_classes=2, image_size=16, **options), seed)
    assert isinstance(model, DeepMoE)
    return model


def gate_state(model: DeepMoE) -> list[torch.Tensor]:
    """All that decides which channels are open."""
    parts = (model.embedding, model.gates)
    return [tensor.detach().clone() for part in parts for tensor in part.state_dict().values()]


def images(count: int = 12) -> torch.Tensor:
    return SQUARES.eval_transform(TASK.test.pixels[:count], torch.zeros(count, 3))
