"""Claims of Chowdhury et al. 2023, Section 5.1: two-layer networks on MNIST patches (Figures 4 to 9), and our own.

Where the paper does not say how a figure was made, the rule of the claim states the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.intervals import Curve, Estimate, bootstrap, mean, sample_ratio, samples_at
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    LEVEL,
    ClaimCheck,
    ExperimentResults,
    Result,
    claim,
)
from moesaic.papers.engine.decision_rules import (
    AHEAD_RULE,
    CheckResult,
    ahead_everywhere,
    at_least,
    at_least_published,
    at_most,
    below,
)
from moesaic.papers.engine.power_law import least_squares_slopes, power_law_exponent

__all__ = ["CHECKS", "OWN_CHECKS", "grows", "growth_rule", "needed_growth"]

Array = NDArray[np.float64]

L_STAR = 6
"""l* as the paper reads it off Figure 7; l in Figures 4 and 9."""
GROWS = 0.1
"""Exponent from which on something counts as growing."""
K_PROPER = 8
"""The paper's number of experts, at which Figure 9 shows Assumption 4.4."""


def _accuracies(results: Sequence[Result]) -> Array:
    """Returns the test accuracies (S, T) in percent."""
    return np.stack([each.accuracy for each in results])


def _ahead(line: str, than: str = "fig4/cnn") -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        _, ours = experiment.series(f"fig4/{line}")
        _, theirs = experiment.series(than)
        return ahead_everywhere([mean(a.accuracy - b.accuracy) for a, b in zip(ours, theirs, strict=True)], "sizes")

    described = claim(
        id=f"fig4-{line}-ahead",
        where="Figure 4",
        statement=f"With the same number of training samples, {line}-training pMoE has a higher test accuracy than the "
        "CNN (lead in points).",
        published="ahead at every N",
        rule="Mean lead in test accuracy over the CNN, in points, at each number of samples N; trials share their "
        "data. Shown: the smallest lead. " + AHEAD_RULE,
    )
    return ClaimCheck(described, (f"fig4/{line}/", f"{than}/"), evaluate)


def _curve(experiment: ExperimentResults, prefix: str) -> Curve:
    sizes, results = experiment.series(prefix)
    return sizes, _accuracies(results)


def _arriving(result: CheckResult) -> CheckResult:
    """Replaces the verdict on an infinite ratio, which JSON cannot represent."""
    never = result.measured == float("inf")
    return replace(result, verdict=f"fails: {LEVEL:g} % is never reached here") if never else result


def _half_saved(line: str) -> ClaimCheck:
    described = claim(
        id=f"slides-{line}-half",
        where="Slides",
        statement=f"{line.capitalize()}-training pMoE saves almost half of the training samples that the CNN needs "
        "(share of samples that is left).",
        published="almost half",
        rule="The ratio of fig4-joint-samples and fig4-separate-samples, at 95 % test accuracy. Almost half is taken "
        "as 45 %: holds if the interval is at or below 0.55, fails if it is above.",
    )
    return ClaimCheck(described, (f"fig4/{line}/", "fig4/cnn/"), _sample_share(line, 0.55))


def _sample_share(line: str, limit: float) -> Callable[[ExperimentResults], CheckResult]:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        ours, theirs = _curve(experiment, f"fig4/{line}"), _curve(experiment, "fig4/cnn")
        return _arriving(at_most(sample_ratio(LEVEL, ours, theirs), limit))

    return evaluate


def _fewer_samples(line: str) -> ClaimCheck:
    described = claim(
        id=f"fig4-{line}-samples",
        where="Figure 4",
        statement=f"{line.capitalize()}-training pMoE needs only 60 % of the training samples that the CNN needs for "
        "95 % test accuracy (share of samples).",
        published=0.6,
        rule="Ratio of the samples at which the mean curves reach 95 %, interpolated linearly, bootstrapped over "
        "trials. A CNN that never gets there counts with the largest N, which favours it. Holds if the interval is "
        "at or below 0.6, fails if it is above.",
    )
    return ClaimCheck(described, (f"fig4/{line}/", "fig4/cnn/"), _sample_share(line, 0.6))


