"""A run that was stopped ends as if it had not been, and one that goes wrong leaves its last good checkpoint."""

import errno
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.squares import (
    LONG,
    TASK,
    Notes,
    Routed,
    dense,
    lines,
    mixture,
    routed,
    run_files,
    same,
    seeded,
    stopped_and_called_again,
    weights,
)

from moesaic import tensor_files
from moesaic.training import run_dir, trainer
from moesaic.training.checkpoint import load_weights
from moesaic.training.fit import Diverged, fit

RECIPES = {
    "sgd": LONG,
    "adamw, mean": replace(LONG, optimizer="adamw", lr=0.01, ema_decay=0.9, warmup_epochs=1),
    "normalized_gd, parts": replace(LONG, optimizer="normalized_gd", grad_accum=2, clip_grad=1.0),
    "float16": replace(LONG, precision="float16", schedule="step"),
}


@pytest.fixture
def often(monkeypatch):
    """Look after every batch, and keep a checkpoint after every second."""
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)


@pytest.mark.parametrize(
    ("recipe", "make"),
    [*((recipe, routed) for recipe in RECIPES.values()), (LONG, mixture)],
    ids=[*RECIPES, "a mixture of samples"],
)
def test_a_run_stopped_anywhere_and_called_again_ends_bit_identical(recipe, make, tmp_path, often):
    undisturbed = make()
    fit(undisturbed, TASK, recipe, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    calls = (3, 9, 5, 100)  # of progress, of which there are seven an epoch
    assert same(stopped_and_called_again(make, TASK, recipe, tmp_path / "parts", calls), undisturbed)
    assert run_files(tmp_path / "parts") == run_files(tmp_path / "whole")
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_epochs_that_were_trained_before_count_as_done_and_not_as_work(tmp_path, often):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, out=tmp_path, progress=Notes(9), checkpoint_seconds=0)
    notes = Notes()
    found = fit(routed(), TASK, LONG, out=tmp_path, progress=notes, checkpoint_seconds=0)
    assert notes.skipped == 1
    assert notes.advanced == len(found.epochs)


def test_how_often_checkpoints_are_written_changes_nothing(tmp_path):
    often, rarely, never = routed(), routed(), routed()
    fit(often, TASK, LONG, out=tmp_path / "often", checkpoint_seconds=0)
    fit(rarely, TASK, LONG, out=tmp_path / "rarely", checkpoint_seconds=1e9)
    fit(never, TASK, LONG)
    assert run_files(tmp_path / "often") == run_files(tmp_path / "rarely")
    assert same(often, never)
    assert same(rarely, never)


def test_metrics_of_a_part_that_was_lost_are_not_there_twice(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, out=tmp_path, progress=Notes(3), checkpoint_seconds=1e9)
    assert [line["number"] for line in lines(tmp_path)] == [1, 2, 3], "but the checkpoint is that of the first epoch"
    notes = Notes()
    fit(routed(), TASK, LONG, out=tmp_path, progress=notes)
    assert [line["number"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert notes.logged == ["continuing after epoch 1 of 4"]
    assert notes.advanced == 4


SCRIPT = """
import os, signal, sys
from pathlib import Path
from training.squares import LONG, TASK, Notes, routed
from moesaic.training import trainer
from moesaic.training.fit import fit

class KilledAfterTwoEpochs(Notes):
    def advance(self, amount, note=""):
        if len(Path(sys.argv[1], "metrics.jsonl").read_text().splitlines()) > 1:
            os.kill(os.getpid(), signal.SIGKILL)

trainer._LOG_SECONDS, trainer._CHECKPOINT_STEPS = 0.0, 2
fit(routed(), TASK, LONG, out=Path(sys.argv[1]), progress=KilledAfterTwoEpochs(), checkpoint_seconds=0)
"""


def test_a_killed_process_leaves_a_run_that_can_go_on(tmp_path, often):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    process = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], env=environment)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "training.safetensors").exists()
    assert not (tmp_path / "killed" / "result.json").exists()
    model, undisturbed = routed(), routed()
    fit(model, TASK, LONG, out=tmp_path / "killed", checkpoint_seconds=0)
    fit(undisturbed, TASK, LONG, out=tmp_path / "whole", checkpoint_seconds=0)
    assert same(model, undisturbed)
    assert run_files(tmp_path / "killed") == run_files(tmp_path / "whole")


