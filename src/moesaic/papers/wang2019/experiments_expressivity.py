"""Experiments on Wang et al. 2019's supplement that train nothing; together they take seconds.

Section A.1: ranks of random networks under channel masks, and how often two masks are equal. Table 1: weights and
multiply-adds of four ways to widen VGG-16.

Letters: L layers of m channels, of which n are open (``open_channels``), and M features of a patch (``features``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.models.vgg import VGG16_WIDTHS
from moesaic.papers.engine import paper
from moesaic.papers.engine.cells import AnalyticCell, Cell, CellArrays
from moesaic.papers.engine.runner import Runner
from moesaic.papers.wang2019.theory.channel_ranks import (
    blind_pair,
    confused,
    matricise,
    measure_channel_ranks,
    numerical_rank,
    random_channel_network,
)
from moesaic.papers.wang2019.theory.mask_collisions import coin_masks, measured_collision, subset_masks
from moesaic.papers.wang2019.vgg_widths import WIDENINGS, conv_macs

__all__ = [
    "BlindCell",
    "CollisionCell",
    "DistinctCell",
    "MaskingCell",
    "RankCell",
    "TableCell",
    "WidthCell",
    "plan",
]

Array = NDArray[np.float64]

_SIDE = 32
"""Side of CIFAR-10's images."""


@dataclass(frozen=True)
class _MaskedLayersCell(AnalyticCell):
    """Base class of cells on layers of which some channels are open."""

    widths: tuple[int, ...]
    open_channels: tuple[int, ...]

    def __post_init__(self) -> None:
        widths, open_channels = self.widths, self.open_channels
        if len(widths) != len(open_channels) or any(n > m for m, n in zip(widths, open_channels, strict=True)):
            raise ValueError(
                f"widths={widths} and open_channels={open_channels}; there must be one number for each layer, and no "
                "more open channels than channels"
            )

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probability n/m that a channel of each layer is open, if channels are independent."""
        return tuple(n / m for m, n in zip(self.widths, self.open_channels, strict=True))


@dataclass(frozen=True)
class RankCell(_MaskedLayersCell):
    """Ranks of random networks, dense and under masks that are uniform n-subsets."""

    features: int
    trials: int = 5

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "channel ranks", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        found = measure_channel_ranks(
            self.widths, self.open_channels, self.features, trials=self.trials, seed=runner.trial_seed(0)
        )
        return {
            "dense": found.dense.tolist(),
            "static": found.static.tolist(),
            "one_sided": found.one_sided.tolist(),
            "dynamic": found.dynamic.tolist(),
            "narrow": [_rank(self.open_channels, self.features, runner.trial_seed(t)) for t in range(self.trials)],
        }


@dataclass(frozen=True)
class WidthCell(AnalyticCell):
    """Ranks of dense networks by their width, and with one layer narrowed to a single channel."""

    layers: int
    features: int
    widths: tuple[int, ...]
    """In increasing order; some may be larger than ``features``."""

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "channel widths", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        seed, whole = runner.trial_seed(0), [self.features] * self.layers
        narrowed = [[*whole[:l], 1, *whole[l + 1 :]] for l in range(self.layers)]
        return {
            "widths": list(self.widths),
            "ranks": [_rank([width] * self.layers, self.features, seed) for width in self.widths],
            "full": [_rank(whole, self.features, seed)],
            "narrowed": [_rank(widths, self.features, seed) for widths in narrowed],
        }


@dataclass(frozen=True)
class MaskingCell(AnalyticCell):
    """Ranks for all ways to mask the four inputs of the smallest network: m = M = 2, n = 1, L = 1."""

    trials: int = 5

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "channel maskings", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        return {"restored": [self._restored(runner.trial_seed(t)) for t in range(self.trials)]}

    def _restored(self, seed: int) -> float:
        """Returns the share of the 16 maskings with the dense network's rank, which is 2."""
        network = random_channel_network((2,), 2, seed=seed)
        maskings = [torch.eye(2)[torch.tensor(chosen)].view(2, 2, 2) for chosen in product((0, 1), repeat=4)]
        ranks = [numerical_rank(matricise(network.tensor([masks]))).rank for masks in maskings]
        return sum(rank == 2 for rank in ranks) / len(ranks)


