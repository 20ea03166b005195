"""Runs of a comparison: paired, done once, continued where they stopped, and the same for the same seed."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.example_comparison import comparison

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize, SkippedFile
from moesaic.training import comparison_runs
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.compare import Grid, compare
from moesaic.training.compared_models import check_models
from moesaic.training.comparison_result import Comparison, read_comparison, run_from_json, write_comparison
from moesaic.training.fit import Diverged
from moesaic.training.fit_result import Epoch, FitResult
from moesaic.training.progress import NoProgress
from moesaic.training.recipe import Recipe

MODELS = ("wrn10_1", "wrn10_1_pmoe")
RECIPE = Recipe(epochs=2, batch_size=8)


def images(count: int, seed: int) -> LabelledImages:
    """Dark or bright, above or below."""
    labels, clusters = torch.arange(count) % 2, torch.arange(count) // 2 % 2
    noise = torch.randint(0, 100, (count, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
    bright = 100 * labels[:, None, None, None] * (torch.arange(8)[:, None] // 4 == clusters[:, None, None, None])
    return LabelledImages((noise + bright).to(torch.uint8), labels, clusters)


SCALE = Normalize((0.3,) * 3, (0.2,) * 3)
TASK = ImageDataset(
    images(40, 0), images(20, 1), ("dark", "bright"), ("above", "below"), SCALE, SCALE, name="lamps", digest="d"
)


class Trainer:
    """In place of `fit`: remembers what it was asked for, and can be interrupted."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.stop_at = stop_at

    def __call__(self, model: Any, dataset: ImageDataset, recipe: Recipe, **more: Any) -> FitResult:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        weights = float(sum(weight.detach().double().sum() for weight in model.parameters()))
        self.asked.append({"dataset": dataset, "weights": weights, "recipe": recipe, **more})
        Path(more["out"]).mkdir(parents=True)
        value = 60.0 + len(dataset.train) / 4
        epochs = [Epoch(1, 1.0, 50.0, None, 1.5, 9.0, 0.1), Epoch(2, 1.0, 50.0, value, 3.0, 9.0, 0.1)]
        return FitResult(
            tuple(epochs), value, (value, value), (value, math.nan), 3.0, 2 * len(dataset.train), "all epochs"
        )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    def use(stop_at: int | None = None) -> Trainer:
        made = Trainer(stop_at)
        monkeypatch.setattr(comparison_runs, "fit", made)
        return made

    return use


def run(
    out: Path, *, models: tuple[str, ...] = MODELS, samples: tuple[int, ...] = (8, 16), trials: int = 2, **more: Any
):
    return compare(TASK, Grid(models, samples, trials), RECIPE, out=out, **more)


def test_every_model_is_trained_with_every_number_of_samples_in_every_trial(tmp_path, trainer):
    used = trainer()
    found = run(tmp_path)
    assert len(used.asked) == len(found.runs) == 8
    assert {(each.model, each.samples, each.trial) for each in found.runs} == {
        (model, size, trial) for model in MODELS for size in (8, 16) for trial in (0, 1)
    }
    assert [len(each["dataset"].train) for each in used.asked] == [8, 8, 16, 16, 8, 8, 16, 16]
    [first] = [each for each in found.runs_of("wrn10_1", 8) if each.trial == 0]
    assert first.accuracy == 62
    # only where it was tested, and counted over images
    assert [(each.images, each.accuracy, each.seconds) for each in first.curve] == [(16, 62, 3.0)]
    assert first.seconds == 3.0


def test_within_a_trial_models_share_images_seed_and_nothing_else_differs(tmp_path, trainer):
    used = trainer()
    run(tmp_path)
    cnn, pmoe, *_ = used.asked
    other = used.asked[4]
    assert torch.equal(cnn["dataset"].train.pixels, pmoe["dataset"].train.pixels)
    assert cnn["seed"] == pmoe["seed"] != other["seed"]
    assert not torch.equal(cnn["dataset"].train.pixels, other["dataset"].train.pixels)
    assert cnn["weights"] != other["weights"]
    assert cnn["dataset"].test is TASK.test


