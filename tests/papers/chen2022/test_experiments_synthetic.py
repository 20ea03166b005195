"""Cells of mixtures: what they measure, what they see on the way, and when their numbers are others than before."""

import json
from collections.abc import Generator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.papers.chen2022 import experiments_synthetic as chen2022_cells
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterData, ClusterPatches
from moesaic.papers.chen2022.experiments_synthetic import ENGINE, MixtureCell
from moesaic.papers.chen2022.theory.smoothing import routing_probabilities
from moesaic.papers.chen2022.trial_training import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import Mixture, Mixtures
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache

PROBE = 100
SHORT = replace(MixtureSchedule.of("released"), steps=24)
CELLS = {
    "released cubic": MixtureCell(Mixture.of("released"), replace(SHORT, learning_rate=0.002), 1, 3, 120, 80, follow=8),
    "print cubic": MixtureCell(
        Mixture.of("print", experts=5, filters=4), MixtureSchedule(24, 0.02, 0.5), 3, 3, 120, 80, follow=8
    ),
    "released identity": MixtureCell(
        Mixture.of("released", "identity"), replace(SHORT, balance=1e-4), 2, 3, 120, 80, follow=8
    ),
    "single cubic": MixtureCell(
        Mixture.single("released", "cubic", 16), replace(MixtureSchedule.single("released"), steps=24), 1, 3, 120, 80
    ),
    "single gelu": MixtureCell(
        Mixture.single("print", "gelu", 16), replace(MixtureSchedule.single("print", "gelu"), steps=24), 7, 3, 120, 80
    ),
}
ROUTED = [name for name, cell in CELLS.items() if cell.model.routed]
each_cell = pytest.mark.parametrize("name", CELLS)
each_mixture = pytest.mark.parametrize("name", ROUTED)


@pytest.fixture(autouse=True, scope="module")
def few_probes() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chen2022_cells, "_PROBE", PROBE)
        yield


def runner_in(folder: Path, seed: int = 0) -> Runner:
    return Runner(ResultCache(folder), None, device="cpu", seed=seed, progress=NoProgress())


def measured(folder: Path, cell: MixtureCell) -> CellArrays:
    return runner_in(folder).run({"a": cell})["a"].result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, few_probes: None) -> dict[str, CellArrays]:
    return {name: measured(tmp_path_factory.mktemp("cells"), cell) for name, cell in CELLS.items()}


def trained_again(cell: MixtureCell, seen: dict[tuple[int, int], Mixtures] | None = None) -> TrainedMixtures:
    """The same networks, by themselves; ``seen`` gets a copy of them by moment and trial."""

    def keep(step: int, mixtures: Mixtures, data: ClusterData, which: Tensor) -> None:
        if seen is not None and mixtures.router is not None:
            copied = replace(
                mixtures,
                weights=mixtures.weights.clone(),
                bias=None if mixtures.bias is None else mixtures.bias.clone(),
                router=mixtures.router.clone(),
            )
            for place, trial in enumerate(which.tolist()):
                seen[step, trial] = copied.of(torch.tensor([place]))

    return train_mixtures(
        cell.model,
        ClusterPatches.setting(cell.setting),
        trials=range(cell.trials),
        samples=cell.samples,
        schedule=cell.schedule,
        callback=keep,
        callback_steps=range(cell.schedule.steps + 1),
    )


def counted(clusters: Tensor, experts: Tensor, many: int) -> list[list[int]]:
    """One sample after the other."""
    table = [[0] * many for _ in range(4)]
    for cluster, expert in zip(clusters.tolist(), experts.tolist(), strict=True):
        table[cluster][expert] += 1
    return table


def expert_shares(mixtures: Mixtures, data: ClusterData) -> list[list[float]]:
    """(E, 4): the share of a cluster for which the sign of what an expert says is the label's."""
    right = (mixtures.expert_outputs(data.patches)[0] > 0) == (data.labels[0, :, None] == 1)
    return [[right[data.clusters[0] == k, e].double().mean().item() for k in range(4)] for e in range(right.shape[1])]


@each_cell
def test_a_cell_measures_what_its_networks_do(found: dict[str, CellArrays], name: str):
    cell, result = CELLS[name], found[name]
    trained, E = trained_again(cell), cell.model.experts
    source = ClusterPatches.setting(cell.setting)
    assert result["steps"].tolist() == trained.steps.tolist()
    assert result["errors"].tolist() == trained.errors.tolist()
    assert result["losses"].tolist() == pytest.approx(trained.losses.tolist(), rel=1e-4)
    for t in range(3):
        keys = keyed_random.keys(0, [t])
        test, train = source.draw(keys, 80, "test"), source.draw(keys, 120, "train")
        mixtures = trained.mixtures.of(torch.tensor([t]))
        noise = keyed_random.coarse_uniform(keys, "chen2022/test noise", 80, E) if name.startswith("released") else None
        said, chosen = mixtures.predict(test.patches, noise)
        right = (said[0] > 0) == (test.labels[0] == 1)
        assert result["accuracy"][t] == pytest.approx(100 * right.double().mean().item())
        if cell.model.routed:
            assert result["test_dispatch"][t].tolist() == counted(test.clusters[0], chosen[0], E)
            assert result["train_dispatch"][t].tolist() == counted(train.clusters[0], trained.dispatch[t], E)
            np.testing.assert_allclose(result["expert_accuracy"][t], expert_shares(mixtures, test), rtol=1e-4)


