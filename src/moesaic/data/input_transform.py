"""The transform of images to the input of a trained network, exactly as in training: crop, resize, normalize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from moesaic.data.decode import read_image, square_image
from moesaic.data.image_dataset import Normalize
from moesaic.data.input_images import check_readable, to_channels

if TYPE_CHECKING:
    from PIL import Image

    InputImage = Image.Image | str | Path | Tensor
    """An image of Pillow, the path of an image file, or uint8 pixels (C, H, W)."""

__all__ = ["InputTransform"]


@dataclass(frozen=True)
class InputTransform:
    """Maps images to the input (B, C, H, W) of a network, as its training did: float32, cropped, resized, normalized.

    It takes an image, or several in a list: images of Pillow, paths of image files, and uint8 pixels (C, H, W) of any
    size with 1 or 3 channels; or pixels (B, C, H, W). The largest centred square is resized with antialiasing.

    >>> transform = InputTransform((3, 4, 4), Normalize((0.5,) * 3, (0.25,) * 3))
    >>> transform(torch.full((3, 8, 12), 255, dtype=torch.uint8)).shape
    torch.Size([1, 3, 4, 4])
    """

    shape: tuple[int, int, int]
    """Channels, height and width of the network's input."""
    normalize: Normalize
    device: torch.device | str = "cpu"
    """Device of the result."""

    def __call__(self, images: InputImage | Sequence[InputImage]) -> Tensor:
        return self.normalize(self.pixels(images).to(self.device))

    def pixels(self, images: InputImage | Sequence[InputImage]) -> Tensor:
        """Returns uint8 pixels (B, C, H, W), cropped and resized but not normalized."""
        if isinstance(images, Tensor) and images.ndim == 4:
            inputs: Sequence[InputImage] = list(images)
        else:
            inputs = images if isinstance(images, list | tuple) else [cast("InputImage", images)]
        if not inputs:
            raise ValueError("transform: there is no image; give at least one")
        return torch.stack([self._pixels(image) for image in inputs])

    def _pixels(self, image: InputImage) -> Tensor:
        C, H, W = self.shape
        if isinstance(image, Tensor):
            _check_pixels(image, self.shape)
            if tuple(image.shape) == self.shape:
                return image
            image = _to_pillow(image)
        check_readable((C, H, W))
        if isinstance(image, str | Path):
            return torch.from_numpy(to_channels(read_image(image, H), C))
        if not hasattr(image, "getexif"):
            raise TypeError(
                f"transform: takes images of Pillow, paths and uint8 tensors, got a {type(image).__name__}; convert an "
                "array with torch.from_numpy"
            )
        return torch.from_numpy(to_channels(square_image(image, H), C))


def _check_pixels(pixels: Tensor, shape: tuple[int, int, int]) -> None:
    if pixels.dtype != torch.uint8:
        raise TypeError(
            f"transform: takes uint8 pixels from 0 to 255, got {pixels.dtype}; convert floats from 0 to 1 with "
            "(255 * x).round().byte()"
        )
    if pixels.ndim != 3 or (tuple(pixels.shape) != shape and pixels.shape[0] not in (1, 3)):
        raise ValueError(
            f"transform: takes pixels (C, H, W) of 1 or 3 channels, or of the network's shape {shape}, got "
            f"{tuple(pixels.shape)}; pixels (H, W, C) become that by x.permute(2, 0, 1)"
        )


def _to_pillow(pixels: Tensor) -> Image.Image:
    from PIL import Image

    array = pixels.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else np.ascontiguousarray(array))
