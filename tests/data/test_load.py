"""Images from anywhere, as one dataset: scaled, varied, message apart by a digest, and skipped files message once."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.data import load as load_module
from moesaic.data.builtin_datasets import BuiltinDataset
from moesaic.data.decoded_cache import DecodedCache
from moesaic.data.image_dataset import ImageSplits, LabelledImages
from moesaic.data.load import build_dataset, load_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "pets.v2" / kind).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets.v2" / kind / f"{number}.png")
    return tmp_path / "pets.v2"


def load(folder: Path | str, tmp_path: Path, **options):
    return load_images(folder, **{"size": 16, "cache_dir": tmp_path / "cache"} | options)


def test_a_folder_is_a_task_of_its_name(folder, tmp_path):
    dataset = load(folder, tmp_path)
    assert (dataset.name, dataset.class_names, dataset.num_classes) == ("pets.v2", ("cat", "dog"), 2)
    assert (len(dataset.train), len(dataset.test)) == (16, 4)
    assert dataset.skipped == ()


def test_standard_images_have_mean_0_and_variance_1(folder, tmp_path):
    dataset = load(folder, tmp_path)
    seen = dataset.eval_transform(dataset.train.pixels, torch.zeros(16, 3))
    assert seen.mean((0, 2, 3)).abs().max() < 1e-4
    assert (seen.var((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-3


def test_unit_images_go_from_0_to_1(folder, tmp_path):
    dataset = load(folder, tmp_path, normalize="unit")
    assert torch.equal(
        dataset.eval_transform(dataset.test.pixels, torch.zeros(4, 3)), dataset.test.pixels.float() / 255
    )


def test_the_scale_of_a_task_is_its_view_and_images_to_test_on_are_never_varied(folder, tmp_path):
    dataset = load(folder, tmp_path, augment="flip-crop")
    rand = torch.zeros(4, 3)
    assert dataset.normalize is not None
    assert torch.equal(dataset.eval_transform(dataset.test.pixels, rand), dataset.normalize(dataset.test.pixels))
    assert not torch.equal(
        dataset.train_transform(dataset.test.pixels, rand), dataset.eval_transform(dataset.test.pixels, rand)
    )


def test_a_channel_that_does_not_vary_is_left_as_wide_as_it_is():
    pixels = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    images = LabelledImages(pixels, torch.arange(4) % 2, torch.arange(4) % 2)
    dataset = build_dataset(ImageSplits(images, images, ("a", "b"), ("a", "b")), "grey")
    assert dataset.normalize is not None
    assert (dataset.normalize.mean, dataset.normalize.std) == ((0.2,), (1.0,))


def test_the_mean_of_many_images_is_that_of_some_spread_over_all(monkeypatch):
    monkeypatch.setattr(load_module, "_MAX_STATISTICS_IMAGES", 10)
    pixels = torch.arange(100, dtype=torch.uint8)[:, None, None, None]
    images = LabelledImages(pixels, torch.arange(100) % 2, torch.arange(100) % 2)
    dataset = build_dataset(ImageSplits(images, images, ("a", "b"), ("a", "b")), "ramp")
    assert dataset.normalize is not None
    assert dataset.normalize.mean[0] == pytest.approx(45 / 255, abs=1e-6)


def test_the_digest_is_the_same_wherever_images_come_from(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    packed = shutil.make_archive(str(tmp_path / "some"), "zip", folder)
    digest = load(folder, tmp_path).digest
    assert len(digest) == 16
    assert load(moved, tmp_path).digest == load(packed, tmp_path).digest == digest
    assert load(folder, tmp_path, augment="flip", normalize="unit").digest == digest


def test_the_digest_does_not_depend_on_the_memory_format(folder, tmp_path):
    dataset = load(folder, tmp_path)
    plain = [
        LabelledImages(part.pixels.contiguous(), part.labels, part.clusters) for part in (dataset.train, dataset.test)
    ]
    assert (
        build_dataset(ImageSplits(*plain, dataset.class_names, dataset.cluster_names), "other").digest == dataset.digest
    )


def test_other_images_labels_names_or_parts_have_another_digest(folder, tmp_path):
    digests = [load(folder, tmp_path).digest, load(folder, tmp_path, seed=1).digest]
    digests.append(load(folder, tmp_path, size=8).digest)
    (folder / "cat" / "0.png").rename(folder / "dog" / "other.png")
    digests.append(load(folder, tmp_path).digest)
    (folder / "dog").rename(folder / "fox")
    digests.append(load(folder, tmp_path).digest)
    assert len(set(digests)) == 5


def test_a_task_is_reported_with_what_was_skipped(folder, tmp_path):
    for number in range(12):
        (folder / "cat" / f"bad{number:02}.jpg").write_bytes(b"bad")
    messages: list[str] = []
    dataset = load(folder, tmp_path, log=messages.append)
    assert len(dataset.skipped) == 12
    assert dataset.skipped[0].path.endswith("cat/bad00.jpg")
    many = f"{len(dataset.train)} training images and {len(dataset.test)} test images"
    assert messages[0] == f"pets.v2: {many} of 16×16 pixels in colour; 2 classes"
    assert len(dataset.train) + len(dataset.test) == 20
    lines = messages[1].splitlines()
    assert lines[0] == "skipped 12 files:"
    assert len(lines) == 12
    assert lines[-1] == "  and 2 more"


def test_the_cache_is_made_where_it_is_reported(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "mine"))
    load_images(folder, size=8)
    assert len(list((tmp_path / "mine").iterdir())) == 2


def test_a_name_is_looked_up_before_folders(folder, tmp_path, monkeypatch):
    asked: list[object] = []

    def named(data_dir: Path | None, size: int | None, cache: DecodedCache, seed: int) -> ImageSplits:
        asked.extend([data_dir, size, seed])
        dataset = load(folder, tmp_path)
        return ImageSplits(dataset.train, dataset.test, dataset.class_names, dataset.cluster_names)

    monkeypatch.setattr(load_module, "DATASETS", {"pets": BuiltinDataset(named, lambda data_dir: None)})
    (tmp_path / "pets").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("pets", tmp_path, data_dir=tmp_path / "data", seed=3).name == "pets"
    assert asked == [tmp_path / "data", 16, 3]
    with pytest.raises(ValueError, match="pets: has no files"):
        load("./pets", tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "cifar",
            ValueError,
            r"there is no folder or zip file 'cifar'; check the path, or name one of the datasets 'mnist', .*"
            r"did you mean 'cifar10'",
        ),
        (
            "no/such/folder",
            FileNotFoundError,
            "there is no folder or zip file no/such/folder; give one with a subfolder",
        ),
        (Path("mnits"), FileNotFoundError, "there is no folder or zip file mnits"),
    ],
)
def test_what_is_not_there_is_reported(tmp_path, source, error, message):
    with pytest.raises(error, match=message):
        load(source, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "crop"}, "augment='crop' is unknown; use 'none', 'flip', 'flip-crop' or 'strong'"),
        ({"normalize": "units"}, r"normalize='units' is unknown; use 'unit' or 'standard' \(did you mean 'unit'"),
        ({"size": 0}, "size=0; it must be at least 1"),
        ({"seed": -1}, "seed=-1; it must be from 0"),
    ],
)
def test_wrong_options_are_reported(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load(folder, tmp_path, **options)
