"""Augmentation of training images, by name.

``strong`` is for networks that overfit otherwise, such as transformers from scratch: flips and crops, then one random
operation of a random strength, as in TrivialAugment (Müller and Hutter 2021), then a random square without content
(DeVries and Taylor 2017). It is computed for whole batches, on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.argument_checks import check_choice
from moesaic.data.image_dataset import Augment, Normalize, RandomFlipCrop, normalize_

__all__ = ["StrongAugment", "train_transform"]

_CROP_FRACTION = 8
"""The padding of random crops is the image size over this."""
_ERASE_FRACTION = 4
"""The side of erased squares is the image size over this."""
_MAX_ANGLE = math.pi / 6
_MAX_SHEAR = 0.3
_MAX_FACTOR_CHANGE = 0.9
"""Brightness, contrast and colours change by a factor of up to 1 ± this."""
_OPERATIONS = ("rotate", "shear_x", "shear_y", "brightness", "contrast", "colour", "solarize")
_NO_SOLARIZE_THRESHOLD = 2.0
"""A threshold above all pixels."""


def train_transform(augment: Augment, normalize: Normalize, size: int) -> RandomFlipCrop:
    """Returns the transform of an `Augment` for images of ``size`` pixels; crops are padded by an eighth of the size.

    >>> train_transform("flip-crop", Normalize((0.5,), (0.2,)), 32)
    RandomFlipCrop(normalize=Normalize(mean=(0.5,), std=(0.2,)), flip=True, padding=4)
    """
    check_choice("load_images", "augment", augment, get_args(Augment))
    kind = StrongAugment if augment == "strong" else RandomFlipCrop
    return kind(normalize, augment != "none", size // _CROP_FRACTION if augment in ("flip-crop", "strong") else 0)


@dataclass(frozen=True)
class StrongAugment(RandomFlipCrop):
    """Flip and crop, one of seven operations at a random strength, normalization, and a square of zeros.

    The operations: rotate, shear along either axis, change brightness, contrast or colours, invert bright pixels.

    >>> pixels = torch.full((4, 3, 32, 32), 100, dtype=torch.uint8)
    >>> transform = StrongAugment(Normalize((0.5,) * 3, (0.2,) * 3), flip=True, padding=4)
    >>> transform(pixels, torch.rand(4, 3)).shape
    torch.Size([4, 3, 32, 32])
    """

    def __call__(self, pixels: Tensor, rand: Tensor) -> Tensor:
        if not len(pixels):
            return super().__call__(pixels, rand)
        # the digits of ``rand`` behind those that chose flip and crop are random numbers of their own
        offsets = 2 * self.padding + 1
        chosen, row, column = (rand * rand.new_tensor([2, offsets, offsets])).frac().unbind(1)
        operation = (chosen * len(_OPERATIONS)).long().clamp_(max=len(_OPERATIONS) - 1)
        strength = 2 * (chosen * len(_OPERATIONS)).frac() - 1
        amounts = {name: torch.where(operation == i, strength, 0.0) for i, name in enumerate(_OPERATIONS)}
        images = self.flipped_and_cropped(pixels, rand).float().div_(255.0)
        images = _recoloured(_warped(images, amounts), amounts)
        return _erased(normalize_(images, self.normalize), row, column)


def _warped(images: Tensor, amounts: dict[str, Tensor]) -> Tensor:
    """Rotates by up to 30 degrees, or shears; black where nothing was."""
    angle = _MAX_ANGLE * amounts["rotate"]
    matrix = torch.zeros(len(images), 2, 3, device=images.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
    matrix[:, 0, 1] = -angle.sin() + _MAX_SHEAR * amounts["shear_x"]
    matrix[:, 1, 0] = angle.sin() + _MAX_SHEAR * amounts["shear_y"]
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _recoloured(images: Tensor, amounts: dict[str, Tensor]) -> Tensor:
    """Changes brightness, contrast, colours, or inverts pixels above a threshold."""
    brightness, contrast, colour = (
        (1 + _MAX_FACTOR_CHANGE * amounts[name])[:, None, None, None] for name in ("brightness", "contrast", "colour")
    )
    images = images * brightness
    images = torch.lerp(images.mean((1, 2, 3), keepdim=True), images, contrast)
    images = torch.lerp(images.mean(1, keepdim=True), images, colour).clamp_(0, 1)
    solarize = amounts["solarize"].abs()
    threshold = torch.where(solarize > 0, 1 - solarize, _NO_SOLARIZE_THRESHOLD)[:, None, None, None]
    return torch.where(images >= threshold, 1 - images, images)


def _erased(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Sets a square around a random pixel to 0, the mean of normalized images; its part outside is lost."""
    H, W = images.shape[2:]
    half = max(H, W) / _ERASE_FRACTION / 2
    rows, columns = (torch.arange(side, device=images.device) + 0.5 for side in (H, W))
    inside_rows = (rows - H * row[:, None]).abs() < half
    inside_columns = (columns - W * column[:, None]).abs() < half
    return images.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0.0)
