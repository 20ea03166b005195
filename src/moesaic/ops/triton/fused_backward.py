"""The way back to a map through the norm of experts, gates on their inputs and the router, in two passes over it.

    patch_sums_kernel    gradient of values → the sums that the norm's gradient needs, and sums of each chosen patch
    gate_back_kernel     these → gradient of scores
    joint_kernel         gradients of values and scores → gradient of the map, and of the router's kernels in parts

The gradient of a gate on the input is that of the values, through the norm, times the pixels. Through the norm it has a
term for what flows back through the statistics, which is known only when all gradients have been summed. But that term
is linear in the pixels and their squares, so sums over each patch are enough: once the norm's sums are there, so is the
gradient of every gate and score, and all that reaches the map is added up in one pass.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.expert_choice import by_channel, by_pixel
from moesaic.ops.triton.gather import affine
from moesaic.ops.triton.launch import (
    Sizes,
    acc,
    ceil,
    fill,
    parts,
    pixel_of_patch,
    power_of_2,
    total,
    warps,
    wide,
)
from moesaic.ops.triton.norm import through_norm
from moesaic.ops.triton.operands import NormTensors, RoutedMap

__all__ = ["Joint", "applies", "fits", "joint_gradients"]

_PIXELS = range(8, 65)
"""Of a patch, where sums over its pixels are so much less than the pixels that they are worth writing down."""
_MOST_EXPERTS = 16
_MOST_PLACES = 64
"""Patches of an image, and places that experts have for them: a program goes through all of an image's at a time."""


@dataclass(frozen=True)
class Joint:
    """Gradients of what a layer was given and of its parameters in front of experts."""

    x: Tensor
    router: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


def applies(routed: RoutedMap) -> bool:
    """Whether gradients go through norm, gates and router by this module's kernels."""
    has_router = routed.router is not None and routed.scores is not None
    return routed.norm is not None and routed.options.gate_on_input and has_router and fits(routed.sizes)


def fits(sizes: Sizes) -> bool:
    """Whether this module's kernels are for these sizes."""
    places = max(sizes.N, sizes.E * sizes.L)
    return sizes.p**2 in _PIXELS and sizes.E <= _MOST_EXPERTS and places <= _MOST_PLACES


