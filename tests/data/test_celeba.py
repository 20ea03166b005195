"""CelebA's lists and tasks: who is in which group, in which shares, and what is said of lists that are not whole."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moesaic.data.celeba import (
    FOUR_CLASSES,
    HAIR_GROUPS,
    celeba_four_classes,
    celeba_smiling,
    celeba_spurious,
    find_celeba,
    four_classes,
    read_celeba,
    smiling,
    spurious,
)
from moesaic.data.decoded_cache import DecodedCache

NAMES = ("Bald", "Black_Hair", "Blond_Hair", "Eyeglasses", "Smiling")
PARTS = {"train": 0, "valid": 1, "test": 2}

Face = tuple[str, str]
"""Its part, and the attributes it has: "Black_Hair Smiling"."""


NO_IMAGE = b"no image"


def write_celeba(
    folder: Path,
    faces: Sequence[Face],
    *,
    as_zip: bool = True,
    without: Sequence[int] = (),
    images: dict[int, bytes] | None = None,
) -> Path:
    """CelebA's files with faces numbered from 1; of those in ``without`` there is no file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [" ".join("1" if name in has.split() else "-1" for name in NAMES) for _, has in faces]
    listed = [f"{number:06d}.jpg" for number in range(1, len(faces) + 1)]
    attributes = [str(len(faces)), " ".join(NAMES), *(f"{file}  {row}" for file, row in zip(listed, rows, strict=True))]
    (folder / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    partition = [f"{file} {PARTS[part]}" for file, (part, _) in zip(listed, faces, strict=True)]
    (folder / "list_eval_partition.txt").write_text("\n".join(partition) + "\n")
    there = {
        file: (images or {}).get(number, NO_IMAGE)
        for number, file in enumerate(listed, start=1)
        if number not in without
    }
    if as_zip:
        with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as archive:
            archive.mkdir("img_align_celeba")
            for file, content in there.items():
                archive.writestr(f"img_align_celeba/{file}", content)
    else:
        (folder / "img_align_celeba").mkdir()
        for file, content in there.items():
            (folder / "img_align_celeba" / file).write_bytes(content)
    return folder


def crowd(part: str, counts: dict[str, int]) -> list[Face]:
    return [(part, has) for has, count in counts.items() for _ in range(count)]


def photograph(number: int, width: int = 64, height: int = 64) -> bytes:
    """A JPEG of noise, so that any other way of scaling or decoding would show."""
    noise = np.random.default_rng(number).integers(256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=92)
    return file.getvalue()


def decoded(content: bytes) -> list[object]:
    return np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1).tolist()


HAIR = {
    "Black_Hair Smiling": 60,
    "Blond_Hair Smiling": 30,
    "Black_Hair": 25,
    "Blond_Hair": 45,
    "Smiling": 10,
    "Black_Hair Blond_Hair": 5,
}


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("below", [".", "celeba"])
def test_faces_are_found_in_a_zip_or_a_folder_and_those_to_train_on_come_first(
    tmp_path: Path, as_zip: bool, below: str
):
    faces = [("test", "Smiling"), ("train", ""), ("valid", ""), ("train", "Smiling"), ("test", "")]
    write_celeba(tmp_path / below, faces, as_zip=as_zip)
    celeba = read_celeba(tmp_path)
    prefix = "img_align_celeba/" if as_zip else ""
    assert celeba.files == tuple(f"{prefix}{number:06d}.jpg" for number in (2, 4, 1, 5))
    assert celeba.training == 2
    assert celeba.attributes["Smiling"].tolist() == [False, True, True, False]
    assert celeba.absent == 0


def test_faces_without_an_image_are_left_out_and_counted(tmp_path: Path):
    faces = [("train", ""), ("train", "Smiling"), ("test", ""), ("valid", ""), ("test", "Smiling")]
    celeba = read_celeba(write_celeba(tmp_path, faces, without=[1, 3, 4]))
    assert celeba.files == ("img_align_celeba/000002.jpg", "img_align_celeba/000005.jpg")
    assert celeba.absent == 2


def test_smiling_takes_every_face_of_its_part(tmp_path: Path):
    faces = [("train", "Smiling"), ("train", ""), ("valid", "Smiling"), ("test", "Smiling")]
    celeba = read_celeba(write_celeba(tmp_path, faces))
    train, test = smiling(celeba, "train"), smiling(celeba, "test")
    assert (train.rows.tolist(), train.labels.tolist()) == ([0, 1], [1, 0])
    assert (test.rows.tolist(), test.labels.tolist()) == ([2], [1])


