"""Draw the routing on the images: which expert looks at which patch, and how much it counts.

One row for each image. On the left the image, every chosen patch framed in the colour of the
expert that chose it, frames nested where several chose the same. To its right what each expert
sees: its own patches, the rest under a veil.

Colours are Okabe and Ito's, which colour-blind eyes tell apart too, with grey for their black, that
dark images would hide. No palette parts more than eight, so the next eight experts have dashed
frames, and every expert is named in writing.
"""

# matplotlib's stubs leave keyword arguments untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.checks import check_positive
from moesaic.routing_record import Chooser, Routing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["expert_colour", "expert_dash", "overlay"]

_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442", "#8C8C8C")
_DASHES: tuple[Any, ...] = ("solid", (0, (2, 1)), (0, (1, 0.6)), (0, (3, 0.6, 0.8, 0.6)))
_INK, _LINE = "#333333", "#BBBBBB"
_VEIL = 0.82

# over the images; over the experts' panels, without and with numbers
_HEADERS: dict[Chooser, tuple[str, str, str]] = {
    "expert": ("Who chose what", "Each expert's patches", "Each expert's patches and gates"),
    "unit": ("Who got what", "Each expert's patches", "Each expert's patches and gates"),
    "soft": ("Who draws most on what", "Each expert's mixture", "Each expert's mixture, in shares"),
}

# inches
_MARGIN, _GAP, _TITLE, _HEADER = 0.15, 0.14, 0.25, 0.3
_PANEL, _PANEL_IN_ONE_ROW = 1.75, 2.6
_MOST_COLUMNS = 8

# points
_INCH = 72
_FRAME, _CASING = 2.4, 0.5
_SMALLEST_NUMBER, _LARGEST_NUMBER = 4.5, 8.0
_NUMBER_PER_PATCH = (0.22, 0.4)
"""Font size of a number over the width and the height of the patch it is written on."""


def overlay(
    images: Tensor | NDArray[Any],
    routing: Routing,
    *,
    experts: Sequence[int] | None = None,
    max_images: int = 4,
    titles: Sequence[str] | None = None,
) -> Figure:
    """A figure of the first ``max_images`` images with the patches of every expert.

    ``images`` (B, C, H, W) have 1 or 3 channels, bytes or floats of any range (what is not within
    0 to 1 is stretched to it, image by image), and any size: the routing's grid of patches is laid
    over the whole image. ``experts`` picks whom to draw, ``titles`` has a line for each image of
    the batch, such as its label. Numbers on patches are gates, left out where the patches are too
    small for them.

    A soft routing, where every expert sees a mixture of all patches, is drawn as maps of those
    mixtures: the larger a patch's share, the clearer it is, and shares above 1/N are written on
    it. The left picture then frames each patch for the expert that draws most on it.

    Save it with ``figure.savefig("routing.png")``; a notebook shows it by itself.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0, 1], [1, 3]]])
    >>> routing = Routing("patch", torch.zeros(1, 4, 2), index, torch.full((1, 2, 2), 0.5), "expert", grid=(2, 2))
    >>> figure = overlay(torch.rand(1, 3, 32, 32), routing, titles=["a cat"])
    >>> len(figure.axes)                                                 # the image, and what each expert sees
    3
    """
    from matplotlib.figure import Figure

    check_positive("overlay", max_images=max_images)
    grid = _grid(routing)
    picked = _picked_experts(routing, experts)
    pixels = _pixels(images, routing)[:max_images]
    if titles is not None and len(titles) != routing.batch:
        raise ValueError(f"overlay: {len(titles)} titles for {routing.batch} images; give one for each, '' for none")

    view = _View.of(routing, picked, len(pixels))
    page = _Page(rows=len(pixels), panels=len(picked), aspect=pixels.shape[1] / pixels.shape[2])
    legible = page.fits_numbers(grid)
    figure = Figure(figsize=page.size, facecolor="white")
    over_images, over_panels, over_numbers = _HEADERS[routing.chooser]
    page.add_header(figure, over_images, over_numbers if legible else over_panels)
    for b, image in enumerate(pixels):
        whole = _Canvas(page.add_image(figure, b), image, grid, page.image_width)
        whole.veil(np.where(view.framed[b].any(0), 0.0, _VEIL / 2))
        whole.frames(view.framed[b], picked)
        if titles is not None:
            whole.title(titles[b])
        for i, expert in enumerate(picked):
            panel = _Canvas(page.add_panel(figure, b, i), image, grid, page.panel_width)
            panel.name(expert, idle=not view.clear[b, i].any())
            panel.veil(_VEIL * (1 - view.clear[b, i]))
            if not view.soft:
                panel.frames(view.framed[b, i : i + 1], [expert])
            if legible:
                panel.numbers(view.value[b, i], view.numbered[b, i], expert)
    return figure