@triton.jit
def patch_sums_kernel(
    grad, x, index, gate, weight, bias, mean, var, out, dots, first_out, second_out, eps, places, M1, CHUNK, S,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of `norm.norm_sums_kernel` over a chunk of an expert's B·L places, and those of each place.

    The latter are Σ scale·[active]·g·x (dots), with STATS also Σ x and Σ x² of each channel. A tile is one patch, and
    in one warp: its rows are summed in threads and between neighbours.
    """
    A: tl.constexpr = P * P
    block = tl.program_id(0)
    e = E - 1 - tl.program_id(1)  # the last to be written may still be in the cache
    s = tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    cm = c < C
    a = tl.arange(0, BP)
    scale, shift = affine(weight, bias, mean, var, eps, e * C + c, cm, ACC)
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
        tl.store(dots + place * tl.num_programs(0) + block, tl.sum(active_gx * scale, 0))
        if STATS:
            to = (e * places + q).to(tl.int64) * C + c
            tl.store(first_out + to, tl.sum(xv, 0).to(first_out.dtype.element_ty), mask=cm)
            tl.store(second_out + to, tl.sum(xv * xv, 0).to(second_out.dtype.element_ty), mask=cm)
    to = (s * E + e) * C + c
    tl.store(out + to, all_g, mask=cm)
    tl.store(out + S * (E * C) + to, active_g, mask=cm)
    tl.store(out + 2 * S * (E * C) + to, active_gu, mask=cm)


@triton.jit
def gate_back_kernel(
    dots, first_sums, second_sums, norm, gate, scores, slots, out, B,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr,
    STATS: tl.constexpr, ACC: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """One image and expert: gradient of scores (B, N, E) from the sums of chosen patches.

    The gradient of a gate is that of the values, g·[active]·scale + lift + tilt·gate·x, times x, over a patch: dots
    (B, E, L, BLOCKS) have the first term, and with STATS lift and tilt, of norm (4, E, C), meet a patch's sums of x
    and x² (E, B·L, C). KIND as in `choice`.
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
    part = tl.load(dots + at[:, None] * BLOCKS + i[None, :], mask=lm[:, None] & (i < BLOCKS)[None, :], other=0)
    if KIND == 1:
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
            lift = tl.load(norm + (2 * E + e) * C + c, mask=cm, other=0)
            tilt = tl.load(norm + (3 * E + e) * C + c, mask=cm, other=0)
            through += lift[None, :] * first.to(ACC) + tilt[None, :] * g[:, None] * second.to(ACC)
        grad += tl.sum(through, 1)
    inner = tl.sum(g * grad, 0)
    here = slot[:, None] == l[None, :]
    own = tl.sum(tl.where(here, g[None, :], 0.0), 1)
    found = tl.sum(tl.where(here, (g * grad)[None, :], 0.0), 1)
    share = own
    if KIND == 1:
        share = tl.where(live, tl.exp(score - tl.max(score, 0)), 0.0)
        share = share / tl.sum(share, 0)
    tl.store(out + (b * N + n) * E + e, found - share * inner, mask=live)


@triton.jit
def in_halves(s, i, E: tl.constexpr, HALVES: tl.constexpr, OPERAND: tl.constexpr):
    """Columns up to E rounded to 16 bits, and with two HALVES behind them what that left: a product has both then."""
    rounded = s.to(OPERAND)
    if HALVES == 2:
        rounded = tl.where((i < E)[None, :], rounded, (s - rounded.to(s.dtype)).to(OPERAND))
    return rounded


@triton.jit
def joint_kernel(
    grad, x, index, gate, score_grad, kernels, norm, out, router_out, B, M1, CHUNK,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, N: tl.constexpr,
    HW: tl.constexpr, W: tl.constexpr, STATS: tl.constexpr, HALVES: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EACH pixels of all patches, BC channels, a chunk of images: the map's gradient, and a part of the router's.

    Rows of an image's E·L places become the gradient of their pixels as in `rows.collect_kernel`, and go to the N
    patches by a product with ones where a place has the patch. The gradient of scores (B, N, E) meets the router's
    kernels (E, p², C), and the pixels for the router's own gradient (HALVES·splits, E, p², C). Whatever belongs to an
    expert and not to an image is looked up once.
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
        lift = tl.load(norm + 2 * E * C + at, mask=mask, other=0)
        tilt = tl.load(norm + 3 * E * C + at, mask=mask, other=0)
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
        of_router = in_halves(scores, i, E, HALVES, OPERAND)
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
                v += lift + tilt * u
            found = tl.dot(here, (v * g).to(OPERAND), input_precision=PRECISION, out_dtype=ACC)
            found = tl.dot(of_router, w[j], found, input_precision=PRECISION, out_dtype=ACC)
            tl.store(out + image + to[j], found.to(out.dtype.element_ty), mask=live)
            more = tl.dot(
                tl.trans(of_router), pixels.to(OPERAND), found_w[j], input_precision=PRECISION, out_dtype=ACC
            )  # fmt: skip
            added = added + (more,)
        found_w = added
    for j in tl.static_range(EACH):
        part = ((s * HALVES + i // E) * E + i % E) * A + a + j
        mask = (im & (a + j < A))[:, None] & cm[None, :]
        tl.store(router_out + part[:, None] * C + c[None, :], found_w[j], mask=mask)


def joint_gradients(grad: Tensor, routed: RoutedMap, *, centre: bool) -> Joint:
    """From the gradient of values (E, M1, C); its row M, if there is one, is that of positions not selected."""
    assert routed.norm is not None and routed.router is not None
    sums, dots, pixels = _patch_sums(grad, routed, routed.norm)
    norm = through_norm(sums, grad, routed.norm, routed.sizes, centre=centre)
    score_grad = _score_gradient(dots, pixels, norm.terms, routed)
    grad_x, grad_router = _joint(grad, routed, routed.router, score_grad, norm.terms)
    return Joint(grad_x, grad_router, norm.weight, norm.bias)


def _patch_sums(
    grad: Tensor, routed: RoutedMap, norm: NormTensors
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The norm's sums in parts (3, splits, E, C); of places (B, E, L, blocks), and (E, B·L, C) twice in training."""
    sizes, x, index, gate = routed.sizes, routed.x, routed.index, routed.gate
    full, C, BP, places = wide(x.dtype), sizes.C, power_of_2(sizes.p**2), sizes.B * sizes.L
    rule = (max(32, 2048 // BP), 1, 3, 2)
    BC, number, stages, each = tile("patch_sums", rule, sizes.M, C, sizes.p, sizes.E, x.element_size())
    BC = power_of_2(C, most=BC)
    blocks = ceil(C, BC)
    chunk, splits = parts(places, fill(blocks * sizes.E, 64) * each, 1)
    sums = torch.empty(3, splits, sizes.E, C, dtype=full, device=x.device)
    dots = torch.empty(*index.shape, blocks, dtype=full, device=x.device)
    # float16 has not the range for squares; rounding of single sums is no more than that of the values
    kind = torch.bfloat16 if x.dtype == torch.bfloat16 else full
    pixels = None
    if norm.batch_stats:
        pixels = (
            torch.empty(sizes.E, places, C, dtype=kind, device=x.device),
            torch.empty(sizes.E, places, C, dtype=kind, device=x.device),
        )
    patch_sums_kernel[(blocks, sizes.E, splits)](
        grad, x, index, gate, norm.weight, norm.bias, norm.mean, norm.var, sums, dots, *(pixels or (None, None)),
        norm.eps, places, grad.shape[1], chunk, splits, C=C, STATS=norm.batch_stats, ACC=acc(full), BP=BP, BC=BC,
        STAGES=stages, **sizes.constants(), **warps(number),
    )  # fmt: skip
    return sums, dots, pixels


def _score_gradient(dots: Tensor, pixels: tuple[Tensor, Tensor] | None, norm: Tensor, routed: RoutedMap) -> Tensor:
    """(B, N, E)."""
    gate, scores, slots, kind = routed.gate, routed.scores, routed.slots, routed.options.gate_kind
    B, E, L = gate.shape
    N, C, blocks = slots.shape[2], norm.shape[2], dots.shape[3]
    out = torch.empty(B, N, E, dtype=dots.dtype, device=gate.device)
    BL = power_of_2(L)
    gate_back_kernel[(B, E)](
        dots, *(pixels or (None, None)), norm, gate, scores, slots, out, B, E=E, C=C, L=L, N=N, BLOCKS=blocks,
        KIND=kind, STATS=pixels is not None, ACC=acc(out.dtype), BL=BL, BN=power_of_2(N),
        BC=power_of_2(C, most=max(32, min(1024, 2048 // BL))), BB=power_of_2(blocks), **warps(4),
    )  # fmt: skip
    return out


def _joint(grad: Tensor, routed: RoutedMap, router: Tensor, score_grad: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the map and of the router's kernels."""
    sizes, x, index, gate = routed.sizes, routed.x, routed.index, routed.gate
    E, C, pixels = sizes.E, sizes.C, sizes.p**2
    halves = 2 if x.dtype == torch.bfloat16 else 1  # float16 has not the range for gradients of scores
    operand = tl.bfloat16 if halves == 2 else acc(score_grad.dtype)
    BC, each, number, stages, share = tile("joint", (64, 2, 4, 3, 2), sizes.B, C, sizes.p, E, sizes.L, x.element_size())
    BC = power_of_2(C, 16, BC)
    blocks = ceil(C, BC), ceil(pixels, each)
    chunk, splits = parts(sizes.B, fill(blocks[0] * blocks[1], 16) * share, 1)
    out = torch.empty_like(x)
    sums = torch.empty(halves * splits, E, pixels, C, dtype=score_grad.dtype, device=x.device)
    joint_kernel[(*blocks, splits)](
        grad, x, index, gate, score_grad, by_pixel(router), norm, out, sums, sizes.B, grad.shape[1], chunk, C=C,
        N=sizes.N, STATS=len(norm) == 4, HALVES=halves, OPERAND=operand,
        PRECISION="ieee" if x.dtype.itemsize > 2 else "tf32", ACC=acc(score_grad.dtype), BN=power_of_2(sizes.N, 16),
        BT=power_of_2(E * sizes.L, 16), BE=power_of_2(halves * E, 16), BC=BC, EACH=each, STAGES=stages,
        **sizes.constants(), **warps(number),
    )  # fmt: skip
    return out, by_channel(total(sums, router.dtype), router)
