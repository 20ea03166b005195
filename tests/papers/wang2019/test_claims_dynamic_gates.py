"""Gates that depend on the image against controls: the plan, the rules at their limits, charts and the table."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.models import create_model
from moesaic.models.model_cost import count_macs
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019.claims_dynamic_gates import CHECKS, GPU_HOURS, leads, static_leads
from moesaic.papers.wang2019.experiments_dynamic_gates import (
    ARMS,
    DEPENDENT,
    FULL_EPOCHS,
    NETWORKS,
    TRIALS,
    networks_of,
    plan,
)
from moesaic.papers.wang2019.experiments_vgg16 import VGG16_MACS, GateResult
from moesaic.papers.wang2019.figures_dynamic_gates import LEADS, QUANTITIES, arms_table, charts
from moesaic.training import NoProgress, ResultCache

CLAIMS = {check.claim.id.removeprefix("equal-cost-"): check for check in CHECKS}
PLAN = plan("full", "best")
W13_COST = 1 / 0.3841302206107252


def test_the_full_preset_has_every_arm_network_and_trial_and_the_quick_one_none():
    assert len(PLAN) == (len(ARMS) + 2) * len(NETWORKS) * TRIALS == 108
    assert len(set(PLAN.values())) == 102  # the two VGG-16 share the one in full, and that at a quarter
    assert {cell.recipe.epochs for cell in PLAN.values()} == {FULL_EPOCHS}
    assert {cell.recipe.optimizer for cell in PLAN.values()} == {"sgd"}
    assert plan("quick", "best") == plan("full", "print") == {}
    short = plan("short", "best")
    assert {name.split("/")[2] for name in short} == {"vgg16-0.25"}
    for check in CHECKS:
        assert check.can_run(PLAN)
        assert check.can_run(short, "short")
        assert "GPU hours" in check.missing
    assert {name for check in CHECKS for name in check.cells(PLAN)} == set(PLAN)
    assert GPU_HOURS.keys() == {"dense", "narrow", *ARMS}


def test_arms_differ_in_what_they_are_named_for():
    def options(arm: str) -> dict[str, object]:
        return dict(PLAN[f"equal-cost/{arm}/w13-all/0"].options)

    steered, constant = (PLAN[f"equal-cost/{arm}/w13-all/0"] for arm in ("steered", "constant"))
    assert steered.recipe == constant.recipe
    assert options("constant")["embedding_share"] == 0
    assert options("hard").items() >= {"mode": "hard", "center_embedding": True}.items()
    assert options("printed")["bias"] is None
    shaped, hard = (PLAN[f"equal-cost/{arm}/vgg16-0.5/0"].recipe.gates for arm in ("shaped", "hard"))
    assert shaped is not None
    assert hard is not None
    assert (shaped.shaping_weight, hard.shaping_weight) == (1.0, 0.0)
    assert {arm.control for name, arm in ARMS.items() if name in DEPENDENT} == {"constant", "constant-hard"}
    for name, cell in PLAN.items():
        assert bool(cell.teacher) == ("teacher" in name)
        assert (cell.recipe.gates is None) == (name.split("/")[1] in ("static", "dense", "narrow", "static-teacher"))


@pytest.mark.parametrize("network", NETWORKS)
def test_all_arms_of_a_network_are_brought_to_the_same_cost(network: str):
    static = PLAN[f"equal-cost/static/{network}/0"]
    model = create_model(static.network, num_classes=10, **dict(static.options))
    assert count_macs(model, (3, 32, 32)).macs / VGG16_MACS == pytest.approx(NETWORKS[network].cost, rel=0.01)
    gates = PLAN[f"equal-cost/steered/{network}/0"].recipe.gates
    assert gates is not None
    assert gates.target_macs is not None
    dense = W13_COST if network == "w13-all" else 1.0
    assert gates.target_macs * dense == pytest.approx(NETWORKS[network].cost)


# rules


def made(accuracy: float, cost: float, *, training: float = 95.0, **more: float) -> GateResult:
    usage = np.array([[10.0, 10.0, 80.0]])
    return GateResult(accuracy, np.array([training]), cost * VGG16_MACS, 0.0, VGG16_MACS, usage, 0.1, 0.2, 1.0, **more)


def experiment(
    lead: Callable[[str, int], float] = lambda arm, pair: 0.0, cost: float = 1.0, preset: str = "full"
) -> ExperimentResults[GateResult]:
    """All arms on one curve of accuracy over cost, which bends with the network; ``lead(arm, pair)`` is added."""
    cells = plan(preset, "best")
    results: dict[str, GateResult] = {}
    for name in cells:
        _, arm, network, trial = name.split("/")
        at = NETWORKS[network].cost * (cost if arm in DEPENDENT else 1.0)
        if arm == "narrow":
            at /= 2
        if arm == "dense":
            at = W13_COST if network == "w13-all" else 1.0
        pair = list(NETWORKS).index(network) * TRIALS + int(trial)
        more = {} if arm in ("static", "dense", "narrow") else {"differing": 12.0, "entropy": 0.3}
        results[name] = made(90 + 2 * np.log(at) + 0.1 * int(trial) + lead(arm, pair), at, **more)
    runner = Runner(ResultCache(Path("nowhere")), None, device="cpu", seed=0, progress=NoProgress())
    return ExperimentResults(cells, results, runner)


def noisy(*arms: str, lead: float, spread: float = 0.1) -> Callable[[str, int], float]:
    return lambda arm, pair: lead + spread * (pair % 3 - 1) if arm in arms else 0.0


def evaluated(id: str, *given: object, **more: object) -> CheckResult:
    return CLAIMS[id].evaluate(experiment(*given, **more))  # pyright: ignore[reportArgumentType]


def test_a_lead_is_over_a_static_network_of_the_cost_that_was_measured():
    cheaper = experiment(noisy("steered", lead=1.0, spread=0.0), cost=1.1)
    for network in NETWORKS:
        assert static_leads(cheaper, "steered", network) == pytest.approx([1.0] * TRIALS)
    assert leads(cheaper, "steered", "constant") == pytest.approx([1.0] * 9)
    assert leads(cheaper, "steered", "static") == pytest.approx([1.0] * 9)
    half = experiment(noisy("steered", lead=1.0, spread=0.0), cost=0.7)
    assert static_leads(half, "steered", "w13-all") == pytest.approx([1.0] * TRIALS)
    below = static_leads(experiment(cost=0.4), "steered", "vgg16-0.25")  # none is narrower than at half of the cost
    assert below == pytest.approx([2 * np.log(0.8)] * TRIALS)


@pytest.mark.parametrize(
    ("lead", "spread", "verdict"),
    [
        (1.0, 0.1, "holds: hard"),
        (0.3, 0.1, "holds: hard"),
        (0.0, 0.1, "fails: "),
        (-1.0, 0.1, "fails: "),
        (0.3, 0.6, "undecided: the interval of hard has both 0 and 0.5"),
    ],
)
def test_dependence_on_the_image_helps_where_one_form_is_ahead_of_its_control(lead, spread, verdict):
    found = evaluated("depends", noisy("hard", lead=lead, spread=spread))
    assert found.verdict.startswith(verdict)
    if lead > 0:
        assert found.measured == pytest.approx(lead)


def test_nothing_is_judged_on_a_network_that_failed_to_train():
    found = experiment(noisy("hard", lead=1.0))
    broken = {**found.results, "equal-cost/hard/w13-all/1": made(10.0, 1.0, training=11.0)}
    judged = {id: CLAIMS[id].evaluate(replace(found, results=broken)) for id in ("depends-hard", "depends", "teacher")}
    for id in ("depends-hard", "depends"):
        assert judged[id] == CheckResult("undecided: networks that failed to train: hard/w13-all/1")
    assert judged["teacher"].verdict == "fails"  # of other networks


def test_the_best_of_five_forms_has_a_wider_interval_than_one_alone():
    lead = noisy("hard", lead=0.3, spread=0.3)
    many, one = evaluated("depends", lead).interval, evaluated("depends-hard", lead).interval
    assert many is not None
    assert one is not None
    # Student's quantiles of eight degrees of freedom at 99 and 95 %
    assert (many[1] - many[0]) / (one[1] - one[0]) == pytest.approx(3.3554 / 2.3060, rel=1e-3)


@pytest.mark.parametrize("arm", DEPENDENT)
def test_a_form_is_judged_against_the_control_of_its_own_recipe(arm: str):
    control, other = ARMS[arm].control, "constant" if ARMS[arm].control == "constant-hard" else "constant-hard"
    id = f"depends-{arm}"
    assert evaluated(id, noisy(arm, lead=1.0)).verdict == "holds"
    assert evaluated(id, noisy(arm, control, lead=1.0)).verdict == "fails"
    assert evaluated(id, noisy(arm, other, lead=1.0)).verdict == "holds"
    assert evaluated(id, noisy(arm, lead=0.3, spread=0.6)).verdict == "undecided: the interval has both 0 and 0.5"


def test_static_networks_learned_widths_teachers_and_the_default_have_their_own_sides():
    assert evaluated("static", noisy("shaped", lead=1.0)).verdict == "holds: shaped"
    assert evaluated("static", noisy("constant", lead=1.0)).verdict.startswith("fails")
    assert evaluated("learned-widths", noisy("constant", lead=1.0)).verdict == "holds: constant"
    assert evaluated("learned-widths", noisy("shaped", lead=1.0)).verdict.startswith("fails")
    assert evaluated("teacher", noisy("gates-teacher", lead=1.0)).verdict == "holds"
    assert evaluated("teacher", noisy("gates-teacher", "static-teacher", lead=1.0)).verdict == "fails"
    assert evaluated("default", noisy("constant", lead=1.0)).verdict == "holds: constant"
    assert evaluated("default", noisy("steered", lead=1.0)).verdict.startswith("fails")


def test_costs_are_met_within_five_percent_apart_from_the_printed_form():
    assert evaluated("met").verdict == "holds"
    missed = evaluated("met", cost=1.06)
    assert missed.verdict == "partly: not in 36 of 63 runs"
    assert missed.measured == pytest.approx(6)


def test_the_short_preset_judges_one_network():
    found = experiment(noisy("hard", lead=2.0), preset="short")
    assert networks_of(found) == ["vgg16-0.25"]
    assert len(leads(found, "hard", "constant-hard")) == TRIALS
    assert CLAIMS["depends-hard"].evaluate(found).verdict == "holds"


# charts


def test_charts_and_the_table_show_every_arm():
    drawn = {chart.id: chart for chart in charts(experiment(noisy("hard", lead=1.0)))}
    assert drawn.keys() == {LEADS, QUANTITIES}
    assert [len(panel.series) for panel in drawn[LEADS].panels] == [len(ARMS) - 1] * 3
    rows = arms_table(list(drawn.values())).splitlines()
    assert len(rows) == 2 + len(NETWORKS) * len(ARMS)
    hard = next(row for row in rows if row.startswith("| VGG-16 at 0.5 | hard gates |"))
    assert hard.split(" | ")[2:] == ["89.7 ± 0.2", "0.5 ± 0", "–", "12 ± 0", "0.3 ± 0", "– |"]
    assert "not run here" in arms_table([])
    assert charts(experiment(preset="quick")) == []
