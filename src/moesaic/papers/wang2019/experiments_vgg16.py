"""Experiments on VGG-16 with channel gates on CIFAR-10 (Wang et al. 2019): cells that train one network once.

Cell names begin with the question that they belong to:

- **cost**: is VGG-16 with gates (DeepMoE) more accurate than a narrower VGG-16 with the same number of multiply-adds?
  Both run at each of `COSTS`, beside VGG-16 itself.
- **wide**: the supplement's Table 1 widens VGG-16 in four ways, with equal numbers of weights and 1.1 to 13.8 times
  the multiply-adds. Here each is gated down to the multiply-adds of VGG-16, so that weights *and* multiply-adds are
  equal, and each also runs without gates. VGG-16 itself, and VGG-16 gated to half of its cost, run beside them.
- **remedy**: changes that could improve gated networks, each run at a cost of `REMEDY_COST`.

The cost is the mean number of executed multiply-adds per image: open inputs × open outputs of every gated
convolution, plus the embedding network and the gate heads. Reports show it as a fraction of VGG-16's.

The supplement prints no accuracies, and the main paper's training settings are not available. All networks are in our
form (gates after BatchNorm, heads with a bias) and use our recipe, those with gates in two stages. Runs are short, so
that all of them fit on one GPU in twelve minutes: `EPOCHS` over all images, and `WIDE_EPOCHS` for the widenings, one
of which needs fourteen times the work. Networks that are compared have equally many epochs and the same image order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.data.builtin_datasets import missing_files
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.image_dataset import ImageDataset
from moesaic.data.load import load_images
from moesaic.insight.channel_metrics import channel_usage, gate_dependence, gate_distances
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import create_model
from moesaic.models.vgg import VGG16_WIDTHS
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine import paper
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019.vgg_widths import WIDENINGS, conv_macs
from moesaic.routing_record import Routing
from moesaic.training.batches import eval_batches
from moesaic.training.callbacks import Callback
from moesaic.training.distillation import Distillation
from moesaic.training.fit import fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

__all__ = [
    "COSTS",
    "EPOCHS",
    "FULL_EPOCHS",
    "HALF",
    "REMEDIES",
    "REMEDY_COST",
    "REMEDY_TRIALS",
    "TRIALS",
    "VGG16_MACS",
    "WIDE_EPOCHS",
    "WIDE_TRIALS",
    "GateCell",
    "GateResult",
    "Option",
    "Remedy",
    "check_data",
    "open_channel_share",
    "plan",
    "runs_of",
    "static_width",
    "widened_target",
]

Array = NDArray[np.float64]
Option: TypeAlias = tuple[str, float | str | None]
"""An option of `create_model` and its value."""

ENGINE = 1
"""Version of the training code. Raised when results change, so that older cells in the result cache are not used."""

CLASSES = 10
VGG16_MACS = conv_macs(VGG16_WIDTHS) + CLASSES * VGG16_WIDTHS[-1]
"""Multiply-adds of VGG-16 for an image of CIFAR-10, the unit of costs."""

_TASK = "cifar10"
_GATE_IMAGES = 2000
"""Test images from which channels are classified as dead, always on or dynamic, and gate patterns are compared."""


@dataclass(frozen=True, eq=False)
class GateResult:
    """Measurements of one run."""

    accuracy: float
    """Test accuracy after the last epoch, in percent."""
    training: Array
    """(epochs,): training accuracy in percent."""
    macs: float
    """Mean multiply-adds of a test image."""
    spread: float
    """Standard deviation of ``macs`` over images; 0 without gates."""
    dense_macs: int
    """Multiply-adds of the network without gates."""
    usage: Array
    """(layers, 3): number of dead, always-on and dynamic channels of each gated layer."""
    within: float
    """Hamming distance of the gate patterns of two images of one class, as a share of all gates; 0 without gates."""
    between: float
    """The same of two images of different classes."""
    seconds: float
    """Duration of training. Not comparable between runs, which may share a GPU."""
    embedding_accuracy: float = math.nan
    """Test accuracy of the embedding's own classifier, in percent; NaN where there is none."""
    differing: float = math.nan
    """Percentage of gates in which two images differ; NaN without gates, and in runs of earlier versions."""
    entropy: float = math.nan
    """Mean entropy of a gate over images, in bits."""
    information: float = math.nan
    """Mean mutual information of a gate and the class, in bits."""

    @property
    def cost(self) -> float:
        """Multiply-adds of a test image as a share of VGG-16's."""
        return self.macs / VGG16_MACS

    @property
    def dynamic(self) -> float:
        """The percentage of channels that are open for some images and closed for others."""
        return float(100 * self.usage[:, 2].sum() / max(self.usage.sum(), 1))


