"""Predictions of a trained network for single images: probabilities, multiply-adds, and the patches of each expert."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.insight.channel_explanation import GatedNetwork
from moesaic.layers.recording import record_routing, routed_layers
from moesaic.models.model_cost import count_macs
from moesaic.routing_record import Routing
from moesaic.training.trained_network import TrainedNetwork

if TYPE_CHECKING:
    from moesaic.data.input_transform import InputImage

__all__ = ["Prediction", "Predictor", "SelectedPatches", "predict"]


@dataclass(frozen=True)
class SelectedPatches:
    """The patches of one image that the experts of a layer selected, or that selected them."""

    grid: tuple[int, int]
    """Rows and columns of patches on the layer's map."""
    experts: tuple[tuple[int, ...], ...]
    """For each expert the numbers of its patches in ascending order; patches count row by row from 0."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    probabilities: tuple[float, ...]
    """In the order of the classes."""
    macs: int
    """Multiply-adds of the network for this image."""
    patches: Mapping[str, SelectedPatches]
    """By name of the layer; without layers whose experts read all patches, as under a soft router."""

    def top(self, count: int) -> tuple[int, ...]:
        """Returns the ``count`` most probable classes, the most probable one first.

        >>> Prediction((0.2, 0.5, 0.3), 100, {}).top(2)
        (1, 2)
        """
        order = sorted(range(len(self.probabilities)), key=lambda k: -self.probabilities[k])
        return tuple(order[:count])


def predict(
    model: TrainedNetwork, images: InputImage | Sequence[InputImage] | Tensor, *, batch_size: int = 64
) -> tuple[Prediction, ...]:
    """Predicts images with a network of `moesaic.load`.

    Args:
        model: the network, with its preprocessing.
        images: images of Pillow, paths of image files, or uint8 pixels; one, or several in a list.
        batch_size: images per forward pass.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from moesaic.data import Normalize
    >>> from moesaic.models import ModelSpec
    >>> from moesaic.training.checkpoint import Metadata, save_network
    >>> from moesaic.training.trained_network import load
    >>> spec, names = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16}), ("cat", "dog")
    >>> metadata = Metadata(spec, names, names, Normalize((0.5,) * 3, (0.2,) * 3), (3, 16, 16), "pets", {})
    >>> with tempfile.TemporaryDirectory() as run:
    ...     save_network(Path(run) / "model.safetensors", spec.build(), metadata)
    ...     model = load(run)
    >>> (prediction,) = predict(model, torch.zeros(3, 20, 30, dtype=torch.uint8))
    >>> len(prediction.probabilities), prediction.macs
    (2, 2523264)
    >>> (name, selected), = prediction.patches.items()
    >>> name, selected.grid, len(selected.experts), len(selected.experts[0])
    ('body.group3.0.moe', (4, 4), 4, 4)
    """
    check_positive("predict", batch_size=batch_size)
    several = isinstance(images, list | tuple) or (isinstance(images, Tensor) and images.ndim == 4)
    inputs = list(cast("Sequence[InputImage]", images)) if several else [cast("InputImage", images)]
    predictor = Predictor(model)
    batches = (inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size))
    return tuple(found for batch in batches for found in predictor(model.transform(batch)))


class Predictor:
    """Runs a network on batches and returns the prediction for each image.

    The network is run once on a random image, to count its multiply-adds.
    """

    def __init__(self, model: TrainedNetwork) -> None:
        self._model = model.eval()
        self._cost = 0
        self._droppable: dict[str, tuple[int, int]] = {}
        if not isinstance(model, GatedNetwork):
            self._count()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Prediction]:
        """Returns the predictions for the network's input (B, C, H, W)."""
        model = self._model
        if isinstance(model, GatedNetwork):
            output = model.forward_with_routing(x)
            logits, macs = cast("Tensor", output.logits), model.macs(output.routing)
            routing: dict[str, Routing] = {}
        else:
            logits, routing = self._run(x)
            macs = self._macs(routing, len(x))
        probabilities = cast("list[list[float]]", logits.double().softmax(-1).tolist())
        patches = {
            name: each.without_prefix()
            for name, each in routing.items()
            if each.unit in ("patch", "token") and each.index is not None and each.grid
        }
        selected = {name: _selected(each) for name, each in patches.items()}
        costs = cast("list[int]", macs.tolist())
        return [
            Prediction(tuple(probabilities[b]), costs[b], {name: patches[b] for name, patches in selected.items()})
            for b in range(len(x))
        ]

    def _run(self, x: Tensor) -> tuple[Tensor, dict[str, Routing]]:
        """Logits, and the routing of each layer in its last pass."""
        with self._recorded() as routing:
            return cast("Tensor", self._model(x)), routing

    def _recorded(self) -> AbstractContextManager[dict[str, Routing]]:
        return record_routing(self._model) if routed_layers(self._model) else nullcontext({})

    def _count(self) -> None:
        """Counts multiply-adds, and those per unit and expert of layers whose routers may drop units."""
        with self._recorded() as recorded:
            cost = count_macs(self._model, self._model.metadata.input_shape)
        self._cost = cost.macs
        dense = {layer.name: layer.dense_macs for layer in cost.layers}
        for name, routing in recorded.items():
            if routing.may_drop and routing.index is not None and name in dense:
                # without the padding of the map
                units = math.prod(routing.filled) + routing.prefix if routing.filled else routing.units
                each = round(dense[name] / (units * routing.experts))
                self._droppable[name] = each, int(routing.load.sum())

    def _macs(self, routing: Mapping[str, Routing], images: int) -> Tensor:
        """(B,): more or less than the counted image where a router dropped fewer or more units."""
        total = torch.full((images,), self._cost)
        for name, (each, counted) in self._droppable.items():
            total += each * (routing[name].mask.sum((1, 2)).cpu() - counted)
        return total


def _selected(routing: Routing) -> list[SelectedPatches]:
    assert routing.grid is not None
    mask_BEN = cast("list[list[list[bool]]]", routing.mask.transpose(1, 2).tolist())
    return [
        SelectedPatches(routing.grid, tuple(tuple(n for n, taken in enumerate(row) if taken) for row in mask_EN))
        for mask_EN in mask_BEN
    ]
