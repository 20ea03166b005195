"""Do gates that depend on the image help at equal cost? Arms of networks on CIFAR-10 that differ in one thing each.

Each of `ARMS` trains each of `NETWORKS` to one cost: VGG-16 at a quarter and at half of its multiply-adds, and VGG-16
widened everywhere (W13-All) at those of VGG-16, which is the paper's own case. The controls are gates that are the same
for every image, trained by the same recipe, and static networks of smaller width. A cell is named
``equal-cost/ARM/NETWORK/TRIAL``; networks of a trial share their seed and the order of images. Beside the arms run the
network in full ("dense") and static networks of half of the cost ("narrow"), so that there is a static network on
either side of a cost that misses its target.

All train by SGD with the learning rate and weight decay that are the library's defaults for it, on one cosine schedule,
with random flips and shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moesaic.models.vgg import VGG16_WIDENINGS, VGG16_WIDTHS
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine import paper
from moesaic.papers.wang2019.experiments_vgg16 import (
    GateCell,
    GateResult,
    Option,
    runs_of,
    static_width,
    widened_target,
)
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe

__all__ = [
    "ARMS",
    "DEPENDENT",
    "FULL_EPOCHS",
    "NETWORKS",
    "SHORT_EPOCHS",
    "SHORT_NETWORKS",
    "TRIALS",
    "Arm",
    "Network",
    "arm_runs",
    "networks_of",
    "plan",
    "printed_l1",
    "sgd",
]

FULL_EPOCHS = 100
SHORT_EPOCHS = 20
TRIALS = 3
SHORT_NETWORKS = ("vgg16-0.25",)
"""Networks of the short preset."""

_EMBEDDING = 0.02
"""Multiply-adds of the embedding network and the heads, as a share of VGG-16's."""
_PRINTED_L1 = 1e-3
"""λ of public descriptions of the paper, for the sum of the gates of all layers."""


@dataclass(frozen=True)
class Network:
    """A network and the cost to which it is brought."""

    title: str
    backbone: str
    """A name of `create_model`."""
    widths: tuple[int, ...]
    cost: float
    """As a share of VGG-16's multiply-adds."""

    @property
    def gated(self) -> str:
        """The name of the network with gates."""
        return self.backbone.replace("vgg16", "vgg16_deepmoe")


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "vgg16-0.25": Network("VGG-16 at 0.25", "vgg16", VGG16_WIDTHS, 0.25),
        "vgg16-0.5": Network("VGG-16 at 0.5", "vgg16", VGG16_WIDTHS, 0.5),
        "w13-all": Network("W13-All at VGG-16's", "vgg16_w13_all", VGG16_WIDENINGS["w13_all"], 1.0),
    }
)
"""By name."""


@dataclass(frozen=True)
class Arm:
    """A way to bring a network to a cost."""

    title: str
    gates: GateRecipe | None = None
    """None for a static network; the target is added."""
    options: tuple[Option, ...] = ()
    """Options of the network with gates."""
    teacher: bool = False
    """Whether it learns from the network in full, trained by the same recipe."""
    control: str = ""
    """The arm that differs in the dependence on the image alone; empty for arms that do not depend on it."""


_HARD: tuple[Option, ...] = (("mode", "hard"),)
_CENTER: tuple[Option, ...] = (("center_embedding", True),)

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "static": Arm("smaller width"),
        "constant": Arm("gates the same for all images", GateRecipe(), (("embedding_share", 0.0),)),
        "constant-hard": Arm("hard gates the same for all images", GateRecipe(), (("embedding_share", 0.0), *_HARD)),
        "printed": Arm("printed λ, no bias", GateRecipe(layer_weights="gates"), (("bias", None),), control="constant"),
        "steered": Arm("steered to the cost", GateRecipe(), control="constant"),
        "centred": Arm("embedding centred", GateRecipe(), _CENTER, control="constant"),
        "hard": Arm("hard gates", GateRecipe(), (*_HARD, *_CENTER), control="constant-hard"),
        "shaped": Arm(
            "hard gates, batch shaping", GateRecipe(shaping_weight=1.0), (*_HARD, *_CENTER), control="constant-hard"
        ),
        "static-teacher": Arm("smaller width, teacher", teacher=True),
        "gates-teacher": Arm(
            "steered, teacher", GateRecipe(distill_weight=1.0), teacher=True, control="static-teacher"
        ),
    }
)
"""By name."""

DEPENDENT = tuple(name for name, arm in ARMS.items() if arm.control.startswith("constant"))
"""The forms of gates that depend on the image, without a teacher."""


def printed_l1(widths: Sequence[int]) -> float:
    """Returns λ as `GateRecipe` counts it, for λ = 0.001 times the sum of all gates of a network of these widths.

    With ``layer_weights="gates"`` a layer of E gates has weight E · layers / Σ E for its mean gate.

    >>> round(printed_l1([100, 300]), 6)
    0.2
    """
    return _PRINTED_L1 * sum(widths) / len(widths)


def sgd(epochs: int, gates: GateRecipe | None = None) -> Recipe:
    """Returns the recipe of all networks."""
    defaults = OPTIMIZER_DEFAULTS["sgd"]
    return Recipe(epochs, optimizer="sgd", lr=defaults.lr, weight_decay=defaults.weight_decay, gates=gates)


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[GateResult]:
    """Returns the cells by name: all in our form, none in the quick preset."""
    if preset == "quick" or fidelity != "best":
        return {}
    epochs, networks = (FULL_EPOCHS, tuple(NETWORKS)) if preset == "full" else (SHORT_EPOCHS, SHORT_NETWORKS)
    cells: dict[str, GateCell] = {}
    for trial in range(TRIALS):
        for name in networks:
            network = NETWORKS[name]
            cells[f"equal-cost/dense/{name}/{trial}"] = GateCell(network.backbone, trial, sgd(epochs))
            cells[f"equal-cost/narrow/{name}/{trial}"] = _static(network, network.cost / 2, trial, epochs)
            for arm_name, arm in ARMS.items():
                cells[f"equal-cost/{arm_name}/{name}/{trial}"] = _cell(arm, network, trial, epochs)
    return cells


def _cell(arm: Arm, network: Network, trial: int, epochs: int) -> GateCell:
    teacher = network.backbone if arm.teacher else ""
    if arm.gates is None:
        return _static(network, network.cost, trial, epochs, teacher)
    target, embedding = network.cost, _EMBEDDING
    if network.backbone != "vgg16":
        target, embedding = widened_target(network.backbone.removeprefix("vgg16_"))
    gates = replace(arm.gates, target_macs=target)
    if arm.gates.layer_weights == "gates":
        gates = replace(gates, l1_weight=printed_l1(network.widths))
    given = dict(arm.options)
    options = given if "embedding_share" in given else {"embedding_share": embedding, **given}
    return GateCell(network.gated, trial, sgd(epochs, gates), tuple(options.items()), teacher)


def _static(network: Network, cost: float, trial: int, epochs: int, teacher: str = "") -> GateCell:
    width = static_width(cost, network.widths)
    return GateCell(network.backbone, trial, sgd(epochs), (("width", width),), teacher)


def networks_of(experiment: paper.ExperimentResults[Any]) -> list[str]:
    """Returns the names of the networks that the plan has."""
    return [name for name in NETWORKS if any(cell.startswith(f"equal-cost/static/{name}/") for cell in experiment.plan)]


def arm_runs(experiment: paper.ExperimentResults[Any], arm: str, network: str) -> list[GateResult]:
    """Returns the trials of an arm, or of "dense" or "narrow"."""
    return runs_of(experiment, f"equal-cost/{arm}/{network}")
