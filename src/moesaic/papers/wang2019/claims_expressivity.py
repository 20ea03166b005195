"""Claims of Wang et al. 2019's supplement that need no training: expressive power, and the wide VGG-16s of Table 1.

Of Table 1: which layers its columns widen, and whether they are equal in weights and in multiply-adds.

Section A.1 uses the rank of the tensor that represents a network (`channel_ranks`) and the probability that two inputs
open the same channels (`mask_collisions`). Its wording is too strong in these points:

- the rank is n^(2^(L−1)) and not n^(2^L), only the first layer's width counts, and M features are a limit
- C(m, n)^(−L) is the probability of uniform n-subsets, and not of channels that open "i.i.d. with respect to each"
- 1 − C(m, n)^(−L) is the probability for one pair of inputs: not that of a rank, and not that for all inputs at once
- masks that restore the rank must look at the whole input
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from moesaic.intervals import Estimate, mean
from moesaic.models.vgg import VGG16_WIDTHS
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import CellArrays
from moesaic.papers.engine.decision_rules import CheckResult, below
from moesaic.papers.engine.findings import Claim
from moesaic.papers.engine.power_law import power_law_exponent
from moesaic.papers.wang2019.experiments_expressivity import BlindCell, CollisionCell, DistinctCell, RankCell, WidthCell
from moesaic.papers.wang2019.theory.channel_ranks import one_sided_rank
from moesaic.papers.wang2019.theory.mask_collisions import coin_collision, coin_confusion, subset_collision
from moesaic.papers.wang2019.vgg_widths import WIDENINGS

__all__ = ["CHECKS"]

ExperimentResults: TypeAlias = paper.ExperimentResults[Any]
ClaimCheck: TypeAlias = paper.ClaimCheck[Any]

_CLOSE = 1e-6
_LARGE = ((64,), (8,))
"""Channels and open channels of a layer whose collisions are too rare to be sampled."""


def _dense(experiment: ExperimentResults) -> CheckResult:
    """Exponents of n by depth."""
    exponents: dict[int, float] = {}
    for layers in (1, 2, 3):
        cell, found = _widths(experiment, layers)
        within = found["widths"] <= cell.features
        exponents[layers] = power_law_exponent(found["widths"][within].tolist(), found["ranks"][within][:, None])
    if all(abs(exponents[layers] - 2**layers) < _CLOSE for layers in exponents):
        verdict = "holds"
    elif all(abs(exponents[layers] - 2 ** (layers - 1)) < _CLOSE for layers in exponents):
        verdict = "partly: a power of n that doubles with every layer, but it is 2^(L−1), half of the printed one"
    else:
        verdict = "fails"
    return CheckResult(verdict, round(exponents[3], 6))


def _between(experiment: ExperimentResults) -> CheckResult:
    """Whether each layer's width counts."""
    shares = [_widths(experiment, layers)[1] for layers in (2, 3)]
    count = [found["narrowed"] < found["full"][0] for found in shares]
    largest = max(float((found["narrowed"] / found["full"][0]).max()) for found in shares)
    if all(each.all() for each in count):
        verdict = "holds"
    elif all(each[0] and not each[1:].any() for each in count):
        verdict = "partly: only the first layer's width counts"
    else:
        verdict = "partly: not that of every layer" if any(each.any() for each in count) else "fails"
    return CheckResult(verdict, largest)


