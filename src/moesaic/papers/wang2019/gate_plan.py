"""The runs on CIFAR-10 as cells: which networks, at which costs, how long.

Three questions, `cost/`, `wide/` and `remedy/` among the names of cells:

- **cost**: is VGG-16 with gates (DeepMoE) more accurate than a narrower VGG-16 of as many multiply-adds? At each of
  `COSTS`, and VGG-16 itself.
- **wide**: the supplement's Table 1 widens VGG-16 in four ways, to equally many weights and to 1.1 to 13.8 times the
  work. Here each is gated down to the multiply-adds of VGG-16 itself, so that weights *and* work are equal, and each
  also runs without gates, at equal weights alone. Beside them VGG-16, and VGG-16 gated to half of its work.
- **remedy**: what could help gates if they are not ahead, each tried at a cost of `REMEDY_COST`.

The supplement prints no outcome, and of the main paper's training nothing is at hand: networks are in our form (gates
behind BatchNorm, heads with a bias) and all train by our recipe, those with gates in two stages. Runs are short, so
that all of them fit on one GPU in twelve minutes: `EPOCHS` over all images, and `WIDE_EPOCHS` for the widenings, of
which one takes fourteen times the work. Networks that are compared train equally long, in the same order of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moesaic.fidelity import Fidelity
from moesaic.models.vgg_widths import VGG16_WIDTHS, WIDENINGS, conv_macs
from moesaic.papers.engine import claims
from moesaic.papers.wang2019.gate_cells import CLASSES, VGG16_MACS, GateCell, GateResult, Option
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

__all__ = [
    "COSTS",
    "EPOCHS",
    "HALF",
    "REMEDIES",
    "REMEDY_COST",
    "REMEDY_TRIALS",
    "TRIALS",
    "WIDE_EPOCHS",
    "WIDE_TRIALS",
    "Remedy",
    "kept_share",
    "plan",
    "static_width",
    "widened_target",
]

COSTS = (0.12, 0.25, 0.5)
"""Shares of VGG-16's multiply-adds at which gates and static widths are compared."""
EPOCHS = 10
TRIALS = 3
"""Of the comparison at equal cost."""
WIDE_EPOCHS = 4
WIDE_TRIALS = 2
REMEDY_COST = 0.25
REMEDY_TRIALS = 2
HALF = 0.5
"""The share of its own work to which VGG-16 is gated beside its widenings."""

_EMBEDDING = 0.02
"""What the embedding network and the heads cost, as a share of the network they gate; `deepmoe` has it as default."""


@dataclass(frozen=True)
class Remedy:
    """Something that may make gates better, tried at `REMEDY_COST`."""

    about: str
    """What it does, after "With"."""
    gates: GateRecipe
    options: tuple[Option, ...] = ()
    teacher: str = ""


def static_width(cost: float) -> float:
    """By how much all widths of VGG-16 are multiplied so that it has this share of its multiply-adds.

    >>> [static_width(cost) for cost in (0.5, 0.25, 0.12)]
    [0.707, 0.498, 0.3457]
    """
    return _solved(lambda width: _share([max(round(channels * width), 1) for channels in VGG16_WIDTHS]), cost)


def kept_share(cost: float) -> float:
    """The share of every layer's channels that top-k gates keep open for this share of VGG-16's multiply-adds.

    >>> kept_share(0.25) < static_width(0.25)  # the embedding network costs something, too
    True
    """
    linear = CLASSES * VGG16_WIDTHS[-1] / VGG16_MACS  # read as a whole

    def share(keep: float) -> float:
        kept = [max(round(channels * keep), 1) for channels in VGG16_WIDTHS]
        return conv_macs(kept) / VGG16_MACS + linear + _EMBEDDING

    return _solved(share, cost)


