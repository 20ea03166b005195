"""Sources of image files: a folder, or a zip archive that is read in place.

A source lists its files by name and reads them into memory. Nothing is extracted, so paths in an
archive that point outside of it do no harm. Folders that moesaic itself wrote are left out, each real
folder is visited once whatever links point to it, and sizes are limited.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

from moesaic.argument_checks import printable
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes, read_json, read_stream

__all__ = [
    "FileEntry",
    "FileSource",
    "FolderSource",
    "SkippedFile",
    "UnreadableFile",
    "ZipSource",
    "open_source",
    "printable",
]

_MAX_BYTES = MAX_FILE_BYTES
"""Larger files are refused."""
_MAX_MEMBERS = 5_000_000
_FREE_BYTES, _MAX_RATIO = 1 << 30, 200
"""An archive may announce so many bytes, and so many times its own size beyond them."""
_CACHE_FILE = re.compile(r"([0-9a-f]{24}|features-\w+)\.npy")
"""Files of the cache of decoded images."""


class UnreadableFile(InvalidFile):
    """A file cannot be read. The message continues a sentence that starts with the file name."""


@dataclass(frozen=True)
class SkippedFile:
    """A file that was skipped because it could not be read or decoded."""

    path: str
    reason: str


@dataclass(frozen=True)
class FileEntry:
    """A file of a source, with its size and version."""

    name: str
    """Path relative to the source, with "/" between folders."""
    bytes: int
    """Size in bytes."""
    stamp: int
    """Time of the last change in nanoseconds; in an archive, the CRC of the content."""


class FileSource(Protocol):
    """Files that can be listed and read; a context manager. `read` is thread-safe."""

    path: Path
    """The folder or the archive."""

    @property
    def identity(self) -> str:
        """Distinguishes sources whose files have the same names, sizes and stamps."""
        ...

    @property
    def stamp(self) -> str:
        """Changes with the archive's file, whose list of files may stay the same when it is repaired; else empty."""
        return ""

    def entries(self) -> tuple[FileEntry, ...]:
        """All files sorted by name, without hidden files and folders."""
        ...

    def read(self, name: str) -> bytes:
        """Returns the content of a file; raises `UnreadableFile`."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def open_source(path: str | Path) -> FileSource:
    """Opens a folder or a zip file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("some text")
    ...     with open_source(folder) as source:
    ...         print([entry.name for entry in source.entries()], source.read("a.txt"))
    ['a.txt'] b'some text'
    """
    path = Path(path)
    if path.is_dir():
        return FolderSource(path)
    if path.is_file():
        return ZipSource(path)
    raise FileNotFoundError(f"{path}: there is no such folder or zip file; check the path")


class FolderSource(FileSource):
    """The files in a folder and its subfolders.

    Symbolic links to files and folders are followed, but a folder that was already visited is not visited again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ignored: dict[str, str] = {}
        """Folders that `entries` left out, and why."""

    @property
    def identity(self) -> str:
        return str(self.path.resolve())

    def entries(self) -> tuple[FileEntry, ...]:
        walk = _Walk(self.path)
        self.ignored = walk.ignored
        return tuple(sorted(walk.files, key=lambda entry: entry.name))

    def read(self, name: str) -> bytes:
        try:
            return read_bytes(self.path / name, _MAX_BYTES)
        except InvalidFile as fault:
            raise UnreadableFile(str(fault).removeprefix(f"{printable(str(self.path / name))}: ")) from fault
        except OSError as fault:
            raise UnreadableFile(f"cannot be read ({fault.strerror or fault})") from fault


