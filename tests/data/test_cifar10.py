"""CIFAR-10's files: read as they are, and refused with a reason when they are not whole."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from moesaic.data.cifar10 import CIFAR10_CLASSES, find_cifar10, load_cifar10
from moesaic.papers.chen2022.experiments_images import cifar10_digest

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
IMAGES = 4
ROW = 3073


def batch(number: int, images: int = IMAGES) -> bytes:
    rows = np.random.default_rng(number).integers(256, size=(images, ROW), dtype=np.uint8)
    rows[:, 0] = (np.arange(images) + number) % 10
    return rows.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cifar-10-batches-bin"
    made.mkdir()
    for number, name in enumerate(NAMES):
        (made / name).write_bytes(batch(number))
    return made


def archive(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = IMAGES * ROW
            tar.addfile(member, io.BytesIO(batch(number)))


def test_training_images_are_those_of_five_files_in_order(folder):
    train = load_cifar10("train", folder, images_per_file=IMAGES)
    assert len(train) == 5 * IMAGES
    assert train.pixels.shape == (20, 3, 32, 32)
    third = np.frombuffer(batch(2), np.uint8).reshape(IMAGES, ROW)
    assert np.array_equal(train.pixels[8:12].reshape(IMAGES, -1), third[:, 1:])
    assert np.array_equal(train.labels[8:12], third[:, 0])


def test_a_pixel_is_where_the_format_puts_it(folder):
    test = load_cifar10("test", folder, images_per_file=IMAGES)
    content = batch(5)
    assert test.pixels[1, 2, 3, 4] == content[ROW + 1 + 2 * 1024 + 3 * 32 + 4]


def test_the_folder_its_parent_and_the_archive_give_the_same(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    archive(elsewhere / "cifar-10-binary.tar.gz", NAMES)
    places = [folder, folder.parent, elsewhere, elsewhere / "cifar-10-binary.tar.gz"]
    loaded = [load_cifar10("train", place, images_per_file=IMAGES) for place in places]
    assert all(np.array_equal(loaded[0].pixels, each.pixels) for each in loaded)
    assert len({cifar10_digest(place) for place in places}) == 1


def test_the_digest_tells_other_images_apart(folder):
    before = cifar10_digest(folder)
    (folder / "test_batch.bin").write_bytes(batch(6))
    assert cifar10_digest(folder) != before


def test_a_truncated_file_is_named_with_both_sizes(folder):
    (folder / "data_batch_3.bin").write_bytes(batch(2)[:-1])
    with pytest.raises(
        ValueError, match=r"data_batch_3\.bin: has 12291 bytes, expected 4 images of 3073 bytes = 12292"
    ):
        load_cifar10("train", folder, images_per_file=IMAGES)


def test_a_file_of_cifars_own_size_is_expected_by_default(folder):
    with pytest.raises(ValueError, match=r"test_batch\.bin: has 12292 bytes, expected 10000 images .* = 30730000"):
        load_cifar10("test", folder)


def test_a_missing_file_of_several_is_named(folder):
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no data_batch_4\.bin"):
        load_cifar10("train", folder, images_per_file=IMAGES)


def test_a_missing_folder_is_reported_with_what_was_looked_for_and_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        find_cifar10(tmp_path)
    for part in ("data_batch_1.bin", str(tmp_path / "cifar-10-batches-bin"), "cifar-10-binary.tar.gz", "https://"):
        assert part in str(error.value)


def test_a_class_beyond_the_last_is_refused(folder):
    (folder / "test_batch.bin").write_bytes(b"\x0b" + batch(5)[1:])
    with pytest.raises(ValueError, match="image 0 has label 11, labels go from 0 to 9"):
        load_cifar10("test", folder, images_per_file=IMAGES)


@pytest.mark.parametrize("keep", [40, 2000])
def test_a_damaged_archive_is_reported(tmp_path, keep):
    path = tmp_path / "cifar-10-binary.tar.gz"
    archive(path, NAMES)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged archive"):
        load_cifar10("train", tmp_path, images_per_file=IMAGES)


def test_an_archive_that_is_none_is_reported(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"no archive", mtime=0))
    with pytest.raises(ValueError, match="damaged archive"):
        load_cifar10("test", tmp_path)


def test_an_archive_without_a_file_is_reported(tmp_path):
    archive(tmp_path / "cifar-10-binary.tar.gz", NAMES[:2])
    with pytest.raises(FileNotFoundError, match=r"has no test_batch\.bin"):
        load_cifar10("test", tmp_path, images_per_file=IMAGES)


def test_an_unknown_split_is_refused(folder):
    with pytest.raises(ValueError, match="split='valid' is unknown"):
        load_cifar10("valid", folder)  # pyright: ignore[reportArgumentType]


def test_there_are_ten_classes_of_which_six_is_the_frog():
    assert len(CIFAR10_CLASSES) == 10
    assert CIFAR10_CLASSES[6] == "frog"
