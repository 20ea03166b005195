"""Backward pass through the experts' norm, input gates and router in two passes over the map.

    v = ReLU(scale·u + shift), u = gate·x      grad_u = grad_v·[v > 0]·scale + offset + slope·u
    grad_gate = Σ over a patch of grad_u·x     grad_x = Σ_e gate·grad_u + Σ_e grad_score·router

Offset and slope are the gradient through the statistics, known only when all gradients have been summed. But they enter
grad_gate through Σ x and Σ x² alone, so sums over each patch are enough: once the norm's sums are there, so is the
gradient of every gate and score, and one more pass adds up everything that reaches the map.

Layouts: grad (E, M1, C) of values; x (B, H, W, C); gate (B, E, L); scores (B, N, E); router by pixel (E, p², C).

    patch_sums_kernel        grad → the sums that the norm's gradient needs, and the sums of each selected patch
    score_gradient_kernel    these → gradient of scores (B, N, E)
    fused_backward_kernel    gradients of values and scores → gradient of x, and of the router in splits
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.expert_choice import router_by_channel, router_by_pixel
from moesaic.ops.triton.gather import norm_scale_shift
from moesaic.ops.triton.launch import (
    PatchDims,
    acc_dtype,
    ceil_div,
    num_warps,
    pixel_of_patch,
    power_of_2,
    split_rows,
    splits_to_fill,
    sum_splits,
    tl_acc,
)
from moesaic.ops.triton.norm import norm_backward
from moesaic.ops.triton.operands import NormTensors, RoutedMap
from moesaic.ops.triton_backend import GATE_KINDS

__all__ = ["FusedGradients", "applies", "fits", "fused_gradients"]

_PIXELS = range(8, 65)
"""Pixels of a patch for which sums over a patch are so much smaller than the pixels that writing them pays off."""
_MAX_EXPERTS = 16
_MAX_PATCHES = 64
"""Patches of an image, and slots of its experts: a program handles all of an image's at a time."""


@dataclass(frozen=True)
class FusedGradients:
    """Gradients of a layer's input and of its parameters in front of the experts."""

    x: Tensor
    router: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


def applies(routed: RoutedMap) -> bool:
    """Whether gradients go through norm, gates and router by this module's kernels."""
    has_router = routed.router is not None and routed.scores is not None
    if routed.options.gate_kind == GATE_KINDS["softmax_experts"]:  # a program goes through the patches of one expert
        return False
    return routed.norm is not None and routed.options.gate_on_input and has_router and fits(routed.dims)


def fits(dims: PatchDims) -> bool:
    """Whether this module's kernels are for these sizes."""
    places = max(dims.N, dims.E * dims.L)
    return dims.p**2 in _PIXELS and dims.E <= _MAX_EXPERTS and places <= _MAX_PATCHES


