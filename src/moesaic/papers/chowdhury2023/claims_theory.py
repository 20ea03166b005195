"""Claims of Chowdhury et al. 2023's theory: Lemmas 4.1, K.1, G.1, H.1 and I.1."""

from __future__ import annotations

import torch

from moesaic.intervals import mean
from moesaic.papers.chowdhury2023.experiments_two_layer import (
    COUPLED_WIDTH,
    PATTERNS,
    ClaimCheck,
    ExperimentResults,
    claim,
)
from moesaic.papers.chowdhury2023.theory.separability import inseparable_samples, patterns_separable
from moesaic.papers.engine.decision_rules import CheckResult, at_least

__all__ = ["CHECKS"]


def _discriminative_routers(experiment: ExperimentResults) -> CheckResult:
    found = experiment.results["lemma4.1/separate/2000"].routed
    shares = mean(100 * found[:, :, PATTERNS.l_star - 1].min(axis=1))
    if shares.value == 100:
        verdict = "holds"
    elif shares.low >= 99:
        verdict = "partly: not of every sample"
    else:
        verdict = "fails" if shares.high < 99 else "undecided: the interval lies on both sides of 99"
    return CheckResult(verdict, shares.value, shares.interval)


def _coupled(experiment: ExperimentResults) -> CheckResult:
    kinds = ("separate", "joint", "cnn")
    shares = [mean(100 * experiment.results[f"coupling/{kind}/{COUPLED_WIDTH}"].kept_patterns[:, -1]) for kind in kinds]
    return at_least(min(shares, key=lambda share: share.value), 50.0)


def _inseparable(experiment: ExperimentResults) -> CheckResult:
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
    return CheckResult(f"fails: {reason} ({proof})" if separable else "holds", separable)


CHECKS: tuple[ClaimCheck, ...] = (
    ClaimCheck(
        claim(
            "lemma4.1-routers",
            "Lemma 4.1",
            "For l ≥ l*, separately trained routers send the discriminative patch of every sample to its expert.",
            100.0,
            "On the distribution of Section 4.2 (n = 16, d = 64, δ_d = 0.3, δ_r = 0.6, l* = 4) with 2 000 training "
            "samples: share of test samples in percent for l = l*, worse class. Holds at 100 in every trial, partly "
            "if the interval is above 99, fails if it is below, else undecided.",
        ),
        ("lemma4.1/",),
        _discriminative_routers,
        ("print",),
    ),
    ClaimCheck(
        claim(
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
    ClaimCheck(
        claim(
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
)
