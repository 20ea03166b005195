"""Reads the folder of a training run, complete or in progress, for pages about the run.

`RunDir` belongs to the run itself and locks the folder; this module only reads.
The folder is untrusted: everything is checked, and what is wrong raises `InvalidFile`. Files that are not there
yet are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from moesaic.argument_checks import printable
from moesaic.files import check_json_digest
from moesaic.insight.routing_average import LayerRouting
from moesaic.training.fit_result import Epoch, FitResult
from moesaic.training.migrations import migrate_config
from moesaic.training.saved_predictions import PREDICTIONS, SavedPredictions, read_predictions
from moesaic.validated_json import InvalidFile, JsonLimits, decode, parse_json, read_bytes, read_json, refused_as

__all__ = ["RUN_FILES", "RunRecord", "is_run", "read_run"]

RUN_FILES = ("config.json", "metrics.jsonl", "result.json", PREDICTIONS)
"""The files that `read_run` reads."""

_LINE_LIMITS = JsonLimits(bytes=1 << 22, depth=8, values=100_000)
_MAX_NUMBER = 1e15
"""Larger numbers are not those of a run."""
_ADVICE = "name the folder of a run of moesaic train"


@dataclass(frozen=True)
class RunData:
    """The dataset of a run."""

    name: str
    train: int
    """Number of training images."""
    test: int
    """Number of test images."""
    shape: tuple[int, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The content of the folder of a run."""

    folder: Path
    model: Mapping[str, Any]
    """The entry in config.json: name and arguments, or the class."""
    data: RunData
    recipe: Mapping[str, Any]
    seed: int
    device: str
    epochs: tuple[Epoch, ...]
    result: FitResult | None
    """None while the run is not complete."""
    predictions: SavedPredictions | None
    """Predictions of the last test; None where there was none."""

    @property
    def model_name(self) -> str:
        """The name under which the model was made, else its class."""
        return printable(str(self.model.get("name", self.model.get("class", "a network"))))

    @property
    def total_epochs(self) -> int:
        """Epochs that were asked for."""
        total = self.recipe.get("epochs")
        return total if isinstance(total, int) and total > 0 else len(self.epochs)


@dataclass(frozen=True)
class _Config:
    model: Mapping[str, Any]
    data: RunData
    recipe: Mapping[str, Any]
    seed: int
    device: str = "cpu"


def is_run(folder: Path) -> bool:
    """Whether a folder has the config.json of a training run."""
    try:
        content = read_json(folder / "config.json")
    except (OSError, InvalidFile):
        return False
    return isinstance(content, dict) and {"model", "data", "recipe"} <= cast("dict[str, Any]", content).keys()


def read_run(folder: Path) -> RunRecord:
    """Reads the folder of a run.

    >>> read_run(Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'nowhere/config.json'
    """
    path = folder / "config.json"
    content = _whole(read_json(path, advice=_ADVICE), f"{path}")
    with refused_as(f"{path} is not what a run writes"):
        config = cast("_Config", decode(_Config, migrate_config(content), str(path), more=True))
    if not config.data.classes or not all(0 <= count < _MAX_NUMBER for count in (config.data.train, config.data.test)):
        raise InvalidFile(f"{path}: has no classes, or a number of images that is none; {_ADVICE}")
    result = _read_result(folder / "result.json", len(config.data.classes))
    epochs = _read_metrics(folder / "metrics.jsonl")
    predictions = folder / PREDICTIONS
    return RunRecord(
        folder,
        config.model,
        config.data,
        config.recipe,
        config.seed,
        config.device,
        epochs or (() if result is None else result.epochs),
        result,
        read_predictions(predictions, len(config.data.classes)) if predictions.exists() else None,
    )


def _read_result(path: Path, classes: int) -> FitResult | None:
    if not path.exists():
        return None
    whole = _whole(read_json(path, advice=_ADVICE), f"{path}")
    with refused_as(f"{path} is not what a run writes"):
        result = FitResult.from_json({**whole, "epochs": []})
        numbers = (result.accuracy, result.seconds, *result.class_accuracy, *result.cluster_accuracy)
        if not all(_is_number(each) for each in numbers) or len(result.class_accuracy) != classes:
            raise InvalidFile(f"{path}: accuracies are not numbers, or not one for each of {classes} classes")
        metrics = {name: value for name, value in result.metrics.items() if _is_number(value)}
        epochs = tuple(_epoch(each, f"{path}.epochs") for each in whole["epochs"])
        return replace(result, epochs=epochs, images=int(result.images), stopped=str(result.stopped), metrics=metrics)


def _read_metrics(path: Path) -> tuple[Epoch, ...]:
    """The epochs of metrics.jsonl; the last line may be half written."""
    if not path.exists():
        return ()
    lines = read_bytes(path).split(b"\n")[:-1]
    epochs: list[Epoch] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        content = _whole(parse_json(line, where, advice=_ADVICE, limits=_LINE_LIMITS), where)
        with refused_as(f"{where} is not an epoch"):
            epochs.append(_epoch(content, where))
    return tuple(epochs)


def _whole(content: Any, where: str) -> dict[str, Any]:
    """Returns a JSON object without its checksum, which must be right; files of earlier versions have none."""
    if not isinstance(content, dict):
        raise InvalidFile(f"{where} is not what a run writes: not a JSON object; {_ADVICE}")
    rest, right = check_json_digest(cast("dict[str, Any]", content))
    if not right:
        raise InvalidFile(f"{where}: its content does not match its checksum; restore it from a copy")
    return rest


def _epoch(content: Mapping[str, Any], where: str) -> Epoch:
    epoch = Epoch.from_json(content)
    names = [field.name for field in fields(Epoch) if field.name not in ("metrics", "routing")]
    values = {name: getattr(epoch, name) for name in names}
    checked = cast("Epoch", decode(Epoch, {**values, "alarms": list(epoch.alarms)}, where, more=True))
    metrics = {name: value for name, value in epoch.metrics.items() if _is_number(value)}
    routing: dict[str, LayerRouting] = {name: layer for name, layer in epoch.routing.items() if layer.load}
    numbers = [value for value in vars(checked).values() if isinstance(value, int | float)]
    numbers += [value for layer in routing.values() for value in (*layer.load, layer.entropy, layer.class_entropy)]
    if not all(map(_is_number, numbers)) or checked.number < 1:
        raise InvalidFile(f"{where}: has numbers that are not those of an epoch; {_ADVICE}")
    return replace(checked, metrics=metrics, routing=routing)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a page can show; NaN is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > _MAX_NUMBER
