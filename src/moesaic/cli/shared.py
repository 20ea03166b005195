"""Shared by the commands: errors in one line, datasets, output folders, devices, versions."""

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
    "load_dataset",
    "log",
    "make_folder",
    "program",
    "resolve_device",
    "user_errors",
    "version",
    "versions",
]


class CommandError(Exception):
    """An option or input that cannot be used; the message says which, and what to do."""


@contextmanager
def user_errors(command: str) -> Generator[None]:
    """Turns errors inside into a `CommandError`: refused values, missing files, missing packages."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = " ".join(str(error).split()).removeprefix(f"{command}: ").removeprefix("fit: ")
        raise CommandError(f"moesaic {command}: {message}") from error


def make_folder(out: Path) -> None:
    """Creates the folder of --out; an error says why that is impossible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
        why = f"{in_the_way} is a file" if in_the_way else error.strerror
        raise OSError(f"--out={str(out)!r} cannot be made a directory: {why}; name another one") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise OSError(f"--out={str(out)!r} cannot be written to; name another directory")


def file_name(name: str) -> str:
    """Returns the name of a dataset or a network as part of a path.

    >>> file_name("timm/resnet18"), file_name("Äpfel & Birnen")
    ('timm-resnet18', 'Äpfel---Birnen')
    """
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name) or "images"


def resolve_device(command: str, name: str) -> str:
    """Returns the device of --device."""
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
    """Returns the versions of the packages that results depend on."""
    import numpy as np
    import torch

    return {
        "moesaic": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def version() -> str:
    """Returns the version of moesaic."""
    # of the public face, which is loaded by now and which no package imports from
    return sys.modules["moesaic"].__version__


class DatasetOptions(Protocol):
    """The options of a command that loads a dataset."""

    @property
    def data(self) -> str: ...
    @property
    def data_dir(self) -> Path | None: ...
    @property
    def img_size(self) -> int | None: ...
    @property
    def cache_dir(self) -> Path | None: ...
    @property
    def augment(self) -> str: ...
    @property
    def seed(self) -> int: ...


def load_dataset(command: DatasetOptions) -> ImageDataset:
    """Loads the dataset of a command; files that are skipped are logged."""
    from moesaic.data.load import load_images
    from moesaic.papers.chowdhury2023.data import cifar_mosaic_datasets

    cifar_mosaic_datasets.register()

    augment: Any = command.augment  # load_images checks it
    return load_images(
        command.data,
        data_dir=command.data_dir,
        size=command.img_size,
        cache_dir=command.cache_dir,
        augment=augment,
        seed=command.seed,
        log=log,
    )


def is_plain(value: object) -> bool:
    """Returns whether JSON can represent the value as it is."""
    return value is None or isinstance(value, str | int | float | tuple)


def program() -> list[str]:
    """Returns the words by which this program was called."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return [sys.executable, "-m", "moesaic"]
    return [called.name if shutil.which(called.name) else sys.argv[0]]


def log(message: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"{message}\n")
