"""Sources of image files: a folder, or a zip archive that is read in place.

A source lists its files by name and reads them into memory. Nothing is extracted, so paths in an
archive that point outside of it do no harm.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from moesaic.checks import printable

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

_MAX_BYTES = 1 << 28
"""Larger files are refused."""


class UnreadableFile(ValueError):
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
    """The files in a folder and its subfolders. Symbolic links are followed, cycles are not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def identity(self) -> str:
        return str(self.path.resolve())

    def entries(self) -> tuple[FileEntry, ...]:
        return tuple(sorted(_walk(self.path, "", frozenset()), key=lambda entry: entry.name))

    def read(self, name: str) -> bytes:
        try:
            with open(self.path / name, "rb") as file:
                return _checked(file.read(_MAX_BYTES + 1))
        except OSError as fault:
            raise UnreadableFile(f"cannot be read ({fault.strerror or fault})") from fault


class ZipSource(FileSource):
    """The files in a zip archive, which stays open until the context exits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError) as fault:
            raise ValueError(
                f"{path}: is not a complete zip file ({fault}); give the folder that has the images, or "
                "create or download the archive again"
            ) from fault
        # some Windows programs write backslashes
        self._members = {
            info.filename.replace("\\", "/"): info for info in self._archive.infolist() if not info.is_dir()
        }

    @property
    def identity(self) -> str:
        return ""  # the checksums of all files identify it

    def entries(self) -> tuple[FileEntry, ...]:
        return tuple(
            FileEntry(name, info.file_size, info.CRC)
            for name, info in sorted(self._members.items())
            if not any(_hidden(part) for part in name.split("/"))
        )

    def read(self, name: str) -> bytes:
        try:
            with self._archive.open(self._members[name]) as file:
                return _checked(file.read(_MAX_BYTES + 1))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as fault:
            raise UnreadableFile(f"is damaged in the archive ({fault})") from fault
        except RuntimeError as fault:  # zipfile raises it for encryption and for unknown compression
            raise UnreadableFile("is encrypted, or compressed by an unknown method") from fault

    def __exit__(self, *error: object) -> None:
        self._archive.close()


def _walk(folder: Path, prefix: str, above: frozenset[str]) -> Iterator[FileEntry]:
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as found:
        children = [child for child in found if not _hidden(child.name)]
    for child in children:
        if child.is_dir():
            yield from _walk(folder / child.name, f"{prefix}{child.name}/", above | {here})
            continue
        try:
            about = child.stat()
        except OSError:  # a broken link: reading it will report the error
            yield FileEntry(prefix + child.name, 0, 0)
            continue
        # ctime is later if only the permission to read the file changed
        yield FileEntry(prefix + child.name, about.st_size, max(about.st_mtime_ns, about.st_ctime_ns))


def _hidden(name: str) -> bool:
    """Hidden files, "." and "..", and the folder that macOS adds to archives."""
    return name.startswith(".") or name in ("", "__MACOSX")


def _checked(content: bytes) -> bytes:
    if len(content) > _MAX_BYTES:
        raise UnreadableFile(f"has more than {_MAX_BYTES >> 20} MB")
    return content