def widened_target(name: str) -> tuple[float, float]:
    """Shares of a widening's own multiply-adds: VGG-16's, and what VGG-16's embedding network and heads cost.

    >>> [round(share, 4) for share in widened_target("w4_low")]
    [0.0726, 0.0015]
    """
    column = WIDENINGS[name]
    own = column.conv_macs() + CLASSES * column.widths[-1]
    return VGG16_MACS / own, _EMBEDDING * VGG16_MACS / own


def _share(widths: Sequence[int]) -> float:
    """Of VGG-16's multiply-adds."""
    return (conv_macs(widths) + CLASSES * widths[-1]) / VGG16_MACS


def _solved(share: Callable[[float], float], cost: float) -> float:
    """The number of four digits from 0 to 1 at which a rising share comes nearest to the cost."""
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle / 10_000) >= cost else (middle, high)
    return min((high, low), key=lambda number: abs(share(number / 10_000) - cost)) / 10_000


REMEDIES: Mapping[str, Remedy] = MappingProxyType(
    {
        "embedding": Remedy(
            "an embedding network of four times the work",
            GateRecipe(target_macs=REMEDY_COST),
            (("embedding_share", 4 * _EMBEDDING),),
        ),
        "schedule": Remedy(
            "gates that learn for 80 % of the epochs in place of 60 %, and come down to their cost over more of them",
            GateRecipe(target_macs=REMEDY_COST, joint=0.8, warmup=0.15),
        ),
        "noise": Remedy("noise on the gates while they learn", GateRecipe(target_macs=REMEDY_COST, noise=0.5)),
        "topk": Remedy(
            "equally many channels open for every image (top-k), and gradients that go straight through to the others",
            GateRecipe(straight_through=True),
            (("mode", "topk"), ("keep", kept_share(REMEDY_COST))),
        ),
        "distil": Remedy(
            "the answers of a trained VGG-16 to learn from",
            GateRecipe(target_macs=REMEDY_COST, distil=1.0),
            teacher="vgg16",
        ),
    }
)
"""By name."""


def plan(preset: str, fidelity: Fidelity) -> claims.Plan[GateResult]:
    """The cells there are, by name; they are all in our form, and none is quick."""
    if preset != "full" or fidelity != "best":
        return {}
    cells: dict[str, GateCell] = {}
    for trial in range(TRIALS):
        cells[f"cost/static/1/{trial}"] = GateCell("vgg16", trial, Recipe(EPOCHS))
        for cost in COSTS:
            width = static_width(cost)
            cells[f"cost/static/{cost}/{trial}"] = GateCell("vgg16", trial, Recipe(EPOCHS), (("width", width),))
            gates = GateRecipe(target_macs=cost)
            cells[f"cost/gated/{cost}/{trial}"] = GateCell("vgg16_deepmoe", trial, Recipe(EPOCHS, gates=gates))
    for trial in range(WIDE_TRIALS):
        cells |= _widenings(trial)
    for trial in range(REMEDY_TRIALS):
        for name, remedy in REMEDIES.items():
            recipe = Recipe(EPOCHS, gates=remedy.gates)
            cells[f"remedy/{name}/{trial}"] = GateCell(
                "vgg16_deepmoe", trial, recipe, remedy.options, teacher=remedy.teacher
            )
    return cells


def _widenings(trial: int) -> dict[str, GateCell]:
    plain = Recipe(WIDE_EPOCHS)
    half = Recipe(WIDE_EPOCHS, gates=GateRecipe(target_macs=HALF))
    cells = {
        f"wide/dense/vgg16/{trial}": GateCell("vgg16", trial, plain),
        f"wide/gated/vgg16/{trial}": GateCell("vgg16_deepmoe", trial, half),
    }
    for name in WIDENINGS:
        target, embedding = widened_target(name)
        recipe = Recipe(WIDE_EPOCHS, gates=GateRecipe(target_macs=target))
        cells[f"wide/dense/{name}/{trial}"] = GateCell(f"vgg16_{name}", trial, plain)
        cells[f"wide/gated/{name}/{trial}"] = GateCell(
            f"vgg16_deepmoe_{name}", trial, recipe, (("embedding_share", embedding),)
        )
    return cells