@dataclass(frozen=True)
class CollisionCell(_MaskedLayersCell):
    """Share of pairs of inputs with equal masks, for n-subsets and for independent channels with the same mean."""

    samples: int = 1500
    trials: int = 10

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "channel collisions", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        subsets: list[float] = []
        coins: list[float] = []
        for trial in range(self.trials):
            seed = runner.trial_seed(trial)
            subsets.append(
                measured_collision(subset_masks((self.samples,), self.widths, self.open_channels, seed=seed))
            )
            coins.append(measured_collision(coin_masks((self.samples,), self.widths, self.probabilities, seed=seed)))
        return {"subsets": subsets, "coins": coins}


@dataclass(frozen=True)
class BlindCell(_MaskedLayersCell):
    """Share of pairs of inputs, indistinguishable to the channels, with equal outputs under independent masks."""

    features: int
    pairs: int = 2000
    trials: int = 10

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "channel blindness", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        subsets: list[float] = []
        coins: list[float] = []
        for trial in range(self.trials):
            seed = runner.trial_seed(trial)
            network = random_channel_network(self.widths, self.features, seed=seed)
            x, other = blind_pair(network, self.pairs, seed=seed + 1)
            masks = [
                (
                    subset_masks((self.pairs,), self.widths, self.open_channels, seed=own),
                    coin_masks((self.pairs,), self.widths, self.probabilities, seed=own),
                )
                for own in (seed + 2, seed + 3)
            ]
            for shares, one, two in zip((subsets, coins), *masks, strict=True):
                shares.append(float(confused(network, x, other, one, two).double().mean()))
        return {"subsets": subsets, "coins": coins}


@dataclass(frozen=True)
class DistinctCell(_MaskedLayersCell):
    """Share of groups of inputs in which no two have equal masks, for n-subsets."""

    samples: int = 16
    groups: int = 500
    trials: int = 10

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"experiment": "distinct channels", **asdict(self), "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        return {"distinct": [self._distinct(runner.trial_seed(trial)) for trial in range(self.trials)]}

    def _distinct(self, seed: int) -> float:
        masks = torch.cat(subset_masks((self.groups, self.samples), self.widths, self.open_channels, seed=seed), -1)
        # two masks of zeros and ones are the same where all their channels agree
        agree = (masks[:, :, None] == masks[:, None]).all(-1).sum((1, 2)) > self.samples
        return 1 - float(agree.double().mean())


@dataclass(frozen=True)
class TableCell(AnalyticCell):
    """Table 1: weights and multiply-adds of the four widenings of VGG-16."""

    def spec(self, runner: Runner) -> dict[str, Any]:
        columns = {name: list(column.widths) for name, column in WIDENINGS.items()}
        return {"experiment": "widenings of VGG-16", "columns": columns}

    def measure(self, runner: Runner) -> dict[str, Any]:
        columns = WIDENINGS.values()
        base = conv_macs(VGG16_WIDTHS, _SIDE)
        return {
            "weights": [column.conv_parameters for column in columns],
            "work": [column.conv_macs(_SIDE) / base for column in columns],
            "complete": [not column.reconstructed for column in columns],
        }


def plan() -> paper.Plan[CellArrays]:
    """Returns the cells by name, which are the same in every preset."""
    cells: dict[str, Cell[CellArrays]] = {
        f"ranks/L={layers}": RankCell((3,) * layers, (2,) * layers, features=4) for layers in (1, 2, 3)
    }
    cells["ranks/sparse"] = RankCell((4, 4), (1, 1), features=6)
    cells |= {
        "widths/L=1": WidthCell(1, 6, (2, 3, 4, 6, 8)),
        "widths/L=2": WidthCell(2, 6, (2, 3, 4, 6, 8)),
        "widths/L=3": WidthCell(3, 4, (2, 3, 4, 6)),
        "maskings": MaskingCell(),
        "distinct": DistinctCell((4, 4), (2, 2)),
        "blind": BlindCell((3, 3), (1, 1), features=5),
        "collisions/two": CollisionCell((4, 4), (2, 2)),
        "table1": TableCell(),
    }
    return cells | {f"collisions/one/{n}": CollisionCell((8,), (n,)) for n in (1, 2, 3, 4)}


def _rank(widths: Sequence[int], features: int, seed: int) -> int:
    return numerical_rank(matricise(random_channel_network(widths, features, seed=seed).tensor())).rank