@dataclass(frozen=True)
class GateCell:
    """Trains one network once."""

    network: str
    """A name of `create_model`."""
    trial: int
    recipe: Recipe
    """Includes a gate recipe if the network has gates."""
    options: tuple[Option, ...] = ()
    """Further options of `create_model`."""
    teacher: str = ""
    """Name of the teacher network for distillation, trained first by the same recipe without gates; empty for none. It
    has the width of a network with gates, and its full width where a static network learns from it."""
    samples: int | None = None
    """Number of training images; None for all."""
    on_cpu: bool = False
    """Whether the cell may run on a CPU, which takes days for all but small networks."""

    @property
    def steps(self) -> int:
        return self.recipe.epochs * (2 if self.teacher else 1)

    def missing_requirement(self, runner: Runner) -> str | None:
        if missing_files(_TASK, runner.data_dir) is not None:
            return "needs CIFAR-10's binary files under --data-dir"
        return None if self.on_cpu or runner.device.startswith("cuda") else "needs a GPU (--device cuda)"

    def spec(self, runner: Runner) -> dict[str, Any]:
        described = {**asdict(self), "recipe": self.recipe.cell_spec(), "options": dict(self.options)}
        del described["on_cpu"]
        here = runner.data_dir if missing_files(_TASK, runner.data_dir) is None else None
        digest = _loaded(here).digest if here is not None else "not here"
        learns = {"closed gates": "learn"} if self.closed_gates_learn else {}  # before, ReLU stopped their gradients
        return {
            "experiment": "channel gates",
            "engine": ENGINE,
            "data": digest,
            "seed": runner.seed,
            **described,
            **learns,
        }

    @property
    def closed_gates_learn(self) -> bool:
        """Whether closed gates have an estimated gradient."""
        estimated = self.recipe.gates is not None and self.recipe.gates.straight_through
        return estimated or ("mode", "hard") in self.options

    def measure(self, runner: Runner) -> dict[str, Any]:
        assert runner.data_dir is not None, "missing_requirement covers this"
        seed = runner.trial_seed(self.trial)
        task = _loaded(runner.data_dir)
        if self.samples is not None:
            task = task.subset(self.samples, seed)
        teacher = None
        if self.teacher:
            teacher = _network(self.teacher, self._teacher_options(), seed)
            plain = replace(self.recipe, gates=None)
            fit(
                teacher, task, plain, seed=seed, device=runner.device, progress=runner.progress, eval_every=plain.epochs
            )
        model = _network(self.network, dict(self.options), seed)
        static = self.recipe.gates is None
        callbacks: list[Callback] = [Distillation(teacher)] if static and teacher is not None else []
        found = fit(
            model,
            task,
            self.recipe,
            seed=seed,
            device=runner.device,
            progress=runner.progress,
            eval_every=self.recipe.epochs,
            teacher=None if static else teacher,
            callbacks=callbacks,
        )
        return {
            "accuracy": round(found.accuracy, 4),
            "training": [round(epoch.train_accuracy, 4) for epoch in found.epochs],
            "losses": [round(epoch.loss, 6) for epoch in found.epochs],
            "seconds": round(found.seconds, 3),
            "embedding_accuracy": found.metrics.get("embedding_accuracy"),
            **(_gates(model, task, self.recipe) if isinstance(model, DeepMoE) else _static(model, task)),
        }

    def result(self, stored: dict[str, Any]) -> GateResult:
        return GateResult(
            stored["accuracy"],
            np.asarray(stored["training"], dtype=np.float64),
            stored["macs"],
            stored["spread"],
            stored["dense_macs"],
            np.asarray(stored["usage"], dtype=np.float64).reshape(-1, 3),
            stored["within"],
            stored["between"],
            stored["seconds"],
            *(_number(stored.get(name)) for name in ("embedding_accuracy", "differing", "entropy", "information")),
        )

    def _teacher_options(self) -> dict[str, float | str | None]:
        return {name: value for name, value in self.options if name == "width" and self.recipe.gates is not None}


def _number(stored: float | None) -> float:
    return math.nan if stored is None else stored


