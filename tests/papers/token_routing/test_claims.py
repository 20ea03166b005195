"""Claims of our own on tokens: rules at their limits, what is compared with what, and charts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.papers.engine.cells import Cell
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.papers.token_routing.claims import CHECKS
from moesaic.papers.token_routing.continued_training import Branch, Stage, TokenCell, TokenResult
from moesaic.papers.token_routing.experiments import COMPARED_COSTS, LABELS, SIZES, VIT_ARMS, CostCell, gpu_hours, plan
from moesaic.papers.token_routing.paper import PAPER, charts, compact
from moesaic.papers.token_routing.vit_recipe import FINE_TUNING_LR, vit_recipe
from moesaic.training import NoProgress, ResultCache

CLAIMS = {check.claim.id: check for check in CHECKS}
PLAN = plan("full", "best")
TRAINED = [id for id in CLAIMS if id != "equal-costs"]
LOSSLESS = ("split-lossless", "skip-lossless", "labels-alike")
AHEAD = [id for id in TRAINED if id not in LOSSLESS]
OURS = {
    "moe-ahead": ("vit/moe/",),
    "soft-moe-ahead": ("vit/soft/",),
    "split-lossless": ("vit/dense/:split",),
    "split-ahead": ("vit/dense/:split",),
    "skip-lossless": ("vit/skip/",),
    "skip-ahead": ("vit/skip/",),
    "labels-vit": ("labels/vit/routed/",),
    "labels-cnn": ("labels/wrn/routed/",),
    "labels-alike": ("labels/vit/routed/",),
    "upcycle-vit": ("vit/dense/:upcycled",),
    "upcycle-resnet": ("resnet/dense/:upcycled",),
}
"""Where each claim's network is: cells, and a branch after a colon."""


@pytest.fixture(scope="module")
def costs() -> dict[str, int]:
    return CostCell().measure(runner())


def runner() -> Runner:
    return Runner(ResultCache(Path("nowhere")), None, device="cpu", seed=0, progress=NoProgress())


def noise(trial: int) -> float:
    return (0.0, 0.3, -0.3, 0.1, -0.1)[trial]


def experiment(leads: Mapping[str, float] | None = None, **macs: int) -> ExperimentResults[object]:
    """All networks at 90 %, with leads by the beginning of a cell's name and, after a colon, a branch.

    Leads differ by trial; ``macs`` has multiply-adds by the network's name.
    """

    def accuracy(name: str, branch: str, trial: int) -> float:
        for start, more in (leads or {}).items():
            cell, _, of = start.partition(":")
            if name.startswith(cell) and branch == of:
                return 90 + more + noise(trial)
        return 90.0

    def stage(name: str, branch: str, cell: TokenCell, epochs: int) -> Stage:
        images = epochs * (cell.samples or 50_000)
        own = macs.get(branch, macs.get(name.split("/")[1], 1000))
        return Stage(accuracy(name, branch, cell.trial), own, images)

    results: dict[str, object] = {"costs": {name: 1000.0 for pair in COMPARED_COSTS for name in pair}}
    for name, cell in PLAN.items():
        if isinstance(cell, TokenCell):
            branches = {each.name: stage(name, each.name, cell, each.recipe.epochs) for each in cell.branches}
            results[name] = TokenResult(stage(name, "", cell, cell.recipe.epochs), branches)
    return ExperimentResults(PLAN, results, runner())


def evaluated(id: str, given: ExperimentResults[object]) -> CheckResult:
    return CLAIMS[id].evaluate(given)


def decision(id: str, given: ExperimentResults[object]) -> str:
    return evaluated(id, given).verdict.partition(":")[0]


def led(id: str, lead: float) -> ExperimentResults[object]:
    return experiment(dict.fromkeys(OURS[id], lead))


# Rules


@pytest.mark.parametrize("id", AHEAD)
def test_being_ahead_is_a_lead_whose_interval_is_above_zero(id: str):
    assert [decision(id, led(id, lead)) for lead in (2.0, -2.0, 0.1)] == ["holds", "fails", "undecided"]
    assert evaluated(id, led(id, 2.0)).measured == pytest.approx(2.0)


@pytest.mark.parametrize("id", LOSSLESS)
def test_losing_nothing_is_losing_less_than_a_point(id: str):
    assert [decision(id, led(id, lead)) for lead in (0.0, 2.0, -3.0, -1.0)] == ["holds", "holds", "fails", "undecided"]
    assert evaluated(id, led(id, -3.0)).measured == pytest.approx(-3.0)