def test_a_single_network_has_no_dispatch(found: dict[str, CellArrays]):
    assert found["single cubic"].keys() == found["single gelu"].keys() == {"steps", "losses", "errors", "accuracy"}


def test_a_single_network_has_no_router_to_follow(tmp_path: Path):
    with pytest.raises(ValueError, match="a single network has none; use follow=0"):
        measured(tmp_path, replace(CELLS["single cubic"], follow=2))
    assert not list(tmp_path.iterdir())


@each_mixture
def test_tracks_have_a_place_for_every_look(found: dict[str, CellArrays], name: str):
    E, result = CELLS[name].model.experts, found[name]
    assert result["track_steps"].tolist() == [0, 8, 16, 24]
    shapes = {key: value.shape for key, value in result.items() if key.startswith("track_") and key != "track_steps"}
    assert shapes == {
        "track_dispatch": (3, 4, 4, E),
        "track_probe_accuracy": (3, 4),
        "track_load": (3, 4, E),
        "track_expert_feature": (3, 4, E, 4),
        "track_expert_centre": (3, 4, E, 4),
        "track_router_feature": (3, 4, E, 4),
        "track_router_centre": (3, 4, E, 4),
        "track_router_sum": (3, 4),
    }
    assert result["groups"].shape == (3, E)
    assert (result["track_dispatch"].sum((2, 3)) == 120).all()
    np.testing.assert_allclose(result["track_load"].sum(2), 1, atol=1e-3)
    np.testing.assert_allclose(result["track_load"][:, 0], 1 / E, atol=1e-4)  # a router that knows nothing yet
    assert (result["track_router_feature"][:, 0] == 0).all()


@each_mixture
def test_tracks_are_kept_with_five_significant_digits(found: dict[str, CellArrays], name: str):
    tracks = [values.ravel() for key, values in found[name].items() if key.startswith("track_")]
    values = np.concatenate(tracks).tolist()
    np.testing.assert_allclose(values, [float(f"{value:.5g}") for value in values], rtol=1e-12)
    assert any(value != pytest.approx(float(f"{value:.4g}"), rel=1e-12) for value in values)


def test_experts_are_judged_on_all_samples_however_many_are_computed_at_a_time(tmp_path: Path):
    cell = replace(CELLS["print cubic"], schedule=replace(SHORT, steps=1), trials=1, test_samples=2100)
    test = ClusterPatches.setting(cell.setting).draw(keyed_random.keys(0, [0]), 2100, "test")
    shares = expert_shares(trained_again(cell).mixtures, test)
    np.testing.assert_allclose(measured(tmp_path, cell)["expert_accuracy"][0], shares, atol=0.005)


@each_mixture
def test_looks_are_at_the_networks_as_they_are_then(found: dict[str, CellArrays], name: str):
    cell, result = CELLS[name], found[name]
    states: dict[tuple[int, int], Mixtures] = {}
    trained_again(cell, states)
    source, E = ClusterPatches.setting(cell.setting), cell.model.experts
    for look, step in enumerate((0, 8, 16, 24)):
        for t in range(3):
            then, keys = states[step, t], keyed_random.keys(0, [t])
            assert then.router is not None
            train, probe = source.draw(keys, 120, "train"), source.draw(keys, PROBE, "test")
            scores = then.scores(train.patches)
            moved = scores + keyed_random.coarse_uniform(keys, f"chen2022/look {step}", 120, E)
            table = counted(train.clusters[0], moved[0].argmax(1), E)
            assert result["track_dispatch"][t, look].tolist() == table
            noise = (
                keyed_random.coarse_uniform(keys, f"chen2022/probe {step}", PROBE, E)
                if name.startswith("released")
                else None
            )
            right = (then.predict(probe.patches, noise)[0][0] > 0) == (probe.labels[0] == 1)
            assert result["track_probe_accuracy"][t, look] == pytest.approx(
                100 * right.double().mean().item(), rel=1e-4
            )
            load = routing_probabilities(scores[0, :PROBE].double()).mean(0)
            np.testing.assert_allclose(result["track_load"][t, look], load, rtol=1e-4)
            for kind, directions in (("feature", source.features), ("centre", source.centres)):
                largest = (then.weights[0] @ directions.T).abs().amax(1)
                np.testing.assert_allclose(result[f"track_expert_{kind}"][t, look], largest, rtol=1e-4)
                towards = (then.router[0] @ directions.T).abs()
                np.testing.assert_allclose(result[f"track_router_{kind}"][t, look], towards, rtol=1e-4, atol=1e-9)


