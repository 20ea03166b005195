"""Two kernels of `reached` in another form: line by line of the positions that a patch reaches.

    land_kernel     contributions → rows, where each of them is, and the differences' share of mean and variance
    line_kernel     terms of y's gradient → gradient of rows, and its part in that of what experts answer at rest

A line lies within one patch, so whatever is looked up is looked up once for the patch, and every offset is a constant
of the compiled kernel. That is for patches of several pixels a side and not too many taps: all of them are written out.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.ops.triton.reached import terms

__all__ = ["land_kernel", "line_kernel"]


@triton.jit
def own_taps(
    own, inside, ax, mask, top: tl.constexpr,
    O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a line of positions, the patch's line ``top`` and its places ``ax``, has of the patch itself.

    ``own`` is where contributions of its pixels begin, if they were in line 0. Which lines of pixels a line of
    positions sees is known when this is compiled, so what is not there costs nothing.
    """
    R: tl.constexpr = KS // 2
    y = tl.zeros(own.shape, ACC)
    for t in tl.static_range(KS * KS):
        ay = top + t // KS - R
        if ay >= 0 and ay < P:
            sx = ax + (t % KS - R)
            has = (inside & (sx >= 0) & (sx < P))[:, None] & mask
            at = (ay * P + t % KS - R) * (KS * KS * O) + t * O
            y += tl.load(own + at, mask=has, other=0).to(ACC)
    return y