@pytest.mark.parametrize("id", ["moe-ahead", "soft-moe-ahead", "split-ahead", "skip-ahead"])
def test_a_network_that_costs_more_than_its_peer_is_ahead_in_part(id: str):
    arm = {"moe-ahead": "moe", "soft-moe-ahead": "soft", "split-ahead": "split", "skip-ahead": "skip"}[id]
    leads = dict.fromkeys(OURS[id], 2.0)
    assert evaluated(id, experiment(leads, **{arm: 1010})).verdict == "holds"
    assert evaluated(id, experiment(leads, **{arm: 1020})).verdict == "partly: at 1.02 times the peer's multiply-adds"
    assert decision(id, experiment(dict.fromkeys(OURS[id], -2.0), **{arm: 1020})) == "fails"


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_upcycling_is_compared_with_both_ways_to_train_longer(kind: str):
    upcycled = {f"{kind}/dense/:upcycled": 2.0}
    longer = evaluated(f"upcycle-{kind}", experiment({**upcycled, f"{kind}/longer/": 5.0}))
    assert longer.verdict == "partly: clearly ahead at 1 of 2 ways to train longer, clearly behind at 1"
    assert longer.measured == pytest.approx(-3.0)
    continued = experiment({**upcycled, f"{kind}/dense/:continued": 5.0})
    assert decision(f"upcycle-{kind}", continued) == "partly"


def test_upcycling_at_more_training_compute_is_ahead_in_part():
    leads = {"vit/dense/:upcycled": 2.0}
    # a third of the images are those of the branch
    assert evaluated("upcycle-vit", experiment(leads, upcycled=1020)).verdict == "holds"
    expected = "partly: at 1.02 times the peer's training compute"
    assert evaluated("upcycle-vit", experiment(leads, upcycled=1060)).verdict == expected


def test_labels_are_saved_where_the_lead_is_clear_at_every_number_of_labels():
    few = experiment({"labels/vit/routed/1000/": 2.0, "labels/vit/routed/4000/": -2.0})
    assert evaluated("labels-vit", few).verdict == (
        "partly: clearly ahead at 1 of 2 numbers of labels, clearly behind at 1"
    )
    one = experiment({"labels/vit/routed/1000/": 2.0})
    assert evaluated("labels-vit", one).verdict == "undecided: clearly ahead at 1 of 2 numbers of labels"


def test_a_vit_gains_as_much_as_a_cnn_unless_the_cnn_gains_more():
    assert decision("labels-alike", experiment({"labels/wrn/routed/": 4.0})) == "fails"
    assert decision("labels-alike", experiment({"labels/wrn/routed/": 4.0, "labels/vit/routed/": 4.0})) == "holds"


def test_costs_are_equal_within_a_percent(costs: dict[str, int]):
    given = experiment()
    assert evaluated("equal-costs", given) == CheckResult("holds", 0.0)
    more = replace(given, results={"costs": {**given.results["costs"], "moe": 1011.0}})  # type: ignore[dict-item]
    assert evaluated("equal-costs", more).verdict == "partly: not in 1 of 6 comparisons"
    dear = {name: 1100.0 if name in dict(COMPARED_COSTS) else 1000.0 for name in given.results["costs"]}  # type: ignore[attr-defined]
    assert decision("equal-costs", replace(given, results={"costs": dear})) == "fails"
    counted = evaluated("equal-costs", replace(given, results={"costs": costs}))
    assert counted.verdict == "holds"
    assert counted.measured == pytest.approx(0.48, abs=0.01)


def test_split_does_half_of_the_work_of_the_mlps(costs: dict[str, int]):
    mlps = 2 * (costs["dense"] - costs["narrow"])
    routers = 12 * 192 * 8 * 64
    assert costs["split"] == costs["dense"] - mlps // 2 + routers
    assert costs["skip"] < costs["shallow"] < costs["dense"]


# The plan


def test_costs_are_counted_everywhere_and_the_rest_needs_another_preset():
    assert list(plan("quick", "best")) == ["costs"]
    assert plan("full", "print") == plan("short", "released") == {}
    for id in TRAINED:
        assert not CLAIMS[id].can_run(plan("quick", "best"), "quick"), id
        for preset in SIZES:
            assert CLAIMS[id].can_run(plan(preset, "best"), preset), id
    read = {name for check in CHECKS for name in check.cells(PLAN)}
    assert read == set(PLAN)


