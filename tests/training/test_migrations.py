"""Runs of the previous version: their files are read, and a run that was interrupted ends with the same numbers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.gated import LONG as GATED
from training.gated import TASK as GATED_TASK
from training.gated import gated
from training.squares import LONG, TASK, Notes, mixture, routed, run_files, same

from moesaic.data.image_dataset import ImageDataset
from moesaic.training import trainer
from moesaic.training.checkpoint import read_tensors, write_tensors
from moesaic.training.comparison_result import read_comparison
from moesaic.training.fit import fit
from moesaic.training.fit_result import Epoch, FitResult
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

OLD_STEMS = {"rng.": "luck.", "ema.": "mean.", "callback.GateCallback.": "gates."}
OLD_GATES = {"reported": "told", "l1_weight": "strength", "penalty_factors": "relief"}


def collapsed(seed: int = 0) -> nn.Module:
    """Its experts choose the same patches, and the alarm reports them."""
    model = routed(seed)
    with torch.no_grad():
        model.moe.router.weight.copy_(model.moe.router.weight[:1].expand_as(model.moe.router.weight))
    return model


def as_written_before(folder: Path) -> None:
    """Rewrite an interrupted run in the form of the previous version."""
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    recipe = Recipe.from_json(config["recipe"])
    config["recipe"], config["test_every"] = recipe.cell_spec(), config.pop("eval_every")
    data = config["data"]
    data["vary"] = data.pop("train_transform")
    data["view"] = data.pop("eval_transform").replace("Normalize(", "Scale(")
    (folder / "config.json").write_text(json.dumps(config))
    tensors, content = read_tensors(folder / "training.safetensors")
    tensors["right"] = tensors.pop("correct")
    for new, old in OLD_STEMS.items():
        tensors = {old + name.removeprefix(new) if name.startswith(new) else name: t for name, t in tensors.items()}
    callbacks = content.pop("callbacks")
    content["learner"] = content.pop("train_step")
    if "GateCallback" in callbacks:
        gates = callbacks["GateCallback"]
        content["learner"]["gates"] = {OLD_GATES.get(name, name): value for name, value in gates.items()}
    for epoch in content["epochs"]:
        epoch["learning_rate"] = epoch.pop("lr")
        if "gate_l1" in epoch:
            epoch["gate_strength"] = epoch.pop("gate_l1")
    for each in (content, *content["epochs"]):
        each["alarms"] = [
            f"CollapseAlarm: {text}" if text.startswith(("layer ", "the layer")) else text for text in each["alarms"]
        ]
    write_tensors(folder / "training.safetensors", tensors, content)


RUNS: dict[str, tuple[Callable[..., nn.Module], ImageDataset, dict[str, Any]]] = {
    "experts that collapse": (collapsed, TASK, {"router_lr": 0.0}),
    "a mixture": (mixture, TASK, {"optimizer": "normalized_gd", "ema_decay": 0.9, "balance_weight": 0.1}),
    "gates": (gated, GATED_TASK, {"ema_decay": 0.9, "gates": GateRecipe(target_macs=0.5, noise=0.3)}),
}


@pytest.mark.parametrize("calls", [4, 18], ids=["in the first epoch", "in the third epoch"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_an_interrupted_run_of_the_previous_version_ends_with_the_same_numbers(run, calls, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    make, task, changes = run
    recipe = Recipe.from_json({**(GATED if make is gated else LONG).to_json(), **changes_as_json(changes)})
    whole, resumed = make(), make(7)
    fit(whole, task, recipe, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        fit(make(), task, recipe, seed=2, out=tmp_path / "cut", progress=Notes(calls), checkpoint_seconds=0)
    as_written_before(tmp_path / "cut")
    fit(resumed, task, recipe, seed=2, out=tmp_path / "cut")
    assert same(whole, resumed)
    [_, expected, _], [_, found, _] = run_files(tmp_path / "whole"), run_files(tmp_path / "cut")
    for each in (*expected, *found):
        each["alarms"] = len(each["alarms"])
        each.pop("routing", None)  # which earlier versions did not record
    assert found == expected


def changes_as_json(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_json() if isinstance(value, GateRecipe) else value for name, value in changes.items()}


def test_results_of_the_previous_version_are_read():
    line = {"number": 1, "loss": 0.5, "train_accuracy": 80.0, "test_accuracy": None, "seconds": 2.0}
    line |= {"images_per_second": 500.0, "learning_rate": 0.1, "alarms": [], "cost": 0.6, "gate_strength": 0.2}
    epoch = Epoch.from_json(line)
    assert (epoch.lr, epoch.metrics) == (0.1, {"cost": 0.6, "gate_l1": 0.2})
    content = {"epochs": [line], "accuracy": 75.0, "class_accuracy": [75.0, None], "cluster_accuracy": [75.0]}
    content |= {"seconds": 2.0, "images": 1000, "stopped": "all epochs", "cost": 0.55}
    result = FitResult.from_json(content)
    assert result.cost == 0.55
    assert math.isnan(result.class_accuracy[1])
    assert result.epochs == (epoch,)


def test_specifications_of_cells_keep_the_names_of_the_first_version():
    spec = Recipe(epochs=3, gates=GateRecipe(target_macs=0.5)).cell_spec()
    assert list(spec) == [
        *("epochs", "batch", "optimizer", "learning_rate", "momentum", "weight_decay", "schedule", "milestones"),
        *("warmup", "router_rate", "precision", "ema", "stop_at_zero_error", "accumulate", "clip", "balance"),
        *("compile", "label_smoothing", "gates"),
    ]
    assert list(spec["gates"]) == [
        *("strength", "warmup", "embedding", "target_macs", "joint", "weigh", "least_open", "noise"),
        *("straight_through", "distil", "temperature"),
    ]
    assert Recipe.from_json(spec) == Recipe(epochs=3, gates=GateRecipe(target_macs=0.5))
    assert "gates" not in Recipe(epochs=3).cell_spec()
    assert Recipe(epochs=3, drop_last=True).cell_spec()["drop_last"]


def test_a_comparison_of_the_previous_version_has_the_present_names(tmp_path):
    from training.example_comparison import comparison

    from moesaic.training.comparison_result import write_comparison

    found = comparison((100, 200), [[50.0, 60.0], [51.0, 61.0]], [[52.0, 62.0], [53.0, 63.0]])
    write_comparison(tmp_path / "result.json", found)
    content = json.loads((tmp_path / "result.json").read_text())
    content["recipe"] = {"epochs": 2, "batch": 32, "learning_rate": 0.1, "augment": "none"}
    (tmp_path / "result.json").write_text(json.dumps(content))
    recipe = read_comparison(tmp_path / "result.json").recipe
    assert recipe == {"epochs": 2, "batch_size": 32, "lr": 0.1, "augment": "none"}


def test_a_metric_of_ones_own_may_be_called_routing():
    epoch = Epoch(1, 0.5, 80.0, None, 2.0, 500.0, 0.1, metrics={"routing": 0.25})
    assert Epoch.from_json(epoch.to_json()) == epoch