@each_mixture
def test_groups_and_the_end_of_exploration_are_seen_once(found: dict[str, CellArrays], name: str):
    cell, result = CELLS[name], found[name]
    states: dict[tuple[int, int], Mixtures] = {}
    trained_again(cell, states)
    source = ClusterPatches.setting(cell.setting)
    explored = {"released cubic": 15, "print cubic": 5, "released identity": 31}[name]
    assert cell.explored == explored
    assert ("explored_accuracy" in result) == (explored <= 24)
    for t in range(3):
        start = (states[0, t].weights[0] @ source.features.T).amax(1)  # of the signed products: features have a sign
        assert result["groups"][t].tolist() == start.argmax(1).tolist()
        if explored <= 24:
            probe = source.draw(keyed_random.keys(0, [t]), PROBE, "test")
            shares = expert_shares(states[explored, t], probe)
            np.testing.assert_allclose(result["explored_accuracy"][t], shares, rtol=1e-4)


@pytest.mark.parametrize("follow", [4, 5])
def test_the_last_look_is_at_the_last_step_at_most(tmp_path: Path, follow: int):
    """The exploration stage is 20 steps long, also a multiple of what lies between two looks."""
    cell = replace(CELLS["print cubic"], schedule=MixtureSchedule(10, 0.005, 0.1), trials=1, follow=follow)
    assert cell.explored == 20
    result = measured(tmp_path, cell)
    assert result["track_steps"].tolist() == list(range(0, 11, follow))
    assert "explored_accuracy" not in result


# At this rate the loss soon rises, which is when the released code stops.
STOPPING = replace(
    CELLS["released cubic"],
    model=replace(Mixture.of("released"), init_scale=1.0),
    schedule=replace(SHORT, learning_rate=0.05),
    follow=4,
)


def test_a_trial_that_stops_keeps_its_last_look(tmp_path: Path):
    states: dict[tuple[int, int], Mixtures] = {}
    trained = trained_again(STOPPING, states)
    result = measured(tmp_path, STOPPING)
    ends = {t: max(step for step, trial in states if trial == t) for t in range(3)}
    assert min(ends.values()) < min(20, STOPPING.explored)
    assert result["steps"].tolist() == trained.steps.tolist() == [end - 1 for end in ends.values()]
    features = ClusterPatches.setting(1).features
    probes = ClusterPatches.setting(1).draw(keyed_random.keys(0, range(3)), PROBE, "test")
    assert result["track_steps"].tolist() == list(range(0, 25, 4))
    for t, end in ends.items():
        for look, step in enumerate(range(0, 25, 4)):
            last = min(step, end // 4 * 4)
            seen = (states[last, t].weights[0] @ features.T).abs().amax(1)
            np.testing.assert_allclose(result["track_expert_feature"][t, look], seen, rtol=1e-4)
        explored = STOPPING.explored if end >= STOPPING.explored else end // 4 * 4
        guesses = states[explored, t].expert_outputs(probes.patches[t : t + 1])[0] > 0
        right = (guesses == (probes.labels[t, :, None] == 1))[probes.clusters[t] == 2].double().mean(0)
        np.testing.assert_allclose(result["explored_accuracy"][t][:, 2], right, rtol=1e-4)


@pytest.mark.parametrize("cell", [*CELLS.values(), STOPPING], ids=[*CELLS, "stopping"])
def test_what_is_measured_is_plain_json_and_progress_adds_up(tmp_path: Path, cell: MixtureCell):
    class Counting(NoProgress):
        done = 0

        def advance(self, amount: int, note: str = "") -> None:
            self.done += amount

    here = runner_in(tmp_path)
    here.progress = Counting()
    json.dumps([cell.measure(here), cell.spec(here)], allow_nan=False)
    assert here.progress.done == cell.steps == 3 * 24
    assert cell.missing_requirement(here) is None


# A value for every field that is not that of the cell "released identity".
OTHERS = {
    "model": {
        "experts": 7,
        "filters": 14,
        "activation": "cubic",
        "two_logits": False,
        "bias": False,
        "gate": "softmax",
        "softmax_twice": False,
        "data_scale": 9.0,
        "init": "normal",
        "init_scale": 0.002,
        "noise_in_test": False,
    },
    "schedule": {
        "steps": 25,
        "learning_rate": 0.002,
        "router_learning_rate": 0.2,
        "optimizer": "adam",
        "norm": "frobenius",
        "weight_decay": 0.1,
        "balance": 0.0,
        "balance_on": "softmax",
        "stop": "never",
    },
    "setting": 1,
    "trials": 4,
    "samples": 121,
    "test_samples": 81,
    "follow": 7,
}
CHANGES = [(part, name) for part in ("model", "schedule") for name in OTHERS[part]]  # type: ignore[attr-defined]


def test_the_changes_below_are_of_every_field():
    assert list(OTHERS) == [field.name for field in fields(MixtureCell)]
    assert list(OTHERS["model"]) == [field.name for field in fields(Mixture)]  # type: ignore[call-overload]
    assert list(OTHERS["schedule"]) == [field.name for field in fields(MixtureSchedule)]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("part", "name"), [*CHANGES, *(("", name) for name in OTHERS if name not in ("model", "schedule"))]
)
def test_other_work_is_another_cell(tmp_path: Path, part: str, name: str):
    cell, here = CELLS["released identity"], runner_in(tmp_path)
    if part:
        values: dict[str, object] = OTHERS[part]  # type: ignore[assignment]
        changed = replace(getattr(cell, part), **{name: values[name]})
        other = replace(cell, **{part: changed})
    else:
        other = replace(cell, **{name: OTHERS[name]})  # type: ignore[arg-type]
    store = ResultCache(tmp_path)
    assert store.path("a", other.spec(here)) != store.path("a", cell.spec(here))
    assert store.path("a", replace(cell).spec(here)) == store.path("a", cell.spec(here))