def _faster(experiment: ExperimentResults) -> CheckResult:
    def ratio(cnn: Array, separate: Array, joint: Array) -> float:
        return float(cnn.mean() / max(separate.mean(), joint.mean()))

    lines = [experiment.series(f"fig4/{line}")[1] for line in ("cnn", "separate", "joint")]
    return at_least(bootstrap(ratio, *(np.stack([each.epochs for each in line]) for line in lines)), 2.0)


def _success(results: Sequence[Result]) -> Array:
    """(S, T): 1 if the trial reached the level, else 0."""
    return (_accuracies(results) >= LEVEL).astype(np.float64)


def _sample_growth(experiment: ExperimentResults) -> CheckResult:
    lines = {l: experiment.series(prefix) for l, prefix in experiment.series_prefixes("fig5").items()}
    sizes = next(iter(lines.values()))[0]
    successes = np.stack([_success(results) for _, results in lines.values()])
    return needed_growth(list(lines), sizes, successes, 0.5, most_power=8.0)


def needed_growth(
    places: Sequence[float], sizes: Sequence[float], values: Array, level: float, *, most_power: float
) -> CheckResult:
    """Decides by `growth_rule` how the samples at which mean values reach a level grow.

    Args:
        places: What they grow with (P,).
        sizes: Sample sizes (S,).
        values: Values (P, S, T).
        level: Level to reach.
        most_power: Largest exponent of the theorem.
    """

    def exponent(several: Array) -> float:
        needed = [min(samples_at(level, sizes, each.mean(axis=1)), sizes[-1]) for each in several]
        return power_law_exponent(places, np.asarray(needed)[:, None])

    found = bootstrap(exponent, values)
    inside = sum(sizes[0] < samples_at(level, sizes, each.mean(axis=1)) <= sizes[-1] for each in values)
    if inside < 2:
        reason = f"only {inside} of {len(places)} settings need a number of samples within those tried"
        return CheckResult(f"undecided: {reason}", found.value, found.interval)
    return grows(found, most_power)


def grows(found: Estimate, most_power: float) -> CheckResult:
    """Whether an exponent is that of growth, at most like a power."""
    if found.low >= GROWS and found.high <= most_power:
        verdict = "holds"
    elif found.high < GROWS:
        verdict = "fails: it does not grow"
    elif found.low > most_power:
        verdict = "fails: it grows faster"
    else:
        verdict = f"undecided: the interval lies on both sides of {GROWS if found.low < GROWS else most_power:g}"
    return CheckResult(verdict, found.value, found.interval)


def growth_rule(most_power: float) -> str:
    """Text of the rule of `grows`."""
    return (
        f"Growth is taken as an exponent of {GROWS:g}, 23 % more for eight times as much. Holds if the bootstrap "
        f"interval is within {GROWS:g} to {most_power:g}, fails if it is all below or all above, else undecided"
    )


def _sweep(experiment: ExperimentResults, figure: str, least: float) -> tuple[list[float], list[Array]]:
    """Returns the x values from ``least`` on, and for each fixed N the accuracies (S, T)."""
    places: list[float] = []
    several: list[Array] = []
    for prefix in experiment.series_prefixes(figure).values():
        places, results = experiment.series(prefix)
        several.append(_accuracies(results)[[place >= least for place in places]])
    return [place for place in places if place >= least], several


def _falls(figure: str, least: float, logarithmic: bool) -> ClaimCheck:
    letter, unit = ("k", "doubling of k") if logarithmic else ("l", "patch")

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        places, several = _sweep(experiment, figure, least)
        axis = np.log2(places).tolist() if logarithmic else places
        found = below(mean(np.mean([least_squares_slopes(axis, each) for each in several], axis=0)), 0.0)
        return replace(found, verdict="fails: accuracy rises") if found.verdict == "fails" else found

    reason = "at which the paper's Figure 9 shows Assumption 4.4" if logarithmic else "which the paper reads off as l*"
    described = claim(
        id=f"{figure}-falls",
        where=f"Figure {figure[3:]}",
        statement=f"With the number of samples fixed, the accuracy of joint-training pMoE falls with {letter} once "
        f"{letter} is {least:.0f} or more (points for every {unit}).",
        published="falls",
        rule=f"Slope of test accuracy, in points for every {unit}, from {letter} = {least:.0f} on, {reason}; one slope "
        "a trial, averaged over the fixed sample sizes. Holds if the interval is below 0, fails if it is above.",
    )
    return ClaimCheck(described, (f"{figure}/",), evaluate)


