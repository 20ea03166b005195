"""3×3 convolutions of few input channels, such as the first of a network, which are bound by memory bandwidth.

    y[q] = Σ_t weight[t]ᵀ · x[q + t]
    grad_x[q] = Σ_t weight[t] · grad_y[q - t]      grad_weight[t] = Σ_q x[q + t] · grad_y[q]ᵀ

Layouts: x (B·H·W, C) with C ≤ 16; y and grad_y (B·H·W, O); weight (9·C, O), tap by tap. cuDNN is made for dozens of
channels, and takes several times as long as the memory traffic here. A program takes consecutive pixels, loads their
neighbours and multiplies them with all taps:

    forward_kernel            shifted pixels (positions, C) times the taps' weights (C, O), accumulated
    weight_backward_kernel    shifted pixels, transposed, times grad_y, in splits
    input_backward_kernel     grad_y times all taps (one cuBLAS matmul), then nine neighbours added up

Shifted pixels are taken in ``groups`` of taps: nine groups of C columns; three, one for each row of the kernel, whose
3·C numbers are adjacent in memory; or one of all taps, for the 27 columns of a colour image.

A program takes up to 160 channels, in a tile of 128 and one of 32. Where unrolled matmuls of more than 16 columns
follow each other, ptxas 12.8 may address the second's operand through an uninitialised register. Groups of taps are
therefore in a loop, where no such case was found, or there is a single matmul.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops.direct_operator import direct_operator
from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import (
    acc_dtype,
    ceil_div,
    empty_map_like,
    num_warps,
    num_warps_and_stages,
    placeholder,
    power_of_2,
    split_rows,
    sum_splits,
    tl_acc,
    to_nchw,
    to_nhwc,
)
from moesaic.ops.weight_layout import empty_weight_like

__all__ = ["MAX_CHANNELS", "thin_conv", "two_tiles"]

MAX_CHANNELS = 16
"""Input channels."""


@triton.jit
def shifted_pixels(
    x, first, r, live, g, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, G: tl.constexpr, KG: tl.constexpr
):  # fmt: skip
    """Neighbours (BM, KG) of pixels ``first + r``: those of group ``g`` of G, tap by tap, zero beyond the map.

    Row and column numbers are unsigned and compared with constants instead of added to: the compiler packs small sums
    into pairs of 16 bits, which ptxas 12.8 gets wrong.
    """
    k = tl.arange(0, KG)
    i = (first + r).to(tl.uint32) % (H * W)
    row = (i // W).to(tl.int32)
    col = (i % W).to(tl.int32)
    if G == 9:  # one tap
        near = live & (row >= 1 - g // 3) & (row < H + 1 - g // 3) & (col >= 1 - g % 3) & (col < W + 1 - g % 3)
        inside = near[:, None] & (k < C)[None, :]
        at = r[:, None] * C + k[None, :] + ((g // 3 - 1) * W + g % 3 - 1) * C
    elif G == 3:  # a row of the kernel
        left = (col > 0)[:, None] | (k >= C)[None, :]
        right = (col < W - 1)[:, None] | (k < 2 * C)[None, :]
        inside = (live & (row >= 1 - g) & (row < H + 1 - g))[:, None] & left & right & (k < 3 * C)[None, :]
        at = r[:, None] * C + k[None, :] + ((g - 1) * W - 1) * C
    else:
        j = (k.to(tl.uint32) % (3 * C)).to(tl.int32)
        up = (row > 0)[:, None] | (k >= 3 * C)[None, :]
        down = (row < H - 1)[:, None] | (k < 6 * C)[None, :]
        left = (col > 0)[:, None] | (j >= C)[None, :]
        right = (col < W - 1)[:, None] | (j < 2 * C)[None, :]
        inside = live[:, None] & up & down & left & right & (k < 9 * C)[None, :]
        at = r[:, None] * C + (j + (k >= 3 * C) * (W * C) + (k >= 6 * C) * (W * C))[None, :] - (W + 1) * C
    return tl.load(x + first.to(tl.int64) * C + at, mask=inside, other=0)


@triton.jit
def add_group(
    acc1, acc2, x, weight, first, r, live, g, o1, o2,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, G: tl.constexpr, KG: tl.constexpr,
    ACC: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Group ``g`` of taps, added to both tiles of channels; with B2 = 0 there is one tile."""
    K: tl.constexpr = 9 * C // G
    k = tl.arange(0, KG)
    near = shifted_pixels(x, first, r, live, g, H, W, C, G, KG)
    at = (g * K + k)[:, None] * O
    w1 = tl.load(weight + at + o1[None, :], mask=(k < K)[:, None] & (o1 < O)[None, :], other=0)
    if B2 > 0:
        w2 = tl.load(weight + at + o2[None, :], mask=(k < K)[:, None] & (o2 < O)[None, :], other=0)
    acc1 = tl.dot(near, w1, acc1, input_precision="ieee", out_dtype=ACC)
    if B2 > 0:
        acc2 = tl.dot(near, w2, acc2, input_precision="ieee", out_dtype=ACC)
    return acc1, acc2


