"""Claims on Table 2 of Chen et al. 2022 with the authors' code, on CIFAR-10-Rotate.

The code differs from print in more than details: a nearly constant learning rate, since the cosine is over 200 epochs
of which 10 (ResNet18) or 30 (MobileNetV2) run; gradients of experts divided by the sum of their tensors' norms; a
softmax of a softmax in the loss; the gate softmax(h + noise); the coefficient 0.01 of the balance loss; black images in
the experts' BatchNorm; blurred images to train on and sharp ones to test on; and the best test epoch of five runs. Two
claims of our own per network ask whether black images and sharp test images make the result.

On a GPU networks compute in bfloat16 and images that do not fill a batch are left out of the epoch, as in print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesaic.intervals import Sample, difference, percentage
from moesaic.papers.chen2022.experiments_images import RELEASED_RUNS, ImageResult, released_runs_of
from moesaic.papers.chen2022.figures_images import NETWORKS
from moesaic.papers.engine import paper
from moesaic.papers.engine.decision_rules import MEAN_RULE, CheckResult, above_zero, same_mean
from moesaic.papers.engine.findings import Claim

__all__ = ["CHECKS", "GPU_HOURS", "PUBLISHED"]

ExperimentResults = paper.ExperimentResults[ImageResult]
ClaimCheck = paper.ClaimCheck[ImageResult]

PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "resnet18": {"single": (88.23, 0.96), "mixture": (92.60, 2.01)},
    "mobilenetv2": {"single": (85.76, 2.91), "mixture": (89.85, 2.54)},
}
"""Test accuracy in percent on CIFAR-10-Rotate and its standard deviation: Table 2."""

_RUNS = 10
"""Runs behind the published mean and standard deviation, as printed."""

GPU_HOURS: dict[str, dict[str, float]] = {
    "resnet18": {"single": 0.2, "mixture": 0.6, "no-black": 0.2},
    "mobilenetv2": {"single": 0.5, "mixture": 2.0, "no-black": 0.5},
}
"""Estimated hours on an H200 for all trials: black images make a mixture of four as expensive as four networks."""

_KIND_NAMES = {"single": "single network", "mixture": "mixture of four"}


def _best(runs: Sequence[ImageResult], *, blurred: bool = False) -> list[float]:
    """The accuracy of each run after its best test epoch."""
    return [float((run.blurred_accuracies if blurred else run.accuracies).max()) for run in runs]


def _leads(experiment: ExperimentResults, network: str, *, blurred: bool = False) -> list[float]:
    """The mixture's lead over the single network in each trial, in points."""
    kinds = ("mixture", "single")
    mixture, single = (_best(released_runs_of(experiment, network, kind), blurred=blurred) for kind in kinds)
    return [m - s for m, s in zip(mixture, single, strict=True)]


def _rule(network: str) -> str:
    epochs, trials = RELEASED_RUNS[network]
    return (
        f"As released: {trials} trials of {epochs} epochs, of which the best test epoch counts; training images are "
        "blurred, test images are not. "
    )


def _check(
    network: str, kinds: Sequence[str], claim: Claim, evaluate: Callable[[ExperimentResults], CheckResult]
) -> ClaimCheck:
    hours = sum(GPU_HOURS[network][kind] for kind in kinds)
    return ClaimCheck(
        claim,
        tuple(f"images/released/{network}/{kind}/" for kind in kinds),
        evaluate,
        fidelities=("released",),
        missing=f"not run here: needs --preset full --device cuda, about {hours:.1f} GPU hours (H200, estimated)",
    )


def _ahead(network: str) -> ClaimCheck:
    (single, _), (mixture, _) = PUBLISHED[network]["single"], PUBLISHED[network]["mixture"]
    claim = Claim(
        id=f"table2-released-{network}",
        paper="chen2022",
        where="Table 2",
        statement="Trained and tested as in the authors' code, a mixture of four beats a single network on "
        f"CIFAR-10-Rotate, for {NETWORKS[network]} (points).",
        published=round(mixture - single, 2),
        rule=f"{_rule(network)}Lead in test accuracy of the mixture over the single network of the same trial, in "
        "points, with the interval over trials. Holds if the interval is above 0, fails if it is below.",
    )
    return _check(
        network, ("single", "mixture"), claim, lambda experiment: above_zero(difference(_leads(experiment, network)))
    )


def _accuracy(network: str, kind: str) -> ClaimCheck:
    published, deviation = PUBLISHED[network][kind]

    def evaluate(experiment: ExperimentResults) -> CheckResult:
        found = _best(released_runs_of(experiment, network, kind))
        return same_mean(Sample.of(found), Sample(published, deviation, _RUNS), percentage(found))

    claim = Claim(
        id=f"table2-released-{network}-{kind}",
        paper="chen2022",
        where="Table 2",
        statement=f"Trained and tested as in the authors' code, the {_KIND_NAMES[kind]} has {published} ± "
        f"{deviation} % test accuracy on CIFAR-10-Rotate, for {NETWORKS[network]}.",
        published=published,
        rule=f"{_rule(network)}Mean test accuracy over trials, in percent. {MEAN_RULE}",
    )
    return _check(network, (kind,), claim, evaluate)


def _blur_matters(network: str) -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        sharp, blurred = _leads(experiment, network), _leads(experiment, network, blurred=True)
        return above_zero(difference([s - b for s, b in zip(sharp, blurred, strict=True)]))

    claim = Claim(
        id=f"table2-released-{network}-blur",
        paper="chen2022",
        where="Our own",
        statement="The mixture's lead with the authors' code comes from test images that are sharper than the training "
        f"images, for {NETWORKS[network]} (points of the lead that go where test images are blurred too).",
        published=None,
        rule=f"{_rule(network)}Lead of the mixture on sharp test images less its lead on blurred ones, of the same "
        "networks, each after its best epoch on these images, in points, with the interval over trials. Holds if the "
        "interval is above 0, fails if it is below.",
    )
    return _check(network, ("single", "mixture"), claim, evaluate)


def _black_matters(network: str) -> ClaimCheck:
    def evaluate(experiment: ExperimentResults) -> CheckResult:
        black, without = (_best(released_runs_of(experiment, network, kind)) for kind in ("mixture", "no-black"))
        return above_zero(difference([b - w for b, w in zip(black, without, strict=True)]))

    claim = Claim(
        id=f"table2-released-{network}-black",
        paper="chen2022",
        where="Our own",
        statement="The mixture's lead with the authors' code comes from the black images in its experts' BatchNorm, "
        f"for {NETWORKS[network]} (points of the lead that go where experts get their own images only).",
        published=None,
        rule=f"{_rule(network)}Test accuracy of the mixture less that of a mixture of the same trial whose experts get "
        "no black images, in points, with the interval over trials. Holds if the interval is above 0, fails if it is "
        "below.",
    )
    return _check(network, ("mixture", "no-black"), claim, evaluate)


CHECKS: tuple[ClaimCheck, ...] = (
    *(_ahead(network) for network in RELEASED_RUNS),
    *(_accuracy(network, kind) for network in RELEASED_RUNS for kind in ("single", "mixture")),
    *(_blur_matters(network) for network in RELEASED_RUNS),
    *(_black_matters(network) for network in RELEASED_RUNS),
)
