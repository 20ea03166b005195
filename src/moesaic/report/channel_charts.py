"""What channel gates do, as charts: how far classes differ layer by layer, the embedding, and what images cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.embedding_map import EmbeddingMap
from moesaic.insight.explain import FEW
from moesaic.insight.image_cost import Costs
from moesaic.report.chart import Chart, Group, Panel, Points, Series
from moesaic.report.style import MOST_ROLES

__all__ = ["FOLDER", "gate_charts", "printable"]

FOLDER = "gates"
"""What the charts' names begin with."""

_BINS = 24

Array = NDArray[np.float64]


def gate_charts(channels: ChannelExplanation, class_names: Sequence[str], classes: Tensor) -> list[Chart]:
    """The charts that there are numbers for; ``classes`` (B,) are those of the images."""
    charts = [_distances(channels)]
    if channels.map is not None:
        charts.append(_map(channels.map, class_names, classes))
    if channels.costs is not None:
        charts.append(_costs(channels.costs))
    return [chart for chart in charts if chart is not None]


def printable(name: str, longest: int = 24) -> str:
    r"""A name that a drawing can hold: not too long, and without characters that XML refuses.

    >>> printable("a\x08b"), printable("a name that is far too long")
    ('a�b', 'a name that is far too …')
    """
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _distances(channels: ChannelExplanation) -> Chart | None:
    found = [
        (number, layer.distances.within, layer.distances.between)
        for number, layer in enumerate(channels.layers, start=1)
        if layer.distances.within is not None and layer.distances.between is not None
    ]
    if len(found) < 2:
        return None
    number, within, between = (tuple(float(value or 0) for value in column) for column in zip(*found, strict=True))
    lines = (
        Series("two images of different classes", "cnn", number, tuple(100 * value for value in between)),
        Series("two images of one class", "joint", number, tuple(100 * value for value in within)),
    )
    return Chart(
        "distances",
        FOLDER,
        "Gates",
        "How much gates differ from image to image",
        "In how many gates two images differ, layer by layer, numbered as in the table above. Where the lines part, "
        "gates follow the class; where both are at 0, the layer does the same for every image.",
        (Panel("", "gated layer, from the image on", "gates that differ (%)", lines),),
    )


def _map(found: EmbeddingMap, class_names: Sequence[str], classes: Tensor) -> Chart | None:
    if not found.x:
        return None
    drawn = classes.cpu()[: len(found.x)]
    images = drawn.bincount(minlength=len(class_names))
    present = [k for k in range(len(class_names)) if images[k]]
    most = MOST_ROLES if len(present) <= MOST_ROLES else MOST_ROLES - 1
    named = sorted(sorted(present, key=lambda k: -int(images[k]))[:most])
    x, y = np.array(found.x), np.array(found.y)

    def group(label: str, role: str, members: Tensor) -> Group:
        own = members.numpy()
        return Group(label, role, tuple(map(float, x[own])), tuple(map(float, y[own])))

    groups = [group(printable(class_names[k], 16), f"class {k}", drawn == k) for k in named]
    if len(named) < len(present):
        rest = ~torch.isin(drawn, torch.tensor(named))
        groups.insert(0, group(f"{len(present) - len(named)} other classes", "others", rest))
    return Chart(
        "embedding",
        FOLDER,
        "Embedding",
        "What the gates see of the images",
        "Each point is an image, placed by t-SNE so that images with like embeddings are near each other, and coloured "
        "by class. Distances between far points, and the sizes of clusters, mean nothing.",
        (Panel("", "", "", points=Points(tuple(groups))),),
    )


def _costs(costs: Costs) -> Chart | None:
    if costs.alike:
        return None
    cost = np.array(costs.cost)
    edges: Array = np.linspace(min(costs.cost), max(costs.cost), _BINS + 1)
    lines = [_outline("all images", "separate", cost, edges)]
    if costs.was_right is not None:
        ok = np.array(costs.was_right)
        if min(ok.sum(), (~ok).sum()) >= FEW:
            lines = [
                _outline("images it gets right", "joint", cost[ok], edges),
                _outline("images it gets wrong", "cnn", cost[~ok], edges),
            ]
    several = " Each line is over its own images." if len(lines) > 1 else ""
    return Chart(
        "costs",
        FOLDER,
        "Costs",
        "What images cost",
        f"How many images cost so much: further left is cheaper.{several}",
        (Panel("", "multiply-adds, in percent of the dense network's", "images (%)", tuple(lines)),),
    )


def _outline(label: str, role: str, cost: Array, edges: Array) -> Series:
    """A histogram as a line round its bars."""
    counts, _ = np.histogram(cost, edges)
    share = 100 * counts / max(1, len(cost))
    x, y = np.repeat(edges, 2), np.concatenate([[0.0], np.repeat(share, 2), [0.0]])
    return Series(label, role, tuple(map(float, x)), tuple(map(float, y)))
