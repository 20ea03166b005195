"""Reads the files of runs that earlier versions wrote: configurations, and training in progress."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from torch import Tensor

from moesaic.training.recipe import Recipe

__all__ = ["migrate_config", "migrate_state"]

_CONFIG_KEYS = {"test_every": "eval_every"}
_TRANSFORMS = {"vary": "train_transform", "view": "eval_transform"}
_TENSOR_STEMS = {
    "luck.": "rng.",
    "mean.": "ema.",
    "gates.": "callback.GateCallback.",
}
_GATE_KEYS = {"told": "reported", "strength": "l1_weight", "relief": "penalty_factors"}
_ALARM_MESSAGE = re.compile(r"CollapseAlarm: (?:layer '(?P<name>.*?)'|the layer):")


def migrate_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json under the present names."""
    config = {_CONFIG_KEYS.get(name, name): value for name, value in content.items()}
    data: dict[str, Any] = dict(config.get("data", {}))
    for old, new in _TRANSFORMS.items():
        if old in data:
            description = str(data.pop(old)).replace("Augmented(scale=", "RandomFlipCrop(normalize=")
            data[new] = description.replace("Scale(", "Normalize(")
    recipe = config.get("recipe")
    with suppress(KeyError, TypeError, ValueError):  # a recipe that is no recipe is compared as it stands
        recipe = Recipe.from_json(cast("dict[str, Any]", recipe)).to_json()
    return {**config, "data": data, "recipe": recipe}


def migrate_state(
    tensors: Mapping[str, Tensor], content: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors and JSON of training in progress in their present form."""
    if "learner" not in content:
        return dict(tensors), dict(content)
    renamed = {_renamed(name): tensor for name, tensor in tensors.items()}
    renamed["correct"] = renamed.pop("right")
    state = dict(content)
    train_step = dict(state.pop("learner"))
    gates = train_step.pop("gates", None)
    callbacks: dict[str, Any] = {"CollapseCallback": {"reported": _reported(content)}}
    if gates is not None:
        callbacks["GateCallback"] = {_GATE_KEYS.get(name, name): value for name, value in gates.items()}
    return renamed, {**state, "train_step": train_step, "callbacks": callbacks}


def _renamed(name: str) -> str:
    for old, new in _TENSOR_STEMS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _reported(content: Mapping[str, Any]) -> list[str]:
    """Layers that the collapse alarm has reported: earlier versions wrote its messages only."""
    messages = [*content["alarms"], *(text for epoch in content["epochs"] for text in epoch["alarms"])]
    matches = (_ALARM_MESSAGE.match(message) for message in messages)
    return [match["name"] or "" for match in matches if match]
