"""Draws the routing on images: the patches of each expert and their gates.

One row per image. On the left is the image with a frame around each selected patch in the colour of its
expert; frames are nested if several experts select a patch. On the right is one panel per expert with
its own patches, the rest of the image faded out.

The colours are the colour-blind-safe palette of Okabe and Ito, with grey for black, which would be
invisible on dark images. It has eight colours; the next eight experts have dashed frames, and every panel
has the name of its expert.
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

from moesaic.argument_checks import check_positive
from moesaic.insight.metrics import plural_unit
from moesaic.routing_record import Chooser, Routing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["expert_colour", "expert_dash", "overlay"]

_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442", "#8C8C8C")
_DASHES: tuple[Any, ...] = ("solid", (0, (2, 1)), (0, (1, 0.6)), (0, (3, 0.6, 0.8, 0.6)))
_INK, _LINE = "#333333", "#BBBBBB"
_FADE = 0.82

# titles above the images, and above the panels without and with numbers
_HEADERS: dict[Chooser, tuple[str, str, str]] = {
    "expert": ("Selected {units}", "{Units} of each expert", "{Units} of each expert, with gates"),
    "unit": ("Routed {units}", "{Units} of each expert", "{Units} of each expert, with gates"),
    "soft": ("Expert with the largest weight", "Dispatch weights", "Dispatch weights of each expert"),
}

# inches
_MARGIN, _GAP, _TITLE, _HEADER = 0.15, 0.14, 0.25, 0.3
_PANEL, _PANEL_IN_ONE_ROW = 1.75, 2.6
_MAX_COLUMNS = 8

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
    """Returns a figure of the first images with the patches of each expert.

    Numbers on patches are gates; they are omitted if patches are too small. For a soft routing each panel shows the
    dispatch weights of an expert: the larger the weight, the clearer the patch; weights above 1/N are written on it.
    Tokens are drawn as the patches that they began as; the title names the experts of a class token.

    Save it with ``figure.savefig("routing.png")``; a notebook displays it.

    Args:
        images: (B, C, H, W) with 1 or 3 channels, uint8 or float; floats outside of [0, 1] are rescaled per image.
        routing: the routing of these images; its grid of patches covers the whole image, and beyond its bottom and
            right what was padded, which is cut off.
        experts: the experts to draw; all of them by default.
        max_images: images to draw, at most.
        titles: a title for each image of the batch, such as its label.

    >>> import torch
    >>> from moesaic.routing_record import Routing
    >>> index = torch.tensor([[[0, 1], [1, 3]]])
    >>> routing = Routing("patch", torch.zeros(1, 4, 2), index, torch.full((1, 2, 2), 0.5), "expert", grid=(2, 2))
    >>> figure = overlay(torch.rand(1, 3, 32, 32), routing, titles=["a cat"])
    >>> len(figure.axes)                                                 # the image, and a panel per expert
    3
    """
    from matplotlib.figure import Figure

    check_positive("overlay", max_images=max_images)
    if not isinstance(routing, Routing):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"overlay: routing is a {type(routing).__name__}; pass the Routing of one layer, which record_routing has "
            "under the name of the layer: overlay(images, routing[name])"
        )
    grid, filled = _grid(routing)
    routing, prefixed = routing.without_prefix(), routing
    picked = _picked_experts(routing, experts)
    pixels = _pixels(images, routing)[:max_images]
    if titles is not None and len(titles) != routing.batch:
        raise ValueError(f"overlay: {len(titles)} titles for {routing.batch} images; give one for each, '' for none")

    drawn = _DrawnRouting.of(routing, picked, len(pixels))
    layout = _Layout(len(pixels), len(picked), pixels.shape[1] / pixels.shape[2])
    legible = layout.fits_numbers(filled)
    figure = Figure(figsize=layout.size, facecolor="white")
    units = plural_unit(routing.unit)
    over_images, over_panels, over_numbers = (
        header.format(units=units, Units=units.capitalize()) for header in _HEADERS[routing.chooser]
    )
    layout.add_header(figure, over_images, over_numbers if legible else over_panels)
    for b, image in enumerate(pixels):
        whole = _ImageAxes(layout.add_image(figure, b), image, grid, filled, layout.image_width)
        whole.fade(np.where(drawn.framed[b].any(0), 0.0, _FADE / 2))
        whole.frames(drawn.framed[b], picked)
        named = (titles[b] if titles is not None else "", prefix_text(prefixed, b))
        whole.title(" · ".join(filter(None, named)))
        for i, expert in enumerate(picked):
            panel = _ImageAxes(layout.add_panel(figure, b, i), image, grid, filled, layout.panel_width)
            panel.name(expert, idle=not drawn.clear[b, i].any())
            panel.fade(_FADE * (1 - drawn.clear[b, i]))
            if not drawn.soft:
                panel.frames(drawn.framed[b, i : i + 1], [expert])
            if legible:
                panel.numbers(drawn.value[b, i], drawn.numbered[b, i], expert)
    return figure


@dataclass(frozen=True)
class _DrawnRouting:
    """The parts of a routing that are drawn, (B, E, N) for each image, expert and patch."""

    framed: NDArray[np.bool_]
    clear: NDArray[np.float64]
    """Visibility of the patch, from 0 (faded out) to 1."""
    value: NDArray[np.float64]
    numbered: NDArray[np.bool_]
    soft: bool

    @classmethod
    def of(cls, routing: Routing, picked: Sequence[int], images: int) -> _DrawnRouting:
        def selected(values_BNE: Tensor) -> NDArray[Any]:
            return values_BNE[:images, :, list(picked)].detach().mT.cpu().numpy()

        if routing.dispatch is None:
            mask_BEN, gate_BEN = selected(routing.mask), selected(routing.weights)
            return cls(mask_BEN, mask_BEN.astype(np.float64), gate_BEN, mask_BEN, soft=False)
        weight_BNE = routing.dispatch.mean(-1)
        most_BNE = torch.nn.functional.one_hot(weight_BNE.argmax(-1), routing.experts).bool()
        weight_BEN = selected(weight_BNE)
        clear_BEN = weight_BEN / weight_BEN.max(-1, keepdims=True)
        return cls(selected(most_BNE), clear_BEN, weight_BEN, weight_BEN > 1 / routing.units, soft=True)


class _Layout:
    """Positions of images and panels, in inches from the upper left corner."""

    def __init__(self, rows: int, panels: int, aspect: float) -> None:
        """``aspect`` is the height of an image over its width."""
        panel_rows = 1 if panels <= 3 else max(2, -(-panels // _MAX_COLUMNS))
        self.panel_columns = -(-panels // panel_rows)
        self.panel_width = _PANEL_IN_ONE_ROW if panel_rows == 1 else _PANEL
        self.panel_height = self.panel_width * aspect
        self.image_height = panel_rows * (self.panel_height + _TITLE) - _TITLE  # that of the panels beside it
        self.image_width = self.image_height / aspect
        self.size = (self._left(self.panel_columns) - _GAP + _MARGIN, self._top(rows) - _TITLE - _GAP + _MARGIN)

    def fits_numbers(self, filled: tuple[float, float]) -> bool:
        """Whether numbers on the patches of a panel are legible."""
        across, down = _NUMBER_PER_PATCH
        width, height = self.panel_width * _INCH / filled[1], self.panel_height * _INCH / filled[0]
        return min(width * across, height * down) >= _SMALLEST_NUMBER

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


class _ImageAxes:
    """Axes with an image and a grid of patches: coordinates are in patches, sizes in points."""

    def __init__(
        self,
        axes: Axes,
        image: NDArray[Any],
        grid: tuple[int, int],
        filled: tuple[float, float],
        width_in_inches: float,
    ) -> None:
        """``filled`` are the rows and columns of patches in the image, which the grid may exceed."""
        self.axes = axes
        self.rows, self.columns = grid
        self.filled = np.array([filled[1], filled[0]])
        self.width = width_in_inches * _INCH
        self.height = self.width * image.shape[0] / image.shape[1]
        self.patch = np.array([self.width, self.height]) / self.filled
        self._show(image, *filled)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=_LINE, linewidth=0.6)

    def title(self, text: str) -> None:
        self.axes.set_title(text, fontsize=9, loc="left", pad=4, parse_math=False)

    def name(self, expert: int, *, idle: bool) -> None:
        """The name of the expert above the image, with a sample of its frame."""
        above = 1 + 0.5 * _TITLE * _INCH / self.height
        here = self.axes.transAxes
        style: dict[str, Any] = {"color": expert_colour(expert), "linestyle": expert_dash(expert), "linewidth": 4}
        ends = (0.0, 14 / self.width)
        self.axes.plot(ends, (above, above), transform=here, clip_on=False, solid_capstyle="butt", **style)
        text = f"expert {expert}" + (" (idle)" if idle else "")
        self.axes.text(18 / self.width, above, text, fontsize=8, va="center_baseline", color=_INK, transform=here)

    def fade(self, alpha_N: NDArray[np.float64]) -> None:
        """Covers each patch with white of this opacity."""
        cover = np.ones((self.rows, self.columns, 4))
        cover[..., 3] = alpha_N.reshape(self.rows, self.columns)
        self._show(cover, self.rows, self.columns)

    def frames(self, framed_EN: NDArray[np.bool_], experts: Sequence[int]) -> None:
        """Nested frames, one for each expert that has the patch."""
        deepest = max(1, int(framed_EN.sum(0).max()))
        # limited, so that the frames do not hide the patch
        pitch = min(_FRAME + _CASING, self.patch.min() * min(0.09, 0.3 / deepest))
        colour_width = pitch * _FRAME / (_FRAME + _CASING)
        depth_EN = framed_EN.cumsum(0) - 0.5
        for framed_N, depth_N, expert in zip(framed_EN, depth_EN, experts, strict=True):
            chosen = np.flatnonzero(framed_N)
            corners = self._corners(chosen, depth_N[chosen] * pitch)
            # white below separates the frames from each other and from the image; it is a little wider,
            # as the edge of the faded area is rounded to a pixel
            self._outline(corners, "white", pitch + _CASING, "solid")
            self._outline(corners, expert_colour(expert), colour_width, expert_dash(expert))

    def numbers(self, value_N: NDArray[np.float64], shown_N: NDArray[np.bool_], expert: int) -> None:
        """Numbers at the bottom of patches."""
        size = min(_LARGEST_NUMBER, *(self.patch * _NUMBER_PER_PATCH))
        box = {"boxstyle": "square,pad=0.2", "facecolor": expert_colour(expert), "edgecolor": "none"}
        style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "bottom", "color": _ink(expert), "bbox": box}
        for n in np.flatnonzero(shown_N):
            row, column = divmod(int(n), self.columns)
            right, bottom = np.minimum((column + 1, row + 1), self.filled)
            foot = bottom - (0.2 * size + 1) / self.patch[1]
            self.axes.text((column + right) / 2, foot, _format_gate(value_N[n]), **style)

    def _show(self, image: NDArray[Any], rows: float, columns: float) -> None:
        self.axes.imshow(image, extent=(0, columns, rows, 0), aspect="auto", interpolation="nearest")
        self.axes.set(xlim=(0, self.filled[0]), ylim=(self.filled[1], 0))

    def _corners(self, patches: NDArray[Any], inset: NDArray[Any]) -> NDArray[np.float64]:
        """(patches, 4, 2): the corners of squares that lie ``inset`` points inside the patches."""
        place = np.stack([patches % self.columns, patches // self.columns], -1)
        low = place + inset[:, None] / self.patch
        size = np.maximum(np.minimum(1, self.filled - place) - 2 * inset[:, None] / self.patch, 0)
        return low[:, None] + size[:, None] * np.array([(0, 0), (1, 0), (1, 1), (0, 1)])

    def _outline(self, corners: NDArray[np.float64], colour: str, width: float, dash: Any) -> None:
        from matplotlib.collections import PolyCollection

        style: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "linewidths": width, "linestyles": dash}
        self.axes.add_collection(PolyCollection(list(corners), joinstyle="miter", snap=False, **style), autolim=False)


def prefix_text(routing: Routing, image: int) -> str:
    """The experts of an image's tokens that have no place on the grid; empty if there are none, or all experts mix.

    >>> import torch
    >>> index = torch.tensor([[[0, 3], [4, 1], [0, 2]]])
    >>> scores, gate = torch.zeros(1, 5, 3), torch.ones(1, 3, 2)
    >>> prefix_text(Routing("token", scores, index, gate, "expert", grid=(2, 2), prefix=1), 0)
    'class token: experts 0, 2'
    """
    if not routing.prefix or routing.chooser == "soft":
        return ""
    taken = routing.mask[image, : routing.prefix].any(0).nonzero().flatten()
    experts = ", ".join(str(int(e)) for e in taken) or "none"
    name = "class token" if routing.prefix == 1 else f"{routing.prefix} prefix tokens"
    return f"{name}: {'expert' if len(taken) == 1 else 'experts'} {experts}"


def expert_colour(expert: int) -> str:
    """The colour of an expert in all figures."""
    return _COLOURS[expert % len(_COLOURS)]


def expert_dash(expert: int) -> Any:
    """The line style of an expert's frames; it differs for experts of the same colour."""
    return _DASHES[expert // len(_COLOURS) % len(_DASHES)]


def _ink(expert: int) -> str:
    """Black or white, whichever is legible on the colour of the expert."""
    red, green, blue = (int(expert_colour(expert)[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "white"


def _format_gate(value: float) -> str:
    """Two decimals, or 4e-3 for small values."""
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _grid(routing: Routing) -> tuple[tuple[int, int], tuple[float, float]]:
    """Rows and columns of patches, and how many of them the image fills."""
    if routing.grid is None or routing.filled is None:
        raise ValueError(
            f"overlay: this routing of {routing.unit}s has no grid, so its units have no position in the image; "
            "only patches and tokens of a grid can be drawn: give Routing(..., grid=(rows, columns))"
        )
    return routing.grid, routing.filled


def _picked_experts(routing: Routing, experts: Sequence[int] | None) -> list[int]:
    if experts is None:
        return list(range(routing.experts))
    picked = list(experts)
    if not picked or any(not 0 <= e < routing.experts for e in picked):
        raise ValueError(
            f"overlay: experts={picked}; use indices from 0 to {routing.experts - 1}, or None for all experts"
        )
    return picked


def _pixels(images: Tensor | NDArray[Any], routing: Routing) -> NDArray[np.float64]:
    """(B, H, W, 3) from 0 to 1."""
    tensor = torch.as_tensor(images).detach().cpu()
    if tensor.ndim != 4 or tensor.shape[1] not in (1, 3) or 0 in tensor.shape[2:]:
        raise ValueError(
            f"overlay: images have shape {tuple(tensor.shape)}; give (B, C, H, W) with 1 or 3 channels "
            "(of more, pick three: images[:, :3])"
        )
    if len(tensor) != routing.batch or routing.batch == 0:
        raise ValueError(
            f"overlay: {len(tensor)} images, but {routing.batch} were routed; give the routed images, at least one"
        )
    values = tensor.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).double().numpy()
    return values / 255 if tensor.dtype == torch.uint8 else _rescaled(values)


def _rescaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rescales images with values outside of [0, 1] to it; values that are not finite become black."""
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    axes = (1, 2, 3)
    low = values.min(axes, keepdims=True, where=finite, initial=np.inf)
    high = values.max(axes, keepdims=True, where=finite, initial=-np.inf)
    if low.min() < 0 or high.max() > 1:
        span = np.where(high > low, high - low, 1)
        values = (values - low) / span
    return np.where(finite, values, 0.0)