@cached_launch
@triton.jit
def forward_kernel(
    x, weight, out, positions,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, G: tl.constexpr, KG: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Out (positions, O) from x (positions, C) and weights (9·C, O); a program writes B1 + B2 channels. G is 1 or 9."""
    first = tl.program_id(0) * BM
    r = tl.arange(0, BM)
    live = r < positions - first
    o1 = tl.program_id(1) * (B1 + B2) + tl.arange(0, B1)
    o2 = o1
    acc1 = tl.zeros((BM, B1), ACC)
    acc2 = acc1
    if B2 > 0:
        o2 = tl.program_id(1) * (B1 + B2) + B1 + tl.arange(0, B2)
        acc2 = tl.zeros((BM, B2), ACC)
    if G == 1:
        acc1, acc2 = add_group(
            acc1, acc2, x, weight, first, r, live, 0, o1, o2, H, W, C, O, G, KG, ACC, B2
        )  # fmt: skip
    else:
        for g in range(G):
            acc1, acc2 = add_group(
                acc1, acc2, x, weight, first, r, live, g, o1, o2, H, W, C, O, G, KG, ACC, B2
            )  # fmt: skip
    to = out + first.to(tl.int64) * O + r[:, None] * O
    tl.store(to + o1[None, :], acc1.to(out.dtype.element_ty), mask=live[:, None] & (o1 < O)[None, :])
    if B2 > 0:
        tl.store(to + o2[None, :], acc2.to(out.dtype.element_ty), mask=live[:, None] & (o2 < O)[None, :])


@cached_launch
@triton.jit
def weight_backward_kernel(
    grad, x, out, positions, CHUNK,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, G: tl.constexpr, KG: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
):  # fmt: skip
    """Out (splits, 9·C, O): over a chunk of pixels, neighbours times grad (positions, O). G is 1 or 3."""
    K: tl.constexpr = 9 * C // G
    s = tl.program_id(0)
    r = tl.arange(0, BM)
    o1 = tl.program_id(1) * (B1 + B2) + tl.arange(0, B1)
    acc1a = tl.zeros((KG, B1), ACC)
    if G == 3:
        acc1b = tl.zeros((KG, B1), ACC)
        acc1c = tl.zeros((KG, B1), ACC)
    if B2 > 0:
        o2 = tl.program_id(1) * (B1 + B2) + B1 + tl.arange(0, B2)
        acc2a = tl.zeros((KG, B2), ACC)
        if G == 3:
            acc2b = tl.zeros((KG, B2), ACC)
            acc2c = tl.zeros((KG, B2), ACC)
    end = tl.minimum((s + 1) * CHUNK, positions)
    for step in range(0, CHUNK, BM):
        first = s * CHUNK + step
        live = r < end - first
        at = grad + first.to(tl.int64) * O + r[:, None] * O
        g1 = tl.load(at + o1[None, :], mask=live[:, None] & (o1 < O)[None, :], other=0)
        if B2 > 0:
            g2 = tl.load(at + o2[None, :], mask=live[:, None] & (o2 < O)[None, :], other=0)
        a = tl.trans(shifted_pixels(x, first, r, live, 0, H, W, C, G, KG))
        if G == 3:
            b = tl.trans(shifted_pixels(x, first, r, live, 1, H, W, C, G, KG))
            c = tl.trans(shifted_pixels(x, first, r, live, 2, H, W, C, G, KG))
        acc1a = tl.dot(a, g1, acc1a, input_precision="ieee", out_dtype=ACC)
        if G == 3:
            acc1b = tl.dot(b, g1, acc1b, input_precision="ieee", out_dtype=ACC)
            acc1c = tl.dot(c, g1, acc1c, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            acc2a = tl.dot(a, g2, acc2a, input_precision="ieee", out_dtype=ACC)
            if G == 3:
                acc2b = tl.dot(b, g2, acc2b, input_precision="ieee", out_dtype=ACC)
                acc2c = tl.dot(c, g2, acc2c, input_precision="ieee", out_dtype=ACC)
    k = tl.arange(0, KG)
    to = out + s.to(tl.int64) * (9 * C * O) + k[:, None] * O
    mask1 = (k < K)[:, None] & (o1 < O)[None, :]
    tl.store(to + o1[None, :], acc1a, mask=mask1)
    if G == 3:
        tl.store(to + K * O + o1[None, :], acc1b, mask=mask1)
        tl.store(to + 2 * K * O + o1[None, :], acc1c, mask=mask1)
    if B2 > 0:
        mask2 = (k < K)[:, None] & (o2 < O)[None, :]
        tl.store(to + o2[None, :], acc2a, mask=mask2)
        if G == 3:
            tl.store(to + K * O + o2[None, :], acc2b, mask=mask2)
            tl.store(to + 2 * K * O + o2[None, :], acc2c, mask=mask2)


@cached_launch
@triton.jit
def input_backward_kernel(
    taps, out, positions,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Out (positions, C): the sum of taps (positions, 9·C) of the nine pixels that read this one."""
    first = tl.program_id(0) * BM
    r = tl.arange(0, BM)
    live = r < positions - first
    i = (first + r).to(tl.uint32) % (H * W)
    row = (i // W).to(tl.int32)
    col = (i % W).to(tl.int32)
    c = tl.arange(0, BC)
    near = ()
    for t in tl.static_range(9):
        reads = live & (row >= t // 3 - 1) & (row < H + t // 3 - 1) & (col >= t % 3 - 1) & (col < W + t % 3 - 1)
        inside = reads[:, None] & (c < C)[None, :]
        at = r[:, None] * (9 * C) + c[None, :] + (t * C - ((t // 3 - 1) * W + t % 3 - 1) * 9 * C)
        near = near + (tl.load(taps + first.to(tl.int64) * (9 * C) + at, mask=inside, other=0),)
    acc = tl.zeros((BM, BC), ACC)
    for t in tl.static_range(9):
        acc += near[t].to(ACC)
    to = out + first.to(tl.int64) * C + r[:, None] * C + c[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])


@direct_operator("moesaic::thin_conv")
def thin_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Maps (B, C, H, W) with a pixel of zeros all around, times kernels (O, C, 3, 3): maps (B, O, H, W)."""
    x = to_nhwc(x)
    B, H, W, C = x.shape
    O, positions = weight.shape[0], B * H * W
    out = torch.empty(B, H, W, O, dtype=x.dtype, device=x.device)
    rule = (128, 1, _one_tile_channels(O), 4, 3) if 9 * C <= 32 else (128, 9, _most_channels(O), 8, 3)
    BM, G, most, warps, stages = tile("thin_conv", rule, positions, C, O, W)
    B1, B2 = two_tiles(O, most)
    forward_kernel[(ceil_div(positions, BM), ceil_div(O, B1 + B2))](
        x, _taps_matrix(weight), out, positions, H=H, W=W, C=C, O=O, G=G, KG=power_of_2(9 * C // G, 16),
        ACC=tl_acc(acc_dtype(x.dtype)), BM=BM, B1=B1, B2=B2, **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    return to_nchw(out)


@thin_conv.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return empty_map_like(x, weight.shape[0])


@direct_operator("moesaic::thin_conv_backward")
def thin_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_map: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; empty where there is none."""
    grad = to_nhwc(grad)
    return (
        to_nchw(map_gradient(grad, weight)) if need_map else placeholder(grad),
        weight_gradient(grad, to_nhwc(x), weight) if need_weight else placeholder(grad),
    )


@thin_conv_backward.register_fake
def _(grad, x, weight, need_map, need_weight):
    return (
        empty_map_like(x, x.shape[1]) if need_map else grad.new_empty(0),
        empty_weight_like(weight) if need_weight else grad.new_empty(0),
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> Any:
    if grad is None:
        return None, None
    need_map, need_weight = ctx.needs_input_grad
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_x, grad_weight = thin_conv_backward(grad, *ctx.saved_tensors, need_map, need_weight)
    return grad_x if need_map else None, grad_weight if need_weight else None


thin_conv.register_autograd(_backward, setup_context=_setup)


def map_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of x (B, H, W, C) from that of the output (B, H, W, O)."""
    B, H, W, O = grad.shape
    C, positions = weight.shape[1], B * H * W
    taps = grad.view(positions, O) @ weight.permute(0, 2, 3, 1).reshape(O, 9 * C)
    out = torch.empty(B, H, W, C, dtype=grad.dtype, device=grad.device)
    BM, warps = tile("thin_conv_input", (128, 4), positions, C, O, W)
    input_backward_kernel[(ceil_div(positions, BM),)](
        taps,
        out,
        positions,
        H=H,
        W=W,
        C=C,
        ACC=tl_acc(acc_dtype(grad.dtype)),
        BM=BM,
        BC=power_of_2(C),
        **num_warps(warps),
    )
    return out


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient of kernels (O, C, 3, 3), in their memory layout."""
    B, H, W, O = grad.shape
    C, positions = x.shape[3], B * H * W
    rule = (128, 1, _one_tile_channels(O), 4, 3, 528) if 9 * C <= 32 else (64, 3, _most_channels(O), 8, 3, 132)
    BM, G, most, warps, stages, programs = tile("thin_conv_weight", rule, positions, C, O, W)
    B1, B2 = two_tiles(O, most)
    blocks = ceil_div(O, B1 + B2)
    chunk, splits = split_rows(positions, max(1, programs // blocks), BM)
    sums = torch.empty(splits, 9 * C, O, dtype=acc_dtype(x.dtype), device=x.device)
    weight_backward_kernel[(splits, blocks)](
        grad, x, sums, positions, chunk, H=H, W=W, C=C, O=O, G=G, ACC=tl_acc(sums.dtype),
        KG=power_of_2(9 * C // G, 64 if G == 3 else 16), BM=BM, B1=B1, B2=B2, **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    out = empty_weight_like(weight)
    out.copy_(sum_splits(sums, weight.dtype).view(3, 3, C, O).permute(3, 2, 0, 1))
    return out


def _taps_matrix(weight: Tensor) -> Tensor:
    """Kernels (O, C, 3, 3) as (9·C, O)."""
    O, C = weight.shape[:2]
    return weight.permute(2, 3, 1, 0).reshape(9 * C, O).contiguous()


def _most_channels(channels: int) -> int:
    """Channels of a program: all of them, up to 160."""
    return min(channels, 160)


def _one_tile_channels(channels: int) -> int:
    """Channels of a program with one tile, up to 64."""
    return power_of_2(min(channels, 64) + 1) // 2


def two_tiles(channels: int, most: int) -> tuple[int, int]:
    """Sides of the two tiles in which a program takes up to ``most`` channels, 16 at least; the second may be 0."""
    most = min(channels, most)
    first = power_of_2(most, 16)
    if first > most:
        first //= 2
    return first, power_of_2(most - first, 16) if most > first else 0
