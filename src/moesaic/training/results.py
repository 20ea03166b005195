"""What training a network came to, epoch by epoch and in the end, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

__all__ = ["Epoch", "FitResult"]

_OF_GATES = ("cost", "open_share", "gate_strength")
"""What an epoch has where there are channel gates."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to: a line of metrics.jsonl."""

    number: int
    """From 1."""
    loss: float
    """Mean over its images at the moment they were trained on."""
    train_accuracy: float
    """In percent, over the same."""
    test_accuracy: float | None
    """In percent; None where it was not tested."""
    seconds: float
    """Of training since the start: tests and checkpoints do not count."""
    images_per_second: float
    learning_rate: float
    """At its last step."""
    alarms: tuple[str, ...] = ()
    """What the collapse alarm said, once for each layer of a run; and who else watches over layers."""
    cost: float | None = None
    """Of networks with channel gates: mean multiply-adds of an image in training, as a share of the network without."""
    open_share: float | None = None
    """The share of its gates that were open on average."""
    gate_strength: float | None = None
    """λ at its last step."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; without what only networks with channel gates have, where there are none."""
        content = cast("dict[str, Any]", plain(asdict(self)))
        return {name: value for name, value in content.items() if value is not None or name not in _OF_GATES}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Epoch:
        """What ``to_json`` wrote down."""
        made: dict[str, Any] = {**content, "alarms": tuple(content["alarms"])}
        return cls(**made)


@dataclass(frozen=True)
class FitResult:
    """What training came to.

    >>> epoch = Epoch(1, 0.5, 80.0, 75.0, 2.0, 500.0, 0.1)
    >>> found = FitResult((epoch,), 75.0, (70.0, 80.0), (70.0, 80.0), 2.0, 1000, "all epochs")
    >>> FitResult.from_json(found.to_json()) == found
    True
    """

    epochs: tuple[Epoch, ...]
    accuracy: float
    """On the images to test on, in percent."""
    class_accuracy: tuple[float, ...]
    """In percent for each class; NaN where there is nothing to test on."""
    cluster_accuracy: tuple[float, ...]
    """In percent for each cluster; NaN where there is nothing to test on."""
    seconds: float
    """Of training; tests and checkpoints do not count."""
    images: int
    """Seen in training, with repetition."""
    stopped: str
    """Why it ended: "all epochs" or "zero training error"."""
    cost: float | None = None
    """Of networks with channel gates: mean multiply-adds of an image to test on, as a share of the network without;
    embedding network and gate heads count."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; without a cost where there are no channel gates."""
        content = cast("dict[str, Any]", plain(asdict(self)))
        if self.cost is None:
            del content["cost"]
        return {**content, "epochs": [epoch.to_json() for epoch in self.epochs]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FitResult:
        """What ``to_json`` wrote down."""
        made: dict[str, Any] = {**content, "epochs": tuple(Epoch.from_json(each) for each in content["epochs"])}
        for name in ("class_accuracy", "cluster_accuracy"):
            made[name] = tuple(math.nan if each is None else each for each in content[name])
        return cls(**made)


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples, null for what is not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: plain(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in cast("list[Any]", value)]
    return value
