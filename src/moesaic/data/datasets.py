"""Classification of images, ready to train on: bytes on the device, and how a batch is made of them.

Images stay bytes until a batch needs them. What is random about a batch depends on three numbers
from 0 to 1 for each image, its *luck*, so that it is a plain function: the same luck gives the same
batch on any device, whatever else is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.checks import at_least_one, one_of
from moesaic.data.cifar10 import CIFAR10_CLASSES, load_cifar10
from moesaic.data.splits import Split, stratified_order

__all__ = [
    "CIFAR10_SCALE",
    "LUCK",
    "Augment",
    "Augmented",
    "ImageTask",
    "LabelledImages",
    "Scale",
    "Skipped",
    "Vary",
    "cifar10_task",
    "cifar10_tensors",
    "flip_and_crop",
    "normalise",
    "standardise",
]

LUCK = 3
"""Random numbers an image gets in an epoch."""

Vary = Callable[[Tensor, Tensor], Tensor]
"""Bytes (B, C, H, W) and luck (B, 3) in, float32 images out."""

Augment = Literal["none", "flip", "flip-crop"]
"""How images to train on are varied: not at all, mirrored at random, or mirrored and shifted."""

_SHIFT = 8
"""Images are shifted by up to the side over this."""
_SKETCHED = 32
"""Images that a sketch looks at, at least."""


@dataclass(frozen=True)
class Skipped:
    """A file that was left out."""

    path: str
    why: str


@dataclass(frozen=True)
class Scale:
    """From bytes to what a network sees: pixels / 255, less the mean, over the standard deviation of each channel.

    >>> grey = torch.full((1, 1, 1, 2), 51, dtype=torch.uint8)
    >>> Scale(mean=(0.1,), std=(0.5,))(grey).flatten()
    tensor([0.2000, 0.2000])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"Scale: mean={self.mean}, std={self.std}; each must have one number for every channel")
        if not all(std > 0 for std in self.std):
            raise ValueError(f"Scale: std={self.std}; each must be above 0: use 1 for a channel that does not vary")

    def __call__(self, pixels: Tensor, luck: Tensor | None = None) -> Tensor:
        """Bytes (B, C, H, W) as float32 images; luck changes nothing, and lets a scale be the view of a task."""
        if pixels.ndim != 4 or pixels.shape[1] != len(self.mean):
            raise ValueError(
                f"Scale: it is for images (B, C, H, W) of {len(self.mean)} channels, got {tuple(pixels.shape)}"
            )
        return standardise(pixels.float().div_(255.0), self)


