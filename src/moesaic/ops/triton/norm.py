"""The experts' norm: statistics of masked maps, and the gradient through them.

    v = ReLU(scale·u + shift), scale = weight / √(var + eps), shift = bias - mean·scale
    grad_u = grad_v·[v > 0]·scale + offset + slope·u, the last two through mean and var in training

Statistics are over all B·H·W positions of a masked map, where unselected ones are zero. Layouts: values u, v and their
gradients (E, M1, C), row M the background; x (B, H, W, C); gate (B, E, L); norm tensors (E, C).

    moments_kernel          mean and squared deviations of each expert's selected pixels, in splits
    merge_moments_kernel    splits merged, unselected zeros added, running statistics updated
    norm_sums_kernel        gradient of values → the three sums per channel that the norm's gradient needs
    norm_backward_kernel    these → gradients of weight and bias, and scale, shift, offset, slope
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

from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.gather import norm_scale_shift, pixel_of_row
from moesaic.ops.triton.launch import (
    PatchDims,
    acc_dtype,
    ceil_div,
    num_warps,
    power_of_2,
    split_rows,
    splits_to_fill,
    tl_acc,
)
from moesaic.ops.triton.operands import NormTensors, RoutedMap

__all__ = ["NormGradients", "masked_statistics", "norm_backward", "norm_gradients"]


class NormGradients(NamedTuple):
    """Gradients of a norm's weight and bias (E, C), and the terms with which a gradient passes through it."""

    weight: Tensor
    bias: Tensor
    terms: Tensor
    """(2, E, C): scale and shift; (4, E, C) in training: offset and slope too, the gradient through the statistics."""


