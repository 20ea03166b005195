"""The hyperparameters of a training run: `Recipe`, everything but the network, the images and the seed.

A recipe is plain data, so that a run can be written down, compared with another and continued: `fit` follows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.training.gate_recipe import GateRecipe

__all__ = ["OPTIMIZER_DEFAULTS", "LRSchedule", "OptimizerDefaults", "OptimizerName", "Precision", "Recipe"]

OptimizerName = Literal["sgd", "adamw", "normalized_gd"]
LRSchedule = Literal["cosine", "step", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class OptimizerDefaults:
    """Default hyperparameters of an optimizer."""

    lr: float
    weight_decay: float


OPTIMIZER_DEFAULTS: Mapping[OptimizerName, OptimizerDefaults] = MappingProxyType(
    {
        "adamw": OptimizerDefaults(1e-3, 0.05),
        "sgd": OptimizerDefaults(0.03, 5e-4),
        "normalized_gd": OptimizerDefaults(0.03, 5e-4),
    }
)

_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_CELL_KEYS = {
    "batch_size": "batch",
    "lr": "learning_rate",
    "warmup_epochs": "warmup",
    "router_lr": "router_rate",
    "ema_decay": "ema",
    "grad_accum": "accumulate",
    "clip_grad": "clip",
    "balance_weight": "balance",
}
"""Fields that have another name in specifications of cells, and in the files of earlier versions."""
_LATER_FIELDS = {"trainable": "all", "layer_decay": None}
_TRAINABLE = re.compile(r"all|head|last-[1-9]\d*")
_OLD_KEYS = {old: new for new, old in _CELL_KEYS.items()}


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run.

    The defaults did best for wide residual networks, dense and routed, on a thousand faces and four thousand
    vehicles (``benchmarks/wide_variants.py``). `OPTIMIZER_DEFAULTS` has learning rates for other optimizers.

    >>> recipe = Recipe(epochs=30, lr=0.1, warmup_epochs=2)
    >>> [round(recipe.lr_at(epoch), 3) for epoch in (0.5, 2, 16, 29.9)]
    [0.025, 0.1, 0.05, 0.0]
    """

    epochs: int
    """Passes over the training images."""
    batch_size: int = 128
    """Samples per step, at most: the images of an epoch are divided evenly among as few batches as possible, for a last
    batch of a few images would have poor BatchNorm statistics."""
    optimizer: OptimizerName = "adamw"
    """``"normalized_gd"`` takes steps of equal length for each expert (`NormalizedGD`), and SGD steps for all other
    weights; a network without experts counts as one expert."""
    lr: float = OPTIMIZER_DEFAULTS["adamw"].lr
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD and NormalizedGD."""
    weight_decay: float = OPTIMIZER_DEFAULTS["adamw"].weight_decay
    """Weight decay. In networks with LayerNorm, such as transformers, biases, norms, class tokens and position
    embeddings have none (`moesaic.models.undecayed_parameters`)."""
    schedule: LRSchedule = "cosine"
    """Learning-rate schedule, updated every step: half a cosine down to 0; a tenth at each of ``milestones``; or
    constant."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """For ``schedule="step"``: fractions of the epochs after which the learning rate drops to a tenth."""
    warmup_epochs: float | None = None
    """Epochs of linear warmup from 0 before the schedule begins; None: a twentieth of all epochs."""
    router_lr: float | None = None
    """Peak learning rate of routers and channel gates, under the same schedule. None: under AdamW a tenth of ``lr``
    for routers (AdamW's steps do not shrink with the gradient, and routers as fast as experts settle before the
    experts have learned anything worth choosing), otherwise ``lr``."""
    precision: Precision = "auto"
    """Precision of matmuls and convolutions, while weights stay float32; auto: bfloat16 on a GPU that supports it,
    else float32."""
    ema_decay: float | None = None
    """Decay of an exponential moving average (EMA) of weights and norm statistics: 0.999, say. The average is what
    is tested and saved. Over the first steps the decay is lower, so that the initial weights do not linger."""
    stop_at_zero_error: bool = False
    """Stop after an epoch in which every training image was classified correctly in its step: as augmented, in
    training mode and before the update. This takes no extra pass over the images."""
    grad_accum: int = 1
    """Gradient accumulation steps: the micro-batches that a batch is computed in. The step is the same except for
    BatchNorm, which sees one micro-batch at a time."""
    clip_grad: float | None = None
    """Maximum norm of the gradient of all weights."""
    balance_weight: float = 0.0
    """Weight of the load-balance loss (`moesaic.routing.load_balance_loss`), summed over the layers in which units
    choose; where experts choose, loads are equal anyway."""
    compile: bool = False
    """Whether to compile the network with ``torch.compile``. The collapse alarm is off then: its routing hooks break
    the graph."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    gates: GateRecipe | None = None
    """Hyperparameters of channel gates, in networks that have them; None: the defaults of `GateRecipe`."""
    drop_last: bool = False
    """Whether all batches have ``batch_size`` samples, and images that do not fill one are left out of the epoch."""
    trainable: str = "all"
    """Layers that are trained: ``"all"``; ``"head"``, the classifier alone; or ``"last-N"``, the classifier and the N
    layers before it (`moesaic.models.layer_groups`). All others are frozen: their weights do not change, and their
    BatchNorm and dropout are in eval mode."""
    layer_decay: float | None = None
    """Layer-wise learning rates: each layer has so many times the rate of the layer after it, and the classifier
    ``lr``; 0.75, say. None: one rate for all."""

    def __post_init__(self) -> None:
        check_positive("Recipe", epochs=self.epochs, batch_size=self.batch_size, grad_accum=self.grad_accum)
        check_choice("Recipe", "optimizer", self.optimizer, get_args(OptimizerName))
        check_choice("Recipe", "schedule", self.schedule, get_args(LRSchedule))
        check_choice("Recipe", "precision", self.precision, get_args(Precision))
        rates = {"lr": self.lr, "weight_decay": self.weight_decay, "balance_weight": self.balance_weight}
        rates |= {"warmup_epochs": self._warmup} | ({} if self.router_lr is None else {"router_lr": self.router_lr})
        check_numbers("Recipe", "0 or more", lambda value: 0 <= value < math.inf, rates)
        fractions = {"momentum": self.momentum, "label_smoothing": self.label_smoothing}
        check_numbers("Recipe", "from 0 to below 1", lambda value: 0 <= value < 1, fractions)
        milestones = {f"milestones[{i}]": value for i, value in enumerate(self.milestones)}
        check_numbers("Recipe", "a fraction of the epochs, from 0 to 1", lambda value: 0 <= value <= 1, milestones)
        if self.ema_decay is not None:
            check_numbers("Recipe", "above 0 and below 1", lambda value: 0 < value < 1, {"ema_decay": self.ema_decay})
        if self.clip_grad is not None:
            check_numbers("Recipe", "above 0", lambda value: 0 < value < math.inf, {"clip_grad": self.clip_grad})
        if not _TRAINABLE.fullmatch(self.trainable):
            raise ValueError(
                f"Recipe: trainable={self.trainable!r} is unknown; use 'all', 'head' or 'last-N', as in 'last-2'"
            )
        if self.layer_decay is not None:
            limits = {"layer_decay": self.layer_decay}
            check_numbers("Recipe", "above 0 and at most 1", lambda value: 0 < value <= 1, limits)
            if self.optimizer == "normalized_gd":
                raise ValueError(
                    "Recipe: layer_decay is for optimizers whose steps have one rate for all layers, and the steps of "
                    "normalized_gd have one length for each expert; use adamw or sgd, or no layer_decay"
                )
        if self._warmup > self.epochs:
            raise ValueError(
                f"Recipe: warmup_epochs={self.warmup_epochs} is longer than epochs={self.epochs}; use fewer or none"
            )
        if self.grad_accum > self.batch_size:
            raise ValueError(
                f"Recipe: grad_accum={self.grad_accum} micro-batches of batch_size={self.batch_size}; use at most "
                f"{self.batch_size}, which is one sample each"
            )

    def lr_at(self, epoch: float) -> float:
        """Returns the learning rate after so many epochs, with fractions."""
        return self.lr * self.lr_factor(epoch)

    def lr_factor(self, epoch: float) -> float:
        """Returns the learning rate after so many epochs as a factor of the peak."""
        if epoch < self._warmup:
            return epoch / self._warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "step":
            return 0.1 ** sum(epoch >= milestone * self.epochs for milestone in self.milestones)
        length = self.epochs - self._warmup
        return 0.5 * (1 + math.cos(math.pi * (epoch - self._warmup) / length)) if length else 1.0

    @property
    def _warmup(self) -> float:
        return self.epochs / 20 if self.warmup_epochs is None else self.warmup_epochs

    def batch_sizes(self, images: int) -> list[int]:
        """Returns the number of samples of each batch of an epoch.

        >>> Recipe(epochs=1, batch_size=128).batch_sizes(300)
        [100, 100, 100]
        >>> Recipe(epochs=1, batch_size=128, drop_last=True).batch_sizes(300)
        [128, 128]
        """
        if not self.drop_last:
            return _even_parts(images, -(-images // self.batch_size))
        if images < self.batch_size:
            raise ValueError(
                f"fit: batch_size={self.batch_size}, but there are {images} images to train on; use at most "
                f"batch_size={images}, or drop_last=False"
            )
        return [self.batch_size] * (images // self.batch_size)

    def micro_batch_sizes(self, samples: int) -> list[int]:
        """Returns the number of samples of each micro-batch of a batch.

        >>> Recipe(epochs=1, grad_accum=3).micro_batch_sizes(100)
        [34, 33, 33]
        """
        return _even_parts(samples, min(self.grad_accum, samples))

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        """Returns the dtype of matmuls and convolutions on a device, or None for that of the weights.

        >>> Recipe(epochs=1, precision="bfloat16").autocast_dtype(torch.device("cpu"))
        torch.bfloat16
        """
        if self.precision != "auto":
            return _AUTOCAST_DTYPES.get(self.precision)
        supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if supported else None

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as JSON represents it.

        >>> Recipe.from_json(Recipe(epochs=3).to_json()) == Recipe(epochs=3)
        True
        """
        content = {**asdict(self), "milestones": list(self.milestones)}
        if self.gates is None:
            del content["gates"]
        for name, default in _LATER_FIELDS.items():  # absent at their defaults, as in the files of earlier versions
            if content[name] == default:
                del content[name]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """Reads what ``to_json`` or ``cell_spec`` returned, of this version or an earlier one."""
        fields = rename_old_keys(content)
        fields["milestones"] = tuple(fields["milestones"])
        if "gates" in fields:
            fields["gates"] = GateRecipe.from_json(fields["gates"])
        return cls(**fields)

    def cell_spec(self) -> dict[str, Any]:
        """Returns the recipe as the specification of a cell has it.

        Finished cells are found by the digest of their specification, so its keys are those of the first version.
        """
        content = {_CELL_KEYS.get(name, name): value for name, value in self.to_json().items()}
        if self.gates is not None:
            content["gates"] = self.gates.cell_spec()
        if not self.drop_last:
            del content["drop_last"]
        return content


def rename_old_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a recipe with keys of earlier versions replaced by the present ones."""
    return {_OLD_KEYS.get(name, name): value for name, value in content.items()}


def _even_parts(samples: int, parts: int) -> list[int]:
    """Divides ``samples`` into ``parts`` that differ by one at most."""
    base, extra = divmod(samples, parts)
    return [base + (part < extra) for part in range(parts)]
