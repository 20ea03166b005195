"""Folders of one's own images: what is a class, what is held out, and what is message about bad ones."""

import shutil
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import torch
from PIL import Image

from moesaic.data.decoded_cache import DecodedCache
from moesaic.data.image_dataset import ImageSplits
from moesaic.data.image_folder import load_folder


def image(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (shade, shade, shade)).save(path)


def classes(base: Path, counts: dict[str, int], start: int = 0) -> Path:
    """A folder with so many images of each class, each of a shade of its own."""
    for name, count in counts.items():
        for number in range(count):
            image(base / name / f"{number:03}.png", start)
            start += 1
    return base


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return DecodedCache(tmp_path / "cache")


def shades(parts: ImageSplits) -> tuple[list[int], list[int]]:
    train, test = (part.pixels[:, 0, 0, 0].tolist() for part in (parts.train, parts.test))
    return train, test


def test_every_folder_is_a_class_in_the_order_of_names(tmp_path, cache):
    parts = load_folder(classes(tmp_path / "data", {"b": 10, "a": 5, "C": 5}), 4, cache, seed=0)
    assert parts.class_names == parts.cluster_names == ("C", "a", "b")
    assert parts.train.labels.bincount().tolist() == [4, 4, 8]
    assert parts.test.labels.bincount().tolist() == [1, 1, 2]
    assert parts.train.clusters.tolist() == parts.train.labels.tolist()
    assert parts.train.pixels.shape == (16, 3, 4, 4)


def test_labels_count_the_names_of_classes_and_not_their_paths(tmp_path, cache):
    parts = load_folder(classes(tmp_path / "data", {"a": 5, "a b": 5}), 4, cache, seed=0)
    assert parts.class_names == ("a", "a b")
    assert parts.train.labels.tolist() == [int(shade >= 5) for shade in shades(parts)[0]]


def test_labels_belong_to_their_images(tmp_path, cache):
    parts = load_folder(classes(tmp_path / "data", {"a": 20, "b": 30, "c": 25}), 4, cache, seed=3)
    for part, seen in zip((parts.train, parts.test), shades(parts), strict=True):
        assert part.labels.tolist() == [0 if shade < 20 else 1 if shade < 50 else 2 for shade in seen]