@cached_launch
@triton.jit
def patch_sums_kernel(
    grad, x, index, gate, weight, bias, mean, var, out, gate_dots, first_out, second_out, eps, places, M1, CHUNK, S,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of `norm.norm_sums_kernel` over a chunk of an expert's B·L slots, and those of each slot.

    The latter are Σ scale·[active]·g·x (dots), with STATS also Σ x and Σ x² of each channel. A tile is one patch in
    one warp, so that its rows are summed without shared memory.
    """
    A: tl.constexpr = P * P
    block = tl.program_id(0)
    e = E - 1 - tl.program_id(1)  # the last expert's rows were written last and may still be in the cache
    s = tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    cm = c < C
    a = tl.arange(0, BP)
    scale, shift = norm_scale_shift(weight, bias, mean, var, eps, e * C + c, cm, ACC)
    all_g = tl.zeros((BC,), ACC)
    active_g = tl.zeros((BC,), ACC)
    active_gu = tl.zeros((BC,), ACC)
    for q in tl.range(s * CHUNK, tl.minimum((s + 1) * CHUNK, places), num_stages=STAGES):
        b = q // L
        place = (b * E + e) * L + q % L
        n = tl.load(index + place).to(tl.int32)
        g = tl.load(gate + place).to(ACC)
        mask = ((a < A) & (n >= 0))[:, None] & cm[None, :]
        at = pixel_of_patch(b, tl.maximum(n, 0), a, P, GW, HW, W).to(tl.int64) * C
        row = (e * M1 + q * A + a).to(tl.int64) * C
        xv = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0)
        gv = tl.load(grad + row[:, None] + c[None, :], mask=mask, other=0).to(ACC)
        xv = xv.to(ACC)
        active = tl.where(xv * g * scale[None, :] + shift[None, :] > 0, gv, 0.0)
        active_gx = tl.sum(active * xv, 0)
        all_g += tl.sum(gv, 0)
        active_g += tl.sum(active, 0)
        active_gu += active_gx * g
        tl.store(gate_dots + place * tl.num_programs(0) + block, tl.sum(active_gx * scale, 0))
        if STATS:
            to = (e * places + q).to(tl.int64) * C + c
            tl.store(first_out + to, tl.sum(xv, 0).to(first_out.dtype.element_ty), mask=cm)
            tl.store(second_out + to, tl.sum(xv * xv, 0).to(second_out.dtype.element_ty), mask=cm)
    to = (s * E + e) * C + c
    tl.store(out + to, all_g, mask=cm)
    tl.store(out + S * (E * C) + to, active_g, mask=cm)
    tl.store(out + 2 * S * (E * C) + to, active_gu, mask=cm)


@cached_launch
@triton.jit
def score_gradient_kernel(
    gate_dots, first_sums, second_sums, norm, gate, scores, slots, out, B,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, GATE_KIND: tl.constexpr,
    STATS: tl.constexpr, ACC: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """One image and expert: gradient of scores (B, N, E) from the sums of selected patches.

    The gradient of a gate is that of the values, g·[active]·scale + offset + slope·gate·x, times x, over a patch: dots
    (B, E, L, BLOCKS) have the first term, and with STATS offset and slope, of norm (4, E, C), are multiplied with a
    patch's sums of x and x² (E, B·L, C). GATE_KIND as in `expert_choice`.
    """
    b = tl.program_id(0)
    e = tl.program_id(1)
    l = tl.arange(0, BL)
    lm = l < L
    at = (b * E + e) * L + l
    n = tl.arange(0, BN)
    live = n < N
    i = tl.arange(0, BB)
    g = tl.load(gate + at, mask=lm, other=0).to(ACC)
    slot = tl.load(slots + (b * E + e) * N + n, mask=live, other=-1)
    part = tl.load(gate_dots + at[:, None] * BLOCKS + i[None, :], mask=lm[:, None] & (i < BLOCKS)[None, :], other=0)
    if GATE_KIND == 1:
        score = tl.load(scores + (b * N + n) * E + e, mask=live, other=float("-inf"))
    grad = tl.sum(part, 1)
    if STATS:
        row = ((e * B + b) * L + l).to(tl.int64) * C
        through = tl.zeros((BL, BC), ACC)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            cm = c < C
            mask = lm[:, None] & cm[None, :]
            first = tl.load(first_sums + row[:, None] + c[None, :], mask=mask, other=0)
            second = tl.load(second_sums + row[:, None] + c[None, :], mask=mask, other=0)
            offset = tl.load(norm + (2 * E + e) * C + c, mask=cm, other=0)
            slope = tl.load(norm + (3 * E + e) * C + c, mask=cm, other=0)
            through += offset[None, :] * first.to(ACC) + slope[None, :] * g[:, None] * second.to(ACC)
        grad += tl.sum(through, 1)
    inner = tl.sum(g * grad, 0)
    here = slot[:, None] == l[None, :]
    own = tl.sum(tl.where(here, g[None, :], 0.0), 1)
    acc = tl.sum(tl.where(here, (g * grad)[None, :], 0.0), 1)
    share = own
    if GATE_KIND == 1:
        share = tl.where(live, tl.exp(score - tl.max(score, 0)), 0.0)
        share = share / tl.sum(share, 0)
    tl.store(out + (b * N + n) * E + e, acc - share * inner, mask=live)


@triton.jit
def split_bfloat16(s, i, E: tl.constexpr, HALVES: tl.constexpr, OPERAND: tl.constexpr):
    """Columns up to E rounded to 16 bits, followed with two HALVES by the rounding error: a matmul then has both."""
    rounded = s.to(OPERAND)
    if HALVES == 2:
        rounded = tl.where((i < E)[None, :], rounded, (s - rounded.to(s.dtype)).to(OPERAND))
    return rounded


@cached_launch
@triton.jit
def fused_backward_kernel(
    grad, x, index, gate, score_grad, kernels, norm, out, router_out, B, M1, CHUNK,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, STATS: tl.constexpr, HALVES: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EACH pixels of all patches, BC channels, a chunk of images: the map's gradient, and a part of the router's.

    Rows of an image's E·L slots become the gradient of their pixels as in `gather.gather_backward_kernel`, and are
    added to the N patches by a matmul with a 0/1 matrix of slots and patches. The gradient of scores (B, N, E) is
    multiplied with the router's kernels (E, p², C), and with the pixels for the router's own gradient (HALVES·splits,
    E, p², C). What depends on an expert and not on an image is loaded once.
    """
    A: tl.constexpr = P * P
    a = tl.program_id(1) * EACH
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    n = tl.arange(0, BN)
    t = tl.arange(0, BT)
    i = tl.arange(0, BE)
    e = t // L
    mask = (t < E * L)[:, None] & cm[None, :]
    at = e[:, None] * C + c[None, :]
    scale = tl.load(norm + at, mask=mask, other=0)
    shift = tl.load(norm + E * C + at, mask=mask, other=0)
    if STATS:
        offset = tl.load(norm + 2 * E * C + at, mask=mask, other=0)
        slope = tl.load(norm + 3 * E * C + at, mask=mask, other=0)
    im = i < HALVES * E
    w, found_w, to = (), (), ()
    for j in tl.static_range(EACH):
        kernel = (i % E * A + a + j)[:, None] * C + c[None, :]
        w = w + (tl.load(kernels + kernel, mask=(im & (a + j < A))[:, None] & cm[None, :], other=0).to(OPERAND),)
        found_w = found_w + (tl.zeros((BE, BC), ACC),)
        to = to + (pixel_of_patch(0, n, a + j, P, GW, HW, W)[:, None] * C + c[None, :],)
    for b in tl.range(s * CHUNK, tl.minimum((s + 1) * CHUNK, B), num_stages=STAGES):
        own = tl.load(index + b * (E * L) + t, mask=t < E * L, other=-1).to(tl.int32)
        g = tl.load(gate + b * (E * L) + t, mask=t < E * L, other=0).to(ACC)[:, None]
        of_scores = (b * N + n)[:, None] * E + (i % E)[None, :]
        scores = tl.load(score_grad + of_scores, mask=(n < N)[:, None] & im[None, :], other=0)
        image = tl.full((), HW * C, tl.int64) * b
        here = tl.where(n[:, None] == own[None, :], 1.0, 0.0).to(OPERAND)
        of_router = split_bfloat16(scores, i, E, HALVES, OPERAND)
        added = ()
        for j in tl.static_range(EACH):
            live = ((n < N) & (a + j < A))[:, None] & cm[None, :]
            used = ((own >= 0) & (a + j < A))[:, None] & cm[None, :]
            pixels = tl.load(x + image + to[j], mask=live, other=0)
            taken = pixel_of_patch(0, tl.maximum(own, 0), a + j, P, GW, HW, W)[:, None] * C + c[None, :]
            u = tl.load(x + image + taken, mask=used, other=0).to(ACC) * g
            row = (e * M1 + (b * L + t % L) * A + a + j).to(tl.int64) * C
            v = tl.load(grad + row[:, None] + c[None, :], mask=used, other=0).to(ACC)
            v = tl.where(u * scale + shift > 0, v * scale, 0.0)
            if STATS:
                v += offset + slope * u
            acc = tl.dot(here, (v * g).to(OPERAND), input_precision=PRECISION, out_dtype=ACC)
            acc = tl.dot(of_router, w[j], acc, input_precision=PRECISION, out_dtype=ACC)
            tl.store(out + image + to[j], acc.to(out.dtype.element_ty), mask=live)
            more = tl.dot(
                tl.trans(of_router), pixels.to(OPERAND), found_w[j], input_precision=PRECISION, out_dtype=ACC
            )  # fmt: skip
            added = added + (more,)
        found_w = added
    for j in tl.static_range(EACH):
        part = ((s * HALVES + i // E) * E + i % E) * A + a + j
        mask = (im & (a + j < A))[:, None] & cm[None, :]
        tl.store(router_out + part[:, None] * C + c[None, :], found_w[j], mask=mask)


def fused_gradients(grad: Tensor, routed: RoutedMap, *, centre: bool) -> FusedGradients:
    """From the gradient of values (E, M1, C); its row M, if there is one, is that of positions not selected."""
    assert routed.norm is not None and routed.router is not None
    sums, gate_dots, pixels = _patch_sums(grad, routed, routed.norm)
    norm = norm_backward(sums, grad, routed.norm, routed.dims, centre=centre)
    score_grad = _score_gradient(gate_dots, pixels, norm.terms, routed)
    grad_x, grad_router = _map_and_router_gradients(grad, routed, routed.router, score_grad, norm.terms)
    return FusedGradients(grad_x, grad_router, norm.weight, norm.bias)


def _patch_sums(
    grad: Tensor, routed: RoutedMap, norm: NormTensors
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The norm's sums in splits (3, S, E, C); those of slots (B, E, L, blocks), and (E, B·L, C) twice in training."""
    dims, x, index, gate = routed.dims, routed.x, routed.index, routed.gate
    acc_type, C, BP, places = acc_dtype(x.dtype), dims.C, power_of_2(dims.p**2), dims.B * dims.L
    rule = (max(32, 2048 // BP), 1, 3, 2)
    BC, warps, stages, each = tile("patch_sums", rule, dims.M, C, dims.p, dims.E, x.element_size())
    BC = power_of_2(C, most=BC)
    blocks = ceil_div(C, BC)
    chunk, splits = split_rows(places, splits_to_fill(blocks * dims.E, 64) * each, 1)
    sums = torch.empty(3, splits, dims.E, C, dtype=acc_type, device=x.device)
    gate_dots = torch.empty(*index.shape, blocks, dtype=acc_type, device=x.device)
    # float16 lacks the range for squares; rounding single sums is no worse than rounding the values
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 else acc_type
    pixels = None
    if norm.batch_stats:
        pixels = (
            torch.empty(dims.E, places, C, dtype=kind, device=x.device),
            torch.empty(dims.E, places, C, dtype=kind, device=x.device),
        )
    patch_sums_kernel[(blocks, dims.E, splits)](
        grad, x, index, gate, norm.weight, norm.bias, norm.mean, norm.var, sums, gate_dots, *(pixels or (None, None)),
        norm.eps, places, grad.shape[1], chunk, splits, C=C, STATS=norm.batch_stats, ACC=tl_acc(acc_type), BP=BP, BC=BC,
        STAGES=stages, **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return sums, gate_dots, pixels


def _score_gradient(gate_dots: Tensor, pixels: tuple[Tensor, Tensor] | None, norm: Tensor, routed: RoutedMap) -> Tensor:
    """(B, N, E)."""
    gate, scores, slots, kind = routed.gate, routed.scores, routed.slots, routed.options.gate_kind
    B, E, L = gate.shape
    N, C, blocks = slots.shape[2], norm.shape[2], gate_dots.shape[3]
    out = torch.empty(B, N, E, dtype=gate_dots.dtype, device=gate.device)
    BL = power_of_2(L)
    score_gradient_kernel[(B, E)](
        gate_dots, *(pixels or (None, None)), norm, gate, scores, slots, out, B, E=E, C=C, L=L, N=N, BLOCKS=blocks,
        GATE_KIND=kind, STATS=pixels is not None, ACC=tl_acc(out.dtype), BL=BL, BN=power_of_2(N),
        BC=power_of_2(C, most=max(32, min(1024, 2048 // BL))), BB=power_of_2(blocks), **num_warps(4),
    )  # fmt: skip
    return out


def _map_and_router_gradients(
    grad: Tensor, routed: RoutedMap, router: Tensor, score_grad: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the map and of the router's kernels."""
    dims, x, index, gate = routed.dims, routed.x, routed.index, routed.gate
    E, C, pixels = dims.E, dims.C, dims.p**2
    halves = 2 if x.dtype == torch.bfloat16 else 1  # float16 lacks the range for gradients of scores
    operand = tl.bfloat16 if halves == 2 else tl_acc(score_grad.dtype)
    BC, each, warps, stages, share = tile(
        "fused_backward", (64, 2, 4, 3, 2), dims.B, C, dims.p, E, dims.L, x.element_size()
    )
    BC = power_of_2(C, 16, BC)
    blocks = ceil_div(C, BC), ceil_div(pixels, each)
    chunk, splits = split_rows(dims.B, splits_to_fill(blocks[0] * blocks[1], 16) * share, 1)
    out = torch.empty_like(x)
    sums = torch.empty(halves * splits, E, pixels, C, dtype=score_grad.dtype, device=x.device)
    fused_backward_kernel[(*blocks, splits)](
        grad, x, index, gate, score_grad, router_by_pixel(router), norm, out, sums, dims.B, grad.shape[1], chunk, C=C,
        N=dims.N, STATS=len(norm) == 4, HALVES=halves, OPERAND=operand,
        PRECISION="ieee" if x.dtype.itemsize > 2 else "tf32", ACC=tl_acc(score_grad.dtype), BN=power_of_2(dims.N, 16),
        BT=power_of_2(E * dims.L, 16), BE=power_of_2(halves * E, 16), BC=BC, EACH=each, STAGES=stages,
        **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return out, router_by_channel(sum_splits(sums, router.dtype), router)