@dataclass(frozen=True)
class _View:
    """What of a routing is drawn: (B, E, N), for each image, picked expert and patch."""

    framed: NDArray[np.bool_]
    clear: NDArray[np.float64]
    """How clearly the expert sees the patch, from 0 (veiled) to 1."""
    value: NDArray[np.float64]
    numbered: NDArray[np.bool_]
    soft: bool

    @classmethod
    def of(cls, routing: Routing, picked: Sequence[int], images: int) -> _View:
        def drawn(values_BNE: Tensor) -> NDArray[Any]:
            return values_BNE[:images, :, list(picked)].detach().mT.cpu().numpy()

        if routing.dispatch is None:
            mask_BEN, gate_BEN = drawn(routing.mask), drawn(routing.weights)
            return cls(mask_BEN, mask_BEN.astype(np.float64), gate_BEN, mask_BEN, soft=False)
        mixture_BNE = routing.dispatch.mean(-1)
        most_BNE = torch.nn.functional.one_hot(mixture_BNE.argmax(-1), routing.experts).bool()
        mixture_BEN = drawn(mixture_BNE)
        clear_BEN = mixture_BEN / mixture_BEN.max(-1, keepdims=True)
        return cls(drawn(most_BNE), clear_BEN, mixture_BEN, mixture_BEN > 1 / routing.units, soft=True)


