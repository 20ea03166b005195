"""Cells of two-layer networks: what they measure, and when their numbers are others than before."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic import keyed_random
from moesaic.papers.chowdhury2023 import experiments_two_layer as chowdhury2023_cells
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches
from moesaic.papers.chowdhury2023.data.synthetic_patterns import PatternPatches
from moesaic.papers.chowdhury2023.experiments_two_layer import ENGINE, Result, TwoLayerCell, digit_source
from moesaic.papers.chowdhury2023.theory.activation_patterns import coupling
from moesaic.papers.chowdhury2023.theory.proper_routing import discriminative_ranks
from moesaic.papers.chowdhury2023.trial_training import Schedule, accuracy, train_trials
from moesaic.papers.chowdhury2023.two_layer_networks import Networks, TwoLayer
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache

PATTERNS = PatternPatches(patches=6, dim=16, delta_d=0.3, delta_r=0.4, pattern_sets=3, close=2)
MODELS = {
    "cnn": TwoLayer.cnn("print", neurons=6),
    "separate": TwoLayer.separate("print", neurons=3),
    "joint": TwoLayer.joint("print", experts=3, patches_per_expert=2, neurons=4),
    "best": TwoLayer.best(2, experts=3),
}
each_model = pytest.mark.parametrize("kind", MODELS)


def cell_of(kind: str, **changes: object) -> TwoLayerCell:
    schedule = Schedule(epochs=6, batch=10, learning_rate=0.5)
    return replace(TwoLayerCell(MODELS[kind], schedule, 40, 3, PATTERNS, 100), **changes)


def runner_in(folder: Path, seed: int = 0) -> Runner:
    return Runner(ResultCache(folder), None, device="cpu", seed=seed, progress=NoProgress())


def measured(folder: Path, cell: TwoLayerCell) -> Result:
    return runner_in(folder).run({"a": cell})["a"].result


@each_model
def test_a_cell_measures_what_its_networks_do_on_test_samples(tmp_path: Path, kind: str):
    cell = cell_of(kind)
    found = measured(tmp_path, cell)
    trained = train_trials(cell.model, PATTERNS, trials=range(3), samples=40, schedule=cell.schedule)
    test = PATTERNS.draw(keyed_random.keys(0, range(3)), 100, "test")
    assert found.accuracy.tolist() == pytest.approx((100 * accuracy(trained.networks, test)).tolist())
    assert found.epochs.tolist() == [6, 6, 6]
    assert found.errors.tolist() == trained.errors.tolist()
    if kind == "cnn":
        assert not found.routed.size
        assert not found.largest_gate.size
        return
    ranks = discriminative_ranks(trained.networks.scores(test.pool, test.index), test.discriminative)
    for t in range(3):
        for s in range(2):
            mine = ranks[t, test.labels[t] == s].double()  # (samples, experts)
            if kind == "separate":
                shares = [(mine[:, s] < l).double().mean().item() for l in range(1, 7)]
                assert found.routed[t, s].tolist() == pytest.approx(shares)
            else:
                assert found.largest_gate[t, s] == pytest.approx((mine == 0).double().mean(0).max().item())


@each_model
def test_a_cell_follows_activation_patterns_after_every_epoch(tmp_path: Path, kind: str):
    cell = cell_of(kind, follow_patterns=True)
    found = measured(tmp_path, cell).kept_patterns
    assert found.shape == (3, 7)
    assert (found[:, 0] == 1).all(), "nothing has moved yet"
    assert (found[:, -1] < 1).all(), "at this rate neurons do switch"
    keys = keyed_random.keys(0, range(3))
    probe = PATTERNS.draw(keys, 50, "test")
    ends: list[torch.Tensor] = []

    def keep(epoch: int, networks: Networks, which: torch.Tensor) -> None:
        if epoch in (0, 6):
            ends.append(networks.neuron_responses(probe.pool, probe.index))

    train_trials(cell.model, PATTERNS, trials=range(3), samples=40, schedule=cell.schedule, chunk=3, callback=keep)
    share = coupling(ends[1], ends[0]).mean.mean(-1)
    assert found[:, -1].tolist() == pytest.approx(share.tolist())


def test_patterns_are_not_followed_in_trials_that_stop_on_their_own():
    with pytest.raises(ValueError, match="use a schedule with stop_at_zero_error=False"):
        cell_of("cnn", schedule=Schedule(stop_at_zero_error=True), follow_patterns=True)


@pytest.mark.parametrize(
    "change",
    [
        {"model": TwoLayer.cnn("print", neurons=7)},
        {"model": replace(MODELS["cnn"], train_output=True)},
        {"schedule": Schedule(epochs=6, batch=10, learning_rate=0.6)},
        {"samples": 42},
        {"trials": 4},
        {"test_samples": 102},
        {"patterns": replace(PATTERNS, seed=1)},
        {"patterns": None},
        {"follow_patterns": True},
    ],
    ids=str,
)
def test_other_work_is_another_cell(tmp_path: Path, change: dict[str, object]):
    runner_in(tmp_path).run({"a": cell_of("cnn")})
    runner_in(tmp_path).run({"a": cell_of("cnn", **change)})
    assert len(list(tmp_path.iterdir())) == 2


def test_another_engine_makes_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner_in(tmp_path).run({"a": cell_of("cnn")})
    monkeypatch.setattr(chowdhury2023_cells, "ENGINE", ENGINE + 1)
    runner_in(tmp_path).run({"a": cell_of("cnn")})
    assert len(list(tmp_path.iterdir())) == 2


def test_another_seed_and_other_digits_are_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digits = cell_of("cnn", patterns=None)
    runner_in(tmp_path).run({"a": digits})
    runner_in(tmp_path, seed=1).run({"a": digits})
    monkeypatch.setattr(chowdhury2023_cells, "digit_source", lambda runner: DigitPatches(patches=4))
    runner_in(tmp_path).run({"a": digits})
    assert len(list(tmp_path.iterdir())) == 3


# Of three trials on digits: by how much their kernels move (squared), and their accuracy on 50 test samples.
KNOWN = {
    "cnn": ([1.8842, 1.0023, 11.312], [52, 46, 58]),
    "separate": ([3.929, 4.5007, 21.673], [72, 62, 64]),
    "joint": ([19.765, 6.6624, 7.327], [56, 50, 72]),
    "best": ([0.62728, 0.79405, 0.60925], [78, 58, 66]),
}


@each_model
def test_what_changes_the_numbers_of_trials_must_raise_the_engine(tmp_path: Path, kind: str):
    """Cells on disk count as done while ENGINE is the same: who has to change these numbers raises it."""
    assert ENGINE == 2
    distances, accuracies = KNOWN[kind]
    cell = cell_of(kind, patterns=None, test_samples=50)
    trained = train_trials(cell.model, DigitPatches(), trials=range(3), samples=40, schedule=cell.schedule)
    start = Networks.initial(cell.model, trained.keys, patches=16, dim=784, classes=2)
    moved = (trained.networks.kernels - start.kernels).double().square().sum((1, 2, 3))
    assert moved.tolist() == pytest.approx(distances, rel=1e-3)  # processors round differently
    assert measured(tmp_path, cell).accuracy.tolist() == pytest.approx(accuracies, abs=2.01)


def test_digits_are_those_of_the_data_folder_where_it_has_any(tmp_path: Path):
    def digits(data_dir: Path | None) -> Path | None:
        runner = Runner(ResultCache(tmp_path / "cells"), data_dir, device="cpu", seed=0, progress=NoProgress())
        return digit_source(runner).data_dir

    assert digits(None) is None
    assert digits(tmp_path) is None  # a folder with other data
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    with pytest.raises(FileNotFoundError, match="MNIST's train digits are not in data_dir"):
        digits(tmp_path)
