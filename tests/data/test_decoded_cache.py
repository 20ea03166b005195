"""Images are decoded once, whatever happens meanwhile, and a store is whole or not there."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.cache_dir import default_cache_dir
from moesaic.data import decoded_cache
from moesaic.data.decoded_cache import DecodedCache, DecodedImages, decode_images
from moesaic.data.file_sources import FolderSource, open_source


class Counting(FolderSource):
    """A folder that knows what was read from it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        return super().read(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    made.mkdir()
    for number in range(5):
        Image.new("RGB", (10, 8), (40 * number, 7, 9)).save(made / f"{number}.png")
    return made


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return DecodedCache(tmp_path / "cache")


NAMES = ["3.png", "0.png", "4.png"]


def decode(folder: Path, cache: DecodedCache, names: list[str] = NAMES, size: int = 4) -> tuple[DecodedImages, int]:
    """What was found, and how many files were read for it."""
    source = Counting(folder)
    return decode_images(source, names, size, cache), len(source.reads)


def reds(found: DecodedImages) -> list[int]:
    return found.pixels[:, 0, 2, 2].tolist()


def test_images_come_in_the_order_of_their_names_as_a_channels_last_view(folder, cache):
    found, _ = decode(folder, cache)
    assert reds(found) == [120, 0, 160]
    assert found.pixels.shape == (3, 3, 4, 4)
    assert found.pixels.is_contiguous(memory_format=torch.channels_last)
    assert found.rows.tolist() == [0, 1, 2]


def test_a_second_time_nothing_is_decoded(folder, cache):
    first, read = decode(folder, cache)
    again, read_again = decode(folder, cache)
    assert (read, read_again) == (3, 0)
    assert torch.equal(first.pixels, again.pixels)
    assert torch.equal(first.rows, again.rows)


def test_more_images_than_a_block_are_all_there(folder, cache, monkeypatch):
    monkeypatch.setattr(decoded_cache, "_BLOCK_IMAGES", 2)
    monkeypatch.setattr(decoded_cache, "_LOG_INTERVAL", -1.0)
    messages: list[str] = []
    names = [f"{number}.png" for number in range(5)]
    found, _ = decode(folder, DecodedCache(cache.folder, messages.append), names)
    assert reds(found) == [0, 40, 80, 120, 160]
    assert [message.partition(",")[0] for message in messages] == ["decoded 2 of 5 images", "decoded 4 of 5 images"]
    assert reds(decode(folder, cache, names)[0]) == [0, 40, 80, 120, 160]


def test_another_size_order_or_stamp_is_another_store(folder, cache):
    decode(folder, cache)
    assert decode(folder, cache, size=5)[1] == 3
    assert decode(folder, cache, ["0.png", "3.png", "4.png"])[1] == 3
    os.utime(folder / "0.png", ns=(5, 5))
    assert decode(folder, cache)[1] == 3
    assert decode(folder, cache)[1] == 0


def test_a_folder_with_the_same_names_sizes_and_stamps_elsewhere_is_another_store(folder, cache, tmp_path):
    class Alike(FolderSource):
        def entries(self):
            return tuple(replace(entry, bytes=9, stamp=5) for entry in super().entries())

    other = tmp_path / "other"
    other.mkdir()
    for name in NAMES:
        Image.new("RGB", (10, 8), (1, 2, 3)).save(other / name)
    assert reds(decode_images(Alike(folder), NAMES, 4, cache)) == [120, 0, 160]
    assert reds(decode_images(Alike(other), NAMES, 4, cache)) == [1, 1, 1]


def test_a_file_that_vanished_is_skipped(folder, cache):
    found, _ = decode(folder, cache, [*NAMES, "9.png"])
    assert reds(found) == [120, 0, 160]
    assert found.skipped[0].reason == "cannot be read (No such file or directory)"


def test_bad_files_are_left_out_and_reported_also_from_the_cache(folder, cache):
    (folder / "0.png").write_bytes(b"bad")
    for _ in range(2):
        found, _ = decode(folder, cache)
        assert reds(found) == [120, 160]
        assert found.rows.tolist() == [0, 2]
        assert [(skipped.path, skipped.reason) for skipped in found.skipped] == [
            (str(folder / "0.png"), "is not an image, or its format is unknown")
        ]


def test_where_all_are_bad_there_are_no_images_and_no_cache_entry(folder, cache):
    for name in NAMES:
        (folder / name).write_bytes(b"bad")
    found, _ = decode(folder, cache)
    assert found.pixels.shape == (0, 3, 4, 4)
    assert len(found.skipped) == 3
    assert list(cache.folder.iterdir()) == []


def files(cache: DecodedCache) -> tuple[Path, Path]:
    (pixels,), (about,) = (list(cache.folder.glob(f"*.{kind}")) for kind in ("npy", "json"))
    return pixels, about


def test_a_store_is_a_plain_npy_file_and_json(folder, cache):
    decode(folder, cache)
    pixels, about = files(cache)
    assert np.load(pixels)[:, 2, 2, 0].tolist() == [120, 0, 160]
    assert json.loads(about.read_text())["kept"] == [0, 1, 2]
    assert sorted(cache.folder.iterdir()) == sorted([pixels, about])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pixels, about: halve(pixels),
        lambda pixels, about: flip_a_bit(pixels),
        lambda pixels, about: pixels.write_bytes(b""),
        lambda pixels, about: pixels.unlink(),
        lambda pixels, about: np.save(pixels, np.zeros((3, 4, 4, 3), np.float32)),
        lambda pixels, about: np.save(pixels, np.zeros((2, 4, 4, 3), np.uint8)),
        lambda pixels, about: halve(about),
        lambda pixels, about: about.write_text("[]"),
        lambda pixels, about: about.write_text("{}"),
        lambda pixels, about: about.unlink(),
    ],
)
def test_a_damaged_store_is_noticed_and_made_anew(folder, cache, damage):
    decode(folder, cache)
    damage(*files(cache))
    found, read = decode(folder, cache)
    assert (reds(found), read) == ([120, 0, 160], 3)
    assert decode(folder, cache)[1] == 0


