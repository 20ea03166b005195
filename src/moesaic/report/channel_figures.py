"""Figures of channel gates: gate patterns by class, the least and the most expensive images.

A gate pattern has a row for each class and a column for each gate, sorted by how often the gate is open. If
all rows of a column have the same colour, the gate does not depend on the class.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.channel_explanation import ChannelExplanation
from moesaic.insight.image_cost import Costs
from moesaic.report.canvas import Rect, draw_frame, draw_image, new_canvas
from moesaic.report.chart_style import INK, LINE
from moesaic.report.expert_figures import drawn_classes
from moesaic.report.formatting import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_LAYERS", "draw_cost_extremes", "draw_patterns", "evenly"]

MAX_LAYERS = 6
"""Layers in a figure, at most."""

_OPEN = (0x0B / 255, 0x4F / 255, 0x8A / 255)

# inches
_MARGIN, _GAP = 0.1, 0.12
_STRIP, _ROW, _HEAD, _KEY = 6.6, 0.15, 0.26, 0.34
_LETTER = 0.068
_THUMB, _CAPTION = 0.82, 0.34


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced indices, with the first and the last.

    >>> evenly(3, 6), evenly(13, 6)
    ([0, 1, 2], [0, 2, 5, 7, 10, 12])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def draw_patterns(channels: ChannelExplanation, class_names: Sequence[str], images: Sequence[int]) -> Figure:
    """A strip for each of at most `MAX_LAYERS` layers: how often each gate is open for each class.

    ``images`` is the number of images of each class; those of `drawn_classes` are drawn.
    """
    shown = drawn_classes(images)
    names = [short_name(class_names[k], 22) for k in shown]
    left = _MARGIN + max(6, *(len(name) for name in names)) * _LETTER + _GAP
    picked = evenly(len(channels.layers), MAX_LAYERS)
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
    ramp: NDArray[np.float64] = np.linspace(0, 1, 32)[None, :, None]
    begin, wide, middle = left + 1.15, 1.2, 0.165
    axes.text(begin - 0.07, middle, "open for no image", fontsize=7, ha="right", va="center", color=INK)
    _framed(axes, 1 - ramp * (1 - np.array(_OPEN)), (begin, middle - 0.065, wide, 0.13))
    axes.text(begin + wide + 0.07, middle, "for all images of the class", fontsize=7, va="center", color=INK)


def _framed(axes: Axes, image: NDArray[np.float64], rect: Rect) -> None:
    draw_image(axes, image, rect)
    draw_frame(axes, rect, LINE, 0.6)


def _colours(image: Tensor) -> NDArray[np.float64]:
    """(H, W, 3) from 0 to 1, of uint8 pixels with any number of channels."""
    image = image[:3] if image.shape[0] >= 3 else image[:1]
    return image.expand(3, -1, -1).permute(1, 2, 0).double().cpu().numpy() / 255
