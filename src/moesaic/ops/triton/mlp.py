"""Stacked MLPs C → J → O over the selected rows: six matmuls and the activation.

    before = values · weight_inᵀ                      grad_out    = gradᵀ · after
    after  = activation(before + bias_in)             grad_before = (grad · weight_out) ⊙ activation'(before + bias_in)
    outputs = after · weight_outᵀ                     grad_in     = grad_beforeᵀ · values
                                                      grad_values = grad_before · weight_in

Layouts: values (E, M, C); before and after (E, M, J); outputs and grad (E, M, O); weights (E, J, C) and (E, O, J).

Hidden values are J / C times as large as the inputs, so that a pass over them costs as much as half a matmul. The two
matmuls next to the activation can apply it while their sums are still in registers:

    separate       cuBLAS, and the activation in a pass of its own (`activation`)
    pointers       a matmul that loads its tiles by address
    descriptors    one whose tiles the copy engine of Hopper GPUs fetches, in a loop over tiles

``VARIANTS`` says which one runs; float32 always goes to cuBLAS. ``before`` is without the bias in all of them, so that
any forward variant goes with any backward one. The bias's gradient is summed per tile, then in order: the same bits
every time.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.ops.triton.activation import (
    ActivationName,
    activate,
    activate_backward,
    activation_grad,
    apply_activation,
    launch_options,
)
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import INTERPRETED, ceil_div, contiguous_or_none, power_of_2, sum_splits

__all__ = [
    "TILES",
    "VARIANTS",
    "Hidden",
    "MLPGradients",
    "MatmulVariant",
    "backward",
    "forward",
    "hidden",
    "hidden_backward",
]

MatmulVariant = Literal["separate", "pointers", "descriptors"]

VARIANTS: dict[str, MatmulVariant] = {"forward": "separate", "backward": "separate"}

_POINTER_TILES = {"BM": 128, "BJ": 128, "BK": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
_DESCRIPTOR_TILES = {
    "BM": 128,
    "BJ": 256,
    "BK": 64,
    "GROUP": 8,
    "PROGRAMS": 132,
    "FLATTEN": 0,
    "num_warps": 8,
    "num_stages": 3,
}
TILES: dict[str, dict[MatmulVariant, dict[str, int]]] = {
    "forward": {"pointers": _POINTER_TILES, "descriptors": {**_DESCRIPTOR_TILES, "FLATTEN": 1}},
    "backward": {"pointers": {**_POINTER_TILES, "num_warps": 8}, "descriptors": _DESCRIPTOR_TILES},
}
"""Sides of a tile. GROUP: tiles of one column that run next to each other and share the L2 cache. PROGRAMS: how many
loop over all tiles, 0 for one each. FLATTEN: whether the loads of the next tile begin before this one is done; in the
backward pass their buffers and those of ``before`` would not fit into shared memory together."""


@triton.jit
def _tile_position(tile, M, J: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, GROUP: tl.constexpr):
    """Expert, first row and first column of a tile."""
    across: tl.constexpr = (J + BJ - 1) // BJ
    down = (M + BM - 1) // BM
    e = tile // (down * across)
    tile = tile % (down * across)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    tile = tile % (GROUP * across)
    return e, (first + tile % height) * BM, tile // height * BJ


@cached_launch
@triton.jit
def matmul_kernel(
    left, right, bias, before, out, sums, M, E,
    J: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BACK: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Left (E, M, K) times right, (E, J, K) forward and (E, K, J) back, and the activation.

    Forward ``before`` is written, with SAVE, and out is activated; back it is read, out is the gradient before the
    activation, and sums (M / BM, E, J) are of its columns.
    """
    e, m0, j0 = _tile_position(tl.program_id(0), M, J, BM, BJ, GROUP)
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
    acc = tl.zeros((BM, BJ), tl.float32)
    for k0 in range(0, K, BK):
        if K % BK == 0:
            v = tl.load(at)
        else:
            v = tl.load(at, mask=(k0 + k < K)[None, :], other=0)
        if K % BK == 0 and (J % BJ == 0 or not BACK):
            w = tl.load(by)
        else:
            w = tl.load(by, mask=(k0 + k < K)[:, None] & jm[None, :], other=0)
        if UPCAST:  # the interpreter's numpy knows no bfloat16
            v, w = v.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(v, w, acc, input_precision="ieee")
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
        acc *= activation_grad(v, ACTIVATION, False)
        if HAS_BIAS:
            column = tl.sum(tl.where((m < M)[:, None], acc, 0.0), 0)
            tl.store(sums + (m0 // BM * E + e) * J + j, column, mask=jm)
    else:
        if SAVE:
            tl.store(before + to, acc.to(before.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            acc += tl.load(bias + e * J + j, mask=jm, other=0).to(tl.float32)[None, :]
        acc = apply_activation(acc, ACTIVATION, False)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def descriptor_matmul_kernel(
    left, right, bias, before, out, sums, M, E,
    J: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BACK: tl.constexpr, HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """The same; left, right, before and out are descriptors of three axes, which know where an expert's rows end."""
    tiles = E * ((M + BM - 1) // BM) * ((J + BJ - 1) // BJ)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        e, m0, j0 = _tile_position(tile, M, J, BM, BJ, GROUP)
        acc = tl.zeros((BM, BJ), tl.float32)
        for k0 in range(0, K, BK):
            v = left.load([e, m0, k0]).reshape(BM, BK)
            if BACK:
                w = right.load([e, k0, j0]).reshape(BK, BJ)
            else:
                w = right.load([e, j0, k0]).reshape(BJ, BK).T
            if UPCAST:
                v, w = v.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(v, w, acc, input_precision="ieee")
        j = j0 + tl.arange(0, BJ)
        jm = j < J
        if HAS_BIAS:
            b = tl.load(bias + e * J + j, mask=jm, other=0).to(tl.float32)[None, :]
        if BACK:
            v = before.load([e, m0, j0]).reshape(BM, BJ).to(tl.float32)
            if HAS_BIAS:
                v += b
            acc *= activation_grad(v, ACTIVATION, False)
            if HAS_BIAS:
                rows = (m0 + tl.arange(0, BM) < M)[:, None]
                column = tl.sum(tl.where(rows, acc, 0.0), 0)
                tl.store(sums + (m0 // BM * E + e) * J + j, column, mask=jm)
        else:
            if SAVE:
                before.store([e, m0, j0], acc.to(before.dtype).reshape(1, BM, BJ))
            if HAS_BIAS:
                acc += b
            acc = apply_activation(acc, ACTIVATION, False)
        out.store([e, m0, j0], acc.to(out.dtype).reshape(1, BM, BJ))


def forward(
    values: Tensor,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    activation: ActivationName,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (E, M, O) of values (E, M, C), without the last bias; with ``save`` hidden values before and after."""
    before, after = hidden(values, weight_in, bias_in, activation, save)
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
    grad: Tensor,
    hidden: Hidden,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    activation: ActivationName,
) -> MLPGradients:
    """From the gradient of outputs (E, M, O)."""
    values, before, after = hidden
    grad = grad.contiguous()
    if after.numel() == 0:
        after = activate(before, contiguous_or_none(bias_in), activation)
    grad_out = torch.bmm(grad.transpose(1, 2), after)
    grad_before, grad_bias = hidden_backward(grad, weight_out, before, bias_in, activation)
    grad_in = torch.bmm(grad_before.transpose(1, 2), values)
    return MLPGradients(torch.bmm(grad_before, weight_in), grad_in, grad_bias, grad_out)


def hidden(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ActivationName,
    save: bool,
    *,
    variant: MatmulVariant | None = None,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden values (E, M, J) before the bias, empty without ``save``, and after the activation."""
    values, weight, bias = values.contiguous(), weight.contiguous(), contiguous_or_none(bias)
    E, M, C = values.shape
    J = weight.shape[1]
    variant = _supported(variant or VARIANTS["forward"], values, J)
    if variant == "separate":
        before = torch.bmm(values, weight.transpose(1, 2))
        after = activate(before, bias, activation, in_place=not save)
        return before if save else values.new_empty(0), after
    before = torch.empty(E, M, J, dtype=values.dtype, device=values.device) if save else values.new_empty(0)
    after = torch.empty(E, M, J, dtype=values.dtype, device=values.device)
    sides = _sides(tiles or TILES["forward"][variant], M, J, C)
    _launch(
        variant, sides, values, weight, bias, before if save else after, after, None, activation, SAVE=save, BACK=False
    )
    return before, after


def hidden_backward(
    grad: Tensor,
    weight: Tensor,
    before: Tensor,
    bias: Tensor | None,
    activation: ActivationName,
    *,
    variant: MatmulVariant | None = None,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of ``before`` from that of outputs (E, M, O) and weight (E, O, J), and the bias's, if there is one."""
    grad, weight, bias = grad.contiguous(), weight.contiguous(), contiguous_or_none(bias)
    E, M, J = before.shape
    O = grad.shape[2]
    variant = _supported(variant or VARIANTS["backward"], grad, J)
    if variant == "separate":
        return activate_backward(torch.bmm(grad, weight), before, bias, activation)
    sides = _sides(tiles or TILES["backward"][variant], M, J, O)
    out = torch.empty_like(before)
    sums = None
    if bias is not None:
        sums = torch.empty(ceil_div(M, sides["BM"]), E, J, dtype=torch.float32, device=grad.device)
    _launch(variant, sides, grad, weight, bias, before, out, sums, activation, SAVE=True, BACK=True)
    return out, None if bias is None or sums is None else sum_splits(sums, bias.dtype)


def _supported(variant: MatmulVariant, rows: Tensor, J: int) -> MatmulVariant:
    """The variant, if it supports such rows: fused matmuls are for 16-bit numbers in rows of whole 16 bytes."""
    fits = rows.numel() > 0 and rows.dtype.itemsize == 2 and rows.shape[2] % 8 == 0 and J % 8 == 0
    return variant if fits else "separate"


def _sides(tiles: dict[str, int], M: int, J: int, K: int) -> dict[str, int]:
    """No longer than the tensors, and at least 16, which tensor cores need."""
    sides = dict(tiles)
    for side, size in (("BM", M), ("BJ", J), ("BK", K)):
        sides[side] = power_of_2(size, least=16, most=sides[side])
    return sides


def _launch(
    variant: MatmulVariant,
    sides: dict[str, int],
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    before: Tensor,
    out: Tensor,
    sums: Tensor | None,
    activation: ActivationName,
    *,
    SAVE: bool,
    BACK: bool,
) -> None:
    E, M, J = out.shape
    programs = E * ceil_div(M, sides["BM"]) * ceil_div(J, sides["BJ"])
    constexprs = {
        "J": J,
        "K": left.shape[2],
        "ACTIVATION": activation,
        "BACK": BACK,
        "SAVE": SAVE,
        "HAS_BIAS": bias is not None,
    }
    constexprs["UPCAST"] = INTERPRETED and left.dtype.itemsize == 2
    given = launch_options(sides)
    if variant == "pointers":
        matmul_kernel[(programs,)](left, right, bias, before, out, sums, M, E, **constexprs, **given)
        return
    most = given.pop("PROGRAMS")
    given["FLATTEN"] = bool(given.get("FLATTEN", 0))
    BM, BJ, BK = sides["BM"], sides["BJ"], sides["BK"]
    descriptor_matmul_kernel[(min(programs, most) if most else programs,)](
        _descriptor(left, BM, BK), _descriptor(right, *((BK, BJ) if BACK else (BJ, BK))), bias,
        _descriptor(before, BM, BJ), _descriptor(out, BM, BJ), sums, M, E, **constexprs, **given,
    )  # fmt: skip


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [1, rows, columns])
