"""Dispatch tables of Chen et al. 2022 (Tables 4 to 6 and 11): units of each cluster per expert, for any routing.

A cluster is any grouping of the data that the router does not see: the cluster of a synthetic sample, the
class of an image, the language of a sentence. A good router sends a cluster to few experts, and a
specialised expert gets few clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moesaic.insight.metrics import Labels, cluster_counts, entropy_of_counts
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DispatchTable", "dispatch_table"]

_DARK = 0.5
"""Cells with a larger share have white text."""


@dataclass(frozen=True)
class DispatchTable:
    """Number of units of each cluster that each expert gets; made by `dispatch_table` or from counts.

    >>> table = DispatchTable(("cats", "dogs"), ((90, 10), (0, 50)))
    >>> table.load, table.preferred, round(table.entropy, 3)
    ((90, 60), (0, 1), 0.18)
    """

    clusters: tuple[str, ...]
    counts: tuple[tuple[float, ...], ...]
    """(K, E), a row for each cluster: whole numbers, or total weights for a soft router."""

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.counts}
        if len(self.counts) != len(self.clusters) or len(widths) > 1:
            raise ValueError(
                f"DispatchTable: {len(self.clusters)} clusters, and rows of counts of the lengths "
                f"{[len(row) for row in self.counts]}; give one row for each cluster, one number for each expert"
            )

    @property
    def load(self) -> tuple[float, ...]:
        """(E,): number of units of each expert."""
        return tuple(sum(column) for column in zip(*self.counts, strict=True))

    @property
    def preferred(self) -> tuple[int | None, ...]:
        """(K,): the expert that gets most of the cluster, the lower index on ties; None if no expert gets any."""
        return tuple(row.index(max(row)) if any(row) else None for row in self.counts)

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """(K, E): share of the cluster that the expert gets; rows sum to 1, or to 0 if no expert gets any."""
        return tuple(tuple(count / (sum(row) or 1) for count in row) for row in self.counts)

    @property
    def entropy(self) -> float:
        """Dispatch entropy in nats (eq. 6.1), as `dispatch_entropy` computes it."""
        return entropy_of_counts(self._tensor) if self.counts else 0.0

    @property
    def cluster_entropy(self) -> float:
        """Entropy of the clusters in nats: the dispatch entropy of a router that ignores them."""
        return entropy_of_counts(self._tensor.sum(1, keepdim=True)) if self.counts else 0.0

    @property
    def _tensor(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.float64)

    def __str__(self) -> str:
        rows = [("", *(f"expert {e} " for e in range(len(self.load))))]
        named = zip((*self.clusters, "all"), (*self.counts, self.load), (*self.preferred, None), strict=True)
        for name, counts, most in named:
            # the asterisk takes the place of a blank, which keeps the columns aligned
            rows.append(
                (name, *(f"{_format_count(count)}{'*' if e == most else ' '}" for e, count in enumerate(counts)))
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        footer = f"entropy {self.entropy:.3f} nats (0: one cluster an expert; {self.cluster_entropy:.3f}: all alike)"
        return "\n".join([*(line.rstrip() for line in lines), footer])

    def plot(self, title: str = "") -> Figure:
        """Draws the table; darker cells are larger shares of the cluster.

        >>> figure = DispatchTable(("cats", "dogs"), ((90, 10), (0, 50))).plot("before training")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['90', '10', '0', '50']
        """
        from matplotlib.figure import Figure

        K, E = len(self.clusters), len(self.load)
        longest = max(map(len, self.clusters), default=0)
        figure = Figure(
            figsize=(0.6 + 0.09 * longest + 0.7 * E, 0.9 + 0.4 * K), facecolor="white", layout="constrained"
        )
        axes = figure.add_subplot()
        axes.imshow(self.shares or [[0.0]], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(E), [str(e) for e in range(E)])
        axes.set_yticks(range(K), self.clusters, parse_math=False)
        axes.set_xlabel(f"expert · entropy {self.entropy:.3f}")
        axes.set_title(title, fontsize=10, loc="left", parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for k, (counts, shares) in enumerate(zip(self.counts, self.shares, strict=True)):
            for e, (count, share) in enumerate(zip(counts, shares, strict=True)):
                ink = "white" if share > _DARK else "black"
                axes.text(e, k, _format_count(count), ha="center", va="center", fontsize=9, color=ink)
        return figure


def dispatch_table(routing: Routing, clusters: Labels, names: Sequence[str] | None = None) -> DispatchTable:
    """Counts the units of each cluster that each expert gets.

    ``clusters`` holds integer labels: (B,) for images or samples, or (B, N) for units. With ``names``, label k is
    called ``names[k]`` and empty clusters have a row too; without, rows are the labels that occur.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0]], [[0]], [[1]], [[1]], [[0]]])        # five samples, each to one expert
    >>> routing = Routing("sample", torch.zeros(5, 1, 2), index, torch.ones(5, 1, 1), "unit")
    >>> print(dispatch_table(routing, [0, 0, 1, 1, 1], names=["English", "French"]))
             expert 0   expert 1
    English         2*         0
    French          1          2*
    all             3          2
    entropy 0.382 nats (0: one cluster an expert; 0.673: all alike)
    """
    labels, count_KE = cluster_counts("dispatch_table", routing, clusters)
    if names is None:
        return DispatchTable(tuple(str(label) for label in labels), _rows(count_KE))
    if len(labels) and not 0 <= labels[0] <= labels[-1] < len(names):
        raise ValueError(
            f"dispatch_table: clusters go from {labels[0]} to {labels[-1]}, and {len(names)} names stand for 0 to "
            f"{len(names) - 1}; give a name for every label, or none"
        )
    every_KE = count_KE.new_zeros(len(names), routing.experts)
    every_KE[torch.from_numpy(labels)] = count_KE
    return DispatchTable(tuple(names), _rows(every_KE))


def _rows(count_KE: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in cast("list[list[float]]", count_KE.tolist()))


def _format_count(count: float) -> str:
    """Whole numbers as they are, weights with one decimal."""
    return f"{count:.1f}" if isinstance(count, float) and not count.is_integer() else f"{count:.0f}"
