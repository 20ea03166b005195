"""Shared by the commands: errors in one line, dataset options, output folders, devices, versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from moesaic.cli.faults import DISK_FAULTS, CommandError, log, work_begins
from moesaic.cli.invocation import invocation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from moesaic.data.image_dataset import ImageDataset
    from moesaic.models.pretrained import PretrainedConfig
    from moesaic.training.checkpoint import Checkpoint

__all__ = [
    "CommandError",
    "DataArgument",
    "DatasetOptions",
    "JobsOption",
    "PaperOption",
    "RouterOption",
    "TrainableOption",
    "check_folder",
    "check_writable",
    "earlier_threads",
    "file_name",
    "invocation",
    "load_run",
    "log",
    "make_folder",
    "normalized",
    "register_datasets",
    "resolve_device",
    "use_threads",
    "user_errors",
    "version",
    "write_config",
]


_FUNCTIONS = ("fit", "Recipe", "create_model", "create_head", "load_images", "Setting", "models", "subset")
"""Functions and classes whose names stand before messages of the library; a command does not print them."""
_OPTION_OF = {"name": ("model", "models", "network"), "size": ("img_size",)}
"""Options that set an argument of the library under another name."""

TrainableOption = Annotated[
    str | None,
    arg(
        metavar="all|head|last-N",
        help_behavior_hint="(default: head with pretrained weights and under 5000 images, else all)",
    ),
]
JobsOption = Annotated[str, arg(metavar="N|auto")]
PaperOption = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")]
RouterOption = Annotated[str | None, arg(metavar="MODULE:CLASS", help_behavior_hint="(default: none)")]


@contextmanager
def user_errors(command: str) -> Generator[None]:
    """Turns errors inside into a `CommandError`: refused values, missing files, missing packages."""
    work_begins()
    try:
        yield
    except BrokenPipeError:  # the reader of the output has left
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            raise  # no bad input: `run_guarded` says what to do
        message = " ".join(str(error).split())
        for name in (command, *_FUNCTIONS):
            message = message.removeprefix(f"{name}: ")
        raise CommandError(f"moesaic {command}: {_with_option(command, message)}") from error


def _with_option(command: str, message: str) -> str:
    """Names the option that was typed in place of the argument that it sets: ``epochs=0; …`` as ``--epochs=0; …``."""
    from moesaic.cli.commands import find_command

    name, equals, rest = message.partition("=")
    options = [field.name for field in fields(find_command(command.split())[0])]
    found = next((each for each in (name, *_OPTION_OF.get(name, ())) if each in options), None)
    if not equals or found is None:
        return message
    return f"{'NETWORK' if found == 'network' else '--' + found.replace('_', '-')}={rest}"


def load_run(path: Path, device: str, router: str | None) -> Checkpoint:
    """Loads the network of a run; ``router`` is that of --router."""
    from moesaic.routing.registry import import_router
    from moesaic.training.checkpoint import load_checkpoint

    return load_checkpoint(path, device, router=None if router is None else import_router(router))


def check_folder(out: Path | None) -> None:
    """Raises if the folder of --out could not be made or written to, without making it; None is not checked."""
    if out is None:
        return
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OSError(
            f"--out={str(out)!r} cannot be made a directory: {_relative(existing)} is a file; name another one"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(f"--out={str(out)!r} cannot be written to; name another directory")


def check_writable(option: str, file: Path) -> None:
    """Raises if the folder of a file is not there or cannot be written to."""
    if not file.parent.is_dir():
        raise ValueError(
            f"{option}={str(file)!r}: there is no directory {file.parent}; create it, or name another file"
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{option}={str(file)!r}: the directory {file.parent} cannot be written to; name a file in another one"
        )


def make_folder(out: Path) -> None:
    """Creates the folder of --out; an error says why that is impossible."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out={str(out)!r} cannot be made a directory: {error.strerror}; name another one") from error


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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


