"""Line charts as plain SVG, drawn in a millisecond: for pages that are redrawn while a network trains.

`chart_drawing` draws with matplotlib, which takes a second to import and a tenth of a second for a panel; that time
would be taken from the training. Colours are the CSS variables of page.css, one for each line, whatever the theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from moesaic.report.formatting import number

__all__ = ["Line", "LineChart", "spaced"]

_COLOURS = ("blue", "vermilion", "green", "purple", "orange", "sky", "grey", "indigo")
"""Names in `style.COLOURS`; none is the ink, so that a line is never taken for an axis."""
_DASHES = ("", "6 3", "2 2.5", "8 3 2 3")
_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 38
_MAX_POINTS = 200
"""Points of a line; of more, equally spaced ones are drawn."""
_SMALL = 1e-3
"""Numbers below are written as powers of ten."""
_MARKED = 40
"""Lines of at most so many points have markers."""


@dataclass(frozen=True)
class Line:
    """A line of a chart; None where there is no value."""

    label: str
    y: tuple[float | None, ...]


@dataclass(frozen=True)
class LineChart:
    """Lines over epochs.

    >>> chart = LineChart("Loss", "loss", (1, 2, 3), (Line("training", (2.0, 1.0, 0.5)),))
    >>> chart.description
    'Loss by epoch. training: 2 in epoch 1, 0.5 in epoch 3, lowest 0.5, highest 2.'
    >>> chart.svg.count("<circle")
    3
    """

    title: str
    y_label: str
    x: tuple[int, ...]
    lines: tuple[Line, ...]
    caption: str = ""
    low: float | None = None
    """Lower end of the axis; None for that of the data."""
    high: float | None = None
    log: bool = False

    @property
    def description(self) -> str:
        """The chart in words, for screen readers."""
        parts = [f"{self.title} by epoch."]
        for line in self.lines:
            points = [(x, y) for x, y in zip(self.x, line.y, strict=True) if y is not None]
            if points:
                (first, begin), (last, end) = points[0], points[-1]
                values = [y for _, y in points]
                parts.append(
                    f"{line.label}: {number(begin)} in epoch {first}, {number(end)} in epoch {last}, lowest "
                    f"{number(min(values))}, highest {number(max(values))}."
                )
        return " ".join(parts)

    @property
    def swatches(self) -> list[tuple[str, str, str]]:
        """Label, colour and dashes of each line, for a legend."""
        return [(line.label, _colour(i), _DASHES[i % len(_DASHES)]) for i, line in enumerate(self.lines)]

    @property
    def svg(self) -> str:
        """The chart as an SVG element; text is escaped."""
        ticks = self._ticks()
        parts = [
            f'<svg class="lines" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.description)}">'
        ]
        for tick, text in zip(ticks, self._tick_texts(ticks), strict=True):
            y = self._y(tick, ticks)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
        for tick in _epoch_ticks(self.x):
            x = self._x(tick)
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">epoch</text>')
        for i, line in enumerate(self.lines):
            parts += self._drawn(line, i, ticks)
        return "".join([*parts, "</svg>"])

    def _drawn(self, line: Line, i: int, ticks: Sequence[float]) -> list[str]:
        colour = f"var(--chart-{_colour(i)})"
        dash = f' stroke-dasharray="{_DASHES[i % len(_DASHES)]}"' if i % len(_DASHES) else ""
        known = [(x, y) for x, y in zip(self.x, line.y, strict=True) if y is not None]
        shown = [known[row] for row in spaced(len(known), _MAX_POINTS)]
        places = [(self._x(x), self._y(y, ticks), x, y) for x, y in shown]
        path = " ".join(f"{x},{y}" for x, y, _, _ in places)
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>']
        visible = len(places) <= _MARKED
        for x, y, epoch, value in places:
            tooltip = f"<title>epoch {epoch}, {escape(line.label)}: {number(value)}</title>"
            style = f'r="2.4" fill="{colour}"' if visible else 'r="5" fill="transparent"'
            parts.append(f'<circle cx="{x}" cy="{y}" {style}>{tooltip}</circle>')
        return parts

    def _values(self) -> list[float]:
        return [y for line in self.lines for y in line.y if y is not None]

    def _ticks(self) -> list[float]:
        values = self._values() or [0.0]
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        if self.log and low > 0:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            step = max(1, -(-(last - first) // 5))
            return [10.0**power for power in range(first, max(last, first + 1) + step, step)]
        return _nice_ticks(low, high)

    def _tick_texts(self, ticks: Sequence[float]) -> list[str]:
        """All as decimals, or all small ones as powers: an axis with 0.001 and 8·10⁻⁴ is hard to read."""
        if self.log or max(map(abs, ticks)) < _SMALL:
            return [_short(tick) for tick in ticks]
        # not `number`, whose three digits would name another value
        return [f"{tick:,.9f}".rstrip("0").rstrip(".").replace("-", "−") for tick in ticks]

    def _x(self, epoch: float) -> float:
        first, last = (self.x[0], self.x[-1]) if self.x else (0, 1)
        share = 0.5 if first == last else (epoch - first) / (last - first)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, value: float, ticks: Sequence[float]) -> float:
        low, high = ticks[0], ticks[-1]
        if self.log and low > 0:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = 0.5 if high == low else (value - low) / (high - low)
        return round(_HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM), 1)


def spaced(count: int, most: int) -> list[int]:
    """At most ``most`` equally spaced indices of ``count``, with the first and the last.

    >>> spaced(4, 10), spaced(10, 4)
    ([0, 1, 2, 3], [0, 3, 6, 9])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _nice_ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers that enclose the range.

    >>> _nice_ticks(0.0, 1.0), _nice_ticks(48.0, 93.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0])
    """
    if not high > low:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.9999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _epoch_ticks(x: Sequence[int]) -> list[int]:
    if not x:
        return []
    first, last = x[0], x[-1]
    inner = [round(tick) for tick in _nice_ticks(first, last) if first < tick < last and tick == round(tick)]
    gap = (last - first) / 12
    return [
        first,
        *(tick for tick in inner if tick - first > gap and last - tick > gap),
        *([last] if last > first else []),
    ]


def _short(value: float) -> str:
    """A tick: 1e-05 as 10⁻⁵."""
    if value and abs(value) < _SMALL:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        mantissa = value / 10.0**exponent
        power = f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        return power if round(mantissa, 3) == 1 else f"{mantissa:.3g}·{power}"
    return number(value)
