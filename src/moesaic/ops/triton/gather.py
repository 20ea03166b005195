"""Kernels between a map and the rows of pixels that experts chose.

gather_kernel     x → values, with gate and norm applied on the way
collect_kernel    rows → map: of each pixel, its owners' rows summed
patches_kernel    the same for perceptrons' answers under ``combine="sum"``, with gate and bias
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
from moesaic.ops.triton.launch import Sizes, acc, ceil, pixel_of_patch, power_of_2, warps, wide
from moesaic.ops.triton.operands import RoutedMap

__all__ = ["affine", "collect", "collect_tile", "gather", "pixel_of_row", "sum_of_owners"]


@triton.jit
def pixel_of_row(m, e, M, index, E: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr):
    """Of an expert's rows: image, slot, place in the patch, whether it is used, and where on the map it is."""
    A: tl.constexpr = P * P
    b = m // (L * A)
    l = (m // A) % L
    a = m % A
    n = tl.load(index + (b * E + e) * L + l, mask=m < M, other=-1).to(tl.int32)
    used = n >= 0
    n = tl.where(used, n, 0)
    y = (n // GW) * P + a // P
    x = (n % GW) * P + a % P
    return b, l, a, used, y, x


@triton.jit
def affine(weight, bias, mean, var, eps, at, mask, ACC: tl.constexpr):
    """The norm as scale · value + shift."""
    scale = tl.load(weight + at, mask=mask, other=0).to(ACC) * tl.rsqrt(
        tl.load(var + at, mask=mask, other=1).to(ACC) + eps
    )
    shift = tl.load(bias + at, mask=mask, other=0).to(ACC) - tl.load(mean + at, mask=mask, other=0).to(ACC) * scale
    return scale, shift


@triton.jit
def gather_kernel(
    x, index, gate, weight, bias, mean, var, out, eps, M, M1, FIRST,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, CENTRE: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rows of experts from FIRST on. CENTRE: less what a position has that was not chosen; row M is that."""
    e = FIRST + tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, l, _a, used, py, px = pixel_of_row(m, e, M, index, E, L, P, GW)
    at = (b * HW + py * W + px).to(tl.int64) * C
    to = (tl.program_id(1) * M1 + m).to(tl.int64) * C
    live = m < M1
    if HAS_GATE:
        g = tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        v = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0)
        if HAS_GATE or HAS_NORM:
            v = v.to(ACC)
        if HAS_GATE:
            v = v * g[:, None]
        if HAS_NORM:
            scale, shift = affine(weight, bias, mean, var, eps, e * C + c, cm, ACC)
            rest = tl.maximum(shift, 0.0)[None, :]
            v = tl.maximum(v * scale[None, :] + shift[None, :], 0.0)
            if CENTRE:
                v = tl.where(used[:, None], v - rest, 0.0)
            v = tl.where((m == M)[:, None], rest, v)
        tl.store(out + to[:, None] + c[None, :], v.to(out.dtype.element_ty), mask=live[:, None] & cm[None, :])


@triton.jit
def collect_kernel(
    grad, x, owners, owned, gate, router_grad, kernels, norm, out, grad_gate, B, M1, FIRST, LAST,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, STATS: tl.constexpr,
    HAS_ROUTER: tl.constexpr, ALL: tl.constexpr, MORE: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One patch, BC of its channels: the gradient of pixels from owners FIRST to LAST, and of gates on their inputs.

    The latter in parts (B, E, L, blocks of channels).

    Through the norm a gradient g becomes g·[active]·scale + lift + tilt·u, the last two through the statistics;
    ``norm`` (4, E, C) holds scale, shift, lift and tilt. With HAS_ROUTER the gradient of the patch's score comes back
    through the router's kernel. ALL: there are no other experts. MORE: out has others' gradients already.
    """
    A: tl.constexpr = P * P
    patch = tl.program_id(0)
    b = patch // N
    n = patch % N
    a = tl.arange(0, BP)
    live = a < A
    at = pixel_of_patch(b, n, a, P, GW, HW, W).to(tl.int64) * C
    number = tl.arange(0, BE)
    count = tl.load(owned + patch)
    owner = tl.load(owners + patch * E + number, mask=number < count, other=-1)
    mine = owner >= 0
    if not ALL:
        mine = mine & (owner // L >= FIRST) & (owner // L < LAST)
    busy = True
    if MORE:
        busy = tl.max(mine.to(tl.int32), 0) > 0
    if busy:
        dots = tl.zeros((BE,), ACC)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        cm = c < C
        mask = live[:, None] & cm[None, :]
        found = tl.zeros((BP, BC), ACC)
        if MORE:
            found += tl.load(out + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        if HAS_GATE or HAS_NORM:
            xv = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        after = tl.load(owners + patch * E)  # asked for before they are needed, and not used if there are none
        for i in range(count):
            taken = after
            after = tl.load(owners + patch * E + i + 1, mask=i + 1 < count, other=0)
            e = taken // L
            ours = True
            if not ALL:
                ours = (e >= FIRST) & (e < LAST)
            if ours:
                place = (b * E + e) * L + taken % L
                row = ((e - FIRST).to(tl.int64) * M1 + (b * L + taken % L) * A + a) * C
                gv = tl.load(grad + row[:, None] + c[None, :], mask=mask, other=0).to(ACC)
                if HAS_GATE:
                    g = tl.load(gate + place).to(ACC)
                if HAS_NORM:
                    scale = tl.load(norm + e * C + c, mask=cm, other=0)
                    shift = tl.load(norm + (E + e) * C + c, mask=cm, other=0)
                    u = xv
                    if HAS_GATE:
                        u = xv * g
                    gv = tl.where(u * scale[None, :] + shift[None, :] > 0, gv * scale[None, :], 0.0)
                    if STATS:
                        lift = tl.load(norm + (2 * E + e) * C + c, mask=cm, other=0)
                        tilt = tl.load(norm + (3 * E + e) * C + c, mask=cm, other=0)
                        gv += lift[None, :] + tilt[None, :] * u
                if HAS_GATE:
                    dots += tl.where(number == i, tl.sum(gv * xv), 0.0)
                    found += gv * g
                else:
                    found += gv
                if HAS_ROUTER:
                    s = tl.load(router_grad + place).to(ACC)
                    w = tl.load(kernels + (e * A + a)[:, None] * C + c[None, :], mask=mask, other=0).to(ACC)
                    found += s * w
        tl.store(out + at[:, None] + c[None, :], found.to(out.dtype.element_ty), mask=mask)
        if HAS_GATE:
            to = ((b * E + owner // L) * L + owner % L) * tl.num_programs(1) + tl.program_id(1)
            tl.store(grad_gate + to, dots, mask=mine)


@triton.jit
def patches_kernel(
    rows, owners, owned, gate, bias, null, out, B, M1,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NULL: tl.constexpr,
    ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One patch of the sum over experts: its owners' rows (E, M1, O), and what the others answer to nothing.

    HAS_NULL: null (E, O) is that answer. The sum of all of them, less the owners', counts.
    """
    A: tl.constexpr = P * P
    patch = tl.program_id(0)
    b = patch // N
    n = patch % N
    a = tl.arange(0, BP)
    live = a < A
    at = pixel_of_patch(b, n, a, P, GW, HW, W).to(tl.int64) * O
    count = tl.load(owned + patch)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        om = o < O
        mask = live[:, None] & om[None, :]
        found = tl.zeros((BP, BO), ACC)
        if HAS_NULL:
            resting = tl.zeros((BO,), ACC)
            for e in range(E):
                resting += tl.load(null + e * O + o, mask=om, other=0).to(ACC)
            found += resting[None, :]
        for i in range(count):
            owner = tl.load(owners + patch * E + i)
            e = owner // L
            row = (e.to(tl.int64) * M1 + (b * L + owner % L) * A + a) * O
            v = tl.load(rows + row[:, None] + o[None, :], mask=mask, other=0).to(ACC)
            if HAS_BIAS:
                v += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_GATE:
                v = v * tl.load(gate + (b * E + e) * L + owner % L).to(ACC)
            if HAS_NULL:
                v -= tl.load(null + e * O + o, mask=om, other=0).to(ACC)[None, :]
            found += v
        tl.store(out + at[:, None] + o[None, :], found.to(out.dtype.element_ty), mask=mask)


def gather(routed: RoutedMap, dtype: torch.dtype, *, centre: bool, rest: bool, experts: range | None = None) -> Tensor:
    """Values (E, M1, C) of the selected pixels, of some experts or of all.

    ``rest``: with the row of positions that were not selected. ``centre``: that row is subtracted from the others.
    """
    sizes, x, gate, norm, patch_size = routed.sizes, routed.x, routed.input_gate, routed.norm, routed.options.patch_size
    experts = range(sizes.E) if experts is None else experts
    M1 = sizes.rows(rest)
    values = torch.empty(len(experts), M1, sizes.C, dtype=dtype, device=x.device)
    n = norm
    rule = (16, power_of_2(sizes.C, most=128), 4)
    BM, BC, number = tile("gather", rule, sizes.M, sizes.C, patch_size, norm is not None, x.element_size())
    gather_kernel[(ceil(M1, BM), len(experts))](
        x, routed.index, gate, n and n.weight, n and n.bias, n and n.mean, n and n.var, values, n.eps if n else 0.0,
        sizes.M, M1, experts.start, C=sizes.C, HAS_GATE=gate is not None, HAS_NORM=n is not None, CENTRE=centre,
        ACC=acc(wide(x.dtype)), BM=BM, BC=BC, **sizes.constants(), **warps(number),
    )  # fmt: skip
    return values


def collect(
    grad: Tensor,
    routed: RoutedMap,
    owners: tuple[Tensor, Tensor],
    grad_gate: Tensor | None,
    norm: Tensor | None,
    router: tuple[Tensor, Tensor] | None,
    experts: range,
    base: Tensor | None,
) -> Tensor:
    """Gradient of x from that of some experts' values (…, M1, C), added to ``base``; fills in ``grad_gate``.

    ``norm``: scale and shift (2, E, C), and in training lift and tilt, as `norm_gradients` gives them. ``router``: the
    gradient of selected patches' scores (B, E, L) and the kernels (E, p², C) it goes back through.
    """
    sizes, x, gate = routed.sizes, routed.x, routed.input_gate
    out = torch.empty_like(x) if base is None else base
    scores, kernels = router or (None, None)
    BP = power_of_2(sizes.p**2)
    BC, number = collect_tile(sizes, norm is not None, gate is not None, x)
    collect_kernel[(sizes.B * sizes.N, ceil(sizes.C, BC))](
        grad, x, *owners, gate, scores, kernels, norm, out, grad_gate, sizes.B, grad.shape[1],
        experts.start, experts.stop, C=sizes.C, N=sizes.N, HAS_GATE=gate is not None, HAS_NORM=norm is not None,
        STATS=norm is not None and len(norm) == 4, HAS_ROUTER=router is not None, ALL=len(experts) == sizes.E,
        MORE=base is not None, ACC=acc(wide(x.dtype)), BP=BP, BC=BC, BE=power_of_2(sizes.E),
        **sizes.constants(), **warps(number),
    )  # fmt: skip
    return out


def collect_tile(sizes: Sizes, norm: bool, gate: bool, x: Tensor) -> tuple[int, int]:
    """Channels of a program of `collect`, and warps."""
    BP = power_of_2(sizes.p**2)
    BC = power_of_2(sizes.C, most=max(32, min(1024, 2048 // BP)))
    rule = (BC, _warps(BP * BC) if BP == 1 else 2)
    BC, number = tile("collect", rule, sizes.C, sizes.p, sizes.E, norm, gate, x.element_size())
    return BC, number


def sum_of_owners(
    rows: Tensor,
    sizes: Sizes,
    owners: tuple[Tensor, Tensor],
    gate: Tensor | None,
    bias: Tensor | None,
    null: Tensor | None,
) -> Tensor:
    """The map (B, H, W, O) of rows (E, M1, O), summed over experts; see `patches_kernel`."""
    O = rows.shape[2]
    out = torch.empty(sizes.B, sizes.H, sizes.W, O, dtype=rows.dtype, device=rows.device)
    BP = power_of_2(sizes.p**2)
    BO = power_of_2(O, most=max(32, min(1024, 2048 // BP)))
    patches_kernel[(sizes.B * sizes.N,)](
        rows, *owners, gate, bias, null, out, sizes.B, rows.shape[1], O=O, N=sizes.N, HAS_GATE=gate is not None,
        HAS_BIAS=bias is not None, HAS_NULL=null is not None, ACC=acc(wide(rows.dtype)), BP=BP, BO=BO,
        **sizes.constants(), **warps(_warps(BP * BO)),
    )  # fmt: skip
    return out


def _warps(elements: int) -> int:
    return 1 if elements < 2048 else 4 if elements < 8192 else 8