def test_claims_have_three_trials_at_least_in_all_arms():
    for preset in SIZES:
        counts: dict[str, int] = {}
        for name, cell in plan(preset, "best").items():
            if isinstance(cell, TokenCell):
                counts[name.rpartition("/")[0]] = counts.get(name.rpartition("/")[0], 0) + 1
        assert min(counts.values()) >= 3


def test_networks_that_are_compared_train_equally_long():
    def epochs(name: str, branch: str = "") -> int:
        cell = PLAN[f"{name}/0"]
        assert isinstance(cell, TokenCell)
        return cell.recipe.epochs + sum(each.recipe.epochs for each in cell.branches if each.name == branch)

    assert len({epochs(f"vit/{name}") for name in ("dense", "moe", "soft", "skip", "shallow")}) == 1
    assert epochs("vit/dense", "split") == epochs("vit/dense", "tuned") == epochs("vit/narrow") == 220
    for kind in ("vit", "resnet"):
        assert epochs(f"{kind}/dense", "upcycled") == epochs(f"{kind}/dense", "continued") == epochs(f"{kind}/longer")
    for name, cell in PLAN.items():
        if isinstance(cell, TokenCell):
            assert cell.recipe == vit_recipe(cell.recipe.epochs), name
            assert all(each.recipe == vit_recipe(each.recipe.epochs, FINE_TUNING_LR) for each in cell.branches)
            if cell.samples is not None:
                assert cell.recipe.epochs * cell.samples == SIZES["full"].label_images


def test_networks_share_recipe_and_seed_and_differ_by_what_is_compared():
    for name, (model, options) in VIT_ARMS.items():
        cell = PLAN[f"vit/{name}/1"]
        assert isinstance(cell, TokenCell)
        assert (cell.network, cell.options, cell.trial, cell.samples) == (model, options, 1, None)
    labelled = {
        cell.samples for name, cell in PLAN.items() if name.startswith("labels/") and isinstance(cell, TokenCell)
    }
    assert labelled == set(LABELS)


def test_a_claim_that_was_not_run_tells_what_it_needs_and_the_estimated_hours():
    assert gpu_hours([TokenCell("a", 0, vit_recipe(36), branches=(Branch("b", vit_recipe(36)),))]) == pytest.approx(0.1)
    check = CLAIMS["moe-ahead"]
    short, full = (gpu_hours(check.cells(plan(preset, "best")).values()) for preset in ("short", "full"))
    assert 5 < full / short < 20
    assert check.missing == (
        "not run here: needs --preset short or full, --device cuda and CIFAR-10, "
        f"about {short:.1g} or {full:.1g} GPU hours (estimated)"
    )


# Charts and stored trials


def test_charts_show_accuracy_against_cost_labels_and_training():
    drawn = {chart.id: chart for chart in charts({"best": experiment({"vit/moe/": 1.0}, moe=1005)})}
    assert set(drawn) == {"token-accuracy-cost", "token-labels", "token-upcycling"}
    assert {chart.where for chart in drawn.values()} <= {check.claim.where for check in CHECKS}
    [panel] = drawn["token-accuracy-cost"].panels
    points = {line.label: line for line in panel.series}
    assert len(points) == len(VIT_ARMS) + 1
    assert (points["mixtures of experts"].x, points["mixtures of experts"].y) == ((0.001005,), (91.0,))
    assert [len(panel.series) for panel in drawn["token-labels"].panels] == [2, 2]
    assert drawn["token-labels"].panels[0].series[0].x == LABELS
    [line, *_] = drawn["token-upcycling"].panels[0].series
    assert line.x == (10.0, 15.0)
    assert drawn["token-upcycling"].panels[0].series[-1].x == (15.0,)


def test_without_results_there_are_no_charts():
    empty = replace(experiment(), results={})
    assert charts({"best": empty}) == charts({}) == []


def test_stored_trials_have_what_claims_read():
    stage = {"accuracy": 80.0, "training": [50.0, 70.0], "losses": [2.0, 1.0], "macs": 5, "images": 9, "seconds": 1.0}
    stored = {"base": stage, "branches": {"split": stage}}
    cell: Cell[TokenResult] = TokenCell("a", 0, vit_recipe(2))
    short = compact("vit/dense/0", stored)
    assert short["base"]["losses"] == [1.0]
    assert cell.result(dict(short)) == cell.result(stored)
    assert compact("costs", {"dense": 1}) == {"dense": 1}


def test_claims_are_of_our_own():
    assert PAPER.claims
    for claim in PAPER.claims:
        assert (claim.paper, claim.published) == (PAPER.id, None)
