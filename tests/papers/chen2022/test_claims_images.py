"""The image experiments: a cell on small made-up files, and the rules at their limits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import CIFAR10_NAMES, write_cifar10

from moesaic.data.cifar10 import CIFAR10_CLASSES
from moesaic.insight.metrics import entropy_of_counts
from moesaic.papers.chen2022.claims_images import CHECKS
from moesaic.papers.chen2022.experiments_images import (
    CAR,
    CIFAR10_DIGEST,
    FROG,
    SHIP,
    Embedding,
    ImageCell,
    ImageResult,
    plan,
)
from moesaic.papers.chen2022.figures_images import charts
from moesaic.papers.chen2022.image_training import ImageSchedule
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache

SMALL = ImageCell(
    "rotate", "cnn", True, ImageSchedule(2, 0.01, batch=16), trial=0, embedding=True, images_per_file=20, on_cpu=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar10(tmp_path_factory.mktemp("data"))


def runner(out: Path, folder: Path | None, device: str = "cpu", seed: int = 0) -> Runner:
    return Runner(ResultCache(out), folder, device=device, seed=seed, progress=NoProgress())


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageResult:
    return runner(tmp_path_factory.mktemp("cells"), folder).run({"images": SMALL})["images"].result


def test_a_cell_counts_every_test_image_once(measured):
    assert measured.tested == 40
    assert measured.dispatch.shape == (2, 10, 4)
    assert (measured.dispatch.sum(2) == 2).all()  # two of each class, upright and turned
    assert len(measured.accuracies) == len(measured.losses) == len(measured.entropies) == 2
    by_class = torch.from_numpy(measured.dispatch.sum(0))  # (classes, experts), turned or not
    assert measured.entropies[-1] == pytest.approx(entropy_of_counts(by_class), abs=1e-5)
    assert measured.accuracy == measured.accuracies[-1]


def test_the_embedding_is_of_turned_images_and_tells_their_experts(measured):
    shown = measured.embedding
    assert shown is not None
    assert sorted(shown.clusters) == sorted(list(range(10)) * 2)
    assert np.abs(shown.points).max() == 999
    for expert in range(4):
        of_expert = np.bincount(shown.clusters[shown.experts == expert], minlength=10)
        assert of_expert.tolist() == measured.dispatch[1, :, expert].tolist()


def test_a_mixture_on_cifar_itself_shows_cars(folder, tmp_path):
    found = runner(tmp_path, folder).run({"": replace(SMALL, task="cifar10")})[""].result
    assert found.dispatch.shape == (1, 10, 4)
    assert found.embedding is not None
    assert found.embedding.clusters.tolist() == [CAR] * 2


def test_sharp_test_images_change_what_is_tested_and_not_what_is_learnt(folder, tmp_path, measured):
    sharp = runner(tmp_path, folder).run({"": replace(SMALL, task="rotate-sharp")})[""].result
    assert sharp.losses.tolist() == measured.losses.tolist()
    assert sharp.dispatch.shape == (2, 10, 4)
    assert sharp.embedding is not None
    assert measured.embedding is not None
    assert not np.array_equal(sharp.embedding.points, measured.embedding.points)


def test_a_single_network_has_no_dispatch(folder, tmp_path):
    found = runner(tmp_path, folder).run({"": replace(SMALL, mixture=False)})[""].result
    assert found.dispatch.size == found.entropies.size == 0
    assert found.embedding is None


def test_the_same_seed_gives_the_same_numbers_and_another_trial_others(folder, tmp_path, measured):
    again = runner(tmp_path / "again", folder).run({"": SMALL})[""].result
    other = runner(tmp_path / "other", folder).run({"": replace(SMALL, trial=1)})[""].result
    assert again.losses.tolist() == measured.losses.tolist()
    np.testing.assert_array_equal(again.dispatch, measured.dispatch)
    assert other.losses.tolist() != measured.losses.tolist()


def test_what_is_measured_and_its_specification_are_plain_json(folder, tmp_path):
    here = runner(tmp_path, folder)
    json.dumps([SMALL.measure(here), SMALL.spec(here)], allow_nan=False)


def test_a_truncated_file_stops_the_cell_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(bytes(100))
    for name in CIFAR10_NAMES[:-1]:
        (tmp_path / name).write_bytes(bytes(20 * 3073))
    with pytest.raises(ValueError, match=r"test_batch\.bin: has 100 bytes, expected 20 images"):
        runner(tmp_path / "cells", tmp_path).run({"": SMALL})
    assert not list(tmp_path.glob("cells/*"))


def test_obstacles_are_the_images_and_then_the_gpu(folder, tmp_path):
    for without in (None, tmp_path):
        assert SMALL.missing_requirement(runner(tmp_path, without)) == "needs CIFAR-10's binary files under --data-dir"
    assert SMALL.missing_requirement(runner(tmp_path, folder)) is None
    whole = replace(SMALL, on_cpu=False)
    assert whole.missing_requirement(runner(tmp_path, folder)) == "needs a GPU (--device cuda)"
    assert whole.missing_requirement(runner(tmp_path, folder, device="cuda:0")) is None


def test_cells_of_cifar_itself_are_found_without_its_images(folder, tmp_path):
    assert SMALL.spec(runner(tmp_path, None))["data"] == CIFAR10_DIGEST
    assert SMALL.spec(runner(tmp_path, folder))["data"] != CIFAR10_DIGEST


def test_steps_are_the_epochs_that_progress_counts(folder, tmp_path):
    class Counting(NoProgress):
        done = 0

        def advance(self, amount: int, note: str = "") -> None:
            self.done += amount

    here = runner(tmp_path, folder)
    here.progress = Counting()
    SMALL.measure(here)
    assert here.progress.done == SMALL.steps == 2


# The plan


def test_only_the_full_plan_as_printed_has_cells():
    assert plan("quick", "print") == plan("short", "released") == plan("short", "best") == {}
    cells = plan("short", "print")
    for task in ("rotate", "rotate-sharp", "cifar10"):
        for network, least in (("cnn", 3), ("resnet18", 1), ("mobilenetv2", 0 if task == "rotate-sharp" else 1)):
            pair = [[n for n in cells if n.startswith(f"images/{task}/{network}/{kind}/")] for kind in KINDS]
            assert len(pair[0]) == len(pair[1]) >= least


def test_single_and_mixture_of_a_trial_train_equally():
    cells = plan("short", "print")
    for name, cell in cells.items():
        other = cells[name.replace("single", "mixture")]
        assert isinstance(cell, ImageCell)
        assert other == replace(cell, mixture=True, embedding=other.embedding)
    rates = {(cell.task, cell.network): cell.schedule.learning_rate for cell in cells.values()}
    assert {rate for (task, _), rate in rates.items() if task != "cifar10"} == {0.01}
    assert rates["cifar10", "cnn"] == 0.01
    assert rates["cifar10", "resnet18"] == rates["cifar10", "mobilenetv2"] == 0.1


def test_sharp_test_images_are_all_that_differs_from_blurred_ones():
    cells = plan("short", "print")
    sharp = {name: cell for name, cell in cells.items() if cell.task == "rotate-sharp"}
    assert sharp
    for name, cell in sharp.items():
        assert cells[name.replace("rotate-sharp", "rotate")] == replace(cell, task="rotate")


def test_every_claim_has_its_cells_in_the_plan_and_says_how_runs_were_shortened():
    cells = plan("short", "print")
    published = {test.claim.id: test.claim.published for test in CHECKS}
    assert len(published) == len(CHECKS)
    assert published == {
        "table2-rotate-cnn": 2.82,
        "table2-rotate-mobilenetv2": 4.09,
        "table2-rotate-resnet18": 4.37,
        "table2-sharp-cnn": 2.82,
        "table2-sharp-resnet18": 4.37,
        "table2-why-low": None,
        "table2-cifar10-cnn": -0.37,
        "table2-cifar10-mobilenetv2": -0.22,
        "table2-cifar10-resnet18": -0.19,
        "fig7-entropy": "clear clusters",
        "fig7-frog-ship": "most; in different clusters",
    }
    for test in CHECKS:
        assert test.can_run(cells)
        assert "where the paper has ten" in test.claim.rule
        assert "epochs" in test.claim.rule
        assert test.fidelities == ("print",)


# The rules

KINDS = ("single", "mixture")
EVEN = np.full((2, 10, 4), 250.0)


def run(accuracy: float = 80.0, dispatch: np.ndarray = EVEN, embedding: Embedding | None = None) -> ImageResult:
    curve = np.array([50.0, accuracy])
    return ImageResult(accuracy, 20_000, curve, np.array([1.0, 0.5]), dispatch, np.array([2.3, 2.2]), embedding)


def experiment(**lines: list[ImageResult]) -> ExperimentResults[ImageResult]:
    """Runs by lines such as rotate_cnn_single, one for each trial."""
    named = {f"images/{line.replace('_', '/')}/{i}": r for line, runs in lines.items() for i, r in enumerate(runs)}
    return ExperimentResults(dict.fromkeys(named, SMALL), named, None)  # pyright: ignore[reportArgumentType]


def both(one: ExperimentResults[ImageResult], other: ExperimentResults[ImageResult]) -> ExperimentResults[ImageResult]:
    return ExperimentResults({**one.plan, **other.plan}, {**one.results, **other.results}, one.runner)


def evaluate(claim: str, results: ExperimentResults[ImageResult]) -> CheckResult:
    (test,) = (test for test in CHECKS if test.claim.id == claim)
    return test.evaluate(results)


def leads(task: str, network: str, *points: float) -> ExperimentResults[ImageResult]:
    return experiment(
        **{f"{task}_{network}_single": [run(80.0)] * len(points)},
        **{f"{task}_{network}_mixture": [run(80.0 + lead) for lead in points]},
    )


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ((2.0, 2.5, 3.0, 2.2, 2.8), "holds"),
        ((-2.0, -2.5, -3.0, -2.2, -2.8), "fails"),
        ((-2.0, 2.5, 3.0, -1.0, 0.8), "undecided"),
    ],
)
@pytest.mark.parametrize(("claim", "task"), [("table2-rotate-cnn", "rotate"), ("table2-sharp-cnn", "rotate-sharp")])
def test_a_mixture_is_ahead_where_the_interval_over_trials_is_above_0(claim, task, points, verdict):
    other = leads("rotate" if task == "rotate-sharp" else "rotate-sharp", "cnn", *[0.0] * len(points))
    found = evaluate(claim, both(leads(task, "cnn", *points), other))
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(np.mean(points))


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [
        ((12.0, 12.5, 13.0), "holds"),
        ((9.0, 10.0, 13.0), "undecided"),
        ((7.0, 7.5, 8.0), "fails"),
        ((-12.0, -13.0), "fails"),
    ],
)
def test_sharp_test_images_explain_low_accuracies_if_they_cost_ten_points(lost, verdict):
    blurred = experiment(rotate_cnn_single=[run(90.0)] * len(lost))
    sharp = experiment(**{"rotate-sharp_cnn_single": [run(90.0 - points) for points in lost]})
    found = evaluate("table2-why-low", both(blurred, sharp))
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(np.mean(lost))


@pytest.mark.parametrize(
    ("lead", "verdict"), [(1.0, "holds"), (0.5, "undecided"), (-0.5, "undecided"), (-1.0, "fails")]
)
def test_one_trial_has_the_interval_of_its_test_images(lead, verdict):
    found = evaluate("table2-rotate-mobilenetv2", leads("rotate", "mobilenetv2", lead))
    assert found.verdict.startswith(verdict)
    assert found.interval is not None
    low, high = found.interval
    variance = (80 * 20 + (80 + lead) * (20 - lead)) / 20_000
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(variance))


def test_two_trials_on_the_same_images_are_known_no_better_than_one():
    one = evaluate("table2-rotate-resnet18", leads("rotate", "resnet18", 1.0)).interval
    two = evaluate("table2-rotate-resnet18", leads("rotate", "resnet18", 1.0, 1.0)).interval
    assert one == pytest.approx(two)
    assert evaluate("table2-rotate-resnet18", leads("rotate", "resnet18", 1.0, 1.0, 1.0)).interval == (1, 1)


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ((0.2, -0.1, 0.3, 0.1, 0.0), "holds"),
        ((2.0, 2.1, 1.9, 2.2, 2.0), "fails: the mixture is ahead"),
        ((-2.0, -2.1, -1.9, -2.2, -2.0), "fails: the mixture is behind"),
        ((1.0, 0.8, 1.1, 0.9, 1.2), "undecided"),
        ((-1.0, -0.8, -1.1, -0.9, -1.2), "undecided"),
        ((1.0, 1.0, 1.0), "holds"),
        ((-1.0, -1.0, -1.0), "holds"),
        ((1.125, 1.125, 1.125), "fails: the mixture is ahead"),
        ((-1.125, -1.125, -1.125), "fails: the mixture is behind"),
    ],
)
def test_level_is_within_a_point(points, verdict):
    assert evaluate("table2-cifar10-cnn", leads("cifar10", "cnn", *points)).verdict.startswith(verdict)


def dispatch(frogs: tuple[float, ...], ships: tuple[float, ...]) -> np.ndarray:
    table = EVEN.copy()
    table[1, FROG], table[1, SHIP] = frogs, ships
    return table


def test_a_dispatch_blind_to_the_class_is_no_cluster():
    found = evaluate("fig7-entropy", experiment(rotate_resnet18_mixture=[run()]))
    assert found.verdict == "fails"
    assert found.measured == pytest.approx(math.log(10))


def test_classes_that_stay_together_are_clusters():
    sorted_by_class = np.zeros((2, 10, 4))
    for k in range(10):
        sorted_by_class[:, k, k % 4] = 1000.0
    found = evaluate("fig7-entropy", experiment(rotate_resnet18_mixture=[run(dispatch=sorted_by_class)] * 2))
    assert found.verdict == "holds"
    assert found.measured == pytest.approx(0.6 * math.log(3) + 0.4 * math.log(2))


def test_the_interval_of_an_entropy_covers_what_sampling_does_to_it():
    share = np.random.default_rng(0).dirichlet(np.ones(40))
    found = evaluate("fig7-entropy", experiment(rotate_resnet18_mixture=[run(dispatch=2000 * share.reshape(1, 10, 4))]))
    drawn = np.random.default_rng(1).multinomial(2000, share, size=200).reshape(200, 1, 10, 4).astype(float)
    values = [evaluate("fig7-entropy", experiment(rotate_resnet18_mixture=[run(dispatch=d)])).measured for d in drawn]
    assert found.interval is not None
    low, high = found.interval
    assert (high - low) / 2 == pytest.approx(1.96 * float(np.std(values)), rel=0.2)


@pytest.mark.parametrize(
    ("frogs", "ships", "verdict"),
    [
        ((900, 50, 30, 20), (100, 700, 100, 100), "holds"),
        ((900, 50, 30, 20), (700, 100, 100, 100), "fails: most frogs and most ships go to the same expert"),
        ((900, 50, 30, 20), (300, 400, 200, 100), "fails"),
        ((900, 50, 30, 20), (200, 500, 200, 100), "undecided"),
    ],
)
def test_frogs_and_ships_must_be_many_and_apart(frogs, ships, verdict):
    found = evaluate("fig7-frog-ship", experiment(rotate_resnet18_mixture=[run(dispatch=dispatch(frogs, ships))]))
    assert found.verdict.startswith(verdict)


def test_the_class_with_the_smaller_share_counts_with_its_own_sampling():
    spread = dispatch((450, 25, 15, 10), (100, 700, 100, 100))
    found = evaluate("fig7-frog-ship", experiment(rotate_resnet18_mixture=[run(dispatch=spread)]))
    assert found.measured == pytest.approx(70)
    assert found.interval is not None
    assert found.interval[1] - 70 == pytest.approx(1.96 * math.sqrt(70 * 30 / 500))  # of the fewer images, 500


def test_frogs_and_ships_apart_in_one_trial_of_two_is_partly():
    apart, together = dispatch((900, 50, 30, 20), (20, 900, 50, 30)), dispatch((900, 50, 30, 20), (900, 50, 30, 20))
    found = evaluate(
        "fig7-frog-ship", experiment(rotate_resnet18_mixture=[run(dispatch=apart), run(dispatch=together)])
    )
    assert found.verdict == "partly: not in every trial"


def test_frogs_and_ships_apart_in_one_trial_but_few_in_both_is_failed():
    apart, together = (
        dispatch((300, 400, 200, 100), (400, 300, 200, 100)),
        dispatch((300, 400, 200, 100), (300, 400, 200, 100)),
    )
    found = evaluate(
        "fig7-frog-ship", experiment(rotate_resnet18_mixture=[run(dispatch=apart), run(dispatch=together)])
    )
    assert found.interval is not None
    assert found.interval[1] < 50
    assert found.verdict == "fails"


# The charts


def test_charts_show_curves_points_and_counts():
    rng = np.random.default_rng(0)
    clusters = np.repeat([0, FROG, SHIP], 20)
    shown = Embedding(rng.normal(size=(60, 30)) + 9 * (clusters == FROG)[:, None], clusters, clusters % 4)
    found = charts(
        {
            "print": experiment(
                rotate_resnet18_single=[run(81.0)],
                rotate_resnet18_mixture=[run(80.0, dispatch((9, 0, 0, 0), (0, 9, 0, 0)), shown), run(84.0)],
            )
        }
    )
    assert [(chart.paper, chart.where) for chart in found] == [("chen2022", "Table 2"), ("chen2022", "Figure 7")]
    (accuracy,) = found[0].panels
    assert [series.y[-1] for series in accuracy.series] == [81.0, 82.0]
    assert [series.x for series in accuracy.series] == [(1.0, 2.0)] * 2
    assert accuracy.series[0].spread is None  # one trial
    assert accuracy.series[1].spread == pytest.approx((0, 8**0.5))
    assert (found[0].columns, found[1].columns) == (None, 2)
    turned, two, table = found[1].panels
    assert turned.points is not None
    assert two.points is not None
    assert sum(len(group.x) for group in turned.points.groups) == 60
    assert {(group.label, len(group.x)) for group in two.points.groups} == {("frog", 20), ("ship", 20)}
    assert table.counts is not None
    assert [(group.label, group.role) for group in turned.points.groups] == [
        ("expert 1", "expert-1"),
        ("expert 3", "expert-3"),
    ]
    assert table.counts.rows == CIFAR10_CLASSES
    assert table.counts.columns == ("expert 1", "expert 2", "expert 3", "expert 4")
    assert table.counts.values[FROG] == (9, 0, 0, 0)


def test_without_results_there_are_no_charts():
    assert charts({}) == charts({"print": experiment()}) == []
