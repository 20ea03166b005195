"""Train a network, or a mixture of networks, on images by Algorithm 1 of Chen et al. 2022.

A mixture is trained by normalised gradient descent for each expert, gradient descent for the router, and a balance
loss; a network alone by SGD. Both see the same images in the same order for the same seed. `fit` does the training:
the schedule of the learning rate and the tests after each epoch are callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.data.image_dataset import ImageDataset, Transform
from moesaic.layers import SampleMoE
from moesaic.layers.recording import record_routing
from moesaic.training import Callback, Progress, Recipe, evaluate, fit
from moesaic.training.batches import eval_batches, generator_seed
from moesaic.training.normalized_gd import GradientNorm
from moesaic.training.optimizers import set_learning_rate
from moesaic.training.trainer import Trainer

__all__ = [
    "ImageEpoch",
    "ImageSchedule",
    "ImageTest",
    "ReleasedImageSchedule",
    "embed_images",
    "evaluate_images",
    "train_images",
]

Decay = Literal["cosine", "constant"]

_EVAL_BATCH_SIZE = 1000


@dataclass(frozen=True)
class ImageSchedule:
    """Hyperparameters as Chen et al. state them, except for the decay, which they do not state.

    The field names are keys in the specifications of cells.
    """

    epochs: int
    learning_rate: float
    """Learning rate of a network alone, and of the experts of a mixture."""
    router_rate: float = 1e-4
    """Learning rate of the router; it is constant."""
    batch: int = 128
    """Samples per step; images that do not fill a batch are left out of the epoch."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    balance: float = 1e-3
    """Weight of the balance loss of a mixture."""
    decay: Decay = "cosine"
    """Decay of the learning rate, from epoch to epoch."""
    gradient_norm: ClassVar[GradientNorm] = "print"
    """By which norm the gradient of an expert is divided (`NormalizedGD`)."""

    def __post_init__(self) -> None:
        check_positive("ImageSchedule", epochs=self.epochs, batch=self.batch)
        check_choice("ImageSchedule", "decay", self.decay, get_args(Decay))

    def rate(self, epoch: int) -> float:
        """Returns the learning rate in an epoch, counted from 0.

        >>> [round(ImageSchedule(epochs=4, learning_rate=0.1).rate(epoch), 4) for epoch in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        """
        left = 1.0 if self.decay == "constant" else 0.5 * (1 + math.cos(math.pi * epoch / self._cosine_epochs()))
        return left * self.learning_rate

    def _cosine_epochs(self) -> int:
        """Epochs in which a cosine falls to zero."""
        return self.epochs

    def recipe(self, *, mixture: bool, device: torch.device) -> Recipe:
        """Returns the recipe of a mixture, or of a network alone; its learning rates are constant.

        >>> ImageSchedule(4, 0.1).recipe(mixture=True, device=torch.device("cpu")).optimizer
        'normalized_gd'
        """
        return Recipe(
            epochs=self.epochs,
            batch_size=self.batch,
            optimizer="normalized_gd" if mixture else "sgd",
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            schedule="constant",
            warmup_epochs=0.0,
            router_lr=self.router_rate,
            precision="bfloat16" if device.type == "cuda" else "float32",
            balance_weight=self.balance if mixture else 0.0,
            drop_last=True,
        )


@dataclass(frozen=True)
class ReleasedImageSchedule(ImageSchedule):
    """Hyperparameters of the authors' code: a cosine that ends long after training does, and the sum of norms.

    >>> [round(ReleasedImageSchedule(epochs=10, learning_rate=0.01).rate(epoch), 5) for epoch in (0, 9)]
    [0.01, 0.00995]
    """

    balance: float = 1e-2
    decay_epochs: int = 200
    """Epochs in which the cosine falls to zero."""
    gradient_norm: ClassVar[GradientNorm] = "released"

    def _cosine_epochs(self) -> int:
        return self.decay_epochs


@dataclass(frozen=True, eq=False)
class ImageTest:
    """A test of a network."""

    correct: Tensor
    """(B,) bool: which test images are classified correctly."""
    experts: Tensor | None
    """(B,) int64: the expert of each image; None for a network alone."""

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * float(self.correct.double().mean())


@dataclass(frozen=True)
class ImageEpoch:
    """The results of an epoch."""

    loss: float
    """Mean over its batches, without the balance loss."""
    test: ImageTest
    others: Mapping[str, ImageTest] = field(default_factory=dict[str, ImageTest])
    """Tests with other transforms of the test images."""


