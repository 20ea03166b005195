"""Train one network, or a mixture of networks, to classify images that lie on the device.

The mixture learns by Algorithm 1 of Chen et al. 2022: normalised gradient descent moves each expert,
plain gradient descent the router, and a balance loss is added to the task's. A network alone learns by
SGD. Both see the same images in the same order for the same seed.

Images stay bytes on the device, are prepared many batches at a time, and no step waits for the device but
for the one time `SampleMoE` has to. On a GPU products are computed in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.checks import check_choice, check_positive
from moesaic.data.datasets import ImageDataset
from moesaic.layers import SampleMoE
from moesaic.layers.recording import record_routing
from moesaic.routing import load_balance_loss
from moesaic.training.batches import eval_batches, generator_seed, train_batches
from moesaic.training.optim import NormalizedGD
from moesaic.training.progress import NoProgress, Progress

__all__ = ["ImageEpoch", "ImageSchedule", "ImageTest", "embed_images", "evaluate_images", "train_images"]

Decay = Literal["cosine", "constant"]

_TESTED = 1000
"""Images tested together."""


@dataclass(frozen=True)
class ImageSchedule:
    """How a network learns; as Chen et al. state it, but for the decay, of which they say nothing."""

    epochs: int
    learning_rate: float
    """Of a network alone, and of the experts of a mixture."""
    router_rate: float = 1e-4
    batch: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4
    balance: float = 1e-3
    """How much the balance loss of a mixture counts."""
    decay: Decay = "cosine"
    """Of the learning rate towards 0, from epoch to epoch; that of a router is constant."""

    def __post_init__(self) -> None:
        check_positive("ImageSchedule", epochs=self.epochs, batch=self.batch)
        check_choice("ImageSchedule", "decay", self.decay, get_args(Decay))

    def rate(self, epoch: int) -> float:
        """The learning rate in an epoch, counted from 0.

        >>> [round(ImageSchedule(epochs=4, learning_rate=0.1).rate(epoch), 4) for epoch in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        """
        left = 1.0 if self.decay == "constant" else 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        return left * self.learning_rate


@dataclass(frozen=True, eq=False)
class ImageTest:
    """What a network makes of the images to test on."""

    right: Tensor
    """(B,) bool: whether it found the label."""
    experts: Tensor | None
    """(B,) int64: the expert that each image went to; None for a network alone."""

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * float(self.right.double().mean())


@dataclass(frozen=True)
class ImageEpoch:
    """What an epoch came to."""

    loss: float
    """Mean over its batches, without the balance loss."""
    test: ImageTest


def train_images(
    model: nn.Module,
    task: ImageDataset,
    schedule: ImageSchedule,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[ImageEpoch]:
    """Train the model in place, which moves to the device; what every epoch came to.

    An epoch has as many whole batches as the images give. The seed decides the order of the images, how they are
    varied, and the noise of a mixture's choices; the model comes with its initial weights. On a GPU, runs of one
    seed still differ by rounding, and what rounding grows to.
    """
    device = torch.device(device)
    if len(task.train) < schedule.batch:
        raise ValueError(
            f"train_images: batch={schedule.batch}, but there are {len(task.train)} images to train on; "
            f"use at most batch={len(task.train)}"
        )
    progress = progress or NoProgress()
    task = task.to(device)
    model.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
    if isinstance(model, SampleMoE):
        model.generator = torch.Generator(device).manual_seed(generator_seed(seed, f"noise {device.type}"))
    learner, router = _optimizers(model, schedule, device)
    sizes = [schedule.batch] * (len(task.train) // schedule.batch)
    epochs: list[ImageEpoch] = []
    for epoch in range(schedule.epochs):
        for group in learner.param_groups:
            group["lr"] = schedule.rate(epoch)
        optimizers = [learner] if router is None else [learner, router]
        batches = train_batches(task, sizes, seed, epoch, device)
        loss = _train_epoch(model, batches, optimizers, schedule.balance, device)
        epochs.append(ImageEpoch(float(loss), evaluate_images(model, task)))
        progress.advance(1, f"loss {epochs[-1].loss:.3f}, test {epochs[-1].test.accuracy:.1f} %")
    return epochs


def evaluate_images(model: nn.Module, task: ImageDataset) -> ImageTest:
    """Test the model on the images to test on, where it is; blur and the like are the same in every call."""
    device = next(model.parameters()).device
    right: list[Tensor] = []
    experts: list[Tensor] = []
    was_training = model.training
    model.eval()
    with torch.no_grad(), _half(device), _watched(model) as routing:
        for x, labels in eval_batches(task, device, _TESTED):
            right.append(model(x).argmax(1) == labels)
            if routing is not None:
                experts.append(_chosen(routing[""].index))
    model.train(was_training)
    return ImageTest(torch.cat(right).cpu(), torch.cat(experts).cpu() if experts else None)


def embed_images(model: nn.Module, task: ImageDataset, rows: Tensor) -> Tensor:
    """(n, width) float32: the features of some of the images to test on; of a mixture, those in the expert chosen.

    Experts have features of their own, which need not be comparable with each other's.
    """
    device = next(model.parameters()).device
    found: list[Tensor] = []
    was_training = model.training
    model.eval()
    with torch.no_grad(), _half(device), _watched(model) as routing:
        for x, _ in eval_batches(task, device, _TESTED, rows):
            if routing is None:
                found.append(_features(model, x))
                continue
            model(x)
            found.append(_mixed_features(model, x, _chosen(routing[""].index)))
    model.train(was_training)
    return torch.cat(found).cpu()


def _optimizers(
    model: nn.Module, schedule: ImageSchedule, device: torch.device
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer | None]:
    """That of the network or the experts, and that of the router if there is one."""
    momentum, decay = schedule.momentum, schedule.weight_decay
    fused = device.type == "cuda"
    if not isinstance(model, SampleMoE):
        rate = schedule.learning_rate
        return torch.optim.SGD(model.parameters(), rate, momentum, weight_decay=decay, fused=fused), None
    return (
        NormalizedGD.per_expert(model.experts, schedule.learning_rate, momentum=momentum, weight_decay=decay),
        torch.optim.SGD(model.router.parameters(), schedule.router_rate, momentum, weight_decay=decay, fused=fused),
    )


def _train_epoch(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    optimizers: list[torch.optim.Optimizer],
    balance: float,
    device: torch.device,
) -> Tensor:
    """The mean loss of the task, still on the device."""
    model.train()
    total, count = torch.zeros((), device=device), 0
    with _watched(model) as routing:
        for x, labels in batches:
            with _half(device):
                loss = F.cross_entropy(model(x), labels)
            aim = loss if routing is None else loss + balance * load_balance_loss(routing[""])
            for optimizer in optimizers:
                optimizer.zero_grad()
            aim.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.detach()
            count += 1
    return total / count


def _half(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _watched(model: nn.Module):
    """What the mixture routes, or None where the model is none."""
    return record_routing(model) if isinstance(model, SampleMoE) else nullcontext()


def _chosen(index: Tensor | None) -> Tensor:
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
