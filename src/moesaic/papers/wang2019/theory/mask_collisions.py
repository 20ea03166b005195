"""How often two inputs open the same channels (Wang et al. 2019, DeepMoE, supplement A.1).

A network that sees only n of its m channels can tell apart two inputs that look alike to it if it opens
other channels on the one than on the other. The supplement says that both get the same channels in all L
layers with probability C(m, n)^(−L), "i.i.d. with respect to each channel".

**That is right for uniform n-subsets**: every set of exactly n channels equally likely, inputs and layers
independent (`subset_collision`). Gates that keep the n largest of exchangeable scores are of this kind. It
is also the *least* that gates with n open channels can reach: with patterns of probabilities q_1 … q_K, two
inputs agree with probability Σ q_i² ≥ 1/K by the inequality of Cauchy and Schwarz, and K ≤ C(m, n)^L. Gates
that prefer some channels, or whose layers hang together, collide more often.

**It is not right for independent coins**, which the wording suggests. If each channel is open with
probability p, alone, then two inputs agree on it with probability p² + (1 − p)², and on L layers of m with

    (p² + (1 − p)²)^(mL)        (`coin_collision`).

With p = n/m that is on either side of C(m, n)^(−L): less near p = 1/2, as coins have 2^m patterns to choose
from, and far more for sparse gates, as the number of open channels is seldom n and few patterns are likely.
Given that both inputs open exactly n channels in every layer, coins are uniform n-subsets.

Coins have a second way to fail: a layer may close altogether, and an input on which one does has output 0,
whatever the other layers do. Two such inputs are alike though their masks differ, so that two inputs to
which the open channels are blind have the same output with probability

    (1 − (1 − c)^L)² + ((p² + (1 − p)²)^m − c²)^L,        c = (1 − p)^m        (`coin_confusion`):

either both are closed somewhere, or neither is and all masks agree.

**All of this is about one pair.** That *no* two of S inputs share their masks is another, much smaller
probability (`all_distinct_probability`): with C(m, n)^L patterns it is about one half for 1.2·√C(m, n)^L inputs.

Letters: L layers, m channels in a layer (``widths``), n of them open (``open_channels``). Layers may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = [
    "all_distinct_probability",
    "check_open",
    "coin_collision",
    "coin_confusion",
    "coin_masks",
    "measured_collision",
    "subset_collision",
    "subset_masks",
]

_MOST_SAMPLES = 10**8


def subset_collision(widths: Sequence[int], open_channels: Sequence[int]) -> float:
    """Π_l C(m_l, n_l)^(−1): that two inputs with uniform n-subsets open the same channels in every layer.

    >>> subset_collision((4, 4), (2, 2)) == 6**-2
    True
    """
    return 1 / _patterns("subset_collision", widths, open_channels)


def coin_collision(widths: Sequence[int], probabilities: Sequence[float]) -> float:
    """Π_l (p_l² + (1 − p_l)²)^(m_l): the same if every channel is open with its layer's probability, alone.

    >>> coin_collision((4, 4), (0.5, 0.5)) == 2**-8                                  # below 6⁻²
    True
    >>> round(coin_collision((64,), (1 / 8,)) / subset_collision((64,), (8,)))       # but in sparse layers
    609
    """
    _check_coins("coin_collision", widths, probabilities)
    return math.prod((p**2 + (1 - p) ** 2) ** m for m, p in zip(widths, probabilities, strict=True))


def coin_confusion(widths: Sequence[int], probabilities: Sequence[float]) -> float:
    """That coins give the same output to two inputs to which the channels are blind; see the module.

    >>> coin_confusion((1,), (0.5,))                                                 # both closed or both open
    0.5
    >>> coin_confusion((1, 1), (0.5, 0.5)), coin_collision((1, 1), (0.5, 0.5))
    (0.625, 0.25)
    """
    _check_coins("coin_confusion", widths, probabilities)
    all_open, agree = 1.0, 1.0
    for m, p in zip(widths, probabilities, strict=True):
        closed = (1 - p) ** m
        all_open *= 1 - closed
        agree *= (p**2 + (1 - p) ** 2) ** m - closed**2
    return (1 - all_open) ** 2 + agree


def all_distinct_probability(samples: int, widths: Sequence[int], open_channels: Sequence[int]) -> float:
    """That no two of ``samples`` inputs with uniform n-subsets open the same channels in every layer.

    >>> round(all_distinct_probability(2, (4, 4), (2, 2)), 4)                        # 1 − 6⁻²: the printed one
    0.9722
    >>> round(all_distinct_probability(16, (4, 4), (2, 2)), 4)
    0.0192
    """
    owner = "all_distinct_probability"
    check_counts(owner, samples=samples)
    require(
        owner,
        samples <= _MOST_SAMPLES,
        "samples ≤ 10⁸",
        f"samples={samples}",
        "more do not fit into memory: give fewer",
    )
    patterns = _patterns(owner, widths, open_channels)
    if samples > patterns:
        return 0.0
    each = 1 / patterns  # may be 0 where patterns are beyond the range of floats, and so is what it stands for
    return math.exp(float(np.log1p(-np.arange(samples, dtype=np.float64) * each).sum()))


def subset_masks(
    shape: Sequence[int], widths: Sequence[int], open_channels: Sequence[int], *, seed: int
) -> tuple[Tensor, ...]:
    """For each layer a mask (*shape, m_l) float64 of zeros and ones with n_l ones, uniform among all such.

    >>> first, second = subset_masks((5,), (4, 6), (2, 1), seed=0)
    >>> first.shape, first.sum(-1).tolist(), second.sum(-1).tolist()
    (torch.Size([5, 4]), [2.0, 2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    check_open("subset_masks", widths, open_channels)
    generator = torch.Generator().manual_seed(seed)
    masks: list[Tensor] = []
    for m, n in zip(widths, open_channels, strict=True):
        scores = torch.rand((*shape, m), generator=generator, dtype=torch.float64)
        masks.append(torch.zeros_like(scores).scatter_(-1, scores.topk(n, dim=-1).indices, 1))
    return tuple(masks)


def coin_masks(
    shape: Sequence[int], widths: Sequence[int], probabilities: Sequence[float], *, seed: int
) -> tuple[Tensor, ...]:
    """For each layer a mask (*shape, m_l) float64, each of its numbers 1 with probability p_l, alone.

    >>> [mask.tolist() for mask in coin_masks((), (3, 2), (1.0, 0.0), seed=0)]
    [[1.0, 1.0, 1.0], [0.0, 0.0]]
    """
    _check_coins("coin_masks", widths, probabilities)
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (torch.rand((*shape, m), generator=generator, dtype=torch.float64) < p).double()
        for m, p in zip(widths, probabilities, strict=True)
    )


def measured_collision(gates: Sequence[Tensor]) -> float:
    """The share of pairs of inputs with the same open channels in every layer, for gates (B, m_l) of B inputs.

    A channel is open where its gate is not 0. For independent inputs it is an estimate without bias, whatever
    the gates are: put it beside `subset_collision` to see how far trained gates are from uniform ones.

    >>> gates = torch.tensor([[0.3, 0.0], [0.9, 0.0], [0.0, 0.2]])
    >>> measured_collision([gates]) == 1 / 3                                         # the first two, of three pairs
    True
    """
    if not gates or any(gate.ndim != 2 or len(gate) != len(gates[0]) for gate in gates):
        raise ValueError(
            f"measured_collision: gates are {[tuple(gate.shape) for gate in gates]}; give one (B, m) for each layer, "
            "with the same B inputs"
        )
    inputs = len(gates[0])
    require("measured_collision", inputs >= 2, "B ≥ 2", f"B={inputs}", "a pair needs two inputs")
    patterns = torch.cat([gate != 0 for gate in gates], dim=1)
    counts = cast("Tensor", torch.unique(patterns, dim=0, return_counts=True)[1])
    return int((counts * (counts - 1)).sum()) / (inputs * (inputs - 1))


def check_open(owner: str, widths: Sequence[int], open_channels: Sequence[int]) -> None:
    """Refuse what is not one width and one number of open channels for each layer, with 1 ≤ n ≤ m.

    >>> check_open("subset_masks", (4, 4), (2, 5))
    Traceback (most recent call last):
    ValueError: subset_masks: 1 ≤ n_l ≤ m_l fails: n_1=5, m_1=4; a layer cannot open more channels than it has
    """
    _check_layers(owner, widths, "open_channels", open_channels)
    for l, (m, n) in enumerate(zip(widths, open_channels, strict=True)):
        check_counts(owner, **{f"m_{l}": m})
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(f"{owner}: n_{l}={n!r} is a {type(n).__name__}; it must be a whole number")
        found, inequality = f"n_{l}={n}, m_{l}={m}", "1 ≤ n_l ≤ m_l"
        require(owner, n >= 1, inequality, found, "a layer without open channels makes every output 0; open one")
        require(owner, n <= m, inequality, found, "a layer cannot open more channels than it has")


def _patterns(owner: str, widths: Sequence[int], open_channels: Sequence[int]) -> int:
    check_open(owner, widths, open_channels)
    return math.prod(math.comb(m, n) for m, n in zip(widths, open_channels, strict=True))


def _check_coins(owner: str, widths: Sequence[int], probabilities: Sequence[float]) -> None:
    _check_layers(owner, widths, "probabilities", probabilities)
    for l, (m, p) in enumerate(zip(widths, probabilities, strict=True)):
        check_counts(owner, **{f"m_{l}": m})
        require(owner, 0 <= p <= 1, "0 ≤ p_l ≤ 1", f"p_{l}={p}", "it is the probability that a channel is open: n/m")


def _check_layers(owner: str, widths: Sequence[int], name: str, values: Sequence[float]) -> None:
    require(owner, len(widths) >= 1, "1 ≤ L", "widths=()", "give one width for each layer")
    if len(widths) != len(values):
        raise ValueError(
            f"{owner}: widths={tuple(widths)} are {len(widths)} layers, {name}={tuple(values)} are {len(values)}; "
            "give one number for each layer"
        )
