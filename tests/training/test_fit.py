"""`fit`: it learns, the seed decides everything, and a run that was stopped ends as if it had not been."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.data.image_tasks import ImageTask, LabelledImages, Scale
from moesaic.layers import PatchMoE, SampleMoE
from moesaic.models.registry import ModelSpec
from moesaic.routing import SampleRouter, TokenChoice
from moesaic.training import fit as loop
from moesaic.training.checkpoints import load_checkpoint, load_weights
from moesaic.training.fit import Diverged, Fit, evaluate, fit
from moesaic.training.recipe import Recipe

SHORT = Recipe(epochs=3, batch=16, learning_rate=0.05)
SCALE = Scale((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))


def some_images(count: int, seed: int) -> LabelledImages:
    """Noise with a bright square in the upper (label 0) or the lower half (label 1), red (cluster 0) or blue (1)."""
    generator = torch.Generator().manual_seed(seed)
    labels, clusters = torch.arange(count) % 2, torch.arange(count) // 2 % 2
    pixels = 120 * torch.rand(count, 3, 8, 8, generator=generator)
    for image, (label, cluster) in enumerate(zip(labels.tolist(), clusters.tolist(), strict=True)):
        column = int(torch.randint(0, 2, (), generator=generator))
        pixels[image, 2 * cluster, 4 * label : 4 * label + 4, 4 * column : 4 * column + 4] += 130
    return LabelledImages(pixels.to(torch.uint8), labels, clusters)


def brighter(pixels: Tensor, luck: Tensor) -> Tensor:
    return SCALE(pixels) + 0.1 * luck[:, 0, None, None, None]


TASK = ImageTask(
    some_images(70, 0),
    some_images(40, 1),
    ("up", "down"),
    ("red", "blue"),
    brighter,
    SCALE,
    name="squares",
    scale=SCALE,
)


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Routed(nn.Module):
    """A small network with a routed layer, statistics that run along and something random."""

    def __init__(self, router: nn.Module | None = None) -> None:
        super().__init__()
        choice: dict[str, Any] = {"patches_per_expert": 2} if router is None else {"router": router}
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.moe = PatchMoE(8, 8, experts=2, patch_size=4, kernel_size=3, **choice)
        self.last = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.moe(self.norm(self.conv(x)).relu()).relu()
        return self.head(self.drop(self.last(nn.functional.avg_pool2d(x, 4).flatten(1))))


def routed(seed: int = 0) -> nn.Module:
    return seeded(Routed, seed)


def dense(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 2)), seed)


def mixture(seed: int = 0) -> nn.Module:
    def make() -> nn.Module:
        return SampleMoE(SampleRouter(3, experts=2, patch_size=4), [dense(10 * seed + e) for e in range(2)])

    return seeded(make, seed)


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(first: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True))


class Notes:
    """Progress that remembers; and that stops the run after so many calls, as an interruption would."""

    def __init__(self, patience: int | None = None) -> None:
        self.advanced = 0
        self.calls = 0
        self.notes: list[str] = []
        self.logged: list[str] = []
        self.patience = patience

    def begin(self, name: str, total: int, done: int = 0) -> None: ...

    def end(self) -> None: ...

    def advance(self, amount: int, note: str = "") -> None:
        self.advanced += amount
        self.notes.append(note)
        self.calls += 1
        if self.patience is not None and self.calls > self.patience:
            raise KeyboardInterrupt

    def log(self, message: str) -> None:
        self.logged.append(message)


# learning


@pytest.mark.parametrize("make", [dense, routed, mixture])
def test_it_learns(make):
    found = fit(make(), TASK, replace(SHORT, epochs=12))
    assert found.accuracy > 90
    assert found.epochs[-1].loss < 0.5 * found.epochs[0].loss
    assert found.epochs[-1].train_accuracy > 90


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(epochs=12, batch=16, optimizer="adamw", learning_rate=0.01, warmup=1),
        Recipe(epochs=12, batch=16, optimizer="normalized_gd", learning_rate=0.05, weight_decay=0.0),
        Recipe(epochs=12, batch=16, learning_rate=0.05, schedule="step", ema=0.9, clip=1.0, label_smoothing=0.1),
        Recipe(epochs=12, batch=16, learning_rate=0.05, precision="bfloat16", accumulate=2),
        Recipe(epochs=12, batch=16, learning_rate=0.05, precision="float16"),
    ],
)
def test_it_learns_by_every_recipe(recipe):
    assert fit(routed(), TASK, recipe).accuracy > 85


def test_the_seed_decides_everything_but_the_initial_weights():
    models = [routed() for _ in range(3)]
    first, again, other = (fit(model, TASK, SHORT, seed=seed) for model, seed in zip(models, (3, 3, 4), strict=True))
    assert [epoch.loss for epoch in first.epochs] == [epoch.loss for epoch in again.epochs]
    assert same(models[0], models[1])
    assert not same(models[0], models[2])
    assert [epoch.loss for epoch in first.epochs] != [epoch.loss for epoch in other.epochs]


def test_torchs_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    fit(routed(), TASK, SHORT)
    assert torch.equal(torch.get_rng_state(), before)


def test_accuracies_are_those_of_the_model_it_leaves_behind():
    model = routed()
    found = fit(model, TASK, SHORT)
    right = evaluate(model, TASK)
    assert found.accuracy == 100 * float(right.double().mean())
    assert not model.training
    for group, accuracy in enumerate(found.cluster_accuracy):
        assert accuracy == pytest.approx(100 * float(right[TASK.test.clusters == group].double().mean()))
    for group, accuracy in enumerate(found.class_accuracy):
        assert accuracy == pytest.approx(100 * float(right[TASK.test.labels == group].double().mean()))


def test_what_is_counted():
    found = fit(dense(), TASK, SHORT, test_every=2)
    assert found.images == 3 * 70
    assert [epoch.number for epoch in found.epochs] == [1, 2, 3]
    assert [epoch.test_accuracy is None for epoch in found.epochs] == [True, False, False], "the last is tested anyway"
    assert found.epochs[-1].test_accuracy == found.accuracy
    assert found.stopped == "all epochs"
    seconds = [epoch.seconds for epoch in found.epochs]
    assert seconds == sorted(seconds)
    assert found.seconds == seconds[-1]
    assert found.epochs[0].learning_rate == SHORT.rate(0.8), "at the last of five steps"


def test_the_first_loss_is_that_of_the_untrained_network():
    model = dense()
    plain = replace(TASK, vary=SCALE)
    x, labels = SCALE(TASK.train.pixels), TASK.train.labels
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(model(x), labels))
        right = float((model(x).argmax(1) == labels).double().mean())
    found = fit(model, plain, Recipe(epochs=1, batch=70))
    assert found.epochs[0].loss == pytest.approx(expected, rel=1e-5)
    assert found.epochs[0].train_accuracy == pytest.approx(100 * right)


def test_a_cluster_without_images_has_no_accuracy():
    found = fit(dense(), replace(TASK, cluster_names=("red", "blue", "green")), replace(SHORT, epochs=1))
    assert math.isnan(found.cluster_accuracy[2])
    again = Fit.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
    assert math.isnan(again.cluster_accuracy[2])
    assert again.epochs == found.epochs


@pytest.mark.parametrize("count", [2, 17, 33])
def test_no_number_of_images_leaves_one_alone_with_a_batchnorm(count):
    images = TASK.train.take(torch.arange(count))
    assert fit(routed(), replace(TASK, train=images), replace(SHORT, epochs=1)).images == count


def test_it_stops_when_every_image_was_right_as_it_was_trained_on():
    notes = Notes()
    recipe = replace(SHORT, epochs=60, schedule="constant", stop_at_zero_error=True)
    found = fit(dense(), TASK, recipe, progress=notes)
    assert found.stopped == "zero training error"
    assert len(found.epochs) < 60
    assert found.epochs[-1].train_accuracy == 100
    assert all(epoch.train_accuracy < 100 for epoch in found.epochs[:-1])
    assert found.epochs[-1].test_accuracy is not None
    assert notes.advanced == 60, "what is left counts as done"


def test_progress_is_told_of_loss_accuracies_and_speed(monkeypatch):
    monkeypatch.setattr(loop, "_LOOK", 0.0)
    notes = Notes()
    fit(dense(), TASK, SHORT, progress=notes)
    assert notes.advanced == 3
    assert any("epoch 2 of 3, 40 %: loss" in note and "images/s" in note for note in notes.notes)
    assert sum("train" in note and "test" in note for note in notes.notes) == 3


# what a step does


def one_step(model: nn.Module, recipe: Recipe, task: ImageTask = TASK) -> list[Tensor]:
    """By how much the weights move in one step over all images."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fit(model, replace(task, vary=SCALE), replace(recipe, epochs=1, batch=70, momentum=0.0, weight_decay=0.0))
    return [parameter.detach() - start for parameter, start in zip(model.parameters(), before, strict=True)]