def test_two_runs_cannot_use_a_folder_at_a_time(tmp_path):
    pytest.importorskip("fcntl")

    class Second(Notes):
        refused = ""

        def advance(self, amount: int, note: str = "") -> None:
            if not self.refused:
                with pytest.raises(ValueError, match="another run is at work in") as complaint:
                    fit(routed(), TASK, LONG, out=tmp_path)
                self.refused = str(complaint.value)

    notes = Second()
    first = fit(routed(), TASK, LONG, out=tmp_path, progress=notes)
    assert "name another folder" in notes.refused
    assert fit(routed(), TASK, LONG, out=tmp_path) == first  # the folder is free again


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_and_it_goes_on_from_there(tmp_path, monkeypatch):
    writes: list[Path] = []
    write = tensor_files.write_atomic

    def fill(path: Path, content: bytes) -> None:
        writes.append(path)
        if sum("training" in each.name for each in writes) > 2:
            path.with_name(".half.unfinished").write_bytes(content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "write_atomic", fill)
        with pytest.raises(OSError, match=r"training.safetensors of .* MB could not be written .*still there"):
            fit(routed(), TASK, LONG, out=tmp_path / "full", checkpoint_seconds=0)
    assert load_weights(tmp_path / "full", routed()).metrics["epochs"] == 2
    model, undisturbed = routed(), routed()
    notes = Notes()
    fit(model, TASK, LONG, out=tmp_path / "full", progress=notes)
    fit(undisturbed, TASK, LONG, out=tmp_path / "whole")
    assert notes.logged == ["continuing after epoch 2 of 4"]
    assert same(model, undisturbed)
    assert run_files(tmp_path / "full") == run_files(tmp_path / "whole")


def test_metrics_that_cannot_be_written_say_so(tmp_path, monkeypatch):
    def full(path: Path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir, "open_append", full)
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written \(No space left on device\)"):
        fit(routed(), TASK, LONG, out=tmp_path)


