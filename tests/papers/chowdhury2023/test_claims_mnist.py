"""The ledger of Chowdhury et al. 2023: every claim can be decided, by its rule and by nothing else."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic import keyed_random
from moesaic.paper_fidelity import Fidelity
from moesaic.papers.chowdhury2023 import claims_theory, experiments_two_layer
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitPatches
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    SIZES,
    ClaimCheck,
    ExperimentResults,
    Plan,
    Result,
    SuggestionCell,
    TwoLayerCell,
)
from moesaic.papers.chowdhury2023.paper import PAPER
from moesaic.papers.chowdhury2023.theory.complexity_bounds import error_at_fixed_samples
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.reproduce import PAPERS

CHECKS = {test.claim.id: test for test in PAPER.checks}


def result(accuracy: float = 90.0, *, epochs: float = 10, spread: float = 0.5, trials: int = 20, **more) -> Result:
    """Trials around a value; the same deviations every time, as trials share their data."""
    deviation = spread * np.random.default_rng(7).normal(size=trials)
    return Result(accuracy + deviation - deviation.mean(), np.full(trials, float(epochs)), np.zeros(trials), **more)


def evaluated(claim: str, results: dict[str, Result]) -> CheckResult:
    plan: Plan = dict.fromkeys(results, next(iter(PAPER.plan("quick", "print").values())))
    test = CHECKS[claim]
    assert test.can_run(plan)
    return test.evaluate(ExperimentResults(plan, results, runner=None))  # type: ignore[arg-type]


def test_the_paper_is_known_by_its_id():
    assert PAPERS["chowdhury2023"] is PAPER


def test_every_figure_has_claims_and_ids_are_unique():
    assert len(CHECKS) == len(PAPER.checks)
    places = {claim.where for claim in PAPER.claims}
    assert {f"Figure {number}" for number in range(4, 10)} < places
    for claim in PAPER.claims:
        assert claim.paper == "chowdhury2023"
        assert "olds" in claim.rule, f"{claim.id}: the rule does not say when it holds"
        assert claim.statement.endswith(".")


@pytest.mark.parametrize("test", PAPER.checks, ids=CHECKS)
def test_the_full_preset_decides_every_claim(test: ClaimCheck):
    for fidelity in test.fidelities:
        assert test.can_run(PAPER.plan("short", fidelity))


def test_the_full_preset_has_the_papers_sizes():
    full = SIZES["short"]
    assert full.fig4 == (100, 300, 500, 700, 900, 1000)
    assert full.trials >= 5
    assert full.fig5_trials == 20
    cells = PAPER.plan("short", "print")
    joint, separate, cnn = (cells[f"fig4/{line}/300"].model for line in ("joint", "separate", "cnn"))
    assert (joint.experts, joint.patches_per_expert, joint.neurons) == (8, 6, 5)
    assert (separate.experts, separate.patches_per_expert, separate.neurons) == (2, 2, 20)
    assert cnn.neurons == 40
    assert all(cell.test_samples == 1000 for name, cell in cells.items() if name.startswith("fig"))
    assert all(cell.schedule.learning_rate == 0.2 for name, cell in cells.items() if name.startswith("fig"))


@pytest.mark.parametrize("preset", SIZES)
def test_figures_share_the_cells_they_have_in_common(preset: str):
    cells = PAPER.plan(preset, "print")
    assert cells["fig4/joint/300"] == cells["fig6/N=300/8"] == cells["fig7/N=300/6"]
    assert cells["fig4/joint/300"] != cells["fig4/joint/100"]


@pytest.mark.parametrize(
    ("leads", "verdict", "shown"),
    [
        ((2, 1, 3), "holds", 1),
        ((2, 0.01, 3), "undecided", 0.01),
        ((-1, -0.5, 0.01), "fails", -1),
        ((2, -3, 1), "partly", -3),
    ],
)
def test_who_is_ahead(leads: tuple[float, ...], verdict: str, shown: float):
    results: dict[str, Result] = {}
    for n, lead in zip((100, 300, 500), leads, strict=True):
        base = result(90)
        jitter = 0.3 * np.random.default_rng(n).normal(size=20)
        results[f"fig4/cnn/{n}"] = base
        results[f"fig4/joint/{n}"] = replace(base, accuracy=base.accuracy + lead + jitter - jitter.mean())
    found = evaluated("fig4-joint-ahead", results)
    assert (found.verdict.partition(":")[0], found.measured) == (verdict, pytest.approx(shown))


@pytest.mark.parametrize(
    ("ours", "spread", "verdict"),
    [
        ((94, 96, 97), 0.1, "holds"),
        ((91, 94, 96), 0.1, "fails"),
        ((93, 95.86, 97), 2.0, "undecided"),
        ((90, 96.02, 97), 0.01, "fails"),  # at 266 of 400: more than 60 %
        ((90, 98, 99), 0.01, "holds"),  # at 225
    ],
)
def test_how_many_samples_are_needed(ours: tuple[float, ...], spread: float, verdict: str):
    sizes, cnn = (100, 300, 500), (90, 94, 96)  # the CNN is there at 400
    results = {f"fig4/cnn/{n}": result(a, spread=0.1) for n, a in zip(sizes, cnn, strict=True)}
    results |= {f"fig4/joint/{n}": result(a, spread=spread) for n, a in zip(sizes, ours, strict=True)}
    assert evaluated("fig4-joint-samples", results).verdict.partition(":")[0] == verdict


def test_a_cnn_that_never_arrives_counts_with_the_largest_size():
    sizes = (100, 300, 500)
    results = {f"fig4/cnn/{n}": result(80, spread=0.1) for n in sizes}
    results |= {f"fig4/joint/{n}": result(a, spread=0.01) for n, a in zip(sizes, (90, 94, 96), strict=True)}
    assert evaluated("fig4-joint-samples", results).measured == pytest.approx(400 / 500)


def test_a_network_that_never_arrives_fails():
    results = {f"fig4/{line}/{n}": result(90 + n / 100) for line in ("cnn", "joint") for n in (100, 300, 500)}
    results |= {f"fig4/joint/{n}": result(80) for n in (100, 300, 500)}
    found = evaluated("fig4-joint-samples", results)
    assert found.verdict == "fails: 95 % is never reached here"
    assert found.measured == np.inf


@pytest.mark.parametrize(("cnn", "verdict"), [(100, "holds"), (40, "holds"), (39, "fails")])
def test_who_is_faster(cnn: float, verdict: str):
    results = {f"fig4/separate/{n}": result(epochs=5) for n in (100, 300)}
    results |= {f"fig4/joint/{n}": result(epochs=20) for n in (100, 300)}  # the slower one counts
    results |= {f"fig4/cnn/{n}": result(epochs=cnn) for n in (100, 300)}
    found = evaluated("fig4-faster", results)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(cnn / 20))


@pytest.mark.parametrize(("exponent", "verdict"), [(1.0, "holds"), (-1.0, "fails")])
def test_how_samples_grow_with_patches(exponent: float, verdict: str):
    results: dict[str, Result] = {}
    for l, n in itertools.product((2, 4, 8), (50, 100, 200, 400, 800)):
        needed = 100 * (l / 2) ** exponent if exponent > 0 else 400 * (l / 2) ** exponent
        results[f"fig5/l={l}/{n}"] = result(96 if n >= needed else 90)
    found = evaluated("fig5-polynomial", results)
    assert found.verdict.partition(":")[0] == verdict
    assert found.measured == pytest.approx(exponent, abs=0.2)


@pytest.mark.parametrize(
    ("needed", "verdict", "shown"),
    [
        ((100, 25000), "holds", 7.97),
        ((100, 25800), "fails: it grows faster", 8.02),  # steeper than Theorem 4.2 allows
    ],
)
def test_samples_grow_with_a_power_of_at_most_eight(needed: tuple[int, int], verdict: str, shown: float):
    results: dict[str, Result] = {}
    for l, at in zip((2, 4), needed, strict=True):
        for n in (50, 99, 100, 24999, 25000, 25799, 25800, 30000):
            results[f"fig5/l={l}/{n}"] = result(95.0 if n >= at else 94.99, spread=0)
    found = evaluated("fig5-polynomial", results)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(shown, abs=0.005))


def test_growth_that_may_be_none_is_undecided():
    results = {f"fig5/l=2/{n}": result(96 if n >= 110 else 90) for n in (50, 100, 110, 200)}
    half = replace(result(), accuracy=np.where(np.arange(20) % 2 == 0, 96.0, 90.0))  # of the trials succeed
    results |= {"fig5/l=4/50": result(90), "fig5/l=4/100": half, "fig5/l=4/110": half, "fig5/l=4/200": result(96)}
    assert evaluated("fig5-polynomial", results).verdict == "undecided: the interval lies on both sides of 0.1"


@pytest.mark.parametrize(
    ("level", "verdict"),
    [(110, "fails: it does not grow"), (50, "undecided: only 0 of 2 settings need"), (999, "undecided: only 0 of 2")],
)
def test_samples_that_do_not_grow_at_all_are_no_polynomial_growth(level: int, verdict: str):
    results = {f"fig5/l={l}/{n}": result(96 if n >= level else 90) for l in (2, 4) for n in (50, 100, 110, 200)}
    assert evaluated("fig5-polynomial", results).verdict.startswith(verdict)


@pytest.mark.parametrize("figure", ["fig6", "fig7"])
@pytest.mark.parametrize(("slope", "verdict"), [(-1.0, "holds"), (0.0, "undecided"), (1.0, "fails")])
def test_what_falls(figure: str, slope: float, verdict: str):
    places = (2, 8, 16, 32) if figure == "fig6" else (2, 6, 10, 16)
    results: dict[str, Result] = {}
    for x in places:
        jitter = np.random.default_rng(x).normal(size=20)
        base = result(90 + slope * (np.log2(x) if figure == "fig6" else x))
        results[f"{figure}/N=300/{x}"] = replace(base, accuracy=base.accuracy + 0.2 * (jitter - jitter.mean()))
    results[f"{figure}/N=300/{places[0]}"] = result(0)  # before the threshold, so it must not count
    found = evaluated(f"{figure}-falls", results)
    assert (found.verdict.partition(":")[0], found.measured) == (verdict, pytest.approx(slope, abs=1e-6))


@pytest.mark.parametrize(("exponent", "verdict"), [(0.375, "holds"), (0.8, "partly"), (-0.3, "fails")])
def test_the_order_of_the_error(exponent: float, verdict: str):
    results = {f"fig7/N=300/{l}": result(100 - 3 * l**exponent, spread=0.1) for l in (2, 6, 10, 16)}
    for l in (6, 10, 16):
        jitter = 0.2 * np.random.default_rng(l).normal(size=20)
        results[f"fig7/N=300/{l}"] = replace(
            results[f"fig7/N=300/{l}"], accuracy=results[f"fig7/N=300/{l}"].accuracy + jitter - jitter.mean()
        )
    found = evaluated("fig7-order", results)
    assert (found.verdict.partition(":")[0], found.measured) == (verdict, pytest.approx(exponent, abs=0.02))


@pytest.mark.parametrize(("figure", "published"), [("fig6", 0.25), ("fig7", 0.375)])
def test_the_published_orders_are_those_of_theorem_4_5(figure: str, published: float):
    letter = {"fig6": "k", "fig7": "l"}[figure]
    assert (
        dict(error_at_fixed_samples("joint").powers)[letter] == published == CHECKS[f"{figure}-order"].claim.published
    )
    results: dict[str, Result] = {}
    for x in (8, 16, 32):
        jitter = 0.1 * np.random.default_rng(x).normal(size=20)
        accuracy = 100 - 3 * x**published + jitter - jitter.mean()
        results[f"{figure}/N=300/{x}"] = replace(result(), accuracy=accuracy)
    assert evaluated(f"{figure}-order", results).verdict == "holds"


def test_an_order_that_could_be_anything_does_not_hold():
    results = {f"fig7/N=300/{l}": result(100 - 3 * l**0.375) for l in (6, 10, 16)}
    for l in (6, 10, 16):
        jitter = 6 * np.random.default_rng(l).normal(size=20)
        results[f"fig7/N=300/{l}"] = replace(results[f"fig7/N=300/{l}"], accuracy=93 - np.abs(jitter))
    assert evaluated("fig7-order", results).verdict.partition(":")[0] in ("undecided", "fails")


@pytest.mark.parametrize(("peak", "spread", "verdict"), [(6, 0.1, "holds"), (6, 8.0, "undecided"), (12, 0.1, "fails")])
def test_where_accuracy_peaks(peak: int, spread: float, verdict: str):
    results: dict[str, Result] = {}
    for l in (2, 3, 4, 6, 8, 12):
        jitter = spread * np.random.default_rng(l).normal(size=20)
        results[f"fig7/N=300/{l}"] = replace(result(), accuracy=92 - abs(l - peak) / 4 + jitter - jitter.mean())
    found = evaluated("fig7-threshold", results)
    assert found.verdict.partition(":")[0] == verdict
    assert found.measured == peak


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (4, 8, "holds"),
        (3, 8, "undecided: the peak is flat, it may lie from 3 to 8"),
        (4, 9, "undecided: the peak is flat, it may lie from 4 to 9"),
        (6, 8, "holds"),
        (4, 6, "holds"),
    ],
)
def test_a_peak_is_located_within_two_patches(low: int, high: int, verdict: str):
    deviation = np.where(np.arange(20) % 2 == 0, 1.0, -1.0)  # resampled trials peak at either end, all trials at 6
    accuracy = {2: 50.0 + 0 * deviation, 12: 50.0 + 0 * deviation, low: 90 - deviation, high: 90 + deviation}
    accuracy[6] = np.full(20, 90.01)
    results = {f"fig7/N=300/{l}": replace(result(), accuracy=each) for l, each in accuracy.items()}
    results.setdefault("fig7/N=300/4", replace(result(), accuracy=np.full(20, 50.0)))
    found = evaluated("fig7-threshold", results)
    assert (found.verdict, found.measured, found.interval) == (verdict, 6, (low, high))


@pytest.mark.parametrize("peak", [4, 8])
def test_a_peak_beside_l_star_is_another_one(peak: int):
    results = {f"fig7/N=300/{l}": result(90 - abs(l - peak), spread=0.01) for l in (2, 4, 6, 8, 12)}
    assert evaluated("fig7-threshold", results) == CheckResult("fails", peak, (peak, peak))


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.97, "holds"),
        (0.93, "holds"),
        (0.92, "undecided: the interval lies on both sides of 92, 95 less 3"),
        (0.91, "fails"),
        (0.90, "fails"),
    ],
)
def test_routers_that_find_the_patch(share: float, verdict: str):
    jitter = 0.002 * np.random.default_rng(0).normal(size=(20, 2, 16))
    routed = np.zeros((20, 2, 16))
    routed[..., 3] = share
    found = evaluated("fig8-top4", {"fig4/separate/300": result(routed=routed + jitter)})
    assert found.verdict == verdict
    assert found.measured == pytest.approx(100 * share, abs=0.2)


@pytest.mark.parametrize(("claim", "column"), [("fig9-class1", 1), ("fig9-class2", 0)])
def test_each_class_has_its_own_gate(claim: str, column: int):
    gates = np.random.default_rng(0).normal(0.2, 0.01, size=(20, 2))
    gates[:, column] += 0.75
    found = evaluated(claim, {"fig4/joint/300": result(largest_gate=gates)})
    assert found.verdict == "holds"
    assert found.measured == pytest.approx(95, abs=1)
    gates[:, column] -= 0.04  # 91 %: enough for the one and not for the other
    lower = evaluated(claim, {"fig4/joint/300": result(largest_gate=gates)})
    assert lower.verdict == ("fails" if claim == "fig9-class1" else "holds")


@pytest.mark.parametrize(
    ("separable", "verdict"),
    [((False, False), "holds"), ((True, False), "fails: l* = n"), ((False, True), "fails: l* = 1")],
)
def test_lemma_k1_would_hold_if_neither_distribution_were_separable(
    monkeypatch: pytest.MonkeyPatch, separable: tuple[bool, bool], verdict: str
):
    answers = iter(separable)
    monkeypatch.setattr(claims_theory, "patterns_separable", lambda *_, **__: SimpleNamespace(separable=next(answers)))
    found = evaluated("lemmaK.1-inseparable", {"fig4/cnn/100": result()})
    assert found.verdict.startswith(verdict)
    assert found.measured == sum(separable)


def test_lemma_k1_is_refuted_by_a_certificate():
    found = evaluated("lemmaK.1-inseparable", {"fig4/cnn/100": result()})
    assert found.verdict.startswith("fails: ")
    assert found.measured == 1


@pytest.mark.parametrize(("least", "verdict"), [(1.0, "holds"), (0.9995, "partly"), (0.9, "fails")])
def test_lemma_41_wants_every_sample(least: float, verdict: str):
    routed = np.ones((5, 2, 16))
    routed[:, 0, 3] = least
    routed[..., :3] = 0
    found = evaluated("lemma4.1-routers", {"lemma4.1/separate/2000": result(routed=routed, trials=5)})
    assert found.verdict.partition(":")[0] == verdict


def test_the_least_coupled_model_decides():
    def kept(last: float) -> Result:
        return result(kept_patterns=np.array([[1.0, 0.9, last], [1.0, 0.9, last + 0.001]]), trials=2)

    several = {"separate": kept(0.99), "joint": kept(0.3), "cnn": kept(0.8)}
    results = {f"coupling/{kind}/4000": each for kind, each in several.items()}
    found = evaluated(
        "lemmasGHI-coupling", results | {f"coupling-in-figure-4/{kind}/40": kept(0.0) for kind in several}
    )
    assert (found.verdict, found.measured) == ("fails", pytest.approx(30.05))


@pytest.mark.parametrize(
    ("ours", "other", "verdict"),
    [((94, 96), (90, 94), "holds"), ((90, 94), (94, 96), "fails"), ((90, 94), (90, 94), "fails")],
)
@pytest.mark.parametrize(("claim", "line"), [("best-against-print", "printed/joint"), ("best-against-cnn", "best/cnn")])
def test_who_of_ours_and_theirs_needs_fewer_samples(
    claim: str, line: str, ours: tuple[float, ...], other: tuple[float, ...], verdict: str
):
    results = {f"best/pmoe/{n}": result(a, spread=0.1) for n, a in zip((100, 300), ours, strict=True)}
    results |= {f"{line}/{n}": result(a, spread=0.1) for n, a in zip((100, 300), other, strict=True)}
    assert evaluated(claim, results).verdict.partition(":")[0] == verdict


@pytest.mark.parametrize(
    ("at_suggested", "verdict"), [(90.0, "holds"), (89.1, "holds"), (88.9, "fails"), (86.0, "fails")]
)
def test_the_suggested_l_is_judged_by_the_accuracy_at_its_nearest_in_the_sweep(at_suggested: float, verdict: str):
    nearest = np.array([2, 3, 8, 12])
    results: dict[str, Result] = {}
    for l in (1, 2, 3, 4, 8, 12, 16):
        accuracy = np.where(nearest == l, at_suggested, 90.0 if l == 4 else 50.0)
        results[f"sweep/l/{l}"] = replace(result(trials=4), accuracy=accuracy + np.linspace(-0.1, 0.1, 4))
    results["suggested/l/300"] = replace(result(trials=4), suggested=np.array([2.0, 3.0, 7.0, 13.0]))
    found = evaluated("best-suggested-l", results)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(90 - at_suggested))


def test_suggestions_are_made_from_each_trials_own_training_samples(monkeypatch: pytest.MonkeyPatch):
    data = DigitPatches().draw(keyed_random.keys(3, range(4)), 300, "train")

    def suggest(patches: Tensor, labels: Tensor) -> SimpleNamespace:
        (trial,) = [t for t in range(4) if torch.equal(labels, data.labels[t])]
        assert torch.equal(patches, data.pool[data.index[trial]])
        return SimpleNamespace(l=10 + trial)

    monkeypatch.setattr(experiments_two_layer, "suggest_patches_per_expert", suggest)
    cell = SuggestionCell(300, 4)
    measured = cell.measure(SimpleNamespace(data_dir=None, seed=3))  # type: ignore[arg-type]
    assert cell.result(measured).suggested.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("fidelity", ["print", "released", "best"])
@pytest.mark.parametrize("preset", SIZES)
def test_plans_are_made_of_cells(preset: str, fidelity: Fidelity):
    cells = PAPER.plan(preset, fidelity)
    on_digits = {name: cell for name, cell in cells.items() if not name.startswith("wide")}
    assert on_digits
    assert all(isinstance(cell, TwoLayerCell | SuggestionCell) and cell.trials >= 2 for cell in on_digits.values())
    assert all(len(name.split("/")) == 3 for name in on_digits)