def test_a_batch_in_parts_is_the_same_step():
    whole, parted = (one_step(dense(), replace(SHORT, accumulate=parts)) for parts in (1, 3))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parted, strict=True))
    assert any(a.abs().max() > 1e-4 for a in whole)


def test_a_clipped_gradient_is_no_longer_than_asked_for():
    moved = one_step(dense(), replace(SHORT, learning_rate=1.0, schedule="constant", clip=0.01))
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_normalized_gd_moves_each_expert_by_the_learning_rate_and_a_plain_network_as_one():
    recipe = replace(SHORT, optimizer="normalized_gd", learning_rate=0.5, schedule="constant")
    for make in (routed, mixture):
        model = make()
        layer = model.moe if make is routed else model
        before = [parameter.detach().clone() for parameter in layer.experts.parameters()]
        one_step(model, recipe)
        moved = [now.detach() - then for now, then in zip(layer.experts.parameters(), before, strict=True)]
        if make is routed:
            lengths = torch.cat([each.flatten(1) for each in moved], 1).norm(dim=1)
        else:
            half = len(moved) // 2
            lengths = torch.stack(
                [torch.cat([m.flatten() for m in part]).norm() for part in (moved[:half], moved[half:])]
            )
        assert lengths.tolist() == pytest.approx([0.5, 0.5], rel=1e-4)
    moved = one_step(dense(), recipe)
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.5, rel=1e-4)