@triton.jit
def selected_pixels(
    m, e, M, x, index, gate, c, cm,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of an expert's rows: pixels times gates, and which rows are used."""
    b, l, _a, used, py, px = pixel_of_row(m, e, M, index, E, L, P, GW)
    at = (b * HW + py * W + px).to(tl.int64) * C
    u = tl.load(x + at[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0).to(ACC)
    if HAS_GATE:
        u = u * tl.load(gate + (b * E + e) * L + l, mask=used, other=0).to(ACC)[:, None]
    return u, used


@cached_launch
@triton.jit
def moments_kernel(
    x, index, gate, mean_out, m2_out, count_out, M, CHUNK,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Moments of a chunk of rows. Each tile has its own mean, so that little cancels, and is merged into the rest."""
    e = tl.program_id(1)
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    end = tl.minimum((s + 1) * CHUNK, M)
    mean = tl.zeros((BC,), ACC)
    m2 = tl.zeros((BC,), ACC)
    count = tl.zeros((), ACC)
    for m0 in tl.range(s * CHUNK, end, BM, num_stages=STAGES):
        m = m0 + tl.arange(0, BM)
        u, used = selected_pixels(m, e, end, x, index, gate, c, cm, E, C, L, P, GW, HW, W, HAS_GATE, ACC)
        here = tl.sum(used.to(ACC), 0)
        deviation = tl.sum(u, 0) / tl.maximum(here, 1.0)
        off = tl.where(used[:, None], u - deviation[None, :], 0.0)
        share = here / tl.maximum(count + here, 1.0)
        deviation -= mean
        mean += share * deviation
        m2 += tl.sum(off * off, 0) + count * share * deviation * deviation
        count += here
    out = (s * E + e) * C + c
    tl.store(mean_out + out, mean, mask=cm)
    tl.store(m2_out + out, m2, mask=cm)
    if tl.program_id(0) == 0:
        tl.store(count_out + s * E + e, count)


@cached_launch
@triton.jit
def merge_moments_kernel(
    mean_in, m2_in, count_in, mean_out, var_out, running_mean, running_var, momentum, S, positions,
    E: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merges splits (S, E, C) into moments of ``positions``, with zeros where nothing was selected."""
    e = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    s = tl.arange(0, BS)
    cm = c < C
    mask = (s < S)[:, None] & cm[None, :]
    at = (s * E + e)[:, None] * C + c[None, :]
    here = tl.load(count_in + s * E + e, mask=s < S, other=0)
    mean_here = tl.load(mean_in + at, mask=mask, other=0)
    count = tl.sum(here, 0)
    mean = tl.sum(mean_here * here[:, None], 0) / tl.maximum(count, 1.0)
    deviation = mean_here - mean[None, :]
    m2 = tl.sum(tl.load(m2_in + at, mask=mask, other=0) + here[:, None] * deviation * deviation, 0)
    share = count / positions
    to = e * C + c
    all_mean = share * mean
    # the variance within the selected pixels, and between them and the zeros
    var = m2 / positions + share * (1.0 - share) * mean * mean
    tl.store(mean_out + to, all_mean, mask=cm)
    tl.store(var_out + to, var, mask=cm)
    before = tl.load(running_mean + to, mask=cm, other=0).to(ACC)
    tl.store(running_mean + to, (before + momentum * (all_mean - before)).to(running_mean.dtype.element_ty), mask=cm)
    before = tl.load(running_var + to, mask=cm, other=0).to(ACC)
    unbiased = var * (positions / tl.maximum(positions - 1.0, 1.0))
    tl.store(running_var + to, (before + momentum * (unbiased - before)).to(running_var.dtype.element_ty), mask=cm)


@cached_launch
@triton.jit
def norm_sums_kernel(
    grad, x, index, gate, weight, bias, mean, var, out, eps, M, M1, CHUNK, S,
    E: tl.constexpr, C: tl.constexpr, L: tl.constexpr, P: tl.constexpr, GW: tl.constexpr, HW: tl.constexpr,
    W: tl.constexpr, HAS_GATE: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Per expert and channel: Σ g, Σ g·[active], Σ g·[active]·u; u is the gated value before the norm."""
    e = E - 1 - tl.program_id(1)  # the last expert's rows were written last and may still be in the cache
    s = tl.program_id(2)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    cm = c < C
    scale, shift = norm_scale_shift(weight, bias, mean, var, eps, e * C + c, cm, ACC)
    all_g = tl.zeros((BM, BC), ACC)
    active_g = tl.zeros((BM, BC), ACC)
    active_gu = tl.zeros((BM, BC), ACC)
    end = tl.minimum((s + 1) * CHUNK, M)
    for m0 in tl.range(s * CHUNK, end, BM, num_stages=STAGES):
        m = m0 + tl.arange(0, BM)
        u, used = selected_pixels(m, e, end, x, index, gate, c, cm, E, C, L, P, GW, HW, W, HAS_GATE, ACC)
        row = (e * M1 + m).to(tl.int64) * C
        gv = tl.load(grad + row[:, None] + c[None, :], mask=used[:, None] & cm[None, :], other=0).to(ACC)
        active = tl.where(u * scale[None, :] + shift[None, :] > 0, gv, 0.0)
        all_g += gv
        active_g += active
        active_gu += active * u
    to = (s * E + e) * C + c
    tl.store(out + to, tl.sum(all_g, 0), mask=cm)
    tl.store(out + S * (E * C) + to, tl.sum(active_g, 0), mask=cm)
    tl.store(out + 2 * S * (E * C) + to, tl.sum(active_gu, 0), mask=cm)


@cached_launch
@triton.jit
def norm_backward_kernel(
    sums, grad, weight, bias, mean, var, out, weight_out, bias_out, eps, S, M, M1, positions,
    E: tl.constexpr, C: tl.constexpr, HAS_BACKGROUND: tl.constexpr, CENTRE: tl.constexpr, STATS: tl.constexpr,
    ACC: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grad (E, M1, C): with HAS_BACKGROUND its row M is the gradient of the background.

    out (2, E, C): scale and shift; (4, E, C) with STATS: offset and slope as well, the gradient through the statistics.
    """
    e = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    s = tl.arange(0, BS)
    cm = c < C
    at = e * C + c
    scale, shift = norm_scale_shift(weight, bias, mean, var, eps, at, cm, ACC)
    part = (s * E + e)[:, None] * C + c[None, :]
    mask = (s < S)[:, None] & cm[None, :]
    all_g = tl.sum(tl.load(sums + part, mask=mask, other=0), 0)
    active_g = tl.sum(tl.load(sums + S * (E * C) + part, mask=mask, other=0), 0)
    active_gu = tl.sum(tl.load(sums + 2 * S * (E * C) + part, mask=mask, other=0), 0)
    at_background = tl.zeros((BC,), ACC)
    if HAS_BACKGROUND:
        at_background += tl.load(grad + (e.to(tl.int64) * M1 + M) * C + c, mask=cm, other=0).to(ACC)
    if CENTRE:
        at_background -= all_g
    mean_c = tl.load(mean + at, mask=cm, other=0).to(ACC)
    grad_shift = active_g + tl.where(shift > 0, at_background, 0.0)
    grad_scale = active_gu - mean_c * grad_shift
    rstd = tl.rsqrt(tl.load(var + at, mask=cm, other=1).to(ACC) + eps)
    tl.store(weight_out + at, (grad_scale * rstd).to(weight_out.dtype.element_ty), mask=cm)
    tl.store(bias_out + at, grad_shift.to(bias_out.dtype.element_ty), mask=cm)
    tl.store(out + at, scale, mask=cm)
    tl.store(out + E * C + at, shift, mask=cm)
    if STATS:
        grad_var = -0.5 * rstd * rstd * scale * grad_scale
        slope = grad_var * (2.0 / positions)
        tl.store(out + 2 * E * C + at, -scale * grad_shift / positions - slope * mean_c, mask=cm)
        tl.store(out + 3 * E * C + at, slope, mask=cm)


def masked_statistics(
    x: Tensor,
    index: Tensor,
    gate: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    patch: int,
) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C) over all positions of each expert's masked map; updates the running ones."""
    dims = PatchDims.of(x, index, patch)
    acc_type, C = acc_dtype(x.dtype), dims.C
    BM, BC, warps, stages, each = _tile("moments", (16, 128, 1, 1, 4), dims, x)
    chunk, splits = split_rows(dims.M, splits_to_fill(ceil_div(C, BC) * dims.E, 64) * each, BM)
    mean = torch.empty(splits, dims.E, C, dtype=acc_type, device=x.device)
    m2, count = torch.empty_like(mean), torch.empty(splits, dims.E, dtype=acc_type, device=x.device)
    moments_kernel[(ceil_div(C, BC), dims.E, splits)](
        x, index, gate, mean, m2, count, dims.M, chunk,
        C=C, HAS_GATE=gate is not None, ACC=tl_acc(acc_type), BM=BM, BC=BC, STAGES=stages, **dims.constexprs(),
        **num_warps(warps),
    )  # fmt: skip
    all_mean, var = (torch.empty(dims.E, C, dtype=acc_type, device=x.device) for _ in range(2))
    merge_moments_kernel[(ceil_div(C, min(BC, 32)), dims.E)](
        mean, m2, count, all_mean, var, running_mean, running_var, momentum, splits, float(dims.positions),
        E=dims.E, C=C, ACC=tl_acc(acc_type), BS=power_of_2(splits), BC=min(BC, 32), **num_warps(4),
    )  # fmt: skip
    return all_mean, var


def norm_gradients(grad: Tensor, routed: RoutedMap, norm: NormTensors, *, centre: bool) -> NormGradients:
    """From the gradient of values (E, M1, C); its row M, if there is one, is that of positions not selected."""
    dims, x, index, gate = routed.dims, routed.x, routed.index, routed.input_gate
    acc_type, C = acc_dtype(x.dtype), dims.C
    BM, BC, warps, stages, each = _tile("norm_sums", (16, 64, 2, 3, 2), dims, x)
    chunk, splits = split_rows(dims.M, splits_to_fill(ceil_div(C, BC) * dims.E, 64) * each, BM)
    sums = torch.empty(3, splits, dims.E, C, dtype=acc_type, device=x.device)
    norm_sums_kernel[(ceil_div(C, BC), dims.E, splits)](
        grad, x, index, gate, norm.weight, norm.bias, norm.mean, norm.var, sums, norm.eps, dims.M, grad.shape[1],
        chunk, splits, C=C, HAS_GATE=gate is not None, ACC=tl_acc(acc_type), BM=BM, BC=BC, STAGES=stages,
        **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return norm_backward(sums, grad, norm, dims, centre=centre)


def norm_backward(sums: Tensor, grad: Tensor, norm: NormTensors, dims: PatchDims, *, centre: bool) -> NormGradients:
    """The same from the three sums of `norm_sums_kernel`, in splits (3, S, E, C)."""
    splits, C, M1, BC = sums.shape[1], dims.C, grad.shape[1], power_of_2(dims.C, most=32)
    terms = torch.empty(4 if norm.batch_stats else 2, dims.E, C, dtype=sums.dtype, device=grad.device)
    weight, bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    norm_backward_kernel[(ceil_div(C, BC), dims.E)](
        sums, grad, norm.weight, norm.bias, norm.mean, norm.var, terms, weight, bias, norm.eps, splits, dims.M, M1,
        float(dims.positions), E=dims.E, C=C, HAS_BACKGROUND=M1 > dims.M, CENTRE=centre, STATS=norm.batch_stats,
        ACC=tl_acc(sums.dtype), BS=power_of_2(splits), BC=BC, **num_warps(4),
    )  # fmt: skip
    return NormGradients(weight, bias, terms)


def _tile(kernel: str, rule: tuple[int, ...], dims: PatchDims, x: Tensor) -> tuple[int, int, int, int, int]:
    """Of passes over rows: sides of a tile, warps, pipeline stages, splits per program that fits on the GPU."""
    BM, BC, warps, stages, each = tile(kernel, rule, dims.M, dims.C, dims.p, dims.E, x.element_size())
    return power_of_2(dims.M, most=BM), power_of_2(dims.C, most=BC), warps, stages, each