def _static(model: nn.Module, task: ImageDataset) -> dict[str, Any]:
    channels, height, width = task.test.pixels.shape[1:]
    macs = count_macs(model, (channels, height, width)).macs
    return {"macs": macs, "spread": 0.0, "dense_macs": macs, "usage": [], "within": 0.0, "between": 0.0}


def _gates(model: DeepMoE, task: ImageDataset, recipe: Recipe) -> dict[str, Any]:
    """Measures the gates on the test images, in the precision of the test."""
    device = next(model.parameters()).device
    half = recipe.autocast_dtype(device)
    macs: list[Tensor] = []
    routings: list[Mapping[str, Routing]] = []
    seen = 0
    with torch.no_grad(), torch.autocast(device.type, half, enabled=half is not None):
        for x, _ in eval_batches(task, device, 250):
            routing = model.forward_with_routing(x).routing
            macs.append(model.macs(routing).double().cpu())
            if seen < _GATE_IMAGES:
                routings.append(routing)
            seen += len(x)
    together = {name: _joined([each[name] for each in routings]) for name in model.gated}
    labels = task.test.labels[: next(iter(together.values())).batch].cpu()
    used = [channel_usage(each) for each in together.values()]
    apart = gate_distances(together, labels, task.num_classes)
    dependence = gate_dependence(together, labels, task.num_classes)
    cost = torch.cat(macs)
    return {
        "macs": round(float(cost.mean()), 1),
        "spread": round(float(cost.std(correction=0)), 1),
        "dense_macs": model.dense_macs,
        "usage": [[len(each.dead), len(each.always_on), len(each.dynamic)] for each in used],
        "within": round(apart.within or 0.0, 6),
        "between": round(apart.between or 0.0, 6),
        "differing": round(100 * dependence.differing, 4),
        "entropy": round(dependence.entropy, 6),
        "information": round(dependence.class_information, 6),
    }


def _joined(routings: list[Routing]) -> Routing:
    """Concatenates the routings of batches on the CPU."""
    indices = [each.index for each in routings if each.index is not None]
    return replace(
        routings[0],
        scores=torch.cat([each.scores.cpu() for each in routings]),
        index=torch.cat([index.cpu() for index in indices]),
        gate=torch.cat([each.gate.cpu() for each in routings]),
    )


def _network(name: str, options: Mapping[str, Any], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_model(name, num_classes=CLASSES, **options)


@lru_cache(maxsize=1)
def _loaded(data_dir: Path) -> ImageDataset:
    """Loads CIFAR-10 with random flips and crops in training."""
    return load_images(_TASK, data_dir=data_dir, augment="flip-crop", normalize="standard")


def check_data(data_dir: Path) -> None:
    """Raises if CIFAR-10 in the directory is damaged; missing files are not an error."""
    if missing_files(_TASK, data_dir) is None:
        for split in ("train", "test"):
            load_cifar10(split, data_dir)


def runs_of(experiment: paper.ExperimentResults[Any], prefix: str) -> list[GateResult]:
    """Returns the trials of a network by the prefix of their names."""
    return experiment.series(prefix)[1]


COSTS = (0.12, 0.25, 0.5)
"""Shares of VGG-16's multiply-adds at which gates and static widths are compared."""
FULL_EPOCHS = 100
"""Epochs of all networks with the full preset; the others are those of the short preset."""
EPOCHS = 10
TRIALS = 3
"""Trials of the comparison at equal cost."""
WIDE_EPOCHS = 4
WIDE_TRIALS = 2
REMEDY_COST = 0.25
REMEDY_TRIALS = 2
HALF = 0.5
"""Cost to which VGG-16 itself is gated in the comparison with its widenings."""

_EMBEDDING = 0.02
"""Cost of the embedding network and the heads as a share of the gated network's; the default of `deepmoe`."""


@dataclass(frozen=True)
class Remedy:
    """A change that may improve gated networks, run at `REMEDY_COST`."""

    about: str
    """What it does, after "With"."""
    gates: GateRecipe
    options: tuple[Option, ...] = ()
    teacher: str = ""


def static_width(cost: float, widths: Sequence[int] = VGG16_WIDTHS) -> float:
    """Returns the factor of all widths of a VGG-16 that gives it this share of the multiply-adds of the usual one.

    >>> [static_width(cost) for cost in (0.5, 0.25, 0.12)]
    [0.707, 0.498, 0.3457]
    """
    return _solved(lambda width: _share([max(round(channels * width), 1) for channels in widths]), cost)


def open_channel_share(cost: float) -> float:
    """Returns the share of channels that top-k gates open in every layer for this share of VGG-16's multiply-adds.

    >>> open_channel_share(0.25) < static_width(0.25)  # since the embedding network has a cost
    True
    """
    linear = CLASSES * VGG16_WIDTHS[-1] / VGG16_MACS  # read as a whole

    def share(keep: float) -> float:
        open_channels = [max(round(channels * keep), 1) for channels in VGG16_WIDTHS]
        return conv_macs(open_channels) / VGG16_MACS + linear + _EMBEDDING

    return _solved(share, cost)


def widened_target(name: str) -> tuple[float, float]:
    """Returns VGG-16's multiply-adds, and those of its embedding network, as shares of a widening's multiply-adds.

    >>> [round(share, 4) for share in widened_target("w4_low")]
    [0.0726, 0.0015]
    """
    column = WIDENINGS[name]
    own = column.conv_macs() + CLASSES * column.widths[-1]
    return VGG16_MACS / own, _EMBEDDING * VGG16_MACS / own


def _share(widths: Sequence[int]) -> float:
    """Returns the multiply-adds of the widths as a share of VGG-16's."""
    return (conv_macs(widths) + CLASSES * widths[-1]) / VGG16_MACS


def _solved(share: Callable[[float], float], cost: float) -> float:
    """Returns the number from 0 to 1, with four digits, at which an increasing share is closest to the cost."""
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
            GateRecipe(target_macs=REMEDY_COST, joint_fraction=0.8, warmup_fraction=0.15),
        ),
        "noise": Remedy("noise on the gates while they learn", GateRecipe(target_macs=REMEDY_COST, noise=0.5)),
        "topk": Remedy(
            "equally many channels open for every image (top-k), and gradients that go straight through to the others",
            GateRecipe(straight_through=True),
            (("mode", "topk"), ("keep", open_channel_share(REMEDY_COST))),
        ),
        "distil": Remedy(
            "the answers of a trained VGG-16 to learn from",
            GateRecipe(target_macs=REMEDY_COST, distill_weight=1.0),
            teacher="vgg16",
        ),
    }
)
"""By name."""


