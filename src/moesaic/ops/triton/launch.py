"""Dimensions, tile sides and accumulator types that every launch needs, and a second stream.

    sum_splits:  out[x] = Σ_s parts[s, x], parts (S, …), always in the same order

Sums over many rows are taken in S splits, one per program, and added up by `sum_splits` instead of by atomics, so that
the same input gives the same bits.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
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

from moesaic.ops.launch_recorder import recorder
from moesaic.ops.triton.cached_launch import cached_launch

__all__ = [
    "INTERPRETED",
    "PatchDims",
    "SideStream",
    "acc_dtype",
    "ceil_div",
    "contiguous_or_none",
    "empty_map_like",
    "num_warps",
    "num_warps_and_stages",
    "pixel_of_patch",
    "placeholder",
    "power_of_2",
    "split_rows",
    "splits_to_fill",
    "sum_splits",
    "tl_acc",
    "to_nchw",
    "to_nhwc",
]

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on a CPU, which is how they are tested where there is no GPU."""

TARGET_PROGRAMS = 528
"""Programs that fill a GPU: four on each of some 132 multiprocessors."""


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


def power_of_2(size: int, least: int = 1, most: int = 1 << 20) -> int:
    """The tile side for this many elements: the next power of 2, within limits."""
    # not triton.next_power_of_2, which takes ten times as long outside of a kernel
    return max(least, min(most, 1 << (max(size, 1) - 1).bit_length()))


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def tl_acc(dtype: torch.dtype) -> Any:
    """Triton's accumulator type for a torch dtype."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def contiguous_or_none(tensor: Tensor | None) -> Tensor | None:
    """Contiguous, as kernels read it; None stays None."""
    return None if tensor is None else tensor.contiguous()


def to_nhwc(map: Tensor) -> Tensor:
    """Maps (B, C, H, W) as kernels read them: (B, H, W, C), without a copy if they are in channels_last.

    Operators take and return NCHW maps, because Inductor assumes that any 4-D tensor next to a convolution is one and
    would choose a wrong memory format for NHWC tensors.
    """
    return map.permute(0, 2, 3, 1).contiguous()


def to_nchw(rows: Tensor) -> Tensor:
    """The inverse: (B, H, W, C) as maps (B, C, H, W) in channels_last."""
    return rows.permute(0, 3, 1, 2)


def empty_map_like(x: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for maps (B, channels, H, W) in channels_last, with the height and width of ``x``."""
    B, _, H, W = x.shape
    return to_nchw(x.new_empty(B, H, W, channels, dtype=dtype))


def placeholder(like: Tensor) -> Tensor:
    """An empty tensor: an operator returns a tensor, each time a new one, also where it has nothing to return."""
    return like.new_empty(0)


def splits_to_fill(programs: int, most: int) -> int:
    """Number of splits of a sum that fill the GPU, given the programs of one split."""
    return max(1, min(most, ceil_div(TARGET_PROGRAMS, programs)))


def split_rows(rows: int, splits: int, tile: int) -> tuple[int, int]:
    """Length of a split, a multiple of the tile, and number of splits."""
    chunk = max(tile, ceil_div(ceil_div(rows, splits), tile) * tile)
    return chunk, max(1, ceil_div(rows, chunk))


def num_warps(warps: int) -> dict[str, int]:
    """Launch option; the interpreter has none."""
    return {} if INTERPRETED else {"num_warps": warps}


def num_warps_and_stages(warps: int, stages: int) -> dict[str, int]:
    """Launch options: warps, and stages of software pipelining."""
    return {} if INTERPRETED else {"num_warps": warps, "num_stages": stages}


class SideStream:
    """Runs what is launched inside the block on a second stream, concurrently with what follows, up to `join`.

    Tensors made outside and used inside must be kept alive until `join` (`keep_alive`): otherwise the allocator reuses
    their memory too early. Tensors made inside may be used outside after `join` and released at any time: their memory
    goes back to the second stream, which waits for the first whenever a block is entered.
    """

    def __init__(self) -> None:
        self.main: Any = None
        self.side: Any = None
        self.context: Any = None
        self.references: list[Tensor] = []

    def keep_alive(self, tensor: Tensor) -> Tensor:
        self.references.append(tensor)
        return tensor

    def __enter__(self) -> None:
        if INTERPRETED or recorder() is not None:  # a plan's launches go to one stream
            return
        self.main = torch.cuda.current_stream()
        self.side = _side_stream(self.main)
        self.side.wait_stream(self.main)
        self.context = torch.cuda.stream(self.side)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)
            self.context = None

    def join(self) -> None:
        """Waits for the second stream, if it was used: a CUDA graph must not wait for one that is no part of it."""
        if self.side is not None:
            self.main.wait_stream(self.side)
        self.references.clear()


@lru_cache
def _side_stream(stream: Any) -> Any:
    """One second stream for each first one."""
    return torch.cuda.Stream(stream.device)


@triton.jit
def pixel_of_patch(b, n, a, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr, W: tl.constexpr):
    """Row, in a batch of maps, of pixel ``a`` in patch ``n`` of image ``b``."""
    return b * HW + ((n // GW) * P + a // P) * W + (n % GW) * P + a % P


@cached_launch
@triton.jit
def sum_splits_kernel(parts, out, S, X, ACC: tl.constexpr, BS: tl.constexpr, BX: tl.constexpr):
    """Out (X,): parts (S, X), summed in one order."""
    i = tl.program_id(0) * BX + tl.arange(0, BX)
    acc = tl.zeros((BS, BX), ACC)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        at = s[:, None].to(tl.int64) * X + i[None, :]
        acc += tl.load(parts + at, mask=(s < S)[:, None] & (i < X)[None, :], other=0).to(ACC)
    tl.store(out + i, tl.sum(acc, 0).to(out.dtype.element_ty), mask=i < X)


def sum_splits(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis, in the given dtype, always in the same order."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    S, X = parts.shape[0], out.numel()
    BS, BX = power_of_2(S, most=32), power_of_2(X, most=64)
    sum_splits_kernel[(ceil_div(X, BX),)](
        parts, out, S, X, ACC=tl_acc(acc_dtype(parts.dtype)), BS=BS, BX=BX, **num_warps(4)
    )
    return out


@dataclass(frozen=True)
class PatchDims:
    """Dimensions of a map (B, H, W, C), its p×p patches, E experts and their L slots."""

    B: int
    H: int
    W: int
    C: int
    E: int
    L: int
    p: int

    @staticmethod
    def of(x: Tensor, index: Tensor, patch: int) -> PatchDims:
        B, H, W, C = x.shape
        return PatchDims(B, H, W, C, index.shape[1], index.shape[2], patch)

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

    def padded_rows(self, background: bool) -> int:
        """Rows of an expert, with the background's; tensor cores want multiples of 8."""
        return self.M + 8 if background else self.M

    def constexprs(self) -> dict[str, int]:
        """Compile-time constants of kernels that look up rows."""
        return {"E": self.E, "L": self.L, "P": self.p, "GW": self.W // self.p, "HW": self.H * self.W, "W": self.W}
