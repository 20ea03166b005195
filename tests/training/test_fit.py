"""`fit`: it learns, the seed decides everything, a step is what the recipe says, and a run leaves its files."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.squares import (
    SCALE,
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
    some_images,
)

from moesaic.data.image_dataset import ImageDataset, LabelledImages, RandomFlipCrop
from moesaic.models.registry import ModelSpec
from moesaic.routing import TokenChoice
from moesaic.training import trainer
from moesaic.training.checkpoint import load_checkpoint, load_weights
from moesaic.training.fit import FitResult, evaluate, fit
from moesaic.training.recipe import Recipe
from moesaic.training.train_step import CompileError

SHORT = Recipe(epochs=3, batch_size=16, optimizer="sgd", lr=0.05)


@pytest.mark.parametrize("make", [dense, routed, mixture])
def test_it_learns(make):
    found = fit(make(), TASK, replace(SHORT, epochs=8))
    assert found.accuracy > 90
    assert found.epochs[-1].loss < 0.5 * found.epochs[0].loss
    assert found.epochs[-1].train_accuracy > 90


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(epochs=8, batch_size=16, optimizer="adamw", lr=0.01, warmup_epochs=1),
        Recipe(epochs=8, batch_size=16, optimizer="normalized_gd", lr=0.05, weight_decay=0.0),
        Recipe(epochs=8, batch_size=16, lr=0.05, schedule="step", ema_decay=0.9, clip_grad=1.0, label_smoothing=0.1),
        Recipe(epochs=8, batch_size=16, lr=0.05, precision="bfloat16", grad_accum=2),
        Recipe(epochs=8, batch_size=16, lr=0.05, precision="float16"),
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
    found = fit(dense(), TASK, SHORT, eval_every=2)
    assert found.images == 3 * 70
    assert [epoch.number for epoch in found.epochs] == [1, 2, 3]
    assert [epoch.test_accuracy is None for epoch in found.epochs] == [True, False, False], "the last is tested anyway"
    assert found.epochs[-1].test_accuracy == found.accuracy
    assert found.stopped == "all epochs"
    seconds = [epoch.seconds for epoch in found.epochs]
    assert seconds == sorted(seconds)
    assert found.seconds == seconds[-1]
    assert found.epochs[0].lr == SHORT.lr_at(0.9), "in the middle of the last of five steps"


def test_the_first_loss_is_that_of_the_untrained_network():
    model = dense()
    plain = replace(TASK, train_transform=SCALE)
    x, labels = SCALE(TASK.train.pixels), TASK.train.labels
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(model(x), labels))
        right = float((model(x).argmax(1) == labels).double().mean())
    found = fit(model, plain, Recipe(epochs=1, batch_size=70))
    assert found.epochs[0].loss == pytest.approx(expected, rel=1e-5)
    assert found.epochs[0].train_accuracy == pytest.approx(100 * right)


def test_a_cluster_without_images_has_no_accuracy():
    found = fit(dense(), replace(TASK, cluster_names=("red", "blue", "green")), replace(SHORT, epochs=1))
    assert math.isnan(found.cluster_accuracy[2])
    again = FitResult.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
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
    assert notes.skipped == 60 - len(found.epochs), "but is no work"


def test_progress_is_told_of_loss_accuracies_and_speed(monkeypatch):
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    notes = Notes()
    fit(dense(), TASK, SHORT, progress=notes)
    assert notes.advanced == 3
    assert any("epoch 2 of 3, 40 %: loss" in note and "images/s" in note for note in notes.notes)
    assert sum("train" in note and "test" in note for note in notes.notes) == 3


# what a step does


def one_step(model: nn.Module, recipe: Recipe, dataset: ImageDataset = TASK) -> list[Tensor]:
    """By how much the weights move in one step over all images."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fit(
        model,
        replace(dataset, train_transform=SCALE),
        replace(recipe, epochs=1, batch_size=70, momentum=0.0, weight_decay=0.0),
    )
    return [parameter.detach() - start for parameter, start in zip(model.parameters(), before, strict=True)]


def test_a_batch_in_parts_is_the_same_step():
    whole, parted = (one_step(dense(), replace(SHORT, grad_accum=parts)) for parts in (1, 3))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parted, strict=True))
    assert any(a.abs().max() > 1e-4 for a in whole)