def plan(preset: str, fidelity: Fidelity) -> paper.Plan[GateResult]:
    """Returns the cells by name: all in our form, none in the quick preset."""
    if preset == "quick" or fidelity != "best":
        return {}
    cells: dict[str, GateCell] = {}
    full = preset == "full"
    epochs = FULL_EPOCHS if full else EPOCHS
    for trial in range(TRIALS):
        cells[f"cost/static/1/{trial}"] = GateCell("vgg16", trial, Recipe(epochs))
        for cost in COSTS:
            width = static_width(cost)
            cells[f"cost/static/{cost}/{trial}"] = GateCell("vgg16", trial, Recipe(epochs), (("width", width),))
            gates = GateRecipe(target_macs=cost)
            cells[f"cost/gated/{cost}/{trial}"] = GateCell("vgg16_deepmoe", trial, Recipe(epochs, gates=gates))
    for trial in range(TRIALS if full else WIDE_TRIALS):
        cells |= _widenings(trial, FULL_EPOCHS if full else WIDE_EPOCHS)
    for trial in range(TRIALS if full else REMEDY_TRIALS):
        for name, remedy in REMEDIES.items():
            recipe = Recipe(epochs, gates=remedy.gates)
            cells[f"remedy/{name}/{trial}"] = GateCell(
                "vgg16_deepmoe", trial, recipe, remedy.options, teacher=remedy.teacher
            )
    return cells


def _widenings(trial: int, epochs: int) -> dict[str, GateCell]:
    plain = Recipe(epochs)
    half = Recipe(epochs, gates=GateRecipe(target_macs=HALF))
    cells = {
        f"wide/dense/vgg16/{trial}": GateCell("vgg16", trial, plain),
        f"wide/gated/vgg16/{trial}": GateCell("vgg16_deepmoe", trial, half),
    }
    for name in WIDENINGS:
        target, embedding = widened_target(name)
        recipe = Recipe(epochs, gates=GateRecipe(target_macs=target))
        cells[f"wide/dense/{name}/{trial}"] = GateCell(f"vgg16_{name}", trial, plain)
        cells[f"wide/gated/{name}/{trial}"] = GateCell(
            f"vgg16_deepmoe_{name}", trial, recipe, (("embedding_share", embedding),)
        )
    return cells
