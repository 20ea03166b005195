"""Stacked perceptrons C → J → O over the rows (E, M, C) that experts were given: six products and the activation.

    before = values · weight_inᵀ                      grad_out    = gradᵀ · after
    after  = activation(before + bias_in)             grad_before = (grad · weight_out) ⊙ activation'(before + bias_in)
    answers = after · weight_outᵀ                     grad_in     = grad_beforeᵀ · values
                                                      grad_values = grad_before · weight_in

Hidden values are J / C times as large as what comes in, so a pass over them costs: read and written, as much as half a
product. The two products whose results the activation meets can take it in, where their sums still are in registers:

    separate       cuBLAS, and the activation in a pass of its own (`activation`)
    pointers       a product that loads its tiles by address
    descriptors    one that has them fetched by the copy engine of Hopper GPUs, in a loop over tiles

``WAYS`` says which is taken; exact float32 always goes to cuBLAS. ``before`` is without the bias in all of them, so any
way forward goes with any way back. The bias's gradient is summed per tile, and then in order: the same bits every time.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.ops.triton.activation import Kind, activate, activate_back, activated, options, slope
from moesaic.ops.triton.launch import INTERPRETED, ceil, dense, power_of_2, total

__all__ = ["TILES", "WAYS", "Hidden", "MLPGradients", "Way", "backward", "forward", "hidden", "hidden_back"]

Way = Literal["separate", "pointers", "descriptors"]

WAYS: dict[str, Way] = {"forward": "separate", "backward": "separate"}

_BY_ADDRESS = {"BM": 128, "BJ": 128, "BK": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
_FETCHED = {"BM": 128, "BJ": 256, "BK": 64, "GROUP": 8, "PROGRAMS": 132, "FLATTEN": 0, "num_warps": 8, "num_stages": 3}
TILES: dict[str, dict[Way, dict[str, int]]] = {
    "forward": {"pointers": _BY_ADDRESS, "descriptors": {**_FETCHED, "FLATTEN": 1}},
    "backward": {"pointers": {**_BY_ADDRESS, "num_warps": 8}, "descriptors": _FETCHED},
}
"""Sides of a tile; GROUP: how many of them stand below each other before the next column, so that they share what the
L2 cache holds; PROGRAMS: how many run over all tiles, 0 for one each; FLATTEN: whether the loads of the next tile begin
before this one is done (back, their buffers and those of ``before`` would not fit together)."""


@triton.jit
def _place(tile, M, J: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, GROUP: tl.constexpr):
    """Expert, first row and first column of a tile."""
    across: tl.constexpr = (J + BJ - 1) // BJ
    down = (M + BM - 1) // BM
    e = tile // (down * across)
    tile = tile % (down * across)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    tile = tile % (GROUP * across)
    return e, (first + tile % height) * BM, tile // height * BJ


@triton.jit
def product_kernel(
    left, right, bias, before, out, sums, M, E,
    J: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BACK: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr, WIDEN: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Left (E, M, K) times right, (E, J, K) forward and (E, K, J) back, and the activation.

    Forward ``before`` is written, with KEEP, and out is activated; back it is read, out is the gradient before the
    activation, and sums (M / BM, E, J) are of its columns.
    """
    e, m0, j0 = _place(tl.program_id(0), M, J, BM, BJ, GROUP)
    e = e.to(tl.int64)
    m = m0 + tl.arange(0, BM)
    j = j0 + tl.arange(0, BJ)
    k = tl.arange(0, BK)
    jm = j < J
    at = left + (e * M + tl.minimum(m, M - 1))[:, None] * K + k[None, :]
    if BACK:
        by = right + e * K * J + k[:, None] * J + j[None, :]
    else:
        by = right + (e * J + tl.minimum(j, J - 1))[None, :] * K + k[:, None]
    found = tl.zeros((BM, BJ), tl.float32)
    for k0 in range(0, K, BK):
        if K % BK == 0:
            v = tl.load(at)
        else:
            v = tl.load(at, mask=(k0 + k < K)[None, :], other=0)
        if K % BK == 0 and (J % BJ == 0 or not BACK):
            w = tl.load(by)
        else:
            w = tl.load(by, mask=(k0 + k < K)[:, None] & jm[None, :], other=0)
        if WIDEN:  # the interpreter's numpy knows no bfloat16
            v, w = v.to(tl.float32), w.to(tl.float32)
        found = tl.dot(v, w, found, input_precision="ieee")
        at += BK
        if BACK:
            by += BK * J
        else:
            by += BK
    mask = (m < M)[:, None] & jm[None, :]
    to = (e * M + m)[:, None] * J + j[None, :]
    if BACK:
        v = tl.load(before + to, mask=mask, other=0).to(tl.float32)
        if HAS_BIAS:
            v += tl.load(bias + e * J + j, mask=jm, other=0).to(tl.float32)[None, :]
        found *= slope(v, KIND, False)
        if HAS_BIAS:
            column = tl.sum(tl.where((m < M)[:, None], found, 0.0), 0)
            tl.store(sums + (m0 // BM * E + e) * J + j, column, mask=jm)
    else:
        if KEEP:
            tl.store(before + to, found.to(before.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            found += tl.load(bias + e * J + j, mask=jm, other=0).to(tl.float32)[None, :]
        found = activated(found, KIND, False)
    tl.store(out + to, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fetched_product_kernel(
    left, right, bias, before, out, sums, M, E,
    J: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BACK: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr, WIDEN: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """The same; left, right, before and out are descriptors of three axes, which know where an expert ends."""
    tiles = E * ((M + BM - 1) // BM) * ((J + BJ - 1) // BJ)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        e, m0, j0 = _place(tile, M, J, BM, BJ, GROUP)
        found = tl.zeros((BM, BJ), tl.float32)
        for k0 in range(0, K, BK):
            v = left.load([e, m0, k0]).reshape(BM, BK)
            if BACK:
                w = right.load([e, k0, j0]).reshape(BK, BJ)
            else:
                w = right.load([e, j0, k0]).reshape(BJ, BK).T
            if WIDEN:
                v, w = v.to(tl.float32), w.to(tl.float32)
            found = tl.dot(v, w, found, input_precision="ieee")
        j = j0 + tl.arange(0, BJ)
        jm = j < J
        if HAS_BIAS:
            b = tl.load(bias + e * J + j, mask=jm, other=0).to(tl.float32)[None, :]
        if BACK:
            v = before.load([e, m0, j0]).reshape(BM, BJ).to(tl.float32)
            if HAS_BIAS:
                v += b
            found *= slope(v, KIND, False)
            if HAS_BIAS:
                rows = (m0 + tl.arange(0, BM) < M)[:, None]
                column = tl.sum(tl.where(rows, found, 0.0), 0)
                tl.store(sums + (m0 // BM * E + e) * J + j, column, mask=jm)
        else:
            if KEEP:
                before.store([e, m0, j0], found.to(before.dtype).reshape(1, BM, BJ))
            if HAS_BIAS:
                found += b
            found = activated(found, KIND, False)
        out.store([e, m0, j0], found.to(out.dtype).reshape(1, BM, BJ))


def forward(
    values: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, kind: Kind, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers (E, M, O) to values (E, M, C), without the last bias; with ``keep`` hidden values before and after."""
    before, after = hidden(values, weight_in, bias_in, kind, keep)
    return torch.bmm(after, weight_out.transpose(1, 2)), before, after


class Hidden(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    values: Tensor
    """(E, M, C)"""
    before: Tensor
    """(E, M, J), before bias and activation."""
    after: Tensor
    """(E, M, J), after them. Without elements it is recomputed: a quarter less memory for one more pass."""


class MLPGradients(NamedTuple):
    """Gradients of an MLP's inputs and weights."""

    values: Tensor
    weight_in: Tensor
    bias_in: Tensor | None
    weight_out: Tensor


def backward(
    grad: Tensor, hidden: Hidden, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, kind: Kind
) -> MLPGradients:
    """From the gradient of outputs (E, M, O)."""
    values, before, after = hidden
    grad = grad.contiguous()
    if after.numel() == 0:
        after = activate(before, dense(bias_in), kind)
    grad_out = torch.bmm(grad.transpose(1, 2), after)
    grad_before, grad_bias = hidden_back(grad, weight_out, before, bias_in, kind)
    grad_in = torch.bmm(grad_before.transpose(1, 2), values)
    return MLPGradients(torch.bmm(grad_before, weight_in), grad_in, grad_bias, grad_out)


def hidden(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: Kind,
    keep: bool,
    *,
    way: Way | None = None,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden values (E, M, J) before the bias, nothing without ``keep``, and after the activation."""
    values, weight, bias = values.contiguous(), weight.contiguous(), dense(bias)
    E, M, C = values.shape
    J = weight.shape[1]
    way = _possible(way or WAYS["forward"], values, J)
    if way == "separate":
        before = torch.bmm(values, weight.transpose(1, 2))
        after = activate(before, bias, kind, in_place=not keep)
        return before if keep else values.new_empty(0), after
    before = torch.empty(E, M, J, dtype=values.dtype, device=values.device) if keep else values.new_empty(0)
    after = torch.empty(E, M, J, dtype=values.dtype, device=values.device)
    sides = _sides(tiles or TILES["forward"][way], M, J, C)
    _launch(way, sides, values, weight, bias, before if keep else after, after, None, kind, KEEP=keep, BACK=False)
    return before, after


def hidden_back(
    grad: Tensor,
    weight: Tensor,
    before: Tensor,
    bias: Tensor | None,
    kind: Kind,
    *,
    way: Way | None = None,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of ``before`` from that of answers (E, M, O) and weight (E, O, J), and the bias's, given one."""
    grad, weight, bias = grad.contiguous(), weight.contiguous(), dense(bias)
    E, M, J = before.shape
    O = grad.shape[2]
    way = _possible(way or WAYS["backward"], grad, J)
    if way == "separate":
        return activate_back(torch.bmm(grad, weight), before, bias, kind)
    sides = _sides(tiles or TILES["backward"][way], M, J, O)
    out = torch.empty_like(before)
    sums = None
    if bias is not None:
        sums = torch.empty(ceil(M, sides["BM"]), E, J, dtype=torch.float32, device=grad.device)
    _launch(way, sides, grad, weight, bias, before, out, sums, kind, KEEP=True, BACK=True)
    return out, None if bias is None or sums is None else total(sums, bias.dtype)


def _possible(way: Way, rows: Tensor, J: int) -> Way:
    """That way, if it takes such rows: fused products are for 16-bit numbers, read and written 16 bytes at a time."""
    fits = rows.numel() > 0 and rows.dtype.itemsize == 2 and rows.shape[2] % 8 == 0 and J % 8 == 0
    return way if fits else "separate"


def _sides(tiles: dict[str, int], M: int, J: int, K: int) -> dict[str, int]:
    """No longer than needs be, and at least what a product in tiles takes."""
    sides = dict(tiles)
    for side, size in (("BM", M), ("BJ", J), ("BK", K)):
        sides[side] = power_of_2(size, least=16, most=sides[side])
    return sides


def _launch(
    way: Way,
    sides: dict[str, int],
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    before: Tensor,
    out: Tensor,
    sums: Tensor | None,
    kind: Kind,
    *,
    KEEP: bool,
    BACK: bool,
) -> None:
    E, M, J = out.shape
    programs = E * ceil(M, sides["BM"]) * ceil(J, sides["BJ"])
    constants = {"J": J, "K": left.shape[2], "KIND": kind, "BACK": BACK, "KEEP": KEEP, "HAS_BIAS": bias is not None}
    constants["WIDEN"] = INTERPRETED and left.dtype.itemsize == 2
    given = options(sides)
    if way == "pointers":
        product_kernel[(programs,)](left, right, bias, before, out, sums, M, E, **constants, **given)
        return
    most = given.pop("PROGRAMS")
    given["FLATTEN"] = bool(given.get("FLATTEN", 0))
    BM, BJ, BK = sides["BM"], sides["BJ"], sides["BK"]
    fetched_product_kernel[(min(programs, most) if most else programs,)](
        _described(left, BM, BK), _described(right, *((BK, BJ) if BACK else (BJ, BK))), bias,
        _described(before, BM, BJ), _described(out, BM, BJ), sums, M, E, **constants, **given,
    )  # fmt: skip


def _described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [1, rows, columns])
