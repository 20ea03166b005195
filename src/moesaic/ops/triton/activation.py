"""The activation of stacked perceptrons, with its bias: what kernels share of it, and two kernels of its own.

    activated        the activation of a number, inside any kernel
    slope            its derivative
    activate         activation(hidden + bias), one pass
    activate_back    gradient before the activation, and the bias's, one pass

Gelu is F.gelu's, v·Φ(v). For 16-bit numbers Φ comes from the tail Q(u) = Φ(−u) of u = |v|, whose logarithm is all but a
parabola: Q(u) = 2^P(u), P of degree 7, off by less than 10⁻⁵ of Q up to u = 6.5, where Q is 4·10⁻¹¹, and falling from
there on. That is a third of the arithmetic of erf, which counts where a matrix product waits for it.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.launch import INTERPRETED, acc, ceil, power_of_2, total, wide

__all__ = ["ACTIVATIONS", "TILES", "Kind", "activate", "activate_back", "activated", "options", "slope"]

Kind = Literal["gelu", "relu"]
ACTIVATIONS: tuple[Kind, ...] = ("gelu", "relu")
"""Operators take an index of this."""

TILES: dict[str, dict[str, int]] = {
    "activate": {"BM": 8, "BJ": 512, "num_warps": 4},
    "activate_back": {"BM": 8, "BJ": 512, "ROWS": 64, "num_warps": 4},
}
"""ROWS: how many of them a program adds up for the bias."""


def options(tiles: dict[str, int]) -> dict[str, int]:
    """Tiles as a launch takes them; the interpreter has neither warps nor registers."""
    launch = ("num_warps", "num_stages", "maxnreg") if INTERPRETED else ()
    return {name: size for name, size in tiles.items() if name not in launch}


@triton.jit
def _tail(v):
    u = tl.abs(v)
    p = -1.7637316e-06 * u + 6.00876374e-05
    p = p * u - 0.000917910068
    p = p * u + 0.00845555951
    p = p * u - 0.0538480515
    p = p * u - 0.458579967
    p = p * u - 1.15120495
    p = p * u - 0.999998768
    return tl.exp2(p)


@triton.jit
def _below(v, EXACT: tl.constexpr):
    """Φ(v), how much of a standard normal lies below v."""
    if EXACT:
        below = 0.5 * (1.0 + tl.math.erf(v * 0.7071067811865476))
    else:
        q = _tail(v)
        below = tl.where(v > 0, 1.0 - q, q)
    return below


@triton.jit
def activated(v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation of v; EXACT: to float32's precision or better."""
    if KIND == "gelu":
        found = v * _below(v, EXACT)
    else:
        found = tl.where(v > 0, v, v * 0.0)  # NaN stays
    return found


@triton.jit
def slope(v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation's derivative at v."""
    if KIND == "gelu":
        density = tl.exp2(v * v * -0.7213475204444817 - 1.3257480647361595)
        found = v * density + _below(v, EXACT)
    else:
        found = tl.where(v > 0, 1.0, 0.0)
    return found


@triton.jit
def activate_kernel(
    hidden, bias, out, M,
    J: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    jm = j < J
    mask = (m < M)[:, None] & jm[None, :]
    at = (e * M + m)[:, None] * J + j[None, :]
    v = tl.load(hidden + at, mask=mask, other=0).to(ACC)
    if HAS_BIAS:
        v += tl.load(bias + e * J + j, mask=jm, other=0).to(ACC)[None, :]
    tl.store(out + at, activated(v, KIND, EXACT).to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate_back_kernel(
    grad, hidden, bias, out, sums, M, E,
    J: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    jm = j < J
    if HAS_BIAS:
        b = tl.load(bias + e * J + j, mask=jm, other=0).to(ACC)[None, :]
        found = tl.zeros((BM, BJ), ACC)
    for m0 in range(0, ROWS, BM):
        m = chunk * ROWS + m0 + tl.arange(0, BM)
        mask = (m < M)[:, None] & jm[None, :]
        at = (e * M + m)[:, None] * J + j[None, :]
        v = tl.load(hidden + at, mask=mask, other=0).to(ACC)
        g = tl.load(grad + at, mask=mask, other=0).to(ACC)
        if HAS_BIAS:
            v += b
        g *= slope(v, KIND, EXACT)
        if HAS_BIAS:
            found += g
        tl.store(out + at, g.to(out.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        tl.store(sums + (chunk * E + e) * J + j, tl.sum(found, 0), mask=jm)


def activate(
    hidden: Tensor, bias: Tensor | None, kind: Kind, *, in_place: bool = False, tiles: dict[str, int] | None = None
) -> Tensor:
    """activation(hidden + bias) of (E, M, J) and (E, J), all contiguous."""
    E, M, J = hidden.shape
    out = hidden if in_place else torch.empty_like(hidden)
    sides = _sides("activate", tiles, M, J)
    activate_kernel[(ceil(M, sides["BM"]), ceil(J, sides["BJ"]), E)](
        hidden, bias, out, M, J=J, KIND=kind, HAS_BIAS=bias is not None, **_exactness(hidden), **options(sides)
    )
    return out


def activate_back(
    grad: Tensor, hidden: Tensor, bias: Tensor | None, kind: Kind, *, tiles: dict[str, int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient before activation and bias, written over ``grad``, and that of the bias, given one."""
    E, M, J = hidden.shape
    sides = _sides("activate_back", tiles, M, J)
    chunks = ceil(M, sides["ROWS"])
    sums = None if bias is None else torch.empty(chunks, E, J, dtype=wide(hidden.dtype), device=hidden.device)
    activate_back_kernel[(chunks, ceil(J, sides["BJ"]), E)](
        grad, hidden, bias, grad, sums, M, E,
        J=J, KIND=kind, HAS_BIAS=bias is not None, **_exactness(hidden), **options(sides),
    )  # fmt: skip
    return grad, None if bias is None or sums is None else total(sums, bias.dtype)


def _exactness(hidden: Tensor) -> dict[str, object]:
    return {"EXACT": hidden.dtype.itemsize > 2, "ACC": acc(wide(hidden.dtype))}


def _sides(name: str, tiles: dict[str, int] | None, M: int, J: int) -> dict[str, int]:
    sides = dict(TILES[name] if tiles is None else tiles)
    sides["BM"], sides["BJ"] = power_of_2(M, most=sides["BM"]), power_of_2(J, most=sides["BJ"])
    return sides
