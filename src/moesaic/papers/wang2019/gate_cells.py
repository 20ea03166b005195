"""Runs of VGG-16 on CIFAR-10, with channel gates or static: cells of Wang et al. 2019's study of widenings and of ours.

A cell trains one network once. What it costs is counted in multiply-adds of an image as executed, open inputs × open
outputs of every gated convolution, the embedding network and the gate heads included; reports give it as a share of
what VGG-16 costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic import keyed_random
from moesaic.data.builtin_datasets import missing
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.datasets import ImageTask
from moesaic.data.load import load_images
from moesaic.insight.channel_metrics import channel_usage, gate_distances
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.model_cost import count_macs
from moesaic.models.registry import create_model
from moesaic.models.vgg_widths import VGG16_WIDTHS, conv_macs
from moesaic.papers.engine import claims
from moesaic.papers.engine.runner import Lab
from moesaic.routing_record import Routing
from moesaic.training.batches import eval_batches
from moesaic.training.fit import fit
from moesaic.training.recipe import Recipe

__all__ = ["VGG16_MACS", "GateCell", "GateResult", "Option", "check_data", "runs_of"]

Array = NDArray[np.float64]
Option: TypeAlias = tuple[str, float | str]
"""An option of `create_model` and its value."""

ENGINE = 1
"""Raised when training comes out differently than before, so that no cell of before is taken for one of now."""

CLASSES = 10
VGG16_MACS = conv_macs(VGG16_WIDTHS) + CLASSES * VGG16_WIDTHS[-1]
"""Multiply-adds of VGG-16 for an image of CIFAR-10: what costs are shares of."""

_TASK = "cifar10"
_LOOKED = 2000
"""Test images over which channels are called dead, always on or dynamic, and patterns are compared."""


@dataclass(frozen=True, eq=False)
class GateResult:
    """What one run measured."""

    accuracy: float
    """On the test images after the last epoch, in percent."""
    training: Array
    """(epochs,): training accuracy of each, in percent."""
    macs: float
    """Multiply-adds of a test image, mean."""
    spread: float
    """Their standard deviation from image to image; 0 without gates."""
    dense_macs: int
    """Those of the network without gates."""
    usage: Array
    """(layers, 3): how many channels of each gated layer are dead, always on and dynamic; no layer without gates."""
    within: float
    """Hamming distance of the gate patterns of two images of one class, as a share of all gates; 0 without gates."""
    between: float
    """The same of two images of different classes."""
    seconds: float
    """Of training; runs side by side on one GPU slow each other down, so this compares nothing."""

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
    """One training of one network."""

    network: str
    """A name of `create_model`."""
    trial: int
    recipe: Recipe
    """With gates, if the network has any."""
    options: tuple[Option, ...] = ()
    """What `create_model` takes besides."""
    teacher: str = ""
    """A network that is trained first, by the same recipe without gates, and that this one learns from; or none."""
    samples: int | None = None
    """Images to train on; None: all."""
    on_cpu: bool = False
    """Whether it may run without a GPU, which would take days for all but small networks."""

    @property
    def steps(self) -> int:
        return self.recipe.epochs * (2 if self.teacher else 1)

    def obstacle(self, lab: Lab) -> str | None:
        if missing(_TASK, lab.data_dir) is not None:
            return "needs CIFAR-10's binary files under --data-dir"
        return None if self.on_cpu or lab.device.startswith("cuda") else "needs a GPU (--device cuda)"

    def spec(self, lab: Lab) -> dict[str, Any]:
        described = {**asdict(self), "recipe": self.recipe.to_json(), "options": dict(self.options)}
        del described["on_cpu"]
        here = lab.data_dir if missing(_TASK, lab.data_dir) is None else None
        digest = _loaded(here).digest if here is not None else "not here"
        return {"experiment": "channel gates", "engine": ENGINE, "data": digest, "seed": lab.seed, **described}

    def measure(self, lab: Lab) -> dict[str, Any]:
        assert lab.data_dir is not None, "there is an obstacle"
        seed = int(keyed_random.keys(lab.seed, [self.trial])[0]) & ((1 << 62) - 1)
        task = _loaded(lab.data_dir)
        if self.samples is not None:
            task = task.subset(self.samples, seed)
        teacher = None
        if self.teacher:
            teacher = _network(self.teacher, self._shape_options(), seed)
            plain = replace(self.recipe, gates=None)
            fit(teacher, task, plain, seed=seed, device=lab.device, progress=lab.progress, eval_every=plain.epochs)
        model = _network(self.network, dict(self.options), seed)
        found = fit(
            model,
            task,
            self.recipe,
            seed=seed,
            device=lab.device,
            progress=lab.progress,
            eval_every=self.recipe.epochs,
            teacher=teacher,
        )
        return {
            "accuracy": round(found.accuracy, 4),
            "training": [round(epoch.train_accuracy, 4) for epoch in found.epochs],
            "losses": [round(epoch.loss, 6) for epoch in found.epochs],
            "seconds": round(found.seconds, 3),
            **(_gates(model, task, self.recipe) if isinstance(model, DeepMoE) else _static(model, task)),
        }

    def result(self, kept: dict[str, Any]) -> GateResult:
        return GateResult(
            kept["accuracy"],
            np.asarray(kept["training"], dtype=np.float64),
            kept["macs"],
            kept["spread"],
            kept["dense_macs"],
            np.asarray(kept["usage"], dtype=np.float64).reshape(-1, 3),
            kept["within"],
            kept["between"],
            kept["seconds"],
        )

    def _shape_options(self) -> dict[str, float | str]:
        """Those of the options that a network without gates has as well."""
        return {name: value for name, value in self.options if name == "width"}


def _static(model: nn.Module, task: ImageTask) -> dict[str, Any]:
    channels, height, width = task.test.pixels.shape[1:]
    macs = count_macs(model, (channels, height, width)).macs
    return {"macs": macs, "spread": 0.0, "dense_macs": macs, "usage": [], "within": 0.0, "between": 0.0}


def _gates(model: DeepMoE, task: ImageTask, recipe: Recipe) -> dict[str, Any]:
    """What gates do on the test images, in the precision in which these were tested."""
    device = next(model.parameters()).device
    half = recipe.half(device)
    macs: list[Tensor] = []
    routings: list[Mapping[str, Routing]] = []
    seen = 0
    with torch.no_grad(), torch.autocast(device.type, half, enabled=half is not None):
        for x, _ in eval_batches(task, device, 250):
            routing = model.forward_with_routing(x).routing
            macs.append(model.macs(routing).double().cpu())
            if seen < _LOOKED:
                routings.append(routing)
            seen += len(x)
    together = {name: _joined([each[name] for each in routings]) for name in model.gated}
    labels = task.test.labels[: next(iter(together.values())).batch].cpu()
    used = [channel_usage(each) for each in together.values()]
    apart = gate_distances(together, labels, task.labels)
    cost = torch.cat(macs)
    return {
        "macs": round(float(cost.mean()), 1),
        "spread": round(float(cost.std(correction=0)), 1),
        "dense_macs": model.dense_macs,
        "usage": [[len(each.dead), len(each.always_on), len(each.dynamic)] for each in used],
        "within": round(apart.within or 0.0, 6),
        "between": round(apart.between or 0.0, 6),
    }


def _joined(routings: list[Routing]) -> Routing:
    """The routings of batches as one, on the CPU."""
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
def _loaded(data_dir: Path) -> ImageTask:
    """CIFAR-10, mirrored and shifted at random in training."""
    return load_images(_TASK, data_dir=data_dir, augment="flip-crop", scale="standard")


def check_data(data_dir: Path) -> None:
    """Raises if CIFAR-10 is in the folder and damaged; that it is not there is an obstacle."""
    if missing(_TASK, data_dir) is None:
        for split in ("train", "test"):
            load_cifar10(split, data_dir)


def runs_of(study: claims.Study[Any], prefix: str) -> list[GateResult]:
    """The trials of a network, by the beginning of their names."""
    return study.line(prefix)[1]
