"""What every launch of a kernel needs: sizes, tiles, and the types to add up in."""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "INTERPRETED",
    "Aside",
    "Sizes",
    "acc",
    "as_map",
    "by_row",
    "ceil",
    "dense",
    "fill",
    "map_like",
    "parts",
    "pipeline",
    "pixel_of_patch",
    "placeholder",
    "power_of_2",
    "total",
    "warps",
    "wide",
]

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on a CPU, which is how they are tested where there is no GPU."""

PROGRAMS = 528
"""As many programs fill a GPU: four on each of some 132 multiprocessors."""


def ceil(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def power_of_2(size: int, least: int = 1, most: int = 1 << 20) -> int:
    """The tile side for so many elements."""
    return max(least, min(most, triton.next_power_of_2(max(size, 1))))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of it are kept in."""
    return torch.promote_types(dtype, torch.float32)


def acc(dtype: torch.dtype) -> Any:
    """The same, as Triton says it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dense(tensor: Tensor | None) -> Tensor | None:
    """As kernels read it, if there is one."""
    return None if tensor is None else tensor.contiguous()


def by_row(map: Tensor) -> Tensor:
    """Maps (B, C, H, W) as kernels read them: (B, H, W, C), without a copy if they are in channels_last.

    Operations name axes as torch's do. Inductor takes any map of four axes next to a convolution for one of these, and
    lays out what is named otherwise as if its last axes were a map's.
    """
    return map.permute(0, 2, 3, 1).contiguous()


def as_map(rows: Tensor) -> Tensor:
    """And back: (B, H, W, C) as maps (B, C, H, W) in channels_last."""
    return rows.permute(0, 3, 1, 2)


def map_like(x: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for maps (B, channels, H, W) in channels_last, of the size of others."""
    B, _, H, W = x.shape
    return as_map(x.new_empty(B, H, W, channels, dtype=dtype))


def placeholder(like: Tensor) -> Tensor:
    """An empty tensor: an operator returns a tensor, each time a new one, also where it has nothing to return."""
    return like.new_empty(0)


def fill(programs: int, most: int) -> int:
    """In how many parts to take a sum so that the GPU is full, given the programs of one part."""
    return max(1, min(most, ceil(PROGRAMS, programs)))


def parts(rows: int, splits: int, tile: int) -> tuple[int, int]:
    """Rows in so many parts, each a multiple of the tile: the length of one, and how many there are."""
    chunk = max(tile, ceil(ceil(rows, splits), tile) * tile)
    return chunk, max(1, ceil(rows, chunk))


def warps(number: int) -> dict[str, int]:
    """For a launch; the interpreter has none."""
    return {} if INTERPRETED else {"num_warps": number}


def pipeline(number: int, stages: int) -> dict[str, int]:
    """Warps, and how many steps of a loop of products have their numbers on the way."""
    return {} if INTERPRETED else {"num_warps": number, "num_stages": stages}


class Aside:
    """Launch inside the block beside what follows it, up to `join`: on a stream of its own, where there are streams.

    Of tensors made outside, what is used inside must live until then (`keep`): else others get its memory too early.
    What is made inside may be used outside after `join`, and be forgotten at any time: its memory goes back to the
    stream inside, which waits for the one outside whenever a block is entered.
    """

    def __init__(self) -> None:
        self.main: Any = None
        self.other: Any = None
        self.inside: Any = None
        self.kept: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        return tensor

    def __enter__(self) -> None:
        if INTERPRETED:
            return
        self.main = torch.cuda.current_stream()
        self.other = _beside(self.main)
        self.other.wait_stream(self.main)
        self.inside = torch.cuda.stream(self.other)
        self.inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.inside is not None:
            self.inside.__exit__(*error)
            self.inside = None

    def join(self) -> None:
        """Wait for it, if there was anything: a stream that took no part in a CUDA graph must not be waited for."""
        if self.other is not None:
            self.main.wait_stream(self.other)
        self.kept.clear()


@lru_cache
def _beside(stream: Any) -> Any:
    """A stream for each one that is worked on."""
    return torch.cuda.Stream(stream.device)


@triton.jit
def pixel_of_patch(b, n, a, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr, W: tl.constexpr):
    """Which row of a batch of maps the place ``a`` in patch ``n`` of image ``b`` is."""
    return b * HW + ((n // GW) * P + a // P) * W + (n % GW) * P + a % P


@triton.jit
def total_kernel(parts, out, S, X, ACC: tl.constexpr, BS: tl.constexpr, BX: tl.constexpr):
    """Parts (S, X), summed in one order."""
    i = tl.program_id(0) * BX + tl.arange(0, BX)
    found = tl.zeros((BS, BX), ACC)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        at = s[:, None].to(tl.int64) * X + i[None, :]
        found += tl.load(parts + at, mask=(s < S)[:, None] & (i < X)[None, :], other=0).to(ACC)
    tl.store(out + i, tl.sum(found, 0).to(out.dtype.element_ty), mask=i < X)


def total(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis, in a dtype of choice, always in the same order."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    S, X = parts.shape[0], out.numel()
    BS, BX = power_of_2(S, most=32), power_of_2(X, most=64)
    total_kernel[(ceil(X, BX),)](parts, out, S, X, ACC=acc(wide(parts.dtype)), BS=BS, BX=BX, **warps(4))
    return out


@dataclass(frozen=True)
class Sizes:
    """Of a map (B, H, W, C), its patches and who takes them."""

    B: int
    H: int
    W: int
    C: int
    E: int
    L: int
    p: int

    @staticmethod
    def of(x: Tensor, index: Tensor, patch: int) -> Sizes:
        B, H, W, C = x.shape
        return Sizes(B, H, W, C, index.shape[1], index.shape[2], patch)

    @property
    def M(self) -> int:
        """Rows of an expert."""
        return self.B * self.L * self.p**2

    @property
    def N(self) -> int:
        """Patches of an image."""
        return (self.H // self.p) * (self.W // self.p)

    @property
    def positions(self) -> int:
        return self.B * self.H * self.W

    def rows(self, norm: bool) -> int:
        """Rows of an expert, with that of positions it did not choose; a multiple of 8, as products like them."""
        return self.M + 8 if norm else self.M

    def constants(self) -> dict[str, int]:
        """Compile-time constants of kernels that look up rows."""
        return {"E": self.E, "L": self.L, "P": self.p, "GW": self.W // self.p, "HW": self.H * self.W, "W": self.W}
