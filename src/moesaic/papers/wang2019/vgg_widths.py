"""The four wider versions of VGG-16 of Wang et al. 2019 (DeepMoE): what is printed, and what is solved for.

Table 1 of the supplement widens VGG-16 in four ways: the top layer (W1-High), one in the middle (W1-Mid), the lowest
four (W4-Low) or all (W13-All). Five cells of the table are missing in the available copy. The two complete columns have
the same number of convolution weights, 24.16 and 24.18 million, 1.64 times VGG-16's; `reconstruct` solves for the
missing cells under that constraint. The four are equal in weights but not in cost: at 32×32 pixels W4-Low has twelve
times the multiply-adds of W1-High.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moesaic.argument_checks import check_choice, check_positive
from moesaic.models.vgg import VGG16_STAGES, VGG16_WIDENINGS, VGG16_WIDTHS

__all__ = ["WIDENINGS", "Widening", "conv_macs", "conv_parameters", "reconstruct", "solve_width"]

_KERNEL = 9
_GRAIN = 5
"""Widths in print that are not powers of two (2990, 405, 615) are multiples of five; solved widths are rounded so."""


@dataclass(frozen=True)
class Widening:
    """A column of the supplement's Table 1.

    >>> WIDENINGS["w4_low"].conv_parameters / conv_parameters(VGG16_WIDTHS)  # doctest: +ELLIPSIS
    1.643...
    """

    title: str
    """Name in the paper."""
    widths: tuple[int, ...]
    """Channels of Conv1 to Conv13."""
    widened: tuple[int, ...]
    """Numbers of the widened convolutions, from 1."""
    reconstructed: tuple[int, ...] = ()
    """Numbers of the convolutions, from 1, whose cell is missing in print; the others are as printed."""

    @property
    def conv_parameters(self) -> int:
        """Number of convolution weights, for images of three channels."""
        return conv_parameters(self.widths)

    def conv_macs(self, image_size: int = 32) -> int:
        """Multiply-adds of the convolutions for one image of three channels."""
        return conv_macs(self.widths, image_size)


WIDENINGS: Mapping[str, Widening] = MappingProxyType(
    {
        "w1_high": Widening("W1-High", VGG16_WIDENINGS["w1_high"], widened=(13,), reconstructed=(11, 12, 13)),
        "w1_mid": Widening("W1-Mid", VGG16_WIDENINGS["w1_mid"], widened=(5,)),
        "w4_low": Widening("W4-Low", VGG16_WIDENINGS["w4_low"], widened=(1, 2, 3, 4), reconstructed=(3, 4)),
        "w13_all": Widening("W13-All", VGG16_WIDENINGS["w13_all"], widened=tuple(range(1, 14))),
    }
)
"""The columns by name; two of them are complete."""


def conv_parameters(widths: Sequence[int], in_channels: int = 3) -> int:
    """Number of weights of a sequence of 3×3 convolutions, without biases and BatchNorm.

    >>> conv_parameters(VGG16_WIDTHS)
    14710464
    """
    before = (in_channels, *widths[:-1])
    return sum(_KERNEL * C * O for C, O in zip(before, widths, strict=True))


def conv_macs(widths: Sequence[int], image_size: int = 32, in_channels: int = 3) -> int:
    """Multiply-adds of VGG-16's convolutions with these widths, for one image.

    >>> round(WIDENINGS["w4_low"].conv_macs() / WIDENINGS["w1_high"].conv_macs(), 1)
    12.3
    """
    sides = [image_size // 2**stage for stage, convs in enumerate(VGG16_STAGES) for _ in range(convs)]
    before = (in_channels, *widths[:-1])
    return sum(_KERNEL * C * O * side**2 for C, O, side in zip(before, widths, sides, strict=True))


def solve_width(widths: Sequence[int | None], parameters: float, in_channels: int = 3) -> float:
    """Returns the common width of the layers given as None for which the network has ``parameters`` weights.

    The number of weights is quadratic in that width, or linear if no two such layers are adjacent.

    >>> round(solve_width([64, None, 128], conv_parameters([64, 96, 128])), 6)
    96.0
    """
    if None not in widths:
        raise ValueError("solve_width: every width is given; put None for the widths to solve for")
    check_positive(
        "solve_width", in_channels=in_channels, **{f"Conv{i}": w for i, w in enumerate(widths, 1) if w is not None}
    )
    none, one, two = (conv_parameters([x if w is None else w for w in widths], in_channels) for x in (0, 1, 2))
    square = (two - 2 * one + none) / 2
    slope = one - none - square
    missing = parameters - none
    if missing <= 0:
        raise ValueError(
            f"solve_width: the given layers have {none} weights between them, which leaves {missing:g} of "
            f"parameters={parameters:g} for the others; give parameters above {none}"
        )
    return 2 * missing / (slope + math.sqrt(slope**2 + 4 * square * missing))


def reconstruct(name: str) -> tuple[int, ...]:
    """Returns the widths of a column of Table 1 with its missing cells derived.

    A missing cell of a layer that is not widened is VGG-16's. The others get one width, the multiple of five whose
    number of weights is closest to the mean of the complete columns. Unrounded it is 2565.1 for Conv13 of
    W1-High (between 2562.5 and 2567.7 for one or the other column) and 614.3 for Conv3 and Conv4 of W4-Low (613.6 to
    615.0).

    >>> reconstruct("w1_high")[10:]
    (512, 512, 2565)
    """
    column = WIDENINGS[check_choice("reconstruct", "name", name, WIDENINGS)]
    if not column.reconstructed:
        return column.widths
    widths: list[int | None] = list(column.widths)
    for number in column.reconstructed:
        widths[number - 1] = None if number in column.widened else VGG16_WIDTHS[number - 1]
    complete = [each.conv_parameters for each in WIDENINGS.values() if not each.reconstructed]
    solved = _GRAIN * round(solve_width(widths, sum(complete) / len(complete)) / _GRAIN)
    return tuple(solved if width is None else width for width in widths)
