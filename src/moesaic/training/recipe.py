"""How a network learns: a ``Recipe`` is all of it but the network, the images and the seed.

It is plain data, so that a run can be written down, compared with another and continued: `fit` follows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from moesaic.checks import check_choice, check_numbers, check_positive
from moesaic.training.gate_recipe import GateRecipe

__all__ = ["OPTIMIZER_DEFAULTS", "Descent", "OptimizerDefaults", "Precision", "RateSchedule", "Recipe"]

Descent = Literal["sgd", "adamw", "normalized_gd"]
RateSchedule = Literal["cosine", "step", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class OptimizerDefaults:
    """How hard an optimizer pulls."""

    learning_rate: float
    weight_decay: float


OPTIMIZER_DEFAULTS: Mapping[Descent, OptimizerDefaults] = MappingProxyType(
    {
        "adamw": OptimizerDefaults(1e-3, 0.05),
        "sgd": OptimizerDefaults(0.03, 5e-4),
        "normalized_gd": OptimizerDefaults(0.03, 5e-4),
    }
)
"""Where to begin with an optimizer."""

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """How a network learns.

    The defaults did best for wide residual networks, dense and routed, on a thousand faces and four thousand
    vehicles (``benchmarks/wide_variants.py``). `OPTIMIZER_DEFAULTS` has rates for other optimizers.

    >>> recipe = Recipe(epochs=30, learning_rate=0.1, warmup=2)
    >>> [round(recipe.rate(epoch), 3) for epoch in (0.5, 2, 16, 29.9)]
    [0.025, 0.1, 0.05, 0.0]
    """

    epochs: int
    batch: int = 128
    """Images in a step, at most: the images of an epoch are shared out evenly over as few batches as hold them, so
    that all are seen and none comes in a batch much smaller than the others, which BatchNorm would not bear."""
    optimizer: Descent = "adamw"
    """``"normalized_gd"`` moves each expert by steps of one length (`NormalizedGD`) and all else by SGD; a network
    without experts counts as one expert."""
    learning_rate: float = OPTIMIZER_DEFAULTS["adamw"].learning_rate
    momentum: float = 0.9
    """Of SGD and NormalizedGD; AdamW has its own."""
    weight_decay: float = OPTIMIZER_DEFAULTS["adamw"].weight_decay
    schedule: RateSchedule = "cosine"
    """Of the learning rate, from step to step: half a cosine down to 0; a tenth at each of ``milestones``; or as it
    is."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """For ``schedule="step"``: shares of the epochs after which the learning rate falls to a tenth."""
    warmup: float | None = None
    """Epochs in which the learning rate grows from 0 before the schedule begins; None: a twentieth of all."""
    router_rate: float | None = None
    """The learning rate of routers and of channels' gates; it follows the same schedule. None: under AdamW a tenth of
    the others' for routers (AdamW's steps do not shrink with the gradient, and routers that are as fast as experts
    settle before these can tell what is worth choosing), in all else the others'."""
    precision: Precision = "auto"
    """In which products are computed, while weights stay float32; auto: bfloat16 on a GPU that has it, else float32."""
    ema: float | None = None
    """How much of a running mean of the weights, and of the statistics of norms, stays at each step: 0.999, say. The
    mean is what is tested and kept. Over the first steps less of it stays, so that it does not hang on to the
    start."""
    stop_at_zero_error: bool = False
    """Stop after an epoch in which every image was classified right at the moment it was trained on: as it was varied,
    in training mode and before the step it took part in. It costs no further pass over the images."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after the other, before its step: less memory for the same step, but for
    BatchNorm, which sees one part at a time."""
    clip: float | None = None
    """The largest norm that the gradient of all weights together may have."""
    balance: float = 0.0
    """How much the balance loss of routed layers counts (`moesaic.routing.load_balance_loss`), added over the layers
    where units choose; where experts choose, loads are equal anyway."""
    compile: bool = False
    """Whether to compile the network with ``torch.compile``. The collapse alarm is off then: who watches the routing
    breaks the graph."""
    label_smoothing: float = 0.0
    gates: GateRecipe | None = None
    """How channel gates learn, in networks that have them; None: as a `GateRecipe` has it by default."""

    def __post_init__(self) -> None:
        check_positive("Recipe", epochs=self.epochs, batch=self.batch, accumulate=self.accumulate)
        check_choice("Recipe", "optimizer", self.optimizer, get_args(Descent))
        check_choice("Recipe", "schedule", self.schedule, get_args(RateSchedule))
        check_choice("Recipe", "precision", self.precision, get_args(Precision))
        rates = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay, "balance": self.balance}
        rates |= {"warmup": self._warmup} | ({} if self.router_rate is None else {"router_rate": self.router_rate})
        check_numbers("Recipe", "0 or more", lambda value: 0 <= value < math.inf, rates)
        shares = {"momentum": self.momentum, "label_smoothing": self.label_smoothing}
        check_numbers("Recipe", "from 0 to below 1", lambda value: 0 <= value < 1, shares)
        check_numbers(
            "Recipe",
            "a share of the epochs, from 0 to 1",
            lambda value: 0 <= value <= 1,
            _numbered("milestones", self.milestones),
        )
        if self.ema is not None:
            check_numbers("Recipe", "above 0 and below 1", lambda value: 0 < value < 1, {"ema": self.ema})
        if self.clip is not None:
            check_numbers("Recipe", "above 0", lambda value: 0 < value < math.inf, {"clip": self.clip})
        if self._warmup > self.epochs:
            raise ValueError(f"Recipe: warmup={self.warmup} is longer than epochs={self.epochs}; use fewer or none")
        if self.accumulate > self.batch:
            raise ValueError(
                f"Recipe: accumulate={self.accumulate} parts of batch={self.batch}; use at most {self.batch}, which is "
                "one image a part"
            )

    def rate(self, epoch: float) -> float:
        """The learning rate when so many epochs, and parts of one, are done."""
        return self.learning_rate * self.share(epoch)

    def share(self, epoch: float) -> float:
        """How much of the learning rate is left when so many epochs are done; grows from 0 in the warmup."""
        if epoch < self._warmup:
            return epoch / self._warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "step":
            return 0.1 ** sum(epoch >= share * self.epochs for share in self.milestones)
        length = self.epochs - self._warmup
        return 0.5 * (1 + math.cos(math.pi * (epoch - self._warmup) / length)) if length else 1.0

    @property
    def _warmup(self) -> float:
        return self.epochs / 20 if self.warmup is None else self.warmup

    def batch_sizes(self, images: int) -> list[int]:
        """How many images each batch of an epoch has.

        >>> Recipe(epochs=1, batch=128).batch_sizes(300)
        [100, 100, 100]
        """
        return _shares(images, -(-images // self.batch))

    def part_sizes(self, images: int) -> list[int]:
        """How many images each part of a batch has.

        >>> Recipe(epochs=1, accumulate=3).part_sizes(100)
        [34, 33, 33]
        """
        return _shares(images, min(self.accumulate, images))

    def half(self, device: torch.device) -> torch.dtype | None:
        """The dtype of products on a device, or None where they are computed in the weights' own.

        >>> Recipe(epochs=1, precision="bfloat16").half(torch.device("cpu"))
        torch.bfloat16
        """
        if self.precision != "auto":
            return _HALF.get(self.precision)
        has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has else None

    def to_json(self) -> dict[str, Any]:
        """As JSON has it.

        >>> Recipe.from_json(Recipe(epochs=3).to_json()) == Recipe(epochs=3)
        True
        """
        content = {**asdict(self), "milestones": list(self.milestones)}
        if self.gates is None:  # most networks have none, and what was written of them before there were any stays
            del content["gates"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that ``to_json`` wrote down."""
        made: dict[str, Any] = {**content, "milestones": tuple(content["milestones"])}
        if "gates" in made:
            made["gates"] = GateRecipe.from_json(made["gates"])
        return cls(**made)


def _shares(images: int, parts: int) -> list[int]:
    """``images`` shared out over ``parts``, as evenly as whole numbers are."""
    least, over = divmod(images, parts)
    return [least + (part < over) for part in range(parts)]


def _numbered(name: str, values: tuple[float, ...]) -> dict[str, float]:
    return {f"{name}[{i}]": value for i, value in enumerate(values)}
