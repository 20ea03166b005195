"""Training of the channel gates of DeepMoE networks: penalty, control of the cost, a guard, and freezing.

`GateTraining` computes what is added to the loss, and observes the gates of some batches. At checks, every few steps,
it waits for the device: λ and the biases of gates are adapted to the target cost, the penalty of layers that are
nearly closed is relaxed, and a layer that has closed for all images stops the run. `GateCallback` runs it in `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.channel_gate import ChannelGate, gate_l1_of_layers
from moesaic.routing_record import UNASSIGNED, Routing
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

__all__ = ["ClosedLayer", "GateTraining", "gate_costs", "resolve_gate_recipe", "shift_gates"]

FullWeights = Callable[[], AbstractContextManager[None]]
"""A context in which modules of a network can be called one by one, also if its weights are sharded."""

_CHECKS = 100
"""Checks in the joint stage, if it has so many steps: control is the same for long and for short runs."""
_MAX_STEPS = 25
"""Steps from one check to the next, at most."""
_OBSERVED = 5
"""Batches before a check whose gates are observed; others cost nothing."""
_CLOSED = 0.99
"""The fraction of images for which a whole layer may be closed."""
_GAIN, _RANGE = 0.5, 30.0
"""Gain of the controller, from ln(cost / goal) to the change of ln λ at a check, and the range of λ as a factor."""
_TOLERANCE, _CORRECTION = 0.05, 0.5
"""The |ln(cost / goal)| from which biases are shifted, and the fraction of it that a shift corrects: the cost of a few
batches is noisy."""
_BISECTIONS = 12
"""Bisection steps in the search for the shift of biases at a check."""


class ClosedLayer(ArithmeticError):
    """All gates of a layer are closed for all images, so that none of them gets a gradient."""


def resolve_gate_recipe(model: nn.Module, recipe: Recipe) -> Recipe:
    """Returns the recipe, with a `GateRecipe` if the network has channel gates; refuses combinations that cannot work.

    >>> from moesaic.models import VGG16
    >>> from moesaic.models.deepmoe.network import deepmoe
    >>> model = deepmoe(VGG16(num_classes=4, width=0.1), num_classes=4)
    >>> resolve_gate_recipe(model, Recipe(epochs=3)).gates == GateRecipe()
    True
    >>> resolve_gate_recipe(model, Recipe(epochs=3, gates=GateRecipe(target_macs=0.01)))
    Traceback (most recent call last):
    ValueError: fit: target_macs=0.01 is less than what stays when one gate of every layer is open, ...
    """
    if not isinstance(model, DeepMoE):
        if recipe.gates is None:
            return recipe
        raise ValueError(
            f"fit: the recipe has gates to train, but {type(model).__name__} has no channel gates; leave its `gates` "
            "out, or use a network that has them, such as vgg16_deepmoe"
        )
    gates = recipe.gates or GateRecipe()
    if recipe.optimizer == "normalized_gd":
        raise ValueError(
            "fit: optimizer='normalized_gd' moves experts that have weights of their own, and channels share theirs; "
            "use 'adamw' or 'sgd'"
        )
    if gates.noise and recipe.compile:
        raise ValueError(
            f"fit: noise={gates.noise} changes at every step, for which a compiled network would be compiled again; "
            "use compile=False, or noise=0"
        )
    if gates.straight_through and not _is_topk(model):
        raise ValueError(
            "fit: straight_through=True has no meaning for gates of mode='relu'; leave it out, or build the network "
            "with mode='topk'"
        )
    if gates.target_macs is not None:
        _check_target(model, gates.target_macs)
    return replace(recipe, gates=gates)


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
        _shift(model, scores, target)
        with full_weights():
            return float(gate_costs(model, embeddings).mean())


def gate_costs(model: DeepMoE, embeddings: Tensor) -> Tensor:
    """(B,) float64: the cost of images with these embeddings, as fractions of the dense network's multiply-adds."""
    return model.macs({name: head(embeddings) for name, head in model.heads().items()}).double() / model.dense_macs


