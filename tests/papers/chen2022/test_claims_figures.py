"""The figures of Chen et al. 2022 on synthetic data: each claim at the limits of its rule."""

import json
from pathlib import Path

import numpy as np
import pytest
from papers.chen2022.example_results import BLIND, PURE, Array, around, decision, evaluated, experiment, leads, tables

from moesaic.papers.chen2022.claims_synthetic import CHECKS, entropies
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.findings import write_findings

# Figures 1 and 3


@pytest.mark.parametrize(
    ("cubic", "identity", "verdict"),
    [
        (tables(0.3, 0.1), np.stack([BLIND] * 3), "holds"),
        (tables(0.3, 0.1), tables(0.6, 0.05), "partly: entropy 0.30 against 0.60"),
        (tables(0.55, 0.2), np.stack([BLIND] * 3), "undecided"),
        (tables(0.3, 0.1), tables(0.25, 0.1)[::-1], "partly"),  # the difference varies
        (tables(0.3, 0.001), tables(0.2, 0.001), "fails"),
        (tables(0.3), tables(0.3), "fails"),
    ],
)
def test_nonlinear_experts_recover_the_clusters_and_linear_ones_do_not(cubic: Array, identity: Array, verdict: str):
    found = evaluated(
        "fig1-clusters", {"figure1/cubic": {"test_dispatch": cubic}, "figure1/identity": {"test_dispatch": identity}}
    )
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx((entropies(identity) - entropies(cubic)).mean())


def track(before: float, after: float, half: float = 0.001) -> CellArrays:
    """Entropies over training: in between something that must not matter."""
    looks = [tables(before, 0), np.stack([PURE] * 3), tables(before * after, before * half)]
    return {"track_dispatch": np.stack(looks, axis=1)}


@pytest.mark.parametrize("worst", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name", "other", "after", "half", "verdict"),
    [
        ("cubic", "nonlinear", 0.1, 0.2, 0.04, "holds"),
        ("cubic", "nonlinear", 0.1, 0.24, 0.04, "undecided"),
        ("cubic", "nonlinear", 0.1, 0.3, 0.04, "fails"),
        ("identity", "linear", 0.9, 0.6, 0.04, "holds"),
        ("identity", "linear", 0.9, 0.52, 0.04, "undecided"),
        ("identity", "linear", 0.9, 0.4, 0.04, "fails"),
    ],
)
def test_entropy_over_training_is_judged_in_the_worse_of_two_settings(
    worst: int, kind: str, name: str, other: float, after: float, half: float, verdict: str
):
    results = {f"moe/{kind}/s{s}": track(0.65, after if s == worst else other, half) for s in (1, 2)}
    results[f"moe/{kind}/s3"] = track(0.65, 0.5)  # not in the figure
    found = evaluated(f"fig3-{name}", results)
    assert (decision(found), found.measured) == (verdict, pytest.approx(after))


def seen(*there: int | None, steps: int = 500) -> CellArrays:
    """Looks every 10 steps: trials that have 95 % from these steps on, or never."""
    looks = np.arange(0.0, steps + 1, 10)
    accuracy = [np.where(looks >= (np.inf if at is None else at), 95.0, 94.99) for at in there]
    return {"track_steps": looks, "track_probe_accuracy": np.stack(accuracy)}


@pytest.mark.parametrize(
    ("slow", "verdict", "shown"),
    [
        (seen(200, 210, 220), "holds", 210),
        (seen(300, 500, 500), "undecided", 1300 / 3),
        (seen(3990, 4000, None, steps=4000), "fails", 3996.7),
        (seen(490, 490, None), "partly: 1 of 6 trials never get there", 493.3),
        (seen(None, None, None), "partly: 3 of 6 trials never get there", 500),
    ],
)
@pytest.mark.parametrize("worst", [1, 3])
def test_steps_are_counted_to_95_percent_in_the_slowest_setting(
    worst: int, slow: CellArrays, verdict: str, shown: float
):
    results = {"moe/cubic/s1": seen(100, 110, 120), "moe/cubic/s3": seen(100, 110, 120)} | {f"moe/cubic/s{worst}": slow}
    found = evaluated("fig3-steps", results)
    assert found.measured == pytest.approx(shown, abs=0.1)
    assert found.verdict.startswith(verdict)


def test_mixtures_that_never_learn_have_not_learnt_within_500_steps():
    assert evaluated("fig3-steps", {"moe/cubic/s1": seen(None, None)}).verdict == "fails: 2 of 2 trials never get there"


# Figures 4 and 5


