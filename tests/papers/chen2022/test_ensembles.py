"""Ensembles of single networks: members share their samples, outputs are averaged, and the rules."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic import keyed_random
from moesaic.papers.chen2022.claims_theory import CHECKS
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches
from moesaic.papers.chen2022.experiments_ensembles import EnsembleCell, plan
from moesaic.papers.chen2022.trial_training import MixtureSchedule, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import Mixture
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache

SMALL = EnsembleCell(
    Mixture.single("print", "cubic", filters=6),
    MixtureSchedule(30, 0.01, optimizer="adam"),
    7,
    trials=2,
    samples=40,
    test_samples=300,
    members=4,
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(ResultCache(tmp_path_factory.mktemp("cells")), None, device="cpu", seed=3, progress=NoProgress())


@pytest.fixture(scope="module")
def measured(runner: Runner) -> dict[str, list[list[float]]]:
    return SMALL.measure(runner)


def test_an_ensemble_is_the_mean_of_networks_trained_on_the_samples_of_its_first(measured):
    source = ClusterPatches.setting(7)
    for trial in range(2):
        own = keyed_random.keys(3, [4 * trial])

        class Fixed:
            """The samples of one network for every network."""

            dim = source.dim

            def draw(self, keys, samples, split, own=own):
                return source.draw(own.repeat(len(keys)), samples, split)

        trained = train_mixtures(
            SMALL.model,
            Fixed(),  # pyright: ignore[reportArgumentType]
            trials=range(4 * trial, 4 * trial + 4),
            samples=40,
            schedule=SMALL.schedule,
            seed=3,
        )
        test = source.draw(own, 300, "test")
        pre = torch.einsum("bpd,mjd->mbpj", test.patches[0].double(), trained.mixtures.weights[:, 0].double())
        outputs = pre.pow(3).sum((2, 3))
        right = (2 * test.labels[0] - 1) * outputs > 0
        assert measured["single_accuracy"][trial] == pytest.approx(100 * right.double().mean(1).numpy())
        for place, size in enumerate(measured["members"]):
            of_mean = (2 * test.labels[0] - 1) * outputs[:size].sum(0) > 0
            assert measured["ensemble_accuracy"][trial][place] == pytest.approx(100 * of_mean.double().mean().item())
    assert len(set(measured["single_accuracy"][0])) > 1


def test_an_ensemble_of_one_is_its_network(measured):
    assert measured["members"] == [1, 2, 4]
    assert [each[0] for each in measured["ensemble_accuracy"]] == [each[0] for each in measured["single_accuracy"]]


def test_the_seed_decides_and_the_specification_is_plain_json(runner, measured, tmp_path: Path):
    json.dumps([measured, SMALL.spec(runner)], allow_nan=False)
    assert SMALL.measure(runner) == measured
    other = Runner(ResultCache(tmp_path), None, device="cpu", seed=4, progress=NoProgress())
    assert SMALL.measure(other) != measured
    assert SMALL.spec(other) != SMALL.spec(runner)


def test_progress_counts_the_steps_of_all_networks(runner, tmp_path: Path):
    class Counting(NoProgress):
        done = 0

        def advance(self, amount: int, note: str = "") -> None:
            self.done += amount

    counting = Counting()
    SMALL.measure(Runner(ResultCache(tmp_path), None, device="cpu", seed=3, progress=counting))
    assert counting.done == SMALL.steps == 2 * 4 * 30


def test_cells_are_planned_as_printed_only():
    assert plan("short", "released") == plan("short", "best") == {}
    assert set(plan("short", "print")) == {"ensemble/identity", "ensemble/cubic", "ensemble/celu"}
    assert set(plan("quick", "print")) == {"ensemble/cubic"}
    for cell in plan("full", "print").values():
        assert isinstance(cell, EnsembleCell)
        assert (cell.trials, cell.samples, cell.members, cell.setting) == (10, 16_000, 8, 7)


def result(accuracy: float, gain: float = 0.0, spread: float = 0.2) -> CellArrays:
    noise = spread * np.array([-1.0, 0.0, 1.0])
    means = np.stack([accuracy + noise + step * gain / 3 for step in range(4)], axis=1)
    return {
        "members": np.array([1.0, 2.0, 4.0, 8.0]),
        "single_accuracy": np.repeat(accuracy + noise[:, None], 8, axis=1),
        "ensemble_accuracy": means,
    }


def evaluate(id: str, **results: CellArrays) -> CheckResult:
    (check,) = (check for check in CHECKS if check.claim.id == id)
    named = {f"ensemble/{activation}": each for activation, each in results.items()}
    return check.evaluate(ExperimentResults({}, named, None))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("accuracy", "gain", "verdict"), [(75.0, 0.0, "holds"), (80.0, 12.0, "fails"), (87.4, 0.0, "undecided")]
)
def test_the_best_ensemble_of_all_activations_is_bound(accuracy, gain, verdict):
    found = evaluate("theorem4.1-ensemble", cubic=result(70.0), celu=result(accuracy, gain))
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(accuracy + gain)


def test_a_single_network_is_no_ensemble():
    worse = evaluate("theorem4.1-ensemble", cubic=result(90.0, gain=-9.0, spread=0.01))
    assert worse.measured == pytest.approx(87.0)
    assert worse.verdict == "holds"


@pytest.mark.parametrize(("gain", "verdict"), [(0.5, "holds"), (3.0, "fails"), (-2.0, "holds")])
def test_gains_are_those_of_the_activation_that_gains_most(gain, verdict):
    found = evaluate("theorem4.1-ensemble-gain", cubic=result(70.0, -5.0), celu=result(72.0, gain))
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(gain)