def test_finished_runs_are_never_done_again(tmp_path, trainer):
    trainer()
    first = run(tmp_path)
    again = trainer()
    assert run(tmp_path) == first
    assert again.asked == []


def test_an_interrupted_comparison_continues(tmp_path, trainer):
    trainer(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    rest = trainer()
    found = run(tmp_path)
    assert len(rest.asked) == 5
    trainer()
    assert found == run(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("more", "runs"),
    [
        ({"models": (*MODELS, "wrn10_1_pmoe:experts=2")}, 4),
        ({"samples": (8, 12, 16)}, 4),
        ({"trials": 3}, 4),
        ({"models": tuple(reversed(MODELS))}, 0),
        ({"seed": 1}, 8),
        ({"settings": {"augment": "flip"}}, 8),
    ],
)
def test_only_what_is_missing_is_run(tmp_path, trainer, more, runs):
    trainer()
    run(tmp_path)
    later = trainer()
    run(tmp_path, **more)
    assert len(later.asked) == runs


def test_options_follow_colons(tmp_path, trainer):
    used = trainer()
    found = run(tmp_path, models=("wrn10_1_pmoe", "wrn10_1_pmoe:experts=2:fidelity=print"))
    assert [model.name for model in found.models] == ["wrn10_1_pmoe", "wrn10_1_pmoe:experts=2:fidelity=print"]
    arguments = used.asked[1]["spec"].arguments
    assert (arguments["experts"], arguments["fidelity"]) == (2, "print")


def test_the_networks_of_the_first_trial_with_the_most_samples_are_kept(tmp_path, trainer):
    trainer()
    run(tmp_path)
    kept = sorted(folder.name.rsplit("-", 1)[0] for folder in (tmp_path / "networks").iterdir())
    assert kept == ["wrn10-1-16-samples-trial-1", "wrn10-1-pmoe-16-samples-trial-1"]


def test_tests_are_few_however_many_epochs_there_are(tmp_path, trainer):
    used = trainer()
    compare(TASK, Grid(MODELS, (8,), 2), Recipe(epochs=101), out=tmp_path)
    assert {each["eval_every"] for each in used.asked} == {5}


def test_groups_are_kept_where_they_are_not_the_classes(tmp_path, trainer):
    trainer()
    found = run(tmp_path / "a")
    assert found.groups == ("above", "below")
    assert found.runs[0].groups[0] == 62
    assert math.isnan(found.runs[0].groups[1])
    trainer()
    plain = replace(TASK, test=replace(TASK.test, clusters=TASK.test.labels), cluster_names=TASK.class_names)
    found = compare(plain, Grid(MODELS, (8,), 2), RECIPE, out=tmp_path / "b")
    assert found.groups == ()
    assert found.runs[0].groups == ()


def test_notes_tell_of_skipped_files_and_of_samples_that_are_all_there_are(tmp_path, trainer):
    trainer()
    dataset = replace(TASK, skipped=tuple(SkippedFile(f"{i}.jpg", "truncated") for i in range(5)))
    found = compare(dataset, Grid(MODELS, (8, 40), 2), RECIPE, out=tmp_path)
    assert "5 files were skipped: 0.jpg (truncated), 1.jpg (truncated), 2.jpg (truncated) and 2 more." in found.notes
    assert any("With 40 samples all images to train on are used" in note for note in found.notes)


@pytest.mark.parametrize(("count", "margin"), [(40, 15), (1000, 3), (2000, None)])
def test_a_note_tells_how_much_few_test_images_leave_open(count, margin, tmp_path, trainer):
    trainer()
    dataset = replace(TASK, test=TASK.test.take(torch.arange(count) % len(TASK.test)))
    notes = [note for note in compare(dataset, Grid(MODELS, (8,), 2), RECIPE, out=tmp_path).notes if "±" in note]
    assert len(notes) == (margin is not None)
    assert not notes or (f"the same {count:,} images" in notes[0] and f"known to ±{margin} points" in notes[0])


def test_the_same_seed_gives_the_same_runs_but_for_seconds_even_when_a_run_is_interrupted(tmp_path):
    def timeless(found: Comparison) -> list[Any]:
        moments = [[(each.images, each.accuracy) for each in run.curve] for run in found.runs]
        return [moments, [(each.model, each.samples, each.trial, each.accuracy, each.groups) for each in found.runs]]

    class Interrupter(NoProgress):
        """Loses patience in the second epoch of the second run."""

        epochs, logged = 0, ""

        def advance(self, amount: int, note: str = "") -> None:
            self.epochs += amount
            if self.epochs == 4:
                raise KeyboardInterrupt

        def log(self, message: str) -> None:
            self.logged += message

    first = run(tmp_path / "a", samples=(8,))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", samples=(8,), progress=Interrupter())
    later = Interrupter()
    later.epochs = 4
    assert timeless(run(tmp_path / "b", samples=(8,), progress=later)) == timeless(first)
    assert later.logged == "continuing after epoch 1 of 2"
    [folder, _] = sorted((tmp_path / "a" / "networks").iterdir())
    assert load_checkpoint(folder).class_names == ("dark", "bright")


def test_a_comparison_is_read_as_it_was_written(tmp_path):
    found = comparison((8, 16), [[60.0, 61.0]] * 2, [[70.0, 72.5]] * 2, groups=("a", "b"), notes=("a note",))
    write_comparison(tmp_path / "result.json", found, {"verdicts": ["x"]})
    assert read_comparison(tmp_path / "result.json") == found


def test_a_group_without_images_is_null_in_the_file(tmp_path):
    found = comparison((8,), [[60.0, 61.0]], [[70.0, 72.5]], groups=("a", "b"))
    runs = tuple(replace(each, groups=(each.groups[0], math.nan)) for each in found.runs)
    write_comparison(tmp_path / "result.json", replace(found, runs=runs))
    assert "NaN" not in (tmp_path / "result.json").read_text("utf-8")
    assert math.isnan(read_comparison(tmp_path / "result.json").runs[0].groups[1])


@pytest.mark.parametrize("content", ["[", "{}", "[1]", '{"runs": 1}'])
def test_a_file_that_is_no_comparison_is_told(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result.json: not the result of a comparison .*; run moesaic compare again"):
        read_comparison(tmp_path / "result.json")


def test_a_comparison_with_a_run_missing_is_none():
    found = comparison((8, 16), [[60.0, 61.0]] * 2, [[70.0, 72.5]] * 2)
    with pytest.raises(ValueError, match="1 of 8 runs are missing, such as trial 1 of pmoe with 16 samples"):
        replace(found, runs=found.runs[:-1])


def test_a_run_needs_all_its_parts():
    with pytest.raises(ValueError, match=r"a run: has the keys .* it must have"):
        run_from_json({"model": "cnn"})


@pytest.mark.parametrize(
    ("models", "samples", "trials", "message"),
    [
        (("wrn10_1",), (8,), 2, "models='wrn10_1' has 1 of the at least 2 models"),
        (("wrn10_1", "wrn10_1"), (8,), 2, "models names 'wrn10_1' twice"),
        (MODELS, (8, 16, 8), 2, "samples names 8 twice"),
        (MODELS, (), 2, "samples names no number; give some, such as 250,500,1000"),
        (MODELS, (8,), 1, "trials=1; it must be at least 2, or there is no interval"),
    ],
)
def test_a_grid_that_compares_nothing_is_refused(models, samples, trials, message):
    with pytest.raises(ValueError, match=message):
        Grid(models, samples, trials)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((8, 41), "samples=41, but there are 40 images to train on in lamps; use at most 40"),
        ((1, 8), "samples=1 is less than one image for each of the 2 classes; use 2 or more"),
    ],
)
def test_samples_that_the_images_do_not_give_are_refused(tmp_path, samples, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, samples=samples)


