"""The result of `fit`, epoch by epoch and in the end, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from moesaic.files import as_json
from moesaic.insight.routing_average import LayerRouting
from moesaic.validated_json import decode

__all__ = ["Diverged", "Epoch", "FitResult", "check_metrics"]

_OLD_KEYS = {"learning_rate": "lr", "gate_strength": "gate_l1"}
"""Names in the files of earlier versions."""
_CHECKSUM = "sha256"


class Diverged(ArithmeticError):
    """The loss, or a weight, is no longer a number."""


@dataclass(frozen=True)
class Epoch:
    """The metrics of an epoch: a line of metrics.jsonl."""

    number: int
    """Number of the epoch, from 1."""
    loss: float
    """Mean training loss over the images of the epoch, each before its step."""
    train_accuracy: float
    """Training accuracy in percent, likewise."""
    test_accuracy: float | None
    """Test accuracy in percent; None where the epoch was not tested."""
    seconds: float
    """Seconds of training since the start; tests and checkpoints do not count."""
    images_per_second: float
    lr: float
    """Learning rate at the last step."""
    alarms: tuple[str, ...] = ()
    """Warnings about layers, such as the collapse alarm's: each once in a run."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of callbacks. Channel gates have ``cost``, the mean multiply-adds of a training image as a share of the
    network without gates, ``open_share``, the share of gates that were open, and ``gate_l1``, λ at the last step."""
    routing: Mapping[str, LayerRouting] = field(default_factory=dict[str, LayerRouting])
    """The mean routing over some training batches, by layer."""

    def to_json(self) -> dict[str, Any]:
        """Returns the epoch as a line of metrics.jsonl; callbacks' metrics are keys beside the others."""
        content: dict[str, Any] = as_json(asdict(self))
        if not self.routing:
            del content["routing"]
        return content | content.pop("metrics")

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Epoch:
        """Reads what ``to_json`` returned."""
        content = {_OLD_KEYS.get(name, name): value for name, value in content.items()}
        names = {field.name for field in fields(cls)}
        if not isinstance(content.get("routing"), dict):  # a metric of that name, before there was the field
            names.remove("routing")
        values: dict[str, Any] = {name: value for name, value in content.items() if name in names}
        values["alarms"] = tuple(content["alarms"])
        values["metrics"] = {name: value for name, value in content.items() if name not in names}
        values["routing"] = {
            name: decode(LayerRouting, value, f"the routing of {name!r}")
            for name, value in values.get("routing", {}).items()
        }
        return cls(**values)


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    >>> epoch = Epoch(1, 0.5, 80.0, 75.0, 2.0, 500.0, 0.1)
    >>> found = FitResult((epoch,), 75.0, (70.0, 80.0), (70.0, 80.0), 2.0, 1000, "all epochs")
    >>> FitResult.from_json(found.to_json()) == found
    True
    """

    epochs: tuple[Epoch, ...]
    accuracy: float
    """Test accuracy in percent."""
    class_accuracy: tuple[float, ...]
    """Test accuracy of each class in percent; NaN for classes without test images."""
    cluster_accuracy: tuple[float, ...]
    """Test accuracy of each cluster in percent; NaN for clusters without test images."""
    seconds: float
    """Seconds of training; tests and checkpoints do not count."""
    images: int
    """Training images seen, with repetition."""
    stopped: str
    """Why training ended: "all epochs" or "zero training error"."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of callbacks for the trained model."""

    @property
    def cost(self) -> float | None:
        """Mean multiply-adds of a test image as a share of the network without gates; None without channel gates.

        The embedding network and the gate heads count.
        """
        return self.metrics.get("cost")

    def to_json(self) -> dict[str, Any]:
        """Returns the result as result.json has it; callbacks' metrics are keys beside the others."""
        content: dict[str, Any] = as_json(asdict(self))
        metrics = content.pop("metrics")
        return {**content, "epochs": [epoch.to_json() for epoch in self.epochs], **metrics}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FitResult:
        """Reads what ``to_json`` returned."""
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in content.items() if name in names}
        values["epochs"] = tuple(Epoch.from_json(epoch) for epoch in content["epochs"])
        values["metrics"] = {name: value for name, value in content.items() if name not in {*names, _CHECKSUM}}
        for name in ("class_accuracy", "cluster_accuracy"):
            values[name] = tuple(math.nan if value is None else value for value in content[name])
        return cls(**values)


def check_metrics(owner: str, metrics: Mapping[str, float], kind: type[Epoch | FitResult]) -> None:
    """Refuses metrics of a callback under names that files have for something else.

    >>> check_metrics("MyCallback", {"accuracy": 90.0}, FitResult)
    Traceback (most recent call last):
    ValueError: fit: the callback MyCallback returns a metric 'accuracy', a name that FitResult has itself; ...
    """
    reserved = {field.name for field in fields(kind)} | _OLD_KEYS.keys() | {_CHECKSUM}
    name = next((name for name in metrics if name in reserved), None)
    if name is not None:
        raise ValueError(
            f"fit: the callback {owner} returns a metric {name!r}, a name that {kind.__name__} has itself; choose "
            "another name"
        )