def test_writing_to_the_pixels_does_not_reach_the_store(folder, cache):
    first, _ = decode(folder, cache)
    first.pixels.fill_(1)
    again, read = decode(folder, cache)
    assert (reds(again), read) == ([120, 0, 160], 0)


def test_two_at_once_do_not_harm_each_other(folder, cache):
    found: list[list[int]] = []
    gate = threading.Barrier(4)

    class Waiting(FolderSource):
        def entries(self):
            listed = super().entries()
            gate.wait()
            return listed

    def work() -> None:
        found.append(reds(decode_images(Waiting(folder), NAMES, 4, cache)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[120, 0, 160]] * 4
    assert len(list(cache.folder.iterdir())) == 2


class FullDisk:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def write(self, content: bytes) -> int:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(content)


@pytest.mark.parametrize("room", [0, 200, 250])
def test_a_full_disk_leaves_nothing_behind_and_says_what_to_do(folder, cache, monkeypatch, room):
    write = decoded_cache._write_pixels
    monkeypatch.setattr(decoded_cache, "_write_pixels", lambda file, *rest: write(FullDisk(file, room), *rest))  # pyright: ignore[reportArgumentType]
    message = r"no space left in .*cache for decoded images, which take 0 MB; free some, or choose a folder on another"
    with pytest.raises(OSError, match=message):
        decode(folder, cache)
    assert list(cache.folder.iterdir()) == []
    monkeypatch.undo()
    assert decode(folder, cache)[1] == 3


def test_a_cache_that_cannot_be_a_folder_says_what_to_do(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written to .*file.* with --cache-dir or in MOESAIC_CACHE"):
        decode(folder, DecodedCache(tmp_path / "file" / "cache"))


def test_an_interrupt_leaves_nothing_behind(folder, cache, monkeypatch):
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoded_cache, "decode_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(folder, cache)
    assert list(cache.folder.iterdir()) == []


def test_unfinished_files_of_long_ago_are_removed_and_those_of_today_are_not(folder, cache):
    cache.folder.mkdir()
    old, new = cache.folder / ".a.unfinished", cache.folder / ".b.unfinished"
    for path in (old, new):
        path.write_text("")
    yesterday = time.time() - 2 * 24 * 3600
    os.utime(old, (yesterday, yesterday))
    decode(folder, cache)
    assert (old.exists(), new.exists()) == (False, True)


def test_the_cache_is_where_the_variable_says_or_at_home(monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", "/somewhere/else")
    assert default_cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("MOESAIC_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path("/home/me/.cache/moesaic")


def test_a_zip_that_moved_is_not_decoded_again(folder, cache, tmp_path, monkeypatch):
    first = Path(shutil.make_archive(str(tmp_path / "some"), "zip", folder))
    with open_source(first) as source:
        before = decode_images(source, NAMES, 4, cache)
    second = first.rename(tmp_path / "moved.zip")
    monkeypatch.setattr(decoded_cache, "decode_image", None)
    with open_source(second) as source:
        assert torch.equal(decode_images(source, NAMES, 4, cache).pixels, before.pixels)