def _order(figure: str, least: float, published: float) -> ClaimCheck:
    letter = "k" if figure == "fig6" else "l"

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        places, several = _sweep(experiment, figure, least)

        def exponent(*accuracies: Array) -> float:
            return float(np.mean([power_law_exponent(places, 100 - each) for each in accuracies]))

        found = bootstrap(exponent, *several)
        verdict = {
            (True, True): "holds",
            (True, False): f"partly: it grows, but not like the power {published:g}",
            (False, True): "undecided: it may not grow at all",
            (False, False): "fails: it does not grow"
            if found.high <= 0
            else f"fails: if it grows, then not like the power {published:g}",
        }[found.low > 0, found.low <= published <= found.high]
        return CheckResult(verdict, found.value, found.interval)

    described = claim(
        id=f"{figure}-order",
        where=f"Figure {figure[3:]}",
        statement=f"The test error of joint-training pMoE grows like {letter} to the power {published:g}, as Theorem "
        "4.5 predicts for a fixed number of samples (exponent).",
        published=published,
        rule=f"Exponent of {letter} in the mean test error from {letter} = {least:.0f} on, averaged over the fixed "
        f"sample sizes, bootstrapped over trials. Holds if the interval is above 0 and contains {published:g}, partly "
        "if it is above 0 alone, undecided if it contains both, else fails.",
    )
    return ClaimCheck(described, (f"{figure}/",), evaluate)


def _peak(experiment: ExperimentResults) -> CheckResult:
    places, several = _sweep(experiment, "fig7", 0)

    def best_place(*accuracies: Array) -> float:
        return places[int(np.mean([each.mean(axis=1) for each in accuracies], axis=0).argmax())]

    found = bootstrap(best_place, *several)
    if not found.low <= L_STAR <= found.high:
        verdict = "fails"
    else:
        narrow = found.low >= L_STAR - 2 and found.high <= L_STAR + 2
        verdict = "holds" if narrow else f"undecided: the peak is flat, it may lie from {found.low:g} to {found.high:g}"
    return CheckResult(verdict, found.value, found.interval)


def _top_four(experiment: ExperimentResults) -> CheckResult:
    return at_least_published(
        mean(100 * experiment.results["fig4/separate/300"].routed[:, :, 3].mean(axis=1)), 95.0, 3.0
    )


def _largest_gate(label: int, published: float) -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        return at_least_published(
            mean(100 * experiment.results["fig4/joint/300"].largest_gate[:, label]), published, 3.0
        )

    number = 1 if label == 1 else 2  # o_1 is the class y = +1, digits "1"
    described = claim(
        id=f"fig9-class{number}",
        where="Figure 9",
        statement=f"With 300 training samples and l = 6, one expert of joint-training pMoE gives the largest gate to "
        f'the discriminative patch of class {number} (digit "{label}") for {published:.0f} % of the test samples.',
        published=published,
        rule="Share of the class's test samples, in percent, for the expert that does best, mean over trials. Holds if "
        "the interval is above the published value less 3 points, fails if it is below that.",
    )
    return ClaimCheck(described, ("fig4/joint/", "fig4/joint/300"), evaluate)


def _best_samples(than: str) -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        return _arriving(below(sample_ratio(LEVEL, _curve(experiment, "best/pmoe"), _curve(experiment, than)), 1.0))

    other = "joint-training pMoE as printed" if than == "printed/joint" else "a CNN trained with the same care"
    described = claim(
        id="best-against-print" if than == "printed/joint" else "best-against-cnn",
        where="Our own",
        statement=f"Our two-layer pMoE (TwoLayer.best) needs fewer training samples for 95 % test accuracy than "
        f"{other} (share of samples).",
        published=None,
        rule="Ratio of the samples at which the mean curves reach 95 %, as for Figure 4. Holds if the interval is "
        "below 1, fails if it is above.",
    )
    return ClaimCheck(described, ("best/pmoe/", f"{than}/"), evaluate, ("best",))


