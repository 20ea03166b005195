"""Classification of images, ready to train on: bytes on the device, and how a batch is made of them.

Images stay bytes until a batch needs them. What is random about a batch depends on three numbers
from 0 to 1 for each image, its *luck*, so that it is a plain function: the same luck gives the same
batch on any device, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.data.cifar import CIFAR10_CLASSES, load_cifar10
from moesaic.data.rotated import blur, crop_and_resize, rotate
from moesaic.data.trials import Split

__all__ = [
    "LUCK",
    "ImageTask",
    "LabelledImages",
    "cifar10_rotate_task",
    "cifar10_task",
    "flip_and_crop",
    "normalise",
]

LUCK = 3
"""Random numbers an image gets in an epoch."""

Vary = Callable[[Tensor, Tensor], Tensor]
"""Bytes (B, C, H, W) and luck (B, 3) in, float32 images out."""

_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2023, 0.1994, 0.2010)
_PADDING = 4
_SIGMA = (1.1, 2.2)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images, what they are to be told apart by, and groups that nobody tells the network."""

    pixels: Tensor
    """(B, C, H, W) uint8."""
    labels: Tensor
    """(B,) int64."""
    clusters: Tensor
    """(B,) int64: in CIFAR-10-Rotate, the class of CIFAR-10."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> LabelledImages:
        return LabelledImages(self.pixels.to(device), self.labels.to(device), self.clusters.to(device))


@dataclass(frozen=True, eq=False)
class ImageTask:
    """What to learn, and from what."""

    train: LabelledImages
    test: LabelledImages
    labels: int
    """How many labels there are."""
    cluster_names: tuple[str, ...]
    vary: Vary
    """Makes a batch to train on."""
    view: Vary
    """Makes a batch to test on."""

    def to(self, device: torch.device | str) -> ImageTask:
        """The same task with its images on a device."""
        train, test = self.train.to(device), self.test.to(device)
        return ImageTask(train, test, self.labels, self.cluster_names, self.vary, self.view)


def cifar10_task(data_dir: str | Path, images_per_file: int = 10_000) -> ImageTask:
    """CIFAR-10 with ten labels; trained with random mirroring and crops, tested as it is."""

    def split(name: Split) -> LabelledImages:
        pixels, classes = _tensors(name, data_dir, images_per_file)
        return LabelledImages(pixels, classes, classes)

    return ImageTask(
        split("train"),
        split("test"),
        len(CIFAR10_CLASSES),
        CIFAR10_CLASSES,
        flip_and_crop,
        lambda x, luck: normalise(x),
    )


def cifar10_rotate_task(data_dir: str | Path, blur_test: bool = True, images_per_file: int = 10_000) -> ImageTask:
    """CIFAR-10-Rotate: is the image turned by 30° (label 1) or not (label 0)? Its clusters are CIFAR-10's classes.

    Every image is there twice, as it is and turned, and both are cropped, enlarged and blurred. The paper prints
    that all images are blurred; with ``blur_test=False`` those to test on are not, as in the authors' code.
    """

    def split(name: Split) -> LabelledImages:
        pixels, classes = _tensors(name, data_dir, images_per_file)
        both = torch.cat([crop_and_resize(pixels), crop_and_resize(rotate(pixels))])
        labels = torch.arange(2).repeat_interleave(len(pixels))
        return LabelledImages(both, labels, classes.repeat(2))

    view: Vary = _blurred if blur_test else lambda x, luck: normalise(x)
    return ImageTask(split("train"), split("test"), 2, CIFAR10_CLASSES, _blurred, view)


def normalise(pixels: Tensor) -> Tensor:
    """Bytes (B, 3, H, W) as float32 with mean 0 and variance 1 in each colour, as CIFAR-10's training images have.

    >>> grey = torch.full((1, 3, 1, 1), 125, dtype=torch.uint8)
    >>> [round(float(value), 2) for value in normalise(grey).flatten()]
    [-0.01, 0.04, 0.22]
    """
    return _standardise(pixels.float().div_(255.0))


def flip_and_crop(pixels: Tensor, luck: Tensor) -> Tensor:
    """Mirror half of the images, and shift each by up to 4 pixels in both directions over a black frame; normalise.

    >>> pixels = torch.arange(3 * 16, dtype=torch.uint8).view(1, 3, 4, 4)
    >>> middle = flip_and_crop(pixels, torch.tensor([[1.0, 0.5, 0.5]]))            # neither mirrored nor shifted
    >>> torch.equal(middle, normalise(pixels))
    True
    """
    B, C, H, W = pixels.shape
    device = pixels.device
    places = 2 * _PADDING + 1
    shift = (luck[:, 1:3] * places).long().clamp_(max=places - 1)
    rows = shift[:, :1] + torch.arange(H, device=device)
    across = torch.arange(W, device=device).expand(B, W)
    columns = shift[:, 1:] + torch.where(luck[:, :1] <= 0.5, W - 1 - across, across)
    padded = F.pad(pixels, (_PADDING,) * 4)
    image = torch.arange(B, device=device)[:, None, None, None]
    channel = torch.arange(C, device=device)[:, None, None]
    return normalise(padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]])


def _blurred(pixels: Tensor, luck: Tensor) -> Tensor:
    """Blur by a standard deviation of 1.1 to 2.2 pixels, and normalise; kernel and range as in the authors' code."""
    low, high = _SIGMA
    return _standardise(blur(pixels.float().div_(255.0), low + (high - low) * luck[:, 0].float()))


def _standardise(images: Tensor) -> Tensor:
    mean = torch.tensor(_MEAN, device=images.device)[:, None, None]
    std = torch.tensor(_STD, device=images.device)[:, None, None]
    return (images - mean) / std


def _tensors(split: Split, data_dir: str | Path, images_per_file: int) -> tuple[Tensor, Tensor]:
    loaded = load_cifar10(split, data_dir, images_per_file)
    return torch.from_numpy(loaded.pixels.copy()), torch.from_numpy(loaded.classes)
