"""CIFAR-10 and CIFAR-10-Rotate (Chen et al. 2022, Appendix A.3).

An image of CIFAR-10-Rotate is rotated by 30°, cropped, resized and blurred:

    rotate by 30°  →  crop the middle 24×24  →  resize to 32×32  →  blur by a random amount

Rotation and resizing are done once, on bytes, like Pillow's: each pixel of a rotated image is the nearest pixel of the
original, and resizing interpolates linearly along rows and then along columns. The crop makes the task fair: none of
the middle 24×24 pixels of a rotated image lies outside the original, so that no black corner reveals the label. Nearest
neighbours leave jagged edges, which would reveal it; hence the blur, which is random for every image of every batch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.data.cifar10 import CIFAR10_CLASSES, cifar10_tensors
from moesaic.data.image_dataset import (
    ImageDataset,
    LabelledImages,
    Normalize,
    RandomFlipCrop,
    normalize_,
)
from moesaic.data.splits import Split

__all__ = [
    "ANGLE",
    "CIFAR10_NORMALIZE",
    "CROP",
    "FLIP_AND_CROP",
    "blur",
    "blur_and_normalize",
    "cifar10_dataset",
    "cifar10_rotate_task",
    "crop_and_resize",
    "rotate",
]

ANGLE = 30.0
"""Degrees, counterclockwise."""
CROP = 24
"""Side of the cropped square, in pixels."""

CIFAR10_NORMALIZE = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
"""Normalization with the statistics of CIFAR-10's training images."""
FLIP_AND_CROP = RandomFlipCrop(CIFAR10_NORMALIZE, flip=True, padding=4)
"""CIFAR-10's usual augmentation."""

_SIGMA = (1.1, 2.2)
_CHUNK = 8192
"""Images resized at a time, which bounds the memory of their floating-point copies."""


def rotate(pixels: Tensor, degrees: float = ANGLE) -> Tensor:
    """Rotates square images (B, C, H, H) about their centre, counterclockwise; pixels from outside are 0.

    >>> rotate(torch.tensor([[[[1, 2], [3, 4]]]]), 90.0).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    H, W = _square(pixels)
    angle = math.radians(degrees)
    offset = torch.arange(H, dtype=torch.float64) + 0.5 - H / 2  # of the middles of pixels from that of the image
    down, right = offset[:, None], offset[None, :]
    # 1e-9: a rotation by right angles hits pixel centres and must not miss them by rounding
    from_x = (right * math.cos(angle) - down * math.sin(angle) + W / 2 + 1e-9).floor().long()
    from_y = (right * math.sin(angle) + down * math.cos(angle) + H / 2 + 1e-9).floor().long()
    inside = (from_x >= 0) & (from_x < W) & (from_y >= 0) & (from_y < H)
    source = torch.where(inside, from_y * W + from_x, 0).flatten().to(pixels.device)
    rotated = pixels.flatten(2)[..., source].view_as(pixels)
    return rotated * inside.to(pixels.device)


def crop_and_resize(pixels: Tensor, crop: int = CROP) -> Tensor:
    """Crops the middle ``crop`` × ``crop`` pixels of images (B, C, H, H) of bytes and resizes them to H × H.

    >>> flat = torch.full((1, 3, 32, 32), 7, dtype=torch.uint8)
    >>> bool((crop_and_resize(flat) == 7).all())
    True
    """
    H, _ = _square(pixels)
    if pixels.dtype != torch.uint8:
        raise TypeError(f"crop_and_resize: takes bytes, got {pixels.dtype}; convert with pixels.to(torch.uint8)")
    if not 1 <= crop <= H:
        raise ValueError(f"crop_and_resize: crop={crop} of an image of {H}×{H} pixels; it must be from 1 to {H}")
    start = round((H - crop) / 2)
    cropped = pixels[..., start : start + crop, start : start + crop]
    weights = _linear_weights(crop, H).to(pixels.device)

    def enlarge(some: Tensor) -> Tensor:
        wide = (some.float() @ weights.T + 0.5).floor_()  # bytes again after each direction, as Pillow has them
        return (weights @ wide + 0.5).floor_().clamp_(0, 255).to(torch.uint8)

    chunks = cast("tuple[Tensor, ...]", cropped.split(_CHUNK))
    return torch.cat([enlarge(some) for some in chunks]) if len(cropped) else pixels.clone()


def blur(images: Tensor, sigma: Tensor, height: int = 7, width: int = 3) -> Tensor:
    """Convolves each image (B, C, H, W) with a Gaussian of its own standard deviation (B,), mirrored at the edges.

    >>> dot = torch.zeros(1, 1, 9, 9)
    >>> dot[..., 4, 4] = 1.0
    >>> [round(float(value), 3) for value in blur(dot, torch.tensor([1.0]))[0, 0, 4, 3:6]]
    [0.109, 0.18, 0.109]
    """
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % 2 == 0:
            raise ValueError(f"blur: {name}={size}; a kernel with a middle needs an odd number of pixels, 1 or more")
    B, _, H, W = images.shape
    if sigma.shape != (B,):
        raise ValueError(f"blur: sigma is {tuple(sigma.shape)} for {B} images; it must be ({B},), one for each image")
    if height // 2 >= H or width // 2 >= W:
        raise ValueError(
            f"blur: a kernel of {height}×{width} reaches beyond the mirror image of {H}×{W} pixels; use a smaller one"
        )
    if not B:
        return images.clone()
    # one group of a convolution for each image: its channels are the batch
    x = F.pad(images, (width // 2, width // 2, height // 2, height // 2), mode="reflect").transpose(0, 1)
    x = F.conv2d(x, _gaussian(sigma, height, images.dtype)[:, None, :, None], groups=B)
    x = F.conv2d(x, _gaussian(sigma, width, images.dtype)[:, None, None, :], groups=B)
    return x.transpose(0, 1)


def _gaussian(sigma: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, size), each row with sum 1."""
    offset = torch.arange(size, device=sigma.device, dtype=sigma.dtype) - size // 2
    kernel = (-0.5 * (offset / sigma[:, None]) ** 2).exp()
    return (kernel / kernel.sum(1, keepdim=True)).to(dtype)


