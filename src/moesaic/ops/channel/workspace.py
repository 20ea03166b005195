"""Reusable memory for one image on its way through a frozen network: padded maps, and buffers with their views.

Maps are stored with a border of zeros and with the channels of a block contiguous. The windows that a kernel sees are
then a strided view of that memory, and so is the region into which the previous layer writes its output. Memory and
views are reused from image to image, since allocating a megabyte takes longer than filling it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["KernelShape", "PaddedMap", "Workspace", "WorkspacePool"]

MAX_PLANS = 512
"""At most this many sets of views are cached."""
MAX_VALUES = 2**24
"""A workspace with more values than this is not reused."""


class KernelShape(NamedTuple):
    """A square convolution kernel."""

    size: int
    stride: int
    padding: int

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for a map of that size."""
        rows, columns = ((side + 2 * self.padding - self.size) // self.stride + 1 for side in (height, width))
        return rows, columns


class PaddedMap:
    """Memory of a map (blocks, height, width, channels of a block) with the kernel's zero padding around it.

    >>> padded = PaddedMap(torch.zeros(50), 1, 3, 3, 2, KernelShape(3, 1, 1))
    >>> padded.inside.copy_(torch.arange(18.0).view(1, 3, 3, 2))[0, 0].tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    >>> padded.windows().shape, padded.windows()[0, 0, 0, 2].tolist()  # the kernel's last row at the first pixel
    (torch.Size([3, 3, 1, 3, 6]), [0.0, 0.0, 6.0, 7.0, 8.0, 9.0])

    Args:
        memory: zeros, (height + 2 · padding) · (width + 2 · padding) values per channel.
        blocks: number of blocks.
        height: of the map.
        width: of the map.
        size: channels of a block.
        kernel: of the convolution that reads the map.
    """

    def __init__(self, memory: Tensor, blocks: int, height: int, width: int, size: int, kernel: KernelShape) -> None:
        ks, stride, padding = kernel
        row = (width + 2 * padding) * size
        block = (height + 2 * padding) * row
        rows, columns = kernel.output_size(height, width)
        start = padding * (row + size)
        self.inside = memory.as_strided((blocks, height, width, size), (block, row, size, 1), start)
        """The map without its padding."""
        self._memory = memory
        self._windows = (rows, columns, blocks, ks, ks * size), (stride * row, stride * size, block, row, 1)
        self._strips = (height + 2 * padding, columns, blocks, 1, ks * size), (row, stride * size, block, row, 1)

    def windows(self) -> Tensor:
        """(H', W', blocks, ks, ks · size): the kernel's window at each output pixel."""
        return self._memory.as_strided(*self._windows)

    def strips(self) -> Tensor:
        """(H + 2 · padding, W', blocks, 1, ks · size): the windows of one row of the kernel."""
        return self._memory.as_strided(*self._strips)

    @staticmethod
    def values_per_channel(height: int, width: int, kernel: KernelShape) -> int:
        return (height + 2 * kernel.padding) * (width + 2 * kernel.padding)


class Workspace:
    """Named buffers of one dtype, and cached plans: views of these buffers. Used by one thread at a time.

    >>> workspace = Workspace(torch.float32)
    >>> workspace.buffer("output", 2, 3).shape
    torch.Size([2, 3])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.plans: dict[Hashable, Any] = {}
        self.sizes: dict[Hashable, int] = {}
        """The number of channels of the map last written to a buffer, by the buffer's name."""
        self._memory: dict[Hashable, Tensor] = {}
        self._total = 0

    def buffer(self, name: Hashable, *shape: int) -> Tensor:
        """A view of that shape of the named buffer, whose former content may be overwritten."""
        strides, count = list[int](), 1
        for side in reversed(shape):
            strides.append(count)
            count *= side
        memory = self._memory.get(name)
        if memory is None or memory.numel() < count:
            if memory is not None:
                self.plans.clear()  # they refer to the buffer that was too small
                self._total -= memory.numel()
            self._total += count
            memory = self._memory[name] = torch.zeros(count, dtype=self.dtype, device="cpu")
        return memory.as_strided(shape, strides[::-1])

    def add_plan(self, key: Hashable, plan: object) -> None:
        """Cache a plan."""
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def is_reusable(self) -> bool:
        """Whether it is small enough to be reused for the next image."""
        return self._total <= MAX_VALUES


class WorkspacePool:
    """Idle workspaces, for images of one size; concurrent threads get one each. Copies start empty.

    >>> pool, x = WorkspacePool(), torch.zeros(1, 3, 8, 8)
    >>> first = pool.acquire(x)
    >>> pool.acquire(x) is first  # which is in use
    False
    >>> pool.release(x, first)
    >>> pool.acquire(x) is first
    True
    """

    def __init__(self) -> None:
        # list.pop and list.append are atomic, so that no lock is needed
        self._idle: list[tuple[torch.Size, Workspace]] = []

    def acquire(self, x: Tensor) -> Workspace:
        """A workspace for an image of this shape and dtype."""
        try:
            shape, workspace = self._idle.pop()
        except IndexError:
            return Workspace(x.dtype)
        return workspace if shape == x.shape and workspace.dtype == x.dtype else Workspace(x.dtype)

    def release(self, x: Tensor, workspace: Workspace) -> None:
        """Return a workspace after use."""
        if workspace.is_reusable():
            self._idle.append((x.shape, workspace))

    def __reduce__(self) -> tuple[type[WorkspacePool], tuple[()]]:
        return WorkspacePool, ()
