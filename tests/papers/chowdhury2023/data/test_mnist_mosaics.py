"""Mosaics hold what they say they hold, and the two splits have no digit in common."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.data import Split
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitMosaics, digit_mosaics

SPLITS: tuple[Split, ...] = ("train", "test")


def distinct(patches: Tensor) -> set[bytes]:
    """The digits that occur on the patches, by their pixels."""
    return {patch.tobytes() for patch in patches.flatten(0, 1).numpy()}


def same(one: DigitMosaics, other: DigitMosaics) -> bool:
    return (
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and torch.equal(one.discriminative, other.discriminative)
        and torch.equal(one.digits, other.digits)
    )


@pytest.fixture(scope="module")
def digit_of_pixels(mlxtends_digits: tuple[np.ndarray, np.ndarray]) -> dict[bytes, int]:
    """Which digit the source says an image is."""
    pixels, digits = mlxtends_digits
    return {row.tobytes(): int(digit) for row, digit in zip((pixels / 255).astype(np.float32), digits, strict=True)}


@pytest.mark.parametrize("split", SPLITS)
def test_shapes_types_and_range(split: Split):
    mosaics = digit_mosaics(7, split=split, seed=0)
    assert len(mosaics) == 7
    assert mosaics.images.shape == (7, 1, 112, 112)
    assert mosaics.images.dtype == torch.float32
    assert mosaics.images.min() == 0
    assert 0.9 < mosaics.images.max() <= 1
    for integers, shape in ((mosaics.labels, (7,)), (mosaics.discriminative, (7,)), (mosaics.digits, (7, 16))):
        assert integers.dtype == torch.int64
        assert integers.shape == shape


@pytest.mark.parametrize("grid", [2, 3, 4])
@pytest.mark.parametrize("split", SPLITS)
def test_exactly_one_digit_is_discriminative_and_it_is_the_label(split: Split, grid: int):
    mosaics = digit_mosaics(300, split=split, seed=3, grid=grid)
    decides = mosaics.digits < 2
    assert (decides.sum(1) == 1).all()
    assert torch.equal(decides.int().argmax(1), mosaics.discriminative)
    assert torch.equal(mosaics.digits[decides], mosaics.labels)


@pytest.mark.parametrize("split", SPLITS)
def test_every_patch_shows_the_digit_it_is_said_to_show(split: Split, digit_of_pixels: dict[bytes, int]):
    mosaics = digit_mosaics(200, split=split, seed=1)
    shown = [digit_of_pixels[patch.tobytes()] for patch in mosaics.patches.flatten(0, 1).numpy()]
    assert shown == mosaics.digits.flatten().tolist()


def test_patches_are_the_cells_of_the_image_row_by_row():
    mosaics = digit_mosaics(2, split="train", seed=0, grid=3)
    assert mosaics.patches.shape == (2, 9, 784)
    for n in range(9):
        row, column = divmod(n, 3)
        cell = mosaics.images[:, 0, 28 * row : 28 * (row + 1), 28 * column : 28 * (column + 1)]
        assert torch.equal(mosaics.patches[:, n], cell.flatten(1))


def test_the_splits_share_no_digit_whatever_the_seeds():
    # 1000 mosaics use up every digit of their split, so this compares the splits as a whole
    train = distinct(digit_mosaics(1000, split="train", seed=0).patches)
    test = distinct(digit_mosaics(1000, split="test", seed=5).patches)
    assert (len(train), len(test)) == (4000, 1000)
    assert not train & test


@pytest.mark.parametrize(("count", "ones"), [(1, 0), (7, 3), (100, 50)])
def test_labels_are_balanced(count: int, ones: int):
    assert digit_mosaics(count, split="train", seed=2).labels.sum() == ones


def test_the_discriminative_digit_may_lie_anywhere():
    places = digit_mosaics(800, split="train", seed=0).discriminative.bincount(minlength=16)
    assert places.min() > 25  # 50 are expected on each of the 16 places
    assert places.max() < 80


def test_no_digit_comes_again_before_all_others_of_its_sort_came():
    mosaics = digit_mosaics(200, split="test", seed=0)  # the split has 100 zeros and 100 ones
    decisive = mosaics.patches[torch.arange(200), mosaics.discriminative]
    assert len(distinct(decisive[:, None])) == 200


@pytest.mark.parametrize("split", SPLITS)
def test_a_seed_gives_the_same_mosaics_again_and_another_seed_others(split: Split):
    mosaics = digit_mosaics(20, split=split, seed=4)
    assert same(mosaics, digit_mosaics(20, split=split, seed=4))
    other = digit_mosaics(20, split=split, seed=5)
    assert not torch.equal(mosaics.images, other.images)
    assert not torch.equal(mosaics.labels, other.labels)
    assert not torch.equal(mosaics.discriminative, other.discriminative)


def test_the_splits_of_one_seed_are_laid_differently():
    train, test = (digit_mosaics(40, split=split, seed=0) for split in SPLITS)
    assert not torch.equal(train.labels, test.labels)
    assert not torch.equal(train.discriminative, test.discriminative)


def test_the_global_generators_are_neither_used_nor_moved():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    digit_mosaics(5, split="train", seed=0)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"count": 0}, ValueError, r"count=0; it must be at least 1"),
        ({"count": 2.5}, TypeError, r"count=2.5 is a float; it must be a whole number"),
        ({"split": "tset"}, ValueError, r"split='tset' is unknown; use 'train' or 'test' \(did you mean 'test'\?\)"),
        ({"grid": 0}, ValueError, r"grid=0; it must be at least 1"),
        ({"grid": 1}, ValueError, r"grid=1 leaves no room for digits around .*; use 2 or more"),
        ({"seed": -1}, ValueError, r"seed=-1; it must be 0 or more"),
        ({"seed": None}, TypeError, r"seed=None is a NoneType; it must be a whole number"),
    ],
)
def test_impossible_mosaics_are_refused_with_the_way_out(wrong: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"count": 4, "split": "train", "seed": 0, **wrong}
    with pytest.raises(error, match=rf"^digit_mosaics: {message}$"):
        digit_mosaics(**arguments)
