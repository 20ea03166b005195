"""BatchNorm, gate and ReLU of a map in training: two reads of the map forward, two backward.

    z = (x − mean)·scale + bias, scale = weight / √(var + eps);   u = gate·z;   y = ReLU(u) or u

    A = Σ_pixels grad_y·[u > 0],  D = Σ_pixels grad_y·[u > 0]·(x − mean)            per image and channel, without gate
    grad_gate = Σ over the block's channels of scale·D + bias·A
    grad_bias = Σ_b gate·A,  grad_weight = Σ_b gate·D / √(var + eps)
    grad_x = grad_y·[u > 0]·gate·scale + offset + slope·(x − mean), the last two through mean and var in training

Without ReLU [u > 0] is 1. The map is read once for its moments and once for y; only x is saved, and the backward pass
reads it twice. Where a gate is 0, x and grad_y are not read for results that are then 0. Layouts: x, y and gradients
(B, H·W, C); gate (B, E), rows STEP apart, for E blocks of BLOCK channels; norm tensors (C,).

    map_moments_kernel          mean and squared deviations of each channel, in splits (`merge_moments_kernel` follows)
    gated_norm_kernel           x → y
    gated_norm_sums_kernel      A and D, in splits (2, S, B, C)
    gated_norm_merge_kernel     these → gradients of gate, weight and bias; offset and slope (2, C)
    gated_norm_input_kernel     gradient of x
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import TARGET_PROGRAMS, acc_dtype, ceil_div, num_warps, power_of_2, split_rows, tl_acc
from moesaic.ops.triton.norm import merge_moments_kernel

__all__ = ["GatedNorm", "GatedNormGradients", "gated_norm", "gated_norm_backward", "map_statistics"]

_MAX_TILE = 4096
"""Elements of a tile, at most: what four warps hold in registers."""
_MAX_SPLITS = 512
"""Splits of the moments, at most: one program of `merge_moments_kernel` loads all of them at once."""
_STAGES = 3
"""Pipeline stages of sums over rows, which are bound by the latency of loads."""
_UNGATED_BLOCK = 32
"""Channels of a program of `gated_norm_merge_kernel` where there are no gates."""


class GatedNorm(NamedTuple):
    """BatchNorm of a map with given statistics, and what follows it."""

    weight: Tensor
    bias: Tensor
    gate: Tensor | None
    """(B, E)"""
    mean: Tensor
    var: Tensor
    eps: float
    block: int
    """Channels of a gate; the last block may be shorter."""
    relu: bool
    batch_stats: bool
    """Whether mean and var are those of the map, and gradients go through them."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What every kernel reads, in the kernels' order."""
        return self.weight, self.bias, self.mean, self.var, self.gate

    @property
    def gate_step(self) -> int:
        """From one image's gates to the next one's."""
        return 0 if self.gate is None else self.gate.stride(0)

    def constexprs(self, x: Tensor) -> dict[str, object]:
        """Compile-time constants of the kernels for a map x (B, H, W, C)."""
        return {"C": x.shape[3], "HAS_GATE": self.gate is not None, "ACC": tl_acc(acc_dtype(x.dtype))}


class GatedNormGradients(NamedTuple):
    """Gradients of a `GatedNorm` and of the map."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    gate: Tensor | None


@cached_launch
@triton.jit
def map_moments_kernel(
    x, mean_out, m2_out, count_out, batches, M, CHUNK,
    C: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Moments of a chunk of rows (M, C). Each tile has its own mean, so that little cancels."""
    s = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cm = c < C
    end = tl.minimum((s + 1) * CHUNK, M)
    mean = tl.zeros((BC,), ACC)
    m2 = tl.zeros((BC,), ACC)
    count = tl.zeros((), ACC)
    for m0 in tl.range(s * CHUNK, end, BM, num_stages=STAGES):
        m = m0 + tl.arange(0, BM)
        live = (m < end)[:, None] & cm[None, :]
        v = tl.load(x + m.to(tl.int64)[:, None] * C + c[None, :], mask=live, other=0).to(ACC)
        here = tl.sum((m < end).to(ACC), 0)
        deviation = tl.sum(v, 0) / here
        off = tl.where(live, v - deviation[None, :], 0.0)
        share = here / (count + here)
        deviation -= mean
        mean += share * deviation
        m2 += tl.sum(off * off, 0) + count * share * deviation * deviation
        count += here
    tl.store(mean_out + s * C + c, mean, mask=cm)
    tl.store(m2_out + s * C + c, m2, mask=cm)
    if tl.program_id(1) == 0:
        tl.store(count_out + s, count)
        if s == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def channel_terms(weight, bias, mean, var, eps, c, cm, ACC: tl.constexpr):
    """Mean, 1 / √(var + eps), weight over that root, and bias, of channels."""
    rstd = tl.rsqrt(tl.load(var + c, mask=cm, other=1).to(ACC) + eps)
    scale = tl.load(weight + c, mask=cm, other=0).to(ACC) * rstd
    return (
        tl.load(mean + c, mask=cm, other=0).to(ACC),
        rstd,
        scale,
        tl.load(bias + c, mask=cm, other=0).to(ACC),
    )


