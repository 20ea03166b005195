"""Claims of Chowdhury et al. 2023 on capacity: widths, the separation of patterns, iterations, several classes.

Key findings II and III of Section 4.1, Table 1 and Section M, as far as two-layer networks show them. The theorems are
upper bounds with unknown constants; what is measured is the direction, and that no power is exceeded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moesaic.intervals import bootstrap, mean, percentage
from moesaic.papers.chowdhury2023.claims_mnist import grows, growth_rule, needed_growth
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    CLASSES,
    CNN_WIDTHS,
    LEVEL,
    NEURONS,
    PMOE_WIDTHS,
    SEPARATIONS,
    SPLIT_SAMPLES,
    SPLITS,
    ClaimCheck,
    ExperimentResults,
    claim,
    separated_patterns,
)
from moesaic.papers.chowdhury2023.theory.pattern_separation import separation
from moesaic.papers.engine.decision_rules import (
    AHEAD_RULE,
    CheckResult,
    above_zero,
    ahead_everywhere,
    at_least,
    below,
)
from moesaic.papers.engine.power_law import least_squares_slopes, power_law_exponent

__all__ = ["CHECKS"]


def _larger_cnn(experiment: ExperimentResults) -> CheckResult:
    ours = experiment.results["width/joint/40"].accuracy
    leads = [mean(ours - experiment.results[f"width/cnn/{m}"].accuracy) for m in CNN_WIDTHS]
    return ahead_everywhere(leads, "widths")


def _fewer_neurons(experiment: ExperimentResults) -> CheckResult:
    narrow, cnn = (experiment.results[name].accuracy for name in (f"width/joint/{PMOE_WIDTHS[0]}", "width/cnn/40"))
    return above_zero(mean(narrow - cnn))


def _split(experiment: ExperimentResults) -> CheckResult:
    places, results = experiment.series(f"split/N={SPLIT_SAMPLES}")
    slopes = least_squares_slopes(np.log2(places).tolist(), np.stack([each.accuracy for each in results]))
    found = below(mean(slopes), 0.0)
    return replace(found, verdict="fails: accuracy rises") if found.verdict == "fails" else found


def _delta(kind: str) -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        lines = [experiment.series(f"delta-{kind}/r={each}") for each in SEPARATIONS]
        sources = map(separated_patterns, SEPARATIONS)
        deltas = [separation(source.delta_d, source.delta_r) for source in sources]
        values = np.stack([np.stack([each.accuracy for each in results]) for _, results in lines])
        return needed_growth(deltas, lines[0][0], values, LEVEL, most_power=6.0)

    finding = claim(
        f"finding3-{kind}",
        "Key finding III",
        f"Larger separation among patterns, a smaller δ, reduces the samples that {kind}-training pMoE needs (exponent "
        "of δ).",
        "polynomial; Theorems 4.2 and 4.5: at most the 6th power",
        "The distribution of Section 4.2 (n = 16, d = 64, l* = 1, δ_d = 0.3) with δ_r of 0.3, 0.6, 0.8 and 0.9, so "
        "that δ = 1/(1 − max(δ_d², δ_r²)) is 1.1 to 5.3. Exponent of δ in the number of samples at which the mean test "
        f"accuracy reaches {LEVEL:g} %, interpolated between 10 and 640. {growth_rule(6.0)}; undecided too if fewer "
        "than two δ need a number within the sizes tried.",
    )
    return ClaimCheck(finding, (f"delta-{kind}/",), evaluate, ("print",))


def _iterations(experiment: ExperimentResults) -> CheckResult:
    lines = {l: experiment.series(prefix)[1][-1].epochs for l, prefix in experiment.series_prefixes("fig5").items()}

    def exponent(epochs: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
        return power_law_exponent(list(lines), epochs.mean(axis=1)[:, None])

    return grows(bootstrap(exponent, np.stack(list(lines.values()))), 4.0)


def _routed(experiment: ExperimentResults) -> CheckResult:
    shares = percentage(100 * experiment.results["classes/separate/2000"].routed[:, :, 0].min(axis=1))
    return at_least(shares, 99.0)


def _classified(experiment: ExperimentResults) -> CheckResult:
    kinds = ("separate", "joint")
    found = [percentage(experiment.results[f"classes/{kind}/2000"].accuracy) for kind in kinds]
    return at_least(min(found, key=lambda each: each.value), LEVEL)


_MANY = f"The distribution of Section M with c = {CLASSES} classes (n = 16, d = 64, l* = 1), 2 000 training samples. "

CHECKS: tuple[ClaimCheck, ...] = (
    ClaimCheck(
        claim(
            "fig6-split",
            "Our own",
            f"With {NEURONS} neurons in all, whatever the number of experts that share them, the accuracy of "
            "joint-training pMoE falls with k (points for every doubling of k).",
            None,
            f"{', '.join(map(str, SPLITS))} experts of {NEURONS}/k neurons where Figure 6 has five in each, "
            f"N = {SPLIT_SAMPLES}. Slope of test accuracy over log2 k, one a trial. Holds if the interval is below 0, "
            "fails if it is above, else undecided.",
        ),
        ("split/",),
        _split,
    ),
    ClaimCheck(
        claim(
            "finding2-fewer-neurons",
            "Key finding II",
            f"pMoE requires fewer neurons than the CNN: with {PMOE_WIDTHS[0]} neurons in all, joint-training pMoE is "
            "more accurate than the CNN with 40 (lead in points).",
            "fewer",
            "Lead in test accuracy with 300 samples of MNIST, trial by trial on the same samples. Holds if the "
            "interval is above 0, fails if it is below, else undecided.",
        ),
        ("width/",),
        _fewer_neurons,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "abstract-larger-cnn",
            "Abstract",
            "A CNN of larger capacity does not close the gap: joint-training pMoE of 40 neurons is more accurate than "
            "CNNs of 40 to 160 (lead in points).",
            "the same or even larger capacity",
            f"Lead in test accuracy with 300 samples of MNIST over CNNs of {', '.join(map(str, CNN_WIDTHS))} neurons, "
            f"trial by trial on the same samples; shown: the smallest. {AHEAD_RULE}",
        ),
        ("width/",),
        _larger_cnn,
        ("print",),
    ),
    _delta("separate"),
    _delta("joint"),
    ClaimCheck(
        claim(
            "table1-iterations",
            "Table 1",
            "In separate training the number of iterations grows polynomially with l (exponent of l).",
            "O(l⁴/ε⁸)",
            "Exponent of l in the mean number of epochs until the training error is zero, with the most samples of "
            f"Figure 5. {growth_rule(4.0)}.",
        ),
        ("fig5/",),
        _iterations,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "sectionM-routers",
            "Section M",
            "With more than two classes, routers trained in pairs send the discriminative patch of every sample to its "
            "expert (percent).",
            100.0,
            f"{_MANY}Share of test samples for l = l* = 1, worst class. Holds if the interval is at or above 99, fails "
            "if it is below.",
        ),
        ("classes/separate/",),
        _routed,
        ("print",),
    ),
    ClaimCheck(
        claim(
            "sectionM-accuracy",
            "Section M",
            "With more than two classes, separate- and joint-training pMoE learn the classes (test accuracy in "
            "percent).",
            "1 − ε",
            f"{_MANY}The less accurate of the two. Holds if the interval is at or above {LEVEL:g}, fails if it is "
            "below.",
        ),
        ("classes/",),
        _classified,
        ("print",),
    ),
)
