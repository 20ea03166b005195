"""The theory of Chen et al. 2022, measured: each claim at the limits of its rule."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.papers.chen2022.claims_theory import CHECKS
from moesaic.papers.chen2022.experiments_synthetic import AdditiveCell, ExperimentResults, Plan, SmoothingCell, plan
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.findings import write_findings
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress

Array = NDArray[np.float64]
CLAIMS = {test.claim.id: test for test in CHECKS}
SEVERAL = np.array([-1.0, 0.0, 1.0]) * math.sqrt(3) / 4.30265
"""Three trials with the interval ± 1."""


def evaluated(claim: str, name: str, **measured: object) -> CheckResult:
    results: dict[str, CellArrays] = {name: {key: np.asarray(value, dtype=float) for key, value in measured.items()}}
    cells: Plan = dict.fromkeys(["init/0.1", *results], next(iter(plan("quick", "print").values())))
    assert CLAIMS[claim].can_run(cells)
    return CLAIMS[claim].evaluate(ExperimentResults(cells, results, None))  # type: ignore[arg-type]


def decision(result: CheckResult) -> str:
    return result.verdict.partition(":")[0]


def test_claims_show_the_papers_number_or_its_word():
    assert {name: test.claim.published for name, test in CLAIMS.items()} == {
        "theorem4.1-tight": 87.5,
        "theorem4.1-uncovered": "more difficult",
        "theorem4.1-ensemble": 87.5,
        "theorem4.1-ensemble-gain": "no improvement",
        "lemma5.1": 1.0,
        "lemma5.1-sharp": None,
        "theorem4.2-training": 100.0,
        "theorem4.2-test": 100.0,
        "theorem4.2-groups": 100.0,
        "theorem4.2-experts": 100.0,
        "theorem4.2-router": 100.0,
        "theorem4.2-start": 100.0,
        "lemma5.2-own": 100.0,
        "lemma5.2-others": "of the order of 25 %",
        "lemmaE.1-sum": 0.0,
        "load-equal": "almost the same",
    }


def test_what_speaks_of_the_printed_equations_is_judged_as_printed_only():
    both = {name for name, test in CLAIMS.items() if test.fidelities == ("print", "released")}
    assert both == {f"theorem4.2-{what}" for what in ("training", "test", "groups", "experts", "router")} | {
        "load-equal"
    }
    assert all(CLAIMS[name].fidelities == ("print",) for name in CLAIMS.keys() - both)


# Theorem 4.1


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [(87.5 + 0.5 * SEVERAL, "holds"), (88.1 + 0.5 * SEVERAL, "fails"), (86.9 + 0.5 * SEVERAL, "fails")],
)
def test_the_bound_is_tight_if_it_is_in_the_interval(accuracy: Array, verdict: str):
    found = evaluated("theorem4.1-tight", "theory/additive/s3", accuracy=accuracy)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(accuracy.mean()))


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [
        (86.9 + 0.5 * SEVERAL, "holds"),
        (87.5 + 0.5 * SEVERAL, "undecided: the interval lies on both sides of 87.5"),
        (92.0 + 0.5 * SEVERAL, "fails: an additive classifier does better there"),
    ],
)
def test_settings_that_the_theorem_does_not_cover_are_harder_only_if_the_best_is_below_the_bound(
    accuracy: Array, verdict: str
):
    found = evaluated("theorem4.1-uncovered", "theory/additive/s1", accuracy=accuracy)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(accuracy.mean()))


def test_the_additive_classifier_attains_what_the_theorem_allows():
    runner = Runner(None, None, device="cpu", seed=0, progress=NoProgress())  # type: ignore[arg-type]
    found = {setting: AdditiveCell(setting, 3, 4000).measure(runner)["accuracy"] for setting in (1, 3)}
    assert np.mean(found[3]) == pytest.approx(87.5, abs=1)
    assert np.mean(found[1]) > 90
    assert len(set(found[3])) > 1, "every trial draws its own samples"


@pytest.mark.parametrize("change", [{"setting": 2}, {"trials": 4}, {"samples": 50}])
def test_other_additive_work_is_another_cell(change: dict[str, int]):
    runner = Runner(None, None, device="cpu", seed=0, progress=NoProgress())  # type: ignore[arg-type]
    assert AdditiveCell(**{"setting": 1, **change}).spec(runner) != AdditiveCell(1).spec(runner)  # type: ignore[arg-type]
    assert SmoothingCell(5).spec(runner) != SmoothingCell().spec(runner)


# Lemma 5.1

EXPERTS = (2, 4)


@pytest.mark.parametrize(
    ("random", "made", "verdict", "shown"),
    [
        ((2.0, 2.0), (1.0, 1.0), "holds", 0.5),
        ((0.1, 0.1), (4.0, 0.1), "holds", 1.0),
        ((4.1, 0.1), (0.1, 0.1), "fails", 1.025),
        ((0.1, 0.1), (0.1, 16.8), "fails", 1.05),
    ],
)
def test_lemma_51_is_about_every_change_over_the_square_of_the_experts(
    random: tuple[float, ...], made: tuple[float, ...], verdict: str, shown: float
):
    found = evaluated("lemma5.1", "theory/smoothing", experts=EXPERTS, random=random, made=made)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(shown))


@pytest.mark.parametrize(
    ("random", "made", "verdict", "shown"),
    [
        ((1.0, 1.0), (1.98, 2.0), "holds", 2.0),
        ((1.0, 1.98), (1.0, 1.0), "holds", 1.98),
        ((1.0, 1.0), (1.5, 1.97), "partly: it holds, but is not attained", 1.97),
        ((2.001, 1.0), (2.0, 2.0), "fails", 2.001),
        ((1.0, 1.0), (2.0, 2.001), "fails", 2.001),
        ((1.0, 1.0), (2.0, 2 + 1e-12), "holds", 2.0),  # rounding
    ],
)
def test_the_sharp_constant_is_2_and_attained(
    random: tuple[float, ...], made: tuple[float, ...], verdict: str, shown: float
):
    found = evaluated("lemma5.1-sharp", "theory/smoothing", experts=EXPERTS, random=random, made=made)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(shown))


def test_pairs_made_to_change_most_change_more_than_random_ones_and_by_no_more_than_2():
    runner = Runner(None, None, device="cpu", seed=0, progress=NoProgress())  # type: ignore[arg-type]
    found = SmoothingCell(100).measure(runner)
    assert found["experts"] == [2, 4, 8, 16]
    for random, made in zip(found["random"], found["made"], strict=True):
        assert 0.2 < random < made
        assert 1.98 < made <= 2 * (1 + 1e-9)


# Theorem 4.2

S3, T1 = "moe/cubic/s3", "explored/cubic/s3"


def dispatch(samples: int = 1000) -> Array:
    return np.full((3, 4, 8), samples / 32)


@pytest.mark.parametrize(
    ("errors", "verdict", "shown"),
    [
        ((0, 0, 0), "holds", 100),
        ((0, 1, 0), "partly: zero in 2 of 3 trials", 99.9667),
        ((10, 10, 10), "partly: zero in 0 of 3 trials", 99),
        ((11, 10, 10), "fails", 98.9667),
        ((0, 0, 60), "fails", 98),
    ],
)
def test_training_errors_are_zero_in_every_trial(errors: tuple[int, ...], verdict: str, shown: float):
    found = evaluated("theorem4.2-training", S3, errors=errors, train_dispatch=dispatch())
    assert (found.verdict, found.measured) == (verdict, pytest.approx(shown, abs=1e-3))
    assert found.interval is not None
    assert found.interval[1] <= 100


@pytest.mark.parametrize(("claim", "cell"), [("theorem4.2-test", S3), ("theorem4.2-start", "init/0.3")])
@pytest.mark.parametrize(("value", "verdict"), [(99.3, "holds"), (99.1, "undecided"), (98.7, "fails")])
def test_accuracies_are_nearly_100(claim: str, cell: str, value: float, verdict: str):
    found = evaluated(claim, cell, accuracy=value + 0.2 * SEVERAL)
    assert (decision(found), found.measured) == (verdict, pytest.approx(value))


# Groups of eight experts: each cluster has one, one has none.
FULL, LACKING = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 2, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("trials", "verdict", "shown"),
    [
        ([FULL, FULL], "holds", 100),
        ([FULL, LACKING], "partly: in 1 of 2 trials", 50),
        ([LACKING, LACKING], "fails", 0),
    ],
)
def test_groups_are_filled_if_every_cluster_has_an_expert(trials: list[list[int]], verdict: str, shown: float):
    found = evaluated("theorem4.2-groups", S3, groups=trials)
    assert (found.verdict, found.measured) == (verdict, shown)
    assert found.interval is not None
    assert 0 <= found.interval[0] <= found.interval[1] <= 100


def knowing(own: Array, others: Array | float) -> Array:
    """(3, 8, 4): accuracies of experts in the groups FULL, of each trial's eight experts alike on their own cluster."""
    found = np.broadcast_to(np.asarray(others, dtype=float), (4, 8, 3)).transpose(2, 1, 0).copy()
    for expert, cluster in enumerate(FULL):
        found[:, expert, cluster] = own[:, expert]
    return found