def test_routers_can_have_a_rate_of_their_own():
    for optimizer in ("sgd", "adamw", "normalized_gd"):
        model = routed()
        before = model.moe.router.weight.detach().clone()
        one_step(model, replace(SHORT, optimizer=optimizer, router_rate=0.0))
        assert torch.equal(model.moe.router.weight, before)
        one_step(model, replace(SHORT, optimizer=optimizer))
        assert not torch.equal(model.moe.router.weight, before)


def choosing(seed: int = 0) -> nn.Module:
    return seeded(lambda: Routed(TokenChoice(8, experts=2, patch_size=4)), seed)


def test_the_balance_loss_reaches_a_router_in_which_patches_choose_and_leaves_others_alone():
    for make, differs in ((choosing, True), (routed, False), (dense, False)):
        plain, balanced = make(), make()
        one_step(plain, SHORT)
        one_step(balanced, replace(SHORT, balance=100.0))
        assert same(plain, balanced) != differs


def test_a_running_mean_is_tested_and_kept(tmp_path):
    plain, mean = dense(), dense()
    seen: list[Tensor] = [next(plain.parameters()).detach().clone()]
    recipe = Recipe(epochs=1, batch=24, learning_rate=0.05)
    handle = plain.register_forward_pre_hook(
        lambda module, args: seen.append(next(module.parameters()).detach().clone()) if module.training else None
    )
    fit(plain, TASK, recipe)
    handle.remove()
    steps = [*seen[2:], next(plain.parameters()).detach()]  # after each of three steps
    expected = seen[0]
    for step, now in enumerate(steps, start=1):
        stays = min(0.3, (1 + step) / (10 + step))
        expected = expected + (1 - stays) * (now - expected)
    found = fit(mean, TASK, replace(recipe, ema=0.3), out=tmp_path)
    assert torch.allclose(next(mean.parameters()), expected, atol=1e-6)
    assert not same(plain, mean)
    fresh = dense()
    assert load_weights(tmp_path, fresh).metrics["accuracy"] == found.accuracy
    assert same(fresh, mean)


def test_the_mean_takes_in_the_statistics_of_norms():
    model = routed()
    fit(model, TASK, replace(SHORT, ema=0.999))
    trained = routed()
    fit(trained, TASK, SHORT)
    assert not torch.equal(model.norm.running_mean, trained.norm.running_mean)
    assert model.norm.running_mean.abs().max() > 0


