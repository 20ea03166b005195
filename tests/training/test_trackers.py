"""Trackers hear what an epoch came to; their packages are asked for only when they are."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.training.trackers import create_tracker

CONFIG = {"seed": 3, "recipe": {"epochs": 2}}


class Recorder:
    """Stands for a package, and notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> None:
            self.calls.append((name, args, options))

        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_project_gets_a_run_named_like_its_folder(name, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)
    tracker = create_tracker(name, Path("runs/pets"), project="vets")
    assert recorder.calls == []
    tracker.begin(CONFIG)
    tracker.log(1, {"loss": 0.5})
    tracker.end()
    assert recorder.names() == ["init", "log", "finish"]
    options = recorder.calls[0][2]
    assert (options["project"], options["name"], options["config"]) == ("vets", "pets", CONFIG)
    assert options.get("dir") == (str(Path("runs/pets")) if name == "wandb" else None)
    assert recorder.calls[1] == ("log", ({"loss": 0.5},), {"step": 1})


def test_tensorboard_writes_below_the_folder(monkeypatch):
    writer, folders = Recorder(), []
    package = SimpleNamespace(SummaryWriter=lambda folder: folders.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    tracker = create_tracker("tensorboard", Path("runs/pets"))
    tracker.begin(CONFIG)
    tracker.log(2, {"loss": 0.5, "test_accuracy": 90.0})
    tracker.end()
    assert folders == [str(Path("runs/pets/tensorboard"))]
    scalars = [args for name, args, _ in writer.calls if name == "add_scalar"]
    assert scalars == [("loss", 0.5, 2), ("test_accuracy", 90.0, 2)]
    assert writer.names()[-1] == "close"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ImportError, match=rf"'{name}' needs a package.*pip install 'moesaic\[track\]'"):
        create_tracker(name, Path("runs/pets"))


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ValueError, match="name='mlflow' is unknown"):
        create_tracker("mlflow", Path("runs/pets"))
