"""Snapshots are networks of their epochs, and change nothing in the run."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.fit import fit
from moesaic.training.recipe import Recipe
from moesaic.training.snapshots import SnapshotCallback, find_snapshots, snapshot_epochs

SPEC = ModelSpec("wrn10_1", {"num_classes": 2})


@pytest.fixture(scope="module")
def dataset() -> ImageDataset:
    labels, scale = torch.arange(8) % 2, Normalize((0.5,) * 3, (0.3,) * 3)
    pixels = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = LabelledImages(pixels, labels, labels)
    return ImageDataset(images, images, ("a", "b"), ("a", "b"), scale, scale, normalize=scale)


def network() -> nn.Module:
    torch.manual_seed(0)
    return SPEC.build()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def test_a_snapshot_is_the_network_of_a_shorter_run_and_the_run_stays_the_same(dataset: ImageDataset, tmp_path: Path):
    recipe = Recipe(epochs=3, batch_size=4, lr=0.01, schedule="constant")
    plain, taken = network(), network()
    fit(plain, dataset, recipe)
    fit(taken, dataset, recipe, out=tmp_path / "run", spec=SPEC, callbacks=[SnapshotCallback((1, 2))])
    assert all(map(torch.equal, weights(plain), weights(taken)))
    found = find_snapshots(tmp_path / "run")
    assert [path.name for path in found] == ["epoch-0001.safetensors", "epoch-0002.safetensors"]
    short = network()
    fit(short, dataset, Recipe(epochs=2, batch_size=4, lr=0.01, schedule="constant", warmup_epochs=0.15))
    snapshot = load_checkpoint(found[1])
    assert snapshot.metrics == {"epochs": 2}
    assert all(map(torch.equal, weights(snapshot.model), weights(short)))


def test_a_run_may_be_continued_with_other_snapshots(dataset: ImageDataset, tmp_path: Path):
    class Stop(SnapshotCallback):
        def on_epoch_start(self, trainer) -> None:
            if len(trainer.epochs) == 1:
                raise KeyboardInterrupt

    recipe = Recipe(epochs=2, batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        fit(network(), dataset, recipe, out=tmp_path, spec=SPEC, callbacks=[Stop((1,))])
    assert len(fit(network(), dataset, recipe, out=tmp_path, spec=SPEC).epochs) == 2


@given(st.integers(1, 200), st.integers(1, 20))
def test_epochs_of_snapshots_ascend_and_leave_out_the_last(epochs: int, count: int):
    found = snapshot_epochs(epochs, count)
    assert list(found) == sorted(set(found))
    assert len(found) <= count
    assert all(1 <= epoch < epochs for epoch in found)
    assert len(found) == min(count, epochs - 1)


def test_checkpoints_that_are_not_there_are_refused_if_they_were_named(tmp_path: Path):
    assert find_snapshots(tmp_path) == []
    with pytest.raises(ValueError, match="has no checkpoint; name a safetensors file"):
        find_snapshots(tmp_path, required=True)
    (tmp_path / "b.safetensors").touch()
    (tmp_path / "training.safetensors").touch()
    assert [path.name for path in find_snapshots(tmp_path, required=True)] == ["b.safetensors"]
    assert find_snapshots(tmp_path / "b.safetensors") == [tmp_path / "b.safetensors"]
