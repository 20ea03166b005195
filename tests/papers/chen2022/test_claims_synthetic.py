"""The tables of Chen et al. 2022 on synthetic data: each claim at the limits of its rule."""

import math

import numpy as np
import pytest
from papers.chen2022.example_results import (
    BLIND,
    CLAIMS,
    PURE,
    Array,
    around,
    decision,
    evaluated,
    experiment,
    leads,
    mixed,
    tables,
)

from moesaic.papers.chen2022.claims_synthetic import PUBLISHED, entropies, final_entropy, final_table, purity
from moesaic.papers.chen2022.experiments_synthetic import ACTIVATIONS, SETTINGS
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult


def accuracies(**values: float | Array) -> dict[str, CellArrays]:
    """By names such as moe_cubic_s1; of a number, three trials closely around it."""
    return {
        name.replace("_", "/"): {"accuracy": around(value) if isinstance(value, float) else value}
        for name, value in values.items()
    }


# Tables of who gets what


def test_entropy_goes_from_0_for_pure_experts_to_log_4_for_blind_ones():
    found = entropies(np.stack([PURE, BLIND, mixed(0.5)]))
    assert found.tolist() == pytest.approx([0, math.log(4), math.log(2)])


def test_no_entropy_is_minus_zero():
    assert math.copysign(1, float(entropies(PURE))) == 1


def test_entropy_counts_experts_by_their_load_and_forgets_those_without():
    table = np.array([[30.0, 0, 5], [0, 0, 5]])
    assert float(entropies(table)) == pytest.approx(10 / 40 * math.log(2))


def test_purity_is_the_share_of_the_majority_of_each_expert():
    assert purity(np.stack([PURE, BLIND, mixed(0.25)])).tolist() == pytest.approx([100, 25, 75])
    assert float(purity(np.array([[30.0, 0, 5], [10, 0, 5]]))) == pytest.approx(100 * 35 / 50)


# Final dispatch as the paper prints it: clusters 1 to 4, experts 1 to 8.
TABLE_5 = np.zeros((4, 8))
TABLE_5[0, 2], TABLE_5[1, 5], TABLE_5[1, 6], TABLE_5[3, 0] = 3971, 4, 4005, 3979
TABLE_5[2] = 8, 4, 4, 6, 0, 1304, 4, 2711
TABLE_6 = np.array(
    [
        [0.0, 630, 1629, 1298, 27, 87, 4, 296],
        [136, 1107, 1884, 651, 0, 0, 0, 231],
        [0, 594, 1976, 1471, 0, 0, 0, 0],
        [0, 377, 1480, 1891, 0, 0, 0, 231],
    ]
)


def test_published_purities_are_those_of_the_printed_tables():
    assert CLAIMS["table4-pure"].claim.published == pytest.approx(float(purity(TABLE_5)), abs=0.05)
    assert CLAIMS["table6-mixed"].claim.published == pytest.approx(float(purity(TABLE_6)), abs=0.05)


def test_the_final_table_is_of_test_samples_as_printed_and_of_training_samples_as_released():
    results = {"moe/cubic/s1": {"test_dispatch": PURE[None], "train_dispatch": BLIND[None]}}
    assert final_table(experiment(results), "moe/cubic/s1") is results["moe/cubic/s1"]["test_dispatch"]
    assert final_table(experiment(results, "released"), "moe/cubic/s1") is results["moe/cubic/s1"]["train_dispatch"]
    assert final_entropy(experiment(results), "moe/cubic/s1").tolist() == [0]
    assert final_entropy(experiment(results, "released"), "moe/cubic/s1").tolist() == pytest.approx([math.log(4)])


# Published values


def test_the_published_values_are_those_of_the_paper():
    assert PUBLISHED == {
        "single/identity-128": (68.71, 60.59, 74.81, 74.63),
        "single/identity-512": (67.63, 63.04, 74.54, 72.98),
        "single/cubic-128": (79.48, 72.29, 72.69, 68.6),
        "single/cubic-512": (78.18, 52.09, 67.78, 61.65),
        "moe/identity": ((92.99, 2.11), (88.48, 1.96), (95.93, 1.34), (93.3, 1.48)),
        "moe/cubic": ((99.46, 0.55), (98.09, 1.27), (99.99, 0.02), (98.92, 1.18)),
        "balanced/identity": ((93.81, 1.02), (89.2, 2.2), (95.12, 0.58), (92.5, 1.55)),
        "entropy/identity": ((1.3, 0.044), (1.294, 0.036), (1.16, 0.1), (1.16, 0.155)),
        "entropy/cubic": ((0.098, 0.087), (0.171, 0.103), (0.008, 0.011), (0.089, 0.12)),
        "table7": (74.81, 72.69, 73.45, 76.91, 74.01, 74.76),
        "table8/s1": (68.71, 79.48, 72.28, 81.75, 79.04, 81.72),
        "table8/s2": (60.59, 72.29, 80.12, 78.99, 82.01, 81.03),
    }
    assert ACTIVATIONS == ("identity", "cubic", "relu", "celu", "gelu", "tanh")


