"""Kernels of 1×1 experts side by side, with gates on what they give: a pass less over memory at every turn.

A pixel that an expert chose is read where it lies, multiplied, and what comes out is written where it belongs; there
is no copy of the chosen pixels and none of the answers.

    answer_kernel       x → y and, for the gradient, what gates are multiplied with
    gates_kernel        gradient of y → gradient of rows and of scores
    back_kernel         gradient of rows → gradient of x, of the first expert that chose a pixel
    shared_kernel       and of the others
    weights_kernel      the same → gradients of weights and router, part by part
    weights_sum_kernel  these parts, summed

The gradient of rows (E, M, O + columns) has what flows back through the router beside it: column O + a of a row at
place a of its patch is the gradient of the patch's score, so that the product which makes the gradient of the weights
makes that of the router's kernels too.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.gather import pixel_of_row
from moesaic.ops.triton.launch import (
    Aside,
    Sizes,
    acc,
    ceil,
    parts,
    pipeline,
    power_of_2,
    total,
    warps,
    wide,
)
from moesaic.ops.triton.operands import RoutedMap

__all__ = ["MOST_CHANNELS", "answers", "columns", "gate_gradients", "pixel_gradients", "weight_gradients"]

MOST_CHANNELS = 256
"""Of an expert: a tile of rows has all of them."""
_MOST_ROWS = 64
"""Of an image and expert, which one program holds."""
_MOST_PLACES = 16
"""A patch of more pixels has its router's gradient from a pass of its own."""


def columns(places: int) -> int:
    """How many to leave beside a row's gradient for so many places in a patch, so that rows stay aligned."""
    return ceil(places, 8) * 8 if places <= _MOST_PLACES else 0