def test_a_model_that_cannot_take_the_images_is_told(tmp_path):
    with pytest.raises(ValueError, match="cifar_cnn cannot take images of 3 channels and 8×8 pixels"):
        run(tmp_path, models=("wrn10_1", "cifar_cnn"))


def test_a_network_is_compared_with_itself_converted(tmp_path):
    converted = "wrn10_1:convert=body.group3.0.conv2:experts=4"
    found = run(tmp_path, models=("wrn10_1", converted), samples=(8,))
    assert [model.name for model in found.models] == ["wrn10_1", converted]
    assert found.models[0].routed_share == 0 < found.models[1].routed_share
    networks = [load_checkpoint(folder) for folder in (tmp_path / "networks").iterdir()]
    (routed,) = [each for each in networks if each.spec.conversions]
    assert routed.spec.conversions[0]["seed"] != 0, "every trial has initial weights of its own"


def test_a_run_that_diverges_says_which(tmp_path):
    with pytest.raises(Diverged, match=r"wrn10_1, 8 samples, trial 1: .*Lower lr"):
        compare(TASK, Grid(MODELS, (8,), 2), Recipe(epochs=2, batch_size=8, lr=1e30), out=tmp_path)


def test_a_task_without_a_digest_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the dataset has no digest"):
        compare(replace(TASK, digest=""), Grid(MODELS, (8,), 2), RECIPE, out=tmp_path)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("wrn10_1_pmoe:router=soft", {"router": "soft"}),
        ("wrn10_1_pmoe:router=token-choice:experts=2", {"router": "token-choice", "experts": 2}),
        (
            "wrn10_1_pmoe:router=moesaic.routing.soft:SoftRouter:experts=2",
            {"router": "moesaic.routing.soft:SoftRouter", "experts": 2},
        ),
    ],
)
def test_routers_are_options_of_models(model, options):
    grid = Grid(("wrn10_1", model), (8,), 2)
    check_models(grid.models)
    _, contender = grid.contenders(TASK)
    assert contender.spec.arguments == {"num_classes": 2, "in_channels": 3, "image_size": 8, **options}


