"""Image classification datasets in memory: uint8 pixels, labels, and the transforms that make batches of them.

Pixels stay uint8 until a batch needs them. A transform gets three random numbers in [0, 1) per image,
``rand``, instead of drawing its own: it is a pure function, so that the same ``rand`` gives the same
image on any device and in any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.argument_checks import check_positive
from moesaic.data.file_sources import SkippedFile
from moesaic.data.splits import stratified_order

__all__ = [
    "RANDS_PER_IMAGE",
    "Augment",
    "ImageDataset",
    "ImageSplits",
    "LabelledImages",
    "Normalize",
    "RandomFlipCrop",
    "Transform",
    "normalize_",
]

RANDS_PER_IMAGE = 3
"""Random numbers that a transform gets per image."""

Transform = Callable[[Tensor, Tensor], Tensor]
"""Maps uint8 pixels (B, C, H, W) and ``rand`` (B, 3) to float32 images."""

Augment = Literal["none", "flip", "flip-crop", "strong"]
"""Data augmentation: none, random horizontal flip, random flip and random crop, or `StrongAugment`."""

_MIN_FINGERPRINTED_IMAGES = 32
"""Images that a fingerprint reads, at least."""


@dataclass(frozen=True)
class Normalize:
    """Maps uint8 pixels to float32: pixels / 255, minus the mean, over the standard deviation of each channel.

    >>> grey = torch.full((1, 1, 1, 2), 51, dtype=torch.uint8)
    >>> Normalize(mean=(0.1,), std=(0.5,))(grey).flatten()
    tensor([0.2000, 0.2000])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"Normalize: mean={self.mean}, std={self.std}; each must have one number for every channel"
            )
        if not all(std > 0 for std in self.std):
            raise ValueError(f"Normalize: std={self.std}; each must be above 0: use 1 for a constant channel")

    def __call__(self, pixels: Tensor, rand: Tensor | None = None) -> Tensor:
        """Normalizes uint8 pixels (B, C, H, W); ``rand`` is ignored and makes this a `Transform`."""
        if pixels.ndim != 4 or pixels.shape[1] != len(self.mean):
            raise ValueError(
                f"Normalize: takes images (B, C, H, W) of {len(self.mean)} channels, got {tuple(pixels.shape)}"
            )
        return normalize_(pixels.float().div_(255.0), self)


