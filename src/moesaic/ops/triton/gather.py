"""Gather: from a map to the rows of pixels that experts selected, and back.

    values[e, m] = f_e(gate · x[pixel(e, m)]), f_e the identity or ReLU ∘ norm_e
    grad_x[q] = Σ over owners of gate · f_e'(…) · grad_values[e, row(q)] + grad_score · router

Layouts: x (B, H, W, C); values (E, M1, C), row M the background; gate (B, E, L); owners (B, N, E), e·L + l of each
expert that selected the patch, and owner_count (B, N).

    gather_kernel               x → values
    gather_backward_kernel      gradient of values → gradients of x and of input gates
    sum_over_experts_kernel     rows (E, M1, O) → map (B, H, W, O), for 1×1 experts and MLPs under ``combine="sum"``
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
from moesaic.ops.triton.launch import PatchDims, acc_dtype, ceil_div, num_warps, pixel_of_patch, power_of_2, tl_acc
from moesaic.ops.triton.operands import RoutedMap

__all__ = ["gather", "gather_backward", "gather_backward_tile", "norm_scale_shift", "pixel_of_row", "sum_over_experts"]


@triton.jit
def pixel_of_row(m, e, M, index, E: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr):
    """Of an expert's rows: image, slot, pixel of the patch, whether the slot is used, and position on the map."""
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
def norm_scale_shift(weight, bias, mean, var, eps, at, mask, ACC: tl.constexpr):
    """The norm as scale · value + shift."""
    scale = tl.load(weight + at, mask=mask, other=0).to(ACC) * tl.rsqrt(
        tl.load(var + at, mask=mask, other=1).to(ACC) + eps
    )
    shift = tl.load(bias + at, mask=mask, other=0).to(ACC) - tl.load(mean + at, mask=mask, other=0).to(ACC) * scale
    return scale, shift