def test_a_damaged_checkpoint_is_not_taken_for_a_good_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, out=tmp_path, progress=Notes(2), checkpoint_seconds=0)
    state = tmp_path / "training.safetensors"
    state.write_bytes(state.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"training.safetensors is not a whole safetensors file"):
        fit(routed(), TASK, LONG, out=tmp_path)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_the_weights_or_the_result_is_noticed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, out=tmp_path, progress=Notes(2), checkpoint_seconds=0)
    state = tmp_path / "training.safetensors"
    whole = state.read_bytes()
    for place in (-5, -500, -2000):
        flip(state, place)
        with pytest.raises(ValueError, match=r"training.safetensors is not whole: .* checksum; use a copy"):
            fit(routed(), TASK, LONG, out=tmp_path)
        state.write_bytes(whole)
    first = fit(routed(), TASK, LONG, out=tmp_path)
    network = tmp_path / "model.safetensors"
    whole = network.read_bytes()
    flip(network, -5)
    with pytest.raises(ValueError, match=r"model.safetensors is not whole"):
        fit(routed(), TASK, LONG, out=tmp_path)
    network.write_bytes(whole)
    result = tmp_path / "result.json"
    text = result.read_text()
    result.write_text(text.replace('"accuracy": ', '"accuracy": 1', 1))
    with pytest.raises(ValueError, match=r"result.json does not match its checksum"):
        fit(routed(), TASK, LONG, out=tmp_path)
    result.write_text(text)
    assert fit(routed(), TASK, LONG, out=tmp_path) == first


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "null", "{}", '{"data": 7, "epochs": 3}', "1e999"])
def test_files_of_a_run_that_are_something_else_are_refused_in_one_line(tmp_path, name, text):
    fit(routed(), TASK, replace(LONG, epochs=1), out=tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        fit(routed(), TASK, replace(LONG, epochs=1), out=tmp_path)
    assert "\n" not in str(error.value)


# what goes wrong


class Poisoned(nn.Module):
    """A network whose output is not a number from its n-th training pass on."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.inner = dense()
        self.left = passes

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        return self.inner(x) * (math.nan if self.left < 0 else 1.0)


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"in epoch 3 of 4, by batch 6 of 6\)") as error:
        fit(Poisoned(14), TASK, LONG, out=tmp_path, checkpoint_seconds=0)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    assert "Lower lr=0.05" in str(error.value)
    model = Poisoned(0)
    assert load_weights(tmp_path, model).metrics["epochs"] == 2
    assert all(tensor.isfinite().all() for tensor in weights(model))


def test_a_bad_loss_is_noticed_within_an_epoch(tmp_path, often):
    with pytest.raises(Diverged, match=r"in epoch 1 of 4, by batch 3 of 6.*There was no checkpoint before it"):
        fit(Poisoned(2), TASK, LONG, out=tmp_path)
    with pytest.raises(Diverged, match="Nothing was saved"):
        fit(Poisoned(2), TASK, LONG)


def test_a_bad_loss_is_noticed_before_a_checkpoint_within_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    with pytest.raises(Diverged, match=r"in epoch 1 of 4, by batch 2 of 6"):
        fit(Poisoned(1), TASK, LONG, out=tmp_path, checkpoint_seconds=0)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_weight_that_is_not_a_number_is_never_kept(tmp_path):
    """The last step of an epoch may ruin the weights after a loss that was fine."""
    model = dense()
    passes = 0

    def ruin(module: nn.Module, args: Any) -> None:
        nonlocal passes
        passes += module.training

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.inf if passes == 12 else gradient

    model.register_forward_pre_hook(ruin)
    next(model.parameters()).register_hook(spoil)
    with pytest.raises(Diverged, match="in epoch 2 of 4"):
        fit(model, TASK, LONG, out=tmp_path, checkpoint_seconds=0)
    good = dense()
    assert load_weights(tmp_path, good).metrics["epochs"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(good))


def test_a_network_with_other_outputs_than_classes_is_refused():
    with pytest.raises(ValueError, match=r"returned \(12, 5\) for 12 images of 2 classes; build it with num_classes=2"):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), TASK, LONG)


def test_nothing_to_train_or_test_on_is_refused():
    nothing = TASK.train.take(torch.arange(0))
    with pytest.raises(ValueError, match="0 training images and 40 test images; use at least one of each"):
        fit(dense(), replace(TASK, train=nothing), LONG)


def copies(seed: int = 0) -> nn.Module:
    """Both experts choose the same patches."""
    model = routed(seed)
    with torch.no_grad():
        model.moe.router.weight[1] = model.moe.router.weight[0]
    return model


def test_experts_that_collapse_are_told_once(tmp_path):
    notes = Notes()
    recipe = replace(LONG, router_lr=0.0)
    found = fit(copies(), TASK, recipe, out=tmp_path, progress=notes)
    assert len(notes.logged) == 1
    assert "epoch 1: layer 'moe': the experts choose the same units" in notes.logged[0]
    assert [len(epoch.alarms) for epoch in found.epochs] == [1, 0, 0, 0]
    assert lines(tmp_path)[0]["alarms"][0] in notes.logged[0]
    assert fit(routed(), TASK, LONG).epochs[0].alarms == ()


class Parting(Routed):
    """Both experts choose the same patches in the first two training passes, and others than each other after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            self.moe.router.weight[1] = self.moe.router.weight[0]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and int(self.passes) == 3:
            with torch.no_grad():
                self.moe.router.weight[1].neg_()
        return super().forward(x)


def test_alarms_are_the_same_in_a_run_that_was_stopped(tmp_path, often):
    recipe = replace(LONG, router_lr=0.0)
    for patience in (4, 6, 100):
        try:
            fit(seeded(Parting), TASK, recipe, out=tmp_path / "parts", progress=Notes(patience), checkpoint_seconds=0)
        except KeyboardInterrupt:
            continue
    fit(seeded(Parting), TASK, recipe, out=tmp_path / "whole", checkpoint_seconds=0)
    assert [len(line["alarms"]) for line in lines(tmp_path / "whole")] == [1, 0, 0, 0]
    assert run_files(tmp_path / "parts") == run_files(tmp_path / "whole")


@pytest.mark.gpu
def test_a_run_goes_on_on_a_gpu(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, device="cuda", out=tmp_path, progress=Notes(3), checkpoint_seconds=0)
    notes = Notes()
    found = fit(routed(), TASK, LONG, device="cuda", out=tmp_path, progress=notes)
    assert len(found.epochs) == 4
    assert notes.logged
