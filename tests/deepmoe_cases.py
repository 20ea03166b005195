"""Networks with channel gates in float64, for tests of frozen networks."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models import ResNet
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16

__all__ = ["CLASSES", "NETWORKS", "build", "gate", "images", "small"]

CLASSES = 4


def small(widths: tuple[int, ...] = (8, 7, 6)) -> nn.Sequential:
    """Three convolutions, the second without BatchNorm; pooling, a stride, and a linear layer."""
    first, second, third = widths
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(second, third, 3, padding=1, bias=False),
        nn.BatchNorm2d(third, eps=1e-3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, CLASSES),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "single channels": (lambda: VGG16(CLASSES, width=0.25), {}),
    "blocks": (lambda: VGG16(CLASSES, width=0.25), {"mode": "topk", "keep": 0.5, "block": 8}),
    "short blocks": (lambda: VGG16(CLASSES, width=0.25), {"block": 3}),
    "small": (small, {"image_size": 16}),
    "shortcuts": (lambda: ResNet(18, CLASSES, width=0.1), {"mode": "topk", "keep": 0.5, "block": 2}),
    "bottlenecks": (lambda: ResNet(50, CLASSES, width=0.05), {"bottleneck": "b"}),
}


FORMS: dict[str, dict[str, Any]] = {
    "hard gates": {"mode": "hard", "block": 2},
    "centred embedding": {"center_embedding": True},
    "constant gates": {"embedding_share": 0.0},
    "constant hard gates": {"embedding_share": 0.0, "mode": "hard"},
}


def gate(network: nn.Module, **options: Any) -> DeepMoE:
    """A DeepMoE in float64 whose images open about half of the channels; BatchNorms have statistics of their own."""
    torch.manual_seed(0)
    model = deepmoe(network, num_classes=CLASSES, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    model.double().eval()
    with torch.no_grad():
        embedding, _ = model.embedding(images(16, size=options.get("image_size", 32)))
        for head in model.heads().values():
            nn.init.normal_(head.weight)
            if options.get("embedding_share") != 0:
                head.bias.copy_(-(embedding @ head.weight.T).mean(0))  # every image opens other channels
            else:
                head.bias.zero_()
    return model


def build(name: str = "blocks") -> DeepMoE:
    """A copy of the gated network of that name, and random numbers as they are after it was made."""
    model, random_state = _built(name)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@cache
def _built(name: str) -> tuple[DeepMoE, Tensor]:
    make, options = NETWORKS[name]
    return gate(make(), **options), torch.get_rng_state()


def images(batch: int, seed: int = 0, size: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, size, size, dtype=torch.float64, generator=generator)
    return x * (0.5 + torch.rand(batch, 3, 1, 1, dtype=torch.float64, generator=generator))
