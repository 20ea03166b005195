"""Figures of expert selection over many images: maps by class, and the patches with the highest scores.

The background of a map is the mean image of the class in grey: on aligned faces one sees which patch covers
the mouth.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moesaic.insight.explain import LayerExplanation
from moesaic.insight.overlays import expert_colour, expert_dash
from moesaic.report.canvas import Rect, draw_frame, draw_image, new_canvas
from moesaic.report.chart_style import COLOURS, INK, LINE
from moesaic.report.formatting import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_CLASSES", "draw_class_maps", "draw_top_patches", "drawn_classes", "mean_images"]

Kind = Literal["share", "difference", "gate"]
Array = NDArray[np.float64]

MAX_CLASSES = 12
"""Classes in a figure, at most."""

_FEW_COLUMNS, _MAX_COLUMNS = 4, 8
_FEW_ROWS = 4
"""Up to this many classes, maps are large: few columns, in several blocks."""
_BLOCK = 256
"""Images converted to float at a time, to limit memory."""

# inches
_PANEL, _GAP, _HEADER, _MARGIN = 1.35, 0.1, 0.28, 0.1
_LETTER = 0.075
_CROP, _CAPTION = 0.82, 0.2

_INCH = 72
_SMALLEST_NUMBER = 5.0
_STRONGEST = 0.72
"""Opacity of the strongest colour."""
_MIN_RATE = 0.05
"""Smaller selection rates have no number, and their mean gates are not drawn."""


def mean_images(pixels: Tensor, classes: Tensor, count: int) -> Array:
    """(K, H, W) from 0 to 1: the mean image of each class in grey; mid-grey for empty classes.

    >>> import torch
    >>> pixels = torch.tensor([0, 255, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    >>> mean_images(pixels, torch.tensor([0, 0, 1]), 3).flatten().tolist()
    [0.5, 1.0, 0.5]
    """
    grey = np.full((count, *pixels.shape[2:]), 0.5)
    for k in range(count):
        own = (classes == k).nonzero().flatten().to(pixels.device)
        total = np.zeros(grey.shape[1:])
        for start in range(0, len(own), _BLOCK):
            part = pixels[own[start : start + _BLOCK]]
            total += part.double().mean(1).sum(0).cpu().numpy()
        if len(own):
            grey[k] = total / (255 * len(own))
    return grey


def drawn_classes(images: Sequence[int]) -> list[int]:
    """The largest `MAX_CLASSES` classes that have images, in ascending order."""
    return sorted(sorted((k for k, count in enumerate(images) if count), key=lambda k: -images[k])[:MAX_CLASSES])


def draw_class_maps(
    layer: LayerExplanation, class_names: Sequence[str], backdrops: Array, images: Sequence[int], kind: Kind
) -> Figure:
    """A map of patches for each class (row) and expert (column).

    Args:
        layer: the layer.
        class_names: names of all classes.
        backdrops: background images (K, H, W).
        images: number of images of each class; the largest `MAX_CLASSES` classes are drawn.
        kind: "share" for the share of images in which the expert selects the patch, "difference" for the difference
            of that share to the mean of the other classes, "gate" for the mean gate of patches that are selected in
            at least 5 % of the images.
    """
    shown = drawn_classes(images)
    rate_KEN = np.array(layer.selection_rate)
    values_KEN, others = rate_KEN, "the others"
    names = [
        f"{short_name(class_names[k], 22)}\n{images[k]:,} {'image' if images[k] == 1 else 'images'}" for k in shown
    ]
    if kind == "gate":
        values_KEN = np.where(rate_KEN >= _MIN_RATE, layer.gate, 0)
    elif kind == "difference":
        # minus the mean of the other classes that have images
        values_KEN = rate_KEN - (rate_KEN[shown].sum(0) - rate_KEN) / max(1, len(shown) - 1)
        if len(shown) == 2:  # the other row would be its negative
            others, shown = short_name(class_names[shown[0]], 22), shown[1:]
        names = [f"{short_name(class_names[k], 22)}\nminus\n{others}" for k in shown]
    strongest = float(np.abs(values_KEN[shown]).max()) or 1.0
    layout = _Layout(layer.experts, backdrops.shape[1] / backdrops.shape[2], names)
    figure, axes = layout.begin()
    for e in range(layer.experts):
        _name_expert(axes, *layout.header(e), e)
        for row, k in enumerate(shown):
            x, y = layout.corner(row, e)
            rect = (x, y, _PANEL, layout.height)
            _map(axes, rect, backdrops[k], _Grid.of(layer), values_KEN[k, e], strongest, kind)
    most = f"{strongest:.2f}" if kind == "gate" else f"{'±' if kind == 'difference' else ''}{100 * strongest:.0f}"
    for block in range(layout.blocks):
        _, y = layout.header(block * layout.columns)
        axes.text(_MARGIN, y, f"maximum: {most}", fontsize=7, va="center_baseline", color=INK)
        for row, name in enumerate(names):
            _, y = layout.corner(row, block * layout.columns)
            axes.text(_MARGIN, y + layout.height / 2, name, fontsize=8, va="center", color=INK, parse_math=False)
    return figure


def draw_top_patches(layer: LayerExplanation, class_names: Sequence[str], pixels: Tensor) -> Figure:
    """A row for each expert: the patches with its highest scores, framed within their surroundings."""
    grid = _Grid.of(layer)
    most = max(1, *(len(each) for each in layer.top_patches))
    H, W = pixels.shape[2:]
    tall = _CROP * (H / grid.filled[0]) / (W / grid.filled[1])
    left = _MARGIN + 0.85
    width = left + most * (_CROP + _GAP) - _GAP + _MARGIN
    height = layer.experts * (tall + _CAPTION + _GAP) + _MARGIN
    figure, axes = new_canvas(width, height)
    for e, top_patches in enumerate(layer.top_patches):
        y = _MARGIN + e * (tall + _CAPTION + _GAP)
        _name_expert(axes, _MARGIN, y + tall / 2, e)
        if not top_patches:
            axes.text(left, y + tall / 2, "selects no patch", fontsize=8, va="center", color=INK)
        for i, patch in enumerate(top_patches):
            x = left + i * (_CROP + _GAP)
            image = pixels[patch.image].cpu().numpy()
            _crop(axes, (x, y, _CROP, tall), image, grid, patch.patch, e)
            name = short_name(class_names[patch.label], 13)
            axes.text(
                x + _CROP / 2, y + tall + 0.5 * _CAPTION, name, fontsize=6.5, ha="center", va="center", color=INK,
                parse_math=False,
            )  # fmt: skip
    return figure


@dataclass(frozen=True)
class _Grid:
    """Rows and columns of patches; the image fills fewer if its map was padded."""

    rows: int
    columns: int
    filled: tuple[float, float]

    @classmethod
    def of(cls, layer: LayerExplanation) -> _Grid:
        assert layer.grid is not None and layer.filled is not None
        return cls(*layer.grid, layer.filled)

    def around(self, rect: Rect) -> Rect:
        """The rectangle of the whole grid, if that of the image is ``rect``."""
        x, y, width, height = rect
        return x, y, width * self.columns / self.filled[1], height * self.rows / self.filled[0]


class _Layout:
    """Panels in blocks of columns; each block has a row for each class."""

    def __init__(self, panels: int, aspect: float, names: Sequence[str]) -> None:
        longest = max(14, *(len(line) for name in names for line in name.split("\n")))
        self.blocks = -(-panels // (_FEW_COLUMNS if len(names) <= _FEW_ROWS else _MAX_COLUMNS))
        self.columns = -(-panels // self.blocks)
        self.height = _PANEL * aspect
        self.left = _MARGIN + longest * _LETTER + 0.15
        self.block_height = _HEADER + len(names) * (self.height + _GAP)

    def begin(self) -> tuple[Figure, Axes]:
        return new_canvas(self.left + self.columns * (_PANEL + _GAP) - _GAP + _MARGIN, self.blocks * self.block_height)

    def corner(self, row: int, expert: int) -> tuple[float, float]:
        """The upper left corner of a panel."""
        block, column = divmod(expert, self.columns)
        y = block * self.block_height + _HEADER + row * (self.height + _GAP)
        return self.left + column * (_PANEL + _GAP), y

    def header(self, expert: int) -> tuple[float, float]:
        x, y = self.corner(0, expert)
        return x, y - _HEADER / 2


def _name_expert(axes: Axes, x: float, y: float, expert: int) -> None:
    style: dict[str, Any] = {"color": expert_colour(expert), "linestyle": expert_dash(expert), "linewidth": 4}
    axes.plot((x, x + 0.18), (y, y), solid_capstyle="butt", **style)
    axes.text(x + 0.24, y, f"expert {expert}", fontsize=8, va="center_baseline", color=INK)


def _map(axes: Axes, rect: Rect, backdrop: Array, grid: _Grid, value_N: Array, strongest: float, kind: Kind) -> None:
    from matplotlib.colors import to_rgb

    draw_image(axes, 0.25 + 0.7 * backdrop, rect, cmap="gray", vmin=0, vmax=1)
    tint = np.zeros((len(value_N), 4))
    colours = {"share": ("vermilion", "vermilion"), "difference": ("vermilion", "blue"), "gate": ("purple", "purple")}
    more, less = (to_rgb(COLOURS[name]) for name in colours[kind])
    tint[:, :3] = np.where(value_N[:, None] >= 0, more, less)
    tint[:, 3] = _STRONGEST * np.minimum(np.abs(value_N) / strongest, 1)
    draw_image(axes, tint.reshape(grid.rows, grid.columns, 4), grid.around(rect), clip=rect)
    _rule(axes, rect, grid)
    _numbers(axes, rect, grid, value_N, kind)


def _rule(axes: Axes, rect: Rect, grid: _Grid) -> None:
    """Thin lines between patches."""
    x, y, width, height = rect
    style: dict[str, Any] = {"color": "white", "linewidth": 0.3, "alpha": 0.6}
    for column in range(1, grid.columns):
        axes.plot((x + column * width / grid.filled[1],) * 2, (y, y + height), **style)
    for row in range(1, grid.rows):
        axes.plot((x, x + width), (y + row * height / grid.filled[0],) * 2, **style)
    draw_frame(axes, rect, LINE, 0.6)


def _numbers(axes: Axes, rect: Rect, grid: _Grid, value_N: Array, kind: Kind) -> None:
    x, y, width, height = rect
    wide, tall = width / grid.filled[1], height / grid.filled[0]
    size = min(7.0, 0.3 * wide * _INCH, 0.5 * tall * _INCH)
    if size < _SMALLEST_NUMBER:
        return
    from matplotlib.patheffects import withStroke

    for n, value in enumerate(value_N):
        text = _number(float(value), kind)
        if text:
            row, column = divmod(n, grid.columns)
            right, bottom = min(column + 1, grid.filled[1]), min(row + 1, grid.filled[0])
            axes.text(
                x + (column + right) / 2 * wide, y + (bottom - 0.05) * tall, text, fontsize=size, ha="center",
                va="bottom", color="black", path_effects=[withStroke(linewidth=1.2, foreground="white", alpha=0.8)],
            )  # fmt: skip


def _number(value: float, kind: Kind) -> str:
    """Percent, or a gate with two decimals; empty for small values."""
    if kind == "gate":
        return f"{value:.2f}".removeprefix("0") if value >= 0.005 else ""
    percent = round(100 * value)
    if abs(value) < _MIN_RATE:
        return ""
    return f"{percent:+d}".replace("-", "−") if kind == "difference" else str(percent)


def _crop(axes: Axes, rect: Rect, image: NDArray[Any], grid: _Grid, patch: int, expert: int) -> None:
    """The patch with its surroundings, which are paler."""
    C, H, W = image.shape
    tall, wide = H / grid.filled[0], W / grid.filled[1]
    around = round(max(tall / 2, wide / 2, min(H, W) / 8))
    row, column = divmod(patch, grid.columns)
    bottom, right = min((row + 1) * tall, H), min((column + 1) * wide, W)
    rows, columns = (round(row * tall), round(bottom)), (round(column * wide), round(right))
    (top, height), (left, width) = _window(*rows, around, H), _window(*columns, around, W)
    seen = image[:, top : top + height, left : left + width].transpose(1, 2, 0) / 255
    pale = 0.6 * seen + 0.4
    inside = np.s_[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]
    pale[inside] = seen[inside]
    draw_image(axes, np.broadcast_to(pale, (height, width, 3)) if C == 1 else pale[..., :3], rect)
    x, y, across, down = rect[0], rect[1], rect[2] / width, rect[3] / height
    inner = (
        x + (column * wide - left) * across,
        y + (row * tall - top) * down,
        (right - column * wide) * across,
        (bottom - row * tall) * down,
    )
    draw_frame(axes, inner, "white", 2.4)
    draw_frame(axes, inner, expert_colour(expert), 1.6, expert_dash(expert))


def _window(start: int, end: int, around: int, limit: int) -> tuple[int, int]:
    """Start and length of a window with a margin on both sides, shifted to lie within the image."""
    length = min(end - start + 2 * around, limit)
    return min(max(start - around, 0), limit - length), length