@cached_launch
@triton.jit
def gather_kernel(
    x, index, gate, weight, bias, mean, var, out, eps, M, M1, FIRST,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, CENTRE: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rows of experts from FIRST on. CENTRE: the background is subtracted from the rows; row M is the background."""
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
            scale, shift = norm_scale_shift(weight, bias, mean, var, eps, e * C + c, cm, ACC)
            background_at = tl.maximum(shift, 0.0)[None, :]
            v = tl.maximum(v * scale[None, :] + shift[None, :], 0.0)
            if CENTRE:
                v = tl.where(used[:, None], v - background_at, 0.0)
            v = tl.where((m == M)[:, None], background_at, v)
        tl.store(out + to[:, None] + c[None, :], v.to(out.dtype.element_ty), mask=live[:, None] & cm[None, :])


@cached_launch
@triton.jit
def gather_backward_kernel(
    grad, x, owners, owner_count, gate, router_grad, kernels, norm, out, grad_gate, B, M1, FIRST, LAST,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, STATS: tl.constexpr,
    HAS_ROUTER: tl.constexpr, ALL: tl.constexpr, MORE: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One patch, BC of its channels: the gradient of pixels from owners FIRST to LAST, and of gates on their inputs.

    The latter in splits (B, E, L, blocks of channels).

    ``norm`` (4, E, C) holds scale, shift, offset and slope (see `norm_backward_kernel`). With HAS_ROUTER the gradient
    of the patch's score comes back through the router's kernel. ALL: these are all experts. MORE: out already has the
    gradients of other experts.
    """
    A: tl.constexpr = P * P
    patch = tl.program_id(0)
    b = patch // N
    n = patch % N
    a = tl.arange(0, BP)
    live = a < A
    at = pixel_of_patch(b, n, a, P, GW, HW, W).to(tl.int64) * C
    number = tl.arange(0, BE)
    count = tl.load(owner_count + patch)
    owner = tl.load(owners + patch * E + number, mask=number < count, other=-1)
    mine = owner >= 0
    if not ALL:
        mine = mine & (owner // L >= FIRST) & (owner // L < LAST)
    any_selected = True
    if MORE:
        any_selected = tl.max(mine.to(tl.int32), 0) > 0
    if any_selected:
        gate_dots = tl.zeros((BE,), ACC)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        cm = c < C
        mask = live[:, None] & cm[None, :]
        acc = tl.zeros((BP, BC), ACC)
        if MORE:
            acc += tl.load(out + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        if HAS_GATE or HAS_NORM:
            xv = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        after = tl.load(
            owners + patch * E
        )  # loaded one step ahead to hide the latency; unused where a patch has no owner
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
                        offset = tl.load(norm + (2 * E + e) * C + c, mask=cm, other=0)
                        slope = tl.load(norm + (3 * E + e) * C + c, mask=cm, other=0)
                        gv += offset[None, :] + slope[None, :] * u
                if HAS_GATE:
                    gate_dots += tl.where(number == i, tl.sum(gv * xv), 0.0)
                    acc += gv * g
                else:
                    acc += gv
                if HAS_ROUTER:
                    s = tl.load(router_grad + place).to(ACC)
                    w = tl.load(kernels + (e * A + a)[:, None] * C + c[None, :], mask=mask, other=0).to(ACC)
                    acc += s * w
        tl.store(out + at[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=mask)
        if HAS_GATE:
            to = ((b * E + owner // L) * L + owner % L) * tl.num_programs(1) + tl.program_id(1)
            tl.store(grad_gate + to, gate_dots, mask=mine)


@cached_launch
@triton.jit
def sum_over_experts_kernel(
    rows, owners, owner_count, gate, bias, unselected, out, B, M1,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_UNSELECTED: tl.constexpr,
    ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One patch of the sum over experts: its owners' rows (E, M1, O), and the other experts' outputs.

    HAS_UNSELECTED: the latter are unselected (E, O); their sum over all experts is taken, and the owners' subtracted.
    """
    A: tl.constexpr = P * P
    patch = tl.program_id(0)
    b = patch // N
    n = patch % N
    a = tl.arange(0, BP)
    live = a < A
    at = pixel_of_patch(b, n, a, P, GW, HW, W).to(tl.int64) * O
    count = tl.load(owner_count + patch)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        om = o < O
        mask = live[:, None] & om[None, :]
        acc = tl.zeros((BP, BO), ACC)
        if HAS_UNSELECTED:
            background = tl.zeros((BO,), ACC)
            for e in range(E):
                background += tl.load(unselected + e * O + o, mask=om, other=0).to(ACC)
            acc += background[None, :]
        for i in range(count):
            owner = tl.load(owners + patch * E + i)
            e = owner // L
            row = (e.to(tl.int64) * M1 + (b * L + owner % L) * A + a) * O
            v = tl.load(rows + row[:, None] + o[None, :], mask=mask, other=0).to(ACC)
            if HAS_BIAS:
                v += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
            if HAS_GATE:
                v = v * tl.load(gate + (b * E + e) * L + owner % L).to(ACC)
            if HAS_UNSELECTED:
                v -= tl.load(unselected + e * O + o, mask=om, other=0).to(ACC)[None, :]
            acc += v
        tl.store(out + at[:, None] + o[None, :], acc.to(out.dtype.element_ty), mask=mask)


def gather(
    routed: RoutedMap, dtype: torch.dtype, *, centre: bool, background_row: bool, experts: range | None = None
) -> Tensor:
    """Values (E, M1, C) of the selected pixels, of some experts or of all.

    ``background_row``: with a row M for positions that were not selected. ``centre``: the background is subtracted from
    the other rows.
    """
    dims, x, gate, norm, patch_size = routed.dims, routed.x, routed.input_gate, routed.norm, routed.options.patch_size
    experts = range(dims.E) if experts is None else experts
    M1 = dims.padded_rows(background_row)
    values = torch.empty(len(experts), M1, dims.C, dtype=dtype, device=x.device)
    n = norm
    rule = (16, power_of_2(dims.C, most=128), 4)
    BM, BC, warps = tile("gather", rule, dims.M, dims.C, patch_size, norm is not None, x.element_size())
    gather_kernel[(ceil_div(M1, BM), len(experts))](
        x, routed.index, gate, n and n.weight, n and n.bias, n and n.mean, n and n.var, values, n.eps if n else 0.0,
        dims.M, M1, experts.start, C=dims.C, HAS_GATE=gate is not None, HAS_NORM=n is not None, CENTRE=centre,
        ACC=tl_acc(acc_dtype(x.dtype)), BM=BM, BC=BC, **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return values


def gather_backward(
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

    ``norm``: scale and shift (2, E, C), and in training offset and slope, as `norm_gradients` gives them. ``router``:
    the gradient of selected patches' scores (B, E, L) and the kernels (E, p², C) it goes back through.
    """
    dims, x, gate = routed.dims, routed.x, routed.input_gate
    out = torch.empty_like(x) if base is None else base
    scores, kernels = router or (None, None)
    BP = power_of_2(dims.p**2)
    BC, warps = gather_backward_tile(dims, norm is not None, gate is not None, x)
    gather_backward_kernel[(dims.B * dims.N, ceil_div(dims.C, BC))](
        grad, x, *owners, gate, scores, kernels, norm, out, grad_gate, dims.B, grad.shape[1],
        experts.start, experts.stop, C=dims.C, N=dims.N, HAS_GATE=gate is not None, HAS_NORM=norm is not None,
        STATS=norm is not None and len(norm) == 4, HAS_ROUTER=router is not None, ALL=len(experts) == dims.E,
        MORE=base is not None, ACC=tl_acc(acc_dtype(x.dtype)), BP=BP, BC=BC, BE=power_of_2(dims.E),
        **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return out


def gather_backward_tile(dims: PatchDims, norm: bool, gate: bool, x: Tensor) -> tuple[int, int]:
    """Channels of a program of `gather_backward`, and warps."""
    BP = power_of_2(dims.p**2)
    BC = power_of_2(dims.C, most=max(32, min(1024, 2048 // BP)))
    rule = (BC, _warps(BP * BC) if BP == 1 else 2)
    BC, warps = tile("gather_backward", rule, dims.C, dims.p, dims.E, norm, gate, x.element_size())
    return BC, warps


def sum_over_experts(
    rows: Tensor,
    dims: PatchDims,
    owners: tuple[Tensor, Tensor],
    gate: Tensor | None,
    bias: Tensor | None,
    unselected: Tensor | None,
) -> Tensor:
    """The map (B, H, W, O) of rows (E, M1, O), summed over experts; see `sum_over_experts_kernel`."""
    O = rows.shape[2]
    out = torch.empty(dims.B, dims.H, dims.W, O, dtype=rows.dtype, device=rows.device)
    BP = power_of_2(dims.p**2)
    BO = power_of_2(O, most=max(32, min(1024, 2048 // BP)))
    sum_over_experts_kernel[(dims.B * dims.N,)](
        rows, *owners, gate, bias, unselected, out, dims.B, rows.shape[1], O=O, N=dims.N, HAS_GATE=gate is not None,
        HAS_BIAS=bias is not None, HAS_UNSELECTED=unselected is not None, ACC=tl_acc(acc_dtype(rows.dtype)), BP=BP,
        BO=BO, **dims.constexprs(), **num_warps(_warps(BP * BO)),
    )  # fmt: skip
    return out


def _warps(elements: int) -> int:
    return 1 if elements < 2048 else 4 if elements < 8192 else 8