def _suggested(experiment: ExperimentResults) -> CheckResult:
    places, results = experiment.series("sweep/l")
    accuracies = _accuracies(results)
    suggested = experiment.results["suggested/l/300"].suggested
    trials = len(suggested)
    nearest = [int(np.abs(np.asarray(places) - l).argmin()) for l in suggested]
    best = accuracies.mean(axis=1).argmax()
    loss = accuracies[best] - accuracies[nearest, np.arange(trials)]
    return at_most(mean(loss), 1.0)


CHECKS: tuple[ClaimCheck, ...] = (
    _fewer_samples("joint"),
    _fewer_samples("separate"),
    _ahead("joint"),
    _ahead("separate"),
    replace(
        ClaimCheck(
            claim(
                "fig4-faster",
                "Figure 4",
                "pMoE reaches zero training error in far fewer epochs than the CNN (how many times fewer).",
                "much faster; the CNN takes 150 epochs",
                "Mean epochs of the CNN over those of the slower pMoE, over all N, bootstrapped over trials. Far fewer "
                "is taken as half: holds if the interval is at or above 2, fails if it is below.",
            ),
            ("fig4/",),
            _faster,
        ),
        fidelities=("print",),  # the released code trains 150 epochs whatever happens
    ),
    ClaimCheck(
        claim(
            "fig5-polynomial",
            "Figure 5",
            "In separate training the number of samples needed grows polynomially with l (exponent of l).",
            "polynomial; Theorem 4.2: at most the 8th power",
            "A trial succeeds at 95 % test accuracy; the paper does not say at what. Exponent of l in the number of "
            "samples at which half of the trials succeed, interpolated; beyond the sizes tried, the smallest or the "
            f"largest of them. {growth_rule(8.0)}; undecided too if fewer than two l need a number within the sizes "
            "tried. These sizes could not show an exponent above 2, so what is at stake is that it grows.",
        ),
        ("fig5/",),
        _sample_growth,
    ),
    _falls("fig6", K_PROPER, logarithmic=True),
    _order("fig6", K_PROPER, 0.25),
    _falls("fig7", L_STAR, logarithmic=False),
    _order("fig7", L_STAR, 0.375),
    ClaimCheck(
        claim(
            "fig7-threshold",
            "Figure 7",
            "Test accuracy against l peaks at l* = 6.",
            6.0,
            "The l with the highest mean accuracy over the fixed sample sizes, bootstrapped over trials. Holds if the "
            "interval contains 6 and lies within 4 and 8, undecided if it is wider, fails if it does not contain 6.",
        ),
        ("fig7/", "fig7/N=300/4"),
        _peak,
    ),
    ClaimCheck(
        claim(
            "fig8-top4",
            "Figure 8",
            "With 300 training samples, the separately trained router has the discriminative patch among its top 4 for "
            "95 % of the test samples.",
            95.0,
            "Share of test samples in percent, mean of both classes, mean over trials. Holds if the interval is above "
            "the published value less 3 points, fails if it is below that.",
        ),
        ("fig4/separate/", "fig4/separate/300"),
        _top_four,
    ),
    _largest_gate(1, 95.0),
    _largest_gate(0, 92.0),
    _half_saved("joint"),
    _half_saved("separate"),
)
"""Claims of the paper."""

OWN_CHECKS: tuple[ClaimCheck, ...] = (
    _best_samples("printed/joint"),
    _best_samples("best/cnn"),
    ClaimCheck(
        claim(
            "best-suggested-l",
            "Our own",
            "The l that suggest_patches_per_expert picks from 300 training samples, without knowing where the "
            "discriminative patches are, is within one point of accuracy of the best l (points lost).",
            None,
            "Accuracy of TwoLayer.best at the best l of a sweep less that at each trial's suggested l (its nearest in "
            "the sweep), in points, mean over trials. Holds if the interval is at or below 1, fails if it is above.",
        ),
        ("sweep/", "suggested/"),
        _suggested,
        ("best",),
    ),
)
"""Our own claims on `TwoLayer.best`."""
