"""Claims on widths, separations, iterations and several classes: each at the limits of its rule."""

import numpy as np
import pytest

from moesaic.papers.chowdhury2023.claims_complexity import CHECKS
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    CNN_WIDTHS,
    SEPARATION_SAMPLES,
    SEPARATIONS,
    ExperimentResults,
    Plan,
    Result,
)
from moesaic.papers.chowdhury2023.paper import PAPER
from moesaic.papers.engine.decision_rules import CheckResult

CLAIMS = {check.claim.id: check for check in CHECKS}
JITTER = np.linspace(-0.2, 0.2, 6)


def result(accuracy: float, epochs: float = 10.0, **more) -> Result:
    return Result(accuracy + JITTER, np.full(6, epochs), np.zeros(6), **more)


def evaluated(claim: str, results: dict[str, Result]) -> CheckResult:
    plan: Plan = dict.fromkeys(results, next(iter(PAPER.plan("quick", "print").values())))
    assert CLAIMS[claim].can_run(plan)
    return CLAIMS[claim].evaluate(ExperimentResults(plan, results, None))  # type: ignore[arg-type]


def decision(found: CheckResult) -> str:
    return found.verdict.partition(":")[0]


def test_the_short_preset_decides_them_as_printed():
    for check in CHECKS:
        assert check.fidelities == (("print", "released") if check.claim.id == "fig6-split" else ("print",))
        assert check.can_run(PAPER.plan("short", "print"), "short")
        assert check.can_run(PAPER.plan("quick", "print"), "quick") == (check.claim.id == "table1-iterations")


def widths(cnn: tuple[float, ...], narrow: float, wide: float) -> dict[str, Result]:
    found = {f"width/cnn/{m}": result(value) for m, value in zip(CNN_WIDTHS, cnn, strict=True)}
    noise = np.array([0.3, -0.3, 0.1, -0.1, 0.2, -0.2])
    for m, value in ((16, narrow), (40, wide)):
        found[f"width/joint/{m}"] = Result(value + JITTER + noise, np.full(6, 10.0), np.zeros(6))
    return found


@pytest.mark.parametrize(("narrow", "verdict"), [(92, "holds"), (90.01, "undecided"), (88, "fails")])
def test_fewer_neurons_suffice_where_the_narrow_pmoe_is_ahead(narrow: float, verdict: str):
    found = evaluated("finding2-fewer-neurons", widths((90, 91, 92), narrow, 95))
    assert (decision(found), found.measured) == (verdict, pytest.approx(narrow - 90))


@pytest.mark.parametrize(("wide", "verdict"), [(95, "holds"), (92.01, "undecided"), (91, "partly"), (89, "fails")])
def test_wider_cnns_do_not_close_the_gap_where_all_are_behind(wide: float, verdict: str):
    found = evaluated("abstract-larger-cnn", widths((90, 90.5, 92), 0, wide))
    assert (decision(found), found.measured) == (verdict, pytest.approx(wide - 92))


@pytest.mark.parametrize("kind", ["separate", "joint"])
@pytest.mark.parametrize(
    ("needed", "verdict"),
    [
        ((20, 40, 80, 160), "holds"),
        ((40, 40, 40, 40), "fails: it does not grow"),
        ((160, 80, 40, 20), "fails: it does not grow"),
        ((10, 10, 10, 20), "undecided: only 1 of 4 settings"),
        ((10, 9999, 9999, 9999), "undecided: only 0 of 4 settings"),
    ],
)
def test_the_samples_that_are_needed_grow_with_delta(kind: str, needed: tuple[int, ...], verdict: str):
    results = {
        f"delta-{kind}/r={delta}/{n}": result(96 if n >= least else 90)
        for delta, least in zip(SEPARATIONS, needed, strict=True)
        for n in SEPARATION_SAMPLES
    }
    assert evaluated(f"finding3-{kind}", results).verdict.startswith(verdict)


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "holds"), (0.0, "fails"), (-1.0, "fails"), (5.0, "fails")])
def test_iterations_grow_with_l_but_not_faster_than_the_fourth_power(power: float, verdict: str):
    results = {f"fig5/l={l}/{n}": result(90, epochs=8 * l**power) for l in (2, 4, 8) for n in (100, 300)}
    found = evaluated("table1-iterations", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(power, abs=1e-6))


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "holds"), (0.9, "fails")])
def test_routers_of_several_classes_are_judged_by_the_worst_class(share: float, verdict: str):
    routed = np.ones((6, 4, 16))
    routed[:, 2, 0] = share
    assert decision(evaluated("sectionM-routers", {"classes/separate/2000": result(90, routed=routed)})) == verdict
    routed[:3, 2, 0] = 0.98
    assert decision(evaluated("sectionM-routers", {"classes/separate/2000": result(90, routed=routed)})) in (
        "undecided",
        "fails",
    )


@pytest.mark.parametrize(("joint", "verdict"), [(96, "holds"), (95.1, "undecided"), (90, "fails")])
def test_several_classes_are_learnt_where_the_worse_of_both_is_accurate(joint: float, verdict: str):
    results = {"classes/separate/2000": result(99), "classes/joint/2000": result(joint)}
    found = evaluated("sectionM-accuracy", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(joint))


@pytest.mark.parametrize(("slope", "verdict"), [(-1.0, "holds"), (1.0, "fails: accuracy rises"), (0.0, "undecided")])
@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_experts_that_share_their_neurons_lose_if_accuracy_falls_with_their_number(slope, verdict, fidelity):
    cells = {name: cell for name, cell in PAPER.plan("short", fidelity).items() if name.startswith("split/")}
    assert {name: (cell.model.experts, cell.model.neurons, cell.samples) for name, cell in cells.items()} == {
        "split/N=500/8": (8, 5, 500),
        "split/N=500/20": (20, 2, 500),
        "split/N=500/40": (40, 1, 500),
    }
    results = {
        name: Result(90 + slope * np.log2(cell.model.experts) * (1 + 0.1 * JITTER), np.full(6, 10.0), np.zeros(6))
        for name, cell in cells.items()
    }
    if not slope:
        results["split/N=500/8"] = Result(90 + JITTER, np.full(6, 10.0), np.zeros(6))
    (check,) = (check for check in CHECKS if check.claim.id == "fig6-split")
    found = check.evaluate(ExperimentResults(cells, results, None, fidelity=fidelity))
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(slope, abs=0.2)
