"""Channel gates on CIFAR-10: cells on small made-up files, and the rules at their limits."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.data import builtin_datasets, load
from moesaic.models import create_model
from moesaic.models.model_cost import count_macs
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019 import experiments_vgg16
from moesaic.papers.wang2019.claims_vgg16 import CHECKS, lead_at_equal_cost
from moesaic.papers.wang2019.experiments_vgg16 import (
    COSTS,
    EPOCHS,
    REMEDIES,
    REMEDY_COST,
    REMEDY_TRIALS,
    TRIALS,
    VGG16_MACS,
    WIDE_EPOCHS,
    WIDE_TRIALS,
    GateCell,
    GateResult,
    open_channel_share,
    plan,
    static_width,
    widened_target,
)
from moesaic.papers.wang2019.paper import PAPER, charts
from moesaic.papers.wang2019.vgg_widths import WIDENINGS
from moesaic.training import NoProgress, ResultCache
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe

CLAIMS = {test.claim.id: test for test in CHECKS}
PLAN = plan("short", "best")
PER_FILE = 12
TINY = (("width", 0.05),)


# Cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images to train on and twelve to test on, in files like CIFAR-10's."""
    made = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (made / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        rows = rng.integers(256, size=(PER_FILE, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(PER_FILE) % 10
        rows.tofile(made / "cifar-10-batches-bin" / name)
    return made


@pytest.fixture(autouse=True)
def small_set(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    known = builtin_datasets.DATASETS
    short = replace(known["cifar10"], load=partial(builtin_datasets.cifar10, images_per_file=PER_FILE))
    monkeypatch.setattr(load, "DATASETS", {**known, "cifar10": short})
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    experiments_vgg16._loaded.cache_clear()


def runner(out: Path, folder: Path | None, device: str = "cpu", seed: int = 0) -> Runner:
    return Runner(ResultCache(out), folder, device=device, seed=seed, progress=NoProgress())


def gated(**gates: float | bool) -> GateCell:
    recipe = Recipe(2, batch_size=20, gates=GateRecipe(**gates))
    return GateCell("vgg16_deepmoe", 0, recipe, TINY, on_cpu=True)


def test_a_gated_network_tells_what_its_gates_do(folder: Path, tmp_path: Path):
    found = runner(tmp_path, folder).run({"": gated(target_macs=0.9)})[""].result
    assert 0 <= found.accuracy <= 100
    assert found.training.shape == (2,)
    assert found.usage.shape == (13, 3)
    channels = [max(round(0.05 * width), 1) for width in (64, 64, 128, 128, *3 * (256,), *6 * (512,))]
    assert found.usage.sum(1).tolist() == channels
    assert found.macs > 0
    assert found.spread >= 0
    assert 0 <= found.dynamic <= 100
    assert 0 <= found.within <= 1
    assert 0 <= found.embedding_accuracy <= 100
    assert 0 <= found.differing <= 60
    assert 0 <= found.information <= found.entropy <= 1
    assert found.cost == found.macs / VGG16_MACS


def test_a_static_network_costs_what_it_costs(folder: Path, tmp_path: Path):
    found = runner(tmp_path, folder).run({"": GateCell("vgg16", 0, Recipe(1, batch_size=20), TINY, on_cpu=True)})[""]
    macs = count_macs(create_model("vgg16", num_classes=10, width=0.05), (3, 32, 32)).macs
    assert found.result.macs == found.result.dense_macs == macs
    assert found.result.spread == found.result.dynamic == 0
    assert found.result.usage.shape == (0, 3)


def test_costs_are_those_that_the_network_counts_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = []
    real = experiments_vgg16.fit

    def keep(model, task, *more, **named):
        kept.append((model, task))
        return real(model, task, *more, **named)

    monkeypatch.setattr(experiments_vgg16, "fit", keep)
    found = runner(tmp_path, folder).run({"": gated(target_macs=0.9)})[""].result
    [(model, task)] = kept
    with torch.no_grad():
        alone = [
            int(model.macs(model.forward_with_routing(task.eval_transform(image, None)).routing))
            for image in task.test.pixels.split(1)
        ]
    assert found.macs == pytest.approx(np.mean(alone), rel=0.01)
    assert found.spread == pytest.approx(np.std(alone), rel=0.02)


def test_a_teacher_is_trained_first_and_learned_from(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    real = experiments_vgg16.fit

    def watch(model, task, recipe, *, teacher=None, **more):
        seen.append((type(model).__name__, recipe.gates, type(teacher).__name__))
        return real(model, task, recipe, teacher=teacher, **more)

    monkeypatch.setattr(experiments_vgg16, "fit", watch)
    cell = replace(gated(distill_weight=1.0), teacher="vgg16")
    runner(tmp_path, folder).run({"": cell})
    assert seen == [("VGG16", None, "NoneType"), ("DeepMoE", GateRecipe(distill_weight=1.0), "VGG16")]
    assert cell.steps == 2 * gated().steps == 4


def test_a_static_network_learns_from_a_teacher_of_full_width(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built, taught = [], []
    real = experiments_vgg16.fit

    def small(name, options, seed):
        built.append((name, dict(options)))
        return create_model(name, num_classes=10, width=0.05)

    def watch(model, task, recipe, *, teacher=None, callbacks=(), **more):
        taught.append((teacher, [type(each).__name__ for each in callbacks]))
        return real(model, task, recipe, teacher=teacher, callbacks=callbacks, **more)

    monkeypatch.setattr(experiments_vgg16, "_network", small)
    monkeypatch.setattr(experiments_vgg16, "fit", watch)
    cell = GateCell("vgg16", 0, Recipe(1, batch_size=20), (("width", 0.5),), teacher="vgg16", on_cpu=True)
    found = runner(tmp_path, folder).run({"": cell})[""].result
    assert built == [("vgg16", {}), ("vgg16", {"width": 0.5})]
    assert taught == [(None, []), (None, ["Distillation"])]
    assert np.isnan([found.embedding_accuracy, found.differing, found.entropy, found.information]).all()


def test_top_k_gates_cost_the_same_for_every_image(folder: Path, tmp_path: Path):
    options = (*TINY, ("mode", "topk"), ("keep", 0.5))
    cell = replace(gated(straight_through=True), options=options)
    found = runner(tmp_path, folder).run({"": cell})[""].result
    assert found.spread == 0
    assert found.macs < found.dense_macs


def test_networks_of_a_trial_start_from_the_same_seed_and_others_from_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    real = experiments_vgg16.fit

    def watch(model, task, recipe, *, seed, **more):
        seen.append((seed, len(task.train)))
        return real(model, task, recipe, seed=seed, **more)

    monkeypatch.setattr(experiments_vgg16, "fit", watch)
    static = GateCell("vgg16", 0, Recipe(1, batch_size=20), TINY, on_cpu=True)
    runner(tmp_path, folder).run(
        {"a": static, "b": replace(static, samples=20), "c": replace(static, trial=1)},
    )
    seeds = [seed for seed, _ in seen]
    assert seeds[0] == seeds[1] != seeds[2]
    assert [images for _, images in seen] == [60, 20, 60]


def test_what_is_measured_and_its_specification_are_plain_json_and_repeat(folder: Path, tmp_path: Path):
    here, cell = runner(tmp_path, folder), gated(target_macs=0.9)
    first, again = cell.measure(here), cell.measure(here)
    json.dumps([first, cell.spec(here)], allow_nan=False)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    others = [replace(cell, trial=1), replace(cell, options=(("width", 0.06),)), gated(target_macs=0.8)]
    specs = [json.dumps(each.spec(here)) for each in (cell, *others)] + [
        json.dumps(cell.spec(runner(tmp_path, folder, seed=1)))
    ]
    assert len(set(specs)) == len(specs)
    assert cell.spec(here)["recipe"]["gates"]["target_macs"] == 0.9


def test_obstacles_are_the_images_and_then_the_gpu(folder: Path, tmp_path: Path):
    cell = gated()
    for without in (None, tmp_path):
        assert cell.missing_requirement(runner(tmp_path, without)) == "needs CIFAR-10's binary files under --data-dir"
    assert cell.missing_requirement(runner(tmp_path, folder)) is None
    whole = replace(cell, on_cpu=False)
    assert whole.missing_requirement(runner(tmp_path, folder)) == "needs a GPU (--device cuda)"
    assert whole.missing_requirement(runner(tmp_path, folder, device="cuda:0")) is None
    assert cell.spec(runner(tmp_path, None))["data"] == "not here"


def test_damaged_files_are_found_before_anything_runs(folder: Path, tmp_path: Path):
    experiments_vgg16.check_data(tmp_path)  # none is no damage
    with pytest.raises(ValueError, match="data_batch_1"):
        experiments_vgg16.check_data(folder)


# The plan


def test_the_plan_is_for_the_full_preset_and_in_our_form():
    assert plan("quick", "best") == plan("short", "print") == plan("short", "released") == {}
    for test in CHECKS:
        assert test.can_run(PLAN), test.claim.id
        assert not test.can_run({}), test.claim.id
    looked_at = {name for test in CHECKS for name in test.cells(PLAN)}
    assert looked_at | {name for name in PLAN if name.startswith("wide/gated/vgg16/")} == set(PLAN)


def test_static_networks_cost_what_gated_ones_are_asked_for():
    for cost in COSTS:
        network = create_model("vgg16", num_classes=10, width=static_width(cost))
        assert count_macs(network, (3, 32, 32)).macs / VGG16_MACS == pytest.approx(cost, rel=0.02)
    assert count_macs(create_model("vgg16", num_classes=10), (3, 32, 32)).macs == VGG16_MACS


def test_top_k_gates_keep_as_many_channels_as_the_cost_allows():
    network = create_model("vgg16_deepmoe", num_classes=10, mode="topk", keep=open_channel_share(REMEDY_COST))
    assert count_macs(network, (3, 32, 32)).macs / VGG16_MACS == pytest.approx(REMEDY_COST, rel=0.03)


def test_widenings_are_gated_down_to_the_work_of_vgg16():
    for name in WIDENINGS:
        target, embedding = widened_target(name)
        network = create_model(f"vgg16_deepmoe_{name}", num_classes=10, embedding_share=embedding)
        assert target * network.dense_macs == pytest.approx(VGG16_MACS, rel=1e-6)
        assert network.gate_macs / VGG16_MACS < 0.05
        assert network.fixed_macs / network.dense_macs < target / 2


def test_networks_that_are_compared_train_equally_long():
    for name, cell in PLAN.items():
        assert cell.recipe.epochs == (WIDE_EPOCHS if name.startswith("wide/") else EPOCHS)
        assert (cell.recipe.gates is None) == ("deepmoe" not in cell.network)
        assert replace(cell.recipe, gates=None) == Recipe(cell.recipe.epochs)


# Rules


def made(accuracy: float, cost: float = 1.0, **more: object) -> GateResult:
    usage = np.array([[10.0, 10.0, 80.0]])
    result = GateResult(accuracy, np.array([50.0]), cost * VGG16_MACS, 0.0, VGG16_MACS, usage, 0.1, 0.2, 1.0)
    return replace(result, **more)


def noise(trial: int) -> float:
    return (0.0, 0.1, 0.05)[trial]


def experiment(over: Mapping[str, GateResult] | None = None, **leads: float) -> ExperimentResults[GateResult]:
    """Everything as accurate as a static network of its cost; leads by the beginning of a name, "_" for "/"."""
    results = {}
    for name, cell in PLAN.items():
        parts = name.split("/")
        if parts[0] == "cost":
            cost = float(parts[2])
        elif parts[0] == "remedy":
            cost = REMEDY_COST
        else:
            cost = 1.0
        lead = sum(more for start, more in leads.items() if name.startswith(start.replace("_", "/")))
        results[name] = made(90 + 5 * np.log(cost) + lead + (1 + (lead != 0)) * noise(cell.trial), cost)
    results |= {} if over is None else over
    return ExperimentResults(
        PLAN, results, Runner(ResultCache(Path("nowhere")), None, device="cpu", seed=0, progress=NoProgress())
    )


def evaluated(id: str, given: ExperimentResults[GateResult]) -> CheckResult:
    return CLAIMS[id].evaluate(given)


def decision(id: str, given: ExperimentResults[GateResult]) -> str:
    return evaluated(id, given).verdict.partition(":")[0]


def test_a_lead_is_over_a_static_network_that_costs_what_was_measured():
    halfway = {
        f"cost/gated/0.25/{trial}": made(90 + 5 * np.log(0.35) + 1 + noise(trial), 0.35) for trial in range(TRIALS)
    }
    assert lead_at_equal_cost(experiment(halfway), "cost/gated/0.25") == pytest.approx([1, 1, 1])
    cheaper = {f"cost/gated/0.12/{trial}": made(80.0, 0.06) for trial in range(TRIALS)}
    expected = [80 - (90 + 5 * np.log(0.12) + noise(trial)) for trial in range(TRIALS)]
    assert lead_at_equal_cost(experiment(cheaper), "cost/gated/0.12") == pytest.approx(expected)


def test_gates_are_ahead_where_they_are_at_every_cost():
    assert decision("cost-ahead", experiment(cost_gated=1.0)) == "holds"
    assert evaluated("cost-ahead", experiment(cost_gated=1.0)).measured == pytest.approx(1.05)
    some = experiment({f"cost/gated/0.12/{trial}": made(60.0, 0.12) for trial in range(TRIALS)}, cost_gated=1.0)
    assert evaluated("cost-ahead", some).verdict == "partly: clearly ahead at 2 of 3 costs, clearly behind at 1"
    assert decision("cost-ahead", experiment(cost_gated=-1.0)) == "fails"


def test_a_lead_at_one_cost_of_three_is_a_lead_in_part():
    one = {f"cost/gated/{cost}/{trial}": made(60.0, cost) for cost in COSTS[:2] for trial in range(TRIALS)}
    assert decision("cost-ahead", experiment(one, cost_gated=1.0)) == "partly"


def test_half_of_the_work_may_cost_a_point():
    for lead, expected in ((3.0, "holds"), (0.0, "fails")):  # at half of the work static networks lose 3.5 points
        assert decision("cost-lossless", experiment(cost_gated=lead)) == expected
    uneven = {f"cost/gated/0.5/{trial}": made(89.0 + trial - 1, 0.5) for trial in range(TRIALS)}
    assert decision("cost-lossless", experiment(uneven)) == "undecided"


def test_a_cost_is_met_within_five_percent():
    assert decision("cost-met", experiment()) == "holds"
    one = {"cost/gated/0.25/1": made(90.0, 0.25 * 1.06)}
    assert evaluated("cost-met", experiment(one)).verdict == "partly: not in 1 of 9 runs"
    assert evaluated("cost-met", experiment(one)).measured == pytest.approx(6)
    every = {f"cost/gated/{cost}/{trial}": made(90.0, 0.9 * cost) for cost in COSTS for trial in range(TRIALS)}
    assert decision("cost-met", experiment(every)) == "fails"


def test_patterns_depend_on_the_data_where_half_of_the_channels_do():
    def used(dynamic: float, *more: float) -> ExperimentResults[GateResult]:
        shares = (dynamic, *more, dynamic, dynamic)[:TRIALS]
        usage = [np.array([[50.0, 50 - share, share]]) for share in shares]
        return experiment({f"cost/gated/0.5/{t}": replace(made(90.0, 0.5), usage=usage[t]) for t in range(TRIALS)})

    assert evaluated("depends-on-data", experiment()).measured == 80
    assert evaluated("depends-on-data", used(40)).verdict == "fails"
    assert evaluated("depends-on-data", used(40, 50)).interval == pytest.approx((29.0, 57.7), abs=0.1)
    assert decision("depends-on-data", used(40, 50)) == "undecided"
    assert evaluated("depends-on-data", used(50)).verdict == "holds"
    wide = evaluated("depends-on-data", used(5, 25)).interval
    assert wide is not None
    assert wide[0] == 0  # no share is below that


def test_gates_follow_the_class_where_classes_are_further_apart_than_images_of_one():
    assert evaluated("gates-by-class", experiment()) == CheckResult("holds", 2.0, (2.0, 2.0))
    alike = {f"cost/gated/0.12/{trial}": replace(made(80.0, 0.12), between=0.1) for trial in range(TRIALS)}
    assert decision("gates-by-class", experiment(alike)) == "fails"


def test_a_widening_is_judged_against_vgg16_of_the_same_cost():
    for name in WIDENINGS:
        id = f"wide-{name.replace('_', '-')}"
        runs = {f"wide/gated/{name}/{trial}": made(92.0 + noise(trial)) for trial in range(WIDE_TRIALS)}
        assert decision(id, experiment(runs)) == "holds"
        assert decision(id, experiment()) == "undecided"
        worse = {f"wide/gated/{name}/{trial}": made(88.0 + noise(trial)) for trial in range(WIDE_TRIALS)}
        assert decision(id, experiment(worse)) == "fails"
        dearer = {key: replace(run, macs=1.2 * VGG16_MACS) for key, run in runs.items()}
        assert evaluated(id, experiment(dearer)).verdict == "partly: ahead, at 1.20 times VGG-16's cost"
        slightly = {key: replace(run, macs=1.04 * VGG16_MACS) for key, run in runs.items()}
        assert decision(id, experiment(slightly)) == "holds"
        both = {key: replace(run, macs=1.2 * VGG16_MACS) for key, run in worse.items()}
        assert decision(id, experiment(both)) == "fails"


@pytest.mark.parametrize(("id", "kind"), [("wide-where", "gated"), ("wide-where-dense", "dense")])
def test_where_channels_are_added_matters_if_the_best_widening_is_clearly_ahead(id: str, kind: str):
    runs = {f"wide/{kind}/w4_low/{trial}": made(92.0 + noise(trial)) for trial in range(WIDE_TRIALS)}
    runs |= {f"wide/{kind}/w1_mid/{trial}": made(88.0 + noise(trial)) for trial in range(WIDE_TRIALS)}
    found = evaluated(id, experiment(runs))
    assert (found.verdict, found.measured) == ("holds: W4-Low over W1-Mid", pytest.approx(4))
    assert decision(id, experiment()) == "undecided"


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_is_judged_against_the_static_network(name: str):
    def with_lead(lead: float) -> ExperimentResults[GateResult]:
        return experiment(
            {
                f"remedy/{name}/{trial}": made(90 + 5 * np.log(REMEDY_COST) + lead + noise(trial), REMEDY_COST)
                for trial in range(REMEDY_TRIALS)
            },
            cost_gated=-1.0,
        )

    id = f"remedy-{name}"
    assert [decision(id, with_lead(lead)) for lead in (1.0, -1.0)] == ["holds", "fails"]
    assert evaluated(id, experiment()).verdict == "undecided: 0 is in the interval"
    assert evaluated("remedies-help", with_lead(1.0)).measured == pytest.approx(1.95)
    assert evaluated("remedies-help", with_lead(1.0)).verdict == f"holds: {name}"


def test_remedies_do_not_help_where_none_gains():
    assert decision("remedies-help", experiment(cost_gated=2.0)) == "fails"


# Charts


def test_charts_show_accuracy_against_cost_gates_and_widenings():
    drawn = {chart.id: chart for chart in charts({"best": experiment(cost_gated=1.0)})}
    assert set(drawn) == {"accuracy-cost", "remedies", "gates-by-layer", "widenings"}
    [panel] = drawn["accuracy-cost"].panels
    assert [len(line.x) for line in panel.series] == [3, 4]
    assert panel.series[0].x == pytest.approx(COSTS)
    assert all(line.spread is not None and min(line.spread) > 0 for line in panel.series)
    [panel] = drawn["remedies"].panels
    assert [line.x for line in panel.series] == [(float(place),) for place in range(1 + len(REMEDIES))]
    assert [line.y[0] for line in panel.series] == pytest.approx([1.05, 0, 0, 0, 0, 0])
    assert len(drawn["gates-by-layer"].panels) == len(COSTS)
    assert drawn["gates-by-layer"].panels[0].series[0].y == (80.0,)
    assert [line.label for line in drawn["widenings"].panels[0].series][-1] == "VGG-16"


def test_without_results_there_are_no_charts():
    empty = replace(experiment(), results={})
    assert charts({"best": empty, "print": empty}) == []
    assert charts({}) == []


def test_cells_whose_closed_gates_learn_have_other_keys_than_before_they_did(tmp_path: Path):
    runner = Runner(ResultCache(tmp_path), None, device="cpu", seed=0, progress=NoProgress())
    cells = PAPER.plan("full", "best")
    marked = {name for name, cell in cells.items() if "closed gates" in cell.spec(runner)}
    expected = {name for name in cells if name.startswith(("remedy/topk/", "equal-cost/shaped/")) or "hard/" in name}
    assert marked == expected
    assert len(marked) == 30
