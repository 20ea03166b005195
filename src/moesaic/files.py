"""Atomic writes of JSON and other files, and typed reading of JSON records as dataclasses."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

__all__ = ["as_json", "read_records", "write_atomic", "write_json"]

Record = TypeVar("Record")


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file atomically; NaN and infinity become null."""
    text = json.dumps(as_json(content), indent=1, ensure_ascii=False, allow_nan=False)
    # lists of numbers on one line; strings are not affected, as JSON escapes their line breaks
    text = _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
    write_atomic(path, f"{text}\n".encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file atomically: to a temporary name that is unique to the process, then renamed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def as_json(value: Any) -> Any:
    """Returns a value as JSON represents it: lists for tuples, None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in cast("list[Any]", value)]
    return value


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Reads the records of a dataclass from a JSON file; errors contain the path within the file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error}); write it again") from error
    return list(_decoded(tuple[kind, ...], loaded, str(path)))


_NUMBERS = re.compile(r"\[\n\s*(?:(?:[-+.\deE]+|null),\n\s*)*(?:[-+.\deE]+|null)\n\s*\]")


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Converts a JSON value to the type ``kind`` of an annotation."""
    options = get_args(kind)
    if get_origin(kind) is UnionType:
        # None first: null may also stand for a float that is not finite
        if value is None and NoneType in options:
            return None
        accepts = [option for option in options if option is not NoneType and _fits(option, value)]
        return _decoded(accepts[0] if accepts else options[0], value, where)
    if not _fits(kind, value):
        raise ValueError(f"{where}: {value!r}; expected {_type_name(kind)}")
    if get_origin(kind) is tuple:
        kinds = [options[0]] * len(value) if options[-1] is ... else options
        if len(kinds) != len(value):
            raise ValueError(f"{where}: {len(value)} values; expected {len(kinds)}")
        pairs = zip(kinds, value, strict=True)
        return tuple(_decoded(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(pairs))
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
        if set(value) != set(names):
            raise ValueError(f"{where}: has the keys {sorted(value)}; it must have {sorted(names)}")
        hints = get_type_hints(kind)
        made = {name: _decoded(hints[name], value[name], f"{where}.{name}") for name in names}
        return cast("type[Any]", kind)(**made)
    return math.nan if kind is float and value is None else value


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list)
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    return "a list" if get_origin(kind) is tuple else "an object" if is_dataclass(kind) else f"a {kind.__name__}"
