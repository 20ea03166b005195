"""Activation of expert MLPs with its bias: device functions that kernels share, and two kernels.

    after = activation(before + bias)      grad_before = grad_after ⊙ activation'(before + bias)

Layouts: before, after and gradients (E, M, J); bias (E, J).

    apply_activation            the activation, inside any kernel
    activation_grad             its derivative, likewise
    activate_kernel             before → after
    activate_backward_kernel    gradient of after → gradients of before and of the bias, in splits

Gelu is F.gelu's, v·Φ(v). For 16-bit numbers Φ comes from the tail Q(u) = Φ(−u) of u = |v|, whose logarithm is all but a
parabola: Q(u) = 2^P(u), P of degree 7, off by less than 10⁻⁵ of Q up to u = 6.5, where Q is 4·10⁻¹¹, and falling from
there on. That is a third of the arithmetic of erf, which matters inside a matmul.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import INTERPRETED, acc_dtype, ceil_div, power_of_2, sum_splits, tl_acc

__all__ = [
    "ACTIVATIONS",
    "TILES",
    "ActivationName",
    "activate",
    "activate_backward",
    "activation_grad",
    "apply_activation",
    "launch_options",
]

ActivationName = Literal["gelu", "relu"]
ACTIVATIONS: tuple[ActivationName, ...] = ("gelu", "relu")
"""Operators take an index of this."""

TILES: dict[str, dict[str, int]] = {
    "activate": {"BM": 8, "BJ": 512, "num_warps": 4},
    "activate_backward": {"BM": 8, "BJ": 512, "ROWS": 64, "num_warps": 4},
}
"""ROWS: how many rows a program sums for the bias."""


def launch_options(tiles: dict[str, int]) -> dict[str, int]:
    """Tiles as a launch takes them; the interpreter has neither warps nor registers."""
    launch = ("num_warps", "num_stages", "maxnreg") if INTERPRETED else ()
    return {name: size for name, size in tiles.items() if name not in launch}


@triton.jit
def gelu_tail(v):
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
def normal_cdf(v, EXACT: tl.constexpr):
    """Φ(v), the CDF of the standard normal."""
    if EXACT:
        below = 0.5 * (1.0 + tl.math.erf(v * 0.7071067811865476))
    else:
        q = gelu_tail(v)
        below = tl.where(v > 0, 1.0 - q, q)
    return below


@triton.jit
def apply_activation(v, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """The activation of v; EXACT: to float32's precision or better."""
    if ACTIVATION == "gelu":
        acc = v * normal_cdf(v, EXACT)
    else:
        acc = tl.where(v > 0, v, v * 0.0)  # NaN stays
    return acc


@triton.jit
def activation_grad(v, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """The activation's derivative at v."""
    if ACTIVATION == "gelu":
        density = tl.exp2(v * v * -0.7213475204444817 - 1.3257480647361595)
        acc = v * density + normal_cdf(v, EXACT)
    else:
        acc = tl.where(v > 0, 1.0, 0.0)
    return acc


@cached_launch
@triton.jit
def activate_kernel(
    hidden, bias, out, M,
    J: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
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
    tl.store(out + at, apply_activation(v, ACTIVATION, EXACT).to(out.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def activate_backward_kernel(
    grad, hidden, bias, out, sums, M, E,
    J: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    jm = j < J
    if HAS_BIAS:
        b = tl.load(bias + e * J + j, mask=jm, other=0).to(ACC)[None, :]
        acc = tl.zeros((BM, BJ), ACC)
    for m0 in range(0, ROWS, BM):
        m = chunk * ROWS + m0 + tl.arange(0, BM)
        mask = (m < M)[:, None] & jm[None, :]
        at = (e * M + m)[:, None] * J + j[None, :]
        v = tl.load(hidden + at, mask=mask, other=0).to(ACC)
        g = tl.load(grad + at, mask=mask, other=0).to(ACC)
        if HAS_BIAS:
            v += b
        g *= activation_grad(v, ACTIVATION, EXACT)
        if HAS_BIAS:
            acc += g
        tl.store(out + at, g.to(out.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        tl.store(sums + (chunk * E + e) * J + j, tl.sum(acc, 0), mask=jm)


def activate(
    hidden: Tensor,
    bias: Tensor | None,
    activation: ActivationName,
    *,
    in_place: bool = False,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """activation(hidden + bias) of (E, M, J) and (E, J), all contiguous."""
    E, M, J = hidden.shape
    out = hidden if in_place else torch.empty_like(hidden)
    tile_sides = _tile_sides("activate", tiles, M, J)
    activate_kernel[(ceil_div(M, tile_sides["BM"]), ceil_div(J, tile_sides["BJ"]), E)](
        hidden,
        bias,
        out,
        M,
        J=J,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        **_precision_of(hidden),
        **launch_options(tile_sides),
    )
    return out


def activate_backward(
    grad: Tensor,
    hidden: Tensor,
    bias: Tensor | None,
    activation: ActivationName,
    *,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient before activation and bias, in place of ``grad``, and that of the bias, if there is one."""
    E, M, J = hidden.shape
    tile_sides = _tile_sides("activate_backward", tiles, M, J)
    chunks = ceil_div(M, tile_sides["ROWS"])
    sums = None if bias is None else torch.empty(chunks, E, J, dtype=acc_dtype(hidden.dtype), device=hidden.device)
    activate_backward_kernel[(chunks, ceil_div(J, tile_sides["BJ"]), E)](
        grad, hidden, bias, grad, sums, M, E,
        J=J, ACTIVATION=activation, HAS_BIAS=bias is not None, **_precision_of(hidden), **launch_options(tile_sides),
    )  # fmt: skip
    return grad, None if bias is None or sums is None else sum_splits(sums, bias.dtype)


def _precision_of(hidden: Tensor) -> dict[str, object]:
    return {"EXACT": hidden.dtype.itemsize > 2, "ACC": tl_acc(acc_dtype(hidden.dtype))}


def _tile_sides(name: str, tiles: dict[str, int] | None, M: int, J: int) -> dict[str, int]:
    tile_sides = dict(TILES[name] if tiles is None else tiles)
    tile_sides["BM"], tile_sides["BJ"] = power_of_2(M, most=tile_sides["BM"]), power_of_2(J, most=tile_sides["BJ"])
    return tile_sides
