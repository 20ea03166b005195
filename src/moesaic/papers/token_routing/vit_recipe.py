"""The training recipe of all networks of these claims on CIFAR-10, vision transformers and residual networks alike.

It was made for small vision transformers. Residual networks follow it too, so that differences come from the networks
and not from their recipes. `AUGMENT` and `NORMALIZE`, the transforms of the images, belong to it.
"""

from __future__ import annotations

from moesaic.data.image_dataset import Augment
from moesaic.data.load import Normalization
from moesaic.training.recipe import Recipe

__all__ = ["AUGMENT", "FINE_TUNING_LR", "NORMALIZE", "PEAK_LR", "vit_recipe"]

AUGMENT: Augment = "strong"
NORMALIZE: Normalization = "standard"

PEAK_LR = 1e-3
FINE_TUNING_LR = 3e-4
"""Peak learning rate where trained weights are trained further."""


def vit_recipe(epochs: int, lr: float = PEAK_LR) -> Recipe:
    """Returns the recipe: AdamW, a twentieth of the epochs of warmup, a cosine, and regularisation.

    >>> vit_recipe(200).optimizer, vit_recipe(200).schedule, vit_recipe(200).lr_at(10)
    ('adamw', 'cosine', 0.001)
    """
    return Recipe(
        epochs,
        batch_size=256,
        lr=lr,
        weight_decay=0.05,
        label_smoothing=0.1,
        clip_grad=1.0,
        ema_decay=0.999,
    )