def test_claims_show_the_papers_number_or_its_word():
    shown = {name: test.claim.published for name, test in CLAIMS.items()}
    assert shown == {
        "table1-nonlinear-s1": 99.46,
        "table1-nonlinear-s2": 98.09,
        "table1-nonlinear-s3": 99.99,
        "table1-nonlinear-s4": 98.92,
        "table1-linear-s1": 92.99,
        "table1-linear-s2": 88.48,
        "table1-linear-s3": 95.93,
        "table1-linear-s4": 93.3,
        "table1-entropy-nonlinear": 0.171,
        "table1-entropy-linear": 1.16,
        "table1-nonlinear-ahead": "ahead in settings 1 to 4",
        "table3-singles-behind": "behind in settings 1 to 4",
        "table3-singles": "52.09 to 79.48 %",
        "table3-overfits": "worse in settings 1 to 4",
        "table4-pure": 99.9,
        "table6-mixed": 34.5,
        "table7-bound": 76.91,
        "table7-values": "72.69 to 76.91 %",
        "table8-bound": 82.01,
        "table8-values": "60.59 to 82.01 %",
        "table9-s1": 93.81,
        "table9-s2": 89.2,
        "table9-s3": 95.12,
        "table9-s4": 92.5,
        "table9-behind": "behind in settings 1 to 4",
        "table9-no-key": 0.82,
        "fig1-clusters": "recovered and not",
        "fig3-nonlinear": "falls",
        "fig3-linear": "remains large",
        "fig3-steps": "within 500",
        "fig4-one-feature": "one",
        "fig4-no-centres": "almost none",
        "fig4-router-centres": "small",
        "fig5-many-signals": "several",
        "fig5-router-features": "can be larger",
    }


# Accuracies of mixtures: published 92.99 ± 2.11 in setting 1


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (92.99, 0.1, "holds"),
        (93.40, 0.1, "holds"),  # the published mean is known to 1.5 points
        (91.30, 0.1, "fails: 1.69 points [0.18, 3.20] less accurate than published"),
        (97.20, 0.1, "fails: 4.21 points [2.70, 5.72] more accurate than published"),
        (92.99, 5.1, "undecided"),
    ],
)
def test_a_mixture_has_the_published_accuracy_to_what_both_means_are_known(value: float, half: float, verdict: str):
    found = evaluated("table1-linear-s1", {"moe/identity/s1": {"accuracy": around(value, half)}})
    assert (found.verdict if "points" in verdict else decision(found)) == verdict
    assert found.measured == pytest.approx(value)
    assert found.interval == pytest.approx((value - half, min(value + half, 100)), abs=1e-3)


def test_no_accuracy_is_known_to_be_above_100():
    found = evaluated("table1-nonlinear-s3", {"moe/cubic/s3": {"accuracy": np.array([99.0, 100.0, 100.0])}})
    assert found.interval is not None
    assert found.interval[1] == 100


@pytest.mark.parametrize(("kind", "name"), [("cubic", "nonlinear"), ("identity", "linear")])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_mixture_is_judged_by_its_own_row(kind: str, name: str, setting: int):
    others = {f"moe/{each}/s{s}": {"accuracy": around(50)} for each in ("cubic", "identity") for s in SETTINGS}
    published = CLAIMS[f"table1-{name}-s{setting}"].claim.published
    assert isinstance(published, float)
    mine = others | {f"moe/{kind}/s{setting}": {"accuracy": around(published)}}
    assert evaluated(f"table1-{name}-s{setting}", mine).verdict == "holds"
    assert decision(evaluated(f"table1-{name}-s{setting}", others)) == "fails"


# Entropies