def test_a_clipped_gradient_is_no_longer_than_asked_for():
    moved = one_step(dense(), replace(SHORT, lr=1.0, schedule="constant", clip_grad=0.01))
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_normalized_gd_moves_each_expert_by_the_learning_rate_and_a_plain_network_as_one():
    recipe = replace(SHORT, optimizer="normalized_gd", lr=0.5, schedule="constant")
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
        one_step(model, replace(SHORT, optimizer=optimizer, router_lr=0.0))
        assert torch.equal(model.moe.router.weight, before)
        one_step(model, replace(SHORT, optimizer=optimizer))
        assert not torch.equal(model.moe.router.weight, before)


def test_routers_go_at_a_tenth_of_the_rate_under_adamw():
    def moved(rate: float | None) -> Tensor:
        model = routed()
        before = model.moe.router.weight.detach().clone()
        one_step(model, replace(SHORT, optimizer="adamw", lr=0.01, router_lr=rate, weight_decay=0.0))
        return model.moe.router.weight.detach() - before

    torch.testing.assert_close(moved(None), moved(0.001))
    assert not torch.allclose(moved(None), moved(0.01))


def choosing(seed: int = 0) -> nn.Module:
    return seeded(lambda: Routed(TokenChoice(8, experts=2, patch_size=4)), seed)


def test_the_balance_loss_reaches_a_router_in_which_patches_choose_and_leaves_others_alone():
    for make, differs in ((choosing, True), (routed, False), (dense, False)):
        plain, balanced = make(), make()
        one_step(plain, SHORT)
        one_step(balanced, replace(SHORT, balance_weight=100.0))
        assert same(plain, balanced) != differs


def test_a_running_mean_is_tested_and_kept(tmp_path):
    plain, mean = dense(), dense()
    seen: list[Tensor] = [next(plain.parameters()).detach().clone()]
    recipe = Recipe(epochs=1, batch_size=24, optimizer="sgd", lr=0.05)
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
    found = fit(mean, TASK, replace(recipe, ema_decay=0.3), out=tmp_path)
    assert torch.allclose(next(mean.parameters()), expected, atol=1e-6)
    assert not same(plain, mean)
    fresh = dense()
    assert load_weights(tmp_path, fresh).metrics["accuracy"] == found.accuracy
    assert same(fresh, mean)


def test_the_mean_takes_in_the_statistics_of_norms():
    model = routed()
    fit(model, TASK, replace(SHORT, ema_decay=0.999))
    trained = routed()
    fit(trained, TASK, SHORT)
    assert not torch.equal(model.norm.running_mean, trained.norm.running_mean)
    assert model.norm.running_mean.abs().max() > 0


def test_a_network_that_cannot_be_compiled_is_told(monkeypatch):
    def fail(*args: Any) -> None:
        raise AssertionError("vr must not be None\nsee the log")

    monkeypatch.setattr(torch, "compile", lambda model, **options: fail)
    with pytest.raises(
        CompileError, match=r"torch.compile fails on Routed here \(vr must not be None\); use compile=False"
    ):
        fit(routed(), TASK, replace(SHORT, compile=True))


def test_compile_is_asked_for_once_and_the_weights_keep_their_names(tmp_path, monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model) or nn.Sequential(model))
    model, plain = routed(), routed()
    fit(model, TASK, replace(SHORT, compile=True), out=tmp_path)
    fit(plain, TASK, SHORT)
    assert compiled == [model]
    assert same(model, plain)
    load_weights(tmp_path, routed())


# files


def test_a_run_leaves_its_configuration_its_metrics_its_network_and_its_result(tmp_path):
    found = fit(routed(), TASK, SHORT, seed=5, out=tmp_path / "deep" / "run")
    folder = tmp_path / "deep" / "run"
    written = ["config.json", "metrics.jsonl", "model.safetensors", "predictions.safetensors", "result.json"]
    assert run_files(folder)[0] == written
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["recipe"]["epochs"], config["data"]["name"]) == (5, 3, "squares")
    assert [line["loss"] for line in lines(folder)] == [epoch.loss for epoch in found.epochs]
    assert FitResult.from_json(json.loads((folder / "result.json").read_text())) == found