@triton.jit
def clear_unchosen(
    y, slots, e, part, first, positions, SHARE,
    E: tl.constexpr, O: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, BQ: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Zeros, in B1 + B2 channels from the first on, at a part, SHARE long, of the positions: where e did not choose."""
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


@triton.jit
def answer_kernel(
    x, weight, bias, index, slots, gate, y, own, M, positions, SHARE,
    E: tl.constexpr, C: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's rows, for B1 + B2 of its channels; and zeros at a SHARE of positions it did not choose.

    Two tiles of channels share the pixels that were read: 160 channels are 128 and 32.
    """
    e = tl.program_id(1)
    first = tl.program_id(2) * (B1 + B2)
    o1 = first + tl.arange(0, B1)
    m1 = o1 < O
    if B2 > 0:
        o2 = first + B1 + tl.arange(0, B2)
        m2 = o2 < O
    # half of the programs write zeros while the others read, then the other way round
    if tl.program_id(0) % 2 == 0:
        clear_unchosen(y, slots, e, tl.program_id(0), first, positions, SHARE, E, O, P, GW, N, HW, W, BQ, B1, B2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, _a, used, py, px = pixel_of_row(m, e, M, index, E, L, P, GW)
    pixel = b * HW + py * W + px
    at = pixel.to(tl.int64) * C
    found1 = tl.zeros((BM, B1), ACC)
    if B2 > 0:
        found2 = tl.zeros((BM, B2), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0)
        w1 = tl.load(weight + (e * O + o1)[None, :] * C + c[:, None], mask=cm[:, None] & m1[None, :], other=0)
        found1 = tl.dot(v, w1, found1, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            w2 = tl.load(weight + (e * O + o2)[None, :] * C + c[:, None], mask=cm[:, None] & m2[None, :], other=0)
            found2 = tl.dot(v, w2, found2, input_precision="ieee", out_dtype=ACC)
    g = tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)
    to = (pixel * E + e).to(tl.int64) * O
    row = (e * M + m).to(tl.int64) * O
    if HAS_BIAS:
        found1 += tl.load(bias + e * O + o1, mask=m1, other=0).to(ACC)[None, :]
    if KEEP:
        tl.store(own + row[:, None] + o1[None, :], found1.to(own.dtype.element_ty),
                 mask=(m < M)[:, None] & m1[None, :])  # fmt: skip
    tl.store(y + to[:, None] + o1[None, :], (found1 * g[:, None]).to(y.dtype.element_ty),
             mask=used[:, None] & m1[None, :])  # fmt: skip
    if B2 > 0:
        if HAS_BIAS:
            found2 += tl.load(bias + e * O + o2, mask=m2, other=0).to(ACC)[None, :]
        if KEEP:
            tl.store(own + row[:, None] + o2[None, :], found2.to(own.dtype.element_ty),
                     mask=(m < M)[:, None] & m2[None, :])  # fmt: skip
        tl.store(y + to[:, None] + o2[None, :], (found2 * g[:, None]).to(y.dtype.element_ty),
                 mask=used[:, None] & m2[None, :])  # fmt: skip
    if tl.program_id(0) % 2 == 1:
        clear_unchosen(y, slots, e, tl.program_id(0), first, positions, SHARE, E, O, P, GW, N, HW, W, BQ, B1, B2)


@triton.jit
def gates_kernel(
    grad, own, index, gate, rows, scores, sums, M,
    STEP: tl.constexpr, E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, BESIDE: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """All rows of one image and expert: gate · gradient of y, the gradient of scores, and that beside the rows.

    own (E, M, O) is what gates are multiplied with, a softmax over the chosen patches. SUMS: of rows (B, E, O).
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
    dots = tl.sum(v * tl.load(own + row[:, None] * O + o[None, :], mask=mask, other=0).to(ACC), 1)
    g = tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)
    v = v * g[:, None]
    tl.store(rows + row[:, None] * STEP + o[None, :], v.to(rows.dtype.element_ty), mask=live[:, None] & om[None, :])
    if SUMS:
        tl.store(sums + (b * E + e) * O + o, tl.sum(v, 0), mask=om)
    inner = tl.sum(g * dots, 0)
    if A > 1:
        dots = tl.sum(tl.where(l[:, None] == l[None, :], dots[None, :], 0.0), 1)
    found = g * (dots - inner)
    tl.store(scores + (b * E + e) * L + l, found, mask=live & (a == 0))
    column = tl.arange(0, BESIDE)
    value = tl.where(column[None, :] == a[:, None], found[:, None], 0.0)
    tl.store(rows + row[:, None] * STEP + (STEP - BESIDE) + column[None, :], value.to(rows.dtype.element_ty),
             mask=live[:, None])  # fmt: skip


@triton.jit
def owners_before(slots, b, n, last, mask, E: tl.constexpr, N: tl.constexpr, BQ: tl.constexpr):
    """How many of the experts before the last one chose these patches."""
    found = tl.zeros((BQ,), tl.int32)
    for e in tl.range(E, loop_unroll_factor=4):
        found += ((tl.load(slots + (b * E + e) * N + n, mask=mask, other=-1) >= 0) & (e < last)).to(tl.int32)
    return found


@triton.jit
def clear_unowned(
    out, slots, part, positions, SHARE,
    E: tl.constexpr, C: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Zeros (…, C) for a part, SHARE long, of the positions: for those that nobody chose."""
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


@triton.jit
def back_kernel(
    grad, weight, index, slots, router_grad, kernels, rows, out, M, positions, SHARE,
    STEP: tl.constexpr, E: tl.constexpr, C: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    GW: tl.constexpr, N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, HAS_ROUTER: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's rows of grad (E, M, STEP) times its weights: what flows back to their pixels.

    The first expert that chose a pixel writes it there, the others to rows (E, M, C). SHARE: see `clear_unowned`.
    """
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    part = e * tl.num_programs(0) + tl.program_id(0)
    if part % 2 == 0:  # as in `answer_kernel`
        clear_unowned(out, slots, part, positions, SHARE, E, C, P, GW, N, HW, W, BQ, BC)
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
        found = tl.dot(g1, w1, input_precision="ieee", out_dtype=ACC)
        if K2 > 0:
            w2 = tl.load(weight + (e * O + k2)[:, None] * C + c[None, :], mask=(k2 < O)[:, None] & cm[None, :], other=0)
            found = tl.dot(g2, w2, found, input_precision="ieee", out_dtype=ACC)
        if HAS_ROUTER:
            if A == 1:
                k = tl.load(kernels + e * C + c, mask=cm, other=0)[None, :]
            else:
                k = tl.load(kernels + (e * A + a)[:, None] * C + c[None, :], mask=used[:, None] & cm[None, :], other=0)
            found += s[:, None] * k.to(ACC)
        tl.store(to[:, None] + c[None, :], found.to(out.dtype.element_ty), mask=used[:, None] & cm[None, :])
    if part % 2 == 1:
        clear_unowned(out, slots, part, positions, SHARE, E, C, P, GW, N, HW, W, BQ, BC)


@triton.jit
def shared_kernel(
    rows, slots, out, M, positions,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pixels that several experts chose: what the first of them wrote, and the others' rows (E, M, C)."""
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
    found = tl.load(out + at, mask=mask, other=0).to(ACC)
    seen = tl.zeros((BQ,), tl.int32)
    for e in tl.range(E, loop_unroll_factor=4):
        slot = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
        from_ = (e * M + (b * L + tl.maximum(slot, 0)) * A + a).to(tl.int64) * C
        theirs = ((slot >= 0) & (seen > 0))[:, None] & mask
        found += tl.load(rows + from_[:, None] + c[None, :], mask=theirs, other=0).to(ACC)
        seen += (slot >= 0).to(tl.int32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weights_kernel(
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
    found1 = tl.zeros((B1, BC), ACC)
    if B2 > 0:
        o2 = (tl.program_id(1) % blocks) * (B1 + B2) + B1 + tl.arange(0, B2)
        m2 = o2 < OUT
        found2 = tl.zeros((B2, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, M)
    for m0 in range(s * CHUNK, end, BM):
        m = m0 + tl.arange(0, BM)
        b, _l, _a, used, py, px = pixel_of_row(m, e, end, index, E, L, P, GW)
        at = (b * HW + py * W + px).to(tl.int64) * C
        row = (e * M + m).to(tl.int64) * STEP
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0)
        g1 = tl.load(grad + row[:, None] + o1[None, :], mask=(m < end)[:, None] & (o1 < STEP)[None, :], other=0)
        found1 = tl.dot(tl.trans(g1), v, found1, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            g2 = tl.load(grad + row[:, None] + o2[None, :], mask=(m < end)[:, None] & (o2 < STEP)[None, :], other=0)
            found2 = tl.dot(tl.trans(g2), v, found2, input_precision="ieee", out_dtype=ACC)
    to = (s * E + e) * OUT
    tl.store(out + (to + o1)[:, None] * C + c[None, :], found1, mask=m1[:, None] & cm[None, :])
    if B2 > 0:
        tl.store(out + (to + o2)[:, None] * C + c[None, :], found2, mask=m2[:, None] & cm[None, :])


@triton.jit
def weights_sum_kernel(
    parts, weight, router, S, X,
    O: tl.constexpr, OUT: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BS: tl.constexpr,
    BX: tl.constexpr,
):  # fmt: skip
    """Parts (S, E, OUT, C), summed in one order: O of OUT to weight (E, O, C), the rest to router (E, OUT - O, C)."""
    i = tl.program_id(0) * BX + tl.arange(0, BX)
    found = tl.zeros((BX,), ACC)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        at = s[:, None].to(tl.int64) * X + i[None, :]
        found += tl.sum(tl.load(parts + at, mask=(s < S)[:, None] & (i < X)[None, :], other=0), 0)
    e = i // (OUT * C)
    o = (i // C) % OUT
    c = i % C
    tl.store(weight + (e * O + o) * C + c, found.to(weight.dtype.element_ty), mask=(i < X) & (o < O))
    if OUT > O:
        to = (e * (OUT - O) + o - O) * C + c
        tl.store(router + to, found.to(router.dtype.element_ty), mask=(i < X) & (o >= O))


def answers(routed: RoutedMap, weight: Tensor, bias: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The map (B, H, W, E·O) for weights (E, O, C), and with ``keep`` what gates are multiplied with (E, M, O)."""
    E, O, C = weight.shape
    sizes, x = routed.sizes, routed.x
    y = torch.empty(sizes.B, sizes.H, sizes.W, E * O, dtype=x.dtype, device=x.device)
    own = torch.empty(E, sizes.M, O, dtype=x.dtype, device=x.device) if keep else None
    B1, B2 = _two_tiles(O, 16)
    BM, BC, BQ, number, stages = tile("answer", (128, 64, 128, 4, 3), sizes.M, C, O, sizes.p, E)
    tiles = ceil(sizes.M, BM)
    answer_kernel[(tiles, E, ceil(O, B1 + B2))](
        x, weight, bias, routed.index, routed.slots, routed.gate, y, own, sizes.M, sizes.positions,
        ceil(sizes.positions, tiles), C=C, O=O, N=sizes.N, HAS_BIAS=bias is not None, KEEP=keep, ACC=acc(wide(x.dtype)),
        BM=BM, BC=min(BC, power_of_2(C, 16)), B1=B1, B2=B2, BQ=BQ, **sizes.constants(), **pipeline(number, stages),
    )  # fmt: skip
    return y, own


def gate_gradients(
    grad: Tensor, own: Tensor, sizes: Sizes, index: Tensor, gate: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Gated rows with their columns (E, M, O + columns), the gradient of chosen patches' scores (B, E, L), the bias's.

    For gates that are a softmax over chosen patches. None where an image has too many rows for one program.
    """
    _, M, O = own.shape
    beside, BM = columns(sizes.p**2), power_of_2(sizes.L * sizes.p**2)
    if beside == 0 or BM > _MOST_ROWS:
        return None
    rows = torch.empty(sizes.E, M, O + beside, dtype=grad.dtype, device=grad.device)
    full = wide(grad.dtype)
    scores = torch.empty(index.shape, dtype=full, device=grad.device)
    summed = torch.empty(sizes.B, sizes.E, O, dtype=full, device=grad.device) if sums else None
    BO = power_of_2(O)
    (number,) = tile("gates", (4 if BM * BO <= 4096 else 8,), O, sizes.L, sizes.p, sizes.E)
    gates_kernel[(sizes.B, sizes.E)](
        grad, own, index, gate, rows, scores, summed, M, STEP=O + beside, O=O, BESIDE=beside, SUMS=sums, ACC=acc(full),
        BM=BM, BO=BO, **sizes.constants(), **warps(number),
    )  # fmt: skip
    return rows, scores, None if summed is None else total(summed, full)


def pixel_gradients(
    grad: Tensor,
    weight: Tensor,
    sizes: Sizes,
    index: Tensor,
    slots: Tensor,
    router: tuple[Tensor, Tensor] | None,
    aside: Aside,
) -> Tensor:
    """Gradient of x (B, H, W, C) from that of rows (E, M, O + columns), launched aside.

    ``router``: the gradient of chosen patches' scores (B, E, L) and the kernels (E, p², C) it goes back through.
    """
    E, O, C = weight.shape
    out = torch.empty(sizes.B, sizes.H, sizes.W, C, dtype=grad.dtype, device=grad.device)
    rows = aside.keep(torch.empty(E, sizes.M, C, dtype=grad.dtype, device=grad.device))
    scores, kernels = router or (None, None)
    full, constants = acc(wide(grad.dtype)), sizes.constants()
    K1, K2 = _two_tiles(O, 16, MOST_CHANNELS)
    with aside:
        BM, BC, BQ, number, stages = tile("back", (128, 64, 128, 4, 3), sizes.M, C, O, sizes.p, E)
        BC, tiles = min(BC, power_of_2(C, 16)), ceil(sizes.M, BM)
        back_kernel[(tiles, E)](
            grad, weight, index, slots, scores, kernels, rows, out, sizes.M, sizes.positions,
            ceil(sizes.positions, tiles * E), STEP=grad.shape[2], C=C, O=O, N=sizes.N, HAS_ROUTER=router is not None,
            ACC=full, BM=BM, BC=BC, K1=K1, K2=K2, BQ=BQ, **constants, **pipeline(number, stages),
        )  # fmt: skip
        BQ, BC, number = tile("shared", (16, 128, 4), sizes.positions, C, sizes.p, E)
        BC = min(BC, power_of_2(C, 16))
        if E > 1:
            shared_kernel[(ceil(sizes.positions, BQ), ceil(C, BC))](
                rows, slots, out, sizes.M, sizes.positions, C=C, N=sizes.N, ACC=full, BQ=BQ, BC=BC, **constants,
                **warps(number),
            )  # fmt: skip
    return out


def weight_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, sizes: Sizes, index: Tensor, router: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Gradient of weights (E, O, C), and of the router's kernels (E, p², C), in their dtype, if asked for."""
    E, O, C = weight.shape
    out_rows = O if router is None else O + sizes.p**2
    B1, B2 = _two_tiles(out_rows, 64)
    BM, BC, number, stages, programs = tile("weights", (64, 128, 8, 5, 132), sizes.M, C, out_rows, sizes.p, E)
    BC = min(BC, power_of_2(C, 16))
    tiles = ceil(C, BC), E * ceil(out_rows, B1 + B2)
    chunk, splits = parts(sizes.M, max(1, min(programs // (tiles[0] * tiles[1]), ceil(sizes.M, BM))), BM)
    sums = torch.empty(splits, E, out_rows, C, dtype=wide(x.dtype), device=x.device)
    full = acc(sums.dtype)
    weights_kernel[(*tiles, splits)](
        grad, x, index, sums, sizes.M, chunk, STEP=grad.shape[2], C=C, OUT=out_rows, ACC=full,
        BM=BM, BC=BC, B1=B1, B2=B2, **sizes.constants(), **pipeline(number, stages),
    )  # fmt: skip
    grad_weight, grad_router = torch.empty_like(weight), None
    if router is not None:
        grad_router = torch.empty(E, sizes.p**2, C, dtype=router, device=x.device)
    X, BX = sums[0].numel(), 512
    weights_sum_kernel[(ceil(X, BX),)](
        sums, grad_weight, grad_router, splits, X, O=O, OUT=out_rows, C=C, ACC=full, BS=power_of_2(splits, most=8),
        BX=BX, **warps(4),
    )  # fmt: skip
    return grad_weight, grad_router


def _two_tiles(channels: int, least: int, most: int = 128) -> tuple[int, int]:
    """Sides of two tiles that cover so many channels with little to spare, or, beyond 256, a part of them."""
    whole = power_of_2(channels, least)
    if whole > 256:
        return 128, 0
    half = whole // 2
    rest = power_of_2(channels - half, least)
    if channels > half >= least and rest < half:
        return half, rest
    return min(whole, most), 0
