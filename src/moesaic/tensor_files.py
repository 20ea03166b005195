"""Safetensors files with JSON in their header and a checksum of both, written atomically and verified on reading.

The header has one key of metadata, ``moesaic``, whose value is JSON. Its ``sha256`` is the digest of the rest of that
JSON and of the name, dtype, shape and bytes of every tensor. Files of earlier versions have no checksum; they are read
as they are. There is no pickle, so nothing in a file runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moesaic.argument_checks import first_line, first_names, printable
from moesaic.files import json_digest, write_atomic, write_error_advice
from moesaic.validated_json import InvalidFile, parse_json

__all__ = [
    "METADATA_KEY",
    "TensorFile",
    "is_safetensors",
    "open_tensors",
    "parse_header",
    "shape_differences",
    "write_tensors",
]

METADATA_KEY = "moesaic"
"""The key of our JSON in the metadata of a safetensors file."""
CHECKSUM = "sha256"
"""The key of the checksum in that JSON."""

_DAMAGED = "it is damaged or something else: name another, or train again"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Writes tensors, and JSON in the header, to a safetensors file; the same values give the same bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a.safetensors"), {"x": torch.arange(3)}, {"name": "a"})
    ...     with open_tensors(Path(folder, "a.safetensors")) as file:
    ...         file.shapes, file.content(), file.tensors()
    ({'x': (3,)}, {'name': 'a'}, {'x': tensor([0, 1, 2])})
    """
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    addresses: set[int] = set()
    for name, tensor in flat.items():  # tensors with two names are written twice
        if tensor.data_ptr() in addresses:
            flat[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    # as it will be read: keys are strings, tuples are lists
    plain: dict[str, Any] = json.loads(json.dumps(content))
    described = {**plain, CHECKSUM: _digest(flat, plain)}
    # one key, for the order of several is not settled
    blob = save(flat, metadata={METADATA_KEY: json.dumps(described, ensure_ascii=False, sort_keys=True)})
    try:
        write_atomic(path, blob)
    except OSError as error:
        size = f"{len(blob) / 1e6:,.1f} MB"
        last = "the last one before it is still there" if path.exists() else "there is none before it"
        raise OSError(
            error.errno,
            f"the checkpoint {path} of {size} could not be written ({error.strerror or error}); {last}. "
            f"{write_error_advice(error, path)} and run the same again: it resumes from the last checkpoint",
        ) from error


class TensorFile:
    """An open safetensors file: names and shapes are known, values are read when they are asked for."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self._file = file
        self.metadata: dict[str, str] = file.metadata() or {}
        """The metadata of the header."""
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(file.get_slice(name).get_shape()) for name in cast("list[str]", file.keys())
        }
        """Shape of each tensor."""

    def content(self) -> dict[str, Any]:
        """Returns the JSON that `write_tensors` put into the header, without its checksum."""
        return {name: value for name, value in self._described().items() if name != CHECKSUM}

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors on the CPU; where the header has a checksum, it must be right."""
        with _damage(self.path):
            tensors = {name: cast("Tensor", self._file.get_tensor(name)) for name in self.shapes}
        described = self._described() if METADATA_KEY in self.metadata else {}
        if CHECKSUM in described and described[CHECKSUM] != _digest(tensors, self.content()):
            raise InvalidFile(
                f"{self.path} is not whole: its content does not match its checksum; use a copy of it, or train again"
            )
        return tensors

    def _described(self) -> dict[str, Any]:
        if METADATA_KEY not in self.metadata:
            raise InvalidFile(
                f"{self.path} is a safetensors file, but not one that moesaic wrote: its header has no "
                f"{METADATA_KEY!r}; load its tensors with safetensors.torch.load_file"
            )
        return parse_header(self.path, self.metadata[METADATA_KEY])


@contextmanager
def open_tensors(path: Path) -> Generator[TensorFile]:
    """Opens a safetensors file; raises `InvalidFile` if it is none, or damaged."""
    if not path.is_file():  # a FIFO would block
        raise InvalidFile(f"{path} is not a file; {_DAMAGED}")
    with ExitStack() as stack:
        with _damage(path):
            file = TensorFile(path, stack.enter_context(cast("Any", safe_open)(path, framework="pt")))
        yield file


def parse_header(path: Path, text: str) -> dict[str, Any]:
    """Returns the JSON object of a header; states of training may have numbers that are not finite."""
    where = f"{path} is not a whole safetensors file: the JSON of its header"
    content = parse_json(text, where, advice=_DAMAGED, nan=True)
    if not isinstance(content, dict):
        raise InvalidFile(f"{where} is not an object; {_DAMAGED}")
    return cast("dict[str, Any]", content)


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: the length of the header, then its JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def shape_differences(file: Mapping[str, tuple[int, ...]], network: Mapping[str, tuple[int, ...]]) -> str:
    """Returns how the tensors of a file and of a network differ, by their names and shapes; empty if they do not.

    >>> shape_differences({"weight": (2, 3)}, {"weight": (2, 4), "bias": (2,)})
    '1 missing in the file: bias; 1 of another shape: weight (2, 3) in the file, (2, 4) in the network'
    """
    reshaped = [
        f"{name} {file[name]} in the file, {shape} in the network"
        for name, shape in network.items()
        if file.get(name, shape) != shape
    ]
    kinds = {
        "missing in the file": [name for name in network if name not in file],
        "only in the file": [name for name in file if name not in network],
        "of another shape": reshaped,
    }
    return "; ".join(f"{len(names)} {kind}: {first_names(names)}" for kind, names in kinds.items() if names)


@contextmanager
def _damage(path: Path) -> Generator[None]:
    try:
        yield
    except InvalidFile:
        raise
    # the package raises its own error, and torch others on tensors that it cannot make
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        why = printable(first_line(error))
        raise InvalidFile(f"{path} is not a whole safetensors file ({why}); {_DAMAGED}") from error


def _digest(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    """SHA-256 of the JSON and of all tensors, in the order of their names."""
    digest = hashlib.sha256(json_digest(content).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