@dataclass(frozen=True)
class _Page:
    """Where everything lies, in inches from the upper left corner."""

    rows: int
    panels: int
    aspect: float
    """Height of an image over its width."""

    @property
    def panel_rows(self) -> int:
        return 1 if self.panels <= 3 else max(2, -(-self.panels // _MOST_COLUMNS))

    @property
    def panel_columns(self) -> int:
        return -(-self.panels // self.panel_rows)

    @property
    def panel_width(self) -> float:
        return _PANEL_IN_ONE_ROW if self.panel_rows == 1 else _PANEL

    @property
    def panel_height(self) -> float:
        return self.panel_width * self.aspect

    @property
    def image_height(self) -> float:
        """As high as the rows of panels beside it."""
        return self.panel_rows * (self.panel_height + _TITLE) - _TITLE

    @property
    def image_width(self) -> float:
        return self.image_height / self.aspect

    def fits_numbers(self, grid: tuple[int, int]) -> bool:
        """Whether numbers on the patches of a panel are large enough to be read."""
        across, down = _NUMBER_PER_PATCH
        width, height = self.panel_width * _INCH / grid[1], self.panel_height * _INCH / grid[0]
        return min(width * across, height * down) >= _SMALLEST_NUMBER

    @property
    def size(self) -> tuple[float, float]:
        return self._left(self.panel_columns) - _GAP + _MARGIN, self._top(self.rows) - _TITLE - _GAP + _MARGIN

    def add_header(self, figure: Figure, over_images: str, over_panels: str) -> None:
        width, height = self.size
        up = 1 - 0.5 * _HEADER / height
        for x, text in ((_MARGIN, over_images), (self._left(0), over_panels)):
            figure.text(x / width, up, text, fontsize=9, weight="bold", va="center", color=_INK)

    def add_image(self, figure: Figure, row: int) -> Axes:
        return self._add(figure, _MARGIN, self._top(row), self.image_width, self.image_height)

    def add_panel(self, figure: Figure, row: int, panel: int) -> Axes:
        down, right = divmod(panel, self.panel_columns)
        y = self._top(row) + down * (self.panel_height + _TITLE)
        return self._add(figure, self._left(right), y, self.panel_width, self.panel_height)

    def _left(self, column: int) -> float:
        return _MARGIN + self.image_width + 2 * _GAP + column * (self.panel_width + _GAP)

    def _top(self, row: int) -> float:
        return _HEADER + _TITLE + row * (self.image_height + _GAP + _TITLE)

    def _add(self, figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
        across, up = self.size
        return figure.add_axes((x / across, 1 - (y + height) / up, width / across, height / up))


class _Canvas:
    """An image with a grid of patches laid over it, to draw on; its coordinates count patches, its sizes points."""

    def __init__(self, axes: Axes, image: NDArray[Any], grid: tuple[int, int], width_in_inches: float) -> None:
        self.axes = axes
        self.rows, self.columns = grid
        self.width = width_in_inches * _INCH
        self.height = self.width * image.shape[0] / image.shape[1]
        self.patch = np.array([self.width / self.columns, self.height / self.rows])
        self._lay(image)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=_LINE, linewidth=0.6)

    def title(self, text: str) -> None:
        self.axes.set_title(text, fontsize=9, loc="left", pad=4, parse_math=False)

    def name(self, expert: int, *, idle: bool) -> None:
        """The expert's name above the canvas, after a piece of its frame: the key to the colours."""
        above = 1 + 0.5 * _TITLE * _INCH / self.height
        here = self.axes.transAxes
        look: dict[str, Any] = {"color": expert_colour(expert), "linestyle": expert_dash(expert), "linewidth": 4}
        ends = (0.0, 14 / self.width)
        self.axes.plot(ends, (above, above), transform=here, clip_on=False, solid_capstyle="butt", **look)
        text = f"expert {expert}" + (" (idle)" if idle else "")
        self.axes.text(18 / self.width, above, text, fontsize=8, va="center_baseline", color=_INK, transform=here)

    def veil(self, alpha_N: NDArray[np.float64]) -> None:
        veil = np.ones((self.rows, self.columns, 4))
        veil[..., 3] = alpha_N.reshape(self.rows, self.columns)
        self._lay(veil)

    def frames(self, framed_EN: NDArray[np.bool_], experts: Sequence[int]) -> None:
        """From the outside in, a frame for each expert that has the patch."""
        deepest = max(1, int(framed_EN.sum(0).max()))
        # broad, but never so broad that the frames hide the patch
        pitch = min(_FRAME + _CASING, self.patch.min() * min(0.09, 0.3 / deepest))
        colour_width = pitch * _FRAME / (_FRAME + _CASING)
        depth_EN = framed_EN.cumsum(0) - 0.5
        for framed_N, depth_N, expert in zip(framed_EN, depth_EN, experts, strict=True):
            chosen = np.flatnonzero(framed_N)
            corners = self._corners(chosen, depth_N[chosen] * pitch)
            # white below parts the frames from one another and from an image of their colour; it is
            # a little broader, for the veil's edge is rounded to a pixel
            self._outline(corners, "white", pitch + _CASING, "solid")
            self._outline(corners, expert_colour(expert), colour_width, expert_dash(expert))

    def numbers(self, value_N: NDArray[np.float64], shown_N: NDArray[np.bool_], expert: int) -> None:
        """At the foot of the patches, so that what is on them can be seen."""
        size = min(_LARGEST_NUMBER, *(self.patch * _NUMBER_PER_PATCH))
        box = {"boxstyle": "square,pad=0.2", "facecolor": expert_colour(expert), "edgecolor": "none"}
        look: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "bottom", "color": _ink(expert), "bbox": box}
        for n in np.flatnonzero(shown_N):
            row, column = divmod(int(n), self.columns)
            foot = row + 1 - (0.2 * size + 1) / self.patch[1]
            self.axes.text(column + 0.5, foot, _brief(value_N[n]), **look)

    def _lay(self, picture: NDArray[Any]) -> None:
        self.axes.imshow(picture, extent=(0, self.columns, self.rows, 0), aspect="auto", interpolation="nearest")

    def _corners(self, patches: NDArray[Any], inset: NDArray[Any]) -> NDArray[np.float64]:
        """(patches, 4, 2): the corners of squares that lie ``inset`` points inside the patches."""
        low = np.stack([patches % self.columns, patches // self.columns], -1) + inset[:, None] / self.patch
        size = 1 - 2 * inset[:, None] / self.patch
        return low[:, None] + size[:, None] * np.array([(0, 0), (1, 0), (1, 1), (0, 1)])

    def _outline(self, corners: NDArray[np.float64], colour: str, width: float, dash: Any) -> None:
        from matplotlib.collections import PolyCollection

        look: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "linewidths": width, "linestyles": dash}
        self.axes.add_collection(PolyCollection(list(corners), joinstyle="miter", snap=False, **look), autolim=False)


def expert_colour(expert: int) -> str:
    """The colour an expert has in every picture."""
    return _COLOURS[expert % len(_COLOURS)]


def expert_dash(expert: int) -> Any:
    """The dashes of its frames, which tell it from the experts that share its colour."""
    return _DASHES[expert // len(_COLOURS) % len(_DASHES)]


def _ink(expert: int) -> str:
    """Black or white, whichever can be read on the expert's colour."""
    red, green, blue = (int(expert_colour(expert)[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "white"


def _brief(value: float) -> str:
    """Two digits, or 4e-3 where they would say nothing."""
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _grid(routing: Routing) -> tuple[int, int]:
    if routing.grid is None:
        raise ValueError(
            f"overlay: this routing of {routing.unit}s has no grid, so its units have no place on an image; "
            "only patches can be drawn: give Routing(..., grid=(rows, columns))"
        )
    return routing.grid


def _picked_experts(routing: Routing, experts: Sequence[int] | None) -> list[int]:
    if experts is None:
        return list(range(routing.experts))
    picked = list(experts)
    if not picked or any(not 0 <= e < routing.experts for e in picked):
        raise ValueError(f"overlay: experts={picked}; pick from 0 to {routing.experts - 1}, or None for all of them")
    return picked


def _pixels(images: Tensor | NDArray[Any], routing: Routing) -> NDArray[np.float64]:
    """(B, H, W, 3) from 0 to 1."""
    given = torch.as_tensor(images).detach().cpu()
    if given.ndim != 4 or given.shape[1] not in (1, 3) or 0 in given.shape[2:]:
        raise ValueError(
            f"overlay: images have shape {tuple(given.shape)}; give (B, C, H, W) with 1 or 3 channels "
            "(of more, pick three: images[:, :3])"
        )
    if len(given) != routing.batch or routing.batch == 0:
        raise ValueError(
            f"overlay: {len(given)} images, but {routing.batch} were routed; give the images that were, at least one"
        )
    values = given.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).double().numpy()
    return values / 255 if given.dtype == torch.uint8 else _stretched(values)


def _stretched(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values within 0 to 1 as they are, others stretched to it image by image; what is not finite becomes black."""
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    axes = (1, 2, 3)
    low = values.min(axes, keepdims=True, where=finite, initial=np.inf)
    high = values.max(axes, keepdims=True, where=finite, initial=-np.inf)
    if low.min() < 0 or high.max() > 1:
        span = np.where(high > low, high - low, 1)
        values = (values - low) / span
    return np.where(finite, values, 0.0)