def test_compile_is_asked_for_once_and_the_weights_keep_their_names(tmp_path, monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or nn.Sequential(model))
    model, plain = routed(), routed()
    fit(model, TASK, replace(SHORT, compile=True), out=tmp_path)
    fit(plain, TASK, SHORT)
    assert compiled == [model]
    assert same(model, plain)
    load_weights(tmp_path, routed())


# files


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: timeless(each) for name, each in content.items() if name not in ("seconds", "images_per_second")}
    return [timeless(each) for each in content] if isinstance(content, list) else content


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a run left behind but for times."""
    result = json.loads((folder / "result.json").read_text())
    return sorted(each.name for each in folder.iterdir()), timeless(lines(folder)), timeless(result)


def test_a_run_leaves_its_configuration_its_metrics_its_network_and_its_result(tmp_path):
    found = fit(routed(), TASK, SHORT, seed=5, out=tmp_path / "deep" / "run")
    folder = tmp_path / "deep" / "run"
    assert outcome(folder)[0] == ["config.json", "metrics.jsonl", "model.safetensors", "result.json"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["recipe"]["epochs"], config["data"]["name"]) == (5, 3, "squares")
    assert [line["loss"] for line in lines(folder)] == [epoch.loss for epoch in found.epochs]
    assert Fit.from_json(json.loads((folder / "result.json").read_text())) == found


def test_the_network_of_a_run_can_be_made_again(tmp_path):
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 32})
    pixels = TASK.train.pixels.repeat_interleave(4, 2).repeat_interleave(4, 3)[:8]
    few = LabelledImages(pixels, TASK.train.labels[:8], TASK.train.clusters[:8])
    model = spec.build()
    fit(model, replace(TASK, train=few, test=few), Recipe(epochs=1, batch=8), out=tmp_path, spec=spec)
    found = load_checkpoint(tmp_path)
    assert found.spec == spec
    assert found.scale == SCALE
    assert (found.class_names, found.cluster_names, found.input_shape) == (("up", "down"), ("red", "blue"), (3, 32, 32))
    x = SCALE(pixels)
    assert torch.equal(found.model(x), model(x))


def test_a_complete_run_is_not_done_again(tmp_path):
    model, again = routed(), routed(1)
    found = fit(model, TASK, SHORT, out=tmp_path)
    notes = Notes()
    assert fit(again, TASK, SHORT, out=tmp_path, progress=notes) == found
    assert same(model, again)
    assert notes.advanced == 3


def test_a_folder_of_another_run_says_which_settings_differ(tmp_path):
    fit(routed(), TASK, SHORT, out=tmp_path)
    with pytest.raises(
        ValueError, match=r"other settings: recipe.epochs was 3, is 4; recipe.ema was None, is 0.9; seed"
    ) as told:
        fit(routed(), TASK, replace(SHORT, epochs=4, ema=0.9), seed=1, out=tmp_path)
    assert "Name another folder" in str(told.value)
    with pytest.raises(ValueError, match=r"model.class was 'Routed', is 'Sequential'"):
        fit(dense(), TASK, SHORT, out=tmp_path)
    with pytest.raises(ValueError, match=r"data.digest was"):
        fit(routed(), replace(TASK, train=some_images(70, 5)), SHORT, out=tmp_path)
    with pytest.raises(ValueError, match=r"data.vary was 'brighter', is 'Scale"):
        fit(routed(), replace(TASK, vary=SCALE), SHORT, out=tmp_path)


def test_a_run_moved_elsewhere_is_the_same_run(tmp_path):
    found = fit(routed(), TASK, SHORT, out=tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert fit(routed(), replace(TASK, name="moved/squares"), SHORT, out=tmp_path / "there") == found


def test_leftovers_without_a_configuration_are_not_taken_for_this_run(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result.json is there without a config.json"):
        fit(routed(), TASK, SHORT, out=tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be made a folder"):
        fit(routed(), TASK, SHORT, out=tmp_path / "file")


# stopping and going on

LONG = Recipe(epochs=4, batch=12, learning_rate=0.05, momentum=0.9)
RECIPES = {
    "sgd": LONG,
    "adamw, mean": replace(LONG, optimizer="adamw", learning_rate=0.01, ema=0.9, warmup=1),
    "normalized_gd, parts": replace(LONG, optimizer="normalized_gd", accumulate=2, clip=1.0),
    "float16": replace(LONG, precision="float16", schedule="step"),
}


@pytest.fixture
def often(monkeypatch):
    """Look after every batch, and keep a checkpoint after every second."""
    monkeypatch.setattr(loop, "_LOOK", 0.0)
    monkeypatch.setattr(loop, "_ALARM", 2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("make", [routed, mixture])
def test_a_run_stopped_anywhere_and_called_again_ends_bit_identical(recipe, make, tmp_path, often):
    undisturbed = make()
    fit(undisturbed, TASK, recipe, seed=2, out=tmp_path / "whole", checkpoint_seconds=0)
    interruptions = 0
    for patience in (3, 5, 9, 1, 4, 100):  # calls of progress, of which there are seven an epoch
        model = make(7) if interruptions else make()  # a checkpoint replaces the weights
        try:
            fit(model, TASK, recipe, seed=2, out=tmp_path / "parts", progress=Notes(patience), checkpoint_seconds=0)
        except KeyboardInterrupt:
            interruptions += 1
        else:
            assert same(model, undisturbed)
            break
    assert interruptions == 5
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_how_often_checkpoints_are_written_changes_nothing(tmp_path):
    often, rarely, never = routed(), routed(), routed()
    fit(often, TASK, LONG, out=tmp_path / "often", checkpoint_seconds=0)
    fit(rarely, TASK, LONG, out=tmp_path / "rarely", checkpoint_seconds=1e9)
    fit(never, TASK, LONG)
    assert outcome(tmp_path / "often") == outcome(tmp_path / "rarely")
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
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_fit import LONG, TASK, Notes, routed
from moesaic.training import fit as loop

class Slow(Notes):
    def advance(self, amount, note=""):
        time.sleep(0.05)

loop._LOOK, loop._ALARM = 0.0, 2
loop.fit(routed(), TASK, LONG, out=Path(sys.argv[1]), progress=Slow(), checkpoint_seconds=0)
"""


