"""Folders, archives and caches that are damaged, or made to do harm: skipped, refused or rebuilt, never a traceback."""

import gzip
import io
import json
import os
import random
import socket
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moesaic.data import file_sources
from moesaic.data.cifar10 import load_cifar10
from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import UnreadableFile, open_source
from moesaic.data.image_folder import load_folder
from moesaic.data.input_images import read_input_images
from moesaic.data.mnist import load_digits


def png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 6), (shade, shade, shade)).save(content, "png")
    return content.getvalue()


def pets(folder: Path, count: int = 5) -> Path:
    for kind, start in (("cat", 0), ("dog", 100)):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            (folder / kind / f"{number}.png").write_bytes(png(start + number))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return DecodedCache(tmp_path / "cache")


# folders


def test_a_fifo_a_socket_and_a_link_to_itself_are_skipped(tmp_path, cache):
    folder = pets(tmp_path / "pets")
    os.mkfifo(folder / "cat" / "fifo.png")
    (folder / "cat" / "self.png").symlink_to(folder / "cat" / "self.png")
    (folder / "dog" / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(folder / "dog" / "s.png"))
        splits = load_folder(folder, 4, cache, seed=0)
    assert len(splits.train) + len(splits.test) == 10
    reasons = {Path(each.path).name: each.reason for each in splits.skipped}
    assert reasons.keys() == {"fifo.png", "self.png", "zero.png", "s.png"}
    assert reasons["fifo.png"] == "is not a file but a FIFO"
    assert reasons["zero.png"] == "is not a file but a device"
    found = read_input_images([folder], (3, 4, 4))
    assert len(found.names) == 10


def test_each_real_folder_is_visited_once_however_many_links_lead_to_it(tmp_path):
    folder = pets(tmp_path / "pets")
    level = folder / "dog"
    for _ in range(40):  # 2^40 paths
        (level / "next").mkdir()
        for name in ("left", "right"):
            (level / name).symlink_to(level / "next")
        level = level / "next"
    (level / "6.png").write_bytes(png(6))
    with open_source(folder) as source:
        names = [entry.name for entry in source.entries()]
    assert len(names) == 11
    assert names[-1] == "dog/" + "next/" * 40 + "6.png"


def test_links_to_folders_elsewhere_are_classes(tmp_path, cache):
    elsewhere = pets(tmp_path / "elsewhere")
    folder = tmp_path / "links"
    folder.mkdir()
    for kind in ("cat", "dog"):
        (folder / kind).symlink_to(elsewhere / kind)
    (folder / "dog2").symlink_to(elsewhere / "dog")
    messages: list[str] = []
    splits = load_folder(folder, 4, DecodedCache(cache.folder, messages.append), seed=0)
    assert splits.class_names == ("cat", "dog")
    assert messages[0] == f"{folder}: dog2 is the same folder as dog; it is ignored"


OUTPUTS = {
    "runs/train-pets/config.json": json.dumps({"model": {}, "data": {}, "recipe": {}, "seed": 0}),
    "runs/compare-pets/config.json": json.dumps({"command": "moesaic compare .", "versions": {}}),
    "shown/explanation.json": "{}",
    "cached/0123456789abcdef01234567.npy": "",
}


def test_folders_that_moesaic_wrote_are_no_classes(tmp_path, cache):
    folder = pets(tmp_path / "pets")
    for name, content in OUTPUTS.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
        (path.parent / "figures").mkdir()
        (path.parent / "figures" / "1.png").write_bytes(png(1))
    messages: list[str] = []
    splits = load_folder(folder, 4, DecodedCache(cache.folder, messages.append), seed=0)
    assert splits.class_names == ("cat", "dog")
    for name in OUTPUTS:
        assert f"{folder}: {Path(name).parent} was written by moesaic; it is ignored" in messages
    found = read_input_images([folder], (3, 4, 4))
    assert len(found.names) == 10
    assert len(found.skipped) == len(OUTPUTS)


def test_a_config_of_something_else_makes_no_output(tmp_path, cache):
    folder = pets(tmp_path / "pets")
    (folder / "cat" / "config.json").write_text('{"camera": 1}')
    (folder / "dog" / "config.json").write_text("[" * 10_000)
    splits = load_folder(folder, 4, cache, seed=0)
    assert splits.class_names == ("cat", "dog")
    assert len(splits.skipped) == 2


def test_reading_takes_no_more_memory_than_the_file(tmp_path):
    folder = pets(tmp_path / "pets")
    with open_source(folder) as source:
        tracemalloc.start()
        source.read("cat/1.png")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 22


# archives


