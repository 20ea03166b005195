"""What experts behind a norm answer to positions that they did not choose, everywhere, and the gradient of that.

rest_kernel         what experts answer by each tap to such a position
resting_map_kernel  the same everywhere, from the taps that fall inside
resting_kernel      gradient of y, summed over images
answers_kernel      that → gradient of an expert's answers to the constant, tap by tap
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.gather import affine
from moesaic.ops.triton.launch import Sizes, acc, ceil, fill, parts, power_of_2, total, warps, wide
from moesaic.ops.triton.operands import NormTensors
from moesaic.ops.triton.scatter import Landing, whole_blocks

__all__ = ["resting_gradients", "resting_map"]


@triton.jit
def rest_kernel(
    taps, weight, bias, mean, var, out, eps,
    K: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (E, ks²·O): taps (E, ks²·O, C) times what a norm makes of zeros, rounded as the values of pixels are."""
    e = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    km = k < K
    found = tl.zeros((BK, BC), ACC)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        cm = c < C
        _scale, shift = affine(weight, bias, mean, var, eps, e * C + c, cm, ACC)
        rest = tl.where(cm, tl.maximum(shift, 0.0), 0.0).to(taps.dtype.element_ty).to(ACC)
        at = (e * K + k).to(tl.int64) * C
        found += tl.load(taps + at[:, None] + c[None, :], mask=km[:, None] & cm[None, :], other=0).to(ACC) * rest
    tl.store(out + e * K + k, tl.sum(found, 1), mask=km)


