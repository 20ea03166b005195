"""Kernels between contributions of chosen pixels and the map they land on.

taps_kernel         kernels as matrices of their taps, and back
fold_kernel         contributions → what each chosen patch gives to the positions it reaches
combine_kernel      that, and what is there at rest → y, with bias and gate
spread_kernel       gradient of y → gradient of contributions
gated_kernel        gradient of y → gradient of gates on the output, of the bias, and of 1×1 contributions
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.gather import pixel_of_row
from moesaic.ops.triton.launch import (
    Sizes,
    acc,
    ceil,
    pixel_of_patch,
    power_of_2,
    total,
    warps,
    wide,
)
from moesaic.ops.weight_layout import channels_last, laid_out, taps_first

__all__ = [
    "Landing",
    "combine",
    "gated_gradients",
    "landed_patches",
    "spread",
    "taps_of",
    "weight_of",
    "whole_blocks",
]


@dataclass(frozen=True)
class Landing:
    """How contributions land on a map."""

    kernel: int
    alone: bool
    """Patches do not see each other."""
    summed: bool
    """Experts are added up rather than side by side."""


@triton.jit
def taps_kernel(
    weight, taps,
    O: tl.constexpr, C: tl.constexpr, A: tl.constexpr, LAST: tl.constexpr, BACK: tl.constexpr, BA: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Weight (E, O, C, A), or (E, O, A, C) with channels LAST, to taps (E, A, O, C), or BACK."""
    eo = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    a = tl.arange(0, BA)
    by_channel = weight + (eo * C + c)[:, None].to(tl.int64) * A + a[None, :]
    by_place = weight + (eo * A + a)[:, None].to(tl.int64) * C + c[None, :]
    by_tap = taps + ((eo // O * A + a) * O + eo % O)[:, None].to(tl.int64) * C + c[None, :]
    mask = (a < A)[:, None] & (c < C)[None, :]
    if LAST:
        if BACK:
            tl.store(by_place, tl.load(by_tap, mask=mask, other=0), mask=mask)
        else:
            tl.store(by_tap, tl.load(by_place, mask=mask, other=0), mask=mask)
    elif BACK:
        tl.store(by_channel, tl.trans(tl.load(by_tap, mask=mask, other=0)), mask=tl.trans(mask))
    else:
        tl.store(by_tap, tl.trans(tl.load(by_channel, mask=tl.trans(mask), other=0)), mask=mask)


@triton.jit
def fold_kernel(
    contributions, out, PATCHES, M1,
    O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """What chosen patches give to one of the (p + ks - 1)² positions that each reaches: contributions, added up."""
    S: tl.constexpr = P + KS - 1
    blocks: tl.constexpr = (O + BO - 1) // BO
    q = tl.program_id(0) // blocks % (S * S)
    o = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    k = tl.program_id(0) // (S * S * blocks) * BK + tl.arange(0, BK)
    e = tl.program_id(1)
    mask = (k < PATCHES)[:, None] & (o < O)[None, :]
    first = contributions + ((e * M1 + k * (P * P)).to(tl.int64) * (KS * KS * O))[:, None] + o[None, :]
    found = tl.zeros((BK, BO), ACC)
    for t in tl.static_range(KS * KS):
        ay = q // S + (t // KS - KS + 1)
        ax = q % S + (t % KS - KS + 1)
        inside = (ay >= 0) & (ay < P) & (ax >= 0) & (ax < P)
        found += tl.load(first + ((ay * P + ax) * (KS * KS) + t) * O, mask=mask & inside, other=0).to(ACC)
    to = ((e * PATCHES + k).to(tl.int64) * (S * S) + q) * O
    tl.store(out + to[:, None] + o[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    landed, slots, gate, bias, resting, null, y, own_out, M, STEP,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, REACH: tl.constexpr, SUM: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr, HAS_NULL: tl.constexpr,
    KEEP: tl.constexpr, FLIP: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A tile of positions of one image in the order of patches, for one expert, or for all of them under SUM.

    landed (E, B·L, (p + ks - 1)², O), STEP from expert to expert: what chosen patches give to the positions they reach,
    REACH patches away; FLIP: the other way round, as contributions of single pixels are. HAS_REST: resting (E, H·W, O),
    which every position has. HAS_NULL: null (E, O) stands where the expert did not choose. KEEP: what the gate is
    multiplied with is written down as well, row by row.
    """
    A: tl.constexpr = P * P
    R: tl.constexpr = KS // 2
    S: tl.constexpr = P + 2 * R
    SIDE: tl.constexpr = 2 * REACH + 1
    b = tl.program_id(1)
    blocks: tl.constexpr = (O + BO - 1) // BO
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    live = i < HW
    n = i // A
    a = i % A
    o = (tl.program_id(2) % blocks) * BO + tl.arange(0, BO)
    om = o < O
    lane = tl.program_id(2) // blocks
    at = pixel_of_patch(b, n, a, P, GW, HW, W)
    if SUM:
        first, last = 0, E
        at = at.to(tl.int64) * O
    else:
        first, last = lane, lane + 1
        at = (at * E + lane).to(tl.int64) * O
    found = tl.zeros((BP, BO), ACC)
    for e in range(first, last):
        own = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
        here = tl.zeros((BP, BO), ACC)
        busy = True
        if HAS_GATE:
            busy = tl.max(own, 0) >= 0
        if busy:
            base = (b * 0 + e).to(tl.int64) * STEP
            for d in range(SIDE * SIDE):
                dy = d // SIDE - REACH
                dx = d % SIDE - REACH
                ny = n // GW + dy
                nx = n % GW + dx
                there = live & (ny >= 0) & (ny < N // GW) & (nx >= 0) & (nx < GW)
                l = tl.load(slots + (b * E + e) * N + ny * GW + nx, mask=there, other=-1)
                if tl.max(l, 0) >= 0:
                    hy = a // P - dy * P + R
                    hx = a % P - dx * P + R
                    has = (l >= 0) & (hy >= 0) & (hy < S) & (hx >= 0) & (hx < S)
                    h = hy * S + hx
                    if FLIP:
                        h = S * S - 1 - h
                    row = base + ((b * L + tl.maximum(l, 0)) * (S * S) + h).to(tl.int64) * O
                    here += tl.load(landed + row[:, None] + o[None, :], mask=has[:, None] & om[None, :], other=0).to(
                        ACC
                    )
            if HAS_REST:
                rest = resting + (e * HW + i)[:, None] * O + o[None, :]
                here += tl.load(rest, mask=live[:, None] & om[None, :], other=0).to(ACC)
            if HAS_BIAS:
                here += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_NULL:
                nothing = tl.load(null + e * O + o, mask=om, other=0).to(ACC)
                here = tl.where((own >= 0)[:, None], here, nothing[None, :])
            if KEEP:
                to = (e * M + (b * L + tl.maximum(own, 0)) * A + a).to(tl.int64) * O
                mask = (own >= 0)[:, None] & om[None, :]
                tl.store(own_out + to[:, None] + o[None, :], here.to(own_out.dtype.element_ty), mask=mask)
            if HAS_GATE:
                g = tl.load(gate + (b * E + e) * L + own, mask=own >= 0, other=0).to(ACC)
                here = tl.where((own >= 0)[:, None], here * g[:, None], 0.0)
        found += here
    tl.store(y + at[:, None] + o[None, :], found.to(y.dtype.element_ty), mask=live[:, None] & om[None, :])


@triton.jit
def spread_kernel(
    grad, index, slots, gate, out, M, M1, FIRST,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ALONE: tl.constexpr, SUM: tl.constexpr,
    HAS_GATE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Rows of experts from FIRST on; those from M on are zeros."""
    R: tl.constexpr = KS // 2
    e = FIRST + tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    b, _l, _a, used, sy, sx = pixel_of_row(m, e, M, index, E, L, P, GW)
    ours = (tl.minimum(m, M - 1) // (L * P * P)) * E + e
    to = (tl.program_id(1) * M1 + m).to(tl.int64) * (KS * KS * O)
    for t in range(KS * KS):
        qy = sy + R - t // KS
        qx = sx + R - t % KS
        inside = used & (qy >= 0) & (qy < H) & (qx >= 0) & (qx < W)
        if ALONE:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        if HAS_GATE:
            # Looked up at clamped places and without masks: with them Triton 3.6 fails to compile some tiles.
            near = (tl.minimum(tl.maximum(qy, 0), H - 1) // P) * GW + tl.minimum(tl.maximum(qx, 0), W - 1) // P
            own = tl.load(slots + ours * N + near)
            g = tl.load(gate + ours * L + tl.maximum(own, 0)).to(ACC)
        at = b * HW + qy * W + qx
        if not SUM:
            at = at * E + e
        at = at.to(tl.int64) * O
        v = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None] & om[None, :], other=0)
        if HAS_GATE:
            v = tl.where((own >= 0)[:, None], v.to(ACC) * g[:, None], 0.0)
        tl.store(out + (to + t * O)[:, None] + o[None, :], v.to(out.dtype.element_ty),
                 mask=(m < M1)[:, None] & om[None, :])  # fmt: skip


@triton.jit
def gated_kernel(
    grad, own, index, gate, bias, dots_out, rows_out, sums_out, M, M1, OWN_ROWS,
    STEP: tl.constexpr, E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, SUM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr,
    DOTS: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Rows of an expert, each a position with a gate on what comes out.

    DOTS: ⟨gradient, what the gate is multiplied with⟩, place by place (B, E, L, p²): ``own`` (E, OWN_ROWS, O), and with
    HAS_BIAS and HAS_REST the bias and row M. ROWS: gate · gradient, row by row, the first O of (E, M1, STEP). SUMS: of
    these, over a tile's rows (tiles, E, O).
    """
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, a, used, qy, qx = pixel_of_row(m, e, M, index, E, L, P, GW)
    at = b * HW + qy * W + qx
    if not SUM:
        at = at * E + e
    at = at.to(tl.int64) * O
    place = (b * E + e) * L + l
    g = tl.load(gate + place, mask=used, other=0).to(ACC)
    dots = tl.zeros((BM,), ACC)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        om = o < O
        v = tl.load(grad + at[:, None] + o[None, :], mask=used[:, None] & om[None, :], other=0).to(ACC)
        if DOTS:
            row = (e * OWN_ROWS + m).to(tl.int64) * O
            u = tl.load(own + row[:, None] + o[None, :], mask=used[:, None] & om[None, :], other=0).to(ACC)
            if HAS_BIAS:
                u += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_REST:
                u += tl.load(own + (e * OWN_ROWS + M).to(tl.int64) * O + o, mask=om, other=0).to(ACC)[None, :]
            dots += tl.sum(u * v, 1)
        v = v * g[:, None]
        if ROWS:
            to = (e * M1 + m).to(tl.int64) * STEP
            tl.store(rows_out + to[:, None] + o[None, :], v.to(rows_out.dtype.element_ty),
                     mask=(m < M1)[:, None] & om[None, :])  # fmt: skip
        if SUMS:
            tl.store(sums_out + (tl.program_id(0) * E + e) * O + o, tl.sum(v, 0), mask=om)
    if DOTS:
        tl.store(dots_out + place * A + a, dots, mask=m < M)


def combine(
    contributions: Tensor,
    sizes: Sizes,
    slots: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    landing: Landing,
    *,
    resting: Tensor | None = None,
    null: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The map (B, H, W, lanes·O) of contributions (E, M1, ks²·O), and with ``keep`` its ungated rows (E, M, O).

    ``resting``: as `resting_map` gives it, bias included.
    """
    E, _, K = contributions.shape
    ks, p = landing.kernel, sizes.p
    O = K // ks**2
    lanes = 1 if landing.summed else E
    y = torch.empty(sizes.B, sizes.H, sizes.W, lanes * O, dtype=contributions.dtype, device=contributions.device)
    own = torch.empty(E, sizes.M, O, dtype=y.dtype, device=y.device) if keep else None
    HW, constants = sizes.H * sizes.W, sizes.constants()
    if resting is not None:
        bias = None
    landed = landed_patches(contributions, sizes, ks, O) if ks > 1 and p > 1 else contributions
    rule = (power_of_2(HW, most=32), whole_blocks(O, 32) if ks == 1 else power_of_2(O, most=32), 2 if ks == 1 else 1)
    BP, BO, number = tile("combine", rule, HW, O, ks, p, E, sizes.L, lanes, y.element_size())
    combine_kernel[(ceil(HW, BP), sizes.B, lanes * ceil(O, BO))](
        landed, slots, gate, bias, resting, null, y, own, sizes.M, landed.stride(0),
        O=O, KS=ks, N=sizes.N, REACH=0 if landing.alone else ceil(ks // 2, p), SUM=landing.summed,
        HAS_GATE=gate is not None, HAS_BIAS=bias is not None, HAS_REST=resting is not None,
        HAS_NULL=null is not None, KEEP=keep, FLIP=ks > 1 and p == 1, ACC=acc(wide(y.dtype)), BP=BP, BO=BO,
        **constants, **warps(number),
    )  # fmt: skip
    return y, own


def landed_patches(contributions: Tensor, sizes: Sizes, kernel: int, O: int) -> Tensor:
    """(E, B·L, (p + ks - 1)², O): contributions added up, patch by patch."""
    reached = sizes.p + kernel - 1
    patches = sizes.B * sizes.L
    out = torch.empty(sizes.E, patches, reached**2, O, dtype=contributions.dtype, device=contributions.device)
    BO = power_of_2(O, most=32)
    rule = (power_of_2(patches, most=512 // BO), BO, 4)
    BK, BO, number = tile("fold", rule, patches, O, kernel, sizes.p, sizes.E, out.element_size())
    fold_kernel[(ceil(patches, BK) * reached**2 * ceil(O, BO), sizes.E)](
        contributions, out, patches, contributions.shape[1], O=O, P=sizes.p, KS=kernel, ACC=acc(wide(out.dtype)), BK=BK,
        BO=BO, **warps(number),
    )  # fmt: skip
    return out


def spread(
    grad: Tensor,
    sizes: Sizes,
    index: Tensor,
    slots: Tensor,
    gate: Tensor | None,
    landing: Landing,
    rows: int,
    experts: range,
) -> Tensor:
    """Gradient of some experts' contributions (…, M1, ks²·O) from that of the map (B, H, W, lanes·O)."""
    O = grad.shape[3] // (1 if landing.summed else sizes.E)
    out = torch.empty(len(experts), rows, landing.kernel**2 * O, dtype=grad.dtype, device=grad.device)
    BM, BO, number = tile(
        "spread", (64, power_of_2(O, most=32), 4), sizes.M, O, landing.kernel, sizes.p, grad.element_size()
    )
    spread_kernel[(ceil(rows, BM), len(experts), ceil(O, BO))](
        grad, index, slots, gate, out, sizes.M, rows, experts.start,
        O=O, KS=landing.kernel, N=sizes.N, H=sizes.H, ALONE=landing.alone, SUM=landing.summed,
        HAS_GATE=gate is not None, ACC=acc(wide(grad.dtype)), BM=BM, BO=BO, **sizes.constants(), **warps(number),
    )  # fmt: skip
    return out


def gated_gradients(
    grad: Tensor,
    own: Tensor | None,
    sizes: Sizes,
    index: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    landing: Landing,
    *,
    rest: bool,
    rows: int | None,
    sums: bool,
    beside: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of gates on the output: their gradient (B, E, L, p²) if ``own`` is given, gated rows (E, M1, O), the bias's.

    ``own`` (E, …, O) is what gates are multiplied with, but for the bias, and for row M under ``rest``. So many columns
    ``beside`` a row are left for others to fill.
    """
    O = grad.shape[3] // (1 if landing.summed else sizes.E)
    full = wide(grad.dtype)
    BM, BO, number = tile("gated", (32, whole_blocks(O, 64), 4), sizes.M, O, sizes.p, grad.element_size())
    tiles = ceil(sizes.M if rows is None else rows, BM)
    dots = None if own is None else torch.empty(*index.shape, sizes.p**2, dtype=full, device=grad.device)
    gated = None if rows is None else torch.empty(sizes.E, rows, O + beside, dtype=grad.dtype, device=grad.device)
    summed = torch.empty(tiles, sizes.E, O, dtype=full, device=grad.device) if sums else None
    gated_kernel[(tiles, sizes.E)](
        grad, own, index, gate, bias, dots, gated, summed, sizes.M, rows or sizes.M, 0 if own is None else own.shape[1],
        STEP=O + beside, O=O, SUM=landing.summed, HAS_BIAS=bias is not None, HAS_REST=rest, DOTS=own is not None,
        ROWS=rows is not None, SUMS=sums, ACC=acc(full), BM=BM, BO=BO, **sizes.constants(), **warps(number),
    )  # fmt: skip
    return dots, gated, None if summed is None else total(summed, full)


def taps_of(weight: Tensor) -> Tensor:
    """Kernels (E, O, C, ks, ks) as matrices (E, ks²·O, C)."""
    E, O, C, ks, _ = weight.shape
    if ks == 1:
        return weight.reshape(E, O, C).contiguous()
    if taps_first(weight):
        return weight.permute(0, 3, 4, 1, 2).reshape(E, ks * ks * O, C)
    out = torch.empty(E, ks * ks * O, C, dtype=weight.dtype, device=weight.device)
    _transpose(weight if channels_last(weight) else weight.contiguous(), out, back=False)
    return out


def weight_of(taps: Tensor, like: Tensor) -> Tensor:
    """And back: (E, ks²·O, C) as (E, O, C, ks, ks), laid out as other kernels are."""
    E, O, C, ks, _ = like.shape
    if ks == 1:
        return taps.view(like.shape)
    if taps_first(like):
        return taps.view(E, ks, ks, O, C).permute(0, 3, 4, 1, 2)
    out = laid_out(like, taps.dtype)
    _transpose(out, taps, back=True)
    return out


def _transpose(weight: Tensor, taps: Tensor, *, back: bool) -> None:
    E, O, C, ks, _ = weight.shape
    BC = power_of_2(C, most=128)
    taps_kernel[(E * O, ceil(C, BC))](
        weight, taps, O=O, C=C, A=ks**2, LAST=channels_last(weight), BACK=back, BA=power_of_2(ks**2), BC=BC, **warps(4)
    )


def whole_blocks(channels: int, most: int) -> int:
    """A tile side that divides the channels, if one of 16 or more does."""
    side = channels & -channels
    return min(side, most) if side >= 16 else power_of_2(channels, most=most)