@pytest.mark.parametrize(
    ("bad", "accuracy", "verdict", "shown"),
    [
        (0, 0.95, "holds", 100),
        (1, 0.94, "fails", 87.5),
        (1, 0.95, "holds", 100),  # 95 % is enough
    ],
)
def test_experts_are_good_with_95_percent_on_their_own_cluster(bad: int, accuracy: float, verdict: str, shown: float):
    own = np.ones((3, 8))
    own[:, :bad] = accuracy
    found = evaluated("theorem4.2-experts", T1, expert_accuracy=knowing(own, 0.5), groups=[FULL] * 3)
    assert (decision(found), found.measured) == (verdict, pytest.approx(shown))


def test_experts_that_are_good_in_some_trials_are_so_partly():
    own = np.ones((3, 8))
    own[0, 0] = 0
    found = evaluated("theorem4.2-experts", T1, expert_accuracy=knowing(own, 0.5), groups=[FULL] * 3)
    assert (decision(found), found.measured) == ("undecided", pytest.approx(100 * 23 / 24))
    assert found.interval is not None
    assert found.interval[1] == 100


@pytest.mark.parametrize(
    ("stray", "verdict"),
    [((0.0, 0.001, 0.002), "holds"), ((0.0, 0.01, 0.02), "undecided"), ((0.05, 0.051, 0.052), "fails")],
)
def test_the_router_sends_clusters_to_their_groups(stray: tuple[float, ...], verdict: str):
    tables = np.zeros((3, 4, 8))
    for t, share in enumerate(stray):
        for k in range(4):
            tables[t, k, [k, k + 4]] = 400 * (1 - share), 600 * (1 - share)
            tables[t, k, (k + 1) % 4] += 1000 * share
    found = evaluated("theorem4.2-router", T1, test_dispatch=tables, groups=[FULL] * 3)
    assert (decision(found), found.measured) == (verdict, pytest.approx(100 - 100 * np.mean(stray)))


