"""Writes are whole or nothing, reach the disk before their name does, and follow no link."""

import errno
import os
import stat
from pathlib import Path

import pytest

from moesaic import files
from moesaic.files import atomic_file, atomic_path, open_append, remove_unfinished, write_atomic, write_json, write_new


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, files.Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: events.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(files.Path, "replace", lambda self, to: events.append("rename") or replace(self, to))
    write_atomic(tmp_path / "a", b"some text")
    assert events == ["fsync", "rename", "fsync"]  # the file, then its folder


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(3):
        with atomic_file(tmp_path / "a") as file:
            (name,) = (path.name for path in tmp_path.iterdir() if path.name != "a")
            names.add(name)
            file.write(b"x")
    assert len(names) == 3
    assert all(name.startswith(".a.") for name in names)


def test_a_link_at_the_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "secret").write_text("mine")
    for name, write in (
        ("a", lambda path: write_atomic(path, b"x")),
        ("b", lambda path: write_json(path, 1)),
        ("c.pt2", lambda path: _write_by_name(path)),
    ):
        (tmp_path / name).symlink_to(tmp_path / "secret")
        write(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "secret").read_text() == "mine"
    (tmp_path / "log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):  # noqa: PT011  the system's own words
        open_append(tmp_path / "log")


def _write_by_name(path):
    with atomic_path(path) as unfinished:
        assert unfinished.suffix == path.suffix
        unfinished.write_text("x")


@pytest.mark.parametrize("write", [atomic_file, atomic_path])
def test_an_error_leaves_what_was_there(tmp_path, write):
    (tmp_path / "a").write_text("before")
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "a"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_a_file_has_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_atomic(tmp_path / "ours", b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")}
    assert len(modes) == 1


def test_what_a_kill_left_is_removed(tmp_path):
    for name in (".a.json.12.unfinished", ".a.pt2.ab12.unfinished.pt2", "kept.unfinished", ".hidden"):
        (tmp_path / name).write_text("")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "kept.unfinished"]


def test_lines_are_added_at_the_end(tmp_path):
    for line in (b"a\n", b"b\n"):
        with open_append(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_bytes() == b"a\nb\n"


@pytest.mark.parametrize("links", [True, False])
def test_of_several_writers_of_a_new_file_the_first_wins(tmp_path: Path, monkeypatch, links):
    def refuse(*given: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "a.txt"
    assert write_new(path, b"first")
    assert not write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_new_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch):
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "a.txt", b"first")
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_a_network_file_system_made_and_then_denied_counts(tmp_path: Path, monkeypatch):
    link = os.link

    def repeated(*given: str) -> None:
        link(*given)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", repeated)
    assert write_new(tmp_path / "a.txt", b"first")
