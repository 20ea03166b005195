"""Image files for a page: as large as their number allows, since all of them are in the page.

Images keep their own resolution up to `LONGEST_SIDE`; of many images each gets fewer pixels, so that all together fit
into a number of bytes. Small images, such as those of CIFAR-10, keep their exact pixels where there is room.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moesaic.argument_checks import check_positive
from moesaic.report.svg_line_chart import spaced

__all__ = ["LONGEST_SIDE", "EmbeddedImage", "Picture", "embed_images", "encode_image", "picture_of"]

LONGEST_SIDE = 1024
"""Pixels of the long side of an embedded image, at most."""

Picture = Callable[[int], NDArray[np.uint8]]
"""Returns an image as uint8 (H, W, 3), its long side reduced to this many pixels."""

_SIDES = (LONGEST_SIDE, 896, 768, 640, 512, 448, 384, 320, 288, 256, 224, 192, 160, 128, 96, 64)
_SAMPLE = 16
"""Images that the size of all is estimated from."""
_EXACT_SIDE = 100
"""Images up to this side are encoded without loss, unless that takes too much."""
_QUALITY = 78


@dataclass(frozen=True)
class EmbeddedImage:
    """A WebP file as base64 text, and its size in pixels."""

    text: str
    width: int
    height: int
    reduced: bool = False
    """Whether it may have had more pixels."""


def picture_of(pixels: Tensor) -> Picture:
    """The `Picture` of a tensor (C, H, W) of uint8 with any number of channels.

    >>> import torch
    >>> picture_of(torch.zeros(1, 30, 40, dtype=torch.uint8))(20).shape
    (15, 20, 3)
    """

    def picture(longest: int) -> NDArray[np.uint8]:
        shown = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1]
        return reduced(shown.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy(), longest)

    return picture


def reduced(image: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """An image (H, W, 3) with antialiasing, unless it is small enough already."""
    from PIL import Image

    height, width = image.shape[:2]
    if max(height, width) <= longest:
        return image
    size = (max(1, round(width * longest / max(height, width))), max(1, round(height * longest / max(height, width))))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0))


def encode_image(image: NDArray[np.uint8], *, side: int | None = None, exact: bool = False) -> EmbeddedImage:
    """Encodes an image (H, W, 3), which was reduced if its long side is ``side``; ``exact``: without loss if small.

    >>> encode_image(np.zeros((2, 3, 3), np.uint8)).width
    3
    """
    from PIL import Image

    file = io.BytesIO()
    height, width = image.shape[:2]
    lossless = exact and max(height, width) <= _EXACT_SIDE
    Image.fromarray(np.ascontiguousarray(image)).save(file, "WEBP", lossless=lossless, quality=_QUALITY, method=2)
    return EmbeddedImage(base64.b64encode(file.getvalue()).decode(), width, height, max(height, width) == side)


def embed_images(pictures: Sequence[Picture], most_bytes: int) -> list[EmbeddedImage]:
    """Encodes images as large as ``most_bytes`` of text for all of them allow; the smallest size may exceed it.

    >>> import torch
    >>> noise = torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8)
    >>> [(each.width, each.height) for each in embed_images([picture_of(noise)], 10**6)]
    [(400, 300)]
    >>> embed_images([picture_of(noise)] * 2, 10_000)[1].width < 200
    True
    """
    check_positive("embed_images", most_bytes=most_bytes)
    side, exact = _SIDES[0], True
    while True:
        smallest = side == _SIDES[-1]
        expected = _expected_bytes(pictures, side, exact)
        if expected <= most_bytes or smallest:
            made = _encoded(pictures, side, exact, None if smallest else most_bytes)
            if made is not None:
                return made
            expected = 1.2 * most_bytes  # the sample had smaller files than the others
        if not exact or max(pictures[0](side).shape) > _EXACT_SIDE:
            # files grow a little slower than the number of pixels
            guess = 1.05 * side * (most_bytes / expected) ** 0.5
            side = next((each for each in _SIDES if each < side and each <= guess), _SIDES[-1])
        exact = False


def _encoded(pictures: Sequence[Picture], side: int, exact: bool, most_bytes: int | None) -> list[EmbeddedImage] | None:
    """All images at this size; None as soon as they are too large."""
    made: list[EmbeddedImage] = []
    total = 0
    for picture in pictures:
        made.append(encode_image(picture(side), side=side, exact=exact))
        total += len(made[-1].text)
        if most_bytes is not None and total > most_bytes:
            return None
    return made


def _expected_bytes(pictures: Sequence[Picture], side: int, exact: bool) -> float:
    """Bytes of all images at this size, from a sample."""
    sample = [pictures[i] for i in spaced(len(pictures), _SAMPLE)]
    return len(pictures) / len(sample) * sum(len(encode_image(each(side), exact=exact).text) for each in sample)
