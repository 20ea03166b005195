"""Claims of Chen et al. 2022 on synthetic data: Tables 1 and 3 to 9, Figures 1 and 3 to 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Estimate, Sample, mean, percentage
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterSetting
from moesaic.papers.chen2022.experiments_synthetic import ACTIVATIONS, SETTINGS, ClaimCheck, ExperimentResults, claim
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import (
    AHEAD_RULE,
    MEAN_RULE,
    CheckResult,
    ahead_everywhere,
    at_least,
    at_most,
    below,
    same_mean,
)

__all__ = ["CHECKS", "PUBLISHED", "entropies", "final_entropy", "final_table", "purity", "signal_ratio"]

Array = NDArray[np.float64]

PUBLISHED: dict[str, tuple[float | tuple[float, float], ...]] = {
    "single/identity-128": (68.71, 60.59, 74.81, 74.63),
    "single/identity-512": (67.63, 63.04, 74.54, 72.98),
    "single/cubic-128": (79.48, 72.29, 72.69, 68.60),
    "single/cubic-512": (78.18, 52.09, 67.78, 61.65),
    "moe/identity": ((92.99, 2.11), (88.48, 1.96), (95.93, 1.34), (93.30, 1.48)),
    "moe/cubic": ((99.46, 0.55), (98.09, 1.27), (99.99, 0.02), (98.92, 1.18)),
    "balanced/identity": ((93.81, 1.02), (89.20, 2.20), (95.12, 0.58), (92.50, 1.55)),
    "entropy/identity": ((1.300, 0.044), (1.294, 0.036), (1.160, 0.100), (1.160, 0.155)),
    "entropy/cubic": ((0.098, 0.087), (0.171, 0.103), (0.008, 0.011), (0.089, 0.120)),
    "table7": (74.81, 72.69, 73.45, 76.91, 74.01, 74.76),
    "table8/s1": (68.71, 79.48, 72.28, 81.75, 79.04, 81.72),
    "table8/s2": (60.59, 72.29, 80.12, 78.99, 82.01, 81.03),
}
"""Accuracies in percent and dispatch entropies, with the standard deviation where the paper has one: of settings 1 to
4, or of the activations in the order of `ACTIVATIONS`."""

_RUNS = 10
"""Runs of the published means."""
_NAMES = {"cubic": "nonlinear", "identity": "linear"}
_MOST = float(np.log(4))
"""Dispatch entropy of a router that ignores the four clusters."""


def entropies(tables: Array) -> Array:
    """Returns the dispatch entropy (eq. 6.1) (…) of tables (…, K, E)."""
    per_expert = tables.sum(axis=-2, keepdims=True)
    share = np.divide(tables, per_expert, out=np.zeros_like(tables), where=per_expert > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return 0 - (tables * logs).sum(axis=(-2, -1)) / tables.sum(axis=(-2, -1))  # 0 and not -0 where experts are pure


def purity(tables: Array) -> Array:
    """Returns the percentage (…) of samples from the majority cluster of their expert, of tables (…, K, E)."""
    return 100 * tables.max(axis=-2).sum(axis=-1) / tables.sum(axis=(-2, -1))


def final_table(experiment: ExperimentResults, name: str) -> Array:
    """Returns dispatch counts (T, K, E): as released of training samples in the last step, as printed of test ones."""
    return experiment.results[name]["train_dispatch" if experiment.fidelity == "released" else "test_dispatch"]


def final_entropy(experiment: ExperimentResults, name: str) -> Array:
    """Returns the dispatch entropy (T,) of `final_table`."""
    return entropies(final_table(experiment, name))


def _settings(experiment: ExperimentResults, prefix: str) -> dict[int, str]:
    """Returns the settings with results, and the names of their cells."""
    names = {int(str(setting)): f"{prefix}/s{setting}" for setting in SETTINGS}
    return {setting: name for setting, name in names.items() if name in experiment.results}


def _least(estimates: list[Estimate]) -> Estimate:
    return min(estimates, key=lambda each: each.value)


def _most(estimates: list[Estimate]) -> Estimate:
    return max(estimates, key=lambda each: each.value)


def _published_mean(name: str, id: str, where: str, about: str) -> ClaimCheck:
    """Checks the mean accuracy of a cell against the published mean and standard deviation."""
    prefix, _, setting = name.rpartition("/s")
    printed = PUBLISHED[prefix][int(setting) - 1]
    assert isinstance(printed, tuple)
    published, deviation = printed

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        accuracy = experiment.results[name]["accuracy"]
        return same_mean(Sample.of(accuracy), Sample(published, deviation, _RUNS), percentage(accuracy))

    statement = f"In setting {setting} {about} has {published} ± {deviation} % test accuracy."
    described = claim(id, where, statement, published, f"Mean test accuracy over trials, in percent. {MEAN_RULE}")
    return ClaimCheck(described, (name,), evaluate, not_quick=True)


def _mixture_accuracy(kind: str, setting: ClusterSetting) -> ClaimCheck:
    return _published_mean(
        f"moe/{kind}/s{setting}",
        f"table1-{_NAMES[kind]}-s{setting}",
        "Table 1" if setting in (1, 2) else "Table 3",
        f"the mixture of {_NAMES[kind]} experts",
    )


def _entropy_claim(kind: str) -> ClaimCheck:
    linear = kind == "identity"

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        found = [mean(final_entropy(experiment, name)) for name in _settings(experiment, f"moe/{kind}").values()]
        return at_least(_least(found), _MOST / 2) if linear else at_most(_most(found), 0.25)

    values = [each[0] for each in PUBLISHED[f"entropy/{kind}"] if isinstance(each, tuple)]
    described = claim(
        f"table1-entropy-{_NAMES[kind]}",
        "Table 1",
        "Linear experts do not find the clusters: the mixture's dispatch entropy stays large in all settings."
        if linear
        else "Nonlinear experts find the clusters: the mixture's dispatch entropy is nearly zero in all settings.",
        min(values) if linear else max(values),
        f"Dispatch entropy (eq. 6.1) in nats, mean over trials, in the setting where it is "
        f"{'smallest' if linear else 'largest'}; log 4 = 1.386 if it is independent of the cluster. "
        + ("Holds if the interval is above half of that." if linear else "Holds if the interval is below 0.25.")
        + " As printed: test samples, without noise; as released: training samples in the last step, with noise.",
    )
    return ClaimCheck(described, (f"moe/{kind}/",), evaluate)


def _leads(experiment: ExperimentResults, ahead: str, behind: str) -> list[Estimate]:
    """Returns the lead in accuracy in each setting, trial by trial, over the common trials."""
    theirs = _settings(experiment, behind)
    found: list[Estimate] = []
    for setting, name in _settings(experiment, ahead).items():
        if setting in theirs:
            one, other = experiment.results[name]["accuracy"], experiment.results[theirs[setting]]["accuracy"]
            both = min(len(one), len(other))
            found.append(mean(one[:both] - other[:both]))
    return found


def _ahead_everywhere(leads: list[Estimate]) -> CheckResult:
    return ahead_everywhere(leads, "comparisons")


_AHEAD = f"Lead in test accuracy, in points, trial by trial on the same samples; shown: the smallest. {AHEAD_RULE}"


def _single_names(experiment: ExperimentResults) -> list[str]:
    return sorted({name.rpartition("/")[0] for name in experiment.results if name.startswith("single/")})


def _nonlinear_ahead(experiment: ExperimentResults) -> CheckResult:
    return _ahead_everywhere(_leads(experiment, "moe/cubic", "moe/identity"))


def _singles_behind(experiment: ExperimentResults) -> CheckResult:
    return _ahead_everywhere(
        [
            lead
            for kind in ("moe/cubic", "moe/identity")
            for single in _single_names(experiment)
            for lead in _leads(experiment, kind, single)
        ]
    )


def _balanced_behind(experiment: ExperimentResults) -> CheckResult:
    return _ahead_everywhere(_leads(experiment, "moe/cubic", "balanced/identity"))


def _balance_helps(experiment: ExperimentResults) -> CheckResult:
    gains = _leads(experiment, "balanced/identity", "moe/identity")
    most = _most(gains)
    found = at_most(most, 2.0)
    return replace(found, verdict="fails: it does help") if found.verdict == "fails" else found


def _overfits(experiment: ExperimentResults) -> CheckResult:
    return _ahead_everywhere(_leads(experiment, "single/cubic-128", "single/cubic-512"))


def _gap(published: Mapping[str, float], margin: float) -> Callable[[ExperimentResults], CheckResult]:
    """Checks the accuracies of single networks, for which the paper prints no deviations, within a margin."""

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        gaps = [
            abs(float(experiment.results[name]["accuracy"].mean()) - value)
            for name, value in published.items()
            if name in experiment.results
        ]
        near = sum(gap <= margin for gap in gaps)
        if near == len(gaps):
            verdict = "holds"
        else:
            verdict = (
                f"partly: {near} of {len(gaps)} are" if 2 * near >= len(gaps) else f"fails: {near} of {len(gaps)} are"
            )
        return CheckResult(verdict, float(np.median(gaps)))

    return evaluate


_GAP_RULE = (
    "Distance of the mean accuracy to the published one, which is that of one run; shown: the median, in points. Holds "
    "if all are within {margin:g} points, fails if fewer than half are."
)


def _table_3_singles() -> dict[str, float]:
    found: dict[str, float] = {}
    for prefix, values in PUBLISHED.items():
        if prefix.startswith("single/"):
            for setting, value in zip(SETTINGS, values, strict=True):
                assert isinstance(value, float)
                found[f"{prefix}/s{setting}"] = value
    return found


def _by_activation(table: str, suffix: str = "") -> dict[str, float]:
    key = table + suffix
    pairs = zip(ACTIVATIONS, PUBLISHED[key], strict=True)
    return {f"{table}/{name}{suffix}": value for name, value in pairs if isinstance(value, float)}


def _below_the_bound(prefix: str) -> Callable[[ExperimentResults], CheckResult]:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        found = [percentage(each["accuracy"]) for name, each in experiment.results.items() if name.startswith(prefix)]
        return at_most(_most(found), 87.5)

    return evaluate


def _dispatch_claim(kind: str) -> ClaimCheck:
    linear = kind == "identity"

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        found = percentage(purity(final_table(experiment, f"moe/{kind}/s1")))
        return at_most(found, 60.0) if linear else at_least(found, 99.0)

    described = claim(
        "table6-mixed" if linear else "table4-pure",
        "Table 6" if linear else "Tables 4 and 5",
        "An expert of the linear mixture gets samples from different clusters (percentage that goes with the majority)."
        if linear
        else "An expert of the nonlinear mixture gets no samples, or those of one cluster (percentage that goes with "
        "the majority).",
        34.5 if linear else 99.9,
        "Percentage of samples in setting 1 whose expert works mostly on their cluster, mean over trials; 25 to 35 if "
        "the dispatch is independent of it. "
        + ("Holds if the interval is below 60." if linear else "Holds if it is above 99."),
    )
    return ClaimCheck(described, (f"moe/{kind}/s1",), evaluate)


def _track_entropy(result: CellArrays) -> Array:
    """(T, S)."""
    return entropies(result["track_dispatch"])


def _entropy_over_training(kind: str) -> ClaimCheck:
    linear = kind == "identity"

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        tracks = [_track_entropy(experiment.results[f"moe/{kind}/s{setting}"]) for setting in (1, 2)]
        shares = [mean(track[:, -1] / track[:, 0]) for track in tracks]
        return at_least(_least(shares), 0.5) if linear else at_most(_most(shares), 0.25)

    names = tuple(f"moe/{kind}/s{setting}" for setting in (1, 2))
    described = claim(
        f"fig3-{_NAMES[kind]}",
        "Figure 3",
        f"While it trains, the dispatch entropy of the {_NAMES[kind]} mixture "
        + ("remains large" if linear else "falls to almost nothing")
        + " (share of the entropy before training).",
        "remains large" if linear else "falls",
        "Entropy of the training samples' dispatch, noise included, after training over before; mean over trials, in "
        "the setting (1 or 2) that is worse for the claim. "
        + ("Holds if the interval is above 0.5." if linear else "Holds if the interval is below 0.25."),
    )
    return ClaimCheck(described, names, evaluate)


def _used(result: CellArrays) -> NDArray[np.bool_]:
    """(T, E): whether an expert has at least 1 % of the samples at the end."""
    load = result["track_dispatch"][:, -1].sum(axis=1)
    return load >= 0.01 * load.sum(axis=1, keepdims=True)


def _per_trial(result: CellArrays, over: Array, under: Array) -> Array:
    """(T,): the mean over the used experts of the ratio of two values (T, E)."""
    used = _used(result)
    return np.divide(over, under, out=np.zeros_like(over), where=used).sum(axis=1) / used.sum(axis=1)


def _second_signal(result: CellArrays) -> Array:
    """(T,): an expert's second-largest inner product with a feature signal over its largest."""
    ordered = np.sort(result["track_expert_feature"][:, -1], axis=-1)
    return _per_trial(result, ordered[..., -2], ordered[..., -1])