def test_a_killed_process_leaves_a_run_that_can_go_on(tmp_path, often):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), here], env=environment) as process:
        patience = time.monotonic() + 60
        metrics = tmp_path / "killed" / "metrics.jsonl"
        while time.monotonic() < patience and not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "training.safetensors").exists()
    assert not (tmp_path / "killed" / "result.json").exists()
    model, undisturbed = routed(), routed()
    fit(model, TASK, LONG, out=tmp_path / "killed", checkpoint_seconds=0)
    fit(undisturbed, TASK, LONG, out=tmp_path / "whole", checkpoint_seconds=0)
    assert same(model, undisturbed)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_and_it_goes_on_from_there(tmp_path, monkeypatch):
    writes: list[Path] = []
    write = Path.write_bytes

    def fill(self: Path, content: bytes) -> int:
        writes.append(self)
        if sum("training" in each.name for each in writes) > 2:
            write(self, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(OSError, match=r"training.safetensors of .* MB could not be written .*still there"):
            fit(routed(), TASK, LONG, out=tmp_path / "full", checkpoint_seconds=0)
    assert load_weights(tmp_path / "full", routed()).metrics["epochs"] == 2
    model, undisturbed = routed(), routed()
    notes = Notes()
    fit(model, TASK, LONG, out=tmp_path / "full", progress=notes)
    fit(undisturbed, TASK, LONG, out=tmp_path / "whole")
    assert notes.logged == ["continuing after epoch 2 of 4"]
    assert same(model, undisturbed)
    assert outcome(tmp_path / "full") == outcome(tmp_path / "whole")


def test_metrics_that_cannot_be_written_say_so(tmp_path, monkeypatch):
    opened = Path.open

    def full(self: Path, *args: Any, **options: Any):
        if self.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written \(No space left on device\)"):
        fit(routed(), TASK, LONG, out=tmp_path)


def test_a_damaged_checkpoint_is_not_taken_for_a_good_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, out=tmp_path, progress=Notes(2), checkpoint_seconds=0)
    state = tmp_path / "training.safetensors"
    state.write_bytes(state.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"training.safetensors is not a whole safetensors file"):
        fit(routed(), TASK, LONG, out=tmp_path)


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
    with pytest.raises(Diverged, match=r"in epoch 3 of 4, by batch 6 of 6\)") as told:
        fit(Poisoned(14), TASK, LONG, out=tmp_path, checkpoint_seconds=0)
    assert str(tmp_path / "model.safetensors") in str(told.value)
    assert "Lower learning_rate=0.05" in str(told.value)
    model = Poisoned(0)
    assert load_weights(tmp_path, model).metrics["epochs"] == 2
    assert all(tensor.isfinite().all() for tensor in weights(model))