@dataclass(frozen=True)
class RandomFlipCrop:
    """Random horizontal flip and random crop of a zero-padded image, then normalization.

    >>> pixels = torch.arange(8, dtype=torch.uint8).view(1, 1, 1, 8)
    >>> transform = RandomFlipCrop(Normalize((0.0,), (1 / 255,)), flip=True)
    >>> transform(pixels, torch.tensor([[0.2, 0.5, 0.5]])).round().flatten()
    tensor([7., 6., 5., 4., 3., 2., 1., 0.])
    """

    normalize: Normalize
    flip: bool = False
    """Whether half of the images are flipped."""
    padding: int = 0
    """Zero padding on each side before the crop; 0 for no crop."""

    def __call__(self, pixels: Tensor, rand: Tensor) -> Tensor:
        return self.normalize(self.flipped_and_cropped(pixels, rand))

    def flipped_and_cropped(self, pixels: Tensor, rand: Tensor) -> Tensor:
        """Returns the uint8 pixels before normalization."""
        return _flipped_and_cropped(pixels, rand, self.flip, self.padding)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One split of a dataset: images, labels, and clusters that the network does not see."""

    pixels: Tensor
    """(B, C, H, W) uint8; contiguous or channels_last, possibly a memory-mapped file."""
    labels: Tensor
    """(B,) int64."""
    clusters: Tensor
    """(B,) int64: a finer grouping than the labels. In CIFAR-10-Rotate, the class of CIFAR-10."""
    features: Tensor | None = None
    """(B, …) float: the last maps or tokens of a frozen backbone for these images, where they were computed."""
    names: tuple[str, ...] = ()
    """Names of the files in their folder or archive; empty if the images do not come from files."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> LabelledImages:
        features = None if self.features is None else self.features.to(device)
        return replace(
            self,
            pixels=self.pixels.to(device),
            labels=self.labels.to(device),
            clusters=self.clusters.to(device),
            features=features,
        )

    def fingerprint(self) -> str:
        """A hash of all labels and a sample of the images; the same on every device."""
        sample = self.pixels[:: max(len(self) // _MIN_FINGERPRINTED_IMAGES, 1)]
        content = hashlib.sha256(self.labels.cpu().numpy().tobytes())
        content.update(sample.cpu().contiguous().numpy().tobytes())
        return content.hexdigest()[:16]

    def take(self, rows: Tensor) -> LabelledImages:
        """The images at ``rows``, in that order; a view if the rows are consecutive."""
        rows = rows.to(self.labels.device)
        first = int(rows[0]) if len(rows) else 0
        if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
            part = slice(first, first + len(rows))
            features = None if self.features is None else self.features[part]
            names = self.names[part]
            return LabelledImages(self.pixels[part], self.labels[part], self.clusters[part], features, names)
        # channels_last pixels are indexed as (B, H, W, C): each image is then one contiguous copy
        last = self.pixels.is_contiguous(memory_format=torch.channels_last)
        picked = self.pixels.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2) if last else self.pixels[rows]
        features = None if self.features is None else self.features[rows]
        names = tuple(self.names[int(row)] for row in rows) if self.names else ()
        return LabelledImages(picked, self.labels[rows], self.clusters[rows], features, names)


@dataclass(frozen=True, eq=False)
class ImageSplits:
    """Training and test images of one shape, as a loader returns them: without name and transforms."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    """In the order of labels."""
    cluster_names: tuple[str, ...]
    """In the order of clusters; the class names if the dataset has no finer grouping."""
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """An image classification dataset: training and test split, class names and transforms."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    cluster_names: tuple[str, ...]
    train_transform: Transform
    eval_transform: Transform
    name: str = ""
    digest: str = ""
    """A hash of all images and labels; the same wherever they come from."""
    normalize: Normalize | None = None
    """The normalization, if ``eval_transform`` does nothing else."""
    skipped: tuple[SkippedFile, ...] = ()
    """Files that could not be read."""
    backbone: str = ""
    """The digest of the frozen backbone that computed the features of both splits; empty: there are none."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> ImageDataset:
        """Returns the dataset with its images on ``device``."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def augmented(self) -> bool:
        """Whether a training image may differ from one step to the next."""
        plain = RandomFlipCrop(self.normalize) if self.normalize is not None else None
        return self.train_transform not in (self.eval_transform, plain)

    def with_normalize(self, normalize: Normalize) -> ImageDataset:
        """Returns the dataset with another normalization: that of a pretrained network, say.

        Grey images take the mean over colours. A dataset whose transforms do more than normalize stays as it is.

        >>> grey = LabelledImages(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.arange(2), torch.arange(2))
        >>> own = Normalize((0.5,), (0.5,))
        >>> flip = RandomFlipCrop(own, flip=True)
        >>> dataset = ImageDataset(grey, grey, ("a", "b"), ("a", "b"), flip, own, normalize=own)
        >>> dataset.with_normalize(Normalize((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))).normalize
        Normalize(mean=(0.5,), std=(0.2,))
        """
        if self.normalize is None or not isinstance(self.train_transform, Normalize | RandomFlipCrop):
            return self
        C = self.train.pixels.shape[1]
        if C == 1 < len(normalize.mean):
            mean, std = (round(sum(values) / len(values), 6) for values in (normalize.mean, normalize.std))
            normalize = Normalize((mean,), (std,))
        train: Transform = normalize
        if isinstance(self.train_transform, RandomFlipCrop):
            train = replace(self.train_transform, normalize=normalize)
        return replace(self, train_transform=train, eval_transform=normalize, normalize=normalize)

    def subset(self, samples: int, seed: int) -> ImageDataset:
        """Returns the dataset with ``samples`` training images, drawn by ``seed``; the test images stay.

        The sample is stratified by class and, within a class, by cluster; every class has at least one image. For
        the same seed, a smaller subset is contained in a larger one.

        >>> labels, normalize = torch.arange(90) % 3, Normalize((0.0,), (1.0,))
        >>> images = LabelledImages(torch.zeros(90, 1, 2, 2, dtype=torch.uint8), labels, labels)
        >>> dataset = ImageDataset(images, images, ("a", "b", "c"), ("a", "b", "c"), normalize, normalize)
        >>> dataset.subset(12, seed=0).train.labels.bincount().tolist()
        [4, 4, 4]
        """
        check_positive("subset", samples=samples)
        if samples > len(self.train):
            raise ValueError(
                f"subset: samples={samples}, but there are {len(self.train)} training images"
                f"{f' in {self.name}' if self.name else ''}; use at most samples={len(self.train)}, or add images"
            )
        if samples < self.num_classes:
            raise ValueError(
                f"subset: samples={samples} is less than one image for each of the {self.num_classes} classes; "
                f"use samples={self.num_classes} or more"
            )
        order = stratified_order(self.train.labels.cpu(), self.train.clusters.cpu(), seed)
        if samples == len(self.train):
            return self
        digest = hashlib.sha256(f"{self.digest} {samples} {seed}".encode()).hexdigest()[:16]
        train = self.train.take(order[:samples].sort().values)
        return replace(self, train=train, digest=digest if self.digest else "")


def _flipped_and_cropped(pixels: Tensor, rand: Tensor, flip: bool, padding: int) -> Tensor:
    """Flips where ``rand[:, 0]`` is at most 0.5; ``rand[:, 1:3]`` choose the row and the column of the crop."""
    B, C, H, W = pixels.shape
    flipped = rand[:, 0] <= 0.5
    if flip:
        # a bitwise select, many times as fast as torch.where on bytes
        select = flipped.to(torch.uint8).mul_(255)[:, None, None, None]
        pixels = pixels.flip(3).bitwise_xor_(pixels).bitwise_and_(select).bitwise_xor_(pixels)
    if not padding or not B:
        return pixels
    offsets = 2 * padding + 1
    down, right = (rand[:, 1:3] * offsets).long().clamp_(max=offsets - 1).unbind(1)
    if flip:
        right = torch.where(flipped, offsets - 1 - right, right)  # as if the crop came before the flip
    padded = F.pad(pixels.permute(0, 2, 3, 1), (0, 0, *(padding,) * 4)).contiguous()
    padded_H, padded_W = padded.shape[1:3]
    # every run of W pixels of the padded batch; each row of each crop is one of them
    windows = padded.as_strided((B * padded_H * padded_W - W + 1, W * C), (C, 1))
    rows = (torch.arange(B, device=pixels.device) * padded_H + down)[:, None] + torch.arange(H, device=pixels.device)
    first = rows * padded_W + right[:, None]
    return windows.index_select(0, first.flatten()).view(B, H, W, C).permute(0, 3, 1, 2)


def normalize_(images: Tensor, normalize: Normalize) -> Tensor:
    """Subtracts the mean from float images (B, C, H, W) and divides by the standard deviation, in place."""
    mean, std = (_per_pixel(values, images) for values in (normalize.mean, normalize.std))
    return images.sub_(mean).div_(std)


def _per_pixel(values: tuple[float, ...], images: Tensor) -> Tensor:
    """(1, C, H, W): one value per channel, in the memory format of the images, so that loops are long."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    expanded = torch.tensor(values, device=images.device)[:, None, None].expand(1, *images.shape[1:])
    return expanded.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
