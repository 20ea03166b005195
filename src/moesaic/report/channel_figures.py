"""Figures of channel gates: charts as data, and drawings of gate patterns and of images by cost.

`gate_charts` returns the distances by layer, the embedding map and the distribution of costs. `draw_patterns` draws a
row for each class and a column for each gate, sorted by how often the gate is open: if all rows of a column have the
same colour, the gate does not depend on the class. `draw_cost_extremes` draws the least and the most expensive images.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.class_routing import MIN_CLASS_IMAGES
from moesaic.insight.embedding_map import EmbeddingMap
from moesaic.insight.image_cost import Costs
from moesaic.report.canvas import Rect, draw_frame, draw_image, new_canvas
from moesaic.report.chart import Chart, Group, Panel, Points, Series
from moesaic.report.chart_style import INK, LINE, MAX_ROLES
from moesaic.report.expert_figures import drawn_classes
from moesaic.report.formatting import short_name
from moesaic.report.svg_line_chart import spaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FOLDER", "MAX_LAYERS", "draw_cost_extremes", "draw_patterns", "gate_charts"]

FOLDER = "gates"
"""Prefix of the names of the charts."""

MAX_LAYERS = 6
"""Layers in a figure, at most."""

_BINS = 24
_OPEN = (0x0B / 255, 0x4F / 255, 0x8A / 255)

# inches
_MARGIN, _GAP = 0.1, 0.12
_STRIP, _ROW, _HEAD, _KEY = 6.6, 0.15, 0.26, 0.34
_LETTER = 0.068
_THUMB, _CAPTION = 0.82, 0.34

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


def draw_patterns(channels: ChannelExplanation, class_names: Sequence[str], images: Sequence[int]) -> Figure:
    """A strip for each of at most `MAX_LAYERS` layers: how often each gate is open for each class.

    ``images`` is the number of images of each class; those of `drawn_classes` are drawn.
    """
    shown = drawn_classes(images)
    names = [short_name(class_names[k], 22) for k in shown]
    left = _MARGIN + max(6, *(len(name) for name in names)) * _LETTER + _GAP
    picked = spaced(len(channels.layers), MAX_LAYERS)
    tall = max(len(shown) * _ROW, 0.3)
    figure, axes = new_canvas(left + _STRIP + _MARGIN, _KEY + len(picked) * (_HEAD + tall + _GAP))
    _key(axes, left)
    for i, number in enumerate(picked):
        y = _KEY + i * (_HEAD + tall + _GAP)
        layer = channels.layers[number]
        title = f"{number + 1}  {short_name(layer.name or 'the network itself', 60)}"
        axes.text(left, y + _HEAD / 2, title, fontsize=8, weight="bold", va="center", color=INK, parse_math=False)
        share_KE = np.array(layer.share)[shown]
        order = np.argsort(-share_KE.mean(0), kind="stable")
        _framed(axes, 1 - share_KE[:, order, None] * (1 - np.array(_OPEN)), (left, y + _HEAD, _STRIP, tall))
        for row, name in enumerate(names):
            middle = y + _HEAD + (row + 0.5) * tall / len(names)
            axes.text(
                left - 0.06, middle, name, fontsize=6.5, ha="right", va="center", color=INK, parse_math=False
            )  # fmt: skip
    return figure


def draw_cost_extremes(costs: Costs, class_names: Sequence[str], classes: Tensor, pixels: Tensor) -> Figure:
    """The least expensive images in one row and the most expensive in another, with cost and class below."""
    rows = [("lowest cost", costs.least_expensive), ("highest cost", costs.most_expensive)]
    rows = [(name, which) for name, which in rows if which]
    most = max(len(which) for _, which in rows)
    tall = _THUMB * pixels.shape[2] / pixels.shape[3]
    left = _MARGIN + 0.95
    width = left + most * (_THUMB + _GAP) - _GAP + _MARGIN
    figure, axes = new_canvas(width, _MARGIN + len(rows) * (tall + _CAPTION + _GAP))
    for i, (name, which) in enumerate(rows):
        y = _MARGIN + i * (tall + _CAPTION + _GAP)
        axes.text(_MARGIN, y + tall / 2, name, fontsize=8, weight="bold", va="center", color=INK)
        for j, b in enumerate(which):
            x = left + j * (_THUMB + _GAP)
            _framed(axes, _colours(pixels[b]), (x, y, _THUMB, tall))
            caption = f"{costs.cost[b]:.1f} %\n{short_name(class_names[int(classes[b])], 13)}"
            axes.text(
                x + _THUMB / 2, y + tall + 0.04, caption, fontsize=6.5, ha="center", va="top", color=INK,
                parse_math=False,
            )  # fmt: skip
    return figure


def _key(axes: Axes, left: float) -> None:
    ramp: Array = np.linspace(0, 1, 32)[None, :, None]
    begin, wide, middle = left + 1.15, 1.2, 0.165
    axes.text(begin - 0.07, middle, "open for no image", fontsize=7, ha="right", va="center", color=INK)
    _framed(axes, 1 - ramp * (1 - np.array(_OPEN)), (begin, middle - 0.065, wide, 0.13))
    axes.text(begin + wide + 0.07, middle, "for all images of the class", fontsize=7, va="center", color=INK)


def _framed(axes: Axes, image: Array, rect: Rect) -> None:
    draw_image(axes, image, rect)
    draw_frame(axes, rect, LINE, 0.6)


def _colours(image: Tensor) -> Array:
    """(H, W, 3) from 0 to 1, of uint8 pixels with any number of channels."""
    image = image[:3] if image.shape[0] >= 3 else image[:1]
    return image.expand(3, -1, -1).permute(1, 2, 0).double().cpu().numpy() / 255