def test_a_bad_loss_is_noticed_within_an_epoch(tmp_path, often):
    with pytest.raises(Diverged, match=r"in epoch 1 of 4, by batch 3 of 6.*There was no checkpoint before it"):
        fit(Poisoned(2), TASK, LONG, out=tmp_path)
    with pytest.raises(Diverged, match="Nothing was kept"):
        fit(Poisoned(2), TASK, LONG)


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
    with pytest.raises(ValueError, match=r"returned \(14, 5\) for 14 images of 2 classes; build it with num_classes=2"):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), TASK, SHORT)


def test_nothing_to_train_or_test_on_is_refused():
    nothing = TASK.train.take(torch.arange(0))
    with pytest.raises(ValueError, match="0 images to train on and 40 to test on"):
        fit(dense(), replace(TASK, train=nothing), SHORT)


def copies(seed: int = 0) -> nn.Module:
    """Both experts choose the same patches."""
    model = routed(seed)
    with torch.no_grad():
        model.moe.router.weight[1] = model.moe.router.weight[0]
    return model


def test_experts_that_collapse_are_told_once(tmp_path):
    notes = Notes()
    recipe = replace(LONG, router_rate=0.0)
    found = fit(copies(), TASK, recipe, out=tmp_path, progress=notes)
    assert len(notes.logged) == 1
    assert "epoch 1: CollapseAlarm: layer 'moe': the experts choose the same units" in notes.logged[0]
    assert [len(epoch.alarms) for epoch in found.epochs] == [1, 0, 0, 0]
    assert lines(tmp_path)[0]["alarms"][0] in notes.logged[0]
    assert fit(routed(), TASK, LONG).epochs[0].alarms == ()


def test_alarms_are_the_same_in_a_run_that_was_stopped(tmp_path, often):
    recipe = replace(LONG, router_rate=0.0)
    for patience in (4, 6, 100):
        try:
            fit(copies(), TASK, recipe, out=tmp_path / "parts", progress=Notes(patience), checkpoint_seconds=0)
        except KeyboardInterrupt:
            continue
    fit(copies(), TASK, recipe, out=tmp_path / "whole", checkpoint_seconds=0)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


class Heard:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, config: Mapping[str, Any]) -> None:
        self.said.append(config["recipe"]["epochs"])

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        assert values.keys() >= {"loss", "train_accuracy", "seconds", "images_per_second", "learning_rate"}
        self.said.append((epoch, "test_accuracy" in values))

    def end(self) -> None:
        self.said.append("end")


def test_trackers_hear_every_epoch_and_the_end_however_it_comes():
    heard, cut_short = Heard(), Heard()
    fit(dense(), TASK, SHORT, trackers=[heard], test_every=3)
    assert heard.said == [3, (1, False), (2, False), (3, True), "end"]
    with pytest.raises(Diverged):
        fit(Poisoned(2), TASK, LONG, trackers=[cut_short])
    assert cut_short.said == [4, "end"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "float32", "float16"])
@pytest.mark.parametrize("make", [dense, routed, mixture])
def test_it_learns_on_a_gpu(make, precision, tmp_path):
    recipe = replace(SHORT, epochs=12, precision=precision, ema=0.5)
    assert fit(make(), TASK, recipe, device="cuda", out=tmp_path, checkpoint_seconds=0).accuracy > 85


@pytest.mark.gpu
def test_a_run_goes_on_on_a_gpu(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(routed(), TASK, LONG, device="cuda", out=tmp_path, progress=Notes(3), checkpoint_seconds=0)
    notes = Notes()
    found = fit(routed(), TASK, LONG, device="cuda", out=tmp_path, progress=notes)
    assert len(found.epochs) == 4
    assert notes.logged