def signal_ratio(result: CellArrays, over: str, under: str) -> Array:
    """(T,): the largest inner product with the one kind of signal over that with the other."""
    return _per_trial(result, result[over][:, -1].max(axis=-1), result[under][:, -1].max(axis=-1))


def _inner_products() -> list[ClaimCheck]:
    third = 1 / 3

    def single_feature(experiment: ExperimentResults) -> CheckResult:
        return at_most(mean(_second_signal(experiment.results["moe/cubic/s1"])), third)

    def small(over: str, under: str) -> Callable[[ExperimentResults], CheckResult]:
        return lambda experiment: at_most(mean(signal_ratio(experiment.results["moe/cubic/s1"], over, under)), third)

    def many_signals(experiment: ExperimentResults) -> CheckResult:
        result = experiment.results["moe/identity/s1"]
        feature = _second_signal(result)
        centre = signal_ratio(result, "track_expert_centre", "track_expert_feature")
        return at_least(_least([mean(feature), mean(centre)]), third)

    def router_features(experiment: ExperimentResults) -> CheckResult:
        result = experiment.results["moe/identity/s1"]
        feature, centre = (result[f"track_router_{kind}"][:, -1].max(axis=(1, 2)) for kind in ("feature", "centre"))
        found, larger, trials = mean(feature / centre), int((feature > centre).sum()), len(feature)
        some = f"partly: in {larger} of {trials} trials" if larger else "fails"
        return CheckResult("holds" if 2 * larger > trials else some, found.value, found.interval)

    end = "Inner products after training in setting 1, mean over trials and experts with at least 1 % of the samples. "
    return [
        ClaimCheck(
            claim(
                "fig4-one-feature",
                "Figure 4",
                "Each nonlinear expert picks up one feature signal (second-largest inner product over the largest).",
                "one",
                f"{end}Holds if the interval is below 1/3.",
            ),
            ("moe/cubic/s1",),
            single_feature,
        ),
        ClaimCheck(
            claim(
                "fig4-no-centres",
                "Figure 4",
                "Nonlinear experts almost do not learn the centre signals (largest inner product with a centre over "
                "that with a feature).",
                "almost none",
                f"{end}Holds if the interval is below 1/3.",
            ),
            ("moe/cubic/s1",),
            small("track_expert_centre", "track_expert_feature"),
        ),
        ClaimCheck(
            claim(
                "fig4-router-centres",
                "Figure 4",
                "Their router learns the centre signals and hardly the features (largest inner product with a "
                "feature over that with a centre).",
                "small",
                f"{end}Holds if the interval is below 1/3.",
            ),
            ("moe/cubic/s1",),
            small("track_router_feature", "track_router_centre"),
        ),
        ClaimCheck(
            claim(
                "fig5-many-signals",
                "Figure 5",
                "A linear expert does not learn a specific feature signal but several feature and centre signals "
                "(ratio of inner products).",
                "several",
                f"{end}Shown: the smaller of two ratios, second-largest over largest feature, and largest centre over "
                "largest feature. Holds if the interval is above 1/3.",
            ),
            ("moe/identity/s1",),
            many_signals,
        ),
        ClaimCheck(
            claim(
                "fig5-router-features",
                "Figure 5",
                "The linear mixture's router may turn to feature signals even more than to centre signals (ratio of "
                "the largest inner products).",
                "can be larger",
                "Largest inner product of the router with a feature over the largest with a centre, after training "
                "in setting 1, mean over trials. Holds if it is above 1 in more than half of the trials, fails if in "
                "none.",
            ),
            ("moe/identity/s1",),
            router_features,
        ),
    ]