def test_a_fifth_of_each_class_is_held_out_by_seed_and_nothing_is_in_both(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 50, "b": 100})
    first, again, other = (shades(load_folder(folder, 4, cache, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert set(first[1]) != set(other[1])
    for train, test in (first, other):
        assert len(test) == 30
        assert sorted([*train, *test]) == list(range(150))


def test_the_parts_of_the_default_seed_are_views_of_the_store(tmp_path, cache):
    parts = load_folder(classes(tmp_path / "data", {"a": 20, "b": 20}), 4, cache, seed=0)
    after_training = parts.train.pixels.data_ptr() + parts.train.pixels.numel()
    assert parts.test.pixels.data_ptr() == after_training


def test_another_seed_decodes_nothing_again(tmp_path, cache, monkeypatch):
    folder = classes(tmp_path / "data", {"a": 20, "b": 20})
    load_folder(folder, 4, cache, seed=0)
    monkeypatch.setattr("moesaic.data.decoded_cache.decode_image", None)
    load_folder(folder, 4, cache, seed=1)


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation", "Test"])
def test_train_beside_test_is_taken_as_it_is(tmp_path, cache, name):
    folder = tmp_path / "data"
    classes(folder / "train", {"a": 3, "b": 4})
    classes(folder / name, {"a": 2, "b": 1}, start=100)
    parts = load_folder(folder, 4, cache, seed=5)
    assert parts.class_names == ("a", "b")
    assert shades(parts) == (list(range(7)), [100, 101, 102])
    assert parts.test.labels.tolist() == [0, 0, 1]


def test_val_is_ignored_if_there_is_test_and_that_is_reported(tmp_path, cache):
    for number, part in enumerate(("train", "val", "test")):
        classes(tmp_path / "data" / part, {"a": 1, "b": 1}, start=10 * number)
    messages: list[str] = []
    parts = load_folder(tmp_path / "data", 4, DecodedCache(cache.folder, messages.append), seed=0)
    assert shades(parts) == ([0, 1], [20, 21])
    assert messages[0].endswith("train and test are used; val is ignored")


def test_train_alone_is_split_and_train_among_others_is_a_class(tmp_path, cache):
    classes(tmp_path / "alone" / "train", {"a": 5, "b": 5})
    parts = load_folder(tmp_path / "alone", 4, cache, seed=0)
    assert (parts.class_names, len(parts.train), len(parts.test)) == (("a", "b"), 8, 2)
    vehicles = classes(tmp_path / "vehicles", {"bus": 5, "train": 5})
    assert load_folder(vehicles, 4, cache, seed=0).class_names == ("bus", "train")


def test_nested_files_count_and_hidden_ones_and_those_beside_the_classes_do_not(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a/one": 3, "a/two": 2, "b": 5, ".git": 2})
    image(folder / "top.png")
    (folder / "a" / ".DS_Store").write_bytes(b"x")
    (folder / "README.txt").write_text("about")
    parts = load_folder(folder, 4, cache, seed=0)
    assert parts.class_names == ("a", "b")
    assert len(parts.train) + len(parts.test) == 10
    assert parts.skipped == ()


def test_what_belongs_to_no_class_is_reported(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 2, "b": 2})
    (folder / "empty" / ".hidden").mkdir(parents=True)
    for number in range(4):
        image(folder / f"loose{number}.png")
    messages: list[str] = []
    assert load_folder(folder, 4, DecodedCache(cache.folder, messages.append), seed=0).class_names == ("a", "b")
    assert messages[:2] == [
        f"{folder}: empty has no files; it is ignored",
        f"{folder}: ignored outside of the class folders: loose0.png, loose1.png, loose2.png …",
    ]


def test_names_of_classes_may_be_odd(tmp_path, cache):
    odd = ["<b>bold", "a & b", "naïve 猫", "new\nline", '"quoted"', " space ", "100%"]
    parts = load_folder(classes(tmp_path / "data", dict.fromkeys(odd, 2)), 4, cache, seed=0)
    assert set(parts.class_names) == {name.replace("\n", "\ufffd") for name in odd}


def test_bad_files_are_skipped_and_named(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 10, "b": 10})
    (folder / "a" / "002.png").write_bytes(b"bad")
    (folder / "b" / "labels.csv").write_text("1,2")
    parts = load_folder(folder, 4, cache, seed=0)
    assert [Path(skipped.path).name for skipped in parts.skipped] == ["002.png", "labels.csv"]
    assert sorted(chain(*shades(parts))) == [shade for shade in range(20) if shade != 2]


def test_a_zip_gives_the_same_as_its_folder(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 10, "b": 10})
    plain = shutil.make_archive(str(tmp_path / "plain"), "zip", folder)
    with_top = shutil.make_archive(str(tmp_path / "with_top"), "zip", tmp_path, "data")
    expected = load_folder(folder, 4, cache, seed=0)
    for path in (plain, with_top):
        found = load_folder(path, 4, cache, seed=0)
        assert found.class_names == expected.class_names
        assert shades(found) == shades(expected)
    assert not (tmp_path / "a").exists()


def test_a_zip_may_have_train_and_test_below_its_top(tmp_path, cache):
    classes(tmp_path / "data" / "train", {"a": 3, "b": 4})
    classes(tmp_path / "data" / "test", {"a": 2, "b": 1}, start=100)
    packed = shutil.make_archive(str(tmp_path / "some"), "zip", tmp_path, "data")
    assert shades(load_folder(packed, 4, cache, seed=0)) == (list(range(7)), [100, 101, 102])


def test_a_zip_may_have_only_train_below_its_top(tmp_path, cache):
    folder = classes(tmp_path / "data" / "train", {"a": 5, "b": 5})
    packed = shutil.make_archive(str(tmp_path / "some"), "zip", tmp_path, "data")
    assert shades(load_folder(packed, 4, cache, seed=0)) == shades(load_folder(folder, 4, cache, seed=0))


def test_names_with_dots_in_a_zip_do_no_harm(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 5, "b": 5})
    packed = Path(shutil.make_archive(str(tmp_path / "some"), "zip", folder))
    with zipfile.ZipFile(packed, "a") as archive:
        archive.write(folder / "a" / "000.png", "../../outside/1.png")
        archive.write(folder / "a" / "000.png", "a/../../outside/1.png")
    assert load_folder(packed, 4, cache, seed=0).class_names == ("a", "b")
    assert not list(tmp_path.rglob("outside"))


def test_one_class_is_refused(tmp_path, cache):
    with pytest.raises(
        ValueError, match=r"has only the folder 'cats' with files, but at least two classes are needed;"
    ):
        load_folder(classes(tmp_path / "data", {"cats": 3}), 4, cache, seed=0)
    with pytest.raises(ValueError, match="has only the folder 'cats' with files"):
        load_folder(classes(tmp_path / "split" / "train", {"cats": 3}).parent, 4, cache, seed=0)


