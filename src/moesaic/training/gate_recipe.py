"""How channel gates learn to close: a ``GateRecipe`` is the part of a `Recipe` that DeepMoE networks need.

Wang et al. 2019 train in two stages:

    joint    cross-entropy + λ · Σ_layers w · mean gate + μ · cross-entropy of the embedding's own classifier
    frozen   cross-entropy alone, while the embedding network and the gate heads stay as they are

Both follow one schedule of the learning rate, that of the `Recipe`: the second stage goes on where the first one
ends and takes the rate down to its end, which is what a network needs that was pressed on until then.

λ is for the mean gate of a layer (`gate_l1`), so that it carries over between widths and blocks. Whoever wants a
cost asks for a cost, ``target_macs``. λ is then steered towards it, but λ alone is a poor wheel: BatchNorm takes up any
common factor of a layer's gates, so they sink together, at no cost and no gain, until many close at once. Wherever the
cost leaves the way from all gates open to the target, the biases of all gates are shifted so that it is on it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from moesaic.checks import check_choice, check_numbers

__all__ = ["GateRecipe", "Weigh"]

Weigh = Literal["cost", "equal"]

_ARRIVED = 0.8
"""The share of the joint stage after which the cost is to be the target's; what is left is for settling."""


@dataclass(frozen=True)
class GateRecipe:
    """How channel gates learn to close.

    >>> gates = GateRecipe(strength=0.2, joint=0.5)
    >>> [round(gates.share(epoch, epochs=20), 2) for epoch in (0, 1.5, 3, 9, 10)]       # of λ, while it lasts
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """

    strength: float = 0.1
    """λ at its height; with ``target_macs``, where its steering begins. It counts for a layer in proportion to its
    mean gate, which starts at about 1. Under top-k gates it has nothing to close, and is left out."""
    warmup: float = 0.3
    """The share of the joint stage in which λ grows from 0, and a target is not yet approached: gates that are pressed
    from the start close before anybody has learned what they are for."""
    embedding: float = 1.0
    """μ, how much the embedding network's own cross-entropy counts. At 0 gates come out nearly the same for all
    images."""
    target_macs: float | None = None
    """The mean cost of an image, as a share of the multiply-adds of the network without gates; embedding network
    and gate heads count. λ and the biases of gates are steered towards it, and at the end of the joint stage biases
    are shifted so that it is met on images to train on. Not for top-k gates, whose cost their ``keep`` has settled."""
    joint: float = 0.6
    """The share of the epochs in which gates learn; then they are frozen."""
    weigh: Weigh = "cost"
    """How layers are weighed in the sum, 1 on average: by the multiply-adds that closing their gates saves, or all
    alike."""
    least_open: float = 0.05
    """The share of a layer's gates that are to stay open on average, and in any case one gate: λ fades for a layer
    that comes down to twice of it, and is gone there."""
    noise: float = 0.0
    """The standard deviation of Gaussian noise on scores at the start; it falls to 0 by the end of the joint stage.
    Gates start at about 1."""
    straight_through: bool = False
    """For top-k gates: blocks that were not kept get the gradient that they would have if they had been."""
    distil: float = 0.0
    """How much the distance to a teacher's answers counts, in both stages; the teacher is an argument of `fit`."""
    temperature: float = 4.0
    """By which scores are divided before they are compared with the teacher's."""

    def __post_init__(self) -> None:
        check_choice("GateRecipe", "weigh", self.weigh, get_args(Weigh))
        several = {"embedding": self.embedding, "noise": self.noise, "distil": self.distil}
        check_numbers(
            "GateRecipe", "0 or more", lambda value: 0 <= value < math.inf, {"strength": self.strength, **several}
        )
        check_numbers("GateRecipe", "from 0 to 1", lambda value: 0 <= value <= 1, {"warmup": self.warmup})
        check_numbers("GateRecipe", "above 0 and at most 1", lambda value: 0 < value <= 1, {"joint": self.joint})
        check_numbers("GateRecipe", "from 0 to below 1", lambda value: 0 <= value < 1, {"least_open": self.least_open})
        check_numbers("GateRecipe", "above 0", lambda value: 0 < value < math.inf, {"temperature": self.temperature})
        if self.target_macs is not None:
            limit = "a share of the dense network's multiply-adds, above 0 and at most 1"
            check_numbers("GateRecipe", limit, lambda value: 0 < value <= 1, {"target_macs": self.target_macs})
            if not self.strength:
                raise ValueError(
                    f"GateRecipe: strength=0 is where steering towards target_macs={self.target_macs} would begin, and "
                    "stay; use any λ above 0, or leave strength out"
                )

    def stage(self, epoch: float, epochs: int) -> float:
        """How much of the joint stage is over when so many epochs are done: from 1 on, gates are frozen."""
        return epoch / (self.joint * epochs)

    def share(self, epoch: float, epochs: int) -> float:
        """How much of λ counts when so many epochs are done: it grows in the warmup, and ends with the joint stage."""
        over = self.stage(epoch, epochs)
        if over >= 1:
            return 0.0
        return min(over / self.warmup, 1.0) if self.warmup else 1.0

    def goal(self, over: float, start: float) -> float | None:
        """What an image should cost when so much of the joint stage is over, if there is a target.

        After the warmup it comes down from ``start``, the cost of all gates open, slowly at first, and arrives slowly.

        >>> [round(GateRecipe(target_macs=0.5).goal(over, 1.02), 2) for over in (0, 0.3, 0.4, 0.6, 0.8, 1)]
        [1.02, 1.02, 0.97, 0.68, 0.5, 0.5]
        """
        if self.target_macs is None:
            return None
        way = (over - self.warmup) / (_ARRIVED - self.warmup) if self.warmup < _ARRIVED else float(over >= 1)
        left = 0.5 * (1 + math.cos(math.pi * min(max(way, 0.0), 1.0)))
        return self.target_macs + (start - self.target_macs) * left

    def noise_at(self, over: float) -> float:
        """The noise on scores when so much of the joint stage is over."""
        return self.noise * max(1.0 - over, 0.0)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it.

        >>> GateRecipe.from_json(GateRecipe(target_macs=0.5).to_json()) == GateRecipe(target_macs=0.5)
        True
        """
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GateRecipe:
        """The recipe that ``to_json`` wrote down."""
        return cls(**content)
