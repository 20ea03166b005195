"""Maps of one image as kernels read them: zeros around them, and the channels of a block together.

What a kernel sees at a pixel is then a view of that memory, and so is where the layer before writes its result. Both
are views of memory that is kept from image to image (`Scratch`), since to ask for a megabyte anew takes longer than to
fill it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Frame", "Kernel", "Scratch", "SpareScratch"]

PLANS = 512
"""So many arrangements of views are kept."""
KEPT = 2**24
"""More values than this are not kept from image to image."""


class Kernel(NamedTuple):
    """Of a convolution, square."""

    size: int
    stride: int
    padding: int

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result for a map of that size."""
        rows, columns = ((side + 2 * self.padding - self.size) // self.stride + 1 for side in (height, width))
        return rows, columns


class Frame:
    """Memory for a map (blocks, height, width, channels of a block), with the zeros that a kernel reads around it.

    >>> frame = Frame(torch.zeros(50), 1, 3, 3, 2, Kernel(3, 1, 1))
    >>> frame.inside.copy_(torch.arange(18.0).view(1, 3, 3, 2))[0, 0].tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    >>> frame.windows().shape, frame.windows()[0, 0, 0, 2].tolist()    # what lies below and beside the first pixel
    (torch.Size([3, 3, 1, 3, 6]), [0.0, 0.0, 6.0, 7.0, 8.0, 9.0])

    Args:
        memory: of (height + 2 · padding) · (width + 2 · padding) values for each channel, zeros.
        blocks: how many.
        height: of the map.
        width: of the map.
        size: channels of a block.
        kernel: who reads it.
    """

    def __init__(self, memory: Tensor, blocks: int, height: int, width: int, size: int, kernel: Kernel) -> None:
        ks, stride, padding = kernel
        row = (width + 2 * padding) * size
        block = (height + 2 * padding) * row
        rows, columns = kernel.sides(height, width)
        start = padding * (row + size)
        self.inside = memory.as_strided((blocks, height, width, size), (block, row, size, 1), start)
        """Where the map is."""
        self._memory = memory
        self._windows = (rows, columns, blocks, ks, ks * size), (stride * row, stride * size, block, row, 1)
        self._strips = (height + 2 * padding, columns, blocks, 1, ks * size), (row, stride * size, block, row, 1)

    def windows(self) -> Tensor:
        """(H', W', blocks, ks, ks · size): what a kernel sees at each pixel of its result, row by row of the kernel."""
        return self._memory.as_strided(*self._windows)

    def strips(self) -> Tensor:
        """(H + 2 · padding, W', blocks, 1, ks · size): the same of a kernel of one row."""
        return self._memory.as_strided(*self._strips)

    @staticmethod
    def needs(height: int, width: int, kernel: Kernel) -> int:
        """How many values a channel takes."""
        return (height + 2 * kernel.padding) * (width + 2 * kernel.padding)


class Scratch:
    """Memory for what is made on the way from one layer to the next, and the views of it that were used before.

    Whoever has one has it alone. It belongs to one dtype.

    >>> scratch = Scratch(torch.float32)
    >>> scratch.take("results", 2, 3).shape
    torch.Size([2, 3])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.plans: dict[Hashable, Any] = {}
        self.sizes: dict[Hashable, int] = {}
        """How many channels a map had that was under a name last, for whoever has to know."""
        self._memory: dict[Hashable, Tensor] = {}
        self._total = 0

    def take(self, name: Hashable, *shape: int) -> Tensor:
        """Memory of that shape, under a name; what was under that name before is overwritten."""
        strides, count = list[int](), 1
        for side in reversed(shape):
            strides.append(count)
            count *= side
        held = self._memory.get(name)
        if held is None or held.numel() < count:
            if held is not None:
                self.plans.clear()  # they hold on to the memory that was too small
                self._total -= held.numel()
            self._total += count
            held = self._memory[name] = torch.zeros(count, dtype=self.dtype)
        return held.as_strided(shape, strides[::-1])

    def keep(self, key: Hashable, plan: object) -> None:
        """Keep views for whoever comes with that key again."""
        if len(self.plans) >= PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def may_stay(self) -> bool:
        """Whether it is small enough to be kept for the next image."""
        return self._total <= KEPT


class SpareScratch:
    """`Scratch` between one image and the next, for images of one size; threads that run at once have one each.

    >>> spare, x = SpareScratch(), torch.zeros(1, 3, 8, 8)
    >>> first = spare.take(x)
    >>> spare.take(x) is first                               # which somebody has
    False
    >>> spare.give_back(x, first)
    >>> spare.take(x) is first
    True
    """

    def __init__(self) -> None:
        self._spare: list[tuple[torch.Size, Scratch]] = []

    def take(self, x: Tensor) -> Scratch:
        """Memory for an image like that."""
        try:
            shape, scratch = self._spare.pop()
        except IndexError:
            return Scratch(x.dtype)
        return scratch if shape == x.shape and scratch.dtype == x.dtype else Scratch(x.dtype)

    def give_back(self, x: Tensor, scratch: Scratch) -> None:
        """Of whoever took it for that image and needs it no more."""
        if scratch.may_stay():
            self._spare.append((x.shape, scratch))
