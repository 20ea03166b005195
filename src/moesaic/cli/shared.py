"""What the commands share: bad input in one line, images, folders, devices, and how the program was called."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moesaic.data.datasets import ImageDataset

__all__ = [
    "CommandError",
    "file_name",
    "is_plain",
    "load_task",
    "log",
    "make_folder",
    "program",
    "resolve_device",
    "user_errors",
    "version",
    "versions",
]


class CommandError(Exception):
    """Something the user gave cannot be used; the message says what and how to mend it."""


@contextmanager
def user_errors(command: str) -> Generator[None]:
    """What goes wrong in here is the user's to mend: a value that is refused, a file or a package that is not there."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = " ".join(str(error).split()).removeprefix(f"{command}: ").removeprefix("fit: ")
        raise CommandError(f"moesaic {command}: {message}") from error


def make_folder(out: Path) -> None:
    """Make the folder of --out, or say why it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
        why = f"{in_the_way} is a file" if in_the_way else error.strerror
        raise OSError(f"--out={str(out)!r} cannot be made a directory: {why}; name another one") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise OSError(f"--out={str(out)!r} cannot be written to; name another directory")


def file_name(name: str) -> str:
    """A name of images or of a network as part of a path.

    >>> file_name("timm/resnet18"), file_name("Äpfel & Birnen")
    ('timm-resnet18', 'Äpfel---Birnen')
    """
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name) or "images"


def resolve_device(command: str, name: str) -> str:
    """The device that is meant by --device."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{command}: --device={name!r} is unknown; use 'auto', 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{command}: --device={name!r}, but torch finds no GPU here; use 'cpu' or 'auto'")
    return name


def versions() -> dict[str, str]:
    """Of what results depend on."""
    import numpy as np
    import torch

    return {
        "moesaic": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def version() -> str:
    """Of moesaic."""
    # of the public face, which is loaded by now and which no room imports from
    return sys.modules["moesaic"].__version__


class DatasetOptions(Protocol):
    """A command that takes a data set, and says where it lies and how its images are to be."""

    @property
    def data(self) -> str: ...
    @property
    def data_dir(self) -> Path | None: ...
    @property
    def size(self) -> int | None: ...
    @property
    def cache_dir(self) -> Path | None: ...
    @property
    def augment(self) -> str: ...
    @property
    def seed(self) -> int: ...


def load_task(command: DatasetOptions) -> ImageDataset:
    """The data set that a command asks for; what is skipped is told."""
    from moesaic.data.load import load_images
    from moesaic.papers.chowdhury2023.data import cifar_mosaic_datasets

    cifar_mosaic_datasets.register()

    augment: Any = command.augment  # load_images looks at it
    return load_images(
        command.data,
        data_dir=command.data_dir,
        size=command.size,
        cache_dir=command.cache_dir,
        augment=augment,
        seed=command.seed,
        log=log,
    )


def is_plain(value: object) -> bool:
    """Whether JSON takes it as it is."""
    return value is None or isinstance(value, str | int | float | tuple)


def program() -> list[str]:
    """How this program was called, as words to type again."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return [sys.executable, "-m", "moesaic"]
    return [called.name if shutil.which(called.name) else sys.argv[0]]


def log(message: str) -> None:
    """Say it on stderr."""
    sys.stderr.write(f"{message}\n")