def test_hair_tells_the_smile_in_95_percent_of_faces_to_train_on(tmp_path: Path):
    celeba = read_celeba(write_celeba(tmp_path, crowd("train", HAIR) + crowd("test", HAIR)))
    drawn = spurious(celeba, "train", seed=0)
    counts = dict(zip(HAIR_GROUPS, np.bincount(drawn.clusters).tolist(), strict=True))
    # 45 blond faces without a smile suffice for two times 19, and one in twenty has the other colour
    assert counts == {
        "not smiling, black hair": 2,
        "not smiling, blond hair": 38,
        "smiling, black hair": 38,
        "smiling, blond hair": 2,
    }
    has = {name: celeba.attributes[name][drawn.rows] for name in celeba.attributes}
    assert np.array_equal(has["Smiling"], drawn.labels == 1)
    assert np.array_equal(has["Blond_Hair"], drawn.clusters % 2 == 1)
    assert np.array_equal(has["Black_Hair"], drawn.clusters % 2 == 0)
    assert (np.diff(drawn.rows) > 0).all()


def test_hair_tells_nothing_in_faces_to_test_on_beyond_what_it_tells_in_all(tmp_path: Path):
    celeba = read_celeba(write_celeba(tmp_path, crowd("train", HAIR) + crowd("test", HAIR)))
    test = spurious(celeba, "test", seed=0)
    assert np.bincount(test.clusters).tolist() == [25, 45, 60, 30]
    assert (test.rows >= celeba.training).all()


