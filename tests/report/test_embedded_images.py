"""Images of a page fit into their bytes, and are as large as these allow."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.report.embedded_images import LONGEST_SIDE, EmbeddedImage, embed_images, picture_of


def noise(height: int, width: int, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=generator)


def decoded(image: EmbeddedImage) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(image.text))) as file:
        assert file.format == "WEBP"
        return np.asarray(file.convert("RGB"))


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_small_images_keep_their_exact_pixels(channels: int):
    pixels = noise(20, 30, channels)
    (image,) = embed_images([picture_of(pixels)], 10**6)
    shown = pixels[:3] if channels >= 3 else pixels[:1].expand(3, -1, -1)
    np.testing.assert_array_equal(decoded(image), shown.permute(1, 2, 0))
    assert not image.reduced


def test_large_images_are_reduced_to_the_longest_side():
    (image,) = embed_images([picture_of(torch.zeros(3, 100, 2 * LONGEST_SIDE, dtype=torch.uint8))], 10**6)
    assert (image.width, image.height, image.reduced) == (LONGEST_SIDE, 50, True)


@pytest.mark.parametrize("budget", [400_000, 120_000, 60_000])
def test_many_images_fit_into_the_bytes(budget: int):
    made = embed_images([picture_of(noise(200 + i, 260)) for i in range(6)], budget)
    total = sum(len(image.text) for image in made)
    assert total <= budget
    assert total > budget / 6 or max(image.width for image in made) == 260
    assert len({image.width for image in made}) == 1


def test_unlike_files_fit_as_well():
    """The sample has none of the large files, so that the first attempt is too large."""
    flat, loud = torch.zeros(3, 200, 200, dtype=torch.uint8), noise(200, 200)
    pictures = [picture_of(flat if i % 2 == 0 else loud) for i in range(40)]
    assert sum(len(image.text) for image in embed_images(pictures, 200_000)) <= 200_000


def test_small_images_lose_a_little_before_they_shrink():
    made = embed_images([picture_of(noise(90, 90))] * 4, 80_000)
    assert [image.width for image in made] == [90] * 4
    assert sum(len(image.text) for image in made) <= 80_000 < 4 * 90 * 90 * 3


def test_the_smallest_size_is_never_refused():
    assert len(embed_images([picture_of(noise(80, 80))], 10)) == 1
