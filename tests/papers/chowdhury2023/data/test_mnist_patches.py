"""Digits for trials: one of a sample decides its class, every trial has its own, and no split has the other's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.data import Split, load_digits
from moesaic.papers.chowdhury2023.data.mnist_patches import DigitPatches
from moesaic.papers.engine.trial_datasets import PatchSource, TrialData

SPLITS: tuple[Split, ...] = ("train", "test")


def kinds(data: TrialData, split: Split, data_dir: Path | None = None) -> Tensor:
    """(T, B, N): which digit lies on each place."""
    return torch.from_numpy(load_digits(split, data_dir).labels)[data.index]


def rows(pool: Tensor) -> set[bytes]:
    return {row.tobytes() for row in pool.numpy()}


def test_it_is_a_source_of_patches():
    source: PatchSource = DigitPatches(patches=9, classes=3)
    assert (source.classes, source.patches, source.dim) == (3, 9, 784)


@pytest.mark.parametrize("split", SPLITS)
def test_shapes_types_and_range(split: Split):
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
        "moesaic.papers.engine.patch_sampling._BLOCK", 10_000
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


def test_the_discriminative_digit_may_lie_anywhere():
    data = DigitPatches().draw(keyed_random.keys(0, range(20)), 400, "test")
    for label in (0, 1):
        places = data.discriminative[data.labels == label].bincount(minlength=16)
        assert places.min() > 190  # 250 are expected on each of the 16 places, with a deviation of 15
        assert places.max() < 310


@pytest.mark.parametrize("data", [None, "mnist"])
def test_no_digit_comes_again_before_all_others_of_its_sort_came(data: str | None, request: pytest.FixtureRequest):
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
