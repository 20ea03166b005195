"""Strong augmentation: every operation is what its name says, and an image's result is its own."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.data.augment import StrongAugment, train_transform
from moesaic.data.image_dataset import Normalize, RandomFlipCrop

UNIT = Normalize((0.0,) * 3, (1.0,) * 3)
OPERATIONS = ("rotate", "shear_x", "shear_y", "brightness", "contrast", "colour", "solarize")
PLAIN = StrongAugment(UNIT)


def image(seed: int = 0, side: int = 16) -> torch.Tensor:
    """A smooth image away from the border, so that interpolation and what is cut off matter little."""
    steps = torch.linspace(-1, 1, side)
    blob = torch.exp(-6 * ((steps[:, None] - 0.2) ** 2 + 2 * (steps + 0.1) ** 2))
    colours = 0.3 + 0.7 * torch.rand(3, generator=torch.Generator().manual_seed(seed))
    return (255 * blob * colours[:, None, None]).to(torch.uint8)[None]


def with_operation(name: str, strength: float, x: torch.Tensor) -> torch.Tensor:
    """The image after one operation, with the erased square in a corner outside the blob."""
    chosen = (OPERATIONS.index(name) + (strength + 1) / 2) / len(OPERATIONS)
    # the first digit of the first number, above one half, is for no flip
    return PLAIN(x, torch.tensor([[0.5 + chosen / 2, 0.999, 0.999]]))


def differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected)[..., :-4, :-4].abs().max())


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_strength_nothing_changes(name: str):
    x = image()
    if name != "solarize":
        assert differs(with_operation(name, 1e-4, x), UNIT(x)) < 1e-3


@pytest.mark.parametrize("strength", [-0.6, 0.9])
def test_recoloured_images_are_what_formulas_make_of_them(strength: float):
    x = UNIT(image())
    factor = 1 + 0.9 * strength
    grey = x.mean(1, keepdim=True)
    threshold = 1 - abs(strength)
    for name, expected in {
        "brightness": factor * x,
        "contrast": x.mean() + factor * (x - x.mean()),
        "colour": grey + factor * (x - grey),
        "solarize": torch.where(x >= threshold, 1 - x, x),
    }.items():
        assert differs(with_operation(name, strength, image()), expected.clamp(0, 1)) < 1e-3, name


@pytest.mark.parametrize(("name", "strength"), [("rotate", 0.8), ("rotate", -0.5), ("shear_x", 0.9), ("shear_y", -0.7)])
def test_warped_images_are_what_pillow_makes_of_them(name: str, strength: float):
    x = image()
    centre = (x.shape[-1] - 1) / 2
    angle = math.pi / 6 * strength if name == "rotate" else 0.0
    shear_x, shear_y = (0.3 * strength if name == each else 0.0 for each in ("shear_x", "shear_y"))
    a, b, c, d = math.cos(angle), -math.sin(angle) + shear_x, math.sin(angle) + shear_y, math.cos(angle)
    offset = (centre + 0.5) * (1 - a - b), (centre + 0.5) * (1 - c - d)
    matrix = (a, b, offset[0], c, d, offset[1])
    planes = [Image.fromarray(plane) for plane in x[0].numpy()]
    warped = [
        plane.transform(plane.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR) for plane in planes
    ]
    expected = torch.from_numpy(np.stack([np.asarray(plane) for plane in warped]))[None] / 255
    assert differs(with_operation(name, strength, x), expected) < 0.02
    assert differs(UNIT(x), expected) > 0.05


def test_a_square_of_a_quarter_of_the_side_is_erased():
    x = torch.full((1, 3, 16, 16), 255, dtype=torch.uint8)
    erased = StrongAugment(Normalize((0.5,) * 3, (0.5,) * 3))(x, torch.tensor([[0.75, 0.5, 0.25]]))
    inside = (erased == 0).all(1)[0].nonzero()
    assert (len(inside), inside.min(0).values.tolist(), inside.max(0).values.tolist()) == (16, [6, 2], [9, 5])


def test_flip_and_crop_come_first_and_share_their_random_numbers():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (200, 3, 16, 16), dtype=torch.uint8, generator=generator)
    rand = torch.rand(200, 3, generator=generator)
    strong, plain = train_transform("strong", UNIT, 16), train_transform("flip-crop", UNIT, 16)
    assert isinstance(strong, StrongAugment)
    assert plain == RandomFlipCrop(UNIT, flip=True, padding=2)
    same = ((strong(x, rand) - plain(x, rand)).abs() < 0.02).float().mean((1, 2, 3))
    assert float(same.max()) > 0.9, "of weak operations all but the square remains"


def test_an_image_does_not_depend_on_its_batch_nor_on_the_memory_format():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (9, 3, 16, 16), dtype=torch.uint8, generator=generator)
    rand = torch.rand(9, 3, generator=generator)
    transform = train_transform("strong", UNIT, 16)
    together = transform(x, rand)
    alone = torch.cat([transform(x[[i]], rand[[i]]) for i in range(9)])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together, transform(x.contiguous(memory_format=torch.channels_last), rand), atol=1e-6)


def test_grey_images_and_no_images_are_no_trouble():
    grey = train_transform("strong", Normalize((0.5,), (0.2,)), 28)
    assert grey(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.rand(2, 3)).shape == (2, 1, 28, 28)
    assert PLAIN(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, 3)).shape == (0, 3, 8, 8)
