"""Images that someone names become what the network takes, and what is no image is message."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moesaic.data.input_images import read_input_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind, colour in (("cat", "red"), ("dog", "blue"), ("other", "white")):
        (tmp_path / kind / "deep").mkdir(parents=True)
        Image.new("RGB", (12, 9), colour).save(tmp_path / kind / "a.png")
        Image.new("RGB", (12, 9), colour).save(tmp_path / kind / "deep" / "b.png")
    return tmp_path


def test_files_and_folders_are_read_in_the_order_given(folder: Path):
    found = read_input_images([folder / "dog" / "a.png", folder / "cat"], (3, 4, 4), ["cat", "dog"])
    assert [Path(name).relative_to(folder).as_posix() for name in found.names] == [
        "dog/a.png",
        "cat/a.png",
        "cat/deep/b.png",
    ]
    assert found.pixels.shape == (3, 3, 4, 4)
    assert found.pixels[0, :, 0, 0].tolist() == [0, 0, 255]
    assert found.labels == (1, 0, 0)


def test_the_class_is_that_of_the_nearest_folder_with_the_name_of_one(folder: Path):
    (folder / "cat" / "dog").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "cat" / "dog" / "c.png")
    found = read_input_images([folder / "cat" / "dog", folder / "other" / "a.png"], (3, 4, 4), ["cat", "dog"])
    assert found.labels == (1, None)


def test_a_network_for_grey_images_gets_grey_ones(folder: Path):
    found = read_input_images([folder / "cat" / "a.png"], (1, 4, 4))
    assert found.pixels.shape == (1, 1, 4, 4)
    assert np.unique(found.pixels.numpy()).tolist() == [76]  # 0.299 · 255


def test_what_is_no_image_is_skipped_and_reported(folder: Path):
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "cat" / "cut.png").write_bytes((folder / "cat" / "a.png").read_bytes()[:40])
    (folder / "cat" / ".hidden.png").write_bytes(b"")
    found = read_input_images([folder / "cat"], (3, 4, 4))
    assert (len(found.names), found.files) == (2, 4)
    assert {Path(each.path).name for each in found.skipped} == {"notes.txt", "cut.png"}
    assert all(each.reason for each in found.skipped)


def test_of_many_files_some_are_drawn_by_the_seed(folder: Path):
    for i in range(20):
        Image.new("RGB", (4, 4), (i, i, i)).save(folder / "cat" / f"{i}.png")
    drawn = [read_input_images([folder / "cat"], (3, 4, 4), max_images=5, seed=seed).names for seed in (0, 0, 1)]
    assert len(drawn[0]) == 5
    assert drawn[0] == drawn[1] != drawn[2]


def test_that_nothing_can_be_read_is_an_error(folder: Path):
    bad = folder / "bad.jpg"
    bad.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"none of the 1 files is an image that can be read, for example: .*bad\.jpg is empty"
    ):
        read_input_images([bad], (3, 4, 4))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no file in"):
        read_input_images([folder / "empty"], (3, 4, 4))
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        read_input_images([folder / "missing.png"], (3, 4, 4))


def test_a_network_that_takes_no_squares_is_refused(folder: Path):
    with pytest.raises(ValueError, match="of 3 channels and 4×6 pixels; image files become squares"):
        read_input_images([folder], (3, 4, 6))


def test_zip_files_are_read_like_folders(folder: Path):
    with zipfile.ZipFile(folder / "pets.zip", "w") as archive:
        for name in ("cat/a.png", "dog/deep/b.png"):
            archive.write(folder / name, name)
        archive.writestr("notes.txt", "no image")
    found = read_input_images([folder / "pets.zip"], (3, 4, 4), ["cat", "dog"])
    assert found.names == (f"{folder}/pets.zip/cat/a.png", f"{folder}/pets.zip/dog/deep/b.png")
    assert found.labels == (0, 1)
    assert [each.path for each in found.skipped] == [f"{folder}/pets.zip/notes.txt"]
    (folder / "bad.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"bad\.zip: is not a complete zip file"):
        read_input_images([folder / "bad.zip"], (3, 4, 4))
