"""The folder of a training run: config.json, metrics.jsonl, checkpoints, and result.json last.

A run that finds its own folder continues; one that finds another run's says which settings differ.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset
from moesaic.files import (
    add_json_digest,
    as_json,
    check_json_digest,
    open_append,
    remove_unfinished,
    write_atomic,
    write_error_advice,
    write_json,
)
from moesaic.models.registry import ModelSpec
from moesaic.tensor_files import write_tensors
from moesaic.training.checkpoint import NETWORK, CheckpointError, read_tensors
from moesaic.training.fit_result import Epoch, FitResult
from moesaic.training.migrations import migrate_config, migrate_state
from moesaic.training.ranks import Ranks
from moesaic.training.recipe import Recipe
from moesaic.validated_json import decode, read_json, refused_as

__all__ = ["FolderInUse", "RunDir", "describe_run"]

T = TypeVar("T")

_MAY_DIFFER = ("versions", "device", "threads", "ranks", "data.name", "model.arguments.weights")
"""Parts of a configuration that may differ between a run and its continuation; weights have a digest beside them."""
_SHOWN = 6
"""Differences that an error lists, at most."""


class FolderInUse(CheckpointError):
    """Another process uses the folder of a run."""


@dataclass(frozen=True)
class _State:
    """The JSON of training in progress."""

    train_step: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...]
    batches: int
    alarms: tuple[str, ...]
    seconds: float


class RunDir:
    """The folder of a run: settings, metrics and checkpoints. It is locked against other runs until it is closed.

    Of several ranks the first reads and writes; the others get what it has read.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], ranks: Ranks | None = None) -> None:
        self.folder = folder
        self.network = folder / NETWORK
        self.state = folder / "training.safetensors"
        """Training in progress; gone when it is complete."""
        self.result = folder / "result.json"
        self.metrics = folder / "metrics.jsonl"
        self.other_threads: int | None = None
        """The number of CPU threads that the run began with, if another one: sums are then rounded differently."""
        self._lock: int | None = None
        self._ranks = ranks
        self.writes = ranks is None or ranks.is_first
        """Whether this process writes the files."""
        try:
            self._first(lambda: self._make(config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder; the end of the process does that as well."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read_result(self) -> FitResult | None:
        """Returns the result of a complete run, else None."""
        content = self._first(self._read_result)
        if self._ranks is not None:
            content = self._ranks.from_first(content)
        if content is None:
            return None
        with refused_as(f"fit: {self.result} is not what a run writes", CheckpointError):
            return FitResult.from_json(content)

    def _read_result(self) -> dict[str, Any] | None:
        if not self.result.exists():
            return None
        return _read(self.result)

    def read_state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Returns the state of the last checkpoint, else None."""
        found = self._first(self._read_state)
        if self._ranks is None:
            return found
        tensors, content = found or ({}, None)
        content = self._ranks.from_first(content)
        return None if content is None else (self._ranks.tensors_from_first(tensors), content)

    def _read_state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.state.exists():
            return None
        tensors, content = read_tensors(self.state)
        with refused_as(f"fit: {self.state} is not the state of a run", CheckpointError):
            tensors, content = migrate_state(tensors, content)
            decode(_State, content, f"fit: {self.state}", more=True)
            for epoch in content["epochs"]:
                Epoch.from_json(epoch)
            return tensors, content

    def write_state(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        if self.writes:
            write_tensors(self.state, tensors, content)

    def write_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Rewrite metrics.jsonl with the lines of a checkpoint, without those of epochs that were lost."""
        self._write(self.metrics, lambda: write_atomic(self.metrics, "".join(map(_line, lines)).encode()))

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""

        def append() -> None:
            with open_append(self.metrics) as file:
                file.write(_line(line).encode())

        self._write(self.metrics, append)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result of a complete run, and remove the state of training in progress."""
        if not self.writes:
            return
        content: dict[str, Any] = json.loads(json.dumps(as_json(result)))  # as it will be read
        self._write(self.result, lambda: write_json(self.result, add_json_digest(content)))
        self.state.unlink(missing_ok=True)

    def _make(self, config: Mapping[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"fit: out={str(self.folder)!r} cannot be made a folder ({error.strerror}); name another one"
            ) from error
        self._lock = _lock_folder(self.folder)
        remove_unfinished(self.folder)  # of writes that were interrupted
        path = self.folder / "config.json"
        if path.exists():
            with refused_as(f"fit: {path} is not what a run writes", CheckpointError):
                stored = migrate_config(_read(path))
            _check_same(self.folder, stored, json.loads(json.dumps(config)))
            threads = stored.get("threads")
            if isinstance(threads, int) and config.get("threads") not in (None, threads):
                self.other_threads = threads
        else:
            for stale in (self.result, self.state):
                if stale.exists():
                    raise CheckpointError(
                        f"fit: {stale} is there without a config.json that says what it is of; name another folder, or "
                        "remove it"
                    )
            self._write(path, lambda: write_json(path, add_json_digest(config)))

    def _first(self, work: Callable[[], T]) -> T | None:
        return work() if self._ranks is None else self._ranks.run_first(work)

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        if not self.writes:
            return
        try:
            write()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path} could not be written ({error.strerror or error}); checkpoints in {self.folder} are whole. "
                f"{write_error_advice(error, path)} and run the same again: it resumes from the last checkpoint",
            ) from error


def _lock_folder(folder: Path) -> int | None:
    """Lock the folder, where the system has locks; returns a file descriptor to be closed."""
    try:
        import fcntl
    except ImportError:  # no such thing on Windows
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FolderInUse(
            f"fit: another run is at work in {folder}; wait until it has ended, or name another folder"
        ) from error
    except OSError:  # some network file systems have no locks
        os.close(descriptor)
        return None
    return descriptor


def describe_run(
    model: nn.Module,
    dataset: ImageDataset,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    spec: ModelSpec | None,
    eval_every: int,
) -> dict[str, Any]:
    """Returns all settings that a run depends on, and the versions and device it began with."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    description: dict[str, Any] = {"class": type(model).__name__, "parameters": parameters}
    return {
        "model": description if spec is None else spec.to_json(),
        "data": {
            "name": dataset.name,
            "digest": dataset.digest or f"{dataset.train.fingerprint()} {dataset.test.fingerprint()}",
            "train": len(dataset.train),
            "test": len(dataset.test),
            "shape": list(dataset.train.pixels.shape[1:]),
            "classes": list(dataset.class_names),
            "train_transform": _described(dataset.train_transform),
            "eval_transform": _described(dataset.eval_transform),
        },
        "recipe": recipe.to_json(),
        "seed": seed,
        "eval_every": eval_every,
        "device": str(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _described(transform: object) -> str:
    if is_dataclass(transform):
        return repr(transform)
    return getattr(transform, "__qualname__", type(transform).__name__)


def _check_same(folder: Path, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    old, new = _flat(stored), _flat(config)
    parts = tuple(f"{part}." for part in _MAY_DIFFER)
    differences = [
        f"{name} was {old.get(name, 'not set')!r}, is {new.get(name, 'not set')!r}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and not f"{name}.".startswith(parts)
    ]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"fit: {folder} holds a run with other settings: {'; '.join(differences[:_SHOWN])}{more}. Name another "
            "folder with --out; or use its settings, and it continues; or remove it"
        )


def _flat(content: Mapping[str, Any], stem: str = "") -> dict[str, Any]:
    """Flattens nested settings; their names are joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{stem}{name}.")
        else:
            flat[f"{stem}{name}"] = value
    return flat


def _read(path: Path) -> dict[str, Any]:
    """Reads JSON and verifies its checksum; files of earlier versions have none."""
    advice = "name another folder, or remove this one"
    with refused_as(f"fit: {path} cannot be read", CheckpointError):
        content = read_json(path, advice=advice)
    if not isinstance(content, dict):
        raise CheckpointError(f"fit: {path} is not what a run writes; {advice}")
    settings, is_whole = check_json_digest(cast("dict[str, Any]", content))
    if not is_whole:
        raise CheckpointError(
            f"fit: the content of {path} does not match its checksum; restore it from a copy, or remove the folder and "
            "train again"
        )
    return settings


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(add_json_digest(content), ensure_ascii=False, allow_nan=False) + "\n"
