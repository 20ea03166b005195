"""Hyperparameters of channel gates: a ``GateRecipe`` is the part of a `Recipe` for DeepMoE networks.

Wang et al. 2019 train in two stages:

    joint    cross-entropy + λ · Σ_layers w · mean gate + μ · cross-entropy of the embedding's own classifier
    frozen   cross-entropy alone, while the embedding network and the gate heads are frozen

Both stages follow one learning-rate schedule, that of the `Recipe`: the second one takes the rate down to its end,
which the network needs after the penalty.

λ multiplies the mean gate of a layer (`gate_l1`), so that a value carries over between widths and block sizes. To
reach a given cost, set ``target_macs``: λ is then adapted to it. λ alone does not control the cost well, because
BatchNorm absorbs any common factor of a layer's gates, so that they shrink together until many close at once. Where
the cost leaves the path from all gates open to the target, the biases of all gates are shifted to bring it back.

Hard gates (``mode="hard"``) have no penalty on their values, which are 0 or 1. In the joint stage they learn with
logistic noise of scale 1, so that each is open with the probability sigmoid(score), and the loss is

    cross-entropy + κ · (E[cost] − goal)² + γ · batch shaping + μ · cross-entropy of the embedding's own classifier

where the goal falls from the cost of all gates open to ``target_macs``, and batch shaping draws the probabilities of
a gate over the images of a batch towards Beta(α, β) (Bejnordi et al. 2020; `moesaic.training.batch_shaping_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from moesaic.argument_checks import check_choice, check_numbers

__all__ = ["GateRecipe", "LayerWeights"]

LayerWeights = Literal["cost", "equal", "gates"]

_TARGET_REACHED = 0.8
"""The fraction of the joint stage after which the cost is to be at the target; in the rest it settles."""
_CELL_KEYS = {
    "l1_weight": "strength",
    "warmup_fraction": "warmup",
    "embedding_weight": "embedding",
    "joint_fraction": "joint",
    "layer_weights": "weigh",
    "min_open": "least_open",
    "distill_weight": "distil",
    "distill_temperature": "temperature",
}
"""Fields that have another name in specifications of cells, and in the files of earlier versions."""
_LATER_FIELDS = ("cost_weight", "gate_temperature", "shaping_weight", "shaping_alpha", "shaping_beta")
"""Fields that are absent at their defaults, as in the files and cells of earlier versions."""
_OLD_KEYS = {old: new for new, old in _CELL_KEYS.items()}


@dataclass(frozen=True)
class GateRecipe:
    """Hyperparameters of channel gates.

    >>> gates = GateRecipe(l1_weight=0.2, joint_fraction=0.5)
    >>> [round(gates.l1_factor(epoch, epochs=20), 2) for epoch in (0, 1.5, 3, 9, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """

    l1_weight: float = 0.1
    """Weight λ of the gates' L1 penalty, at its peak; with ``target_macs``, its initial value. Layers count in
    proportion to their mean gate, which starts at about 1. Top-k gates have no penalty."""
    warmup_fraction: float = 0.3
    """Fraction of the joint stage in which λ grows from 0 and a target is not approached yet: gates under a penalty
    from the start close before the network has learned to use them."""
    embedding_weight: float = 1.0
    """Weight μ of the embedding network's own cross-entropy. At 0, gates come out nearly the same for all images."""
    target_macs: float | None = None
    """Target of the mean cost of an image, as a fraction of the multiply-adds of the network without gates; the
    embedding network and the gate heads count. λ and the biases of gates are adapted to it, and at the end of the
    joint stage biases are shifted so that it is met on training images. Gates without biases have λ alone, which may
    miss it. Hard gates follow the quadratic cost loss in place of λ. Not for top-k gates, whose ``keep`` decides the
    cost."""
    joint_fraction: float = 0.6
    """Fraction of the epochs in which gates learn; then they are frozen."""
    layer_weights: LayerWeights = "cost"
    """Weights of the layers in the penalty, 1 on average: by the multiply-adds that closing their gates saves, equal,
    or by their number of gates, which is the printed form: the same weight for every gate of the network."""
    min_open: float = 0.05
    """Fraction of a layer's gates that stay open on average, and at least one gate: the penalty of a layer fades from
    twice this fraction on, and is 0 there."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on scores at the start; it falls to 0 by the end of the joint stage. Gates
    start at about 1."""
    straight_through: bool = False
    """For top-k gates: whether closed blocks get the gradient that they would have if they were open."""
    distill_weight: float = 0.0
    """Weight of the distillation loss, in both stages; the teacher is an argument of `fit`."""
    distill_temperature: float = 4.0
    """Temperature of the distillation loss."""
    cost_weight: float = 30.0
    """For hard gates with a target: weight κ of the quadratic cost loss; costs are fractions, as ``target_macs``."""
    gate_temperature: float = 2 / 3
    """For hard gates: temperature of the sigmoid whose gradient is passed straight through."""
    shaping_weight: float = 0.0
    """For hard gates: weight γ of batch shaping at the start; it falls to 0 by the end of the joint stage. The loss is
    the mean over the gates of a layer, summed over layers."""
    shaping_alpha: float = 0.6
    """α of the Beta distribution."""
    shaping_beta: float = 0.4
    """β of the Beta distribution."""

    def __post_init__(self) -> None:
        check_choice("GateRecipe", "layer_weights", self.layer_weights, get_args(LayerWeights))
        weights = {"embedding_weight": self.embedding_weight, "noise": self.noise}
        weights |= {"distill_weight": self.distill_weight, "l1_weight": self.l1_weight}
        weights |= {"cost_weight": self.cost_weight, "shaping_weight": self.shaping_weight}
        check_numbers("GateRecipe", "0 or more", lambda value: 0 <= value < math.inf, weights)
        warmup = {"warmup_fraction": self.warmup_fraction}
        check_numbers("GateRecipe", "from 0 to 1", lambda value: 0 <= value <= 1, warmup)
        joint = {"joint_fraction": self.joint_fraction}
        check_numbers("GateRecipe", "above 0 and at most 1", lambda value: 0 < value <= 1, joint)
        check_numbers("GateRecipe", "from 0 to below 1", lambda value: 0 <= value < 1, {"min_open": self.min_open})
        positive = {"distill_temperature": self.distill_temperature, "gate_temperature": self.gate_temperature}
        check_numbers("GateRecipe", "above 0", lambda value: 0 < value < math.inf, positive)
        shape = {"shaping_alpha": self.shaping_alpha, "shaping_beta": self.shaping_beta}
        check_numbers("GateRecipe", "from 0.05 to 10", lambda value: 0.05 <= value <= 10, shape)
        if self.target_macs is not None:
            limit = "a fraction of the dense network's multiply-adds, above 0 and at most 1"
            check_numbers("GateRecipe", limit, lambda value: 0 < value <= 1, {"target_macs": self.target_macs})
            if not self.l1_weight:
                raise ValueError(
                    f"GateRecipe: l1_weight=0 cannot be adapted to target_macs={self.target_macs}, as it is "
                    "multiplied; use any λ above 0, or leave l1_weight out"
                )

    def joint_progress(self, epoch: float, epochs: int) -> float:
        """Returns the fraction of the joint stage that is over after so many epochs; from 1 on, gates are frozen."""
        return epoch / (self.joint_fraction * epochs)

    def l1_factor(self, epoch: float, epochs: int) -> float:
        """Returns the factor of λ after so many epochs: it grows in the warmup, and is 0 after the joint stage."""
        progress = self.joint_progress(epoch, epochs)
        if progress >= 1:
            return 0.0
        return min(progress / self.warmup_fraction, 1.0) if self.warmup_fraction else 1.0

    def cost_at(self, progress: float, start: float) -> float | None:
        """Returns the cost that an image should have at a point of the joint stage; None without a target.

        After the warmup it falls from ``start``, the cost of all gates open, along half a cosine to the target.

        >>> [round(GateRecipe(target_macs=0.5).cost_at(progress, 1.02), 2) for progress in (0, 0.3, 0.4, 0.6, 0.8, 1)]
        [1.02, 1.02, 0.97, 0.68, 0.5, 0.5]
        """
        if self.target_macs is None:
            return None
        warmup = self.warmup_fraction
        done = (progress - warmup) / (_TARGET_REACHED - warmup) if warmup < _TARGET_REACHED else float(progress >= 1)
        left = 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return self.target_macs + (start - self.target_macs) * left

    def noise_at(self, progress: float) -> float:
        """Returns the standard deviation of the noise on scores at a point of the joint stage."""
        return self.noise * max(1.0 - progress, 0.0)

    def shaping_at(self, progress: float) -> float:
        """Returns the weight of batch shaping at a point of the joint stage."""
        return self.shaping_weight * max(1.0 - progress, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as JSON represents it.

        >>> GateRecipe.from_json(GateRecipe(target_macs=0.5).to_json()) == GateRecipe(target_macs=0.5)
        True
        """
        content = asdict(self)
        for name in _LATER_FIELDS:
            if content[name] == getattr(type(self), name):
                del content[name]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GateRecipe:
        """Reads what ``to_json`` or ``cell_spec`` returned, of this version or an earlier one."""
        return cls(**{_OLD_KEYS.get(name, name): value for name, value in content.items()})

    def cell_spec(self) -> dict[str, Any]:
        """Returns the recipe under the keys that specifications of cells have had from the first version on."""
        return {_CELL_KEYS.get(name, name): value for name, value in self.to_json().items()}