def test_another_seed_engine_or_probe_is_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cell = CELLS["released identity"]
    specs = [cell.spec(runner_in(tmp_path)), cell.spec(runner_in(tmp_path, seed=1))]
    monkeypatch.setattr(chen2022_cells, "ENGINE", ENGINE + 1)
    specs.append(cell.spec(runner_in(tmp_path)))
    monkeypatch.setattr(chen2022_cells, "_PROBE", PROBE + 1)
    specs.append(cell.spec(runner_in(tmp_path)))
    assert len({json.dumps(spec) for spec in specs}) == 4


def test_another_seed_gives_other_numbers(tmp_path: Path, found: dict[str, CellArrays]):
    other = runner_in(tmp_path, seed=1).run({"a": CELLS["print cubic"]})["a"].result
    assert other["losses"].tolist() != found["print cubic"]["losses"].tolist()


@pytest.mark.parametrize("name", ["released cubic", "single gelu"])
def test_on_one_core_and_on_two_a_cell_measures_the_same(tmp_path: Path, found: dict[str, CellArrays], name: str):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        other = measured(tmp_path, CELLS[name])
    finally:
        torch.set_num_threads(before)
    assert other.keys() == found[name].keys()
    for key, value in other.items():
        np.testing.assert_allclose(value, found[name][key], rtol=1e-4, atol=1e-6, err_msg=key)


# Of three trials: by how much their filters and routers move (squared), and their accuracy on 80 test samples.
KNOWN: dict[str, tuple[list[float], list[float], list[float]]] = {
    "released cubic": ([0.0043201, 0.0043201, 0.0050141], [0.0031247, 0.00023529, 0.0003502], [56.25, 58.75, 67.5]),
    "print cubic": ([0.70711, 0.82293, 0.6841], [6.5817e-05, 4.7443e-05, 1.5242e-05], [87.5, 81.25, 75.0]),
    "released identity": ([0.0011216, 0.0011845, 0.0012374], [0.15832, 0.14977, 0.16714], [82.5, 77.5, 82.5]),
    "single cubic": ([1.197, 1.4581, 1.5374], [], [48.75, 42.5, 47.5]),
    "single gelu": ([7.7517, 5.8457, 6.9082], [], [72.5, 77.5, 62.5]),
}


@each_cell
def test_what_changes_the_numbers_of_trials_must_raise_the_engine(found: dict[str, CellArrays], name: str):
    """Cells on disk count as done while ENGINE is the same: who has to change these numbers raises it."""
    assert ENGINE == 1
    filters, routers, accuracies = KNOWN[name]
    cell, trained = CELLS[name], trained_again(CELLS[name])
    start = Mixtures.initial(cell.model, trained.keys, dim=50)
    moved = (trained.mixtures.weights - start.weights).double().square().sum((1, 2, 3))
    assert moved.tolist() == pytest.approx(filters, rel=1e-3)  # processors round differently
    router = trained.mixtures.router
    turned = [] if router is None else router.double().square().sum((1, 2)).tolist()
    assert turned == pytest.approx(routers, rel=1e-3)
    assert found[name]["accuracy"].tolist() == pytest.approx(accuracies, abs=1.26)