def test_seed_decides_which_faces_are_drawn(tmp_path: Path):
    celeba = read_celeba(write_celeba(tmp_path, crowd("train", HAIR) + crowd("test", HAIR)))
    first, again, other = (spurious(celeba, "train", seed).rows.tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_four_classes_are_balanced_in_both_parts(tmp_path: Path):
    train = {"": 9, "Eyeglasses": 4, "Smiling": 7, "Eyeglasses Smiling": 3}
    test = {"": 5, "Eyeglasses": 2, "Smiling": 5, "Eyeglasses Smiling": 4}
    celeba = read_celeba(write_celeba(tmp_path, crowd("train", train) + crowd("test", test)))
    drawn = four_classes(celeba, "train", seed=0)
    assert np.bincount(drawn.labels).tolist() == [3] * 4
    assert np.bincount(four_classes(celeba, "test", seed=0).labels).tolist() == [2] * 4
    message = [
        f"{'smiling' if smile else 'not smiling'}, {'eyeglasses' if glasses else 'no eyeglasses'}"
        for smile, glasses in zip(
            celeba.attributes["Smiling"][drawn.rows], celeba.attributes["Eyeglasses"][drawn.rows], strict=True
        )
    ]
    assert message == [FOUR_CLASSES[label] for label in drawn.labels]


def test_an_empty_group_is_reported_with_all_counts(tmp_path: Path):
    faces = crowd("train", {"Black_Hair Smiling": 30, "Blond_Hair": 30}) + crowd("test", HAIR)
    celeba = read_celeba(write_celeba(tmp_path, faces))
    with pytest.raises(ValueError, match=r"ratio 1:19:19:1 \(not smiling, black hair: 0, .*smiling, blond hair: 0\)"):
        spurious(celeba, "train", seed=0)


def test_missing_files_are_named_with_the_folders_looked_in(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no img_align_celeba.zip or img_align_celeba, list_attr_celeba.txt"):
        find_celeba(tmp_path)
    write_celeba(tmp_path / "celeba", [("train", ""), ("test", "")])
    (tmp_path / "celeba" / "list_eval_partition.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no list_eval_partition.txt in .*celeba; get .* from https://"):
        find_celeba(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("list_attr_celeba.txt", "", "is not CelebA's list of attributes"),
        ("list_attr_celeba.txt", "1\nBald Smiling\n000001.jpg 1 1\n", "is not CelebA's list of attributes"),
        ("list_attr_celeba.txt", f"3\n{' '.join(NAMES)}\n000001.jpg 1 1 1 1 1\n", "announces 3 faces, 1 follow"),
        ("list_attr_celeba.txt", f"1\n{' '.join(NAMES)}\n000001.jpg 1 1\n", "line 3 has 3 columns, expected a file"),
        ("list_attr_celeba.txt", f"1\n{' '.join(NAMES)}\n9.jpg 1 1 1 1 1\n", "does not list 9.jpg, which is in"),
        ("list_eval_partition.txt", "000001.jpg\n", "line 1 is '000001.jpg', expected"),
        ("list_eval_partition.txt", "000001.jpg 3\n", "line 1 is '000001.jpg 3', expected"),
        ("img_align_celeba.zip", "no zip", "is not a complete zip file"),
    ],
)
def test_what_is_not_whole_is_reported(tmp_path: Path, file: str, content: str, message: str):
    write_celeba(tmp_path, [("train", "Smiling"), ("test", "")])
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_celeba(tmp_path)


def test_a_list_that_is_not_text_is_reported(tmp_path: Path):
    write_celeba(tmp_path, [("train", "Smiling"), ("test", "")])
    (tmp_path / "list_eval_partition.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        read_celeba(tmp_path)


def test_images_without_a_face_to_test_on_are_reported(tmp_path: Path):
    write_celeba(tmp_path, [("train", "Smiling"), ("test", "")], without=[2])
    with pytest.raises(ValueError, match="has 1 of the 1 faces for training and 0 of the 1 for testing"):
        read_celeba(tmp_path)


@pytest.mark.parametrize("as_zip", [True, False])
def test_faces_of_the_size_asked_for_keep_their_bytes(tmp_path: Path, as_zip: bool):
    faces = [("test", "Smiling"), ("train", ""), ("valid", ""), ("train", "Smiling")]
    images = {number: photograph(number) for number in (1, 2, 4)}
    write_celeba(tmp_path, faces, as_zip=as_zip, images=images)
    parts = celeba_smiling(tmp_path, None, DecodedCache(tmp_path / "cache"), seed=0)
    assert parts.train.pixels.tolist() == [decoded(images[2]), decoded(images[4])]
    assert parts.test.pixels.tolist() == [decoded(images[1])]
    assert (parts.train.labels.tolist(), parts.test.labels.tolist()) == ([0, 1], [1])
    assert parts.class_names == parts.cluster_names == ("not smiling", "smiling")


def test_originals_become_squares_of_64_pixels_from_their_middle(tmp_path: Path):
    tall = np.zeros((218, 178, 3), dtype=np.uint8)
    tall[20:198] = 255  # the largest square in the middle is white
    file = io.BytesIO()
    Image.fromarray(tall).save(file, "PNG")
    faces = [("train", ""), ("test", "Smiling")]
    write_celeba(tmp_path, faces, images={number: file.getvalue() for number in (1, 2)})
    parts = celeba_smiling(tmp_path, None, DecodedCache(tmp_path / "cache"), seed=0)
    assert tuple(parts.train.pixels.shape) == (1, 3, 64, 64)
    assert parts.train.pixels.amin() > 200  # the edge may take a little from beyond it


def test_faces_that_cannot_be_read_are_reported_and_not_drawn(tmp_path: Path):
    train = crowd("train", {"": 3, "Eyeglasses": 3, "Smiling": 3, "Eyeglasses Smiling": 3})
    test = crowd("test", {"": 1, "Eyeglasses": 1, "Smiling": 1, "Eyeglasses Smiling": 1})
    images = {number: photograph(number) for number in range(1, 17) if number != 5}
    write_celeba(tmp_path, train + test, images=images)
    parts = celeba_four_classes(tmp_path, 16, DecodedCache(tmp_path / "cache"), seed=0)
    assert parts.train.labels.bincount().tolist() == [2] * 4
    assert parts.test.labels.bincount().tolist() == [1] * 4
    assert [Path(each.path).name for each in parts.skipped] == ["000005.jpg"]


def test_the_three_tasks_decode_the_faces_once(tmp_path: Path):
    groups = {"Black_Hair Smiling": 19, "Blond_Hair": 19, "Blond_Hair Smiling": 1, "Black_Hair Eyeglasses": 1}
    faces = crowd("train", groups | {"Eyeglasses Smiling": 1}) + crowd("test", groups | {"Eyeglasses Smiling": 1})
    write_celeba(tmp_path, faces, images={number: photograph(number, 8, 8) for number in range(1, len(faces) + 1)})
    cache = DecodedCache(tmp_path / "cache")
    tasks = [make(tmp_path, 8, cache, 0) for make in (celeba_smiling, celeba_spurious, celeba_four_classes)]
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
    of_face = {
        tuple(map(int, pixels.flatten())): face for pixels, face in zip(tasks[0].train.pixels, faces, strict=False)
    }
    for image, label, cluster in zip(
        tasks[1].train.pixels, tasks[1].train.labels, tasks[1].train.clusters, strict=True
    ):
        _, has = of_face[tuple(map(int, image.flatten()))]
        assert ("Smiling" in has) == bool(label)
        assert HAIR_GROUPS[cluster] == f"{'smiling' if label else 'not smiling'}, {has[:5].lower()} hair"
    assert [len(task.train) for task in tasks] == [41, 40, 4]


def test_how_many_faces_are_there_is_said_when_it_is_not_all(tmp_path: Path):
    faces = [("train", ""), ("train", "Smiling"), ("test", "Smiling")]
    write_celeba(tmp_path, faces, without=[1], images={number: photograph(number) for number in (2, 3)})
    messages: list[str] = []
    celeba_smiling(tmp_path, None, DecodedCache(tmp_path / "cache", messages.append), seed=0)
    assert "has 2 of the 3 faces on CelebA's lists" in messages[0]


def test_faces_of_which_none_can_be_read_are_an_error(tmp_path: Path):
    write_celeba(tmp_path, [("train", ""), ("test", "Smiling")], images={1: photograph(1)})
    with pytest.raises(
        ValueError, match=r"only 1 for training and 0 for testing can be read .*000002.jpg is not an image"
    ):
        celeba_smiling(tmp_path, None, DecodedCache(tmp_path / "cache"), seed=0)


def test_without_a_folder_the_error_asks_for_one(tmp_path: Path):
    with pytest.raises(ValueError, match="celeba-4class: CelebA is read from files; give the folder"):
        celeba_four_classes(None, None, DecodedCache(tmp_path / "cache"), seed=0)