@pytest.mark.parametrize(
    ("entropy", "half", "verdict"), [(0.2, 0.04, "holds"), (0.24, 0.02, "undecided"), (0.28, 0.02, "fails")]
)
@pytest.mark.parametrize("worst", SETTINGS)
def test_nonlinear_experts_are_judged_where_they_are_least_pure(worst: int, entropy: float, half: float, verdict: str):
    results = {f"moe/cubic/s{s}": {"test_dispatch": tables(entropy if s == worst else 0.1, half)} for s in SETTINGS}
    found = evaluated("table1-entropy-nonlinear", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(entropy))


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (tables(0.66, 0.02), "fails"),  # half of log 4 is log 2, 0.693
        (np.stack([mixed(0.45), mixed(0.5), mixed(0.5) + 0.05 * BLIND]), "undecided"),
        (np.stack([mixed(0.5) + 0.1 * BLIND] * 3), "holds"),
    ],
)
@pytest.mark.parametrize("worst", SETTINGS)
def test_linear_experts_are_judged_where_they_are_purest(worst: int, mine: Array, verdict: str):
    blind = np.stack([BLIND] * 3)
    results = {f"moe/identity/s{s}": {"test_dispatch": mine if s == worst else blind} for s in SETTINGS}
    found = evaluated("table1-entropy-linear", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(entropies(mine).mean()))


def test_as_released_entropies_are_those_of_training_samples():
    results = {"moe/cubic/s1": {"test_dispatch": np.stack([PURE] * 3), "train_dispatch": np.stack([BLIND] * 3)}}
    assert evaluated("table1-entropy-nonlinear", results).verdict == "holds"
    assert evaluated("table1-entropy-nonlinear", results, "released").verdict == "fails"
    assert evaluated("table4-pure", results).measured == 100
    assert evaluated("table4-pure", results, "released").measured == 25


# Who is ahead


AHEAD = {
    "table1-nonlinear-ahead": ("moe/cubic", "moe/identity"),
    "table9-behind": ("moe/cubic", "balanced/identity"),
    "table3-overfits": ("single/cubic-128", "single/cubic-512"),
}


@pytest.mark.parametrize("claim", AHEAD)
@pytest.mark.parametrize(
    ("points", "verdict", "shown"),
    [
        (((3, 1), (2, 1), (4, 1), (5, 1)), "holds", 2),
        (((3, 1), (2, 1)), "holds", 2),
        (((3, 1), (0.5, 1), (4, 1), (5, 1)), "undecided: clearly ahead at 3 of 4 comparisons", 0.5),
        (((3, 1), (-0.5, 1), (4, 1), (0.2, 1)), "undecided: clearly ahead at 2 of 4 comparisons", -0.5),
        (((3, 1), (2, 1), (4, 1), (-2, 1)), "partly: clearly ahead at 3 of 4 comparisons, clearly behind at 1", -2),
        (((3, 9), (-2, 3), (4, 9), (-1, 0.5)), "fails: clearly ahead at 0 of 4 comparisons, clearly behind at 1", -2),
    ],
)
def test_ahead_is_ahead_in_every_setting(
    claim: str, points: tuple[tuple[float, float], ...], verdict: str, shown: float
):
    found = evaluated(claim, leads(*AHEAD[claim], *points))
    assert (found.verdict, found.measured) == (verdict, pytest.approx(shown))


def test_settings_that_only_one_of_two_has_do_not_count():
    results = leads("moe/cubic", "moe/identity", (3, 1), (2, 1))
    results |= accuracies(moe_identity_s3=100.0, moe_cubic_s4=0.0)
    assert evaluated("table1-nonlinear-ahead", results).verdict == "holds"


def test_trials_that_only_one_of_two_has_do_not_count():
    results = leads("moe/cubic", "moe/identity", (3, 1))
    more = np.append(results["moe/cubic/s1"]["accuracy"], [0.0, 0.0])
    found = evaluated("table1-nonlinear-ahead", results | {"moe/cubic/s1": {"accuracy": more}})
    assert (found.verdict, found.measured) == ("holds", pytest.approx(3))


@pytest.mark.parametrize("better", ["single/cubic-128/s1", "single/identity-512/s3"])
@pytest.mark.parametrize("mixture", ["moe/cubic", "moe/identity"])
def test_single_networks_are_behind_both_mixtures(better: str, mixture: str):
    results = accuracies(moe_cubic_s1=99.0, moe_identity_s1=98.0, moe_cubic_s3=97.0, moe_identity_s3=96.0)
    results |= {
        f"single/{kind}/s{s}": {"accuracy": around(75)} for kind in ("cubic-128", "identity-512") for s in (1, 3)
    }
    found = evaluated("table3-singles-behind", results)
    assert (found.verdict, found.measured) == ("holds", pytest.approx(21))
    setting = better.rpartition("/")[2]
    results[f"{mixture}/{setting}"] = {"accuracy": around(80)}
    results[better] = {"accuracy": around(80.5)}
    found = evaluated("table3-singles-behind", results)
    assert (decision(found), found.measured) == ("partly", pytest.approx(-0.5))
    results[better] = {"accuracy": around(80, 1)}
    assert evaluated("table3-singles-behind", results).verdict == "undecided: clearly ahead at 7 of 8 comparisons"