# Lemma 5.2


@pytest.mark.parametrize(("value", "verdict"), [(0.97, "holds"), (0.955, "undecided"), (0.93, "fails")])
def test_after_exploration_experts_are_good_on_their_own_cluster_on_average(value: float, verdict: str):
    own = np.broadcast_to(value + 0.01 * SEVERAL[:, None], (3, 8)).copy()
    own[:, 0] += 0.02  # a mean, not a count of good ones
    own[:, 1] -= 0.02
    found = evaluated("lemma5.2-own", T1, explored_accuracy=knowing(own, 0.1), groups=[FULL] * 3)
    assert (decision(found), found.measured) == (verdict, pytest.approx(100 * value))


@pytest.mark.parametrize(("error", "verdict"), [(0.14, "holds"), (0.12, "undecided"), (0.11, "fails")])
def test_after_exploration_experts_are_bad_on_other_clusters(error: float, verdict: str):
    found = evaluated(
        "lemma5.2-others",
        T1,
        explored_accuracy=knowing(np.ones((3, 8)), 1 - error + 0.01 * SEVERAL),
        groups=[FULL] * 3,
    )
    assert (decision(found), found.measured) == (verdict, pytest.approx(100 * error))


def test_no_error_is_known_to_be_below_0():
    accuracy = knowing(np.ones((3, 8)), np.array([1.0, 1.0, 0.97]))
    found = evaluated("lemma5.2-others", T1, explored_accuracy=accuracy, groups=[FULL] * 3)
    assert found.interval is not None
    assert found.interval[0] == 0


# Loads


def loads(*last: Array | list[float]) -> Array:
    """(T, 2, 8): before and after training."""
    return np.stack([np.stack([np.full(8, 1 / 8), np.asarray(each)]) for each in last])