class ZipSource(FileSource):
    """The files in a zip archive, which stays open until the context exits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except PermissionError:
            raise
        except Exception as fault:  # zipfile raises exceptions of every type on damaged archives
            raise InvalidFile(
                f"{path}: is not a complete zip file ({printable(str(fault))}); give the folder that has the images, "
                "or create or download the archive again"
            ) from fault
        members = [info for info in self._archive.infolist() if info.filename and not info.filename.endswith("/")]
        # some Windows programs write backslashes
        self._members = {info.filename.replace("\\", "/"): info for info in members}
        try:
            _check_archive(path, len(members), sum(info.file_size for info in members))
        except InvalidFile:
            self._archive.close()
            raise

    @property
    def identity(self) -> str:
        return ""  # the checksums of all files identify it

    @property
    def stamp(self) -> str:
        about = self.path.stat()
        return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"

    def entries(self) -> tuple[FileEntry, ...]:
        return tuple(
            FileEntry(name, info.file_size, info.CRC)
            for name, info in sorted(self._members.items())
            if not any(_hidden(part) for part in name.split("/"))
        )

    def read(self, name: str) -> bytes:
        if self._members[name].file_size > _MAX_BYTES:
            raise UnreadableFile(f"has more than {_MAX_BYTES >> 20} MB")
        try:
            with self._archive.open(self._members[name]) as file:
                return read_stream(file, _MAX_BYTES, name)
        except InvalidFile as fault:
            raise UnreadableFile(f"has more than {_MAX_BYTES >> 20} MB") from fault
        except RuntimeError as fault:  # zipfile raises it for encryption and for unknown compression
            raise UnreadableFile("is encrypted, or compressed by an unknown method") from fault
        except Exception as fault:  # each compression has exceptions of its own
            raise UnreadableFile(f"is damaged in the archive ({fault})") from fault

    def __exit__(self, *error: object) -> None:
        self._archive.close()


def _check_archive(path: Path, members: int, announced: int) -> None:
    """Refuses an archive that would unpack to far more than it is."""
    limit = _FREE_BYTES + _MAX_RATIO * path.stat().st_size
    if members > _MAX_MEMBERS:
        raise InvalidFile(f"{path}: has {members} files, at most {_MAX_MEMBERS} are read; split the archive")
    if announced > limit:
        raise InvalidFile(
            f"{path}: announces {announced} bytes in an archive of {path.stat().st_size}; at most {limit} are "
            "unpacked: unpack it yourself if you trust it, and give the folder"
        )


class _Walk:
    """Lists the files below a folder: first those in real folders, then those behind links to other folders."""

    def __init__(self, root: Path) -> None:
        self.files: list[FileEntry] = []
        self.ignored: dict[str, str] = {}
        self._links: list[str] = []
        self._visited: dict[tuple[int, int], str] = {}
        about = root.stat()
        self._root = root
        self._visited[about.st_dev, about.st_ino] = "."
        self._visit("")
        # sorted, so that the same folder has the same files on every machine
        while self._links:
            self._links.sort(reverse=True)
            self._visit_once(self._links.pop())

    def _visit_once(self, name: str) -> None:
        about = (self._root / name).stat()
        before = self._visited.setdefault((about.st_dev, about.st_ino), name)
        if before is name:
            self._visit(f"{name}/")
        else:
            self.ignored[name] = f"is the same folder as {before}"

    def _visit(self, prefix: str) -> None:
        pending = [prefix]  # a list in place of recursion: the stack does not limit the depth
        while pending:
            prefix = pending.pop()
            with os.scandir(self._root / prefix) as found:
                children = sorted(found, key=lambda child: child.name)
            if prefix and _is_output(self._root / prefix, [child.name for child in children]):
                self.ignored[prefix.rstrip("/")] = "was written by moesaic"
                continue
            if prefix.count("/") == 1 and all(_hidden(child.name) for child in children):
                self.ignored[prefix.rstrip("/")] = "has no files"
            for child in children:
                name = prefix + child.name
                if _hidden(child.name):
                    continue
                try:
                    about = child.stat()
                except OSError:  # a broken link, or one to itself: reading it will report the error
                    self.files.append(FileEntry(name, 0, 0))
                    continue
                if not stat.S_ISDIR(about.st_mode):
                    # ctime is later if only the permission to read the file changed
                    stamp = max(about.st_mtime_ns, about.st_ctime_ns)
                    self.files.append(FileEntry(name, about.st_size, stamp))
                elif child.is_symlink():
                    self._links.append(name)
                elif self._visited.setdefault((about.st_dev, about.st_ino), name) is name:
                    pending.append(f"{name}/")


def _is_output(folder: Path, names: Collection[str]) -> bool:
    """Whether moesaic wrote a folder: a run, a comparison, an explanation, a reproduction or a cache."""
    if "explanation.json" in names or any(_CACHE_FILE.fullmatch(name) for name in names):
        return True
    if "config.json" not in names:
        return False
    try:
        content: Any = read_json(folder / "config.json")
    except (OSError, InvalidFile):
        return False
    if not isinstance(content, dict):
        return False
    config = cast("dict[str, Any]", content)
    return {"recipe", "model", "data"} <= config.keys() or str(config.get("command", "")).startswith("moesaic ")


def _hidden(name: str) -> bool:
    """Hidden files, "." and "..", and the folder that macOS adds to archives."""
    return name.startswith(".") or name in ("", "__MACOSX")
