"""Training of the channel gates of DeepMoE networks: losses, control of the cost, closed layers, freezing.

`GateTraining` computes what is added to the loss, and observes the gates of some batches. Whatever changes from step to
step is on the device, so that a CUDA graph can replay it. At checks, every few steps, it waits for the device: λ and
the biases of gates are adapted to the target cost, the penalty of layers that are nearly closed is relaxed, and a layer
that has closed for all images stops the run. Hard gates have noise and a quadratic cost loss instead. `GateCallback`
runs it in `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.models.deepmoe.embedding_network import ConstantEmbedding
from moesaic.models.deepmoe.network import DeepMoE, DeepMoEOutput
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.channel_gate import ChannelMode, gate_l1_of_layers
from moesaic.routing_record import Routing
from moesaic.training.batch_shaping_loss import batch_shaping_loss
from moesaic.training.distillation import distillation_loss, float_logits, teacher_logits
from moesaic.training.gate_costs import (
    FullWeights,
    all_open_cost,
    cost_loss,
    first_blocks_open,
    has_biases,
    layer_weights,
    mean_cost,
    routing_of,
    shift_biases,
    shift_gates,
)
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

__all__ = ["ClosedLayer", "GateTraining", "resolve_gate_recipe"]

_CHECKS_OF_STAGE = 100
"""Checks in the joint stage, if it has so many steps: control is the same for long and for short runs."""
_MAX_STEPS = 25
"""Steps from one check to the next, at most."""
_OBSERVED_BATCHES = 5
"""Batches before a check whose gates are observed; others cost nothing."""
_CLOSED_FRACTION = 0.99
"""The fraction of images for which a whole layer may be closed."""
_CONTROLLER_GAIN, _L1_WEIGHT_RANGE = 0.5, 30.0
"""Gain of the controller, from ln(cost / goal) to the change of ln λ at a check, and the range of λ as a factor."""
_COST_TOLERANCE, _COST_CORRECTION = 0.05, 0.5
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
    mode = _mode(model)
    if gates.straight_through and mode != "topk":
        raise ValueError(
            f"fit: straight_through=True has no meaning for gates of mode={mode!r}; leave it out, or build the network "
            "with mode='topk'"
        )
    if gates.noise and mode == "hard":
        raise ValueError(
            f"fit: noise={gates.noise} is for gates of the modes 'relu' and 'topk'; those of mode='hard' have logistic "
            "noise of scale 1 while they learn; leave it out"
        )
    if gates.shaping_weight and mode != "hard":
        raise ValueError(
            f"fit: shaping_weight={gates.shaping_weight} shapes the probability with which a gate is open, which gates "
            f"of mode={mode!r} do not have; leave it out, or build the network with mode='hard'"
        )
    if gates.target_macs is not None:
        _check_target(model, gates.target_macs)
    return replace(recipe, gates=gates)


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
        self._hard = _mode(model) == "hard"
        self._penalised = self.recipe.l1_weight > 0 and _mode(model) == "relu"
        self._can_shift = has_biases(model)
        self._check_every = min(
            max(int(recipe.epochs * self.recipe.joint_fraction * steps) // _CHECKS_OF_STAGE, 1),
            _MAX_STEPS,
            steps,
        )
        self.observing = False
        """Whether the gates of the step in progress are observed."""
        self._scores: dict[int, dict[str, Tensor]] = {}
        """Scores of the last observed micro-batch of each size, by layer."""
        self._dense_cost = all_open_cost(model)
        self._reported: list[str] = []
        self._min_open = [max(self.recipe.min_open, 1 / head.blocks) for head in self._heads.values()]
        self._weights = layer_weights(model, self.recipe.layer_weights)
        self._penalty_factors = [1.0] * len(self._heads)
        self._penalty_L = torch.tensor(self._weights, device=device)
        # since the last check, and in the epoch: the number of images, and summed over them the cost, and for each
        # layer the share of open gates, the mean gate, and whether all were closed
        self._recent = torch.zeros(2 + 3 * len(self._heads), device=device)
        self._epoch = torch.zeros_like(self._recent)
        self._pressure, self._noise, self._goal, self._shaping = torch.zeros(4, device=device).unbind()
        """λ, noise on scores, goal of the cost and weight of batch shaping in the step in progress."""
        self._gate_parameters = [parameter for parameter in model.gate_parameters() if parameter.requires_grad]
        self._before = [(head.straight_through, head.temperature) for head in self._heads.values()]
        for head in self._heads.values():
            head.straight_through |= self.recipe.straight_through
            head.temperature = self.recipe.gate_temperature

    # for the loss

    def begin_step(self, steps: int, epoch: float) -> None:
        """Set the weights of losses and the noise on scores for a step at this time, ``steps`` after the start."""
        self.observing = steps % self._check_every >= self._check_every - _OBSERVED_BATCHES
        if not self.joint:
            return
        gates, progress = self.recipe, self.recipe.joint_progress(epoch, self._epochs)
        self._pressure.fill_(self.l1_weight_at(epoch))
        if self._hard:
            self._shaping.fill_(gates.shaping_at(progress))
            goal = gates.cost_at(progress, self._dense_cost)
            if goal is not None:
                self._goal.fill_(goal)
            self._set_head_noise(1.0)
        elif gates.noise:
            self._noise.fill_(gates.noise_at(progress))
            self._set_head_noise(self._noise)

    def step_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a step changes."""
        scores = {f"scores/{size}/{name}": tensor for size, of in self._scores.items() for name, tensor in of.items()}
        return {"recent": self._recent, "epoch": self._epoch, **scores}

    def teacher_logits(self, x: Tensor) -> Tensor | None:
        """Returns the teacher's logits, or None without a teacher."""
        return None if self._teacher is None else teacher_logits(self._teacher, x)

    def loss(self, output: DeepMoEOutput, labels: Tensor, of_teacher: Tensor | None) -> Tensor:
        """Returns what is added to the cross-entropy of the network's logits; ``of_teacher`` are the teacher's."""
        total = torch.zeros((), device=labels.device)
        if self.joint and self.recipe.embedding_weight and not isinstance(self._model.embedding, ConstantEmbedding):
            logits = float_logits(output.embedding_logits)
            loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing) if len(labels) else logits.sum()
            total = total + self.recipe.embedding_weight * loss
        if self.joint and self._penalised:
            mean_L = gate_l1_of_layers(list(output.routing.values()))
            total = total + self._pressure * (self._penalty_L * mean_L).sum()
        if self.joint and self._hard:
            total = total + self._hard_loss(output.routing)
        if of_teacher is not None and len(labels):
            distance = distillation_loss(output.logits, of_teacher, self.recipe.distill_temperature)
            total = total + self.recipe.distill_weight * distance
        return total

    def _hard_loss(self, routing: Mapping[str, Routing]) -> Tensor | float:
        """The quadratic cost loss and batch shaping."""
        gates, total = self.recipe, 0.0
        if gates.target_macs is not None and gates.cost_weight:
            total = total + gates.cost_weight * cost_loss(self._model, routing, self._goal, self._batch)
        if gates.shaping_weight:
            total = total + self._shaping * batch_shaping_loss(
                routing.values(), gates.shaping_alpha, gates.shaping_beta, self._batch
            )
        return total

    def l1_weight_at(self, epoch: float) -> float:
        """λ at this time."""
        return self.l1_weight * self.recipe.l1_factor(epoch, self._epochs) if self.joint and self._penalised else 0.0

    @torch.no_grad()
    def observe(self, routing: Mapping[str, Routing]) -> None:
        """Count the gates of a micro-batch, if a check is near."""
        if not self.observing:
            return
        cost_B = self._model.macs(routing) / self._model.dense_macs
        open_LB = torch.stack([layer_routing.mask[:, 0].float().mean(1) for layer_routing in routing.values()])
        mean_L = gate_l1_of_layers(list(routing.values()))
        images = len(cost_B)
        counts = torch.full((1,), images, dtype=open_LB.dtype, device=open_LB.device)
        sums = torch.cat([counts, cost_B.sum()[None], open_LB.sum(1), mean_L * images, (open_LB == 0).sum(1)])
        latest = self._scores.setdefault(images, {})
        for name, layer_routing in routing.items():
            scores = layer_routing.scores[:, 0]
            if name not in latest:
                latest[name] = torch.empty_like(scores)
            latest[name].copy_(scores)
        if self._batch is not None:
            sums = self._batch.sum(sums)
        self._recent += sums
        self._epoch += sums

    # for the training loop

    def set_mode(self) -> None:
        """Put the embedding network and the gate heads into the mode of their stage."""
        self._model.embedding.train(self.joint)
        self._model.gates.train(self.joint)

    def update(self, steps: int, epoch: float, images: int) -> list[str]:
        """Check the gates of the last batches, if a check is due; returns warnings.

        ``images`` is the size of the last micro-batch. Raises `ClosedLayer` where a layer has closed for good.
        """
        if steps % self._check_every or (means := self._means(self._recent)) is None:
            return []
        self.check_open()
        cost, open_L, mean_L, closed_L = means
        self._recent.zero_()
        if not (self.joint and self._penalised):
            return []
        goal = self.recipe.cost_at(self.recipe.joint_progress(epoch, self._epochs), self._dense_cost)
        if goal is not None:
            self._adapt(cost, goal, max(closed_L) >= _CLOSED_FRACTION, self._scores[images])
        return self._relax_penalty(open_L, mean_L)

    def check_open(self) -> None:
        """Refuse layers that were closed for nearly all images since the last check; waits for the device.

        With a target, the controller opens them again, and so does the noise of hard gates.
        """
        reopens = self._hard or (self.recipe.target_macs is not None and self._can_shift)
        if not self.joint or reopens or (means := self._means(self._recent)) is None:
            return
        closed_L = means[-1]
        worst = max(range(len(closed_L)), key=closed_L.__getitem__)
        if closed_L[worst] >= _CLOSED_FRACTION:
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
        if embeddings is not None and self.recipe.target_macs is not None and self._can_shift:
            cost = shift_gates(self._model, embeddings, self.recipe.target_macs, full_weights)
        self._freeze_parameters()
        return cost

    def restore_model(self) -> None:
        """Restore the settings of the network, apart from its weights."""
        self._set_head_noise(0.0)
        for head, before in zip(self._heads.values(), self._before, strict=True):
            head.straight_through, head.temperature = before
        for parameter in self._gate_parameters:
            parameter.requires_grad_(True)

    def epoch_means(self) -> tuple[float, float] | None:
        """Returns mean cost and share of open gates of the observed images of the epoch, and begins a new one."""
        means = self._means(self._epoch)
        if means is None:
            return None
        cost, open_L, _, _ = means
        self._epoch.zero_()
        blocks = [head.blocks for head in self._heads.values()]
        return cost, sum(share * each for share, each in zip(open_L, blocks, strict=True)) / sum(blocks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next step depends on: tensors, and values that JSON can represent."""
        return {
            "recent": self._recent[1:],
            "epoch": self._epoch[1:],
            "joint": self.joint,
            "l1_weight": self.l1_weight,
            "penalty_factors": list(self._penalty_factors),
            "reported": list(self._reported),
            "images": [int(self._recent[0]), int(self._epoch[0])],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        for sums, name, images in zip((self._recent, self._epoch), ("recent", "epoch"), state["images"], strict=True):
            sums[0] = images
            sums[1:] = state[name]
        self.l1_weight = state["l1_weight"]
        self._reported = list(state["reported"])
        self._set_penalty(state["penalty_factors"])
        if not state["joint"]:
            self.joint = False
            self._freeze_parameters()

    # inside

    def _adapt(self, cost: float, goal: float, closed: bool, all_scores: Mapping[str, Tensor]) -> None:
        """Raise λ where the cost is above its goal, lower it where it is below; shift biases where it is far off."""
        error, start = math.log(cost / goal), self.recipe.l1_weight
        lowest, highest = start / _L1_WEIGHT_RANGE, start * _L1_WEIGHT_RANGE
        self.l1_weight = min(max(self.l1_weight * math.exp(_CONTROLLER_GAIN * error), lowest), highest)
        if self._can_shift and (abs(error) > _COST_TOLERANCE or closed):
            with torch.no_grad():
                if self._batch is not None:
                    all_scores = {name: self._batch.gather(scores) for name, scores in all_scores.items()}
                patterns = {name: routing_of(scores > 0, self._heads[name]) for name, scores in all_scores.items()}
                current = mean_cost(self._model, patterns)
                shift_biases(self._model, all_scores, current * math.exp(-_COST_CORRECTION * error), _BISECTIONS)

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
        pressure = [weight * factor for weight, factor in zip(self._weights, relief, strict=True)]
        self._penalty_L.copy_(torch.tensor(pressure))

    def _means(self, sums: Tensor) -> tuple[float, list[float], list[float], list[float]] | None:
        """Means over images: cost; for each layer the open share, the mean gate, how often all gates are closed.

        None without images. Waits for the device.
        """
        images, *values = cast("list[float]", sums.tolist())
        if not images:
            return None
        cost, *others = (value / images for value in values)
        layers = len(self._heads)
        return cost, others[:layers], others[layers : 2 * layers], others[2 * layers :]

    def _freeze_parameters(self) -> None:
        for parameter in self._gate_parameters:
            parameter.requires_grad_(False)
            parameter.grad = None  # without one, optimizers neither move nor decay it

    def _set_head_noise(self, noise: float | Tensor) -> None:
        for head in self._heads.values():
            head.noise = noise


def _mode(model: DeepMoE) -> ChannelMode:
    """The mode of the gates."""
    return next(iter(model.heads().values())).mode


def _check_target(model: DeepMoE, target: float) -> None:
    heads = model.heads()
    if _mode(model) == "topk":
        open_blocks = {name: first_blocks_open(head, head.keep or head.blocks) for name, head in heads.items()}
        raise ValueError(
            f"fit: target_macs={target}, but gates of mode='topk' open a fixed number of blocks for every image, "
            f"which costs {mean_cost(model, open_blocks):.3f}; leave target_macs out and build the network with "
            f"keep={math.sqrt(target):.2f} or so, the square root of the cost, or with mode='relu'"
        )
    if _mode(model) == "hard" and not has_biases(model):
        raise ValueError(
            f"fit: target_macs={target} is met by shifting the biases of hard gates, and these have none; build the "
            "network with bias=1.0"
        )
    least = mean_cost(model, {name: first_blocks_open(head, 1) for name, head in heads.items()})
    if target < least:
        fixed = model.fixed_macs / model.dense_macs
        raise ValueError(
            f"fit: target_macs={target} is less than what stays when one gate of every layer is open, {least:.3f} of "
            f"the dense network, of which {fixed:.3f} are the embedding network, the gate heads and what has no gates; "
            f"use {math.ceil(1000 * least) / 1000:.3f} or more"
        )
