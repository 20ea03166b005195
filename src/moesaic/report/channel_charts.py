"""Charts of channel gates: distances by layer, the embedding map, and the distribution of costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.class_routing import MIN_CLASS_IMAGES
from moesaic.insight.embedding_map import EmbeddingMap
from moesaic.insight.image_cost import Costs
from moesaic.report.chart import Chart, Group, Panel, Points, Series
from moesaic.report.chart_style import MAX_ROLES
from moesaic.report.formatting import short_name

__all__ = ["FOLDER", "gate_charts"]

FOLDER = "gates"
"""Prefix of the names of the charts."""

_BINS = 24

Array = NDArray[np.float64]


def gate_charts(channels: ChannelExplanation, class_names: Sequence[str], classes: Tensor) -> list[Chart]:
    """All charts that can be drawn; ``classes`` (B,) are those of the images."""
    charts = [_distances(channels)]
    if channels.map is not None:
        charts.append(_map(channels.map, class_names, classes))
    if channels.costs is not None:
        charts.append(_costs(channels.costs))
    return [chart for chart in charts if chart is not None]


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
        Series("two images of the same class", "joint", number, tuple(100 * value for value in within)),
    )
    return Chart(
        "distances",
        FOLDER,
        "Gates",
        "Distance of the gates of two images",
        "Share of gates that differ between two images, by layer (numbers as in the table above). Where the lines are "
        "apart, gates depend on the class; where both are 0, the layer computes the same channels for every image.",
        (Panel("", "gated layer, from input to output", "gates that differ (%)", lines),),
    )


def _map(found: EmbeddingMap, class_names: Sequence[str], classes: Tensor) -> Chart | None:
    if not found.x:
        return None
    labels = classes.cpu()[: len(found.x)]
    images = labels.bincount(minlength=len(class_names))
    present = [k for k in range(len(class_names)) if images[k]]
    most = MAX_ROLES if len(present) <= MAX_ROLES else MAX_ROLES - 1
    named = sorted(sorted(present, key=lambda k: -int(images[k]))[:most])
    x, y = np.array(found.x), np.array(found.y)

    def group(label: str, role: str, members: Tensor) -> Group:
        own = members.numpy()
        return Group(label, role, tuple(map(float, x[own])), tuple(map(float, y[own])))

    groups = [group(short_name(class_names[k], 16), f"class {k}", labels == k) for k in named]
    if len(named) < len(present):
        rest = ~torch.isin(labels, torch.tensor(named))
        groups.insert(0, group(f"{len(present) - len(named)} other classes", "others", rest))
    return Chart(
        "embedding",
        FOLDER,
        "Embedding",
        "Embedding of the images",
        "Each point is an image, coloured by class. t-SNE places images with similar embeddings close to each other; "
        "large distances and the sizes of clusters have no meaning.",
        (Panel("", "", "", points=Points(tuple(groups))),),
    )


def _costs(costs: Costs) -> Chart | None:
    if costs.constant:
        return None
    cost = np.array(costs.cost)
    edges: Array = np.linspace(min(costs.cost), max(costs.cost), _BINS + 1)
    lines = [_outline("all images", "separate", cost, edges)]
    if costs.is_correct is not None:
        correct = np.array(costs.is_correct)
        if min(correct.sum(), (~correct).sum()) >= MIN_CLASS_IMAGES:
            lines = [
                _outline("correct prediction", "joint", cost[correct], edges),
                _outline("wrong prediction", "cnn", cost[~correct], edges),
            ]
    several = " Each line sums to 100 %." if len(lines) > 1 else ""
    return Chart(
        "costs",
        FOLDER,
        "Costs",
        "Cost of images",
        f"Distribution of the cost of images; further left is cheaper.{several}",
        (Panel("", "multiply-adds (% of the dense network)", "images (%)", tuple(lines)),),
    )


def _outline(label: str, role: str, cost: Array, edges: Array) -> Series:
    """The outline of a histogram."""
    counts, _ = np.histogram(cost, edges)
    share = 100 * counts / max(1, len(cost))
    x, y = np.repeat(edges, 2), np.concatenate([[0.0], np.repeat(share, 2), [0.0]])
    return Series(label, role, tuple(map(float, x)), tuple(map(float, y)))