@cached_launch
@triton.jit
def gated_norm_kernel(
    x, weight, bias, mean, var, gate, y, eps, HW, TILES, STEP,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BP pixels of an image, BC of their channels."""
    b = tl.program_id(0) // TILES
    p = (tl.program_id(0) % TILES) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cm = c < C
    mask = (p < HW)[:, None] & cm[None, :]
    at = (b.to(tl.int64) * HW + p)[:, None] * C + c[None, :]
    centre, _rstd, scale, shift = channel_terms(weight, bias, mean, var, eps, c, cm, ACC)
    needed = mask
    if HAS_GATE:
        g = tl.load(gate + b * STEP + c // BLOCK, mask=cm, other=0).to(ACC)
        needed = mask & (g != 0)[None, :]
    v = tl.load(x + at, mask=needed, other=0).to(ACC)
    v = (v - centre[None, :]) * scale[None, :] + shift[None, :]
    if HAS_GATE:
        v = v * g[None, :]
    if RELU:
        v = tl.where(v <= 0, 0.0, v)  # NaN stays
    tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit
def gated_norm_sums_kernel(
    grad, x, weight, bias, mean, var, gate, out, eps, HW, CHUNK, STEP,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk of an image's pixels, BC of their channels."""
    b = tl.program_id(0)
    s = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cm = c < C
    centre, _rstd, scale, shift = channel_terms(weight, bias, mean, var, eps, c, cm, ACC)
    end = tl.minimum((s + 1) * CHUNK, HW)
    needed = cm
    if HAS_GATE:
        g = tl.load(gate + b * STEP + c // BLOCK, mask=cm, other=0).to(ACC)
        if RELU:  # u = 0 where a gate is 0, and the gradient with it
            needed = cm & (g != 0)
            end = tl.where(tl.max(needed.to(tl.int32), 0) > 0, end, 0)
    of_grad = tl.zeros((BP, BC), ACC)
    of_product = tl.zeros((BP, BC), ACC)
    for p0 in tl.range(s * CHUNK, end, BP, num_stages=STAGES):
        p = p0 + tl.arange(0, BP)
        mask = (p < end)[:, None] & needed[None, :]
        at = (b.to(tl.int64) * HW + p)[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=mask, other=0).to(ACC) - centre[None, :]
        d = tl.load(grad + at, mask=mask, other=0).to(ACC)
        if RELU:
            u = v * scale[None, :] + shift[None, :]
            if HAS_GATE:
                u = u * g[None, :]
            d = tl.where(u > 0, d, 0.0)
        of_grad += d
        of_product += d * v
    to = (s * tl.num_programs(0) + b).to(tl.int64) * C + c
    half = tl.num_programs(2).to(tl.int64) * tl.num_programs(0) * C
    tl.store(out + to, tl.sum(of_grad, 0), mask=cm)
    tl.store(out + half + to, tl.sum(of_product, 0), mask=cm)


@cached_launch
@triton.jit
def gated_norm_merge_kernel(
    sums, weight, bias, mean, var, gate, gate_out, weight_out, bias_out, terms, eps, B, S, E, STEP, positions,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, STATS: tl.constexpr, ACC: tl.constexpr,
    BB: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BG blocks of channels, of all images."""
    j = tl.arange(0, BG * BK)
    block = tl.program_id(0) * BG + j // BK
    c = block * BLOCK + j % BK
    cm = (j % BK < BLOCK) & (c < C)
    _centre, rstd, scale, shift = channel_terms(weight, bias, mean, var, eps, c, cm, ACC)
    grad_shift = tl.zeros((BG * BK,), ACC)
    grad_scale = tl.zeros((BG * BK,), ACC)
    half = (tl.zeros((), tl.int64) + S) * B * C  # S is no tensor where it is 1
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        mask = (b < B)[:, None] & cm[None, :]
        of_grad = tl.zeros((BB, BG * BK), ACC)
        of_product = tl.zeros((BB, BG * BK), ACC)
        for s in range(S):
            at = (s * B + b).to(tl.int64)[:, None] * C + c[None, :]
            of_grad += tl.load(sums + at, mask=mask, other=0)
            of_product += tl.load(sums + half + at, mask=mask, other=0)
        if HAS_GATE:
            dots = of_product * scale[None, :] + of_grad * shift[None, :]
            dots = tl.sum(tl.reshape(tl.where(mask, dots, 0.0), (BB, BG, BK)), 2)
            e = tl.program_id(0) * BG + tl.arange(0, BG)
            tl.store(
                gate_out + b[:, None] * E + e[None, :], dots.to(gate_out.dtype.element_ty),
                mask=(b < B)[:, None] & (e < E)[None, :],
            )  # fmt: skip
            g = tl.load(gate + b[:, None] * STEP + block[None, :], mask=mask, other=0).to(ACC)
            of_grad = of_grad * g
            of_product = of_product * g
        grad_shift += tl.sum(of_grad, 0)
        grad_scale += tl.sum(of_product, 0)
    tl.store(weight_out + c, (grad_scale * rstd).to(weight_out.dtype.element_ty), mask=cm)
    tl.store(bias_out + c, grad_shift.to(bias_out.dtype.element_ty), mask=cm)
    if STATS:
        tl.store(terms + c, -scale * grad_shift / positions, mask=cm)
        tl.store(terms + C + c, -scale * rstd * rstd * grad_scale / positions, mask=cm)


@cached_launch
@triton.jit
def gated_norm_input_kernel(
    grad, x, weight, bias, mean, var, gate, terms, out, eps, HW, TILES, STEP,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, RELU: tl.constexpr, STATS: tl.constexpr,
    ACC: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BP pixels of an image, BC of their channels."""
    b = tl.program_id(0) // TILES
    p = (tl.program_id(0) % TILES) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    cm = c < C
    mask = (p < HW)[:, None] & cm[None, :]
    at = (b.to(tl.int64) * HW + p)[:, None] * C + c[None, :]
    centre, _rstd, scale, shift = channel_terms(weight, bias, mean, var, eps, c, cm, ACC)
    needed = mask
    if HAS_GATE:
        g = tl.load(gate + b * STEP + c // BLOCK, mask=cm, other=0).to(ACC)
        needed = mask & (g != 0)[None, :]
    d = tl.load(grad + at, mask=needed, other=0).to(ACC)
    if RELU or STATS:
        v = tl.load(x + at, mask=mask if STATS else needed, other=0).to(ACC) - centre[None, :]
    if RELU:
        u = v * scale[None, :] + shift[None, :]
        if HAS_GATE:
            u = u * g[None, :]
        d = tl.where(u > 0, d, 0.0)
    if HAS_GATE:
        d = d * g[None, :]
    d = d * scale[None, :]
    if STATS:
        offset = tl.load(terms + c, mask=cm, other=0)
        slope = tl.load(terms + C + c, mask=cm, other=0)
        d += offset[None, :] + slope[None, :] * v
    tl.store(out + at, d.to(out.dtype.element_ty), mask=mask)


def map_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of maps (B, H, W, C), in float32 at least; updates the running ones, counts the batch."""
    C = x.shape[-1]
    M, acc_type = x.numel() // C, acc_dtype(x.dtype)
    BC = power_of_2(C, most=64)
    BM = power_of_2(M, most=_MAX_TILE // BC)
    chunk, splits = split_rows(M, min(_MAX_SPLITS, ceil_div(2 * TARGET_PROGRAMS, ceil_div(C, BC))), BM)
    parts = torch.empty(2 * C + 1, splits, dtype=acc_type, device=x.device)
    flat = parts.view(-1)
    mean, m2, count = flat[: splits * C], flat[splits * C : 2 * splits * C], flat[2 * splits * C :]
    map_moments_kernel[(splits, ceil_div(C, BC))](
        x, mean, m2, count, batches, M, chunk, C=C, ACC=tl_acc(acc_type), BM=BM, BC=BC, STAGES=_STAGES, **num_warps(4)
    )
    all_mean, var = (torch.empty(C, dtype=acc_type, device=x.device) for _ in range(2))  # which must not share memory
    side = power_of_2(C, most=16)
    merge_moments_kernel[(ceil_div(C, side), 1)](
        mean, m2, count, all_mean, var, running_mean, running_var, momentum, splits, float(M),
        E=1, C=C, ACC=tl_acc(acc_type), BS=power_of_2(splits), BC=side, **num_warps(4),
    )  # fmt: skip
    return all_mean, var


def gated_norm(x: Tensor, norm: GatedNorm) -> Tensor:
    """The output (B, H, W, C) for maps x of that shape."""
    B, H, W, C = x.shape
    y = torch.empty_like(x)
    BP, BC = _tile(H * W, C)
    tiles = ceil_div(H * W, BP)
    gated_norm_kernel[(B * tiles, ceil_div(C, BC))](
        x, *norm.tensors, y, norm.eps, H * W, tiles, norm.gate_step,
        BLOCK=norm.block, RELU=norm.relu, BP=BP, BC=BC, **norm.constexprs(x), **num_warps(4),
    )  # fmt: skip
    return y


def gated_norm_backward(grad: Tensor, x: Tensor, norm: GatedNorm) -> GatedNormGradients:
    """Gradients from that of the output (B, H, W, C)."""
    B, H, W, C = x.shape
    acc_type, gate = acc_dtype(x.dtype), norm.gate
    tensors, shared = norm.tensors, norm.constexprs(x)
    BP, BC = _tile(H * W, C)
    per_split = B * ceil_div(C, BC)
    chunk, splits = split_rows(H * W, max(1, ceil_div(2 * TARGET_PROGRAMS, per_split)), BP)
    sums = torch.empty(2, splits, B, C, dtype=acc_type, device=x.device)
    gated_norm_sums_kernel[(B, ceil_div(C, BC), splits)](
        grad, x, *tensors, sums, norm.eps, H * W, chunk, norm.gate_step,
        BLOCK=norm.block, RELU=norm.relu, BP=BP, BC=BC, STAGES=_STAGES, **shared, **num_warps(4),
    )  # fmt: skip
    block = _UNGATED_BLOCK if gate is None else norm.block
    blocks = ceil_div(C, block)
    BK = power_of_2(min(block, C))
    BG = power_of_2(blocks, most=max(1, 32 // BK))
    BB = power_of_2(B, most=max(1, min(128, _MAX_TILE // (BG * BK))))
    weight, bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    terms = torch.empty(2, C, dtype=acc_type, device=x.device) if norm.batch_stats else None
    grad_gate = None if gate is None else torch.empty(B, blocks, dtype=gate.dtype, device=x.device)
    gated_norm_merge_kernel[(ceil_div(blocks, BG),)](
        sums, *tensors, grad_gate, weight, bias, terms, norm.eps, B, splits, blocks, norm.gate_step, float(B * H * W),
        BLOCK=block, STATS=norm.batch_stats, BB=BB, BG=BG, BK=BK, **shared, **num_warps(4),
    )  # fmt: skip
    out, tiles = torch.empty_like(x), ceil_div(H * W, BP)
    gated_norm_input_kernel[(B * tiles, ceil_div(C, BC))](
        grad, x, *tensors, terms, out, norm.eps, H * W, tiles, norm.gate_step,
        BLOCK=norm.block, RELU=norm.relu, STATS=norm.batch_stats, BP=BP, BC=BC, **shared, **num_warps(4),
    )  # fmt: skip
    return GatedNormGradients(out, weight, bias, grad_gate)


def _tile(pixels: int, channels: int) -> tuple[int, int]:
    """Pixels and channels of a program's tile."""
    BP = power_of_2(pixels, most=32)
    return BP, power_of_2(channels, most=max(64, min(512, _MAX_TILE // BP)))
