"""The background: what experts behind a norm output where they selected nothing, and its gradient.

    tap_outputs[e, t] = taps[e, t] · ReLU(shift[e])       background[e, q] = bias[e] + Σ_t inside tap_outputs[e, t]
    grad_tap[e, t] = Σ_b Σ_q inside grad_y[b, q, e]

Layouts: taps (E, ks²·O, C); tap_outputs (E, ks², O); background (E, H·W, O) in the order of patches; grad_y (B, H, W,
E·O), or (B, H, W, O) where experts are summed. A tap is inside where it falls on the map, and with isolated patches on
the same patch.

    background_taps_kernel    norm → tap_outputs
    background_map_kernel     tap_outputs → background
    sum_images_kernel         gradient of y, summed over images
    tap_gradient_kernel       that → gradient of tap_outputs
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.gather import norm_scale_shift
from moesaic.ops.triton.launch import (
    PatchDims,
    acc_dtype,
    ceil_div,
    num_warps,
    power_of_2,
    split_rows,
    splits_to_fill,
    sum_splits,
    tl_acc,
)
from moesaic.ops.triton.operands import NormTensors
from moesaic.ops.triton.scatter import ScatterSpec, dividing_tile

__all__ = ["background_gradients", "background_map"]


@cached_launch
@triton.jit
def background_taps_kernel(
    taps, weight, bias, mean, var, out, eps,
    K: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (E, ks²·O): taps (E, ks²·O, C) times the norm of zeros, which is rounded as the values of pixels are."""
    e = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    km = k < K
    acc = tl.zeros((BK, BC), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        _scale, shift = norm_scale_shift(weight, bias, mean, var, eps, e * C + c, cm, ACC)
        background_at = tl.where(cm, tl.maximum(shift, 0.0), 0.0).to(taps.dtype.element_ty).to(ACC)
        at = (e * K + k).to(tl.int64) * C
        acc += tl.load(taps + at[:, None] + c[None, :], mask=km[:, None] & cm[None, :], other=0).to(ACC) * background_at
    tl.store(out + e * K + k, tl.sum(acc, 1), mask=km)


@cached_launch
@triton.jit
def background_map_kernel(
    tap_outputs, bias, out,
    O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ISOLATED: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """Out (E, H·W, O), patch by patch: the sum of tap_outputs (E, ks², O) of taps that fall inside."""
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    n = i // A
    qy = (n // GW) * P + (i % A) // P
    qx = (n % GW) * P + (i % A) % P
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    acc = tl.zeros((BP, BO), ACC)
    if HAS_BIAS:
        acc += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
    for t in range(KS * KS):
        sy = qy + t // KS - KS // 2
        sx = qx + t % KS - KS // 2
        inside = (sy >= 0) & (sy < H) & (sx >= 0) & (sx < W)
        if ISOLATED:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        tap_output = tl.load(tap_outputs + (e * (KS * KS) + t) * O + o, mask=om, other=0)
        acc += tl.where(inside[:, None], tap_output[None, :], 0.0)
    tl.store(out + (e * HW + i)[:, None] * O + o[None, :], acc, mask=(i < HW)[:, None] & om[None, :])


@cached_launch
@triton.jit
def sum_images_kernel(
    grad, slots, gate, out, B, CHUNK,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, SUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr, ELSEWHERE: tl.constexpr,
    FLAT: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Sums over a chunk of images: out (chunks, E, H·W, O); FLAT, over a tile of positions too: (chunks·tiles, E, O).

    HAS_GATE: times the gate, where the expert selected the patch. ELSEWHERE: only where it did not.
    """
    e = tl.program_id(1)
    blocks: tl.constexpr = (O + BO - 1) // BO
    s = tl.program_id(2) // blocks
    o = (tl.program_id(2) % blocks) * BO + tl.arange(0, BO)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    live = q < HW
    mask = live[:, None] & (o < O)[None, :]
    n = (q // W // P) * GW + (q % W) // P
    acc = tl.zeros((BP, BO), ACC)
    for b in range(s * CHUNK, tl.minimum((s + 1) * CHUNK, B)):
        at = b * HW + q
        if not SUM_EXPERTS:
            at = at * E + e
        at = at.to(tl.int64) * O
        if HAS_GATE:
            own = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
            has = own >= 0
            g = tl.load(gate + (b * E + e) * L + own, mask=has, other=0).to(ACC)
            v = tl.load(grad + at[:, None] + o[None, :], mask=mask & has[:, None], other=0).to(ACC)
            acc += v * g[:, None]
        elif ELSEWHERE:
            own = tl.load(slots + (b * E + e) * N + n, mask=live, other=0)
            acc += tl.load(grad + at[:, None] + o[None, :], mask=mask & (own < 0)[:, None], other=0).to(ACC)
        else:
            acc += tl.load(grad + at[:, None] + o[None, :], mask=mask, other=0).to(ACC)
    if FLAT:
        part = (s * tl.num_programs(0) + tl.program_id(0)) * E + e
        tl.store(out + part * O + o, tl.sum(acc, 0), mask=o < O)
    else:
        to = ((s * E + e) * HW + q).to(tl.int64) * O
        tl.store(out + to[:, None] + o[None, :], acc, mask=mask)


@cached_launch
@triton.jit
def tap_gradient_kernel(
    sums, out, S,
    E: tl.constexpr, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, HW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ISOLATED: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Out (E, ks², O): sums (S, E, H·W, O) over the positions at which a tap falls inside."""
    e = tl.program_id(0)
    t = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    acc = tl.zeros((BP, BO), ACC)
    for q0 in range(0, HW, BP):
        q = q0 + tl.arange(0, BP)
        qy = q // W
        qx = q % W
        sy = qy + t // KS - KS // 2
        sx = qx + t % KS - KS // 2
        inside = (q < HW) & (sy >= 0) & (sy < H) & (sx >= 0) & (sx < W)
        if ISOLATED:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        for s in range(S):
            at = ((s * E + e) * HW + q).to(tl.int64) * O
            acc += tl.load(sums + at[:, None] + o[None, :], mask=inside[:, None] & om[None, :], other=0)
    tl.store(out + (e * (KS * KS) + t) * O + o, tl.sum(acc, 0), mask=om)


def background_map(taps: Tensor, norm: NormTensors, dims: PatchDims, bias: Tensor | None, spec: ScatterSpec) -> Tensor:
    """(E, H·W, O) in the order of patches: the experts' outputs where they selected nothing, bias included."""
    E, K, C = taps.shape
    HW, O, acc_type = dims.H * dims.W, K // spec.kernel_size**2, acc_dtype(taps.dtype)
    tap_outputs = torch.empty(E, K, dtype=acc_type, device=taps.device)
    BK, BC = power_of_2(K, most=16), power_of_2(C, most=128)
    background_taps_kernel[(ceil_div(K, BK), E)](
        taps, norm.weight, norm.bias, norm.mean, norm.var, tap_outputs, norm.eps, K=K, C=C, ACC=tl_acc(acc_type), BK=BK,
        BC=BC, **num_warps(4),
    )  # fmt: skip
    out = torch.empty(E, HW, O, dtype=acc_type, device=taps.device)
    constexprs = dims.constexprs()
    del constexprs["E"], constexprs["L"]
    BP, BO = power_of_2(HW, most=16), power_of_2(O, most=64)
    background_map_kernel[(ceil_div(HW, BP), E, ceil_div(O, BO))](
        tap_outputs, bias, out, O=O, KS=spec.kernel_size, H=dims.H, ISOLATED=spec.isolated, HAS_BIAS=bias is not None,
        ACC=tl_acc(acc_type), BP=BP, BO=BO, **constexprs, **num_warps(1),
    )  # fmt: skip
    return out


def background_gradients(
    grad: Tensor,
    dims: PatchDims,
    slots: Tensor,
    gate: Tensor | None,
    spec: ScatterSpec,
    *,
    by_tap: bool,
    elsewhere: bool = False,
) -> Tensor:
    """Gradient (E, ks², O) of the background's tap outputs, or (E, 1, O) of a bias."""
    O = grad.shape[3] // (1 if spec.sum_experts else dims.E)
    acc_type, HW = acc_dtype(grad.dtype), dims.H * dims.W
    flat = not by_tap or spec.kernel_size == 1
    BP, BO = power_of_2(HW, most=64), dividing_tile(O, 32)
    blocks = ceil_div(HW, BP)
    chunk, splits = split_rows(dims.B, splits_to_fill(blocks * dims.E * ceil_div(O, BO), dims.B), 1)
    shape = (splits * blocks, dims.E, O) if flat else (splits, dims.E, HW, O)
    sums = torch.empty(shape, dtype=acc_type, device=grad.device)
    sum_images_kernel[(blocks, dims.E, splits * ceil_div(O, BO))](
        grad, slots, gate, sums, dims.B, chunk, O=O, N=dims.N, SUM_EXPERTS=spec.sum_experts, HAS_GATE=gate is not None,
        ELSEWHERE=elsewhere, FLAT=flat, ACC=tl_acc(acc_type), BP=BP, BO=BO, **dims.constexprs(), **num_warps(4),
    )  # fmt: skip
    if flat:
        return sum_splits(sums, acc_type).unsqueeze(1)
    out = torch.empty(dims.E, spec.kernel_size**2, O, dtype=acc_type, device=grad.device)
    BO = dividing_tile(O, 32)
    tap_gradient_kernel[(dims.E, spec.kernel_size**2, ceil_div(O, BO))](
        sums, out, splits, E=dims.E, O=O, P=dims.p, KS=spec.kernel_size, HW=HW, H=dims.H, W=dims.W,
        ISOLATED=spec.isolated, ACC=tl_acc(acc_type), BP=power_of_2(HW, most=64), BO=BO, **num_warps(4),
    )  # fmt: skip
    return out
