"""Two kernels of `pooled_kernels` in another form: line by line of the positions that a patch covers.

    rows[e, m] = Σ_t contributions[e, pixel(m, t), t]        grad_rows = s·d·[z > 0] - offset - slope·(y - μ)

    line_rows_kernel        contributions (E, M1, ks²·O) → rows (E, MR, O), place (E, MR), sums for mean and variance
    line_backward_kernel    grad_terms (6, E·O) → gradient of rows, and its part in the gradient of background taps

A line lies within one patch, so indices are looked up once per patch, and a position's contributions have constant
offsets from the patch's first. That suits patches of several pixels a side with few taps,
because every tap is unrolled.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.models.wide_resnet.triton.pooled_kernels import terms
from moesaic.ops.triton.cached_launch import cached_launch

__all__ = ["line_backward_kernel", "line_rows_kernel"]


@triton.jit
def own_patch_taps(
    own, mask, top, hx: tl.constexpr, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """What the place ``hx`` of the line ``top`` has of its own patch, both counted from its first pixel.

    ``own`` is where contributions of pixels begin, had the line that the first taps see been the patch's first.
    """
    R: tl.constexpr = KS // 2
    y = tl.zeros(own.shape, ACC)
    for t in tl.static_range(KS * KS):
        sx = hx + t % KS - R
        if sx >= 0 and sx < P:
            ay = top + (t // KS - R)
            at = ((t // KS * P + sx) * (KS * KS) + t) * O
            y += tl.load(own + at, mask=mask & (ay >= 0) & (ay < P), other=0).to(ACC)
    return y


@triton.jit
def neighbour_taps(
    y, other, mask, hx: tl.constexpr, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """With what one line of taps sees of another patch: ``other`` is where contributions of that line begin."""
    for tx in tl.static_range(KS):
        sx = hx + tx - KS // 2
        if sx >= 0 and sx < P:
            y += tl.load(other + (sx * (KS * KS) + tx) * O, mask=mask, other=0).to(ACC)
    return y


@triton.jit
def store_positions(
    place_out, number, live, down, nx, q0, counted_elsewhere,
    P: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, FAR: tl.constexpr, HAS_GATE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Where the places of a line are on the map, patch by patch; ``q0`` is the number of the patch's first column."""
    hx = tl.arange(0, BH)[None, :]
    qx = nx[:, None] * P - HALO + hx
    q = q0[:, None] + ((hx - HALO + FAR) // P - FAR // P) * (P * P) + (hx - HALO + FAR) % P
    if not HAS_GATE:
        q = tl.where((counted_elsewhere[:, None] >> hx) & 1 > 0, -2 - q, q)
    q = tl.where(down[:, None] & (qx >= 0) & (qx < W), q, -1)
    tl.store(place_out + number[:, None] + hx, q, mask=live[:, None] & (hx < P + 2 * HALO))


@cached_launch
@triton.jit
def line_rows_kernel(
    contributions, index, slots, gate, base, rows_out, place_out, sums_out, PATCHES, M1, CHUNK, S, PIVOT,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BSTEP: tl.constexpr, QSTEP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, STATS: tl.constexpr,
    ACC: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Rows of one line of covered positions, for a chunk of an expert's patches; see `covered_rows_kernel`.

    Patches and channels are the sides of a tile, and each place of the line has one. So indices
    are looked up for patches, and contributions have constant offsets. They are summed without rounding in between.
    """
    A: tl.constexpr = P * P
    R: tl.constexpr = KS // 2
    SH: tl.constexpr = P + 2 * HALO
    FAR: tl.constexpr = P * (R + HALO + 1)  # added before divisions, which round negative numbers toward zero
    hy = tl.program_id(1) % SH
    s = tl.program_id(1) // SH
    e = E - 1 - tl.program_id(2)  # the last expert's rows were written last and may still be in the cache
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    om = (o < O)[None, :]
    top = hy - HALO
    first = tl.zeros((BK, BO), ACC)
    second = tl.zeros((BK, BO), ACC)
    pivot = tl.zeros((BO,), ACC)
    background_at = base
    if HAS_BASE:
        background_at = base + e * BSTEP
        if not HAS_GATE:
            pivot += tl.load(background_at + PIVOT * QSTEP + o, mask=o < O, other=0).to(ACC)
    end = tl.minimum((s + 1) * CHUNK, PATCHES)
    for k0 in range(s * CHUNK, end, BK):
        k = k0 + tl.arange(0, BK)
        live = k < end
        b = k // L
        l = k % L
        mask = live[:, None] & om
        # a patch's own contributions do not depend on its position, so they are loaded before the index
        line = (top - R) * (P * KS * KS * O) + o
        own = contributions + ((e * M1 + k * A).to(tl.int64) * (KS * KS * O))[:, None] + line[None, :]
        places = ()
        for hx in tl.static_range(SH):
            places = places + (own_patch_taps(own, mask, top, hx - HALO, O, P, KS, ACC),)
        n = tl.load(index + (b * E + e) * L + l, mask=live, other=-1).to(tl.int32)
        used = n >= 0
        n = tl.maximum(n, 0)
        ny = n // GW
        nx = n % GW
        # a bit for each position of the line: whether an earlier patch covers it as well
        counted_elsewhere = tl.zeros((BK,), tl.int32)
        if NEIGHBOURS > 0:
            for ty in range(KS):
                sy = top + ty - R + FAR
                dy = sy // P - FAR // P
                for d in tl.static_range(2 * NEIGHBOURS + 1):
                    column_shift = d - NEIGHBOURS
                    there = (
                        used
                        & (ny + dy >= 0)
                        & (ny + dy < N // GW)
                        & (nx + column_shift >= 0)
                        & (nx + column_shift < GW)
                    )
                    if column_shift == 0:
                        there = there & (dy != 0)
                    at = (b * E + e) * N + (ny + dy) * GW + nx + column_shift
                    slot = tl.load(slots + at, mask=there, other=-1)
                    if tl.max(slot, 0) >= 0:
                        row = (e * M1 + (b * L + tl.maximum(slot, 0)) * A + sy % P * P).to(tl.int64)
                        other = contributions + (row * (KS * KS * O))[:, None] + (ty * (KS * O) + o)[None, :]
                        has = (slot >= 0)[:, None] & om
                        more = ()
                        for hx in tl.static_range(SH):
                            more = more + (
                                neighbour_taps(places[hx], other, has, hx - HALO - column_shift * P, O, P, KS, ACC),
                            )
                        places = more
                        for hx in tl.static_range(SH):
                            if hx - HALO - column_shift * P + R >= 0 and hx - HALO - column_shift * P - R < P:
                                counted_elsewhere = counted_elsewhere | tl.where((slot >= 0) & (slot < l), 1 << hx, 0)
        y0 = ny * P + top
        down = used & (y0 >= 0) & (y0 < H)
        up = (top + FAR) // P - FAR // P
        q0 = ((ny + up) * GW + nx) * A + (top + FAR) % P * P
        number = (e * PATCHES + k).to(tl.int64) * (SH * SH) + hy * SH
        if tl.program_id(0) == 0:
            store_positions(place_out, number, live, down, nx, q0, counted_elsewhere, P, W, HALO, FAR, HAS_GATE, BH)
        if HAS_GATE:
            g = tl.load(gate + (b * E + e) * L + l, mask=live, other=0).to(ACC)
        for hx in tl.static_range(SH):
            ax = hx - HALO
            qx = nx * P + ax
            inside = down & (qx >= 0) & (qx < W)
            y = tl.where(inside[:, None], places[hx], 0.0)
            r = tl.zeros((BK, BO), ACC)
            if HAS_BASE and (STATS or HAS_GATE):
                q = q0 + ((ax + FAR) // P - FAR // P) * A + (ax + FAR) % P
                r += tl.load(background_at + (q * QSTEP)[:, None] + o[None, :], mask=inside[:, None] & om, other=0).to(
                    ACC
                )
            if HAS_GATE:
                y += r
            rounded = y.to(rows_out.dtype.element_ty)
            tl.store(rows_out + ((number + hx) * O)[:, None] + o[None, :], rounded, mask=mask)
            if STATS:
                # y - background and y + background - 2 · pivot; with gates on the output background and pivot are zero
                counted = inside
                more = rounded.to(ACC)
                both = more + 2 * (r - pivot[None, :])
                if HAS_GATE:
                    more = more * g[:, None]
                    both = more
                else:
                    counted = inside & ((counted_elsewhere >> hx) & 1 == 0)
                more = tl.where(counted[:, None] & om, more, 0.0)
                first += more
                second += more * both
    if STATS:
        to = sums_out + (tl.program_id(1) * E + e) * O + o
        tl.store(to, tl.sum(first, 0), mask=o < O)
        tl.store(to + S * (E * O), tl.sum(second, 0), mask=o < O)


@cached_launch
@triton.jit
def line_backward_kernel(
    grad, rows, base, index, place, gate, grad_terms, rows_out, sums_out, PATCHES, CHUNK,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, ISOLATED: tl.constexpr, BSTEP: tl.constexpr,
    QSTEP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, SUMS: tl.constexpr, TAPS: tl.constexpr,
    ACC: tl.constexpr, BH: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A chunk of an expert's patches, line by line of the positions that a patch covers; see `row_backward_kernel`.

    A line's row decides which rows of taps fall inside, and a position's column which columns. So lines are summed by
    rows of taps, patches by both, and positions of a line only at the end. TAPS: 1 or ks. Rows off the map are written
    and never read.
    """
    X: tl.constexpr = E * O
    R: tl.constexpr = TAPS // 2
    SH: tl.constexpr = P + 2 * HALO
    s = tl.program_id(1)
    e = tl.program_id(2)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    om = o < O
    at = e * O + o
    hx = tl.arange(0, BH)
    mean, scale, shift, offset, slope = terms(grad_terms, X, at, om)
    background_at = base
    if HAS_BASE:
        background_at = base + e * BSTEP
    live = (hx < SH)[:, None] & om[None, :]
    line = (hx * O)[:, None] + o[None, :]
    acc = ()
    for _t in tl.static_range(TAPS * TAPS):
        acc = acc + (tl.zeros((BH, BO), ACC),)
    for k in range(s * CHUNK, tl.minimum((s + 1) * CHUNK, PATCHES)):
        # all lines are loaded before any is stored, because loads after a store would wait for it
        number = (e * PATCHES + k).to(tl.int64) * (SH * SH)
        values = ()
        for hy in tl.static_range(SH):
            values = values + (tl.load(rows + (number + hy * SH) * O + line, mask=live, other=0),)
        b = k // L
        n = tl.maximum(tl.load(index + (b * E + e) * L + k % L).to(tl.int32), 0)
        y0 = (n // GW) * P - HALO
        qx = (n % GW) * P - HALO + hx
        q0 = (n // GW) * (GW * P * P) + (qx // P) * (P * P) + qx % P
        d = tl.load(grad + b * X + at, mask=om, other=0).to(ACC)[None, :] / HW * scale
        g = 1.0
        if HAS_GATE:
            g = tl.load(gate + (b * E + e) * L + k % L).to(ACC)
        counts = ()
        rests = ()
        for hy in tl.static_range(SH):
            code = tl.load(place + number + hy * SH + hx, mask=hx < SH, other=-1)
            counts = counts + (tl.where(code >= 0, 1.0, 0.0).to(ACC),)
            if HAS_BASE:
                q = q0 + ((hy - HALO) // P * GW * P + (hy - HALO) % P) * P
                there = (code != -1)[:, None] & om[None, :]
                rests = rests + (tl.load(background_at + (q * QSTEP)[:, None] + o[None, :], mask=there, other=0),)
        by_line = ()
        for _t in tl.static_range(TAPS):
            by_line = by_line + (tl.zeros((BH, BO), ACC),)
        for hy in tl.static_range(SH):
            more = values[hy].to(ACC)
            before = -mean
            if HAS_BASE:
                before = rests[hy].to(ACC) - mean
            deviation = more * g + before
            active = tl.where(deviation * scale + shift > 0, d, 0.0)
            v = (active - offset - slope * deviation) * g
            tl.store(rows_out + (number + hy * SH) * O + line, v.to(rows_out.dtype.element_ty), mask=live)
            if SUMS:
                if not HAS_GATE:
                    # less the background's gradient: offset cancels, and of slope only the difference is left
                    v = active - tl.where(before * scale + shift > 0, d, 0.0) - slope * more
                added = ()
                for t in tl.static_range(TAPS):
                    if ISOLATED:
                        inside = 1.0 if hy + t - R >= 0 and hy + t - R < P else 0.0
                    else:
                        inside = tl.where((y0 + (hy + t - R) >= 0) & (y0 + (hy + t - R) < H), 1.0, 0.0).to(ACC)
                    added = added + (by_line[t] + v * (counts[hy] * inside)[:, None],)
                by_line = added
        if SUMS:
            added = ()
            for t in tl.static_range(TAPS * TAPS):
                if ISOLATED:
                    tx = hx + (t % TAPS - R)
                    inside = (tx >= 0) & (tx < P)
                else:
                    tx = qx + (t % TAPS - R)
                    inside = (tx >= 0) & (tx < W)
                added = added + (acc[t] + by_line[t // TAPS] * tl.where(inside, 1.0, 0.0).to(ACC)[:, None],)
            acc = added
    if SUMS:
        for t in tl.static_range(TAPS * TAPS):
            to = ((s * E + e) * (TAPS * TAPS) + t) * O
            tl.store(sums_out + to + o, tl.sum(acc[t], 0), mask=om)
