"""Cells that train on CIFAR-10: tiny runs on made-up files."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cifar_files import IMAGES, write_cifar10

from moesaic.data import builtin_datasets, load
from moesaic.data.image_dataset import ImageDataset
from moesaic.layers import TokenMoE
from moesaic.papers.engine.runner import Runner
from moesaic.papers.token_routing import continued_training
from moesaic.papers.token_routing.continued_training import Branch, TokenCell, check_data, converted, network
from moesaic.papers.token_routing.experiments import SPLIT, UPCYCLE_RESNET, UPCYCLE_VIT
from moesaic.papers.token_routing.vit_recipe import AUGMENT, FINE_TUNING_LR, vit_recipe
from moesaic.training import NoProgress, ResultCache

PAGE = Path(__file__).parents[3] / "docs" / "tokens.md"
BRANCHES = (
    Branch("tuned", vit_recipe(1, FINE_TUNING_LR)),
    Branch("split", vit_recipe(1, FINE_TUNING_LR), SPLIT, images=8),
)
CELL = TokenCell("vit_tiny_patch4_32", 0, vit_recipe(2), (("depth", 1),), samples=20, branches=BRANCHES, on_cpu=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred images to train on and twenty to test on."""
    return write_cifar10(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    known = builtin_datasets.DATASETS
    short = replace(known["cifar10"], load=partial(builtin_datasets.cifar10, images_per_file=IMAGES))
    monkeypatch.setattr(load, "DATASETS", {**known, "cifar10": short})
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    continued_training._loaded.cache_clear()


def runner(out: Path, folder: Path | None, device: str = "cpu", seed: int = 0) -> Runner:
    return Runner(ResultCache(out), folder, device=device, seed=seed, progress=NoProgress())


def test_a_network_is_trained_and_its_branches_start_from_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    starts: list[tuple[str, torch.Tensor]] = []
    ends: list[torch.Tensor] = []
    real = continued_training.fit

    def watch(model: torch.nn.Module, *more: object, **named: object):
        starts.append((type(model.blocks[0].mlp).__name__, model.head.weight.detach().clone()))
        found = real(model, *more, **named)
        ends.append(model.head.weight.detach().clone())
        return found

    monkeypatch.setattr(continued_training, "fit", watch)
    found = runner(tmp_path, folder).run({"": CELL})[""].result
    assert [kind for kind, _ in starts] == ["Mlp", "Mlp", "TokenMoE"]
    assert not torch.equal(starts[0][1], ends[0])
    assert all(torch.equal(weight, ends[0]) for _, weight in starts[1:])
    assert (found.base.images, found.branches["split"].images) == (40, 20)
    assert found.branches["tuned"].macs == found.base.macs
    assert 0.6 < found.branches["split"].macs / found.base.macs < 0.8
    assert found.training_macs("tuned") == 60 * found.base.macs
    assert all(0 <= stage.accuracy <= 100 for stage in (found.base, *found.branches.values()))
    assert CELL.steps == 4


def test_a_cell_repeats_and_its_key_has_everything_it_depends_on(folder: Path, tmp_path: Path):
    here, small = runner(tmp_path, folder), replace(CELL, recipe=vit_recipe(1), branches=())
    first, again = small.measure(here), small.measure(here)
    json.dumps([first, CELL.spec(here)], allow_nan=False)
    first["base"]["seconds"] = again["base"]["seconds"]
    assert first == again
    assert first["base"]["images"] == 20
    others = [
        replace(CELL, trial=1),
        replace(CELL, options=()),
        replace(CELL, recipe=vit_recipe(3)),
        replace(CELL, samples=30),
        replace(CELL, branches=BRANCHES[:1]),
        replace(CELL, branches=(BRANCHES[0], replace(BRANCHES[1], images=9))),
        replace(CELL, branches=(BRANCHES[0], replace(BRANCHES[1], conversion=UPCYCLE_VIT))),
    ]
    specs = [json.dumps(each.spec(here)) for each in (CELL, *others)]
    specs.append(json.dumps(CELL.spec(runner(tmp_path, folder, seed=1))))
    assert len(set(specs)) == len(specs)


def test_a_branch_starts_as_what_it_says():
    dense = network("vit_tiny_patch4_32", (("depth", 2),))
    assert converted(dense, ()) is dense
    upcycled = converted(dense, UPCYCLE_VIT)
    kinds = [type(block.mlp) is TokenMoE for block in upcycled.blocks]
    assert kinds == [False, True]
    resnet = converted(network("wrn22_1", ()), UPCYCLE_RESNET)
    weight = resnet.body.group3[0].conv2.experts.weight
    assert weight.shape[0] == 8
    assert torch.equal(weight[0], weight[7])


def test_neurons_are_clustered_by_training_images(folder: Path, monkeypatch: pytest.MonkeyPatch):
    task: ImageDataset = load.load_images("cifar10", data_dir=folder)
    seen: list[torch.Tensor | None] = []
    monkeypatch.setattr(continued_training, "convert", lambda model, layer, *, images, **more: seen.append(images))
    continued_training._start(torch.nn.Identity(), BRANCHES[1], task, 0)
    assert seen[0] is not None
    assert torch.equal(seen[0], task.eval_transform(task.train.pixels[:8], torch.empty(0)))


def test_obstacles_are_the_images_and_the_gpu(folder: Path, tmp_path: Path):
    whole = replace(CELL, on_cpu=False)
    images, gpu = "CIFAR-10's binary files under --data-dir", "a GPU (--device cuda)"
    assert whole.missing_requirement(runner(tmp_path, None)) == f"needs {images} and {gpu}"
    assert whole.missing_requirement(runner(tmp_path, tmp_path, "cuda")) == f"needs {images}"
    assert whole.missing_requirement(runner(tmp_path, folder)) == f"needs {gpu}"
    assert whole.missing_requirement(runner(tmp_path, folder, "cuda:0")) is None
    assert CELL.missing_requirement(runner(tmp_path, folder)) is None
    # without files the key is that of the original ones, so that results from elsewhere are found
    assert CELL.spec(runner(tmp_path, None)) != CELL.spec(runner(tmp_path, folder))
    assert CELL.spec(runner(tmp_path, None)) == whole.spec(runner(tmp_path, tmp_path))


def test_damaged_files_are_found_before_anything_runs(folder: Path, tmp_path: Path):
    check_data(None)
    check_data(tmp_path)  # none is no damage
    with pytest.raises(ValueError, match="data_batch_1"):
        check_data(folder)


def test_the_page_has_the_recipe_as_a_command():
    [command] = re.findall(r"^\$ (moesaic train cifar10 .*--augment .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    given = shlex.split(command)
    options = dict(zip(given[3::2], given[4::2], strict=True))
    recipe = vit_recipe(int(options["--epochs"]))
    assert options["--augment"] == AUGMENT
    for flag, value in {
        "--batch-size": recipe.batch_size,
        "--lr": recipe.lr,
        "--warmup-epochs": recipe.epochs / 20,
        "--weight-decay": recipe.weight_decay,
        "--label-smoothing": recipe.label_smoothing,
        "--clip-grad": recipe.clip_grad,
        "--ema-decay": recipe.ema_decay,
    }.items():
        assert float(options[flag]) == value, flag
