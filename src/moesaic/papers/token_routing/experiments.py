"""The cells of our claims on routing by token: networks, epochs and trials of each preset.

Cell names begin with the network's kind:

- **vit**: `vit_tiny_patch4_32` and its relatives on all of CIFAR-10. ``dense`` trains on in four branches: as it is and
  split, for a tenth of the epochs (`SPLIT_SHARE`); as it is and upcycled, for half of them (`UPCYCLE_SHARE`).
- **resnet**: `wrn22_1`, the pre-activation form of ResNet-20 with as many weights, trained on and upcycled alike.
- **labels**: a ViT and a wide residual network, each dense and with expert choice, on few labels.
- **costs**: multiply-adds of all networks that are compared, without training.

Peers of equal cost are dense networks: of nine blocks in place of twelve for skipping, with MLPs of half the width for
`split`. ``longer`` trains a dense network from scratch for as long as an upcycled one and its start together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from moesaic.models.model_cost import count_macs
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import AnalyticCell, Cell
from moesaic.papers.engine.runner import Runner
from moesaic.papers.token_routing.continued_training import SIDE, Branch, Option, TokenCell, converted, network
from moesaic.papers.token_routing.vit_recipe import FINE_TUNING_LR, vit_recipe
from moesaic.training.recipe import Recipe

__all__ = [
    "COMPARED_COSTS",
    "LABELS",
    "LABEL_ARMS",
    "SIZES",
    "VIT_ARMS",
    "CostCell",
    "Sizes",
    "gpu_hours",
    "plan",
]

VIT = "vit_tiny_patch4_32"
RESNET = "wrn22_1"
_CIFAR10_IMAGES = 50_000

SPLIT_SHARE = 0.1
UPCYCLE_SHARE = 0.5
LABELS = (1000, 4000)

EXPERTS = 8
TOKENS = 64
_CLUSTERED_IMAGES = 512

SPLIT: tuple[Option, ...] = (
    ("layer", "blocks.*.mlp"),
    ("experts", EXPERTS),
    ("tokens_per_expert", TOKENS // 2),
    ("init", "split"),
)
"""Every expert has an eighth of the hidden neurons and takes half of the tokens."""
UPCYCLE_VIT: tuple[Option, ...] = (("layer", "every-2"), ("experts", EXPERTS), ("init", "upcycle"))
UPCYCLE_RESNET: tuple[Option, ...] = (
    ("layer", "body.group3.*.conv2"),
    ("experts", EXPERTS),
    ("init", "upcycle"),
    ("combine", "sum"),
)
"""Every expert is a copy of the convolution, on an eighth of the patches."""

VIT_ARMS: Mapping[str, tuple[str, tuple[Option, ...]]] = MappingProxyType(
    {
        "dense": (VIT, ()),
        "moe": (f"{VIT}_moe", ()),
        "soft": (f"{VIT}_soft_moe", (("capacity", 0.875),)),  # dispatch and combine cost the other eighth
        "skip": (f"{VIT}_skip", ()),
        "shallow": (VIT, (("depth", 9),)),
        "narrow": (VIT, (("mlp_ratio", 2.0),)),
    }
)
"""Networks that train on all images, with options of `create_model`."""

LABEL_ARMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"vit": (VIT, f"{VIT}_moe"), "wrn": ("wrn10_10", "wrn10_10_pmoe")}
)
"""Networks that train on few labels: dense, and with expert choice."""

COMPARED_COSTS: tuple[tuple[str, str], ...] = (
    ("moe", "dense"),
    ("soft", "dense"),
    ("split", "narrow"),
    ("skip", "shallow"),
    ("upcycled", "dense"),
    ("resnet-upcycled", "resnet"),
)
"""Networks, and the dense ones that have as many multiply-adds."""


@dataclass(frozen=True)
class Sizes:
    """Lengths and numbers of the runs of a preset."""

    epochs: int
    trials: int
    label_images: int
    """Images that a network sees in training on few labels, with repetition."""
    label_trials: int


SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "full": Sizes(epochs=200, trials=3, label_images=1_000_000, label_trials=5),
        "short": Sizes(epochs=20, trials=3, label_images=100_000, label_trials=3),
    }
)

ASSUMED_IMAGES_PER_SECOND = 10_000
"""Images of 32×32 pixels that a GPU is assumed to train on in a second. An assumption for estimates of hours."""


@dataclass(frozen=True)
class CostCell(AnalyticCell):
    """Counts the multiply-adds of the networks of the claims, for one image."""

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "token routing costs", "networks": {name: asdict(arm) for name, arm in _ARMS.items()}}

    def measure(self, runner: Runner) -> dict[str, Any]:
        return {name: arm.macs() for name, arm in _ARMS.items()}


@dataclass(frozen=True)
class _Arm:
    network: str
    options: tuple[Option, ...] = ()
    conversion: tuple[Option, ...] = ()

    def macs(self) -> int:
        """Multiply-adds for one image, counted without computing."""
        with torch.device("meta"):
            model = converted(network(self.network, self.options), self.conversion)
            return count_macs(model, (3, SIDE, SIDE)).macs


_ARMS: Mapping[str, _Arm] = MappingProxyType(
    {
        **{name: _Arm(*arm) for name, arm in VIT_ARMS.items()},
        "split": _Arm(VIT, conversion=SPLIT),
        "upcycled": _Arm(VIT, conversion=UPCYCLE_VIT),
        "resnet": _Arm(RESNET),
        "resnet-upcycled": _Arm(RESNET, conversion=UPCYCLE_RESNET),
    }
)


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[Any]:
    """Returns the cells by name: all in our form; in the quick preset the costs alone."""
    if fidelity != "best":
        return {}
    cells: dict[str, Cell[Any]] = {"costs": CostCell()}
    if preset in SIZES:
        sizes = SIZES[preset]
        for trial in range(sizes.trials):
            cells |= _vit_cells(sizes.epochs, trial) | _resnet_cells(sizes.epochs, trial)
        for trial in range(sizes.label_trials):
            cells |= _label_cells(sizes.label_images, trial)
    return cells


def gpu_hours(cells: Iterable[Cell[Any]]) -> float:
    """Returns an estimate of the hours that cells take on one GPU, from `ASSUMED_IMAGES_PER_SECOND`.

    >>> gpu_hours([TokenCell(VIT, 0, vit_recipe(200))])
    0.2777777777777778
    """
    images = sum(cell.steps * (cell.samples or _CIFAR10_IMAGES) for cell in set(cells) if isinstance(cell, TokenCell))
    return images / ASSUMED_IMAGES_PER_SECOND / 3600


def _vit_cells(epochs: int, trial: int) -> dict[str, Cell[Any]]:
    recipe, few, many = vit_recipe(epochs), round(SPLIT_SHARE * epochs), round(UPCYCLE_SHARE * epochs)
    cells: dict[str, Cell[Any]] = {
        f"vit/{name}/{trial}": TokenCell(VIT_ARMS[name][0], trial, recipe, VIT_ARMS[name][1])
        for name in ("moe", "soft", "skip", "shallow")
    }
    branches = (
        Branch("tuned", _tuning(few)),
        Branch("split", _tuning(few), SPLIT, _CLUSTERED_IMAGES),
        Branch("continued", _tuning(many)),
        Branch("upcycled", _tuning(many), UPCYCLE_VIT),
    )
    cells[f"vit/dense/{trial}"] = TokenCell(VIT, trial, recipe, branches=branches)
    cells[f"vit/narrow/{trial}"] = TokenCell(VIT, trial, vit_recipe(epochs + few), VIT_ARMS["narrow"][1])
    cells[f"vit/longer/{trial}"] = TokenCell(VIT, trial, vit_recipe(epochs + many))
    return cells


def _resnet_cells(epochs: int, trial: int) -> dict[str, Cell[Any]]:
    many = round(UPCYCLE_SHARE * epochs)
    branches = (Branch("continued", _tuning(many)), Branch("upcycled", _tuning(many), UPCYCLE_RESNET))
    return {
        f"resnet/dense/{trial}": TokenCell(RESNET, trial, vit_recipe(epochs), branches=branches),
        f"resnet/longer/{trial}": TokenCell(RESNET, trial, vit_recipe(epochs + many)),
    }


def _label_cells(images: int, trial: int) -> dict[str, Cell[Any]]:
    return {
        f"labels/{kind}/{arm}/{samples}/{trial}": TokenCell(name, trial, vit_recipe(images // samples), samples=samples)
        for kind, names in LABEL_ARMS.items()
        for arm, name in zip(("dense", "routed"), names, strict=True)
        for samples in LABELS
    }


def _tuning(epochs: int) -> Recipe:
    return vit_recipe(epochs, FINE_TUNING_LR)