def _steps_needed(experiment: ExperimentResults) -> CheckResult:
    """Steps to 95 % accuracy in the slowest setting; a trial that does not reach it counts with all its steps."""
    needed: list[Estimate] = []
    never = trials = 0
    for name in _settings(experiment, "moe/cubic").values():
        result = experiment.results[name]
        there = result["track_probe_accuracy"] >= 95
        steps = np.where(there.any(axis=1), result["track_steps"][there.argmax(axis=1)], result["track_steps"][-1])
        needed.append(mean(steps))
        never, trials = never + int((~there.any(axis=1)).sum()), trials + len(there)
    found = at_most(_most(needed), 501.0)
    if never == 0 or found.verdict == "fails":
        return found
    missed = f"{never} of {trials} trials never get there"
    return replace(found, verdict=f"{'fails' if never == trials else 'partly'}: {missed}")


def _figure_1(experiment: ExperimentResults) -> CheckResult:
    """Checks that the nonlinear mixture's entropy is below half of the maximum and the linear one's above."""
    gap = mean(final_entropy(experiment, "figure1/identity") - final_entropy(experiment, "figure1/cubic"))
    nonlinear, linear = (
        mean(final_entropy(experiment, "figure1/cubic")),
        mean(final_entropy(experiment, "figure1/identity")),
    )
    parts = [below(nonlinear, _MOST / 2).verdict, at_least(linear, _MOST / 2).verdict]
    values = f"entropy {nonlinear.value:.2f} against {linear.value:.2f}"
    if parts == ["holds", "holds"]:
        verdict = "holds"
    elif gap.high <= 0 or parts == ["fails", "fails"]:
        verdict = "fails"
    else:
        verdict = f"partly: {values}" if "fails" in parts and "holds" in parts else f"undecided: {values}"
    return CheckResult(verdict, gap.value, gap.interval)


