"""Ablations of the released code: forms differ in one thing, datasets are shared by their networks, and the rules."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from papers.chen2022.example_results import Array, around, tables

from moesaic import keyed_random
from moesaic.papers.chen2022.claims_print_vs_released import CHECKS
from moesaic.papers.chen2022.claims_synthetic import PUBLISHED
from moesaic.papers.chen2022.experiments_print_vs_released import (
    BALANCE_FORMS,
    FIGURE_1_FORMS,
    GROUP_FORMS,
    PRINTED_START,
    DatasetCell,
    plan,
)
from moesaic.papers.chen2022.experiments_synthetic import ExperimentResults, MixtureCell
from moesaic.papers.chen2022.experiments_synthetic import plan as synthetic_plan
from moesaic.papers.chen2022.trial_training import MixtureSchedule
from moesaic.papers.chen2022.two_layer_networks import Mixture, Mixtures
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache


def leaves(cell: MixtureCell) -> dict[str, object]:
    content = asdict(cell)
    nested = {name: content.pop(name) for name in ("model", "schedule")}
    return content | {f"{name}.{key}": value for name, inner in nested.items() for key, value in inner.items()}


def test_each_form_differs_from_the_released_code_in_one_thing():
    released, cells = synthetic_plan("short", "released"), plan("short", "released")
    changed = {
        "ablated/figure1/gate": {"model.gate": "softmax"},
        "ablated/figure1/loss": {"model.softmax_twice": False},
        "ablated/figure1/steps": {"schedule.steps": 2000, "schedule.stop": "never", "follow": 40},
        **{f"ablated/s{s}/gate": {"model.gate": "softmax"} for s in (1, 3, 4)},
        "ablated/s3/norm": {"schedule.norm": "frobenius"},
        "ablated/start/s3": {"model.init_scale": PRINTED_START},
        **{f"ablated/balance/softmax/s{s}": {"schedule.balance_on": "softmax"} for s in (3, 4)},
        **{f"ablated/balance/coefficient/s{s}": {"schedule.balance": 1e-3} for s in (3, 4)},
    }
    for name, wanted in changed.items():
        own = "figure1/cubic"
        if "figure1" not in name:
            own = (
                f"balanced/identity/{name[-2:]}"
                if "balance" in name
                else "moe/cubic/" + name.replace("start/", "").split("/")[1]
            )
        base, cell = released[own], cells[name]
        assert isinstance(base, MixtureCell)
        assert isinstance(cell, MixtureCell)
        before = leaves(base)
        assert {key: value for key, value in leaves(cell).items() if value != before[key]} == wanted
    assert set(cells) == {*changed, "datasets/balanced/s3", "datasets/balanced/s4"}
    assert {name.split("/")[2] for name in changed} == {*FIGURE_1_FORMS, *BALANCE_FORMS, *GROUP_FORMS, "s3"}


def test_the_printed_start_is_that_of_print_relative_to_the_data():
    model = replace(Mixture.of("released"), init_scale=PRINTED_START, filters=2000)
    weights = Mixtures.initial(model, keyed_random.keys(0, [0]), dim=50).weights
    assert (model.data_scale * weights).std().item() == pytest.approx(0.01, rel=0.01)


def test_ablations_are_of_the_released_code_and_not_quick():
    assert plan("quick", "released") == plan("short", "print") == plan("short", "best") == {}
    assert plan("full", "released") == plan("short", "released")


SMALL = DatasetCell(
    Mixture.of("released", "identity", experts=3, filters=2),
    replace(MixtureSchedule.of("released", balance=True), steps=4),
    3,
    datasets=2,
    starts=3,
    samples=40,
    test_samples=60,
)


def runner(folder, seed: int = 3) -> Runner:
    return Runner(ResultCache(folder), None, device="cpu", seed=seed, progress=NoProgress())


def test_networks_of_a_dataset_share_its_samples_and_start_differently(tmp_path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[tuple[str, Array]] = []
    from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches

    draw = ClusterPatches.draw

    def recorded(self, keys, samples, split):
        data = draw(self, keys, samples, split)
        drawn.extend((split, each.numpy()) for each in data.patches)
        return data

    monkeypatch.setattr(ClusterPatches, "draw", recorded)
    measured = SMALL.measure(runner(tmp_path))
    for split in ("train", "test"):
        several = [patches for name, patches in drawn if name == split]
        assert len(several) == 6
        assert all(np.array_equal(several[0], each) for each in several[:3])
        assert all(np.array_equal(several[3], each) for each in several[3:])
        assert not np.array_equal(several[0], several[3])
    assert np.array(measured["accuracy"]).shape == (2, 3)
    assert len({value for row in measured["accuracy"] for value in row}) > 2
    assert SMALL.steps == 2 * 3 * 4
    json.dumps([measured, SMALL.spec(runner(tmp_path))], allow_nan=False)
    assert SMALL.spec(runner(tmp_path)) != SMALL.spec(runner(tmp_path, 4))


def evaluate(id: str, results: dict[str, dict[str, Array]]) -> CheckResult:
    (check,) = (check for check in CHECKS if check.claim.id == id)
    return check.evaluate(ExperimentResults({}, results, None, fidelity="released"))  # pyright: ignore[reportArgumentType]


LOW, BETWEEN, HIGH = tables(0.3), tables(0.66, 0.06), np.stack([np.full((4, 8), 500.0)] * 3)
"""Dispatch with an entropy below half of log 4, on both sides of it, and of log 4."""


@pytest.mark.parametrize(
    ("dispatch", "verdict", "least"),
    [
        ((HIGH, LOW, HIGH), "holds: the loss has one softmax", 0.3),
        ((LOW, BETWEEN, LOW), "holds: the gate is softmax(h); 2000 steps without early stopping", 0.3),
        ((HIGH, HIGH, HIGH), "fails", np.log(4)),
        ((BETWEEN, HIGH, HIGH), "undecided: none is clearly below 0.69", 0.66),
    ],
)
def test_a_form_recovers_the_clusters_if_its_interval_is_below_half_of_log_4(dispatch, verdict, least):
    results = {
        f"ablated/figure1/{form}": {"train_dispatch": each} for form, each in zip(FIGURE_1_FORMS, dispatch, strict=True)
    }
    found = evaluate("fig1-why", results)
    assert found.verdict == verdict
    assert found.measured == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize(("point", "verdict"), [(0.2, "holds"), (0.5, "fails"), (1 / 3, "undecided")])
def test_the_router_learns_centres_if_the_ratio_is_below_a_third(point, verdict):
    centre = np.ones((3, 2, 4, 4))
    made = {
        "track_router_centre": centre,
        "track_router_feature": centre * around(point, 0.01)[:, None, None, None],
        "track_dispatch": np.stack([np.full((2, 4, 4), 100.0)] * 3),
    }
    found = evaluate("fig4-why", {"ablated/s1/gate": made})
    assert found.verdict.partition(":")[0] == verdict
    assert found.measured == pytest.approx(point)


def test_every_trial_has_to_be_seen_at_95_percent():
    track = np.array([[50.0, 96.0, 90.0], [50.0, 94.0, 95.0]])
    held = evaluate("fig3-why", {"ablated/s4/gate": {"track_probe_accuracy": track}})
    assert (held.verdict, held.measured) == ("holds", 95.0)
    missed = evaluate("fig3-why", {"ablated/s4/gate": {"track_probe_accuracy": track - 0.5}})
    assert (missed.verdict, missed.measured) == ("fails: 1 of 2 trials never get there", 94.5)


def grouped(share: float, least: float) -> dict[str, Array]:
    """Three trials with two experts in each group, and one with an empty group, which does not count."""
    groups = np.array([[0.0, 0, 1, 1, 2, 2, 3, 3]] * 3 + [[0.0] * 8])
    table = np.zeros((4, 8))
    for k in range(4):
        table[k, 2 * k] = share
        table[k, (2 * k + 2) % 8] = 100 - share
    dispatch = np.stack([table, table, table, np.roll(table, 2, axis=1)])
    dispatch[0, 0] += [0.1, 0, -0.1, 0, 0, 0, 0, 0]
    loads = np.array([1.0, least] * 4) * np.array([1.0, 1.0, 1.001, 1.0])[:, None]
    return {"groups": groups, "test_dispatch": dispatch, "track_load": loads[:, None]}


@pytest.mark.parametrize(
    ("gate", "norm", "verdict"),
    [
        ((99.9, 0.9), (60.0, 0.9), "holds: the gate is softmax(h)"),
        ((99.9, 0.2), (99.9, 0.8), "holds: gradients are divided by their Frobenius norm"),
        ((99.9, 0.2), (60.0, 0.9), "fails"),
    ],
)
def test_a_form_keeps_the_groups_if_neither_router_nor_loads_fail(gate, norm, verdict):
    found = evaluate("theorem4.2-why", {"ablated/s3/gate": grouped(*gate), "ablated/s3/norm": grouped(*norm)})
    assert found.verdict == verdict
    assert found.measured == pytest.approx(max(gate[0], norm[0]), abs=0.1)


@pytest.mark.parametrize(("made", "verdict"), [((99.9, 0.9), "holds"), ((99.9, 0.2), "fails"), ((60.0, 0.9), "fails")])
def test_the_start_keeps_the_groups_if_neither_router_nor_loads_fail(made, verdict):
    found = evaluate("theorem4.2-weights", {"ablated/start/s3": grouped(*made)})
    assert found.verdict == verdict
    assert found.measured == pytest.approx(made[0], abs=0.1)


PRINTED = {s: PUBLISHED["balanced/identity"][s - 1] for s in (3, 4)}


def balanced(softmax: tuple[float, float], coefficient: tuple[float, float]) -> dict[str, dict[str, Array]]:
    return {
        f"ablated/balance/{form}/s{setting}": {"accuracy": around(PRINTED[setting][0] + point, 0.1)}  # type: ignore[index]
        for form, points in (("softmax", softmax), ("coefficient", coefficient))
        for setting, point in zip((3, 4), points, strict=True)
    }


@pytest.mark.parametrize(
    ("softmax", "coefficient", "verdict", "distance"),
    [
        ((0.0, 0.1), (3.0, 3.0), "holds: the loss multiplies an expert's load by its softmax(h)", 0.1),
        ((0.0, 3.0), (3.0, 0.0), "fails", 3.0),
        ((2.0, 2.5), (0.1, 0.2), "holds: the coefficient is 1e-3, which the paper prints for images", 0.2),
    ],
)
def test_a_form_has_to_have_the_published_accuracy_in_both_settings(softmax, coefficient, verdict, distance):
    found = evaluate("table9-why", balanced(softmax, coefficient))
    assert found.verdict == verdict
    assert found.measured == pytest.approx(distance)


@pytest.mark.parametrize(
    ("points", "verdict"), [((0.0, 0.2), "holds"), ((0.0, 3.0), "partly: in 1 of 2 settings"), ((9.0, -9.0), "fails")]
)
def test_the_dataset_accounts_for_what_its_prediction_interval_contains(points, verdict):
    spread = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None] + 0.3 * np.array([-1.0, 1.0])
    results = {
        f"datasets/balanced/s{setting}": {"accuracy": PRINTED[setting][0] + point + spread}  # type: ignore[index]
        for setting, point in zip((3, 4), points, strict=True)
    }
    found = evaluate("table9-dataset", results)
    assert found.verdict == verdict
    half = 2.7764451 * np.std([-1.0, -0.5, 0.0, 0.5, 1.0], ddof=1) * np.sqrt(1.2)
    assert found.measured == pytest.approx(max(map(abs, points)) / half)