def products(ratio: Array | float, *, over: str, under: str, second: Array | float = 0.0) -> CellArrays:
    """Inner products of three trials after training, where experts 6 and 7 get too little to count.

    Of the one kind of signal every expert has 2, of the other 2 · ratio; the second-largest with
    features is 2 · second.
    """
    largest = {over: 2 * np.broadcast_to(ratio, (3,)), under: np.full(3, 2.0)}
    found: CellArrays = {}
    for name in ("expert_feature", "expert_centre", "router_feature", "router_centre"):
        values = np.zeros((3, 2, 8, 4))
        values[:, 0] = 7.0  # before training
        values[:, 1, :, 2] = largest.get(name, np.zeros(3))[:, None]
        if name == "expert_feature":
            values[:, 1, :, 0] = (np.broadcast_to(second, (3,)) * values[:, 1, 0, 2])[:, None]
        values[:, 1, 6], values[:, 1, 7] = 0.0, 0.1
        found = {**found, f"track_{name}": values}
    load = np.full((4, 8), 100.0)
    load[:, 6], load[:, 7] = 0, 6.0  # just below one in a hundred
    dispatch = np.stack([np.stack([BLIND, load])] * 3)
    return {**found, "track_dispatch": dispatch}


FIGURE_4 = {
    "fig4-no-centres": ("expert_centre", "expert_feature"),
    "fig4-router-centres": ("router_feature", "router_centre"),
}


@pytest.mark.parametrize("claim", FIGURE_4)
@pytest.mark.parametrize(
    ("ratio", "half", "verdict"), [(0.2, 0.1, "holds"), (0.3, 0.1, "undecided"), (0.5, 0.1, "fails")]
)
def test_what_is_hardly_learnt_is_below_a_third(claim: str, ratio: float, half: float, verdict: str):
    over, under = FIGURE_4[claim]
    found = evaluated(claim, {"moe/cubic/s1": products(around(ratio, half), over=over, under=under)})
    assert (decision(found), found.measured) == (verdict, pytest.approx(ratio))


@pytest.mark.parametrize(
    ("second", "half", "verdict"), [(0.2, 0.1, "holds"), (0.3, 0.1, "undecided"), (0.5, 0.1, "fails")]
)
def test_one_feature_means_that_the_second_is_below_a_third(second: float, half: float, verdict: str):
    result = products(0.0, over="expert_centre", under="expert_feature", second=around(second, half))
    found = evaluated("fig4-one-feature", {"moe/cubic/s1": result})
    assert (decision(found), found.measured) == (verdict, pytest.approx(second))


@pytest.mark.parametrize(
    ("second", "centre", "verdict", "shown"),
    [
        (around(0.5, 0.1), 0.9, "holds", 0.5),
        (0.9, around(0.5, 0.1), "holds", 0.5),
        (0.9, around(0.3, 0.1), "undecided", 0.3),
        (around(0.1, 0.1), 0.9, "fails", 0.1),
        (0.9, around(0.1, 0.1), "fails", 0.1),
    ],
)
def test_many_signals_means_many_features_and_centres(
    second: Array | float, centre: Array | float, verdict: str, shown: float
):
    result = products(centre, over="expert_centre", under="expert_feature", second=second)
    found = evaluated("fig5-many-signals", {"moe/identity/s1": result})
    assert (decision(found), found.measured) == (verdict, pytest.approx(shown))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.1, 1.2, 0.3), "holds"),
        ((1.5, 0.9, 0.9), "partly: in 1 of 3 trials"),
        ((1.0, 0.9, 0.2), "fails"),
    ],
)
def test_the_linear_router_turns_to_features_in_more_than_half_of_the_trials(ratios: tuple[float, ...], verdict: str):
    result = products(np.array(ratios), over="router_feature", under="router_centre")
    found = evaluated("fig5-router-features", {"moe/identity/s1": result})
    assert (found.verdict, found.measured) == (verdict, pytest.approx(np.mean(ratios)))


def test_experts_with_one_in_a_hundred_samples_count():
    result = products(0.5, over="expert_centre", under="expert_feature")
    result["track_dispatch"][:, 1, :, :6], result["track_dispatch"][:, 1, :, 7] = 99, 6
    found = evaluated("fig4-no-centres", {"moe/cubic/s1": result})
    assert found.measured == pytest.approx((0.5 * 6 + 1) / 7)


# What reaches claims.json


def test_every_finding_is_of_numbers_that_json_knows(tmp_path: Path):
    """Trials that are all alike, and experts that get nothing: where a ratio could be of nothing."""
    results = leads("moe/cubic", "moe/identity", (3, 1), (2, 1), (2, 1), (2, 1))
    measured: CellArrays = products(0.0, over="router_feature", under="router_centre") | seen(0, 0, 0, steps=10)
    measured |= {
        "track_expert_feature": np.where(measured["track_dispatch"].sum(2)[..., None] > 0, 1.0, 0.0) * np.ones(4),
        "test_dispatch": np.stack([PURE] * 3),
        "train_dispatch": np.stack([PURE] * 3),
    }
    for name in list(results):
        results[name] = {**measured, **results[name]}
    ran = [test for test in CHECKS if test.can_run(experiment(results).plan)]
    assert len(ran) >= 20
    write_findings(
        tmp_path / "claims.json", [t.finding(t.evaluate(experiment(results)), "print", "quick", 0.0) for t in ran]
    )
    text = (tmp_path / "claims.json").read_text()
    assert all(isinstance(entry["measured"], float) for entry in json.loads(text))
    assert not any(None in (entry["interval"] or []) for entry in json.loads(text))
    assert "-0.0" not in text