def _linear_weights(size: int, larger: int) -> Tensor:
    """Returns the interpolation weights (larger, size) from a row to a longer row."""
    middle = (torch.arange(larger, dtype=torch.float64) + 0.5) * size / larger
    weight = (1 - (torch.arange(size, dtype=torch.float64) + 0.5 - middle[:, None]).abs()).clamp_min(0)
    return (weight / weight.sum(1, keepdim=True)).float()


def _square(pixels: Tensor) -> tuple[int, int]:
    if pixels.ndim != 4 or pixels.shape[2] != pixels.shape[3]:
        raise ValueError(f"images are {tuple(pixels.shape)}; they must be square, (B, C, H, H)")
    return pixels.shape[2], pixels.shape[3]


def cifar10_dataset(data_dir: str | Path, images_per_file: int = 10_000) -> ImageDataset:
    """CIFAR-10; the training transform is `FLIP_AND_CROP`, the test transform normalizes."""

    def split(name: Split) -> LabelledImages:
        pixels, classes = cifar10_tensors(name, data_dir, images_per_file)
        return LabelledImages(pixels, classes, classes)

    return ImageDataset(
        split("train"),
        split("test"),
        CIFAR10_CLASSES,
        CIFAR10_CLASSES,
        FLIP_AND_CROP,
        CIFAR10_NORMALIZE,
        name="cifar10",
        normalize=CIFAR10_NORMALIZE,
    )


def cifar10_rotate_task(data_dir: str | Path, blur_test: bool = True, images_per_file: int = 10_000) -> ImageDataset:
    """CIFAR-10-Rotate: is the image rotated by 30° (label 1) or not (label 0)? Its clusters are CIFAR-10's classes.

    Every image occurs twice, upright and rotated, and both are cropped, enlarged and blurred. The paper prints
    that all images are blurred; with ``blur_test=False`` those to test on are not, as in the authors' code.
    """

    def split(name: Split) -> LabelledImages:
        pixels, classes = cifar10_tensors(name, data_dir, images_per_file)
        both = torch.cat([crop_and_resize(pixels), crop_and_resize(rotate(pixels))])
        labels = torch.arange(2).repeat_interleave(len(pixels))
        return LabelledImages(both, labels, classes.repeat(2))

    return ImageDataset(
        split("train"),
        split("test"),
        ("upright", "turned"),
        CIFAR10_CLASSES,
        blur_and_normalize,
        blur_and_normalize if blur_test else CIFAR10_NORMALIZE,
        name="cifar10-rotate",
        normalize=None if blur_test else CIFAR10_NORMALIZE,
    )


def blur_and_normalize(pixels: Tensor, rand: Tensor) -> Tensor:
    """Blurs by a standard deviation of 1.1 to 2.2 pixels, and normalizes; kernel and range as in the authors' code."""
    low, high = _SIGMA
    return normalize_(blur(pixels.float().div_(255.0), low + (high - low) * rand[:, 0].float()), CIFAR10_NORMALIZE)