CHECKS: tuple[ClaimCheck, ...] = (
    *(_mixture_accuracy(kind, setting) for kind in ("cubic", "identity") for setting in SETTINGS),
    _entropy_claim("cubic"),
    _entropy_claim("identity"),
    ClaimCheck(
        claim(
            "table1-nonlinear-ahead",
            "Table 1",
            "The mixture of nonlinear experts is more accurate than that of linear ones, in all settings (lead in "
            "points).",
            "ahead in settings 1 to 4",
            _AHEAD,
        ),
        ("moe/cubic/", "moe/identity/"),
        _nonlinear_ahead,
    ),
    ClaimCheck(
        claim(
            "table3-singles-behind",
            "Table 3",
            "Single networks are less accurate than both mixtures, also with four times as many filters (lead in "
            "points).",
            "behind in settings 1 to 4",
            _AHEAD,
        ),
        ("moe/cubic/", "moe/identity/", "single/"),
        _singles_behind,
    ),
    ClaimCheck(
        claim(
            "table3-singles",
            "Table 3",
            "Single networks have the accuracies of Tables 1 and 3, from 52 to 79 % (median distance in points).",
            "52.09 to 79.48 %",
            _GAP_RULE.format(margin=5),
        ),
        ("single/",),
        _gap(_table_3_singles(), 5.0),
        not_quick=True,
    ),
    ClaimCheck(
        claim(
            "table3-overfits",
            "Table 3",
            "A single nonlinear network gets worse with more filters (accuracy with 128 less that with 512, in "
            "points).",
            "worse in settings 1 to 4",
            _AHEAD,
        ),
        ("single/cubic-128/", "single/cubic-512/"),
        _overfits,
    ),
    _dispatch_claim("cubic"),
    _dispatch_claim("identity"),
    ClaimCheck(
        claim(
            "table7-bound",
            "Table 7",
            "No single network is better than 87.5 % where features and feature noise are alike, whatever its "
            "activation (accuracy of the best).",
            76.91,
            "Test accuracy in percent of the best of six activations, mean over trials; α and γ from (1, 2). Holds "
            "if the interval is at or below 87.5.",
        ),
        ("table7/",),
        _below_the_bound("table7/"),
    ),
    ClaimCheck(
        claim(
            "table7-values",
            "Table 7",
            "Their accuracies are those of Table 7 (median distance in points).",
            "72.69 to 76.91 %",
            _GAP_RULE.format(margin=3),
        ),
        ("table7/",),
        _gap(_by_activation("table7"), 3.0),
        not_quick=True,
    ),
    ClaimCheck(
        claim(
            "table8-bound",
            "Table 8",
            "Single networks fail in settings 1 and 2 as well, whatever their activation (accuracy of the best).",
            82.01,
            "Test accuracy in percent of the best of six activations and two settings, mean over trials. Holds if the "
            "interval is at or below 87.5, the bound of Theorem 4.1, which does not cover these settings.",
        ),
        ("table8/",),
        _below_the_bound("table8/"),
    ),
    ClaimCheck(
        claim(
            "table8-values",
            "Table 8",
            "Their accuracies are those of Table 8 (median distance in points).",
            "60.59 to 82.01 %",
            _GAP_RULE.format(margin=3),
        ),
        ("table8/",),
        _gap({**_by_activation("table8", "/s1"), **_by_activation("table8", "/s2")}, 3.0),
    ),
    *(
        _published_mean(
            f"balanced/identity/s{setting}",
            f"table9-s{setting}",
            "Table 9",
            "the mixture of linear experts with a load-balancing loss",
        )
        for setting in SETTINGS
    ),
    ClaimCheck(
        claim(
            "table9-behind",
            "Table 9",
            "With a load-balancing loss the linear mixture is still less accurate than the nonlinear one without "
            "(lead of the nonlinear one in points).",
            "behind in settings 1 to 4",
            _AHEAD,
        ),
        ("moe/cubic/", "balanced/identity/"),
        _balanced_behind,
    ),
    ClaimCheck(
        claim(
            "table9-no-key",
            "Table 9",
            "Load balancing is not the key: it hardly helps the linear mixture (points gained).",
            0.82,
            "Accuracy gained by the loss, trial by trial on the same samples, in the setting where it is largest. "
            "Holds if the interval is at or below 2 points. Coefficient 1e-3 as printed (for images; none is printed "
            "for these data), 1e-4 as released.",
        ),
        ("balanced/identity/", "moe/identity/"),
        _balance_helps,
    ),
    ClaimCheck(
        claim(
            "fig3-steps",
            "Figure 3",
            "The nonlinear mixture learns within the 500 epochs that the figure shows, in all settings (steps to 95 "
            "%).",
            "within 500",
            "Steps until the accuracy on 2000 test samples is first seen at 95 % or more, mean over trials, in the "
            "slowest setting; measured every 80 steps as printed and 10 as released, 160 and 20 with the quick "
            "preset. A trial that never gets there counts with all its steps. Holds if all get there and the interval "
            "is at or below 501, fails if none does or the interval is above.",
        ),
        ("moe/cubic/",),
        _steps_needed,
    ),
    ClaimCheck(
        claim(
            "fig1-clusters",
            "Figure 1",
            "With four experts for four clusters, nonlinear experts recover the clusters and linear ones do not "
            "(dispatch entropy of the linear mixture less that of the nonlinear one).",
            "recovered and not",
            "Entropies over ten trials on 1600 samples. Holds if the nonlinear mixture's interval is below half of "
            "log 4 and the linear one's above, fails if both are on the other side or the interval of the difference "
            "is at or below 0, partly if one is as it should be and the other on the other side, else undecided.",
        ),
        ("figure1/cubic", "figure1/identity"),
        _figure_1,
    ),
    _entropy_over_training("cubic"),
    _entropy_over_training("identity"),
    *_inner_products(),
)
