"""A sheet to draw on whose unit is an inch, from the upper left corner: pictures and frames lie where they are put.

Everything of a figure lies in one pair of axes.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Box", "blank", "frame", "lay"]

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height."""


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure, and axes whose coordinates are inches, downwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_autoscale_on(False)
    return figure, axes


def lay(axes: Axes, picture: NDArray[Any], box: Box, **look: Any) -> None:
    """Lay a picture into a box, stretched to it."""
    x, y, width, height = box
    axes.imshow(picture, extent=(x, x + width, y + height, y), aspect="auto", interpolation="nearest", **look)


def frame(axes: Axes, box: Box, colour: str, width: float, dash: Any = "solid") -> None:
    """Frame a box."""
    from matplotlib.patches import Rectangle

    x, y, across, down = box
    look: dict[str, Any] = {"edgecolor": colour, "linewidth": width, "linestyle": dash}
    axes.add_patch(Rectangle((x, y), across, down, fill=False, joinstyle="miter", **look))
