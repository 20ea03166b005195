"""Scatter: from contributions of selected pixels to the map, and back.

    y[b, q, e] = gate · (Σ_t contributions[e, row(q - t), t] + background[e, q] or bias[e])
    grad_contributions[e, m, t] = gate · grad_y[b, pixel(m) + t, e]

Layouts: contributions (E, M1, ks²·O), row m a selected pixel, M = B·L·p² of them and row M the background; y (B, H, W,
E·O), or (B, H, W, O) where experts are summed; background (E, H·W, O) in the order of patches. Each position of y looks
up which selected patches reach it (``slots``), so every element is written once and no atomics are needed.

    transpose_taps_kernel          weights (E, O, C, ks, ks) ↔ taps (E, ks²·O, C)
    fold_kernel                    contributions → what a selected patch adds to the positions around it
    scatter_kernel                 that → y, with background, bias and gate
    scatter_backward_kernel        gradient of y → gradient of contributions
    output_gate_backward_kernel    gradient of y → gradients of output gates, bias and 1×1 contributions
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.gather import pixel_of_row
from moesaic.ops.triton.launch import (
    PatchDims,
    acc_dtype,
    ceil_div,
    num_warps,
    pixel_of_patch,
    power_of_2,
    sum_splits,
    tl_acc,
)
from moesaic.ops.weight_layout import channels_last, empty_weight_like, is_taps_first

__all__ = [
    "ScatterSpec",
    "dividing_tile",
    "fold_patches",
    "output_gate_backward",
    "scatter",
    "scatter_backward",
    "taps_to_weight",
    "weight_to_taps",
]


@dataclass(frozen=True)
class ScatterSpec:
    """How contributions are added to a map."""

    kernel_size: int
    isolated: bool
    """A convolution does not see across the borders of a patch."""
    sum_experts: bool
    """Experts are summed instead of concatenated."""


@cached_launch
@triton.jit
def transpose_taps_kernel(
    weight, taps,
    O: tl.constexpr, C: tl.constexpr, A: tl.constexpr, LAST: tl.constexpr, INVERSE: tl.constexpr, BA: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Weight (E, O, C, A), or (E, O, A, C) with channels LAST, to taps (E, A, O, C), or INVERSE."""
    eo = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    a = tl.arange(0, BA)
    by_channel = weight + (eo * C + c)[:, None].to(tl.int64) * A + a[None, :]
    by_place = weight + (eo * A + a)[:, None].to(tl.int64) * C + c[None, :]
    by_tap = taps + ((eo // O * A + a) * O + eo % O)[:, None].to(tl.int64) * C + c[None, :]
    mask = (a < A)[:, None] & (c < C)[None, :]
    if LAST:
        if INVERSE:
            tl.store(by_place, tl.load(by_tap, mask=mask, other=0), mask=mask)
        else:
            tl.store(by_tap, tl.load(by_place, mask=mask, other=0), mask=mask)
    elif INVERSE:
        tl.store(by_channel, tl.trans(tl.load(by_tap, mask=mask, other=0)), mask=tl.trans(mask))
    else:
        tl.store(by_tap, tl.trans(tl.load(by_channel, mask=tl.trans(mask), other=0)), mask=mask)


@cached_launch
@triton.jit
def fold_kernel(
    contributions, out, PATCHES, M1,
    O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """What selected patches add to one of the (p + ks - 1)² positions around each: the sum of their contributions."""
    S: tl.constexpr = P + KS - 1
    blocks: tl.constexpr = (O + BO - 1) // BO
    q = tl.program_id(0) // blocks % (S * S)
    o = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
    k = tl.program_id(0) // (S * S * blocks) * BK + tl.arange(0, BK)
    e = tl.program_id(1)
    mask = (k < PATCHES)[:, None] & (o < O)[None, :]
    first = contributions + ((e * M1 + k * (P * P)).to(tl.int64) * (KS * KS * O))[:, None] + o[None, :]
    acc = tl.zeros((BK, BO), ACC)
    for t in tl.static_range(KS * KS):
        ay = q // S + (t // KS - KS + 1)
        ax = q % S + (t % KS - KS + 1)
        inside = (ay >= 0) & (ay < P) & (ax >= 0) & (ax < P)
        acc += tl.load(first + ((ay * P + ax) * (KS * KS) + t) * O, mask=mask & inside, other=0).to(ACC)
    to = ((e * PATCHES + k).to(tl.int64) * (S * S) + q) * O
    tl.store(out + to[:, None] + o[None, :], acc.to(out.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def scatter_kernel(
    folded, slots, gate, bias, background, unselected, y, ungated_out, M, STEP,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, W: tl.constexpr, NEIGHBOURS: tl.constexpr, SUM_EXPERTS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BACKGROUND: tl.constexpr, HAS_UNSELECTED: tl.constexpr,
    SAVE: tl.constexpr, FLIP: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A tile of positions of one image in the order of patches, for one expert, or for all of them under SUM_EXPERTS.

    folded (E, B·L, (p + ks - 1)², O), STEP from expert to expert: what selected patches add to the positions around
    them, up to NEIGHBOURS patches away; FLIP: in reverse order, as contributions of single pixels are. HAS_BACKGROUND:
    background (E, H·W, O) is added everywhere. HAS_UNSELECTED: unselected (E, O) is the output where the expert did not
    select the patch. SAVE: what the gate multiplies is written as well, row by row.
    """
    A: tl.constexpr = P * P
    R: tl.constexpr = KS // 2
    S: tl.constexpr = P + 2 * R
    SIDE: tl.constexpr = 2 * NEIGHBOURS + 1
    tiles: tl.constexpr = (HW + BP - 1) // BP
    blocks: tl.constexpr = (O + BO - 1) // BO
    b = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    live = i < HW
    n = i // A
    a = i % A
    o = (tl.program_id(1) % blocks) * BO + tl.arange(0, BO)
    om = o < O
    lane = tl.program_id(1) // blocks
    at = pixel_of_patch(b, n, a, P, GW, HW, W)
    if SUM_EXPERTS:
        first, last = 0, E
        at = at.to(tl.int64) * O
    else:
        first, last = lane, lane + 1
        at = (at * E + lane).to(tl.int64) * O
    acc = tl.zeros((BP, BO), ACC)
    for e in range(first, last):
        own = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
        here = tl.zeros((BP, BO), ACC)
        any_selected = True
        if HAS_GATE:
            any_selected = tl.max(own, 0) >= 0
        if any_selected:
            base = (b * 0 + e).to(tl.int64) * STEP
            for d in range(SIDE * SIDE):
                dy = d // SIDE - NEIGHBOURS
                dx = d % SIDE - NEIGHBOURS
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
                    here += tl.load(folded + row[:, None] + o[None, :], mask=has[:, None] & om[None, :], other=0).to(
                        ACC
                    )
            if HAS_BACKGROUND:
                background_at = background + (e * HW + i)[:, None] * O + o[None, :]
                here += tl.load(background_at, mask=live[:, None] & om[None, :], other=0).to(ACC)
            if HAS_BIAS:
                here += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_UNSELECTED:
                elsewhere = tl.load(unselected + e * O + o, mask=om, other=0).to(ACC)
                here = tl.where((own >= 0)[:, None], here, elsewhere[None, :])
            if SAVE:
                to = (e * M + (b * L + tl.maximum(own, 0)) * A + a).to(tl.int64) * O
                mask = (own >= 0)[:, None] & om[None, :]
                tl.store(ungated_out + to[:, None] + o[None, :], here.to(ungated_out.dtype.element_ty), mask=mask)
            if HAS_GATE:
                g = tl.load(gate + (b * E + e) * L + own, mask=own >= 0, other=0).to(ACC)
                here = tl.where((own >= 0)[:, None], here * g[:, None], 0.0)
        acc += here
    tl.store(y + at[:, None] + o[None, :], acc.to(y.dtype.element_ty), mask=live[:, None] & om[None, :])


@cached_launch
@triton.jit
def scatter_backward_kernel(
    grad, index, slots, gate, out, M, M1, FIRST,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr,
    N: tl.constexpr, HW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ISOLATED: tl.constexpr,
    SUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
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
        if ISOLATED:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        if HAS_GATE:
            # Loaded at clamped positions instead of with masks, with which Triton 3.6 fails to compile some tiles.
            near = (tl.minimum(tl.maximum(qy, 0), H - 1) // P) * GW + tl.minimum(tl.maximum(qx, 0), W - 1) // P
            own = tl.load(slots + ours * N + near)
            g = tl.load(gate + ours * L + tl.maximum(own, 0)).to(ACC)
        at = b * HW + qy * W + qx
        if not SUM_EXPERTS:
            at = at * E + e
        at = at.to(tl.int64) * O
        v = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None] & om[None, :], other=0)
        if HAS_GATE:
            v = tl.where((own >= 0)[:, None], v.to(ACC) * g[:, None], 0.0)
        tl.store(out + (to + t * O)[:, None] + o[None, :], v.to(out.dtype.element_ty),
                 mask=(m < M1)[:, None] & om[None, :])  # fmt: skip


@cached_launch
@triton.jit
def output_gate_backward_kernel(
    grad, own, index, gate, bias, dots_out, rows_out, sums_out, M, M1, OWN_ROWS,
    STEP: tl.constexpr, E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, SUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BACKGROUND: tl.constexpr,
    GATE_DOTS: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Rows of an expert whose outputs are gated.

    GATE_DOTS: ⟨gradient, what the gate multiplies⟩, pixel by pixel (B, E, L, p²): ``own`` (E, OWN_ROWS, O), plus the
    bias with HAS_BIAS and row M with HAS_BACKGROUND. ROWS: gate · gradient, the first O columns of (E, M1, STEP). SUMS:
    sums of these over a tile's rows (tiles, E, O).
    """
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, a, used, qy, qx = pixel_of_row(m, e, M, index, E, L, P, GW)
    at = b * HW + qy * W + qx
    if not SUM_EXPERTS:
        at = at * E + e
    at = at.to(tl.int64) * O
    place = (b * E + e) * L + l
    g = tl.load(gate + place, mask=used, other=0).to(ACC)
    gate_dots = tl.zeros((BM,), ACC)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        om = o < O
        v = tl.load(grad + at[:, None] + o[None, :], mask=used[:, None] & om[None, :], other=0).to(ACC)
        if GATE_DOTS:
            row = (e * OWN_ROWS + m).to(tl.int64) * O
            u = tl.load(own + row[:, None] + o[None, :], mask=used[:, None] & om[None, :], other=0).to(ACC)
            if HAS_BIAS:
                u += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_BACKGROUND:
                u += tl.load(own + (e * OWN_ROWS + M).to(tl.int64) * O + o, mask=om, other=0).to(ACC)[None, :]
            gate_dots += tl.sum(u * v, 1)
        v = v * g[:, None]
        if ROWS:
            to = (e * M1 + m).to(tl.int64) * STEP
            tl.store(rows_out + to[:, None] + o[None, :], v.to(rows_out.dtype.element_ty),
                     mask=(m < M1)[:, None] & om[None, :])  # fmt: skip
        if SUMS:
            tl.store(sums_out + (tl.program_id(0) * E + e) * O + o, tl.sum(v, 0), mask=om)
    if GATE_DOTS:
        tl.store(dots_out + place * A + a, gate_dots, mask=m < M)


def scatter(
    contributions: Tensor,
    dims: PatchDims,
    slots: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    spec: ScatterSpec,
    *,
    background: Tensor | None = None,
    unselected: Tensor | None = None,
    save: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The map (B, H, W, lanes·O) of contributions (E, M1, ks²·O), and with ``save`` its ungated rows (E, M, O).

    ``background``: as `background_map` returns it, bias included.
    """
    E, _, K = contributions.shape
    ks, p = spec.kernel_size, dims.p
    O = K // ks**2
    lanes = 1 if spec.sum_experts else E
    y = torch.empty(dims.B, dims.H, dims.W, lanes * O, dtype=contributions.dtype, device=contributions.device)
    own = torch.empty(E, dims.M, O, dtype=y.dtype, device=y.device) if save else None
    HW, constexprs = dims.H * dims.W, dims.constexprs()
    if background is not None:
        bias = None
    folded = fold_patches(contributions, dims, ks, O) if ks > 1 and p > 1 else contributions
    rule = (power_of_2(HW, most=32), dividing_tile(O, 32) if ks == 1 else power_of_2(O, most=32), 2 if ks == 1 else 1)
    BP, BO, warps = tile("scatter", rule, HW, O, ks, p, E, dims.L, lanes, y.element_size())
    scatter_kernel[(ceil_div(HW, BP) * dims.B, lanes * ceil_div(O, BO))](
        folded, slots, gate, bias, background, unselected, y, own, dims.M, folded.stride(0), O=O, KS=ks, N=dims.N,
        NEIGHBOURS=0 if spec.isolated else ceil_div(ks // 2, p), SUM_EXPERTS=spec.sum_experts,
        HAS_GATE=gate is not None, HAS_BIAS=bias is not None, HAS_BACKGROUND=background is not None,
        HAS_UNSELECTED=unselected is not None, SAVE=save, FLIP=ks > 1 and p == 1, ACC=tl_acc(acc_dtype(y.dtype)), BP=BP,
        BO=BO, **constexprs, **num_warps(warps),
    )  # fmt: skip
    return y, own


def fold_patches(contributions: Tensor, dims: PatchDims, kernel: int, O: int) -> Tensor:
    """(E, B·L, (p + ks - 1)², O): contributions summed patch by patch."""
    side = dims.p + kernel - 1
    patches = dims.B * dims.L
    out = torch.empty(dims.E, patches, side**2, O, dtype=contributions.dtype, device=contributions.device)
    BO = power_of_2(O, most=32)
    rule = (power_of_2(patches, most=512 // BO), BO, 4)
    BK, BO, warps = tile("fold", rule, patches, O, kernel, dims.p, dims.E, out.element_size())
    fold_kernel[(ceil_div(patches, BK) * side**2 * ceil_div(O, BO), dims.E)](
        contributions, out, patches, contributions.shape[1], O=O, P=dims.p, KS=kernel, ACC=tl_acc(acc_dtype(out.dtype)),
        BK=BK, BO=BO, **num_warps(warps),
    )  # fmt: skip
    return out


def scatter_backward(
    grad: Tensor,
    dims: PatchDims,
    index: Tensor,
    slots: Tensor,
    gate: Tensor | None,
    spec: ScatterSpec,
    rows: int,
    experts: range,
) -> Tensor:
    """Gradient of some experts' contributions (…, M1, ks²·O) from that of the map (B, H, W, lanes·O)."""
    O = grad.shape[3] // (1 if spec.sum_experts else dims.E)
    out = torch.empty(len(experts), rows, spec.kernel_size**2 * O, dtype=grad.dtype, device=grad.device)
    BM, BO, warps = tile(
        "scatter_backward", (64, power_of_2(O, most=32), 4), dims.M, O, spec.kernel_size, dims.p, grad.element_size()
    )
    scatter_backward_kernel[(ceil_div(rows, BM), len(experts), ceil_div(O, BO))](
        grad, index, slots, gate, out, dims.M, rows, experts.start, O=O, KS=spec.kernel_size, N=dims.N, H=dims.H,
        ISOLATED=spec.isolated, SUM_EXPERTS=spec.sum_experts, HAS_GATE=gate is not None,
        ACC=tl_acc(acc_dtype(grad.dtype)), BM=BM, BO=BO, **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return out


def output_gate_backward(
    grad: Tensor,
    own: Tensor | None,
    dims: PatchDims,
    index: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    spec: ScatterSpec,
    *,
    background_row: bool,
    rows: int | None,
    sums: bool,
    router_columns: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of gates on the output: their gradient (B, E, L, p²) if ``own`` is given, gated rows (E, M1, O), the bias's.

    ``own`` (E, …, O) is what gates multiply, without the bias, and without row M under ``background_row``. The last
    ``router_columns`` columns of a row are left unwritten.
    """
    O = grad.shape[3] // (1 if spec.sum_experts else dims.E)
    acc_type = acc_dtype(grad.dtype)
    BM, BO, warps = tile("output_gate_backward", (32, dividing_tile(O, 64), 4), dims.M, O, dims.p, grad.element_size())
    tiles = ceil_div(dims.M if rows is None else rows, BM)
    gate_dots = None if own is None else torch.empty(*index.shape, dims.p**2, dtype=acc_type, device=grad.device)
    gated = (
        None if rows is None else torch.empty(dims.E, rows, O + router_columns, dtype=grad.dtype, device=grad.device)
    )
    summed = torch.empty(tiles, dims.E, O, dtype=acc_type, device=grad.device) if sums else None
    output_gate_backward_kernel[(tiles, dims.E)](
        grad, own, index, gate, bias, gate_dots, gated, summed, dims.M, rows or dims.M,
        0 if own is None else own.shape[1], STEP=O + router_columns, O=O, SUM_EXPERTS=spec.sum_experts,
        HAS_BIAS=bias is not None, HAS_BACKGROUND=background_row, GATE_DOTS=own is not None, ROWS=rows is not None,
        SUMS=sums, ACC=tl_acc(acc_type), BM=BM, BO=BO, **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return gate_dots, gated, None if summed is None else sum_splits(summed, acc_type)


def weight_to_taps(weight: Tensor) -> Tensor:
    """Kernels (E, O, C, ks, ks) as matrices (E, ks²·O, C)."""
    E, O, C, ks, _ = weight.shape
    if ks == 1:
        return weight.reshape(E, O, C).contiguous()
    if is_taps_first(weight):
        return weight.permute(0, 3, 4, 1, 2).reshape(E, ks * ks * O, C)
    out = torch.empty(E, ks * ks * O, C, dtype=weight.dtype, device=weight.device)
    _transpose(weight if channels_last(weight) else weight.contiguous(), out, inverse=False)
    return out


def taps_to_weight(taps: Tensor, like: Tensor) -> Tensor:
    """The inverse: (E, ks²·O, C) as (E, O, C, ks, ks), in the memory layout of ``like``."""
    E, O, C, ks, _ = like.shape
    if ks == 1:
        return taps.view(like.shape)
    if is_taps_first(like):
        return taps.view(E, ks, ks, O, C).permute(0, 3, 4, 1, 2)
    out = empty_weight_like(like, taps.dtype)
    _transpose(out, taps, inverse=True)
    return out


def _transpose(weight: Tensor, taps: Tensor, *, inverse: bool) -> None:
    E, O, C, ks, _ = weight.shape
    BC = power_of_2(C, most=128)
    transpose_taps_kernel[(E * O, ceil_div(C, BC))](
        weight,
        taps,
        O=O,
        C=C,
        A=ks**2,
        LAST=channels_last(weight),
        INVERSE=inverse,
        BA=power_of_2(ks**2),
        BC=BC,
        **num_warps(4),
    )


def dividing_tile(channels: int, most: int) -> int:
    """A tile side that divides the channels, if one of 16 or more does."""
    side = channels & -channels
    return min(side, most) if side >= 16 else power_of_2(channels, most=most)