def write_config(out: Path, command: DataclassInstance, given: Sequence[str], device: str) -> tuple[str, str]:
    """Creates ``out`` and writes config.json: the options and the versions that results depend on.

    Returns the command line and the machine.
    """
    import numpy as np
    import torch

    from moesaic.files import write_json
    from moesaic.report import describe_machine

    make_folder(out)
    threads = torch.get_num_threads()
    earlier = earlier_threads(out) if device == "cpu" else []
    if any(count != threads for count in earlier):
        others = ", ".join(str(count) for count in earlier if count != threads)
        log(
            f"results in {out} were computed with {others} CPU threads, and the rest will be with {threads}: they may "
            f"differ from those with a single count; OMP_NUM_THREADS={earlier[0]} keeps them the same"
        )
    line, machine = shlex.join(["moesaic", *given]), describe_machine(device)
    options = asdict(command).items()
    content = {
        "command": line,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in options},
        "versions": {
            "moesaic": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": machine,
        "threads": [*earlier, *([] if threads in earlier else [threads])],
    }
    write_json(out / "config.json", content)
    return line, machine


def earlier_threads(out: Path) -> list[int]:
    """Returns the numbers of CPU threads that results in the folder were computed with."""
    try:
        counts = json.loads((out / "config.json").read_text(encoding="utf-8"))["threads"]
        return [int(count) for count in counts]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # none before, or of an earlier version


def use_threads(out: Path, jobs: int, device: str) -> int:
    """Sets the CPU threads of this process to those of each of its workers, and returns how many.

    Results of another number of threads are rounded differently: the number that those in the folder were computed
    with is used again, unless OMP_NUM_THREADS says otherwise or there are fewer cores.
    """
    import torch

    from moesaic.cli.workers import cpu_threads

    threads = cpu_threads(jobs, earlier_threads(out) if device == "cpu" else [])
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
        if jobs == 1:
            log(f"computing with {threads} CPU threads, as the results in {out} were; OMP_NUM_THREADS changes that")
    return threads


def version() -> str:
    """Returns the version of moesaic."""
    # of the public face, which is loaded by now and which no package imports from
    return sys.modules["moesaic"].__version__


@dataclass(frozen=True)
class DataArgument:
    """The argument of the commands that train on a dataset."""

    data: Positional[Annotated[str, arg(metavar="DATA")]]
    """Folder of images with a subfolder for each class, a zip file of one, or a dataset name such as cifar10."""


@dataclass(frozen=True)
class DatasetOptions(DataArgument):
    """Options of the commands that train on a dataset.

    A command derives from this class and from a class of its own options, in this order: help then lists its own first.
    """

    augment: Annotated[str, arg(metavar="none|flip|flip-crop|strong")] = "none"
    """Augmentation of the training images: none, random horizontal flips, flips and random crops, or strong: flips,
    crops, changes of shape and colours, and an erased square."""
    img_size: Annotated[
        int | None,
        arg(metavar="PIXELS", help_behavior_hint="(default: the pretrained network's or the dataset's, else 64)"),
    ] = None
    """Height and width that images are resized to."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Folder with the files of a dataset that is given by name."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: the user's cache)")] = None
    """Folder of the cache of decoded images and features."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto: a GPU if there is one."""
    seed: int = 0
    """Random seed of the sampled images, the initial weights and the order of the images."""

    def load(self, image_size: int | None = None) -> ImageDataset:
        """Loads the dataset, by default with images of ``image_size``; files that are skipped are logged."""
        from moesaic.data.load import load_images

        register_datasets()
        augment: Any = self.augment  # load_images checks it
        return load_images(
            self.data,
            data_dir=self.data_dir,
            size=image_size if self.img_size is None else self.img_size,
            cache_dir=self.cache_dir,
            augment=augment,
            seed=self.seed,
            log=log,
        )


def register_datasets() -> None:
    """Makes the papers' datasets known by name; the library itself does not import the papers."""
    from moesaic.papers.chowdhury2023.data import cifar_mosaics

    cifar_mosaics.register()


def normalized(dataset: ImageDataset, config: PretrainedConfig) -> ImageDataset:
    """Returns the dataset with the normalization of a pretrained network, where it is known."""
    from moesaic.data.image_dataset import Normalize

    return dataset.with_normalize(Normalize(config.mean, config.std)) if config.mean and config.std else dataset