def a_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def pet_files(count: int = 5) -> dict[str, bytes]:
    return {f"{kind}/{n}.png": png(start + n) for kind, start in (("cat", 0), ("dog", 100)) for n in range(count)}


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_damaged_members_are_skipped_by_every_compression(tmp_path, method):
    path = a_zip(tmp_path / "pets.zip", {"1.png": random.Random(0).randbytes(3000)}, method)
    whole = path.read_bytes()
    for place in range(45, 3000, 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with open_source(path) as source, pytest.raises(UnreadableFile):
            source.read("1.png")


def test_a_member_without_a_name_is_left_out(tmp_path):
    path = a_zip(tmp_path / "pets.zip", {"x": b"one", "a/1.png": b"two"})
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")  # the first entry of the central directory: no name, one byte of comment
    entry = bytearray(content[start:])
    entry[28:30], entry[32:34] = (0).to_bytes(2, "little"), (1).to_bytes(2, "little")
    path.write_bytes(content[:start] + entry)
    with open_source(path) as source:
        assert [entry.name for entry in source.entries()] == ["a/1.png"]


def test_a_zip_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_sources, "_FREE_BYTES", 1 << 20)
    path = a_zip(tmp_path / "bomb.zip", {f"a/{n}.png": bytes(1 << 20) for n in range(3)})
    with pytest.raises(ValueError, match=r"bomb.zip: announces 3145728 bytes in an archive of \d+; at most \d+ are"):
        open_source(path)


def test_a_repaired_zip_is_read_anew(tmp_path, cache):
    path = a_zip(tmp_path / "pets.zip", pet_files(), zipfile.ZIP_STORED)
    whole = path.read_bytes()
    place = whole.index(b"cat/1.png") + 40
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    damaged = load_folder(path, 4, cache, seed=0)
    assert len(damaged.skipped) == 1
    assert len(load_folder(path, 4, cache, seed=0).skipped) == 1
    path.write_bytes(whole)
    repaired = load_folder(path, 4, cache, seed=0)
    assert not repaired.skipped
    assert len(repaired.train) + len(repaired.test) == 10


def test_damaged_and_huge_archives_of_cifar10_are_one_line(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        content = bytes(random.Random(0).choices(range(8), k=3073 * 20))
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    whole = path.read_bytes()
    for place in range(12, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"tar.gz.*") as error:
            load_cifar10("test", tmp_path)
        assert "\n" not in str(error.value)


def test_bombs_of_gzip_and_tar_end_at_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("moesaic.data.cifar10.MAX_FILE_BYTES", 1 << 20, raising=False)
    monkeypatch.setattr("moesaic.data.mnist.MAX_FILE_BYTES", 1 << 20, raising=False)
    header = tarfile.TarInfo("data_batch_1.bin")
    header.size = 1 << 26
    bomb = header.tobuf() + bytes(1 << 26)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(bomb, 1))
    with pytest.raises(ValueError, match="unpacks to more than 1048576 bytes"):
        load_cifar10("train", tmp_path)
    for name in ("train-images-idx3", "train-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(bytes(1 << 26), 1))
    with pytest.raises(ValueError, match="has more than 1048576 bytes"):
        load_digits("train", tmp_path)


# caches

NAMES = ["0.png", "1.png", "2.png", "3.png"]


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    folder = tmp_path / "shades"
    folder.mkdir()
    for number in (0, 2, 3):
        (folder / f"{number}.png").write_bytes(png(50 * number))
    (folder / "1.png").write_bytes(b"bad")
    return folder


def decoded(folder: Path, cache: DecodedCache) -> tuple[list[int], list[int]]:
    with open_source(folder) as source:
        found = decode_images(source, NAMES, 4, cache)
    return found.rows.tolist(), found.pixels[:, 0, 0, 0].tolist()


def test_a_changed_split_of_the_cache_is_noticed(shades, cache):
    assert decoded(shades, cache) == ([0, 2, 3], [0, 100, 150])
    (header,) = cache.folder.glob("*.json")
    header.write_text(header.read_text().replace("[0, 2, 3]", "[0, 1, 3]"))
    assert decoded(shades, cache) == ([0, 2, 3], [0, 100, 150])


@pytest.mark.parametrize("trial", range(40))
def test_a_flipped_bit_of_the_cache_is_noticed_or_changes_nothing(shades, cache, trial):
    decoded(shades, cache)
    rng = random.Random(trial)
    path = rng.choice(sorted(cache.folder.iterdir()))
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * min(len(content), 200))  # among them the header of the array
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert decoded(shades, cache) == ([0, 2, 3], [0, 100, 150])


def test_a_cache_that_is_no_json_at_all_is_rebuilt(shades, cache):
    decoded(shades, cache)
    (header,) = cache.folder.glob("*.json")
    (pixels,) = cache.folder.glob("*.npy")
    for text in ("[" * 100_000, "null", '{"kept": Infinity}'):
        header.write_text(text)
        assert decoded(shades, cache)[0] == [0, 2, 3]
    np.save(pixels, np.zeros((3, 4, 4, 3), np.float64))
    assert decoded(shades, cache)[0] == [0, 2, 3]
