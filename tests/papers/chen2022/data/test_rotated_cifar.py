"""Turning, cropping and blurring: what Pillow and a plain convolution say."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from moesaic.papers.chen2022.data.rotated_cifar import blur, crop_and_resize, rotate


def photographs(count: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    smooth = F.interpolate(torch.rand(count, 3, 9, 9, generator=generator), size=32, mode="bicubic")
    return (255 * (smooth + 0.1 * torch.rand(count, 3, 32, 32, generator=generator)).clamp(0, 1)).to(torch.uint8)


def by_pillow(pixels: torch.Tensor, change) -> torch.Tensor:
    images = [Image.fromarray(each.permute(1, 2, 0).contiguous().numpy()) for each in pixels]
    return torch.stack([torch.from_numpy(np.array(change(image))).permute(2, 0, 1) for image in images])


@pytest.mark.parametrize("degrees", [30.0, -30.0, 90.0, 77.0, 0.0])
def test_turning_takes_the_same_pixels_as_pillow(degrees):
    pixels = photographs()
    assert torch.equal(rotate(pixels, degrees), by_pillow(pixels, lambda image: image.rotate(degrees)))


def test_cropping_and_enlarging_gives_the_same_bytes_as_pillow():
    pixels = photographs()
    theirs = by_pillow(pixels, lambda image: image.crop((4, 4, 28, 28)).resize((32, 32), Image.Resampling.BILINEAR))
    difference = (crop_and_resize(pixels).int() - theirs.int()).abs()
    assert difference.max() <= 1  # where a value lies between two bytes, fixed-point arithmetic may take the other
    assert (difference > 0).double().mean() < 1e-3


def test_no_pixel_in_the_crop_of_a_turned_image_comes_from_outside():
    white = torch.full((1, 1, 32, 32), 255, dtype=torch.uint8)
    assert (rotate(white) == 0).any()
    assert (crop_and_resize(rotate(white)) == 255).all()


def test_blur_is_a_convolution_with_each_images_own_gaussian():
    images = photographs(3).double() / 255
    sigma = torch.tensor([0.5, 1.1, 2.2], dtype=torch.float64)
    for image, s, found in zip(images, sigma, blur(images, sigma), strict=True):
        y, x = torch.arange(-3, 4.0).double()[:, None], torch.arange(-1, 2.0).double()[None, :]
        kernel = torch.exp(-(y**2 + x**2) / (2 * s**2))
        padded = F.pad(image[:, None], (1, 1, 3, 3), mode="reflect")
        direct = F.conv2d(padded, (kernel / kernel.sum())[None, None])[:, 0]
        assert torch.allclose(found, direct, atol=1e-12)


def test_an_image_is_blurred_the_same_alone_and_among_others():
    images, sigma = photographs(5).float(), torch.linspace(0.5, 2.0, 5)
    together = blur(images, sigma)
    assert torch.allclose(together[3:4], blur(images[3:4], sigma[3:4]), atol=1e-4)


def test_blur_keeps_what_is_flat_and_the_mean_colour():
    flat = torch.full((2, 3, 8, 8), 0.25)
    assert torch.allclose(blur(flat, torch.tensor([0.3, 2.0])), flat)


def test_no_images_are_no_trouble():
    none = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert crop_and_resize(rotate(none)).shape == none.shape
    assert blur(none.float(), torch.zeros(0)).shape == none.shape


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rotate(torch.zeros(1, 3, 4, 5)), r"images are \(1, 3, 4, 5\); they must be square"),
        (lambda: crop_and_resize(torch.zeros(1, 3, 4, 4, dtype=torch.uint8)), "crop=24 of an image of 4×4 pixels"),
        (lambda: blur(torch.zeros(1, 3, 8, 8), torch.ones(2)), r"sigma is \(2,\) for 1 images"),
        (lambda: blur(torch.zeros(1, 3, 8, 8), torch.ones(1), height=4), "height=4; a kernel with a middle"),
        (
            lambda: blur(torch.zeros(1, 3, 3, 3), torch.ones(1)),
            "a kernel of 7×3 reaches beyond the mirror image of 3×3",
        ),
    ],
)
def test_what_cannot_be_done_is_told(call, told):
    with pytest.raises(ValueError, match=told):
        call()


def test_only_bytes_are_enlarged():
    with pytest.raises(TypeError, match=r"takes bytes, got torch\.float32"):
        crop_and_resize(torch.zeros(1, 3, 32, 32))