@triton.jit
def more_taps(
    y, own, inside, ax, mask, top, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """The same of another patch, whose line ``top`` may be any; added to what there is."""
    R: tl.constexpr = KS // 2
    if (top + R >= 0) & (top - R < P):
        own += top * (P * KS * KS * O)
        for t in tl.static_range(KS * KS):
            ay = top + (t // KS - R)
            sx = ax + (t % KS - R)
            has = (inside & (ay >= 0) & (ay < P) & (sx >= 0) & (sx < P))[:, None] & mask
            at = ((t // KS - R) * P + t % KS - R) * (KS * KS * O) + t * O
            y += tl.load(own + at, mask=has, other=0).to(ACC)
    return y


@triton.jit
def crowded(slots, n, GW: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr, BD: tl.constexpr):
    """Whether another patch of an image up to NEAR patches away is chosen as well."""
    SIDE: tl.constexpr = 2 * NEAR + 1
    d = tl.arange(0, BD)
    ny = n // GW + d // SIDE - NEAR
    nx = n % GW + d % SIDE - NEAR
    there = (d < SIDE * SIDE) & (d != SIDE * SIDE // 2) & (ny >= 0) & (ny < N // GW) & (nx >= 0) & (nx < GW)
    return tl.max(tl.load(slots + ny * GW + nx, mask=there, other=-1), 0) >= 0


@triton.jit
def land_line(
    y, hidden, inside, hx, o, mask, q, g, pivot, rest, rows_out, place_out, first, second,
    O: tl.constexpr, SH: tl.constexpr, QSTEP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr,
    STATS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes a line of rows and where they are, and adds them to the sums."""
    r = tl.zeros(y.shape, ACC)
    if HAS_BASE and (STATS or HAS_GATE):
        r += tl.load(rest + (q * QSTEP)[:, None] + o[None, :], mask=inside[:, None] & mask, other=0).to(ACC)
    if HAS_GATE:
        y += r
        hidden = tl.zeros_like(hidden)
    kept = y.to(rows_out.dtype.element_ty)
    tl.store(rows_out + (hx * O)[:, None] + o[None, :], kept, mask=(hx < SH)[:, None] & mask)
    place = tl.where(hidden > 0, -2 - q, q)
    tl.store(place_out + hx, tl.where(inside, place, -1), mask=(hx < SH) & (tl.program_id(0) == 0))
    if STATS:
        # y - rest and y + rest - 2 · pivot; with gates nothing is there at rest, and the pivot is zero
        more = kept.to(ACC)
        both = more + 2 * (r - pivot[None, :])
        if HAS_GATE:
            more = more * g
            both = more
        more = tl.where((inside & (hidden == 0))[:, None] & mask, more, 0.0)
        first += more
        second += more * both
    return first, second


@triton.jit
def land_kernel(
    contributions, index, slots, gate, base, rows_out, place_out, sums_out, PATCHES, M1, CHUNK, S, PIVOT,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, NEAR: tl.constexpr, BSTEP: tl.constexpr,
    QSTEP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Rows of a chunk of an expert's patches, line by line of the positions that a patch reaches; see `reach_kernel`.

    A line is short, but all of it lies within one patch: whatever is looked up is looked up once for the patch, and
    contributions are so many numbers from its first one. They are added up unrounded.
    """
    A: tl.constexpr = P * P
    R: tl.constexpr = KS // 2
    SH: tl.constexpr = P + 2 * HALO
    SIDE: tl.constexpr = 2 * NEAR + 1
    s = tl.program_id(1)
    e = E - 1 - tl.program_id(2)  # the last to be written may still be in the cache
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    mask = (o < O)[None, :]
    hx = tl.arange(0, BH)
    first = tl.zeros((BH, BO), ACC)
    second = tl.zeros((BH, BO), ACC)
    pivot = tl.zeros((BO,), ACC)
    rest = base
    if HAS_BASE:
        rest = base + e * BSTEP
        if not HAS_GATE:
            pivot += tl.load(rest + PIVOT * QSTEP + o, mask=o < O, other=0).to(ACC)
    pixels = ((hx - HALO) * (KS * KS * O))[:, None] + o[None, :]
    for k in range(s * CHUNK, tl.minimum((s + 1) * CHUNK, PATCHES)):
        b = k // L
        l = k % L
        ours = slots + (b * E + e) * N
        n = tl.load(index + (b * E + e) * L + l).to(tl.int32)
        used = n >= 0
        n = tl.maximum(n, 0)
        y0 = (n // GW) * P - HALO
        qx = (n % GW) * P - HALO + hx
        across = used & (hx < SH) & (qx >= 0) & (qx < W)
        g = 1.0
        if HAS_GATE:
            g = tl.load(gate + (b * E + e) * L + l).to(ACC)
        number = (e * PATCHES + k).to(tl.int64) * (SH * SH)
        # all lines before any is written, as what is read would have to wait for that
        own = contributions + (e * M1 + k * A).to(tl.int64) * (KS * KS * O) + pixels
        lines = ()
        for hy in tl.static_range(SH):
            inside = across & (y0 + hy >= 0) & (y0 + hy < H)
            lines = lines + (own_taps(own, inside, hx - HALO, mask, hy - HALO, O, P, KS, ACC),)
        # a bit for each line: whether an earlier patch reaches this place of it as well
        hidden = tl.zeros((BH,), tl.int32)
        near = False
        if NEAR > 0:
            near = crowded(ours, n, GW, N, NEAR, BD)
        if near:
            for d in range(SIDE * SIDE):
                dy = d // SIDE - NEAR
                dx = d % SIDE - NEAR
                ny = n // GW + dy
                nx = n % GW + dx
                there = (d != SIDE * SIDE // 2) & (ny >= 0) & (ny < N // GW) & (nx >= 0) & (nx < GW)
                slot = tl.load(ours + ny * GW + nx, mask=there, other=-1)
                if slot >= 0:
                    ax = hx - HALO - dx * P
                    row = (e * M1 + (b * L + slot) * A - dx * P).to(tl.int64)
                    own = contributions + row * (KS * KS * O) + pixels
                    sum_of = ()
                    reached = 0
                    for hy in tl.static_range(SH):
                        top = hy - HALO - dy * P
                        inside = across & (y0 + hy >= 0) & (y0 + hy < H)
                        sum_of = sum_of + (more_taps(lines[hy], own, inside, ax, mask, top, O, P, KS, ACC),)
                        reached += ((top + R >= 0) & (top - R < P)).to(tl.int32) << hy
                    lines = sum_of
                    earlier = (slot < l) & (ax + R >= 0) & (ax - R < P)
                    hidden = hidden | tl.where(earlier, reached, 0)
        across_q = (qx // P) * A + qx % P
        for hy in tl.static_range(SH):
            qy = y0 + hy
            inside = across & (qy >= 0) & (qy < H)
            q = ((n // GW + (hy - HALO) // P) * GW) * A + ((hy - HALO) % P) * P + across_q
            to = number + hy * SH
            first, second = land_line(
                lines[hy], (hidden >> hy) & 1, inside, hx, o, mask, q, g, pivot, rest, rows_out + to * O,
                place_out + to, first, second, O, SH, QSTEP, HAS_BASE, HAS_GATE, STATS, ACC,
            )  # fmt: skip
    if STATS:
        to = sums_out + (s * E + e) * O + o
        tl.store(to, tl.sum(first, 0), mask=o < O)
        tl.store(to + S * (E * O), tl.sum(second, 0), mask=o < O)


@triton.jit
def line_kernel(
    grad, rows, base, index, place, gate, slopes, rows_out, sums_out, PATCHES, CHUNK,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HALO: tl.constexpr, ALONE: tl.constexpr, BSTEP: tl.constexpr,
    QSTEP: tl.constexpr, HAS_BASE: tl.constexpr, HAS_GATE: tl.constexpr, SUMS: tl.constexpr, TAPS: tl.constexpr,
    ACC: tl.constexpr, BH: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A chunk of an expert's patches, line by line of the positions that a patch reaches; see `back_kernel`.

    Where a line is decides which lines of taps fall inside, and where in it a position is which columns. So lines are
    added up by the first, patches by both, and only in the end what each place of a line has. TAPS: 1 or ks. What is
    written off the map nobody reads.
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
    mean, scale, shift, level, tilt = terms(slopes, X, at, om)
    rest = base
    if HAS_BASE:
        rest = base + e * BSTEP
    live = (hx < SH)[:, None] & om[None, :]
    line = (hx * O)[:, None] + o[None, :]
    found = ()
    for _t in tl.static_range(TAPS * TAPS):
        found = found + (tl.zeros((BH, BO), ACC),)
    for k in range(s * CHUNK, tl.minimum((s + 1) * CHUNK, PATCHES)):
        # all lines before any is written, as what is read would have to wait for that; the farthest first
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
                rests = rests + (tl.load(rest + (q * QSTEP)[:, None] + o[None, :], mask=there, other=0),)
        by_line = ()
        for _t in tl.static_range(TAPS):
            by_line = by_line + (tl.zeros((BH, BO), ACC),)
        for hy in tl.static_range(SH):
            more = values[hy].to(ACC)
            before = -mean
            if HAS_BASE:
                before = rests[hy].to(ACC) - mean
            apart = more * g + before
            active = tl.where(apart * scale + shift > 0, d, 0.0)
            v = (active - level - tilt * apart) * g
            tl.store(rows_out + (number + hy * SH) * O + line, v.to(rows_out.dtype.element_ty), mask=live)
            if SUMS:
                if not HAS_GATE:
                    # less what is there at rest: level goes, and of tilt only the difference is left
                    v = active - tl.where(before * scale + shift > 0, d, 0.0) - tilt * more
                added = ()
                for t in tl.static_range(TAPS):
                    if ALONE:
                        inside = 1.0 if hy + t - R >= 0 and hy + t - R < P else 0.0
                    else:
                        inside = tl.where((y0 + (hy + t - R) >= 0) & (y0 + (hy + t - R) < H), 1.0, 0.0).to(ACC)
                    added = added + (by_line[t] + v * (counts[hy] * inside)[:, None],)
                by_line = added
        if SUMS:
            added = ()
            for t in tl.static_range(TAPS * TAPS):
                if ALONE:
                    tx = hx + (t % TAPS - R)
                    inside = (tx >= 0) & (tx < P)
                else:
                    tx = qx + (t % TAPS - R)
                    inside = (tx >= 0) & (tx < W)
                added = added + (found[t] + by_line[t // TAPS] * tl.where(inside, 1.0, 0.0).to(ACC)[:, None],)
            found = added
    if SUMS:
        for t in tl.static_range(TAPS * TAPS):
            to = ((s * E + e) * (TAPS * TAPS) + t) * O
            tl.store(sums_out + to + o, tl.sum(found[t], 0), mask=om)
