"""Atomic writes: a file is whole or not there, also after a loss of power, and no planted link is followed.

Content goes to a new file with a random name in the same folder, which is flushed to disk and then renamed; a link at
the path itself is replaced, not followed. `write_new` never replaces a file: of several writers the first one wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

__all__ = [
    "as_json",
    "atomic_file",
    "atomic_path",
    "check_json_digest",
    "json_bytes",
    "json_digest",
    "open_append",
    "remove_unfinished",
    "write_atomic",
    "write_error_advice",
    "write_json",
    "write_new",
]

_UNFINISHED = ".unfinished"
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EMLINK)
"""Errors of file systems that have no hard links, as those over buckets."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file atomically; NaN and infinity become null."""
    write_atomic(path, json_bytes(content))


def json_bytes(content: object) -> bytes:
    """Returns the text of a JSON file; NaN and infinity become null."""
    text = json.dumps(as_json(content), indent=1, ensure_ascii=False, allow_nan=False)
    # lists of numbers on one line; strings are not affected, as JSON escapes their line breaks
    text = _NUMBER_LIST.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
    return f"{text}\n".encode()


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """A new file that takes the place of ``path`` at the end of the block; after an error it is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(Path(folder, "a.txt")) as file:
    ...         _ = file.write(b"some ")
    ...         _ = file.write(b"text")
    ...     Path(folder, "a.txt").read_text(), len(list(Path(folder).iterdir()))
    ('some text', 1)
    """
    with _new_file(path, "") as (unfinished, file):
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()  # an open file cannot be renamed on Windows
        _rename(unfinished, path)


def write_new(path: Path, content: bytes) -> bool:
    """Writes a file unless there is one; returns whether it did.

    Of several processes, on one machine or on several that share the folder, exactly one succeeds. The file appears
    whole; on file systems without hard links it appears empty and is then filled.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.txt")
    ...     write_new(path, b"first"), write_new(path, b"second"), path.read_text()
    (True, False, 'first')
    """
    with _new_file(path, "") as (unfinished, file):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(unfinished, path)
        except FileExistsError:
            # a network file system may have repeated a call that had succeeded
            return os.fstat(file.fileno()).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create(path, content)
        _flush_folder(path.parent)
        return True


def _create(path: Path, content: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return True


@contextmanager
def atomic_path(path: Path) -> Generator[Path]:
    """As `atomic_file`, for libraries that open a file by its name, which has the suffix of ``path``."""
    with _new_file(path, path.suffix) as (unfinished, file):
        file.close()
        yield unfinished
        with open(unfinished, "rb+") as written:
            os.fsync(written.fileno())
        _rename(unfinished, path)


def write_error_advice(error: OSError, path: str | os.PathLike[str]) -> str:
    """Returns what to do about a file that could not be written, as a clause that begins a sentence.

    >>> write_error_advice(OSError(errno.ENOSPC, "No space left on device"), "runs/a/model.safetensors")
    'Free space on that disk'
    >>> write_error_advice(FileNotFoundError(errno.ENOENT, "No such file or directory"), "not-there/model.safetensors")
    'The folder not-there is gone: it was removed or renamed; put it back'
    """
    folder = Path(path).parent
    if error.errno in _DISK_FULL:
        return "Free space on that disk"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
        return f"The folder {folder} is gone: it was removed or renamed; put it back"
    if error.errno in _NOT_WRITABLE:
        return f"Make the folder {folder} writable"
    return "Check that disk"


def open_append(path: Path) -> BinaryIO:
    """Opens a file at its end, which is created if it is not there; a link is refused."""
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NOFOLLOW, 0o666), "ab")


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished files of processes that were killed; call it only if no other process writes there."""
    for unfinished in folder.glob(f".*{_UNFINISHED}*"):
        with suppress(OSError):
            unfinished.unlink()


def as_json(value: Any) -> Any:
    """Returns a value as JSON represents it: lists for tuples, None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in cast("list[Any]", value)]
    return value


def json_digest(content: Any) -> str:
    """Returns the SHA-256 of plain JSON, whatever the order of its keys.

    >>> json_digest({"a": 1, "b": [2]}) == json_digest({"b": [2], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def add_json_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object with its checksum under the key ``sha256``; `check_json_digest` verifies it."""
    return {**content, "sha256": json_digest(content)}


def check_json_digest(content: Mapping[str, Any], key: str = "sha256") -> tuple[dict[str, Any], bool]:
    """Returns an object without its checksum, and whether that is right or, as in older files, missing.

    >>> check_json_digest({"a": 1, "sha256": json_digest({"a": 2})})
    ({'a': 1}, False)
    """
    rest = {name: value for name, value in content.items() if name != key}
    return rest, key not in content or content[key] == json_digest(rest)


_NUMBER_LIST = re.compile(r"\[\n\s*(?:(?:[-+.\deE]+|null),\n\s*)*(?:[-+.\deE]+|null)\n\s*\]")


@contextmanager
def _new_file(path: Path, suffix: str) -> Generator[tuple[Path, BinaryIO]]:
    """A new file beside ``path``, with the rights of any new file; removed at the end if it is still there."""
    while True:
        unfinished = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{_UNFINISHED}{suffix}")
        try:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666)
        except FileExistsError:
            continue
        break
    try:
        with open(descriptor, "rb+") as file:
            yield unfinished, file
    finally:
        with suppress(OSError):  # it was renamed
            unfinished.unlink()


def _rename(unfinished: Path, path: Path) -> None:
    unfinished.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system opens folders, not every file system flushes them
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