@pytest.mark.parametrize(
    ("most", "half", "verdict"),
    [(1.5, 0.4, "holds"), (1.8, 0.4, "undecided"), (2.5, 0.4, "fails: it does help"), (-3.0, 0.4, "holds")],
)
def test_balance_is_not_the_key_if_it_gains_at_most_two_points_anywhere(most: float, half: float, verdict: str):
    results = leads("balanced/identity", "moe/identity", (-4, 0.1), (most, half), (-5, 0.1))
    found = evaluated("table9-no-key", results)
    assert (found.measured, found.interval) == (
        pytest.approx(most),
        pytest.approx((most - half, most + half), abs=1e-3),
    )
    assert found.verdict.startswith(verdict)


# Single networks beside the published ones

VALUES = {
    "table3-singles": (5.0, {f"{k}/s{s}": PUBLISHED[k][s - 1] for k in PUBLISHED if "single" in k for s in SETTINGS}),
    "table7-values": (3.0, {f"table7/{a}": v for a, v in zip(ACTIVATIONS, PUBLISHED["table7"], strict=True)}),
    "table8-values": (
        3.0,
        {f"table8/{a}/s{s}": v for s in (1, 2) for a, v in zip(ACTIVATIONS, PUBLISHED[f"table8/s{s}"], strict=True)},
    ),
}


@pytest.mark.parametrize("claim", VALUES)
@pytest.mark.parametrize("side", [-1, 1])
def test_values_are_the_published_ones_within_a_margin(claim: str, side: int):
    margin, published = VALUES[claim]
    assert f"within {margin:g} points" in CLAIMS[claim].claim.rule
    many, half = len(published), (len(published) + 1) // 2

    def evaluate(far: int) -> CheckResult:
        gaps = [margin + 0.1 if i < far else margin - 0.1 for i in range(many)]
        pairs = zip(published.items(), gaps, strict=True)
        return evaluated(claim, {name: {"accuracy": around(value + side * gap)} for (name, value), gap in pairs})

    assert evaluate(0) == CheckResult("holds", pytest.approx(margin - 0.1))
    assert evaluate(1).verdict == f"partly: {many - 1} of {many} are"
    assert evaluate(many - half).verdict == f"partly: {half} of {many} are"
    assert evaluate(many - half + 1) == CheckResult(f"fails: {half - 1} of {many} are", pytest.approx(margin + 0.1))


def test_values_are_compared_where_there_are_any():
    results = accuracies(table7_relu=73.45) | accuracies(table7_celu=76.91 + 5)
    assert evaluated("table7-values", results) == CheckResult("partly: 1 of 2 are", pytest.approx(2.5))


@pytest.mark.parametrize(("table", "names"), [("table7", ACTIVATIONS), ("table8", [f"{a}/s2" for a in ACTIVATIONS])])
@pytest.mark.parametrize(
    ("best", "half", "verdict"), [(86.9, 0.5, "holds"), (87.4, 0.5, "undecided"), (88.1, 0.5, "fails")]
)
def test_the_best_single_network_is_below_the_bound(
    table: str, names: tuple[str, ...], best: float, half: float, verdict: str
):
    results = {f"{table}/{name}": {"accuracy": around(best if "gelu" in name else 70, half)} for name in names}
    results["single/cubic-128/s1"] = {"accuracy": around(99)}  # of another table
    found = evaluated(f"{table}-bound", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(best))


# Dispatch


@pytest.mark.parametrize(
    ("impure", "verdict"),
    [((0.001, 0.002, 0.003), "holds"), ((0.0, 0.01, 0.02), "undecided"), ((0.02, 0.025, 0.03), "fails")],
)
def test_nonlinear_experts_get_one_cluster_each(impure: tuple[float, ...], verdict: str):
    results = {"moe/cubic/s1": {"test_dispatch": np.stack([mixed(share) for share in impure])}}
    found = evaluated("table4-pure", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(100 - 100 * np.mean(impure)))
    assert found.interval is not None
    assert found.interval[1] <= 100


@pytest.mark.parametrize(
    ("impure", "verdict"),
    [((0.45, 0.45, 0.46), "holds"), ((0.35, 0.4, 0.45), "undecided"), ((0.1, 0.11, 0.12), "fails")],
)
def test_linear_experts_get_samples_of_several_clusters(impure: tuple[float, ...], verdict: str):
    results = {"moe/identity/s1": {"test_dispatch": np.stack([mixed(share) for share in impure])}}
    found = evaluated("table6-mixed", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(100 - 100 * np.mean(impure)))