def train_images(
    model: nn.Module,
    dataset: ImageDataset,
    schedule: ImageSchedule,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    eval_transforms: Mapping[str, Transform] | None = None,
) -> list[ImageEpoch]:
    """Train the model in place, which moves to the device, and test it after every epoch.

    The seed decides the order of the images, their augmentation, and the noise of a mixture's router; the model
    comes with its initial weights. On a GPU, runs of one seed still differ by rounding errors, and what these grow to.
    ``eval_transforms`` are further transforms of the test images to test with, by name.
    """
    device = torch.device(device)
    if isinstance(model, SampleMoE):
        model.generator = torch.Generator(device).manual_seed(generator_seed(seed, f"noise {device.type}"))
    tests = _TestEveryEpoch(eval_transforms or {})
    fit(
        model,
        dataset,
        schedule.recipe(mixture=isinstance(model, SampleMoE), device=device),
        seed=seed,
        device=device,
        progress=progress,
        eval_every=schedule.epochs,
        callbacks=[_Optimization(schedule), tests],
        collapse_alarm=False,
    )
    return tests.epochs


class _Optimization(Callback):
    """Sets the norm of experts' gradients, and decays the learning rate from epoch to epoch but for routers."""

    capturable = True

    def __init__(self, schedule: ImageSchedule) -> None:
        self._schedule = schedule

    def on_fit_start(self, trainer: Trainer) -> None:
        for group in trainer.train_step.optimizers[0].param_groups:
            if "norm" in group:
                group["norm"] = self._schedule.gradient_norm

    def on_step_start(self, trainer: Trainer, epoch: float) -> None:
        network_or_experts = trainer.train_step.optimizers[0]
        for group in network_or_experts.param_groups:
            set_learning_rate(group, self._schedule.rate(int(epoch)))


class _TestEveryEpoch(Callback):
    """Records the mean loss of each epoch, and which expert the test images go to."""

    capturable = True

    def __init__(self, eval_transforms: Mapping[str, Transform]) -> None:
        self.epochs: list[ImageEpoch] = []
        self._eval_transforms = eval_transforms
        self._loss: Tensor | float = 0.0

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._loss = torch.zeros((), device=trainer.device)

    def on_step_end(self, trainer: Trainer, epoch: float, loss: Tensor) -> None:
        self._loss += loss

    def on_epoch_end(self, trainer: Trainer) -> dict[str, float]:
        loss = float(self._loss / len(trainer.batch_sizes))
        others = {
            name: evaluate_images(trainer.model, replace(trainer.dataset, eval_transform=transform))
            for name, transform in self._eval_transforms.items()
        }
        self.epochs.append(ImageEpoch(loss, evaluate_images(trainer.model, trainer.dataset), others))
        return {"test": self.epochs[-1].test.accuracy}


def evaluate_images(model: nn.Module, dataset: ImageDataset) -> ImageTest:
    """Test the model on the test images, on its device; random transforms are the same in every call."""
    device = next(model.parameters()).device
    experts: list[Tensor] = []
    with _autocast(device), _recorded(model) as routing:

        def logits(x: Tensor) -> Tensor:
            output = model(x)
            if routing is not None:
                experts.append(_first_expert(routing[""].index))
            return output

        correct = evaluate(model, dataset, logits, _EVAL_BATCH_SIZE)
    return ImageTest(correct, torch.cat(experts).cpu() if experts else None)


def embed_images(model: nn.Module, dataset: ImageDataset, rows: Tensor) -> Tensor:
    """(n, width) float32: the features of some test images; of a mixture, those of each image's expert.

    Features of different experts need not be comparable.
    """
    device = next(model.parameters()).device
    features: list[Tensor] = []
    was_training = model.training
    model.eval()
    with torch.no_grad(), _autocast(device), _recorded(model) as routing:
        for x, _ in eval_batches(dataset, device, _EVAL_BATCH_SIZE, rows):
            if routing is None:
                features.append(_features(model, x))
                continue
            model(x)
            features.append(_mixed_features(model, x, _first_expert(routing[""].index)))
    model.train(was_training)
    return torch.cat(features).cpu()


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _recorded(model: nn.Module):
    """The routing of a mixture, or None for a network alone."""
    return record_routing(model) if isinstance(model, SampleMoE) else nullcontext()


def _first_expert(index: Tensor | None) -> Tensor:
    """(B,): the first expert of each sample."""
    assert index is not None
    return index[:, 0, 0]


def _mixed_features(model: nn.Module, x: Tensor, experts: Tensor) -> Tensor:
    assert isinstance(model, SampleMoE)
    rows: list[Tensor] = []
    vectors: list[Tensor] = []
    for e, expert in enumerate(model.experts.children()):
        mine = (experts == e).nonzero()[:, 0]
        if len(mine):
            rows.append(mine)
            vectors.append(_features(expert, x[mine]))
    return torch.cat(vectors)[torch.cat(rows).argsort()]


def _features(model: nn.Module, x: Tensor) -> Tensor:
    features = getattr(model, "features", None)
    if features is None:
        raise TypeError(
            f"embed_images: {type(model).__name__} has no features(x) to embed by; use a network of moesaic.models"
        )
    return features(x).float()