class Scores(Trainer):
    """Gives every run an accuracy: ``lead(name, trial)`` points above 50."""

    def __init__(self, lead: Callable[[str, int], float]) -> None:
        super().__init__()
        self.lead, self.trials = lead, dict[int, int]()

    def __call__(self, model: Any, dataset: ImageDataset, recipe: Recipe, **more: Any) -> FitResult:
        trial = self.trials.setdefault(more["seed"], len(self.trials))
        found = super().__call__(model, dataset, recipe, **more)
        return replace(found, accuracy=50 + self.lead(str(more["spec"].arguments.get("experts", "")), trial))


WOBBLE = (0.3, -0.2, 0.4, -0.5, 0.1, -0.1, 0.35, -0.3, 0.2, -0.25, 0.15, -0.15)
SECOND, THIRD = "wrn10_1_pmoe:experts=2", "wrn10_1_pmoe:experts=4"
MANY_TESTED = replace(TASK, test=TASK.test.take(torch.arange(2000) % len(TASK.test)))


def grow(out: Path, models: tuple[str, ...] = ("wrn10_1", SECOND), most: int = 12, **more: Any) -> Comparison:
    return compare(MANY_TESTED, Grid(models, (8,), 3, most), RECIPE, out=out, **more)


def test_trials_are_added_until_the_answer_is_clear(tmp_path, monkeypatch):
    clear = Scores(lambda experts, trial: 20 + WOBBLE[trial] if experts else 0.0)
    monkeypatch.setattr(comparison_runs, "fit", clear)
    found = grow(tmp_path / "clear")
    assert (found.trials, len(clear.asked)) == (3, 6)
    assert found.ended == "more would hardly change the answers"
    unclear = Scores(lambda experts, trial: 1.0 + 4 * WOBBLE[trial] if experts else 0.0)
    monkeypatch.setattr(comparison_runs, "fit", unclear)
    found = grow(tmp_path / "unclear")
    assert (found.trials, len(unclear.asked)) == (12, 24)
    assert found.ended == "12 trials are the most that were allowed"
    assert read_comparison(written(tmp_path, found)) == found


def written(folder: Path, found: Comparison) -> Path:
    write_comparison(folder / "result.json", found)
    return folder / "result.json"


