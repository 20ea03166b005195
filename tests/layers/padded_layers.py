"""Layers and batches for tests of experts on padded samples."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic


class Chosen(nn.Module):
    """Scores that the first pixels of a sample give: whoever makes the samples chooses their experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, : len(self.weight)] @ self.weight


def samples_for(loads: list[int], shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random samples, of which expert e is the first choice of ``loads[e]``, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    expert = torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))
    expert = expert[torch.randperm(len(expert), generator=generator)]
    x = torch.randn(len(expert), *shape, generator=generator, dtype=torch.float64)
    x.flatten(1)[torch.arange(len(expert)), expert] += 20
    return x


class Block(nn.Module):
    """A residual block with a gate on its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(x + 0.5 * y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))))


class Viewed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.dropout(x, 0.5, training=False), 2)
        return self.layer(torch.cat([y, 2 * y], 1).view(y.size(0), -1))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(), Block()
    ),
    "pooled": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
    "viewed": lambda: Viewed(nn.Sequential(nn.Linear(54, 5, bias=False), nn.BatchNorm1d(5, affine=False), nn.Tanh())),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm((6, 6)), nn.Linear(6, 3), nn.LayerNorm(3), nn.Dropout(0.0)),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.Conv2d(2, 2, 3, padding_mode="circular")
    ),
    "untracked": lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Identity()),
}


def layer_of(make: Callable[[], nn.Module], experts: int = 4, **options: Any) -> moesaic.SampleMoE:
    torch.manual_seed(0)
    options = {"noise": None, "pad": True} | options
    layer = moesaic.SampleMoE(Chosen(experts), [make() for _ in range(experts)], **options).double()
    with torch.no_grad():
        for name, each in [*layer.experts.named_parameters(), *layer.experts.named_buffers()]:
            if not name.endswith("tracked"):
                each.add_(0.3 * torch.rand_like(each))
    return layer


def one_by_one(layer: moesaic.SampleMoE) -> moesaic.SampleMoE:
    other = copy.deepcopy(layer)
    other.pad = False
    return other