def test_images_without_folders_and_no_files_at_all_are_refused(tmp_path, cache):
    image(tmp_path / "flat" / "1.png")
    with pytest.raises(ValueError, match=r"flat: has files but no folder with files; put the images of each class"):
        load_folder(tmp_path / "flat", 4, cache, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: has no files and no folder with files"):
        load_folder(tmp_path / "empty", 4, cache, seed=0)


def test_train_without_folders_of_classes_is_refused(tmp_path, cache):
    for part in ("train", "test"):
        image(tmp_path / "data" / part / "1.png")
    with pytest.raises(ValueError, match="has no folder with files, but at least two classes are needed"):
        load_folder(tmp_path / "data", 4, cache, seed=0)


def test_classes_that_differ_between_train_and_test_are_refused(tmp_path, cache):
    classes(tmp_path / "data" / "train", {"a": 1, "b": 1, "c": 1})
    classes(tmp_path / "data" / "test", {"a": 1, "b": 1, "d": 1})
    message = (
        r"classes differ: only the train images have 'c'; only the test images have 'd'; use the same folders in both"
    )
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path / "data", 4, cache, seed=0)


def test_a_class_of_bad_files_alone_is_refused_with_one_of_them(tmp_path, cache):
    folder = classes(tmp_path / "data", {"a": 5, "b": 3, "c": 5})
    for bad in ("a/000.png", "b/000.png", "b/001.png", "b/002.png"):
        (folder / bad).write_bytes(b"bad")
    message = r"class 'b' has no image that can be read, for example: .*b/00\d\.png is not an image.*; add at"
    with pytest.raises(ValueError, match=message):
        load_folder(folder, 4, cache, seed=0)


@pytest.mark.parametrize("seed", range(4))
def test_two_good_files_of_a_class_are_enough_whichever_they_are(tmp_path, cache, seed):
    folder = classes(tmp_path / "data", {"a": 5, "b": 5})
    for bad in ("a/000.png", "a/002.png", "a/003.png"):
        (folder / bad).write_bytes(b"bad")
    parts = load_folder(folder, 4, cache, seed=seed)
    assert parts.train.labels.bincount().tolist() == [1, 4]
    assert parts.test.labels.bincount().tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_a_fifth_of_the_good_files_is_held_out_however_many_bad_ones_there_are(tmp_path, cache, seed):
    folder = classes(tmp_path / "data", {"a": 30, "b": 40})
    for number in range(10):
        (folder / "b" / f"{3 * number:03}.png").write_bytes(b"bad")
    parts = load_folder(folder, 4, cache, seed=seed)
    assert parts.train.labels.bincount().tolist() == [24, 24]
    assert parts.test.labels.bincount().tolist() == [6, 6]


def test_a_class_with_one_image_has_none_to_hold_out(tmp_path, cache):
    with pytest.raises(
        ValueError, match="class 'b' has no test image that can be read; add at least two images to its folder"
    ):
        load_folder(classes(tmp_path / "data", {"a": 5, "b": 1}), 4, cache, seed=0)


def test_bad_files_to_test_on_alone_are_refused(tmp_path, cache):
    classes(tmp_path / "data" / "train", {"a": 1, "b": 1})
    classes(tmp_path / "data" / "test", {"a": 1, "b": 1})
    (tmp_path / "data" / "test" / "b" / "000.png").write_bytes(b"bad")
    with pytest.raises(ValueError, match=r"class 'b' has no test image that can be read, for example: .*test/b"):
        load_folder(tmp_path / "data", 4, cache, seed=0)


def test_images_are_of_64_pixels_by_default(tmp_path, cache):
    parts = load_folder(classes(tmp_path / "data", {"a": 2, "b": 2}), None, cache, seed=0)
    assert parts.train.pixels.shape == (2, 3, 64, 64)
    assert parts.train.pixels.is_contiguous(memory_format=torch.channels_last)


def test_images_know_the_names_of_their_files(tmp_path, cache):
    classes(tmp_path / "data", {"a": 6, "b": 5})
    splits = load_folder(tmp_path / "data", 8, cache, 0)
    names = (*splits.train.names, *splits.test.names)
    assert sorted(names) == sorted(path.relative_to(tmp_path / "data").as_posix() for path in tmp_path.glob("data/*/*"))
    for split in (splits.train, splits.test.to("cpu"), splits.train.take(torch.tensor([4, 0, 2]))):
        assert [splits.class_names[label] for label in split.labels] == [name.split("/")[0] for name in split.names]
    assert splits.train.take(torch.tensor([4, 0])).names == (splits.train.names[4], splits.train.names[0])
