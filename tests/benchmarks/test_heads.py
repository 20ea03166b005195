"""The study of heads: images that show what they should, runs equal to `fit`, and verdicts by the rule."""

import io
import json
import zipfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_scripts import loaded_script
from PIL import Image

from moesaic.training.fit import fit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "heads.json"
WORDS, NUMBERS = ("task", "peer", "verdict", "grows"), ("lead", "low", "high", "p")
GREYS = {"dogs": 20, "birds": 80, "food": 140, "reptiles and amphibians": 200}


@pytest.fixture(scope="module")
def heads() -> Generator[ModuleType]:
    with loaded_script("heads") as module:
        yield module


@pytest.fixture(scope="module")
def tasks() -> Generator[ModuleType]:
    with loaded_script("head_tasks") as module:
        yield module


@pytest.fixture(scope="module")
def rule() -> Generator[ModuleType]:
    with loaded_script("head_verdicts") as module:
        yield module


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photographs of each class, each of one grey of its own."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "photos").mkdir()
    with zipfile.ZipFile(folder / "photos" / "photos.zip", "w") as archive:
        for group, grey in GREYS.items():
            for i in range(8):
                file = io.BytesIO()
                Image.new("RGB", (48, 36), (grey + 4 * i,) * 3).save(file, "PNG")
                archive.writestr(f"{group}/{i}.jpg", file.getvalue())
    return folder


