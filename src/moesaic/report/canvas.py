"""A matplotlib figure with one pair of axes whose coordinates are inches from the upper left corner."""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from moesaic.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Rect", "draw_frame", "draw_image", "new_canvas", "save_png"]

Rect: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height in inches."""


def new_canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure of this size in inches, and its axes; y points downwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_autoscale_on(False)
    return figure, axes


def draw_image(axes: Axes, image: NDArray[Any], rect: Rect, *, clip: Rect | None = None, **style: Any) -> None:
    """Draws an image that fills the rectangle; what lies outside of ``clip`` is cut off."""
    from matplotlib.patches import Rectangle

    x, y, width, height = rect
    drawn = axes.imshow(image, extent=(x, x + width, y + height, y), aspect="auto", interpolation="nearest", **style)
    if clip is not None:
        drawn.set_clip_path(Rectangle(clip[:2], *clip[2:], transform=axes.transData))


def draw_frame(axes: Axes, rect: Rect, colour: str, width: float, dash: Any = "solid") -> None:
    """Draws the outline of a rectangle."""
    from matplotlib.patches import Rectangle

    x, y, across, down = rect
    style: dict[str, Any] = {"edgecolor": colour, "linewidth": width, "linestyle": dash}
    axes.add_patch(Rectangle((x, y), across, down, fill=False, joinstyle="miter", **style))


def save_png(figure: Figure, path: Path) -> str:
    """Writes the figure atomically; returns the name of the file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=140, format="png", metadata={"Software": None})
    write_atomic(path, file.getvalue())
    return path.name
