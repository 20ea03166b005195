"""Why claims of Wang et al. 2019 do not hold in the recorded run."""

from __future__ import annotations

from moesaic.papers.engine.findings import Cause

__all__ = ["CAUSES"]

_THREE = "Three trials of ten epochs do not decide it: the interval is {} points long."
_TWO = "Two trials of {} epochs do not decide it: the interval is {} points long."
_SHORT = (
    "Two trials of four epochs, of which gates learn in two: networks with gates are behind in training accuracy as "
    "well (accuracy-cost), so that they learn less in that time; no run is long enough to tell whether they catch up."
)

CAUSES: tuple[Cause, ...] = (
    Cause(
        "rank-dense",
        "print",
        "partly",
        "paper",
        "Computed ranks of networks with random weights are n^(2^(L−1)), for every n and L that ran "
        "(theory.channel_ranks).",
    ),
    Cause(
        "rank-between",
        "print",
        "partly",
        "paper",
        "Narrowing a layer to one channel changes the computed rank if it is the first, and does not otherwise "
        "(theory.channel_ranks).",
    ),
    Cause(
        "rank-probability",
        "print",
        "fails",
        "paper",
        "All 16 ways to mask the four inputs of the smallest network were enumerated, and 14 restore the rank; the "
        "formula is the probability that one pair of inputs gets different masks.",
    ),
    Cause(
        "collision-coins",
        "print",
        "fails",
        "paper",
        "Exact probabilities of independent channels differ from C(m, n)^(−L) by up to a factor of 609; for exactly n "
        "open channels the formula holds (theory.mask_collisions).",
    ),
    Cause(
        "table1-layers",
        "print",
        "undecided",
        "means",
        "The copy of the supplement at hand has lost the cells of W1-High, so that what it widens cannot be checked.",
    ),
    Cause("depends-on-data", "best", "undecided", "means", _THREE.format(41)),
    Cause(
        "gates-by-class",
        "best",
        "undecided",
        "means",
        "Three trials do not decide it: the interval of the ratio is 0.95 to 1.38, with the limit of 1.1 in it.",
    ),
    Cause("cost-ahead", "best", "undecided", "means", _THREE.format(6)),
    Cause("cost-lossless", "best", "undecided", "means", _THREE.format(6)),
    Cause(
        "wide-w1-high",
        "best",
        "undecided",
        "means",
        "One of two trials lost nearly everything, so that the interval has no meaning.",
    ),
    Cause("wide-w1-mid", "best", "fails", "means", _SHORT),
    Cause("wide-w4-low", "best", "fails", "means", _SHORT),
    Cause("wide-w13-all", "best", "undecided", "means", _TWO.format("four", 10)),
    Cause(
        "wide-where",
        "best",
        "undecided",
        "means",
        "One of two trials of W1-High lost nearly everything, so that the interval has no meaning.",
    ),
    Cause("wide-where-dense", "best", "undecided", "means", _TWO.format("four", 9)),
    Cause("remedy-embedding", "best", "undecided", "means", _TWO.format("ten", 9)),
    Cause("remedy-schedule", "best", "undecided", "means", _TWO.format("ten", 26)),
    Cause("remedy-noise", "best", "undecided", "means", _TWO.format("ten", 45)),
    Cause(
        "remedy-topk",
        "best",
        "undecided",
        "means",
        f"{_TWO.format('ten', 17)} Closed blocks had no gradient in this run, as a ReLU came after the gates; it has "
        "not run since they come after ReLU.",
    ),
    Cause("remedies-help", "best", "undecided", "means", _TWO.format("ten", 16)),
)
