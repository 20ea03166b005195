"""Tasks on images: what a batch is made of."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.data.image_tasks import cifar10_rotate_task, cifar10_task, flip_and_crop, normalise
from moesaic.data.rotated import crop_and_resize, rotate

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cifar")
    for number, name in enumerate(NAMES):
        rows = np.random.default_rng(number).integers(256, size=(3, 3073), dtype=np.uint8)
        rows[:, 0] = number
        rows.tofile(made / name)
    return made


def pixels(count: int = 4) -> torch.Tensor:
    return torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_rotate_has_every_image_upright_and_turned_with_its_class_as_cluster(folder):
    task = cifar10_rotate_task(folder, images_per_file=3)
    plain = cifar10_task(folder, images_per_file=3)
    assert task.train.labels.tolist() == [0] * 15 + [1] * 15
    assert torch.equal(task.train.pixels[:15], crop_and_resize(plain.train.pixels))
    assert torch.equal(task.train.pixels[15:], crop_and_resize(rotate(plain.train.pixels)))
    assert torch.equal(task.train.clusters, plain.train.labels.repeat(2))
    assert (task.labels, len(task.test)) == (2, 6)


def test_cifar_itself_has_its_classes_as_labels(folder):
    task = cifar10_task(folder, images_per_file=3)
    assert task.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert torch.equal(task.view(task.test.pixels, torch.ones(3, 3)), normalise(task.test.pixels))


def test_test_images_are_blurred_by_default_and_not_when_told(folder):
    blurred, sharp = cifar10_rotate_task(folder, images_per_file=3), cifar10_rotate_task(folder, False, 3)
    luck = torch.full((6, 3), 0.5)
    assert torch.equal(sharp.view(sharp.test.pixels, luck), normalise(sharp.test.pixels))
    assert blurred.view(blurred.test.pixels, luck).std() < 0.8 * normalise(sharp.test.pixels).std()
    assert torch.equal(blurred.view(blurred.test.pixels, luck), sharp.vary(sharp.test.pixels, luck))


def test_more_luck_is_more_blur(folder):
    task = cifar10_rotate_task(folder, images_per_file=3)
    less, more = (task.vary(task.test.pixels, torch.full((6, 3), luck)).std() for luck in (0.0, 1.0))
    assert more < less


def test_normalised_images_have_mean_0_and_variance_1_where_cifar_has_its_own():
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = pixels()
    assert torch.allclose(normalise(x), (x / 255 - mean[:, None, None]) / std[:, None, None], atol=1e-6)


def test_low_luck_mirrors():
    x = pixels()
    middle = torch.full((4, 3), 0.5)
    mirrored, same = middle.clone(), middle.clone()
    mirrored[:, 0], same[:, 0] = 0.1, 0.9
    assert torch.equal(flip_and_crop(x, same), normalise(x))
    assert torch.equal(flip_and_crop(x, mirrored), normalise(x).flip(3))


@pytest.mark.parametrize(("luck", "down", "right"), [((0.0, 1.0), -4, 4), ((0.99, 0.45), 4, 0), ((0.56, 0.34), 1, -1)])
def test_crops_move_by_up_to_four_pixels_over_black(luck, down, right):
    x = pixels(1)
    found = flip_and_crop(x, torch.tensor([[1.0, *luck]]))
    black = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    black[..., 4:36, 4:36] = x
    assert torch.equal(found, normalise(black[..., 4 + down : 36 + down, 4 + right : 36 + right]))


def test_luck_spreads_evenly_over_the_nine_places():
    luck = torch.stack([torch.ones(900), (torch.arange(900) + 0.5) / 900, torch.full((900,), 0.5)], dim=1)
    column = torch.zeros(900, 3, 32, 32, dtype=torch.uint8)
    column[:, :, 16] = 255
    rows = flip_and_crop(column, luck)[:, 0, :, 0].argmax(1)
    assert torch.bincount(rows).tolist()[12:] == [100] * 9
