"""Kernels of a routed convolution, BatchNorm, ReLU and the mean over the map, which never write the map.

    y[b, q, e] = background[e, q] + Σ over covering patches      z = s·(y - μ) + β      mean[b] = 1/(H·W) Σ_q max(z, 0)
    grad_y = s·d·[z > 0] - offset - slope·(y - μ)                d: gradient of a position's share of the mean

Most positions hold the background, an expert's output where it selected nothing nearby, the same for every image. A sum
over positions is therefore the background's sum, taken once, and a difference for each position that a selected patch
covers. Layouts:

    rows (E, MR, O)        outputs at covered positions, patch by patch; MR = B·L·(p + 2·halo)²
    place (E, MR)          a row's position in the order of patches; -1 off the map; -2 - position where an earlier
                           patch of the expert covers it too and counts it
    base (E, H·W, O)       the background in the order of patches, or (E, O), the bias
    table (5, E·O)         mean μ, scale s, shift β; number and sum of active positions of the background
    grad_terms (6, E·O)    μ, s, β, offset, slope, and d summed over images

    covered_rows_kernel       contributions → rows, place, and the differences' share of mean and variance
    channel_table_kernel      these and the background → table
    mean_kernel               rows → the mean over each image; also number and sum of active positions
    grad_terms_kernel         gradient of means → gradients of weight and bias, and grad_terms
    row_backward_kernel       grad_terms → gradient of rows, and their part in the gradient of background taps
    tap_gradient_kernel       that part and the background's
    scatter_backward_kernel   gradient of rows → gradient of contributions
    gate_dots_kernel          grad_terms → gradient of gates on the output

`pooled_line_kernels` has the first and the backward kernel of rows in another form, faster for most patches. Offset and
slope are the gradient through the batch statistics; both are zero in eval mode.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.gather import pixel_of_row

__all__ = [
    "channel_table_kernel",
    "covered_rows_kernel",
    "gate_dots_kernel",
    "grad_terms_kernel",
    "mean_kernel",
    "row_backward_kernel",
    "scatter_backward_kernel",
    "tap_gradient_kernel",
]


@triton.jit
def position_of_row(
    m, e, MR, index,
    E: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    HALO: tl.constexpr,
):  # fmt: skip
    """Of an expert's rows: image, slot, selected patch, whether it is on the map, and position."""
    SH: tl.constexpr = P + 2 * HALO
    b = m // (L * SH * SH)
    l = (m // (SH * SH)) % L
    h = m % (SH * SH)
    n = tl.load(index + (b * E + e) * L + l, mask=m < MR, other=-1).to(tl.int32)
    used = n >= 0
    n = tl.where(used, n, 0)
    y = (n // GW) * P + h // SH - HALO
    x = (n % GW) * P + h % SH - HALO
    inside = used & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return b, l, n, inside, tl.where(inside, y, 0), tl.where(inside, x, 0)


@triton.jit
def patch_order(y, x, P: tl.constexpr, GW: tl.constexpr):
    """A position's number in the order of patches."""
    return ((y // P) * GW + x // P) * (P * P) + (y % P) * P + x % P


@triton.jit
def value_and_background(
    rows, row, base, background_at, g, o, mask, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr
):
    """Outputs at some rows, and the background there, which is zero with gates on the output."""
    v = tl.load(rows + row[:, None] + o[None, :], mask=mask, other=0).to(ACC)
    r = tl.zeros_like(v)
    if HAS_BASE:
        r = tl.load(base + background_at[:, None] + o[None, :], mask=mask, other=0).to(ACC)
        v += r
    if HAS_GATE:
        v = v * g[:, None]
        r = tl.zeros_like(v)
    return v, r


@triton.jit
def channel_entry(table, k: tl.constexpr, X: tl.constexpr, at, mask):
    """Entry k of a table (…, X) for each of some channels."""
    return tl.load(table + k * X + at, mask=mask, other=0)[None, :]


@triton.jit
def sum_parts(sums, S, STEP, at, mask, ACC: tl.constexpr, BS: tl.constexpr, BO: tl.constexpr):
    """Sum of entries (BO,) of S splits, STEP apart."""
    acc = tl.zeros((BS, BO), ACC)
    for s0 in range(0, S, BS):
        s = s0 + tl.arange(0, BS)
        part = sums + (s * STEP)[:, None] + at[None, :]
        acc += tl.load(part, mask=(s < S)[:, None] & mask[None, :], other=0)
    return tl.sum(acc, 0)


@cached_launch
@triton.jit
def covered_rows_kernel(
    folded, index, slots, gate, base, rows_out, place_out, sums_out, MR, STEP, CHUNK, S, BSTEP, QSTEP, PIVOT,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, NEIGHBOURS: tl.constexpr,
    FLIP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A chunk of rows; those of 1×1 kernels are contributions as they stand.

    Contributions of other selected patches, up to NEIGHBOURS patches away, are added. Under HAS_GATE rows hold the
    whole ungated value, background included. STATS: sums (2, S, E, O) of y - background and of
    (y - pivot)² - (background - pivot)²; a pivot near the values keeps the squares from cancelling.
    """
    R: tl.constexpr = KS // 2
    SIDE: tl.constexpr = 2 * NEIGHBOURS + 1
    SL: tl.constexpr = P + 2 * R
    s = tl.program_id(0)
    e = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    first = tl.zeros((BM, BO), ACC)
    second = tl.zeros((BM, BO), ACC)
    pivot = tl.zeros((BO,), ACC)
    if HAS_BASE and not HAS_GATE:
        pivot += tl.load(base + e.to(tl.int64) * BSTEP + PIVOT * QSTEP + o, mask=om, other=0).to(ACC)
    end = tl.minimum((s + 1) * CHUNK, MR)
    for m0 in range(s * CHUNK, end, BM):
        m = m0 + tl.arange(0, BM)
        b, l, n, inside, qy, qx = position_of_row(m, e, end, index, E, L, P, GW, H, W, HALO)
        mask = inside[:, None] & om[None, :]
        q = patch_order(qy, qx, P, GW)
        r = tl.zeros((BM, BO), ACC)
        if HAS_BASE:
            r += tl.load(base + (e.to(tl.int64) * BSTEP + q * QSTEP)[:, None] + o[None, :], mask=mask, other=0).to(ACC)
        counted_elsewhere = tl.zeros((BM,), tl.int32)
        if KS == 1:
            row = e.to(tl.int64) * STEP + m.to(tl.int64) * O
            y = tl.load(folded + row[:, None] + o[None, :], mask=mask, other=0).to(ACC) + r
        else:
            y = tl.zeros((BM, BO), ACC)
            for d in range(SIDE * SIDE):
                ny = n // GW + d // SIDE - NEIGHBOURS
                nx = n % GW + d % SIDE - NEIGHBOURS
                there = inside & (ny >= 0) & (ny < N // GW) & (nx >= 0) & (nx < GW)
                other = tl.load(slots + (b * E + e) * N + ny * GW + nx, mask=there, other=-1)
                if tl.max(other, 0) >= 0:
                    hy = qy - ny * P + R
                    hx = qx - nx * P + R
                    has = (other >= 0) & (hy >= 0) & (hy < SL) & (hx >= 0) & (hx < SL)
                    counted_elsewhere = tl.maximum(counted_elsewhere, (has & (other < l)).to(tl.int32))
                    h = hy * SL + hx
                    if FLIP:
                        h = SL * SL - 1 - h
                    row = e.to(tl.int64) * STEP + ((b * L + tl.maximum(other, 0)) * (SL * SL) + h).to(tl.int64) * O
                    y += tl.load(folded + row[:, None] + o[None, :], mask=has[:, None] & om[None, :], other=0).to(ACC)
            if HAS_GATE:
                y += r
            rounded = y.to(rows_out.dtype.element_ty)
            to = (e.to(tl.int64) * MR + m) * O
            tl.store(rows_out + to[:, None] + o[None, :], rounded, mask=(m < end)[:, None] & om[None, :])
            y = rounded.to(ACC)
            if not HAS_GATE:
                y += r
        if HAS_GATE:
            counted_elsewhere = tl.zeros((BM,), tl.int32)
            g = tl.load(gate + (b * E + e) * L + l, mask=inside, other=0).to(ACC)
            y = y * g[:, None]
            r = tl.zeros((BM, BO), ACC)
        if tl.program_id(2) == 0:
            place = tl.where(counted_elsewhere > 0, -2 - q, q)
            tl.store(place_out + e * MR + m, tl.where(inside, place, -1), mask=m < end)
        if STATS:
            counted = (inside & (counted_elsewhere == 0))[:, None]
            first += tl.where(counted, y - r, 0.0)
            second += tl.where(counted, (y - r) * (y + r - 2 * pivot[None, :]), 0.0)
    if STATS:
        to = (s * E + e) * O + o
        tl.store(sums_out + to, tl.sum(first, 0), mask=om)
        tl.store(sums_out + S * (E * O) + to, tl.sum(second, 0), mask=om)


@cached_launch
@triton.jit
def channel_table_kernel(
    sums, base, weight, bias, mean_in, var_in, table, moments, eps, S, B, BSTEP, QSTEP, PIVOT,
    E: tl.constexpr, O: tl.constexpr, HW: tl.constexpr, HAS_BASE: tl.constexpr, TRAINING: tl.constexpr,
    ACC: tl.constexpr, BS: tl.constexpr, BQ: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Table (5, E·O): mean, scale, shift; number of active positions of the background, and Σ y - mean of these."""
    e = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    om = o < O
    X: tl.constexpr = E * O
    at = e * O + o
    here = e.to(tl.int64) * BSTEP
    if TRAINING:
        pivot = tl.zeros((BO,), ACC)
        first = tl.zeros((BQ, BO), ACC)
        second = tl.zeros((BQ, BO), ACC)
        if HAS_BASE:
            pivot += tl.load(base + here + PIVOT * QSTEP + o, mask=om, other=0).to(ACC)
            for q0 in range(0, HW, BQ):
                q = q0 + tl.arange(0, BQ)
                mask = (q < HW)[:, None] & om[None, :]
                r = tl.load(base + here + (q * QSTEP)[:, None] + o[None, :], mask=mask, other=0).to(ACC)
                r = tl.where(mask, r - pivot[None, :], 0.0)
                first += r
                second += r * r
        of_first = sum_parts(sums, S, X, at, om, ACC, BS, BO) + B * tl.sum(first, 0)
        of_second = sum_parts(sums + S * X, S, X, at, om, ACC, BS, BO) + B * tl.sum(second, 0)
        deviation = of_first / (B * HW)
        mean = pivot + deviation
        var = tl.maximum(of_second / (B * HW) - deviation * deviation, 0.0)
    else:
        mean = tl.load(mean_in + at, mask=om, other=0).to(ACC)
        var = tl.load(var_in + at, mask=om, other=1).to(ACC)
    scale = tl.load(weight + at, mask=om, other=0).to(ACC) * tl.rsqrt(var + eps)
    shift = tl.load(bias + at, mask=om, other=0).to(ACC)
    count = tl.zeros((BQ, BO), ACC)
    active_sum = tl.zeros((BQ, BO), ACC)
    for q0 in range(0, HW, BQ):
        q = q0 + tl.arange(0, BQ)
        mask = (q < HW)[:, None] & om[None, :]
        r = tl.zeros((BQ, BO), ACC)
        if HAS_BASE:
            r += tl.load(base + here + (q * QSTEP)[:, None] + o[None, :], mask=mask, other=0).to(ACC)
        apart_q = r - mean[None, :]
        active = mask & (apart_q * scale[None, :] + shift[None, :] > 0)
        count += tl.where(active, 1.0, 0.0)
        active_sum += tl.where(active, apart_q, 0.0)
    tl.store(table + at, mean, mask=om)
    tl.store(table + X + at, scale, mask=om)
    tl.store(table + 2 * X + at, shift, mask=om)
    tl.store(table + 3 * X + at, tl.sum(count, 0), mask=om)
    tl.store(table + 4 * X + at, tl.sum(active_sum, 0), mask=om)
    tl.store(moments + at, mean, mask=om)
    tl.store(moments + X + at, var, mask=om)


@cached_launch
@triton.jit
def mean_kernel(
    rows, place, gate, base, table, pooled, counts, MR, STEP, BSTEP, QSTEP, B,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, RS: tl.constexpr, HW: tl.constexpr, HAS_BASE: tl.constexpr,
    HAS_GATE: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One image and expert. SAVE: counts (2, B, E·O), as the last two entries of the table, of this image."""
    b = tl.program_id(0)
    e = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    X: tl.constexpr = E * O
    at = e * O + o
    mean, scale, shift = (
        channel_entry(table, 0, X, at, om),
        channel_entry(table, 1, X, at, om),
        channel_entry(table, 2, X, at, om),
    )
    count = tl.zeros((BM, BO), tl.int32)
    active_sum = tl.zeros((BM, BO), ACC)
    for i0 in tl.range(0, L * RS, BM, loop_unroll_factor=3):
        i = i0 + tl.arange(0, BM)
        m = b * (L * RS) + i
        # rows are loaded before their positions are known: those that do not count become the background, and cancel
        row = e.to(tl.int64) * STEP + m.to(tl.int64) * O
        y = tl.load(rows + row[:, None] + o[None, :], mask=(i < L * RS)[:, None] & om[None, :], other=0).to(ACC)
        q = tl.load(place + e * MR + m, mask=i < L * RS, other=-1)
        mask = (q >= 0)[:, None] & om[None, :]
        r = tl.zeros((BM, BO), ACC)
        if HAS_BASE:
            background_at = e.to(tl.int64) * BSTEP + q * QSTEP
            r = tl.load(base + background_at[:, None] + o[None, :], mask=mask, other=0).to(ACC)
        if HAS_GATE:
            g = tl.load(gate + (b * E + e) * L + i // RS, mask=q >= 0, other=0).to(ACC)
            y = (y + r) * g[:, None]
            r = tl.zeros((BM, BO), ACC)
        r -= mean
        y = tl.where(mask, y, 0.0) + r
        active_now = y * scale + shift > 0
        active_before = r * scale + shift > 0
        count += active_now.to(tl.int32) - active_before.to(tl.int32)
        active_sum += tl.where(active_now, y, 0.0) - tl.where(active_before, r, 0.0)
    total_active_count = tl.sum(count, 0).to(ACC) + tl.load(table + 3 * X + at, mask=om, other=0)
    total_active_sum = tl.sum(active_sum, 0) + tl.load(table + 4 * X + at, mask=om, other=0)
    scale_c = tl.load(table + X + at, mask=om, other=0)
    shift_c = tl.load(table + 2 * X + at, mask=om, other=0)
    to = b * X + at
    acc = (scale_c * total_active_sum + shift_c * total_active_count) / HW
    tl.store(pooled + to, acc.to(pooled.dtype.element_ty), mask=om)
    if SAVE:
        tl.store(counts + to, total_active_count, mask=om)
        tl.store(counts + B * X + to, total_active_sum, mask=om)


@cached_launch
@triton.jit
def grad_terms_kernel(
    grad, counts, table, moments, out, weight_out, bias_out, eps, B,
    X: tl.constexpr, HW: tl.constexpr, TRAINING: tl.constexpr, ACC: tl.constexpr, BB: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Out (6, E·O): mean, scale, shift, offset, slope, and the gradient of a position's share summed over images."""
    at = tl.program_id(0) * BX + tl.arange(0, BX)
    am = at < X
    of_active_count = tl.zeros((BB, BX), ACC)
    of_active_sum = tl.zeros((BB, BX), ACC)
    of_all = tl.zeros((BB, BX), ACC)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        mask = (b < B)[:, None] & am[None, :]
        place = (b * X)[:, None] + at[None, :]
        d = tl.load(grad + place, mask=mask, other=0).to(ACC) / HW
        of_active_count += d * tl.load(counts + place, mask=mask, other=0)
        of_active_sum += d * tl.load(counts + B * X + place, mask=mask, other=0)
        of_all += d
    scale = tl.load(table + X + at, mask=am, other=0)
    rstd = tl.rsqrt(tl.load(moments + X + at, mask=am, other=1) + eps)
    grad_bias = tl.sum(of_active_count, 0)
    grad_weight = tl.sum(of_active_sum, 0) * rstd
    tl.store(weight_out + at, grad_weight.to(weight_out.dtype.element_ty), mask=am)
    tl.store(bias_out + at, grad_bias.to(bias_out.dtype.element_ty), mask=am)
    offset = tl.zeros((BX,), ACC)
    slope = tl.zeros((BX,), ACC)
    if TRAINING:
        offset += scale * grad_bias / (B * HW)
        slope += scale * rstd * grad_weight / (B * HW)
    tl.store(out + at, tl.load(table + at, mask=am, other=0), mask=am)
    tl.store(out + X + at, scale, mask=am)
    tl.store(out + 2 * X + at, tl.load(table + 2 * X + at, mask=am, other=0), mask=am)
    tl.store(out + 3 * X + at, offset, mask=am)
    tl.store(out + 4 * X + at, slope, mask=am)
    tl.store(out + 5 * X + at, tl.sum(of_all, 0), mask=am)


@triton.jit
def terms(grad_terms, X: tl.constexpr, at, mask):
    """Mean, scale, shift, offset and slope of some channels."""
    return (
        channel_entry(grad_terms, 0, X, at, mask),
        channel_entry(grad_terms, 1, X, at, mask),
        channel_entry(grad_terms, 2, X, at, mask),
        channel_entry(grad_terms, 3, X, at, mask),
        channel_entry(grad_terms, 4, X, at, mask),
    )


@triton.jit
def gradient_of_y(y, d, mean, scale, shift, offset, slope):
    """From a position's value and the gradient of its share of the mean."""
    deviation = y - mean
    return tl.where(deviation * scale + shift > 0, d * scale, 0.0) - offset - slope * deviation


@cached_launch
@triton.jit
def row_backward_kernel(
    grad, rows, base, place, gate, grad_terms, rows_out, sums_out, MR, M1, STEP, BSTEP, QSTEP, CHUNK,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr,
    GW: tl.constexpr, HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ISOLATED: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A chunk of rows_out (E, M1, O): gradient of y, or gate · gradient of y under HAS_GATE; zeros off the map.

    SUMS: sums_out (S, E, ks², O), where a tap falls inside, of the counted rows less the background; under HAS_GATE of
    the whole rows, as the background is zero there.
    """
    A: tl.constexpr = P * P
    X: tl.constexpr = E * O
    s = tl.program_id(0)
    e = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    at = e * O + o
    mean, scale, shift, offset, slope = terms(grad_terms, X, at, om)
    taps = tl.arange(0, BT)
    acc = tl.zeros((BT, BO), ACC)
    end = tl.minimum((s + 1) * CHUNK, M1)
    for m0 in range(s * CHUNK, end, BM):
        m = m0 + tl.arange(0, BM)
        b = m // (L * RS)
        coded = tl.load(place + e * MR + m, mask=(m < end) & (m < MR), other=-1)
        there = coded != -1
        q = tl.where(coded < 0, -2 - coded, coded)
        mask = there[:, None] & om[None, :]
        g = tl.zeros((BM,), ACC)
        if HAS_GATE:
            g += tl.load(gate + (b * E + e) * L + (m // RS) % L, mask=there, other=0).to(ACC)
        row = e.to(tl.int64) * STEP + m.to(tl.int64) * O
        background_at = e.to(tl.int64) * BSTEP + q * QSTEP
        d = tl.load(grad + (b * X)[:, None] + at[None, :], mask=mask, other=0).to(ACC) / HW
        y, r = value_and_background(rows, row, base, background_at, g, o, mask, HAS_BASE, HAS_GATE, ACC)
        v = gradient_of_y(y, d, mean, scale, shift, offset, slope)
        if HAS_GATE:
            v = v * g[:, None]
        v = tl.where(mask, v, 0.0)
        to = (e.to(tl.int64) * M1 + m) * O
        tl.store(rows_out + to[:, None] + o[None, :], v.to(rows_out.dtype.element_ty),
                 mask=(m < end)[:, None] & om[None, :])  # fmt: skip
        if SUMS:
            if not HAS_GATE:
                v -= gradient_of_y(r, d, mean, scale, shift, offset, slope)
                v = tl.where((coded >= 0)[:, None] & om[None, :], v, 0.0)
            if KS == 1:
                acc += tl.where((taps == 0)[:, None], tl.sum(v, 0)[None, :], 0.0)
            else:
                n = q // A
                ay = (q % A) // P
                ax = (q % A) % P
                # Unrolled, so that offsets are constants. In a loop LLVM takes those of 5×5 kernels within a patch
                # as pairs of 16 bits, `add.s16x2` of 254, and ptxas 12.8 and 12.9 make an addition of zero of that.
                for t in tl.static_range(KS * KS):
                    ty = ay + t // KS - KS // 2
                    tx = ax + t % KS - KS // 2
                    if ISOLATED:
                        inside = (ty >= 0) & (ty < P) & (tx >= 0) & (tx < P)
                    else:
                        ty += (n // GW) * P
                        tx += (n % GW) * P
                        inside = (ty >= 0) & (ty < H) & (tx >= 0) & (tx < W)
                    part = tl.sum(tl.where(inside[:, None], v, 0.0), 0)
                    acc += tl.where((taps == t)[:, None], part[None, :], 0.0)
    if SUMS:
        to = ((s * E + e) * (KS * KS) + taps) * O
        tl.store(sums_out + to[:, None] + o[None, :], acc, mask=(taps < KS * KS)[:, None] & om[None, :])


@cached_launch
@triton.jit
def tap_gradient_kernel(
    sums, base, grad_terms, out, S, B, BSTEP, QSTEP,
    E: tl.constexpr, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, ISOLATED: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr,
    BS: tl.constexpr, BQ: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Out (E, ks², O): splits summed, and unless HAS_GATE the background's gradient, of all images and positions."""
    A: tl.constexpr = P * P
    X: tl.constexpr = E * O
    e = tl.program_id(0)
    t = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    at = e * O + o
    total = sum_parts(sums, S, X * KS * KS, (e * (KS * KS) + t) * O + o, om, ACC, BS, BO)
    if not HAS_GATE:
        acc = tl.zeros((BQ, BO), ACC)
        share = channel_entry(grad_terms, 5, X, at, om) / B
        mean, scale, shift, offset, slope = terms(grad_terms, X, at, om)
        for q0 in range(0, HW, BQ):
            q = q0 + tl.arange(0, BQ)
            ty = (q % A) // P + t // KS - KS // 2
            tx = (q % A) % P + t % KS - KS // 2
            if ISOLATED:
                inside = (ty >= 0) & (ty < P) & (tx >= 0) & (tx < P)
            else:
                ty += (q // A // GW) * P
                tx += (q // A % GW) * P
                inside = (ty >= 0) & (ty < H) & (tx >= 0) & (tx < W)
            mask = ((q < HW) & inside)[:, None] & om[None, :]
            background_at = base + e.to(tl.int64) * BSTEP + (q * QSTEP)[:, None] + o[None, :]
            r = tl.load(background_at, mask=mask, other=0).to(ACC)
            acc += tl.where(mask, gradient_of_y(r, share, mean, scale, shift, offset, slope), 0.0)
        total += B * tl.sum(acc, 0)
    tl.store(out + (e * (KS * KS) + t) * O + o, total, mask=om)


@cached_launch
@triton.jit
def scatter_backward_kernel(
    grad, index, slots, tap_grad, out, M, M1, FIRST, STEP,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, ISOLATED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_TAP_GRAD: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Gradient of contributions (…, M1, ks²·O) of experts from FIRST on; rows from M on are zeros.

    Grad (E, MR, O), STEP from expert to expert. Under HAS_GATE a position's row is that of the patch it lies in. With
    HAS_TAP_GRAD (E, ks², O) row M is the gradient of background taps.
    """
    R: tl.constexpr = KS // 2
    SH: tl.constexpr = P + 2 * HALO
    e = FIRST + tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    b, l, a, used, sy, sx = pixel_of_row(m, e, M, index, E, L, P, GW)
    ours = (tl.minimum(m, M - 1) // (L * P * P)) * E + e
    to = (tl.program_id(1) * M1 + m).to(tl.int64) * (KS * KS * O)
    for ty in tl.static_range(KS):
        # a line of taps is loaded before any of it is stored, because loads after a store would wait for it
        acc = ()
        for tx in tl.static_range(KS):
            qy = sy + R - ty
            qx = sx + R - tx
            inside = used & (qy >= 0) & (qy < H) & (qx >= 0) & (qx < W)
            if ISOLATED:
                inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
            if HAS_GATE:
                # Loaded at clamped positions instead of with masks, with which Triton 3.6 fails to compile some tiles.
                cy = tl.minimum(tl.maximum(qy, 0), H - 1)
                cx = tl.minimum(tl.maximum(qx, 0), W - 1)
                own = tl.load(slots + ours * N + (cy // P) * GW + cx // P)
                inside = inside & (own >= 0)
                row = (b * L + tl.maximum(own, 0)) * (P * P) + (cy % P) * P + cx % P
            else:
                row = (b * L + l) * (SH * SH) + (a // P + HALO + R - ty) * SH + a % P + HALO + R - tx
            at = e.to(tl.int64) * STEP + row.to(tl.int64) * O
            v = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None] & om[None, :], other=0)
            if HAS_TAP_GRAD:
                tap_output = tl.load(tap_grad + (e * (KS * KS) + ty * KS + tx) * O + o, mask=om, other=0)
                v = tl.where((m == M)[:, None], tap_output.to(v.dtype)[None, :], v)
            acc = acc + (v,)
        for tx in tl.static_range(KS):
            tap = (to + (ty * KS + tx) * O)[:, None] + o[None, :]
            tl.store(out + tap, acc[tx], mask=(m < M1)[:, None] & om[None, :])


@cached_launch
@triton.jit
def gate_dots_kernel(
    grad, rows, base, place, gate, grad_terms, out, M, STEP, BSTEP, QSTEP,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, HW: tl.constexpr, HAS_BASE: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """⟨gradient of y, what the gate multiplies⟩, pixel by pixel (B, E, L, p²)."""
    A: tl.constexpr = P * P
    X: tl.constexpr = E * O
    e = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b = m // (L * A)
    l = (m // A) % L
    q = tl.load(place + e * M + m, mask=m < M, other=-1)
    g = tl.load(gate + (b * E + e) * L + l, mask=q >= 0, other=0).to(ACC)
    row = e.to(tl.int64) * STEP + m.to(tl.int64) * O
    background_at = e.to(tl.int64) * BSTEP + q * QSTEP
    gate_dots = tl.zeros((BM,), ACC)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        om = o < O
        mask = (q >= 0)[:, None] & om[None, :]
        own, _r = value_and_background(rows, row, base, background_at, g, o, mask, HAS_BASE, False, ACC)
        d = tl.load(grad + (b * X + e * O)[:, None] + o[None, :], mask=mask, other=0).to(ACC) / HW
        mean, scale, shift, offset, slope = terms(grad_terms, X, e * O + o, om)
        v = gradient_of_y(own * g[:, None], d, mean, scale, shift, offset, slope)
        gate_dots += tl.sum(tl.where(mask, v * own, 0.0), 1)
    tl.store(out + ((b * E + e) * L + l) * A + m % A, gate_dots, mask=m < M)