def _limited(experiment: ExperimentResults) -> CheckResult:
    """Ranks of networks with more channels than features, as shares of M^(N/2)."""
    shares: list[float] = []
    for layers in (1, 2, 3):
        cell, found = _widths(experiment, layers)
        beyond = found["widths"] > cell.features
        shares += (found["ranks"][beyond] / cell.features ** (2**layers // 2)).tolist()
    return CheckResult("holds" if max(shares) <= 1 else "fails", max(shares))


def _static(experiment: ExperimentResults) -> CheckResult:
    ratios = np.concatenate([found["static"] / found["narrow"] for _, found in _ranks(experiment)])
    return CheckResult("holds" if (ratios == 1).all() else "fails", float(ratios.max()))


def _dynamic(experiment: ExperimentResults) -> CheckResult:
    least, promised = 1.0, True
    for cell, found in _ranks(experiment):
        share = float((found["dynamic"] >= found["dense"]).mean())
        least = min(least, share)
        promised &= share >= 1 - subset_collision(cell.widths, cell.open_channels)
    return CheckResult("holds" if promised else "fails", 100 * least)


def _one_sided(experiment: ExperimentResults) -> CheckResult:
    shares: list[float] = []
    bounded = True
    for cell, found in _ranks(experiment):
        bound = one_sided_rank(cell.widths, cell.open_channels, cell.features)
        bounded &= bool((found["one_sided"] <= bound).all())
        if bound < found["dense"].min():
            shares += (found["one_sided"] / found["dense"]).tolist()
    # where the bound is below the dense network's rank, a rank within it is too
    return CheckResult("holds" if bounded else "fails", max(shares))


def _rank_probability(experiment: ExperimentResults) -> CheckResult:
    found, printed = experiment.results["maskings"]["restored"], 1 - subset_collision((2,), (1,))
    share = float(found.mean())
    if np.abs(found - printed).max() < _CLOSE:
        return CheckResult("holds", share)
    direction = "more" if share > printed else "less"
    return CheckResult(f"fails: {direction} often; {printed:g} is the probability for one pair of inputs", share)


def _subsets(experiment: ExperimentResults) -> CheckResult:
    """Checks the estimate that is farthest from 1."""
    ratios = [
        mean(found["subsets"] / subset_collision(cell.widths, cell.open_channels))
        for cell, found in _collisions(experiment)
    ]
    return _near_one(max(ratios, key=lambda ratio: abs(ratio.value - 1)), 0.95, 1.05)


def _coins(experiment: ExperimentResults) -> CheckResult:
    farthest, wrong, cells = 1.0, 0, _collisions(experiment)
    for cell, found in cells:
        ratio = float(found["coins"].mean()) / subset_collision(cell.widths, cell.open_channels)
        wrong += not 0.95 <= ratio <= 1.05
        farthest = max(farthest, ratio, key=lambda each: abs(np.log(each)))
    exact = coin_collision(_LARGE[0], [_LARGE[1][0] / _LARGE[0][0]]) / subset_collision(*_LARGE)
    wrong += not 0.95 <= exact <= 1.05
    farthest = max(farthest, exact, key=lambda each: abs(np.log(each)))
    many = len(cells) + 1
    verdict = "holds" if not wrong else "fails" if 2 * wrong >= many else f"partly: not for {wrong} of {many} layers"
    return CheckResult(verdict, farthest)


def _pairs(experiment: ExperimentResults) -> CheckResult:
    cell, found = _blind(experiment)
    return _near_one(mean(found["subsets"] / subset_collision(cell.widths, cell.open_channels)), 0.8, 1.25)


def _closing(experiment: ExperimentResults) -> CheckResult:
    cell, found = _blind(experiment)
    ratio = mean(found["coins"] / subset_collision(cell.widths, cell.open_channels))
    expected_ratio = mean(found["coins"] / coin_confusion(cell.widths, cell.probabilities))
    explained = expected_ratio.low >= 0.8 and expected_ratio.high <= 1.25
    if ratio.low > 1 and explained:
        verdict = "holds"
    else:
        verdict = (
            "fails"
            if ratio.high < 1
            else "partly: more often, but not as calculated"
            if ratio.low > 1
            else "undecided: 1 is in the interval"
        )
    return CheckResult(verdict, ratio.value, ratio.interval)


def _all_at_once(experiment: ExperimentResults) -> CheckResult:
    cell = experiment.plan["distinct"]
    assert isinstance(cell, DistinctCell)
    return below(
        mean(experiment.results["distinct"]["distinct"]), 1 - subset_collision(cell.widths, cell.open_channels)
    )


def _columns(experiment: ExperimentResults) -> CheckResult:
    """Number of columns that widen the layers of their names, as far as they are printed."""
    named = {"w1_high": {13}, "w1_mid": {5}, "w4_low": {1, 2, 3, 4}, "w13_all": set(range(1, 14))}
    agree, lost = 0, list[str]()
    for name, column in WIDENINGS.items():
        printed = {number for number in range(1, 14) if number not in column.reconstructed}
        wider = {number for number in printed if column.widths[number - 1] > VGG16_WIDTHS[number - 1]}
        if wider == named[name] & printed:
            agree += bool(wider)
            lost += [] if wider else [column.title]
    if agree == len(named):
        verdict = "holds"
    elif agree + len(lost) == len(named):
        verdict = f"undecided: {agree} of {len(named)} do, and what {' and '.join(lost)} widens is lost"
    else:
        verdict = f"partly: {agree} of {len(named)} do" if agree else "fails"
    return CheckResult(verdict, float(agree))


def _equal_weights(experiment: ExperimentResults) -> CheckResult:
    found = experiment.results["table1"]
    weights = found["weights"][found["complete"].astype(bool)]
    ratio = float(weights.max() / weights.min())
    return CheckResult("holds" if ratio <= 1.01 else "fails", ratio)


def _unequal_work(experiment: ExperimentResults) -> CheckResult:
    work = experiment.results["table1"]["work"]
    ratio = float(work.max() / work.min())
    return CheckResult("holds" if ratio > 1.1 else "fails", ratio)


def _near_one(ratio: Estimate, low: float, high: float) -> CheckResult:
    if ratio.low >= low and ratio.high <= high:
        verdict = "holds"
    else:
        apart = ratio.high < low or ratio.low > high
        verdict = "fails" if apart else f"undecided: the interval is not within {low:g} to {high:g}"
    return CheckResult(verdict, ratio.value, ratio.interval)


def _widths(experiment: ExperimentResults, layers: int) -> tuple[WidthCell, CellArrays]:
    cell = experiment.plan[f"widths/L={layers}"]
    assert isinstance(cell, WidthCell)
    return cell, experiment.results[f"widths/L={layers}"]


def _ranks(experiment: ExperimentResults) -> list[tuple[RankCell, CellArrays]]:
    return [(cell, experiment.results[name]) for name, cell in experiment.plan.items() if isinstance(cell, RankCell)]


def _collisions(experiment: ExperimentResults) -> list[tuple[CollisionCell, CellArrays]]:
    return [
        (cell, experiment.results[name]) for name, cell in experiment.plan.items() if isinstance(cell, CollisionCell)
    ]


def _blind(experiment: ExperimentResults) -> tuple[BlindCell, CellArrays]:
    cell = experiment.plan["blind"]
    assert isinstance(cell, BlindCell)
    return cell, experiment.results["blind"]


def _claimed(
    id: str,
    statement: str,
    published: float | str | None,
    rule: str,
    cell_prefixes: str,
    evaluate: Callable[[ExperimentResults], CheckResult],
    where: str = "Supplement A.1",
) -> ClaimCheck:
    return ClaimCheck(Claim(id, "wang2019", where, statement, published, rule), (cell_prefixes,), evaluate, ("print",))


_OWN = "Our own"
_RANK = (
    "Rank of the tensor, laid out as a matrix with odd patches as rows, of networks with Gaussian weights; see "
    "moesaic.papers.wang2019.theory.channel_ranks. "
)
_RANK_CASES = (
    f"{_RANK}Networks of 1 to 3 layers with 2 of 3 channels open and 4 features, and of 2 layers with 1 of 4 open and "
    "6 features, 5 of each. "
)

CHECKS: tuple[ClaimCheck, ...] = (
    _claimed(
        "rank-dense",
        "The rank of a network of L layers of n channels scales as n^(2^L), for almost all weights (exponent of n with "
        "three layers).",
        8.0,
        f"{_RANK}Slope of log rank over log n, n up to the number of features, with 1, 2 and 3 layers. Holds if it is "
        "2^L with each, partly if it is 2^(L−1) with each, else fails.",
        "widths/",
        _dense,
    ),
    _claimed(
        "rank-between",
        "The width that counts is that of the channels between layers (largest rank with one layer narrowed to a "
        "single channel, as a share of the whole network's).",
        "n is the number of channels between layers",
        f"{_RANK}Networks of 2 and 3 layers; each layer in turn gets one channel. Holds if that makes the rank smaller "
        "whichever layer it is, fails if it never does, partly in between.",
        "widths/",
        _between,
    ),
    _claimed(
        "rank-features",
        "Width beyond the number M of features adds nothing: the rank stays at M^(N/2) (largest rank, as a share of "
        "that).",
        None,
        f"{_RANK}Networks of 1 to 3 layers with more channels than features. Holds if no rank is above M^(N/2). The "
        "supplement has no limit, and says that M can be large.",
        "widths/",
        _limited,
        _OWN,
    ),
    _claimed(
        "rank-static",
        "With static sparse weights that leave n of m channels, the rank still scales as that of a network of n "
        "channels (ratio of the two).",
        1.0,
        f"{_RANK_CASES}One random mask for all inputs; rank over that of another network with as many channels as are "
        "open. Holds if it is 1 in every trial.",
        "ranks/",
        _static,
    ),
    _claimed(
        "rank-dynamic",
        "With masks that depend on the input, the expressive power of n open of m channels is that of a dense network "
        "of m channels or more (percentage of networks).",
        "a probability of 1 − C(m, n)^(−L)",
        f"{_RANK_CASES}A random n-subset for every input; networks with at least the rank of the same network without "
        "masks. Shown: the least share. Holds if no share is below 1 − C(m, n)^(−L).",
        "ranks/",
        _dynamic,
    ),
    _claimed(
        "rank-one-sided",
        "Masks that look at half of the input do not restore the rank, though inputs that differ there share masks as "
        "seldom as others (largest rank, as a share of the dense network's).",
        None,
        f"{_RANK_CASES}A random n-subset for every choice of the odd patches. Holds if no rank is above "
        "one_sided_rank, and all are below the dense network's where that bound is.",
        "ranks/",
        _one_sided,
        _OWN,
    ),
    _claimed(
        "rank-probability",
        "The probability that the expressive power is that of the dense network or more is 1 − C(m, n)^(−L) (m = 2, "
        "n = 1, L = 1).",
        0.5,
        "All 16 ways to mask the four inputs of the smallest network, with two features, enumerated for 5 random "
        "networks: the share with rank 2. Holds if it is 1/2, else fails.",
        "maskings",
        _rank_probability,
    ),
    _claimed(
        "collision-subsets",
        "Two inputs get exactly the same channels with probability C(m, n)^(−L) (measured over that, where every "
        "n-subset is equally likely).",
        1.0,
        "Share of pairs among 1500 inputs with the same masks, over C(m, n)^(−L), mean over 10 trials: one layer of 8 "
        "channels with 1 to 4 open, and two layers of 4 with 2 open. Shown: the ratio farthest from 1. Holds if its "
        "interval is within 0.95 to 1.05.",
        "collisions/",
        _subsets,
    ),
    _claimed(
        "collision-coins",
        "The same holds where channels open i.i.d., each for itself with probability n/m (collisions over "
        "C(m, n)^(−L)).",
        1.0,
        "As for collision-subsets with coins, and 8 of 64 channels by the formula, where collisions are too rare to be "
        "seen. Shown: the ratio farthest from 1. Holds if all are within 0.95 to 1.05, fails if half of them or more "
        "are not.",
        "collisions/",
        _coins,
    ),
    _claimed(
        "pair-told-apart",
        "Two inputs that no channel distinguishes are distinguished with probability 1 − C(m, n)^(−L) (share that is "
        "not, over C(m, n)^(−L)).",
        1.0,
        "Networks of two layers with 1 of 3 channels open and 5 features; 2000 pairs of inputs that differ by what no "
        "filter sees, each with n-subsets of its own, in 10 networks. Holds if the interval is within 0.8 to 1.25.",
        "blind",
        _pairs,
    ),
    _claimed(
        "pair-closed",
        "Channels that open each for themselves can close a layer altogether, and distinguish fewer pairs than "
        "printed (share that is not distinguished, over C(m, n)^(−L)).",
        None,
        "As for pair-told-apart with coins of probability n/m. Holds if the interval is above 1 and the share is "
        "within 0.8 to 1.25 of coin_confusion, fails if it is below 1.",
        "blind",
        _closing,
        _OWN,
    ),
    _claimed(
        "inputs-told-apart",
        "1 − C(m, n)^(−L) is for one pair: that no two of 16 inputs share their channels is less likely (probability, "
        "m = 4, n = 2, L = 2).",
        None,
        "Share of 500 groups of 16 inputs in which all have other n-subsets, mean over 10 trials. Holds if the "
        "interval is below 1 − C(m, n)^(−L) = 0.972.",
        "distinct",
        _all_at_once,
        _OWN,
    ),
    _claimed(
        "table1-layers",
        "W1-High widens the top layer only, W1-Mid a layer in the middle only, W4-Low the lower 4 layers and W13-All "
        "all 13 convolutions (columns that do).",
        4.0,
        "Which channels of Table 1 are more than VGG-16's; five cells that the copy at hand has lost are left out. "
        "Holds if all four columns widen what is said and nothing else, undecided if that is so but for columns whose "
        "wider cells are lost, fails if none does, else partly.",
        "table1",
        _columns,
        "Table 1",
    ),
    _claimed(
        "table1-weights",
        "The widenings have equally many weights (most over fewest).",
        None,
        "Convolution weights of the two complete columns; the lost cells of the others are solved for so that they "
        "agree. Holds if the ratio is at most 1.01.",
        "table1",
        _equal_weights,
        _OWN,
    ),
    _claimed(
        "table1-work",
        "They are not equal in work: a study of the four compares networks of equal weights, not of equal "
        "multiply-adds (most over fewest).",
        None,
        "Multiply-adds of the convolutions for an image of 32×32, before any gate closes. Holds if the ratio is above "
        "1.1.",
        "table1",
        _unequal_work,
        _OWN,
    ),
)
