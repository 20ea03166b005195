"""Experiment trackers, such as TensorBoard: get the metrics of a run besides metrics.jsonl.

Each package is imported when it is asked for; all come with the extra ``moesaic[track]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from moesaic.argument_checks import check_choice

__all__ = ["Tracker", "TrackerName", "check_tracker", "create_tracker"]

TrackerName = Literal["tensorboard", "wandb", "trackio"]

_MODULES = {"tensorboard": "torch.utils.tensorboard"}
"""Modules of trackers whose names differ."""


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def begin(self, config: Mapping[str, Any]) -> None:
        """A run begins, or is resumed; ``config`` has all its settings."""
        ...

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """The metrics of an epoch, counted from 1."""
        ...

    def end(self) -> None:
        """The run is complete, or has stopped."""
        ...


def check_tracker(name: str) -> None:
    """Refuses an unknown tracker, and one whose package cannot be imported."""
    check_choice("create_tracker", "name", name, get_args(TrackerName))
    _package(_MODULES.get(name, name), name)


def create_tracker(name: str, out: Path, *, project: str = "moesaic") -> Tracker:
    """Returns a tracker by name, for a run whose folder is ``out``.

    ``"tensorboard"`` writes below it; for ``"wandb"`` and ``"trackio"`` it gives the name of the run in its project.

    >>> create_tracker("tensorbord", Path("runs/pets"))
    Traceback (most recent call last):
    ValueError: create_tracker: name='tensorbord' is unknown; use 'tensorboard', 'wandb' or 'trackio' (did you mean
    'tensorboard'?)
    """
    check_choice("create_tracker", "name", name, get_args(TrackerName))
    if name == "tensorboard":
        return _TensorBoard(_package(_MODULES[name], name), out)
    return _Project(_package(name, name), out, project, more={"dir": str(out)} if name == "wandb" else {})


class _TensorBoard:
    def __init__(self, package: Any, out: Path) -> None:
        self._package = package
        self._out = out
        self._writer: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        self._writer = self._package.SummaryWriter(str(self._out / "tensorboard"))
        lines = "\n".join(f"    {name}: {value}" for name, value in config.items())
        self._writer.add_text("config", lines)

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


class _Project:
    """W&B, and Trackio, which has the same interface."""

    def __init__(self, package: Any, out: Path, project: str, more: Mapping[str, Any]) -> None:
        self._package = package
        self._run = {"project": project, "name": out.name, **more}

    def begin(self, config: Mapping[str, Any]) -> None:
        self._package.init(**self._run, config=dict(config))

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=epoch)

    def end(self) -> None:
        self._package.finish()


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"create_tracker: {name!r} needs a package that cannot be imported ({error}); install it with "
            f"pip install 'moesaic[track]' or pip install {name}"
        ) from error
