"""Reads JSON that may be damaged or malicious: bounded, checked, with one type of error.

A file is read up to a limit of bytes and parsed up to limits of depth and number of values; what passes is free of
NaN and infinity unless they are asked for. `decode` then converts it to dataclasses by their annotations. Whatever is
wrong raises `InvalidFile` with a message of one line, which names the file, the fault and what to do.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from moesaic.argument_checks import first_line, printable

__all__ = [
    "MAX_FILE_BYTES",
    "InvalidFile",
    "JsonLimits",
    "decode",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_records",
    "read_stream",
    "refused_as",
]

Record = TypeVar("Record")

MAX_FILE_BYTES = 1 << 28
"""Larger files are not read into memory, nor are streams decompressed beyond it."""

_CHUNK = 1 << 20
"""Bytes read at a time where the size is not known."""
_MAX_SHOWN_CHARACTERS = 80
"""Characters of a value that an error shows."""


class InvalidFile(ValueError):
    """A file is damaged, too large, or not what it should be; the message is one line."""


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a JSON text: the memory and the recursion that reading it takes."""

    bytes: int = 1 << 26
    depth: int = 64
    """Lists and objects inside each other."""
    values: int = 4_000_000
    """Values of all lists and objects together."""


_LIMITS = JsonLimits()


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_bytes(path: str | Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Returns the content of a regular file of at most ``limit`` bytes; a FIFO or a device does not block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("some text")
    ...     read_bytes(Path(folder, "a.txt"), limit=4)
    Traceback (most recent call last):
    moesaic.validated_json.InvalidFile: .../a.txt: has 9 bytes, more than the 4 that are read
    """
    # without O_NONBLOCK, opening a FIFO waits for a writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidFile(f"{printable(str(path))}: is not a file but {_kind(about.st_mode)}")
        if about.st_size > limit:
            raise InvalidFile(f"{printable(str(path))}: has {about.st_size} bytes, more than the {limit} that are read")
        # files of /proc and the like have size 0, and a file may grow meanwhile
        content = file.read(about.st_size)
        return content + read_stream(file, limit - len(content), str(path))


def read_stream(file: _Readable, limit: int, where: str) -> bytes:
    """Returns the rest of a stream, such as a decompressed one, of at most ``limit`` bytes.

    Memory is taken as bytes arrive: ``file.read(limit)`` of a buffered file would take all of it at once.
    """
    parts: list[bytes] = []
    left = limit
    while part := file.read(min(_CHUNK, left + 1)):
        left -= len(part)
        if left < 0:
            raise InvalidFile(f"{printable(where)}: has more than {limit} bytes, the most that are read")
        parts.append(part)
    return b"".join(parts)


def read_json(path: str | Path, *, advice: str = "write it again", limits: JsonLimits = _LIMITS) -> Any:
    """Reads a JSON file within limits; ``advice`` ends the message of an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.json").write_text("[" * 100 + "]" * 100)
    ...     read_json(Path(folder, "a.json"))
    Traceback (most recent call last):
    moesaic.validated_json.InvalidFile: .../a.json: nests lists and objects 100 deep, at most 64 are read; write it
    again
    """
    try:
        content = read_bytes(path, limits.bytes)
    except InvalidFile as fault:
        raise InvalidFile(f"{fault}; {advice}") from fault
    return parse_json(content, printable(str(path)), advice=advice, limits=limits)


def parse_json(
    text: str | bytes,
    where: str,
    *,
    advice: str = "write it again",
    limits: JsonLimits = _LIMITS,
    nan: bool = False,
) -> Any:
    """Parses JSON within limits; ``where`` begins the message of an error, ``advice`` ends it."""

    def refuse(fault: str) -> InvalidFile:
        return InvalidFile(f"{where}: {fault}; {advice}")

    if len(text) > limits.bytes:
        raise refuse(f"has {len(text)} bytes of JSON, at most {limits.bytes} are read")
    try:
        if isinstance(text, bytes):
            text = text.decode()
        # every value but the first of a list follows a comma: counted before any memory is taken for them
        if text.count(",") + text.count("[") + text.count("{") > limits.values:
            raise refuse(f"has more than {limits.values} values, the most that are read")
        content = json.loads(text)
    except InvalidFile:
        raise
    except RecursionError as fault:
        raise refuse(f"nests lists and objects too deep, at most {limits.depth} are read") from fault
    except (ValueError, OverflowError) as fault:
        raise refuse(f"is not JSON ({fault})") from fault
    depth, finite = _depth_and_finite(content)
    if depth > limits.depth:
        raise refuse(f"nests lists and objects {depth} deep, at most {limits.depth} are read")
    if not (finite or nan):
        raise refuse("has a number that is not finite")
    if "\\ud" in text.lower() and not _encodable(content):
        raise refuse("has text that is not Unicode")
    return content


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Reads the records of a dataclass from a JSON file; errors contain the path within the file."""
    return list(decode(tuple[kind, ...], read_json(path), str(path)))


def decode(kind: Any, value: Any, where: str, *, more: bool = False) -> Any:
    """Converts a JSON value to the type ``kind`` of an annotation: dataclasses, tuples, unions, numbers, strings.

    Args:
        kind: the type.
        value: the value.
        where: begins the message of an error.
        more: whether objects may have keys besides the fields of a dataclass, and lack those that have defaults.

    >>> decode(tuple[int, ...], [1, 2, "3"], "numbers")
    Traceback (most recent call last):
    moesaic.validated_json.InvalidFile: numbers[2]: '3'; expected a int
    """
    options = get_args(kind)
    if kind is Any:
        return value
    if get_origin(kind) is UnionType:
        # None first: null may also stand for a float that is not finite
        if value is None and NoneType in options:
            return None
        accepts = [option for option in options if option is not NoneType and _fits(option, value)]
        return decode(accepts[0] if accepts else options[0], value, where, more=more)
    if not _fits(kind, value):
        raise InvalidFile(f"{where}: {_shown(value)}; expected {_type_name(kind)}")
    if get_origin(kind) is tuple:
        kinds = [options[0]] * len(value) if options[-1] is ... else options
        if len(kinds) != len(value):
            raise InvalidFile(f"{where}: {len(value)} values; expected {len(kinds)}")
        pairs = zip(kinds, value, strict=True)
        return tuple(decode(each, item, f"{where}[{i}]", more=more) for i, (each, item) in enumerate(pairs))
    if is_dataclass(kind):
        return _dataclass(cast("type[Any]", kind), value, where, more)
    return math.nan if kind is float and value is None else value


@contextmanager
def refused_as(message: str, error: type[InvalidFile] = InvalidFile) -> Generator[None]:
    """Turns what code raises on content of the wrong form into ``error``, whose message is ``message`` and the reason.

    >>> with refused_as("result.json is not what a run writes"):
    ...     {}["accuracy"]
    Traceback (most recent call last):
    moesaic.validated_json.InvalidFile: result.json is not what a run writes ('accuracy' is missing)
    """
    try:
        yield
    except InvalidFile as fault:
        if isinstance(fault, error):
            raise
        raise error(str(fault)) from fault
    except KeyError as fault:
        raise error(f"{message} ({_shown(fault.args[0] if fault.args else '')} is missing)") from fault
    except (ArithmeticError, AttributeError, IndexError, MemoryError, RuntimeError, TypeError, ValueError) as fault:
        raise error(f"{message} ({printable(first_line(fault))})") from fault


def _dataclass(kind: type[Any], value: Mapping[str, Any], where: str, more: bool) -> Any:
    names = {each.name: each for each in fields(kind)}
    optional = {
        name
        for name, each in names.items()
        if more and (each.default is not MISSING or each.default_factory is not MISSING)
    }
    missing, unknown = names.keys() - value.keys() - optional, value.keys() - names.keys()
    if missing or (unknown and not more):
        raise InvalidFile(
            f"{where}: has the keys {_shown(sorted(value))}; it must have {sorted(names.keys() - optional)}"
        )
    hints = get_type_hints(kind)
    values = {name: decode(hints[name], value[name], f"{where}.{name}", more=more) for name in names if name in value}
    try:
        return kind(**values)
    except InvalidFile:
        raise
    except ValueError as fault:  # of __post_init__, which knows what fits together
        raise InvalidFile(f"{where}: {fault}") from fault


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list)
    if get_origin(kind) in (dict, Mapping) or is_dataclass(kind):
        return isinstance(value, dict)
    if kind is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    if get_origin(kind) in (dict, Mapping) or is_dataclass(kind):
        return "an object"
    return "a list" if get_origin(kind) is tuple else f"a {kind.__name__}"


def _shown(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def _depth_and_finite(content: Any) -> tuple[int, bool]:
    """Level by level, as the stack would not hold a recursion."""
    level, depth, finite = [content], 0, True
    while level:
        finite = finite and all(not isinstance(each, float) or math.isfinite(each) for each in level)
        depth += any(isinstance(each, dict | list) for each in level)
        level = [child for each in level for child in _children(each)]
    return depth, finite


def _encodable(content: Any) -> bool:
    """Whether all strings can be written: JSON can spell halves of characters."""
    level = [content]
    while level:
        keys = [key for each in level if isinstance(each, dict) for key in cast("dict[str, Any]", each)]
        for each in (*level, *keys):
            if isinstance(each, str) and any("\ud800" <= letter <= "\udfff" for letter in each):
                return False
        level = [child for each in level for child in _children(each)]
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
