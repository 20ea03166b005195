"""The cost of channel gates, and the shift of their biases that brings it to a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor

from moesaic.models.deepmoe.network import DeepMoE
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing_record import UNASSIGNED, Routing
from moesaic.training.gate_recipe import LayerWeights

__all__ = [
    "FullWeights",
    "all_open_cost",
    "cost_loss",
    "first_blocks_open",
    "gate_costs",
    "has_biases",
    "layer_weights",
    "mean_cost",
    "routing_of",
    "shift_biases",
    "shift_gates",
]

FullWeights = Callable[[], AbstractContextManager[None]]
"""A context in which modules of a network can be called one by one, also if its weights are sharded."""


def shift_gates(model: DeepMoE, embeddings: Tensor, target: float, full_weights: FullWeights = nullcontext) -> float:
    """Shift the biases of all gates so that images with these embeddings (B, D) cost the target on average.

    The biases of a layer are shifted by the same amount, such that the number of its open gates changes by a factor
    that is the same for all layers; at least one gate of each layer stays open on average. Returns the cost that was
    reached, as a fraction of the dense network's: gates are countable, so it may miss the target by a little. Heads are
    called inside of ``full_weights()``.

    >>> from moesaic.models import VGG16
    >>> from moesaic.models.deepmoe.network import deepmoe
    >>> model = deepmoe(VGG16(num_classes=4, width=0.25), num_classes=4).eval()
    >>> embeddings = torch.rand(50, model.embedding.dimension)
    >>> round(shift_gates(model, embeddings, 0.5), 2)
    0.5
    """
    with torch.no_grad():
        with full_weights():
            scores = {name: head(embeddings).scores[:, 0] for name, head in model.heads().items()}
        shift_biases(model, scores, target)
        with full_weights():
            return float(gate_costs(model, embeddings).mean())


def gate_costs(model: DeepMoE, embeddings: Tensor) -> Tensor:
    """(B,) float64: the cost of images with these embeddings, as fractions of the dense network's multiply-adds."""
    return model.macs({name: head(embeddings) for name, head in model.heads().items()}).double() / model.dense_macs


def cost_loss(
    model: DeepMoE, routing: Mapping[str, Routing], goal: float | Tensor, batch: GlobalBatch | None = None
) -> Tensor:
    """(E[cost] − goal)² for hard gates: the mean of `DeepMoE.expected_macs`, as a fraction of the dense network's.

    With ``batch``, the images are a part of it, whose loss has the gradients of the mean over the whole batch.

    >>> from moesaic.models import VGG16
    >>> from moesaic.models.deepmoe.network import deepmoe
    >>> model = deepmoe(VGG16(num_classes=4, width=0.25), num_classes=4, mode="hard", bias=100.0)
    >>> routing = model.forward_with_routing(torch.zeros(2, 3, 32, 32)).routing
    >>> round(cost_loss(model, routing, 0.5).item(), 2)                              # all gates are open: (1.02 − 0.5)²
    0.27
    """
    cost_B = model.expected_macs(routing) / model.dense_macs
    mean = cost_B.sum() / max(len(cost_B), 1)
    whole = mean.detach() if batch is None else batch.sum(cost_B.sum()) / max(batch.size, 1)
    error = whole - goal
    return error**2 + 2 * error * (mean - mean.detach())


def has_biases(model: DeepMoE) -> bool:
    """Whether the gates have biases, which can be shifted."""
    return all(head.bias is not None for head in model.heads().values())


def shift_biases(model: DeepMoE, scores: Mapping[str, Tensor], target: float, bisections: int = 30) -> None:
    """Shift biases so that images with these scores (B, E) cost the target on average, as far as gates allow."""
    heads = model.heads()
    layers = {name: _Scores(values) for name, values in scores.items()}

    def shifts(factor: float) -> dict[str, float]:
        return {name: layer.shift(factor) for name, layer in layers.items()}

    def cost(factor: float) -> float:
        patterns = {name: routing_of(scores[name] > shift, heads[name]) for name, shift in shifts(factor).items()}
        return mean_cost(model, patterns)

    low, high = 0.0, max(layer.most for layer in layers.values())
    for _ in range(bisections):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if cost(middle) > target else (middle, high)
    for name, shift in shifts(min(low, high, key=lambda factor: abs(cost(factor) - target))).items():
        bias = heads[name].bias
        assert bias is not None, "resolve_gate_recipe refuses gates without"
        bias.sub_(shift)


class _Scores:
    """The sorted scores (B, E) of a layer: finds the shift with which a number of gates are open."""

    def __init__(self, scores_BE: Tensor) -> None:
        self._falling = scores_BE.flatten().sort(descending=True).values.cpu()  # read one by one
        self._margin = 1e-3 * float(self._falling[0] - self._falling[-1]) + 1e-6
        self._open = int((self._falling > 0).sum())
        self._min_open = len(scores_BE)  # one for each image
        self.most = len(self._falling) / max(self._open, 1)
        """The factor from which on all gates are open."""

    def shift(self, factor: float) -> float:
        """Returns the shift for ``factor`` times as many open gates; at least one per image on average."""
        wanted = min(max(round(factor * self._open), self._min_open), len(self._falling))
        if wanted == self._open:
            return 0.0
        last = float(self._falling[wanted - 1])
        following = float(self._falling[wanted]) if wanted < len(self._falling) else last
        return 0.5 * (last + following) if following < last else last - self._margin  # of equal ones all are open


def layer_weights(model: DeepMoE, by: LayerWeights) -> list[float]:
    """Weights of the layers, 1 on average.

    By ``"cost"``: what closing a layer saves while all others are open; ``"gates"``: by the number of its gates.
    """
    heads = model.heads()
    if by != "cost":
        blocks = [head.blocks if by == "gates" else 1 for head in heads.values()]
        return [value * len(blocks) / sum(blocks) for value in blocks]
    layers = range(len(heads))
    patterns = {
        name: routing_of(torch.tensor([[row != layer] * head.blocks for row in layers]), head)
        for layer, (name, head) in zip(layers, heads.items(), strict=True)
    }
    whole = all_open_cost(model)
    saved = cast("list[float]", (whole - model.macs(patterns).double() / model.dense_macs).tolist())
    return [value * len(saved) / sum(saved) for value in saved]


def all_open_cost(model: DeepMoE) -> float:
    """Cost of an image with all gates open, as a fraction of the dense network's."""
    return mean_cost(model, {name: first_blocks_open(head, head.blocks) for name, head in model.heads().items()})


def first_blocks_open(head: ChannelGate, blocks: int) -> Routing:
    """Routing of one image with the first blocks open."""
    return routing_of((torch.arange(head.blocks) < blocks)[None], head)


def routing_of(open_BE: Tensor, head: ChannelGate) -> Routing:
    """Routing with gates of 1 where they are open."""
    open_BE = open_BE.to(head.weight.device)
    index = torch.arange(head.blocks, device=open_BE.device).masked_fill(~open_BE, UNASSIGNED)
    gate = open_BE.float()
    return Routing("channel", gate[:, None], index[:, None], gate[:, None], chooser="unit")


def mean_cost(model: DeepMoE, routing: Mapping[str, Routing]) -> float:
    """Mean cost of images as a fraction of the dense network's."""
    return float(model.macs(routing).double().mean()) / model.dense_macs
