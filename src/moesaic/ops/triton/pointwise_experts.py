"""1×1 experts side by side with gates on their outputs: gather, matmul and scatter in one kernel.

    y[q, e] = gate · (weight[e] · x[q] + bias[e])                       forward
    grad_x[q] = Σ_e weight[e]ᵀ · gate · grad_y[q, e] + Σ_e grad_score · router[e]

A selected pixel is read from the map, multiplied, and its output written to the map: neither the selected pixels nor
their outputs are copied. Layouts: x (B, H, W, C); y (B, H, W, E·O); ungated (E, M, O), what the gate multiplies; rows
(E, M, O + columns), the gated gradient of outputs. The extra columns hold the gradient of scores: column O + a of a row
that is pixel a of its patch, so that the matmul for the gradient of the weights gives that of the router too.

    forward_kernel              x → y and ungated
    gate_backward_kernel        gradient of y → rows and gradient of scores
    input_backward_kernel       rows → gradient of x, of the first expert that selected a pixel
    shared_pixels_kernel        … and of the other experts
    weight_backward_kernel      rows → gradients of weights and router, in splits
    sum_weight_splits_kernel    splits, summed
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.gather import pixel_of_row
from moesaic.ops.triton.launch import (
    PatchDims,
    SideStream,
    acc_dtype,
    ceil_div,
    num_warps,
    num_warps_and_stages,
    power_of_2,
    split_rows,
    sum_splits,
    tl_acc,
)
from moesaic.ops.triton.operands import RoutedMap

__all__ = ["MAX_CHANNELS", "count_router_columns", "forward", "gate_gradients", "input_gradients", "weight_gradients"]

MAX_CHANNELS = 256
"""Output channels of an expert: a tile of rows has all of them."""
_MAX_ROWS = 64
"""Rows of an image and expert, which one program holds in registers."""
_MAX_PATCH_PIXELS = 16
"""Pixels of a patch; for larger patches the router's gradient takes a pass of its own."""


def count_router_columns(pixels: int) -> int:
    """Extra columns of rows for the pixels of a patch, rounded up so that rows stay aligned."""
    return ceil_div(pixels, 8) * 8 if pixels <= _MAX_PATCH_PIXELS else 0


