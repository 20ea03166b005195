"""Distillation (Hinton et al. 2015): a network learns from the logits of a trained teacher.

The loss is T² · KL(softmax(teacher / T) ‖ softmax(student / T)), mean over images.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_numbers
from moesaic.training.callbacks import Callback

if TYPE_CHECKING:
    from moesaic.training.trainer import Trainer

__all__ = ["Distillation", "distillation_loss", "float_logits", "teacher_logits"]


class Distillation(Callback):
    """Adds the distillation loss to the training of any network.

    Networks with channel gates take a teacher by ``fit(…, teacher=…)`` and `GateRecipe`.

    Args:
        teacher: a trained network for the same images; it moves to the device and to eval mode.
        weight: of the loss.
        temperature: T.

    >>> from moesaic.models import VGG16
    >>> callback = Distillation(VGG16(num_classes=10, width=0.1))      # fit(student, …, callbacks=[callback])
    >>> callback.weight, callback.temperature
    (1.0, 4.0)
    """

    def __init__(self, teacher: nn.Module, weight: float = 1.0, temperature: float = 4.0) -> None:
        given = {"weight": weight, "temperature": temperature}
        check_numbers("Distillation", "above 0", lambda value: 0 < value < math.inf, given)
        self.weight = weight
        self.temperature = temperature
        self._teacher = teacher

    def on_fit_start(self, trainer: Trainer) -> None:
        """Moves the teacher to the device."""
        self._teacher.to(trainer.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
        self._teacher.eval()

    def extra_loss(self, trainer: Trainer, output: Any, x: Tensor, labels: Tensor, epoch: float) -> Tensor | float:
        """The loss on a micro-batch."""
        if not len(x):
            return 0.0
        with trainer.train_step.autocast():
            of_teacher = teacher_logits(self._teacher, x)
        return self.weight * distillation_loss(getattr(output, "logits", output), of_teacher, self.temperature)


def teacher_logits(teacher: nn.Module, x: Tensor) -> Tensor:
    """The teacher's logits (B, classes), without gradients and in float32 at least."""
    with torch.no_grad():
        return float_logits(cast("Tensor", teacher(x)))


def distillation_loss(logits: Tensor, of_teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL of the teacher's softmax and the student's, mean over images (B, classes).

    >>> distillation_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 3.0]]), 4.0).round(decimals=6)
    tensor(0.)
    """
    student = F.log_softmax(float_logits(logits) / temperature, 1)
    target = F.log_softmax(of_teacher / temperature, 1)
    return temperature**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)


def float_logits(values: Tensor) -> Tensor:
    """Returns logits as float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