def greys(image: Any, grid: int) -> list[int]:
    """The grey in the middle of each tile."""
    side = image.shape[1] // grid
    return [int(image[0, side * i + side // 2, side * j + side // 2]) for i in range(grid) for j in range(grid)]


@pytest.mark.parametrize("grid", [1, 2, 3, 4])
def test_one_tile_tells_the_class(tasks: ModuleType, photographs: Path, grid: int) -> None:
    task = tasks.TASKS[f"dog or bird, 1 of {grid**2}"]
    pixels, labels = tasks.draw_images(task, 0, "train", 6, photographs)
    assert pixels.shape == (6, 3, 224, 224)
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]
    for image, label in zip(pixels, labels, strict=True):
        telling = [grey for grey in greys(image, grid) if grey < GREYS["food"]]
        assert len(telling) == 1
        assert (telling[0] >= GREYS["birds"]) == bool(label)


def test_training_and_test_images_have_no_photograph_in_common(tasks: ModuleType, photographs: Path) -> None:
    task = tasks.TASKS["food or reptile, 1 of 16"]
    for trial in range(3):
        seen = [
            {grey for image in tasks.draw_images(task, trial, part, 12, photographs)[0] for grey in greys(image, 4)}
            for part in ("train", "test")
        ]
        assert not seen[0] & seen[1]
    assert not np.array_equal(*(tasks.draw_images(task, trial, "train", 2, photographs)[0] for trial in (0, 1)))


def test_a_digit_covers_its_share(tasks: ModuleType, photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    white = np.full((28, 28, 1), 255, np.uint8)
    monkeypatch.setattr(tasks, "_digits", lambda part, folder: {"3": [white], "7": [white]})
    task = tasks.TASKS["digit on a photograph"]
    pixels, _ = tasks.draw_images(task, 0, "train", 4, photographs)
    assert (pixels == 255).mean((1, 2, 3)).tolist() == [task.share] * 4


def random_maps(heads: ModuleType, train: int = 40, classes: int = 2) -> Any:
    parts = [heads.as_images(torch.randn(count, 24, 5, 5), classes) for count in (train, 30)]
    return heads.as_dataset(*parts, [str(label) for label in range(classes)])


@pytest.mark.parametrize("labels", [5, 40])
def test_heads_trained_together_equal_those_that_fit_trains(heads: ModuleType, labels: int) -> None:
    dataset = random_maps(heads)
    recipe = replace(heads.RECIPE, epochs=4, lr=0.01)
    variants = {name: replace(each, recipe=recipe) for name, each in heads.HEADS.items()}
    together = heads.train_heads(dataset, labels, variants, seed=5)
    few = replace(dataset, train=dataset.train.take(torch.arange(labels)))
    for name, variant in variants.items():
        alone = fit(variant.create(24, 2, 5), few, recipe, seed=5)
        assert together[name] == pytest.approx(alone.accuracy, abs=1e-4)


def test_runs_that_are_finished_are_not_run_again(
    heads: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, asked = random_maps(heads), []
    variants = {name: replace(each, recipe=replace(each.recipe, epochs=1)) for name, each in heads.HEADS.items()}

    def features(task: Any, trial: int) -> Any:
        asked.append((task.name, trial))
        return dataset

    tasks = heads.REPORTED[:2]
    heads.Study(features, tmp_path / "runs.json").run(tasks, (5, 10), 2, variants)
    first = json.loads((tmp_path / "runs.json").read_text())
    assert {len(trials) for task in first.values() for count in task.values() for trials in count.values()} == {2}
    asked.clear()
    again = heads.Study(features, tmp_path / "runs.json")
    again.run(tasks, (5, 10), 3, variants)
    assert asked == [(task.name, 2) for task in tasks]
    assert again.accuracies[tasks[0].name]["5"]["routed"][:2] == first[tasks[0].name]["5"]["routed"]
    assert "trial 3 of 3" in capsys.readouterr().out


def accuracies(lead: float, spread: float, trials: int = 24) -> dict[str, Any]:
    """Five heads on four tasks with 5 and 50 labels; the routed head is ahead by so many points, give or take."""
    base = [70.0 + trial for trial in range(trials)]
    made: dict[str, Any] = {}
    for i in (1, 2, 3, 4):
        ours = [value + lead + spread * (-1) ** (trial // i) for trial, value in enumerate(base)]
        found = {"mean": base, "max": base, "conv": base, "attention": base, "routed": ours}
        made[f"dog or bird, 1 of {i**2}"] = {"5": found, "50": found}
    return made


@pytest.mark.parametrize(
    ("lead", "spread", "verdict"),
    [
        (8.0, 2.0, "fewer labels"),
        (-8.0, 2.0, "more labels"),
        (0.5, 2.0, "level"),
        (0.0, 0.0, "level"),
        (4.0, 12.0, "undecided"),
        (3.0, 6.0, "undecided"),  # significant by itself, and not after the correction
    ],
)
def test_verdicts_follow_the_rule(rule: ModuleType, lead: float, spread: float, verdict: str) -> None:
    found = accuracies(lead, spread)
    made = rule.verdicts(found, {task: 1 / i**2 for i, task in enumerate(found, start=1)})
    assert {row["verdict"] for row in (*made["leads"], *made["few"])} == {verdict}
    assert len(made["leads"]) == 16
    assert made["leads"][0]["lead"] == pytest.approx(lead)


def test_the_slope_tells_whether_a_lead_grows(rule: ModuleType) -> None:
    found = accuracies(0.0, 1.0)
    shares = {task: 1 / i**2 for i, task in enumerate(found, start=1)}
    for i, task in enumerate(found, start=1):
        more = 10 * np.log2(i)  # five points with every halving
        found[task] = {
            count: {**each, "routed": [value + more for value in each["routed"]]} for count, each in found[task].items()
        }
    assert [row["grows"] for row in rule.verdicts(found, shares)["slopes"]] == ["yes"] * 4
    assert rule.verdicts(found, shares)["slopes"][0]["lead"] == pytest.approx(5)
    assert [row["grows"] for row in rule.verdicts(accuracies(3.0, 1.0), shares)["slopes"]] == ["undecided"] * 4


def test_holm_corrects_for_the_number_of_comparisons(rule: ModuleType) -> None:
    assert rule.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert rule.holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_committed_verdicts_are_those_of_the_committed_accuracies(heads: ModuleType, rule: ModuleType) -> None:
    content = json.loads(RESULTS.read_text("utf-8"))
    made = json.loads(heads.compact(rule.verdicts(content["accuracies"], content["shares"])))
    for name in ("leads", "few", "slopes"):
        assert len(content[name]) == len(made[name])
        for row, again in zip(content[name], made[name], strict=True):
            assert {key: row.get(key) for key in WORDS} == {key: again.get(key) for key in WORDS}
            assert [row[key] for key in NUMBERS] == pytest.approx([again[key] for key in NUMBERS])