@triton.jit
def zero_unselected(
    y, slots, e, part, first, positions, SHARE,
    E: tl.constexpr, O: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, BQ: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Writes zeros, in B1 + B2 channels from the first on, to a SHARE of the positions: where e selected nothing."""
    o1 = first + tl.arange(0, B1)
    m1 = o1 < O
    end = tl.minimum((part + 1) * SHARE, positions)
    for q0 in range(part * SHARE, end, BQ):
        q = q0 + tl.arange(0, BQ)
        i = q % HW
        slot = tl.load(slots + ((q // HW) * E + e) * N + (i // W // P) * GW + (i % W) // P, mask=q < end, other=0)
        to = (q * E + e).to(tl.int64) * O
        empty = slot < 0
        tl.store(y + to[:, None] + o1[None, :], tl.zeros((BQ, B1), y.dtype.element_ty),
                 mask=empty[:, None] & m1[None, :])  # fmt: skip
        if B2 > 0:
            o2 = first + B1 + tl.arange(0, B2)
            tl.store(y + to[:, None] + o2[None, :], tl.zeros((BQ, B2), y.dtype.element_ty),
                     mask=empty[:, None] & (o2 < O)[None, :])  # fmt: skip


@cached_launch
@triton.jit
def forward_kernel(
    x, weight, bias, index, slots, gate, y, ungated, M, positions, SHARE,
    E: tl.constexpr, C: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's rows, for B1 + B2 of its channels; and zeros at a SHARE of the positions it did not select.

    Two tiles of channels share the pixels that were read: 160 channels are 128 and 32.
    """
    e = tl.program_id(1)
    first = tl.program_id(2) * (B1 + B2)
    o1 = first + tl.arange(0, B1)
    m1 = o1 < O
    if B2 > 0:
        o2 = first + B1 + tl.arange(0, B2)
        m2 = o2 < O
    # half of the programs write zeros first and the others last, so that reads and writes overlap
    if tl.program_id(0) % 2 == 0:
        zero_unselected(y, slots, e, tl.program_id(0), first, positions, SHARE, E, O, P, GW, N, HW, W, BQ, B1, B2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, _a, used, py, px = pixel_of_row(m, e, M, index, E, L, P, GW)
    pixel = b * HW + py * W + px
    at = pixel.to(tl.int64) * C
    acc1 = tl.zeros((BM, B1), ACC)
    if B2 > 0:
        acc2 = tl.zeros((BM, B2), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0)
        w1 = tl.load(weight + (e * O + o1)[None, :] * C + c[:, None], mask=cm[:, None] & m1[None, :], other=0)
        acc1 = tl.dot(v, w1, acc1, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            w2 = tl.load(weight + (e * O + o2)[None, :] * C + c[:, None], mask=cm[:, None] & m2[None, :], other=0)
            acc2 = tl.dot(v, w2, acc2, input_precision="ieee", out_dtype=ACC)
    g = tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)
    to = (pixel * E + e).to(tl.int64) * O
    row = (e * M + m).to(tl.int64) * O
    if HAS_BIAS:
        acc1 += tl.load(bias + e * O + o1, mask=m1, other=0).to(ACC)[None, :]
    if SAVE:
        tl.store(ungated + row[:, None] + o1[None, :], acc1.to(ungated.dtype.element_ty),
                 mask=(m < M)[:, None] & m1[None, :])  # fmt: skip
    tl.store(y + to[:, None] + o1[None, :], (acc1 * g[:, None]).to(y.dtype.element_ty),
             mask=used[:, None] & m1[None, :])  # fmt: skip
    if B2 > 0:
        if HAS_BIAS:
            acc2 += tl.load(bias + e * O + o2, mask=m2, other=0).to(ACC)[None, :]
        if SAVE:
            tl.store(ungated + row[:, None] + o2[None, :], acc2.to(ungated.dtype.element_ty),
                     mask=(m < M)[:, None] & m2[None, :])  # fmt: skip
        tl.store(y + to[:, None] + o2[None, :], (acc2 * g[:, None]).to(y.dtype.element_ty),
                 mask=used[:, None] & m2[None, :])  # fmt: skip
    if tl.program_id(0) % 2 == 1:
        zero_unselected(y, slots, e, tl.program_id(0), first, positions, SHARE, E, O, P, GW, N, HW, W, BQ, B1, B2)


@cached_launch
@triton.jit
def gate_backward_kernel(
    grad, ungated, index, gate, rows, scores, sums, M,
    STEP: tl.constexpr, E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, ROUTER_COLUMNS: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """All rows of one image and expert: gate · gradient of y, and the gradient of scores, also in the extra columns.

    Gates are a softmax over the selected patches; ungated (E, M, O) is what they multiply. SUMS: of rows (B, E, O).
    """
    A: tl.constexpr = P * P
    b = tl.program_id(0)
    e = tl.program_id(1)
    r = tl.arange(0, BM)
    live = r < L * A
    m = b * (L * A) + r
    _b, l, a, used, py, px = pixel_of_row(m, e, (b + 1) * (L * A), index, E, L, P, GW)
    o = tl.arange(0, BO)
    om = o < O
    row = (e * M + m).to(tl.int64)
    at = ((b * HW + py * W + px) * E + e).to(tl.int64) * O
    mask = used[:, None] & om[None, :]
    v = tl.load(grad + at[:, None] + o[None, :], mask=mask, other=0).to(ACC)
    gate_dots = tl.sum(v * tl.load(ungated + row[:, None] * O + o[None, :], mask=mask, other=0).to(ACC), 1)
    g = tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)
    v = v * g[:, None]
    tl.store(rows + row[:, None] * STEP + o[None, :], v.to(rows.dtype.element_ty), mask=live[:, None] & om[None, :])
    if SUMS:
        tl.store(sums + (b * E + e) * O + o, tl.sum(v, 0), mask=om)
    inner = tl.sum(g * gate_dots, 0)
    if A > 1:
        gate_dots = tl.sum(tl.where(l[:, None] == l[None, :], gate_dots[None, :], 0.0), 1)
    acc = g * (gate_dots - inner)
    tl.store(scores + (b * E + e) * L + l, acc, mask=live & (a == 0))
    column = tl.arange(0, ROUTER_COLUMNS)
    value = tl.where(column[None, :] == a[:, None], acc[:, None], 0.0)
    tl.store(rows + row[:, None] * STEP + (STEP - ROUTER_COLUMNS) + column[None, :], value.to(rows.dtype.element_ty),
             mask=live[:, None])  # fmt: skip


@triton.jit
def owners_before(slots, b, n, last, mask, E: tl.constexpr, N: tl.constexpr, BQ: tl.constexpr):
    """How many of the experts before ``last`` selected these patches."""
    acc = tl.zeros((BQ,), tl.int32)
    for e in tl.range(E, loop_unroll_factor=4):
        acc += ((tl.load(slots + (b * E + e) * N + n, mask=mask, other=-1) >= 0) & (e < last)).to(tl.int32)
    return acc


@triton.jit
def zero_unowned(
    out, slots, part, positions, SHARE,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes zeros (…, C) to a SHARE of the positions: those that no expert selected."""
    end = tl.minimum((part + 1) * SHARE, positions)
    for q0 in range(part * SHARE, end, BQ):
        q = q0 + tl.arange(0, BQ)
        i = q % HW
        owners = owners_before(slots, q // HW, (i // W // P) * GW + (i % W) // P, E, q < end, E, N, BQ)
        empty = (q < end) & (owners == 0)
        to = q.to(tl.int64) * C
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            tl.store(out + to[:, None] + c[None, :], tl.zeros((BQ, BC), out.dtype.element_ty),
                     mask=empty[:, None] & (c < C)[None, :])  # fmt: skip


@cached_launch
@triton.jit
def input_backward_kernel(
    grad, weight, index, slots, router_grad, kernels, rows, out, M, positions, SHARE,
    STEP: tl.constexpr, E: tl.constexpr, C: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, HAS_ROUTER: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's rows of grad (E, M, STEP) times its weights: what flows back to their pixels.

    The first expert that selected a pixel writes to it, the others to rows (E, M, C). SHARE: see `zero_unowned`.
    """
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    part = e * tl.num_programs(0) + tl.program_id(0)
    if part % 2 == 0:  # as in `forward_kernel`
        zero_unowned(out, slots, part, positions, SHARE, E, C, P, GW, N, HW, W, BQ, BC)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, a, used, py, px = pixel_of_row(m, e, M, index, E, L, P, GW)
    first = owners_before(slots, b, (py // P) * GW + px // P, e, used, E, N, BM) == 0
    row = (e * M + m).to(tl.int64)
    to = tl.where(first, out + (b * HW + py * W + px).to(tl.int64) * C, rows + row * C)
    k1 = tl.arange(0, K1)
    g1 = tl.load(grad + row[:, None] * STEP + k1[None, :], mask=used[:, None] & (k1 < O)[None, :], other=0)
    if K2 > 0:
        k2 = K1 + tl.arange(0, K2)
        g2 = tl.load(grad + row[:, None] * STEP + k2[None, :], mask=used[:, None] & (k2 < O)[None, :], other=0)
    if HAS_ROUTER:
        s = tl.load(router_grad + (b * E + e) * L + l, mask=used, other=0)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        w1 = tl.load(weight + (e * O + k1)[:, None] * C + c[None, :], mask=(k1 < O)[:, None] & cm[None, :], other=0)
        acc = tl.dot(g1, w1, input_precision="ieee", out_dtype=ACC)
        if K2 > 0:
            w2 = tl.load(weight + (e * O + k2)[:, None] * C + c[None, :], mask=(k2 < O)[:, None] & cm[None, :], other=0)
            acc = tl.dot(g2, w2, acc, input_precision="ieee", out_dtype=ACC)
        if HAS_ROUTER:
            if A == 1:
                k = tl.load(kernels + e * C + c, mask=cm, other=0)[None, :]
            else:
                k = tl.load(kernels + (e * A + a)[:, None] * C + c[None, :], mask=used[:, None] & cm[None, :], other=0)
            acc += s[:, None] * k.to(ACC)
        tl.store(to[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=used[:, None] & cm[None, :])
    if part % 2 == 1:
        zero_unowned(out, slots, part, positions, SHARE, E, C, P, GW, N, HW, W, BQ, BC)


@cached_launch
@triton.jit
def shared_pixels_kernel(
    rows, slots, out, M, positions,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pixels that several experts selected: adds the other experts' rows (E, M, C) to what the first one wrote."""
    A: tl.constexpr = P * P
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cm = c < C
    live = q < positions
    i = q % HW
    b = q // HW
    n = (i // W // P) * GW + (i % W) // P
    a = (i // W % P) * P + (i % W) % P
    mask = (live & (owners_before(slots, b, n, E, live, E, N, BQ) > 1))[:, None] & cm[None, :]
    at = q.to(tl.int64)[:, None] * C + c[None, :]
    acc = tl.load(out + at, mask=mask, other=0).to(ACC)
    seen = tl.zeros((BQ,), tl.int32)
    for e in tl.range(E, loop_unroll_factor=4):
        slot = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
        from_ = (e * M + (b * L + tl.maximum(slot, 0)) * A + a).to(tl.int64) * C
        theirs = ((slot >= 0) & (seen > 0))[:, None] & mask
        acc += tl.load(rows + from_[:, None] + c[None, :], mask=theirs, other=0).to(ACC)
        seen += (slot >= 0).to(tl.int32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def weight_backward_kernel(
    grad, x, index, out, M, CHUNK,
    STEP: tl.constexpr, E: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    GW: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    B1: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Out (splits, E, OUT, C): over a chunk of an expert's rows, columns of grad (E, M, STEP) times pixels."""
    blocks: tl.constexpr = (OUT + B1 + B2 - 1) // (B1 + B2)
    e = tl.program_id(1) // blocks
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    o1 = (tl.program_id(1) % blocks) * (B1 + B2) + tl.arange(0, B1)
    m1 = o1 < OUT
    acc1 = tl.zeros((B1, BC), ACC)
    if B2 > 0:
        o2 = (tl.program_id(1) % blocks) * (B1 + B2) + B1 + tl.arange(0, B2)
        m2 = o2 < OUT
        acc2 = tl.zeros((B2, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, M)
    for m0 in range(s * CHUNK, end, BM):
        m = m0 + tl.arange(0, BM)
        b, _l, _a, used, py, px = pixel_of_row(m, e, end, index, E, L, P, GW)
        at = (b * HW + py * W + px).to(tl.int64) * C
        row = (e * M + m).to(tl.int64) * STEP
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0)
        g1 = tl.load(grad + row[:, None] + o1[None, :], mask=(m < end)[:, None] & (o1 < STEP)[None, :], other=0)
        acc1 = tl.dot(tl.trans(g1), v, acc1, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            g2 = tl.load(grad + row[:, None] + o2[None, :], mask=(m < end)[:, None] & (o2 < STEP)[None, :], other=0)
            acc2 = tl.dot(tl.trans(g2), v, acc2, input_precision="ieee", out_dtype=ACC)
    to = (s * E + e) * OUT
    tl.store(out + (to + o1)[:, None] * C + c[None, :], acc1, mask=m1[:, None] & cm[None, :])
    if B2 > 0:
        tl.store(out + (to + o2)[:, None] * C + c[None, :], acc2, mask=m2[:, None] & cm[None, :])


@cached_launch
@triton.jit
def sum_weight_splits_kernel(
    parts, weight, router, S, X,
    O: tl.constexpr, OUT: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BS: tl.constexpr,
    BX: tl.constexpr,
):  # fmt: skip
    """Parts (S, E, OUT, C), summed in one order: O of OUT to weight (E, O, C), the rest to router (E, OUT - O, C)."""
    i = tl.program_id(0) * BX + tl.arange(0, BX)
    acc = tl.zeros((BX,), ACC)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        at = s[:, None].to(tl.int64) * X + i[None, :]
        acc += tl.sum(tl.load(parts + at, mask=(s < S)[:, None] & (i < X)[None, :], other=0), 0)
    e = i // (OUT * C)
    o = (i // C) % OUT
    c = i % C
    tl.store(weight + (e * O + o) * C + c, acc.to(weight.dtype.element_ty), mask=(i < X) & (o < O))
    if OUT > O:
        to = (e * (OUT - O) + o - O) * C + c
        tl.store(router + to, acc.to(router.dtype.element_ty), mask=(i < X) & (o >= O))


def forward(routed: RoutedMap, weight: Tensor, bias: Tensor | None, save: bool) -> tuple[Tensor, Tensor | None]:
    """The map (B, H, W, E·O) for weights (E, O, C), and with ``save`` what gates multiply (E, M, O)."""
    E, O, C = weight.shape
    dims, x = routed.dims, routed.x
    y = torch.empty(dims.B, dims.H, dims.W, E * O, dtype=x.dtype, device=x.device)
    ungated = torch.empty(E, dims.M, O, dtype=x.dtype, device=x.device) if save else None
    B1, B2 = _two_tiles(O, 16)
    BM, BC, BQ, warps, stages = tile("pointwise", (128, 64, 128, 4, 3), dims.M, C, O, dims.p, E)
    tiles = ceil_div(dims.M, BM)
    forward_kernel[(tiles, E, ceil_div(O, B1 + B2))](
        x, weight, bias, routed.index, routed.slots, routed.gate, y, ungated, dims.M, dims.positions,
        ceil_div(dims.positions, tiles), C=C, O=O, N=dims.N, HAS_BIAS=bias is not None, SAVE=save,
        ACC=tl_acc(acc_dtype(x.dtype)), BM=BM, BC=min(BC, power_of_2(C, 16)), B1=B1, B2=B2, BQ=BQ, **dims.constexprs(),
        **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    return y, ungated


def gate_gradients(
    grad: Tensor, ungated: Tensor, dims: PatchDims, index: Tensor, gate: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Rows (E, M, O + columns), gradients of selected patches' scores (B, E, L) and of the bias.

    For gates that are a softmax over selected patches. None where an image has too many rows for one program.
    """
    _, M, O = ungated.shape
    router_columns, BM = count_router_columns(dims.p**2), power_of_2(dims.L * dims.p**2)
    if router_columns == 0 or BM > _MAX_ROWS:
        return None
    rows = torch.empty(dims.E, M, O + router_columns, dtype=grad.dtype, device=grad.device)
    acc_type = acc_dtype(grad.dtype)
    scores = torch.empty(index.shape, dtype=acc_type, device=grad.device)
    summed = torch.empty(dims.B, dims.E, O, dtype=acc_type, device=grad.device) if sums else None
    BO = power_of_2(O)
    (warps,) = tile("pointwise_gate", (4 if BM * BO <= 4096 else 8,), O, dims.L, dims.p, dims.E)
    gate_backward_kernel[(dims.B, dims.E)](
        grad, ungated, index, gate, rows, scores, summed, M, STEP=O + router_columns, O=O,
        ROUTER_COLUMNS=router_columns, SUMS=sums, ACC=tl_acc(acc_type), BM=BM, BO=BO, **dims.constexprs(),
        **num_warps(warps),
    )  # fmt: skip
    return rows, scores, None if summed is None else sum_splits(summed, acc_type)


def input_gradients(
    grad: Tensor,
    weight: Tensor,
    dims: PatchDims,
    index: Tensor,
    slots: Tensor,
    router: tuple[Tensor, Tensor] | None,
    side: SideStream,
) -> Tensor:
    """Gradient of x (B, H, W, C) from that of rows (E, M, O + columns), launched on the second stream.

    ``router``: the gradient of selected patches' scores (B, E, L) and the kernels (E, p², C) it goes back through.
    """
    E, O, C = weight.shape
    out = torch.empty(dims.B, dims.H, dims.W, C, dtype=grad.dtype, device=grad.device)
    rows = side.keep_alive(torch.empty(E, dims.M, C, dtype=grad.dtype, device=grad.device))
    scores, kernels = router or (None, None)
    acc_type, constexprs = tl_acc(acc_dtype(grad.dtype)), dims.constexprs()
    K1, K2 = _two_tiles(O, 16, MAX_CHANNELS)
    with side:
        BM, BC, BQ, warps, stages = tile("pointwise_input", (128, 64, 128, 4, 3), dims.M, C, O, dims.p, E)
        BC, tiles = min(BC, power_of_2(C, 16)), ceil_div(dims.M, BM)
        input_backward_kernel[(tiles, E)](
            grad, weight, index, slots, scores, kernels, rows, out, dims.M, dims.positions,
            ceil_div(dims.positions, tiles * E), STEP=grad.shape[2], C=C, O=O, N=dims.N, HAS_ROUTER=router is not None,
            ACC=acc_type, BM=BM, BC=BC, K1=K1, K2=K2, BQ=BQ, **constexprs, **num_warps_and_stages(warps, stages),
        )  # fmt: skip
        BQ, BC, warps = tile("pointwise_shared", (16, 128, 4), dims.positions, C, dims.p, E)
        BC = min(BC, power_of_2(C, 16))
        if E > 1:
            shared_pixels_kernel[(ceil_div(dims.positions, BQ), ceil_div(C, BC))](
                rows, slots, out, dims.M, dims.positions, C=C, N=dims.N, ACC=acc_type, BQ=BQ, BC=BC, **constexprs,
                **num_warps(warps),
            )  # fmt: skip
    return out


def weight_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, dims: PatchDims, index: Tensor, router: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Gradient of weights (E, O, C), and of the router's kernels (E, p², C), in the dtype ``router``, if given."""
    E, O, C = weight.shape
    out_rows = O if router is None else O + dims.p**2
    B1, B2 = _two_tiles(out_rows, 64)
    BM, BC, warps, stages, programs = tile("pointwise_weight", (64, 128, 8, 5, 132), dims.M, C, out_rows, dims.p, E)
    BC = min(BC, power_of_2(C, 16))
    tiles = ceil_div(C, BC), E * ceil_div(out_rows, B1 + B2)
    chunk, splits = split_rows(dims.M, max(1, min(programs // (tiles[0] * tiles[1]), ceil_div(dims.M, BM))), BM)
    sums = torch.empty(splits, E, out_rows, C, dtype=acc_dtype(x.dtype), device=x.device)
    acc_type = tl_acc(sums.dtype)
    weight_backward_kernel[(*tiles, splits)](
        grad, x, index, sums, dims.M, chunk, STEP=grad.shape[2], C=C, OUT=out_rows, ACC=acc_type,
        BM=BM, BC=BC, B1=B1, B2=B2, **dims.constexprs(), **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    grad_weight, grad_router = torch.empty_like(weight), None
    if router is not None:
        grad_router = torch.empty(E, dims.p**2, C, dtype=router, device=x.device)
    X, BX = sums[0].numel(), 512
    sum_weight_splits_kernel[(ceil_div(X, BX),)](
        sums, grad_weight, grad_router, splits, X, O=O, OUT=out_rows, C=C, ACC=acc_type, BS=power_of_2(splits, most=8),
        BX=BX, **num_warps(4),
    )  # fmt: skip
    return grad_weight, grad_router


def _two_tiles(channels: int, least: int, most: int = 128) -> tuple[int, int]:
    """Sides of two tiles that cover the channels with little waste, or, beyond 256, a part of them."""
    whole = power_of_2(channels, least)
    if whole > 256:
        return 128, 0
    half = whole // 2
    remainder = power_of_2(channels - half, least)
    if channels > half >= least and remainder < half:
        return half, remainder
    return min(whole, most), 0