class GateTraining:
    """The state of the gates' training, from the first step to the last."""

    def __init__(
        self,
        model: DeepMoE,
        recipe: Recipe,
        steps: int,
        device: torch.device,
        teacher: nn.Module | None = None,
        batch: GlobalBatch | None = None,
    ) -> None:
        assert recipe.gates is not None, "resolve_gate_recipe gives one"
        self.recipe = recipe.gates
        self.joint = True
        """Whether gates still learn."""
        self.l1_weight = self.recipe.l1_weight
        """λ, without its warmup."""
        self._model = model
        self._epochs = recipe.epochs
        self._smoothing = recipe.label_smoothing
        self._teacher = teacher
        self._batch = batch
        self._heads = model.heads()
        self._penalised = self.recipe.l1_weight > 0 and not _is_topk(model)
        self._check_every = min(
            max(int(recipe.epochs * self.recipe.joint_fraction * steps) // _CHECKS, 1), _MAX_STEPS, steps
        )
        self._scores: dict[str, Tensor] = {}
        self._dense_cost = _all_open_cost(model)
        self._reported: list[str] = []
        self._min_open = [max(self.recipe.min_open, 1 / head.blocks) for head in self._heads.values()]
        self._weights = _weights(model) if self.recipe.layer_weights == "cost" else [1.0] * len(self._heads)
        self._penalty_factors = [1.0] * len(self._heads)
        self._penalty_L = torch.tensor(self._weights, device=device)
        # summed over images since the last check, and over those of the epoch: cost, and for each layer the share of
        # open gates, the mean gate, and whether all were closed
        self._recent = torch.zeros(1 + 3 * len(self._heads), device=device)
        self._epoch = torch.zeros_like(self._recent)
        self._recent_images = self._epoch_images = 0
        self._gate_parameters = [parameter for parameter in model.gate_parameters() if parameter.requires_grad]
        self._straight_through = [head.straight_through for head in self._heads.values()]
        for head in self._heads.values():
            head.straight_through |= self.recipe.straight_through

    # for the loss

    def set_noise(self, epoch: float) -> None:
        """Set the noise on scores for a step at this time."""
        if self.recipe.noise and self.joint:
            self._set_head_noise(self.recipe.noise_at(self.recipe.joint_progress(epoch, self._epochs)))

    def teacher_logits(self, x: Tensor) -> Tensor | None:
        """Returns the teacher's logits, or None without a teacher."""
        if self._teacher is None:
            return None
        with torch.no_grad():
            return _float(cast("Tensor", self._teacher(x)))

    def loss(self, output: DeepMoEOutput, labels: Tensor, teacher_logits: Tensor | None, epoch: float) -> Tensor:
        """Returns what is added to the cross-entropy of the network's logits."""
        total = torch.zeros((), device=labels.device)
        if self.joint and self.recipe.embedding_weight:
            own_logits = _float(output.embedding_logits)
            own = F.cross_entropy(own_logits, labels, label_smoothing=self._smoothing) if len(labels) else own_logits
            total = total + self.recipe.embedding_weight * own.sum()
        pressure = self.l1_weight_at(epoch)
        if pressure:
            mean_L = gate_l1_of_layers(list(output.routing.values()))
            total = total + pressure * (self._penalty_L * mean_L).sum()
        if teacher_logits is not None and len(labels):
            T = self.recipe.distill_temperature
            student, teacher = F.log_softmax(_float(output.logits) / T, 1), F.log_softmax(teacher_logits / T, 1)
            total = total + self.recipe.distill_weight * T**2 * F.kl_div(
                student, teacher, reduction="batchmean", log_target=True
            )
        return total

    def l1_weight_at(self, epoch: float) -> float:
        """λ at this time."""
        return self.l1_weight * self.recipe.l1_factor(epoch, self._epochs) if self.joint and self._penalised else 0.0

    @torch.no_grad()
    def observe(self, routing: Mapping[str, Routing], steps: int) -> None:
        """Count the gates of a micro-batch, ``steps`` steps after the start, if a check is near."""
        if steps % self._check_every < self._check_every - _OBSERVED:
            return
        cost_B = self._model.macs(routing) / self._model.dense_macs
        open_LB = torch.stack([each.mask[:, 0].float().mean(1) for each in routing.values()])
        mean_L = gate_l1_of_layers(list(routing.values()))
        seen = torch.cat([cost_B.sum()[None], open_LB.sum(1), mean_L * len(cost_B), (open_LB == 0).sum(1)])
        self._scores = {name: each.scores[:, 0] for name, each in routing.items()}
        images = len(cost_B)
        if self._batch is not None:
            seen, images = self._batch.sum(seen), self._batch.size
        self._recent += seen
        self._epoch += seen
        self._recent_images += images
        self._epoch_images += images

    # for the training loop

    def set_mode(self) -> None:
        """Put the embedding network and the gate heads into the mode of their stage."""
        self._model.embedding.train(self.joint)
        self._model.gates.train(self.joint)

    def update(self, steps: int, epoch: float) -> list[str]:
        """Check the gates of the last batches, if a check is due; returns warnings.

        Raises `ClosedLayer` where a layer has closed for good.
        """
        if steps % self._check_every or not self._recent_images:
            return []
        self.check_open()
        cost, open_L, mean_L, closed_L = self._means(self._recent, self._recent_images)
        self._recent.zero_()
        self._recent_images = 0
        if not (self.joint and self._penalised):
            return []
        goal = self.recipe.cost_at(self.recipe.joint_progress(epoch, self._epochs), self._dense_cost)
        if goal is not None:
            self._adapt(cost, goal, max(closed_L) >= _CLOSED)
        return self._relax_penalty(open_L, mean_L)

    def check_open(self) -> None:
        """Refuse layers that were closed for nearly all images since the last check; waits for the device.

        With a target, the controller opens them again.
        """
        if not (self.joint and self._recent_images) or self.recipe.target_macs is not None:
            return
        closed_L = self._means(self._recent, self._recent_images)[-1]
        worst = max(range(len(closed_L)), key=closed_L.__getitem__)
        if closed_L[worst] >= _CLOSED:
            raise ClosedLayer(
                f"all gates of layer {self._model.gated[worst]!r} are closed for {closed_L[worst]:.0%} of the images"
            )

    def advice(self) -> str:
        """Returns what to change where a layer has closed."""
        gates = self.recipe
        longer = f", a longer warmup_fraction than {gates.warmup_fraction}" if gates.warmup_fraction < 1 else ""
        less = f"Use a smaller l1_weight than {gates.l1_weight:g}{longer}"
        return f"{less}, or a target_macs, which keeps one gate of every layer open"

    def joint_stage_over(self, epoch: float) -> bool:
        """Returns whether gates still learn although the joint stage is over at this time."""
        return self.joint and self.recipe.joint_progress(epoch, self._epochs) >= 1

    def freeze(self, embeddings: Tensor | None, full_weights: FullWeights = nullcontext) -> float | None:
        """End the joint stage. With embeddings of training images, the target is met on them; returns their cost."""
        cost = None
        self._set_head_noise(0.0)
        self.joint = False
        self.set_mode()
        if embeddings is not None and self.recipe.target_macs is not None:
            cost = shift_gates(self._model, embeddings, self.recipe.target_macs, full_weights)
        self._freeze_parameters()
        return cost

    def restore_model(self) -> None:
        """Restore the settings of the network, apart from its weights."""
        self._set_head_noise(0.0)
        for head, through in zip(self._heads.values(), self._straight_through, strict=True):
            head.straight_through = through
        for parameter in self._gate_parameters:
            parameter.requires_grad_(True)

    def epoch_means(self) -> tuple[float, float] | None:
        """Returns mean cost and share of open gates of the observed images of the epoch, and begins a new one."""
        if not self._epoch_images:
            return None
        cost, open_L, _, _ = self._means(self._epoch, self._epoch_images)
        self._epoch.zero_()
        self._epoch_images = 0
        blocks = [head.blocks for head in self._heads.values()]
        return cost, sum(share * each for share, each in zip(open_L, blocks, strict=True)) / sum(blocks)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: tensors, and values that JSON can represent."""
        return {
            "recent": self._recent,
            "epoch": self._epoch,
            "joint": self.joint,
            "l1_weight": self.l1_weight,
            "penalty_factors": list(self._penalty_factors),
            "reported": list(self._reported),
            "images": [self._recent_images, self._epoch_images],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self._recent.copy_(state["recent"])
        self._epoch.copy_(state["epoch"])
        self.l1_weight = state["l1_weight"]
        self._reported = list(state["reported"])
        self._recent_images, self._epoch_images = state["images"]
        self._set_penalty(state["penalty_factors"])
        if not state["joint"]:
            self.joint = False
            self._freeze_parameters()

    # inside

    def _adapt(self, cost: float, goal: float, closed: bool) -> None:
        """Raise λ where the cost is above its goal, lower it where it is below; shift biases where it is far off."""
        error, start = math.log(cost / goal), self.recipe.l1_weight
        self.l1_weight = min(max(self.l1_weight * math.exp(_GAIN * error), start / _RANGE), start * _RANGE)
        if abs(error) > _TOLERANCE or closed:
            with torch.no_grad():
                all_scores = self._scores
                if self._batch is not None:
                    all_scores = {name: self._batch.gather(scores) for name, scores in all_scores.items()}
                patterns = {name: _routing_of(scores > 0, self._heads[name]) for name, scores in all_scores.items()}
                now = _mean_cost(self._model, patterns)
                _shift(self._model, all_scores, now * math.exp(-_CORRECTION * error), _BISECTIONS)

    def _relax_penalty(self, open_L: Sequence[float], mean_L: Sequence[float]) -> list[str]:
        """Relax the penalty of layers that are nearly closed, or whose gates have shrunk; returns new warnings.

        BatchNorm of the next layer absorbs a common factor of a layer's gates, so that only this keeps them from
        shrinking together until a single step closes them all.
        """
        shares = (min(max(share / least - 1, 0.0), 1.0) for share, least in zip(open_L, self._min_open, strict=True))
        self._set_penalty([share * min(mean, 1.0) for share, mean in zip(shares, mean_L, strict=True)])
        warnings: list[str] = []
        for name, share, least in zip(self._heads, open_L, self._min_open, strict=True):
            if share <= least and name not in self._reported and self._heads[name].blocks > 1:
                self._reported.append(name)
                warnings.append(
                    f"only {share:.1%} of the gates of layer {name!r} are open on average, minimum {least:.1%}: "
                    "their penalty is 0 until more are open"
                )
        return warnings

    def _set_penalty(self, relief: Sequence[float]) -> None:
        self._penalty_factors = list(relief)
        pressure = [weight * each for weight, each in zip(self._weights, relief, strict=True)]
        self._penalty_L.copy_(torch.tensor(pressure))

    def _means(self, sums: Tensor, images: int) -> tuple[float, list[float], list[float], list[float]]:
        """Means over images: cost; for each layer the open share, the mean gate, how often all gates are closed."""
        cost, *others = (value / images for value in cast("list[float]", sums.tolist()))
        layers = len(self._heads)
        return cost, others[:layers], others[layers : 2 * layers], others[2 * layers :]

    def _freeze_parameters(self) -> None:
        for parameter in self._gate_parameters:
            parameter.requires_grad_(False)
            parameter.grad = None  # without one, optimizers neither move nor decay it

    def _set_head_noise(self, noise: float) -> None:
        for head in self._heads.values():
            head.noise = noise


def _float(values: Tensor) -> Tensor:
    """The values as float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _is_topk(model: DeepMoE) -> bool:
    """Whether gates keep a fixed number of blocks."""
    return any(head.mode == "topk" for head in model.heads().values())


def _check_target(model: DeepMoE, target: float) -> None:
    heads = model.heads()
    if _is_topk(model):
        open_blocks = {name: _first_blocks_open(head, head.keep or head.blocks) for name, head in heads.items()}
        raise ValueError(
            f"fit: target_macs={target}, but gates of mode='topk' open a fixed number of blocks for every image, "
            f"which costs {_mean_cost(model, open_blocks):.3f}; leave target_macs out and build the network with "
            f"keep={math.sqrt(target):.2f} or so, the square root of the cost, or with mode='relu'"
        )
    if any(head.bias is None for head in heads.values()):
        raise ValueError(
            f"fit: target_macs={target} is met by shifting the biases of gates, and these have none; leave it out and "
            "use l1_weight, or build the network with bias=1.0"
        )
    least = _mean_cost(model, {name: _first_blocks_open(head, 1) for name, head in heads.items()})
    if target < least:
        fixed = model.fixed_macs / model.dense_macs
        raise ValueError(
            f"fit: target_macs={target} is less than what stays when one gate of every layer is open, {least:.3f} of "
            f"the dense network, of which {fixed:.3f} are the embedding network, the gate heads and what has no gates; "
            f"use {math.ceil(1000 * least) / 1000:.3f} or more"
        )


def _shift(model: DeepMoE, scores: Mapping[str, Tensor], target: float, bisections: int = 30) -> None:
    """Shift biases so that images with these scores (B, E) cost the target on average, as far as gates allow."""
    heads = model.heads()
    layers = {name: _Scores(values) for name, values in scores.items()}

    def shifts(factor: float) -> dict[str, float]:
        return {name: layer.shift(factor) for name, layer in layers.items()}

    def cost(factor: float) -> float:
        patterns = {name: _routing_of(scores[name] > shift, heads[name]) for name, shift in shifts(factor).items()}
        return _mean_cost(model, patterns)

    cheap, dear = 0.0, max(layer.most for layer in layers.values())
    for _ in range(bisections):
        middle = 0.5 * (cheap + dear)
        cheap, dear = (cheap, middle) if cost(middle) > target else (middle, dear)
    for name, shift in shifts(min(cheap, dear, key=lambda factor: abs(cost(factor) - target))).items():
        bias = heads[name].bias
        assert bias is not None, "resolve_gate_recipe refuses gates without"
        bias.sub_(shift)


class _Scores:
    """The sorted scores (B, E) of a layer: finds the shift with which a number of gates are open."""

    def __init__(self, scores_BE: Tensor) -> None:
        self._falling = scores_BE.flatten().sort(descending=True).values.cpu()  # read one by one
        self._ease = 1e-3 * float(self._falling[0] - self._falling[-1]) + 1e-6
        self._open = int((self._falling > 0).sum())
        self._min_open = len(scores_BE)  # one for each image
        self.most = len(self._falling) / max(self._open, 1)
        """From this factor on, all gates are open."""

    def shift(self, factor: float) -> float:
        """Returns the shift for ``factor`` times as many open gates; at least one per image on average."""
        wanted = min(max(round(factor * self._open), self._min_open), len(self._falling))
        if wanted == self._open:
            return 0.0
        last = float(self._falling[wanted - 1])
        following = float(self._falling[wanted]) if wanted < len(self._falling) else last
        return 0.5 * (last + following) if following < last else last - self._ease  # of equal ones all are open


def _weights(model: DeepMoE) -> list[float]:
    """Weights of the layers: the cost that closing a layer saves while all others are open, 1 on average."""
    heads = model.heads()
    layers = range(len(heads))
    patterns = {
        name: _routing_of(torch.tensor([[row != layer] * head.blocks for row in layers]), head)
        for layer, (name, head) in zip(layers, heads.items(), strict=True)
    }
    whole = _all_open_cost(model)
    saved = cast("list[float]", (whole - model.macs(patterns).double() / model.dense_macs).tolist())
    return [each * len(saved) / sum(saved) for each in saved]


def _all_open_cost(model: DeepMoE) -> float:
    """Cost of an image with all gates open, as a fraction of the dense network's."""
    return _mean_cost(model, {name: _first_blocks_open(head, head.blocks) for name, head in model.heads().items()})


def _first_blocks_open(head: ChannelGate, blocks: int) -> Routing:
    """Routing of one image with the first blocks open."""
    return _routing_of((torch.arange(head.blocks) < blocks)[None], head)


def _routing_of(open_BE: Tensor, head: ChannelGate) -> Routing:
    """Routing with gates of 1 where they are open."""
    open_BE = open_BE.to(head.weight.device)
    index = torch.arange(head.blocks, device=open_BE.device).masked_fill(~open_BE, UNASSIGNED)
    gate = open_BE.float()
    return Routing("channel", gate[:, None], index[:, None], gate[:, None], chooser="unit")


def _mean_cost(model: DeepMoE, routing: Mapping[str, Routing]) -> float:
    """Mean cost of images as a fraction of the dense network's."""
    return float(model.macs(routing).double().mean()) / model.dense_macs
