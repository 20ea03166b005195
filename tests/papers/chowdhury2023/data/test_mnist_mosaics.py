"""Mosaics of digits: one digit determines the class, trials have their own samples, and splits share no digit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data import Split, load_digits
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitMosaics, DigitPatches, digit_mosaics
from moesaic.papers.engine.trial_datasets import PatchSource, TrialData

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


def kinds(data: TrialData, split: Split, data_dir: Path | None = None) -> Tensor:
    """(T, B, N): which digit lies on each place."""
    return torch.from_numpy(load_digits(split, data_dir).labels)[data.index]


def rows(pool: Tensor) -> set[bytes]:
    return {row.tobytes() for row in pool.numpy()}


def test_it_is_a_source_of_patches():
    source: PatchSource = DigitPatches(patches=9, classes=3)
    assert (source.classes, source.patches, source.dim) == (3, 9, 784)


@pytest.mark.parametrize("split", SPLITS)
def test_shapes_types_and_range_in_trials(split: Split):
    data = DigitPatches(patches=5).draw(keyed_random.keys(0, range(3)), 8, split)
    assert len(data) == 3
    assert data.pool.shape == ({"train": 4000, "test": 1000}[split], 784)
    assert data.pool.dtype == torch.float32
    assert (data.pool.min(), data.pool.max()) == (0, 1)
    for integers, shape in ((data.index, (3, 8, 5)), (data.labels, (3, 8)), (data.discriminative, (3, 8))):
        assert integers.dtype == torch.int64
        assert integers.shape == shape
    assert data.patches.shape == (3, 8, 5, 784)


@pytest.mark.parametrize("classes", [2, 3, 5, 9])
@pytest.mark.parametrize("split", SPLITS)
def test_exactly_one_digit_decides_and_it_is_the_label(split: Split, classes: int):
    data = DigitPatches(classes=classes).draw(keyed_random.keys(1, range(4)), 20 * classes, split)
    shown = kinds(data, split)
    decides = shown < classes
    assert (decides.sum(2) == 1).all()
    assert torch.equal(decides.int().argmax(2), data.discriminative)
    assert torch.equal(shown[decides].view_as(data.labels), data.labels)


@pytest.mark.parametrize("split", SPLITS)
def test_the_rows_of_the_pool_are_the_digits_of_the_split(split: Split):
    pool = DigitPatches().draw(keyed_random.keys(0, [0]), 2, split).pool
    assert torch.equal(pool, torch.from_numpy(load_digits(split).pixels).float() / 255)


@pytest.mark.parametrize("data", [None, "mnist"])
def test_the_splits_share_no_digit(data: str | None, request: pytest.FixtureRequest):
    source = DigitPatches(data and request.getfixturevalue(data))
    train, test = (source.draw(keyed_random.keys(0, [0]), 2, split).pool for split in SPLITS)
    assert len(rows(train)) == len(train)
    assert not rows(train) & rows(test)


def test_all_draws_of_a_split_share_one_pool(mnist: Path):
    pool = DigitPatches(mnist).draw(keyed_random.keys(0, [0]), 2, "train").pool
    again = DigitPatches(str(mnist), patches=4, classes=3).draw(keyed_random.keys(1, range(5)), 6, "train").pool
    assert again is pool


@pytest.mark.parametrize("classes", [2, 4])
def test_every_trial_has_as_many_samples_of_each_class_in_an_order_of_its_own(classes: int):
    labels = DigitPatches(classes=classes).draw(keyed_random.keys(0, range(10)), 10 * classes, "train").labels
    counts = torch.stack([(labels == label).sum(1) for label in range(classes)])
    assert (counts == 10).all()
    assert len(labels.unique(dim=0)) == 10


@pytest.mark.parametrize("company", [[3], [2, 3, 4], list(range(40)), [9, 3]])
@pytest.mark.parametrize("split", SPLITS)
def test_a_trial_gets_the_same_samples_in_any_company(split: Split, company: list[int], monkeypatch: Any):
    monkeypatch.setattr(
        "moesaic.papers.engine.trial_datasets._BLOCK", 10_000
    )  # several blocks of trials, of several sizes
    source, me = DigitPatches(), company.index(3)
    alone = source.draw(keyed_random.keys(7, [3]), 30, split)
    together = source.draw(keyed_random.keys(7, company), 30, split)
    assert torch.equal(alone.index[0], together.index[me])
    assert torch.equal(alone.labels[0], together.labels[me])
    assert torch.equal(alone.discriminative[0], together.discriminative[me])


def test_trials_seeds_and_splits_differ(mnist: Path):
    source = DigitPatches(mnist)  # 48 irrelevant digits for training, 24 for testing
    several = [source.draw(keyed_random.keys(seed, range(3)), 20, split) for seed in (0, 1) for split in SPLITS]
    for field in ("index", "labels", "discriminative"):
        trials = torch.cat([getattr(data, field) for data in several]).flatten(1)
        assert len(trials.unique(dim=0)) == 12


def test_the_discriminative_digit_may_lie_anywhere_in_trials():
    data = DigitPatches().draw(keyed_random.keys(0, range(20)), 400, "test")
    for label in (0, 1):
        places = data.discriminative[data.labels == label].bincount(minlength=16)
        assert places.min() > 190  # 250 are expected on each of the 16 places, with a deviation of 15
        assert places.max() < 310


@pytest.mark.parametrize("data", [None, "mnist"])
def test_no_digit_comes_again_before_all_others_of_its_sort_in_trials(data: str | None, request: pytest.FixtureRequest):
    folder: Path | None = data and request.getfixturevalue(data)
    source = load_digits("test", folder).labels
    index = DigitPatches(folder).draw(keyed_random.keys(0, range(3)), 100, "test").index
    for trial in index:
        used = trial.flatten().bincount(minlength=len(source)).numpy()
        for sort in (source == 0, source == 1, source > 1):
            assert used[sort].max() - used[sort].min() <= 1


def test_irrelevant_digits_are_alike_for_both_classes():
    data = DigitPatches().draw(keyed_random.keys(0, range(20)), 200, "train")
    shown = kinds(data, "train")
    shares = [shown[data.labels == label].flatten().bincount(minlength=10)[2:] / 30_000 for label in (0, 1)]
    assert torch.stack(shares).sub(1 / 8).abs().max() < 0.01  # the deviation is 0.002


def test_the_paths_of_missing_files_are_told_before_anything_is_drawn(own_mnist: Callable[..., Path]):
    folder = own_mnist()
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"no t10k-labels-idx1-ubyte\[\.gz\] in"):
        DigitPatches(folder)


def test_files_without_a_digit_that_is_needed_are_refused(own_mnist: Callable[..., Path]):
    few = DigitPatches(own_mnist(train=5, test=1))  # digits 0 to 4, and a 0
    assert few.draw(keyed_random.keys(0, [0]), 2, "train").index.shape == (1, 2, 16)
    with pytest.raises(
        ValueError, match=r"^DigitPatches: the test digits in data_dir='.*' have no digit 1; classes=2 needs"
    ):
        few.draw(keyed_random.keys(0, [0]), 2, "test")
    with pytest.raises(ValueError, match=r"have no digit 5 to 9; classes=5"):
        DigitPatches(few.data_dir, classes=5).draw(keyed_random.keys(0, [0]), 5, "train")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"patches": 1}, ValueError, r"patches=1 leaves no room for patches around .*; use 2 or more"),
        ({"patches": 1.5}, TypeError, r"patches=1.5 is a float; it must be a whole number"),
        ({"classes": 1}, ValueError, r"classes=1, but 2 ≤ classes ≤ 9: .*"),
        ({"classes": 10}, ValueError, r"classes=10, but 2 ≤ classes ≤ 9: .*"),
    ],
)
def test_impossible_sources_are_refused(wrong: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=rf"^DigitPatches: {message}$"):
        DigitPatches(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"samples": 7}, ValueError, r"samples=7 is not divisible by classes=2, so .* balanced; use 6 or 8"),
        ({"samples": 1}, ValueError, r"samples=1 is not divisible by classes=2, so .* balanced; use 2"),
        ({"samples": 0}, ValueError, r"samples=0; it must be at least 1"),
        ({"split": "valid"}, ValueError, r"split='valid' is unknown; use 'train' or 'test'"),
        ({"keys": torch.zeros(2, 2).long()}, ValueError, r"keys have the shape \(2, 2\) and are torch.int64; .*"),
        ({"keys": torch.zeros(2)}, ValueError, r"keys have the shape \(2,\) and are torch.float32; .*"),
    ],
)
def test_impossible_draws_are_refused(wrong: dict[str, Any], error: type[Exception], message: str):
    arguments: dict[str, Any] = {"keys": keyed_random.keys(0, [0]), "samples": 4, "split": "train", **wrong}
    with pytest.raises(error, match=rf"^DigitPatches: {message}$"):
        DigitPatches().draw(**arguments)


@pytest.mark.gpu
def test_a_draw_on_the_gpu_is_that_on_the_cpu(mnist: Path):
    source = DigitPatches(mnist)
    here, there = (source.draw(keyed_random.keys(0, range(9), device), 50, "train") for device in ("cpu", "cuda"))
    for field in ("pool", "index", "labels", "discriminative"):
        assert getattr(there, field).device.type == "cuda"
        assert torch.equal(getattr(here, field), getattr(there, field).cpu())
