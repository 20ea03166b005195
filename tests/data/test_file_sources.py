"""Folders and zip files list and read their files alike, and nothing in them reaches outside."""

import os
import zipfile
from pathlib import Path

import pytest

from moesaic.data import file_sources
from moesaic.data.file_sources import UnreadableFile, open_source, printable

FILES = {"a/1.jpg": b"one", "a/deep/2.jpg": b"two", "b c/ü.png": b"three", "top.txt": b"four"}


def a_folder(base: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)
    return base


def a_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def names(path: Path) -> list[str]:
    with open_source(path) as source:
        return [entry.name for entry in source.entries()]


def test_a_folder_and_a_zip_of_it_list_and_read_the_same(tmp_path):
    for place in (a_folder(tmp_path / "folder", FILES), a_zip(tmp_path / "some.zip", FILES)):
        with open_source(place) as source:
            entries = source.entries()
            assert [entry.name for entry in entries] == sorted(FILES)
            assert {entry.name: source.read(entry.name) for entry in entries} == FILES
            assert [entry.bytes for entry in entries] == [len(FILES[name]) for name in sorted(FILES)]


def test_what_is_hidden_is_not_listed(tmp_path):
    hidden = {".DS_Store": b"", "a/.hidden.jpg": b"", ".cache/1.jpg": b"", "__MACOSX/a/._1.jpg": b""}
    assert names(a_folder(tmp_path / "folder", FILES | hidden)) == sorted(FILES)
    assert names(a_zip(tmp_path / "some.zip", FILES | hidden)) == sorted(FILES)


def test_names_in_a_zip_that_point_outside_are_not_listed(tmp_path):
    outside = {"../out.jpg": b"", "a/../../out.jpg": b"", "/etc/out.jpg": b""}
    assert names(a_zip(tmp_path / "some.zip", FILES | outside)) == sorted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.zip"]


def test_backslashes_in_a_zip_separate_folders(tmp_path):
    with open_source(a_zip(tmp_path / "some.zip", {"a\\1.jpg": b"one"})) as source:
        assert [entry.name for entry in source.entries()] == ["a/1.jpg"]
        assert source.read("a/1.jpg") == b"one"


def test_a_changed_file_has_another_stamp(tmp_path):
    folder = a_folder(tmp_path / "folder", FILES)
    with open_source(folder) as source:
        before = source.entries()
        os.utime(folder / "top.txt", ns=(1, 1))
        assert [was == now for was, now in zip(before, source.entries(), strict=True)] == [True, True, True, False]
    one, other = a_zip(tmp_path / "one.zip", {"x": b"abc"}), a_zip(tmp_path / "other.zip", {"x": b"abd"})
    with open_source(one) as first, open_source(other) as second:
        assert first.entries() != second.entries()


def test_a_file_whose_rights_changed_has_another_stamp(tmp_path):
    folder = a_folder(tmp_path / "folder", {"1.jpg": b"one"})
    os.utime(folder / "1.jpg", ns=(5, 5))
    with open_source(folder) as source:
        before = source.entries()
        while source.entries() == before:  # until the clock of the file system has moved on
            (folder / "1.jpg").chmod(0o600)
        assert source.entries() != before


def test_links_are_followed_but_not_in_circles(tmp_path):
    folder = a_folder(tmp_path / "folder", FILES)
    elsewhere = a_folder(tmp_path / "elsewhere", {"5.jpg": b"five"})
    (folder / "c").symlink_to(elsewhere)
    (folder / "a" / "up").symlink_to(folder)
    assert names(folder) == sorted([*FILES, "c/5.jpg"])


def test_a_link_to_nowhere_is_listed_and_cannot_be_read(tmp_path):
    folder = a_folder(tmp_path / "folder", {})
    folder.mkdir()
    (folder / "lost.jpg").symlink_to(tmp_path / "nowhere")
    with open_source(folder) as source, pytest.raises(UnreadableFile, match=r"^cannot be read \(No such file"):
        source.read(source.entries()[0].name)


def test_a_file_that_is_damaged_in_its_archive_is_reported(tmp_path):
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1.jpg", b"some content")
    path.write_bytes(path.read_bytes().replace(b"some content", b"same content"))
    with open_source(path) as source, pytest.raises(UnreadableFile, match=r"^is damaged in the archive"):
        source.read("1.jpg")


def test_an_encrypted_file_is_reported(tmp_path):
    path = a_zip(tmp_path / "some.zip", {"1.jpg": b"content"})
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag in the file's own header
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and that in the archive's list
    path.write_bytes(content)
    with open_source(path) as source, pytest.raises(UnreadableFile, match=r"^is encrypted"):
        source.read("1.jpg")


def test_a_file_that_is_packed_in_an_unknown_way_is_reported(tmp_path):
    path = a_zip(tmp_path / "some.zip", {"1.jpg": b"content"})
    content = bytearray(path.read_bytes())
    content[8] = content[content.index(b"PK\x01\x02") + 10] = 77  # how it is packed, likewise twice
    path.write_bytes(content)
    with open_source(path) as source, pytest.raises(UnreadableFile, match="compressed by an unknown method"):
        source.read("1.jpg")


def test_files_that_are_far_too_large_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(file_sources, "_MAX_BYTES", 1 << 20)
    large = {"1.jpg": bytes((1 << 20) + 1)}
    for place in (a_folder(tmp_path / "folder", large), a_zip(tmp_path / "some.zip", large)):
        with (
            open_source(place) as source,
            pytest.raises(UnreadableFile, match=r"^has .*more than (1 MB|the 1048576 that are read)$"),
        ):
            source.read("1.jpg")


def test_what_is_no_zip_and_what_is_not_there_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no zip")
    with pytest.raises(ValueError, match=r"notes\.txt: is not a complete zip file .*; give the folder"):
        open_source(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="there is no such folder or zip file"):
        open_source(tmp_path / "nowhere")


def test_odd_names_can_be_printed():
    assert printable("<b>& 'Ärger'") == "<b>& 'Ärger'"
    assert printable("a\x00b\udce4c\n").encode() == "a\ufffdb\ufffdc\ufffd".encode()
