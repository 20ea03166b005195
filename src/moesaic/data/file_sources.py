"""Where picture files lie: a folder, or a zip file that is read in place.

Both list their files by name and read them into memory. Nothing is unpacked, so it does not matter
where the names in an archive point.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

__all__ = ["FileEntry", "FolderShelf", "Shelf", "UnreadableFile", "ZipShelf", "open_shelf", "printable"]

_MOST_BYTES = 1 << 28
"""Larger files are no pictures that anyone trains on."""


class UnreadableFile(ValueError):
    """A file that cannot be read; the message says why, in words that follow the file's name."""


@dataclass(frozen=True)
class FileEntry:
    """A file, and what tells whether it changed."""

    name: str
    """Its path below the shelf, with "/" between folders."""
    bytes: int
    stamp: int
    """When it was changed last, in nanoseconds; in an archive, the checksum of its content."""


class Shelf(Protocol):
    """Files that can be listed and read; a context manager, and safe to read from several threads."""

    @property
    def path(self) -> Path:
        """The folder or the archive itself."""
        ...

    @property
    def identity(self) -> str:
        """Tells apart shelves whose files have the same names, sizes and stamps."""
        ...

    def entries(self) -> tuple[FileEntry, ...]:
        """All files, sorted by name; without hidden ones and those in hidden folders."""
        ...

    def read(self, name: str) -> bytes:
        """The content of a file; raises `UnreadableFile`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_shelf(path: str | Path) -> Shelf:
    """The shelf of a folder or a zip file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("some text")
    ...     with open_shelf(folder) as shelf:
    ...         print([entry.name for entry in shelf.entries()], shelf.read("a.txt"))
    ['a.txt'] b'some text'
    """
    path = Path(path)
    if path.is_dir():
        return FolderShelf(path)
    if path.is_file():
        return ZipShelf(path)
    raise FileNotFoundError(f"{path}: there is no such folder or zip file; check the path")


class FolderShelf:
    """The files in a folder and in the folders below it; links are followed, but not in circles."""

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
                return _content(file.read(_MOST_BYTES + 1))
        except OSError as fault:
            raise UnreadableFile(f"cannot be read ({fault.strerror or fault})") from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class ZipShelf:
    """The files in a zip archive, which stays open until the context ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError) as fault:
            raise ValueError(
                f"{path}: is not a whole zip file ({fault}); give the folder that has the images, or "
                "make or fetch the archive again"
            ) from fault
        # some programs for Windows separate folders by backslashes
        self._members = {
            info.filename.replace("\\", "/"): info for info in self._archive.infolist() if not info.is_dir()
        }

    @property
    def identity(self) -> str:
        return ""  # checksums of all files tell enough

    def entries(self) -> tuple[FileEntry, ...]:
        return tuple(
            FileEntry(name, info.file_size, info.CRC)
            for name, info in sorted(self._members.items())
            if not any(_hidden(part) for part in name.split("/"))
        )

    def read(self, name: str) -> bytes:
        try:
            with self._archive.open(self._members[name]) as file:
                return _content(file.read(_MOST_BYTES + 1))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as fault:
            raise UnreadableFile(f"is damaged in the archive ({fault})") from fault
        except RuntimeError as fault:  # zipfile says so of encrypted members, and of unknown ways to pack
            raise UnreadableFile("is encrypted, or packed in a way that cannot be read") from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()


def printable(name: str) -> str:
    """A name as it can be shown and written anywhere: what is no character, or none to be seen, becomes �.

    >>> printable("Äpfel & Birnen"), printable("two" + chr(10) + "lines")
    ('Äpfel & Birnen', 'two�lines')
    """
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name)


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
        except OSError:  # a link to nowhere: reading it will tell
            yield FileEntry(prefix + child.name, 0, 0)
            continue
        # the second is later where only the right to read the file was given
        yield FileEntry(prefix + child.name, about.st_size, max(about.st_mtime_ns, about.st_ctime_ns))


def _hidden(name: str) -> bool:
    """Also "." and "..", which name no file, and the folder that macOS adds to archives."""
    return name.startswith(".") or name in ("", "__MACOSX")


def _content(content: bytes) -> bytes:
    if len(content) > _MOST_BYTES:
        raise UnreadableFile(f"has more than {_MOST_BYTES >> 20} MB")
    return content