def test_trials_are_added_where_the_comparison_is_open_alone(tmp_path, monkeypatch):
    def lead(experts: str, trial: int) -> float:
        return {"": 0.0, "2": 20 + WOBBLE[trial], "4": 2.0 + 3 * WOBBLE[trial]}[experts]

    used = Scores(lead)
    monkeypatch.setattr(comparison_runs, "fit", used)
    found = grow(tmp_path, ("wrn10_1", SECOND, THIRD))
    assert found.trials_of(SECOND) == 3
    assert 3 < found.trials_of(THIRD) == found.trials_of("wrn10_1") == found.trials < 12
    assert len(used.asked) == len(found.runs) == 3 + 2 * found.trials
    assert read_comparison(written(tmp_path, found)) == found
    with pytest.raises(ValueError, match="1 of 15 runs are missing"):
        replace(found, runs=[run for run in found.runs if (run.model, run.trial) != (THIRD, 1)], trials=found.trials)


def test_a_growing_comparison_that_was_interrupted_ends_as_one_that_was_not(tmp_path, monkeypatch):
    def lead(experts: str, trial: int) -> float:
        return 2.0 + 3 * WOBBLE[trial] if experts else 0.0

    monkeypatch.setattr(comparison_runs, "fit", Scores(lead))
    whole = grow(tmp_path / "whole")
    assert whole.trials > 4
    for stop_at in (1, 7):
        interrupted = Scores(lead)
        interrupted.stop_at = stop_at
        monkeypatch.setattr(comparison_runs, "fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grow(tmp_path / f"{stop_at}")
        rest = Scores(lead)
        rest.trials = dict(interrupted.trials)
        monkeypatch.setattr(comparison_runs, "fit", rest)
        assert grow(tmp_path / f"{stop_at}") == whole
        assert len(rest.asked) == len(whole.runs) - stop_at


def test_no_trial_is_added_that_takes_longer_than_the_time_left(tmp_path, monkeypatch):
    def lead(experts: str, trial: int) -> float:
        return 1.0 + 4 * WOBBLE[trial] if experts else 0.0

    monkeypatch.setattr(comparison_runs, "fit", Scores(lead))
    left = iter([1e6, 1e6, -1.0])
    found = grow(tmp_path, seconds_left=lambda: next(left))
    assert found.trials == 5
    assert found.ended == "the next would take longer than the time that is left"
    again = Scores(lead)
    monkeypatch.setattr(comparison_runs, "fit", again)
    longer = grow(tmp_path, seconds_left=lambda: 1e6)
    assert longer.trials == 12
    assert len(again.asked) == 14, "what is finished is not done again"


@pytest.mark.parametrize(
    ("trials", "most", "message"),
    [
        (3, 2, "max_trials=2; it must be from 3 to 24"),
        (3, 25, "max_trials=25; it must be from 3 to 24, .* use exactly trials=25"),
        (2, 12, "trials=2 with max_trials=12; trials are added to at least 3"),
    ],
)
def test_trials_that_cannot_be_added_are_refused(trials, most, message):
    with pytest.raises(ValueError, match=message):
        Grid(MODELS, (8,), trials, most)


def test_files_of_earlier_versions_are_read(tmp_path):
    found = comparison((8, 16), [[60.0, 61.0]] * 2, [[70.0, 72.5]] * 2)
    write_comparison(tmp_path / "result.json", found)
    content = json.loads((tmp_path / "result.json").read_text("utf-8"))
    del content["max_trials"], content["ended"]
    for model in content["models"]:
        del model["spelling"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert read_comparison(tmp_path / "result.json") == found
    del content["seed"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not the result of a comparison"):
        read_comparison(tmp_path / "result.json")


def test_finished_runs_are_found_by_the_digests_of_earlier_versions(tmp_path, trainer):
    trainer()
    run(tmp_path, models=MODELS, samples=(8,), trials=2, settings={"augment": "none"})
    digests = {path.stem.rsplit("-", 1)[1] for path in (tmp_path / "cells").iterdir()}
    assert digests == {"0b6b84268aca3a7e", "36f30b3e572831b0", "ab7a6ed67a187504", "bc8ff2847713327f"}
