"""CIFAR-10 with its objects made local: what is where, drawn evenly, by seed, and apart for the two splits."""

import pytest
import torch
from torch import Tensor

from moesaic.data.cifar10 import CIFAR10_CLASSES
from moesaic.papers.chowdhury2023.data.cifar_mosaics import (
    ANIMALS,
    QUADRANTS,
    VEHICLES,
    downscale,
    on_backgrounds,
    split_backgrounds,
    vehicle_mosaics,
)

CORNERS = ((0, 0), (0, 16), (16, 0), (16, 16))


def told_apart(count: int) -> tuple[Tensor, Tensor]:
    """Images that are each of one colour of their own, and classes in turn."""
    shade = torch.arange(count, dtype=torch.uint8)
    return shade[:, None, None, None].expand(count, 3, 32, 32).contiguous(), torch.arange(count) % 10


def quadrants(pixels: Tensor) -> Tensor:
    """(B, 4): the image each quadrant is made of, after checking that it is of one colour."""
    cells = [pixels[:, :, y : y + 16, x : x + 16].flatten(1) for y, x in CORNERS]
    assert all(bool((cell == cell[:, :1]).all()) for cell in cells)
    return torch.stack([cell[:, 0] for cell in cells], dim=1).long()


def test_halving_takes_the_mean_of_four_pixels_whatever_lies_around_them():
    pixels = torch.randint(256, (2, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.avg_pool2d(pixels.double(), 2).add(0.5).floor()
    assert torch.equal(downscale(pixels).double(), expected)


def test_halving_keeps_white_white():
    white = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    assert downscale(white).item() == 255


def test_an_odd_side_cannot_be_halved():
    with pytest.raises(ValueError, match="31×32 pixels; height and width must be even"):
        downscale(torch.zeros(1, 3, 31, 32, dtype=torch.uint8))


def test_every_vehicle_comes_once_in_the_quadrant_its_cluster_says_among_animals():
    pixels, classes = told_apart(200)
    made = vehicle_mosaics(pixels, classes, split="train", seed=0)
    shown = quadrants(made.pixels)
    vehicle = shown.gather(1, made.clusters[:, None])[:, 0]
    names = [CIFAR10_CLASSES[c] for c in classes[vehicle]]
    assert len(made) == 80
    assert sorted(vehicle.tolist()) == [i for i in range(200) if CIFAR10_CLASSES[i % 10] in VEHICLES]
    assert names == [VEHICLES[label] for label in made.labels]
    others = shown[torch.arange(4) != made.clusters[:, None]]
    assert {CIFAR10_CLASSES[c] for c in classes[others]} <= set(ANIMALS)
    assert set(made.clusters.tolist()) == set(range(len(QUADRANTS)))


def test_animals_are_used_evenly():
    pixels, classes = told_apart(200)
    shown = quadrants(vehicle_mosaics(pixels, classes, split="train", seed=0).pixels).flatten().bincount(minlength=200)
    animals = torch.tensor([CIFAR10_CLASSES[c] in ANIMALS for c in classes])
    assert shown[animals].tolist() == [2] * 120  # 3 · 80 places for 120 animals


def test_seed_and_split_alone_decide_the_mosaics():
    pixels, classes = told_apart(200)
    first, again, other, test = (
        vehicle_mosaics(pixels, classes, split=split, seed=seed)
        for split, seed in (("train", 0), ("train", 0), ("train", 1), ("test", 0))
    )
    assert torch.equal(first.pixels, again.pixels)
    assert not torch.equal(first.pixels, other.pixels)
    assert not torch.equal(first.clusters, test.clusters)


def test_mosaics_without_animals_are_refused():
    pixels, _ = told_apart(3)
    with pytest.raises(ValueError, match="3 vehicles and 0 animals among the 3 images of the test split"):
        vehicle_mosaics(pixels, torch.tensor([0, 1, 9]), split="test", seed=0)


def test_an_image_lies_whole_and_untouched_on_its_background():
    # more images than are laid down at a time would take long; places are what matters
    pixels = torch.randint(128, (300, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plants = torch.full((7, 3, 32, 32), 200, dtype=torch.uint8)
    classes = torch.arange(300) % 10
    made = on_backgrounds(pixels, classes, plants, split="train", seed=0)
    inside = made.pixels < 200
    assert torch.equal(made.pixels[inside].view(-1), downscale(pixels).view(-1))
    rows, columns = inside[:, 0].any(2), inside[:, 0].any(1)
    assert rows.sum(1).tolist() == columns.sum(1).tolist() == [16] * 300
    tops, lefts = rows.int().argmax(1), columns.int().argmax(1)
    assert set(tops.tolist()) == set(lefts.tolist()) == set(range(17))
    assert torch.equal(made.labels, classes)


def test_images_beyond_one_chunk_are_laid_down_too(monkeypatch: pytest.MonkeyPatch):
    pixels, plants = torch.zeros(5, 1, 4, 4, dtype=torch.uint8), torch.ones(2, 1, 4, 4, dtype=torch.uint8)
    whole = on_backgrounds(pixels, torch.zeros(5).long(), plants, split="test", seed=3).pixels
    monkeypatch.setattr("moesaic.papers.chowdhury2023.data.cifar_mosaics._CHUNK", 2)
    assert torch.equal(on_backgrounds(pixels, torch.zeros(5).long(), plants, split="test", seed=3).pixels, whole)
    assert (whole == 0).sum((1, 2, 3)).tolist() == [4] * 5


def test_backgrounds_are_used_evenly_and_stay_as_they_are():
    pixels = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)
    plants = torch.arange(1, 4, dtype=torch.uint8)[:, None, None, None].expand(3, 1, 4, 4).contiguous()
    made = on_backgrounds(pixels, torch.zeros(6).long(), plants, split="train", seed=0)
    assert made.pixels.amax((1, 2, 3)).sort().values.tolist() == [1, 1, 2, 2, 3, 3]
    assert plants.amin((1, 2, 3)).tolist() == [1, 2, 3]


def test_backgrounds_of_another_size_are_refused():
    pixels, plants = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"backgrounds are \(3, 64, 64\) and images \(3, 32, 32\)"):
        on_backgrounds(pixels, torch.zeros(1).long(), plants, split="train", seed=0)
    with pytest.raises(ValueError, match="no background for the 1 images of the train split"):
        on_backgrounds(pixels, torch.zeros(1).long(), plants[:0], split="train", seed=0)


@pytest.mark.parametrize("count", [2, 3, 100])
def test_splits_share_no_background(count: int):
    train, test = (set(split_backgrounds(count, split, seed=5).tolist()) for split in ("train", "test"))
    assert not train & test
    assert train | test == set(range(count))
    assert train
    assert test


def test_one_background_is_too_few():
    with pytest.raises(ValueError, match="count=1; at least 2 backgrounds"):
        split_backgrounds(1, "train", seed=0)