@pytest.mark.parametrize(
    ("ratio", "verdict"), [((0.7, 0.8, 0.9), "holds"), ((0.4, 0.5, 0.9), "undecided"), ((0.1, 0.2, 0.2), "fails")]
)
def test_loads_are_compared_within_groups(ratio: tuple[float, ...], verdict: str):
    # in each group the second expert has the ratio of what the first has, and groups have different loads
    trials = [[0.1, 0.2, 0.3, 0.4, *(each * np.array([0.1, 0.2, 0.3, 0.4]))] for each in ratio]
    found = evaluated("load-equal", T1, track_load=loads(*trials), groups=[FULL] * 3)
    assert (decision(found), found.measured) == (verdict, pytest.approx(np.mean(ratio)))


def test_groups_of_one_and_groups_without_any_load_do_not_count():
    group = [0, 0, 0, 1, 1, 2, 3, 3]
    load = [0.2, 0.1, 0.3, 0.0, 0.0, 0.1, 0.2, 0.1]
    found = evaluated("load-equal", T1, track_load=loads(load, load), groups=[group, group])
    assert found.measured == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_trials_without_a_group_to_compare_do_not_count():
    alone, load = [0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.3, 0.3], [0.1, 0.05, 0.1, 0.0, 0.0, 0.3, 0.2, 0.2]
    group = [0, 0, 0, 0, 0, 1, 2, 3]
    pair = [0, 0, 0, 1, 1, 1, 2, 3]
    found = evaluated("load-equal", T1, track_load=loads(alone, load, load), groups=[group, pair, pair])
    assert found.measured == pytest.approx((0.5 + 0.0) / 2)
    none = evaluated("load-equal", T1, track_load=loads(alone, load), groups=[group, pair])
    assert none == CheckResult("undecided: fewer than two trials have an expert for each cluster")


def test_trials_with_an_empty_group_are_not_what_the_theorem_is_about():
    own = np.ones((3, 8))
    own[2] = 0
    accuracy = knowing(own, 0.5)
    found = evaluated("theorem4.2-experts", T1, expert_accuracy=accuracy, groups=[FULL, FULL, LACKING])
    assert found == CheckResult("holds: in 2 of 3 trials", 100.0, (100.0, 100.0))


def test_the_value_after_training_stands_beside_that_at_the_end_of_exploration():
    early, late = (knowing(np.full((3, 8), value), 0.5) for value in (0.99, 0.5))
    results: dict[str, CellArrays] = {
        T1: {"expert_accuracy": early, "groups": np.array([FULL] * 3, dtype=float)},
        S3: {"expert_accuracy": late, "groups": np.array([FULL] * 3, dtype=float)},
    }
    cells: Plan = dict.fromkeys(results, next(iter(plan("quick", "print").values())))
    found = CLAIMS["theorem4.2-experts"].evaluate(ExperimentResults(cells, results, None))  # type: ignore[arg-type]
    assert found.verdict == "holds: in 3 of 3 trials, after training 0"


@pytest.mark.parametrize(("share", "verdict"), [(1e-5, "holds"), (1e-3, "holds"), (2e-3, "fails")])
def test_the_rows_of_a_router_keep_their_sum_to_rounding(share: float, verdict: str):
    found = evaluated("lemmaE.1-sum", "figure1/cubic", track_router_sum=[[0.0, 1e-6], [0.0, share]])
    assert found == CheckResult(verdict, share)


def test_every_finding_is_of_numbers_that_json_knows(tmp_path: Path):
    findings = [
        CLAIMS[claim].finding(result, "print", "quick", 0.0)
        for claim, result in {
            "theorem4.2-training": evaluated("theorem4.2-training", S3, errors=[0, 0], train_dispatch=dispatch()[:2]),
            "theorem4.2-groups": evaluated("theorem4.2-groups", S3, groups=[LACKING] * 2),
            "load-equal": evaluated("load-equal", T1, track_load=loads([0] * 8, [0] * 8), groups=[FULL] * 2),
        }.items()
    ]
    write_findings(tmp_path / "claims.json", findings)
    kept = json.loads((tmp_path / "claims.json").read_text())
    assert [entry["measured"] for entry in kept] == [100, 0, None]
    assert [entry["interval"] for entry in kept] == [[100, 100], [0, 0], None]