def test_the_network_of_a_run_can_be_made_again(tmp_path):
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 32})
    pixels = TASK.train.pixels.repeat_interleave(4, 2).repeat_interleave(4, 3)[:8]
    few = LabelledImages(pixels, TASK.train.labels[:8], TASK.train.clusters[:8])
    model = spec.build()
    fit(model, replace(TASK, train=few, test=few), Recipe(epochs=1, batch_size=8), out=tmp_path, spec=spec)
    found = load_checkpoint(tmp_path)
    assert found.spec == spec
    assert found.normalize == SCALE
    assert (found.class_names, found.cluster_names, found.input_shape) == (("up", "down"), ("red", "blue"), (3, 32, 32))
    x = SCALE(pixels)
    assert torch.equal(found.model(x), model(x))


def test_a_complete_run_is_not_done_again(tmp_path):
    model, again = routed(), routed(1)
    found = fit(model, TASK, SHORT, out=tmp_path)
    notes = Notes()
    assert fit(again, TASK, SHORT, out=tmp_path, progress=notes) == found
    assert same(model, again)
    assert not model.training
    assert not again.training
    assert notes.advanced == notes.skipped == 3


def test_a_folder_of_another_run_says_which_settings_differ(tmp_path):
    fit(routed(), TASK, SHORT, out=tmp_path)
    with pytest.raises(
        ValueError, match=r"other settings: recipe.epochs was 3, is 4; recipe.ema_decay was None, is 0.9; seed"
    ) as error:
        fit(routed(), TASK, replace(SHORT, epochs=4, ema_decay=0.9), seed=1, out=tmp_path)
    assert "Name another folder" in str(error.value)
    with pytest.raises(ValueError, match=r"model.class was 'Routed', is 'Sequential'"):
        fit(dense(), TASK, SHORT, out=tmp_path)
    with pytest.raises(ValueError, match=r"data.digest was"):
        fit(routed(), replace(TASK, train=some_images(70, 5)), SHORT, out=tmp_path)
    with pytest.raises(ValueError, match=r"data.train_transform was 'brighter', is 'Normalize"):
        fit(routed(), replace(TASK, train_transform=SCALE), SHORT, out=tmp_path)


def test_a_run_moved_elsewhere_is_the_same_run(tmp_path):
    found = fit(routed(), TASK, SHORT, out=tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert fit(routed(), replace(TASK, name="moved/squares"), SHORT, out=tmp_path / "there") == found


def test_a_run_of_the_first_version_is_the_same_run(tmp_path):
    dataset = replace(TASK, train_transform=RandomFlipCrop(SCALE, flip=True), eval_transform=SCALE)
    found = fit(routed(), dataset, SHORT, out=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    numbers = "mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3)"
    del config["data"]["train_transform"], config["data"]["eval_transform"], config["sha256"]
    config["data"]["vary"] = f"Augmented(scale=Normalize({numbers}), flip=True, padding=0)"
    config["data"]["view"] = f"Scale({numbers})"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fit(routed(), dataset, SHORT, out=tmp_path) == found


def test_leftovers_without_a_configuration_are_not_taken_for_this_run(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result.json is there without a config.json"):
        fit(routed(), TASK, SHORT, out=tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be made a folder"):
        fit(routed(), TASK, SHORT, out=tmp_path / "file")


class Recorder:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, config: Mapping[str, Any]) -> None:
        self.calls.append(config["recipe"]["epochs"])

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        assert values.keys() >= {"loss", "train_accuracy", "seconds", "images_per_second", "lr"}
        self.calls.append((epoch, "test_accuracy" in values))

    def end(self) -> None:
        self.calls.append("end")


def test_trackers_hear_every_epoch_and_the_end_however_it_comes():
    recorder, cut_short = Recorder(), Recorder()
    fit(dense(), TASK, SHORT, trackers=[recorder], eval_every=3)
    assert recorder.calls == [3, (1, False), (2, False), (3, True), "end"]
    with pytest.raises(KeyboardInterrupt):
        fit(dense(), TASK, SHORT, trackers=[cut_short], progress=Notes(1))
    assert cut_short.calls == [3, (1, True), "end"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "float32", "float16"])
@pytest.mark.parametrize("make", [dense, routed, mixture])
def test_it_learns_on_a_gpu(make, precision, tmp_path):
    recipe = replace(SHORT, epochs=12, precision=precision, ema_decay=0.5)
    assert fit(make(), TASK, recipe, device="cuda", out=tmp_path, checkpoint_seconds=0).accuracy > 85


def test_images_per_second_are_the_images_of_an_epoch_over_its_seconds():
    first = fit(routed(), TASK, SHORT).epochs[0]
    assert first.images_per_second * first.seconds == pytest.approx(len(TASK.train))