@dataclass(frozen=True)
class Augmented:
    """Images mirrored and shifted by luck, then scaled.

    >>> pixels = torch.arange(8, dtype=torch.uint8).view(1, 1, 1, 8)
    >>> vary = Augmented(Scale((0.0,), (1 / 255,)), flip=True)
    >>> vary(pixels, torch.tensor([[0.2, 0.5, 0.5]])).round().flatten()
    tensor([7., 6., 5., 4., 3., 2., 1., 0.])
    """

    scale: Scale
    flip: bool = False
    """Whether half of the images are mirrored."""
    padding: int = 0
    """Pixels by which an image is shifted at most, to each side and over a black frame."""

    @staticmethod
    def of(augment: Augment, scale: Scale, side: int) -> Augmented:
        """What an `Augment` means for images of ``side`` pixels: a shift is by up to an eighth of them."""
        one_of("load_images", "augment", augment, get_args(Augment))
        return Augmented(scale, augment != "none", side // _SHIFT if augment == "flip-crop" else 0)

    def __call__(self, pixels: Tensor, luck: Tensor) -> Tensor:
        return self.scale(_moved(pixels, luck, self.flip, self.padding))


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images, what they are to be told apart by, and groups that nobody tells the network."""

    pixels: Tensor
    """(B, C, H, W) uint8; contiguous or channels_last, and perhaps a file that is mapped into memory."""
    labels: Tensor
    """(B,) int64."""
    clusters: Tensor
    """(B,) int64: in CIFAR-10-Rotate, the class of CIFAR-10."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> LabelledImages:
        return LabelledImages(self.pixels.to(device), self.labels.to(device), self.clusters.to(device))

    def sketch(self) -> str:
        """Tells most sets of images apart, by their labels and a few of the images; the same wherever they lie."""
        some = self.pixels[:: max(len(self) // _SKETCHED, 1)]
        known = hashlib.sha256(self.labels.cpu().numpy().tobytes())
        known.update(some.cpu().contiguous().numpy().tobytes())
        return known.hexdigest()[:16]

    def take(self, rows: Tensor) -> LabelledImages:
        """Some of the images, in the order asked for; images that follow each other are a view of these."""
        rows = rows.to(self.labels.device)
        first = int(rows[0]) if len(rows) else 0
        if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
            part = slice(first, first + len(rows))
            return LabelledImages(self.pixels[part], self.labels[part], self.clusters[part])
        # picked with the channels last where they lie last, so that an image is one piece of memory
        last = self.pixels.is_contiguous(memory_format=torch.channels_last)
        picked = self.pixels.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2) if last else self.pixels[rows]
        return LabelledImages(picked, self.labels[rows], self.clusters[rows])


@dataclass(frozen=True, eq=False)
class ImageTask:
    """What to learn, and from what."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    cluster_names: tuple[str, ...]
    vary: Vary
    """Makes a batch to train on."""
    view: Vary
    """Makes a batch to test on."""
    name: str = ""
    digest: str = ""
    """Tells whether images and labels are the same, wherever they come from."""
    scale: Scale | None = None
    """What ``view`` does, where it does nothing else."""
    skipped: tuple[Skipped, ...] = ()
    """Files that are not among the images."""

    @property
    def labels(self) -> int:
        """How many labels there are."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> ImageTask:
        """The same task with its images on a device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def subset(self, samples: int, seed: int) -> ImageTask:
        """The task with ``samples`` images to train on, drawn by ``seed``; the images to test on stay.

        Each class keeps its share of the images, and has one at least; within a class so does each cluster, as far
        as whole images go. For one seed, fewer images are among more.

        >>> labels, scale = torch.arange(90) % 3, Scale((0.0,), (1.0,))
        >>> images = LabelledImages(torch.zeros(90, 1, 2, 2, dtype=torch.uint8), labels, labels)
        >>> task = ImageTask(images, images, ("a", "b", "c"), ("a", "b", "c"), scale, scale)
        >>> task.subset(12, seed=0).train.labels.bincount().tolist()
        [4, 4, 4]
        """
        at_least_one("subset", samples=samples)
        if samples > len(self.train):
            raise ValueError(
                f"subset: samples={samples}, but there are {len(self.train)} images to train on"
                f"{f' in {self.name}' if self.name else ''}; use at most samples={len(self.train)}, or add images"
            )
        if samples < self.labels:
            raise ValueError(
                f"subset: samples={samples} is less than one image for each of the {self.labels} classes; "
                f"use samples={self.labels} or more"
            )
        order = stratified_order(self.train.labels.cpu(), self.train.clusters.cpu(), seed)
        if samples == len(self.train):
            return self
        drawn = hashlib.sha256(f"{self.digest} {samples} {seed}".encode()).hexdigest()[:16]
        return replace(self, train=self.train.take(order[:samples].sort().values), digest=drawn if self.digest else "")


def cifar10_task(data_dir: str | Path, images_per_file: int = 10_000) -> ImageTask:
    """CIFAR-10 with ten labels; trained with random mirroring and crops, tested as it is."""

    def split(name: Split) -> LabelledImages:
        pixels, classes = cifar10_tensors(name, data_dir, images_per_file)
        return LabelledImages(pixels, classes, classes)

    return ImageTask(
        split("train"),
        split("test"),
        CIFAR10_CLASSES,
        CIFAR10_CLASSES,
        flip_and_crop,
        CIFAR10_SCALE,
        name="cifar10",
        scale=CIFAR10_SCALE,
    )


CIFAR10_SCALE = Scale(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))


def normalise(pixels: Tensor) -> Tensor:
    """Bytes (B, 3, H, W) as float32 with mean 0 and variance 1 in each colour, as CIFAR-10's training images have.

    >>> grey = torch.full((1, 3, 1, 1), 125, dtype=torch.uint8)
    >>> [round(float(value), 2) for value in normalise(grey).flatten()]
    [-0.01, 0.04, 0.22]
    """
    return CIFAR10_SCALE(pixels)


def flip_and_crop(pixels: Tensor, luck: Tensor) -> Tensor:
    """Mirror half of the images, and shift each by up to 4 pixels in both directions over a black frame; normalise.

    >>> pixels = torch.arange(3 * 16, dtype=torch.uint8).view(1, 3, 4, 4)
    >>> middle = flip_and_crop(pixels, torch.tensor([[1.0, 0.5, 0.5]]))            # neither mirrored nor shifted
    >>> torch.equal(middle, normalise(pixels))
    True
    """
    return normalise(_moved(pixels, luck, flip=True, padding=4))


def _moved(pixels: Tensor, luck: Tensor, flip: bool, padding: int) -> Tensor:
    """Bytes mirrored where the first number of luck is low, and shifted by the other two."""
    B, C, H, W = pixels.shape
    low = luck[:, 0] <= 0.5
    if flip:
        # the bytes of one or the other, by their bits: many times as fast as torch.where
        either = low.to(torch.uint8).mul_(255)[:, None, None, None]
        pixels = pixels.flip(3).bitwise_xor_(pixels).bitwise_and_(either).bitwise_xor_(pixels)
    if not padding or not B:
        return pixels
    places = 2 * padding + 1
    down, right = (luck[:, 1:3] * places).long().clamp_(max=places - 1).unbind(1)
    if flip:
        right = torch.where(low, places - 1 - right, right)  # what is mirrored moves the other way
    padded = F.pad(pixels.permute(0, 2, 3, 1), (0, 0, *(padding,) * 4)).contiguous()
    high, wide = padded.shape[1:3]
    # W pixels from every pixel on, of which each row of each image is one
    windows = padded.as_strided((B * high * wide - W + 1, W * C), (C, 1))
    rows = (torch.arange(B, device=pixels.device) * high + down)[:, None] + torch.arange(H, device=pixels.device)
    first = rows * wide + right[:, None]
    return windows.index_select(0, first.flatten()).view(B, H, W, C).permute(0, 3, 1, 2)


def standardise(images: Tensor, scale: Scale) -> Tensor:
    """In place."""
    mean, std = (_spread(numbers, images) for numbers in (scale.mean, scale.std))
    return images.sub_(mean).div_(std)


def _spread(numbers: tuple[float, ...], images: Tensor) -> Tensor:
    """(1, C, H, W): a number for each channel, laid out in memory as an image is, which makes for long loops."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    each = torch.tensor(numbers, device=images.device)[:, None, None].expand(1, *images.shape[1:])
    return each.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def cifar10_tensors(split: Split, data_dir: str | Path, images_per_file: int) -> tuple[Tensor, Tensor]:
    """CIFAR-10's images (B, 3, 32, 32) as bytes, and their classes."""
    loaded = load_cifar10(split, data_dir, images_per_file)
    return torch.from_numpy(loaded.pixels.copy()), torch.from_numpy(loaded.classes)