@triton.jit
def resting_map_kernel(
    answers, bias, out,
    O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ALONE: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Out (E, H·W, O), patch by patch: answers (E, ks², O) of taps that fall inside."""
    A: tl.constexpr = P * P
    e = tl.program_id(1)
    i = tl.program_id(0) * BP + tl.arange(0, BP)
    n = i // A
    qy = (n // GW) * P + (i % A) // P
    qx = (n % GW) * P + (i % A) % P
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    found = tl.zeros((BP, BO), ACC)
    if HAS_BIAS:
        found += tl.load(bias + e * O + o, mask=om, other=0).to(ACC)[None, :]
    for t in range(KS * KS):
        sy = qy + t // KS - KS // 2
        sx = qx + t % KS - KS // 2
        inside = (sy >= 0) & (sy < H) & (sx >= 0) & (sx < W)
        if ALONE:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        answer = tl.load(answers + (e * (KS * KS) + t) * O + o, mask=om, other=0)
        found += tl.where(inside[:, None], answer[None, :], 0.0)
    tl.store(out + (e * HW + i)[:, None] * O + o[None, :], found, mask=(i < HW)[:, None] & om[None, :])


@triton.jit
def resting_kernel(
    grad, slots, gate, out, B, CHUNK,
    E: tl.constexpr, O: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, SUM: tl.constexpr, HAS_GATE: tl.constexpr, ELSEWHERE: tl.constexpr,
    FLAT: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Sums over a chunk of images: out (chunks, E, H·W, O); FLAT, over a tile of positions too: (chunks·tiles, E, O).

    HAS_GATE: gated, where the expert chose. ELSEWHERE: where it did not.
    """
    e = tl.program_id(1)
    blocks: tl.constexpr = (O + BO - 1) // BO
    s = tl.program_id(2) // blocks
    o = (tl.program_id(2) % blocks) * BO + tl.arange(0, BO)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    live = q < HW
    mask = live[:, None] & (o < O)[None, :]
    n = (q // W // P) * GW + (q % W) // P
    found = tl.zeros((BP, BO), ACC)
    for b in range(s * CHUNK, tl.minimum((s + 1) * CHUNK, B)):
        at = b * HW + q
        if not SUM:
            at = at * E + e
        at = at.to(tl.int64) * O
        if HAS_GATE:
            own = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
            has = own >= 0
            g = tl.load(gate + (b * E + e) * L + own, mask=has, other=0).to(ACC)
            v = tl.load(grad + at[:, None] + o[None, :], mask=mask & has[:, None], other=0).to(ACC)
            found += v * g[:, None]
        elif ELSEWHERE:
            own = tl.load(slots + (b * E + e) * N + n, mask=live, other=0)
            found += tl.load(grad + at[:, None] + o[None, :], mask=mask & (own < 0)[:, None], other=0).to(ACC)
        else:
            found += tl.load(grad + at[:, None] + o[None, :], mask=mask, other=0).to(ACC)
    if FLAT:
        part = (s * tl.num_programs(0) + tl.program_id(0)) * E + e
        tl.store(out + part * O + o, tl.sum(found, 0), mask=o < O)
    else:
        to = ((s * E + e) * HW + q).to(tl.int64) * O
        tl.store(out + to[:, None] + o[None, :], found, mask=mask)


@triton.jit
def answers_kernel(
    sums, out, S,
    E: tl.constexpr, O: tl.constexpr, P: tl.constexpr, KS: tl.constexpr, HW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ALONE: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Out (E, ks², O): sums (S, E, H·W, O) over the positions at which a tap falls inside."""
    e = tl.program_id(0)
    t = tl.program_id(1)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    om = o < O
    found = tl.zeros((BP, BO), ACC)
    for q0 in range(0, HW, BP):
        q = q0 + tl.arange(0, BP)
        qy = q // W
        qx = q % W
        sy = qy + t // KS - KS // 2
        sx = qx + t % KS - KS // 2
        inside = (q < HW) & (sy >= 0) & (sy < H) & (sx >= 0) & (sx < W)
        if ALONE:
            inside = inside & (sy // P == qy // P) & (sx // P == qx // P)
        for s in range(S):
            at = ((s * E + e) * HW + q).to(tl.int64) * O
            found += tl.load(sums + at[:, None] + o[None, :], mask=inside[:, None] & om[None, :], other=0)
    tl.store(out + (e * (KS * KS) + t) * O + o, tl.sum(found, 0), mask=om)


def resting_map(taps: Tensor, norm: NormTensors, sizes: Sizes, bias: Tensor | None, landing: Landing) -> Tensor:
    """(E, H·W, O) in the order of patches: what experts answer where they chose nothing, and the bias."""
    E, K, C = taps.shape
    HW, O, full = sizes.H * sizes.W, K // landing.kernel**2, wide(taps.dtype)
    answers = torch.empty(E, K, dtype=full, device=taps.device)
    BK, BC = power_of_2(K, most=16), power_of_2(C, most=128)
    rest_kernel[(ceil(K, BK), E)](
        taps, norm.weight, norm.bias, norm.mean, norm.var, answers, norm.eps, K=K, C=C, ACC=acc(full), BK=BK, BC=BC,
        **warps(4),
    )  # fmt: skip
    out = torch.empty(E, HW, O, dtype=full, device=taps.device)
    constants = sizes.constants()
    del constants["E"], constants["L"]
    BP, BO = power_of_2(HW, most=16), power_of_2(O, most=64)
    resting_map_kernel[(ceil(HW, BP), E, ceil(O, BO))](
        answers, bias, out, O=O, KS=landing.kernel, H=sizes.H, ALONE=landing.alone, HAS_BIAS=bias is not None,
        ACC=acc(full), BP=BP, BO=BO, **constants, **warps(1),
    )  # fmt: skip
    return out


def resting_gradients(
    grad: Tensor,
    sizes: Sizes,
    slots: Tensor,
    gate: Tensor | None,
    landing: Landing,
    *,
    by_tap: bool,
    elsewhere: bool = False,
) -> Tensor:
    """Gradient (E, ks², O) of what experts answer to a constant at each tap, or (E, 1, O) of a bias."""
    O = grad.shape[3] // (1 if landing.summed else sizes.E)
    full, HW = wide(grad.dtype), sizes.H * sizes.W
    flat = not by_tap or landing.kernel == 1
    BP, BO = power_of_2(HW, most=64), whole_blocks(O, 32)
    blocks = ceil(HW, BP)
    chunk, splits = parts(sizes.B, fill(blocks * sizes.E * ceil(O, BO), sizes.B), 1)
    shape = (splits * blocks, sizes.E, O) if flat else (splits, sizes.E, HW, O)
    sums = torch.empty(shape, dtype=full, device=grad.device)
    resting_kernel[(blocks, sizes.E, splits * ceil(O, BO))](
        grad, slots, gate, sums, sizes.B, chunk, O=O, N=sizes.N, SUM=landing.summed, HAS_GATE=gate is not None,
        ELSEWHERE=elsewhere, FLAT=flat, ACC=acc(full), BP=BP, BO=BO, **sizes.constants(), **warps(4),
    )  # fmt: skip
    if flat:
        return total(sums, full).unsqueeze(1)
    out = torch.empty(sizes.E, landing.kernel**2, O, dtype=full, device=grad.device)
    BO = whole_blocks(O, 32)
    answers_kernel[(sizes.E, landing.kernel**2, ceil(O, BO))](
        sums, out, splits, E=sizes.E, O=O, P=sizes.p, KS=landing.kernel, HW=HW, H=sizes.H, W=sizes.W,
        ALONE=landing.alone, ACC=acc(full), BP=power_of_2(HW, most=64), BO=BO, **warps(4),
    )  # fmt: skip
    return out
