"""A map plus a 1×1 convolution of another map of few channels, in one pass over memory; both gradients in another.

    out = y + x · weightᵀ        grad_y = grad        grad_x = grad · weight        grad_weight = gradᵀ · x

Layouts: y, out and grad (B·H·W, O); x (B·H·W, C) with C ≤ 16; weight (O, C).

    forward_kernel     y, x, weight → out
    backward_kernel    grad → grad_x, and grad_weight in splits
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.models.wide_resnet.triton.thin_conv import two_tiles
from moesaic.ops.direct_operator import direct_operator
from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import (
    acc_dtype,
    ceil_div,
    empty_map_like,
    num_warps_and_stages,
    power_of_2,
    split_rows,
    sum_splits,
    tl_acc,
    to_nchw,
    to_nhwc,
)

__all__ = ["thin_add"]


@cached_launch
@triton.jit
def forward_kernel(
    y, x, weight, out, positions,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr,
):  # fmt: skip
    """Out and y (positions, O), x (positions, C), weight (O, C); a program writes B1 + B2 channels."""
    first = tl.program_id(0) * BM
    r = tl.arange(0, BM)
    k = tl.arange(0, K)
    live = r < positions - first
    o1 = tl.program_id(1) * (B1 + B2) + tl.arange(0, B1)
    inside1 = live[:, None] & (o1 < O)[None, :]
    at = first.to(tl.int64) * O + r[:, None] * O
    y1 = tl.load(y + at + o1[None, :], mask=inside1, other=0)
    if B2 > 0:
        o2 = tl.program_id(1) * (B1 + B2) + B1 + tl.arange(0, B2)
        inside2 = live[:, None] & (o2 < O)[None, :]
        y2 = tl.load(y + at + o2[None, :], mask=inside2, other=0)
    pixels = x + first.to(tl.int64) * C + r[:, None] * C + k[None, :]
    a = tl.load(pixels, mask=live[:, None] & (k < C)[None, :], other=0)
    w1 = tl.load(weight + o1[:, None] * C + k[None, :], mask=(o1 < O)[:, None] & (k < C)[None, :], other=0)
    if B2 > 0:
        w2 = tl.load(weight + o2[:, None] * C + k[None, :], mask=(o2 < O)[:, None] & (k < C)[None, :], other=0)
    acc1 = tl.dot(a, tl.trans(w1), input_precision="ieee", out_dtype=ACC) + y1.to(ACC)
    tl.store(out + at + o1[None, :], acc1.to(out.dtype.element_ty), mask=inside1)
    if B2 > 0:
        acc2 = tl.dot(a, tl.trans(w2), input_precision="ieee", out_dtype=ACC) + y2.to(ACC)
        tl.store(out + at + o2[None, :], acc2.to(out.dtype.element_ty), mask=inside2)


@cached_launch
@triton.jit
def backward_kernel(
    grad, x, weight, grad_x, out, positions, CHUNK,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr,
):  # fmt: skip
    """Gradients of x (positions, C) and, of a chunk of pixels, of weight: out (splits, O, C). B1 + B2 is O at least."""
    s = tl.program_id(0)
    r = tl.arange(0, BM)
    k = tl.arange(0, K)
    o1 = tl.arange(0, B1)
    w1 = tl.load(weight + o1[:, None] * C + k[None, :], mask=(o1 < O)[:, None] & (k < C)[None, :], other=0)
    acc1 = tl.zeros((K, B1), ACC)
    if B2 > 0:
        o2 = B1 + tl.arange(0, B2)
        w2 = tl.load(weight + o2[:, None] * C + k[None, :], mask=(o2 < O)[:, None] & (k < C)[None, :], other=0)
        acc2 = tl.zeros((K, B2), ACC)
    end = tl.minimum((s + 1) * CHUNK, positions)
    for step in range(0, CHUNK, BM):
        first = s * CHUNK + step
        live = r < end - first
        at = grad + first.to(tl.int64) * O + r[:, None] * O
        g1 = tl.load(at + o1[None, :], mask=live[:, None] & (o1 < O)[None, :], other=0)
        if B2 > 0:
            g2 = tl.load(at + o2[None, :], mask=live[:, None] & (o2 < O)[None, :], other=0)
        pixels = first.to(tl.int64) * C + r[:, None] * C + k[None, :]
        inside = live[:, None] & (k < C)[None, :]
        a = tl.trans(tl.load(x + pixels, mask=inside, other=0))
        back = tl.dot(g1, w1, input_precision="ieee", out_dtype=ACC)
        acc1 = tl.dot(a, g1, acc1, input_precision="ieee", out_dtype=ACC)
        if B2 > 0:
            back = tl.dot(g2, w2, back, input_precision="ieee", out_dtype=ACC)
            acc2 = tl.dot(a, g2, acc2, input_precision="ieee", out_dtype=ACC)
        tl.store(grad_x + pixels, back.to(grad_x.dtype.element_ty), mask=inside)
    to = out + s.to(tl.int64) * (O * C) + k[:, None]
    tl.store(to + o1[None, :] * C, acc1, mask=(k < C)[:, None] & (o1 < O)[None, :])
    if B2 > 0:
        tl.store(to + o2[None, :] * C, acc2, mask=(k < C)[:, None] & (o2 < O)[None, :])


@direct_operator("moesaic::thin_add")
def thin_add(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Maps y (B, O, H, W) plus maps x (B, C, H, W) times kernels (O, C, 1, 1), all in channels_last."""
    O, C = weight.shape[:2]
    y, x = to_nhwc(y), to_nhwc(x)
    B, H, W, _ = y.shape
    positions = B * H * W
    out = torch.empty(B, H, W, O, dtype=y.dtype, device=y.device)
    BM, most, warps = tile("thin_add", (64, min(O, 160), 4), positions, C, O)
    B1, B2 = two_tiles(O, most)
    forward_kernel[(ceil_div(positions, BM), ceil_div(O, B1 + B2))](
        y, x, weight.reshape(O, C).contiguous(), out, positions, C=C, O=O, K=power_of_2(C, 16),
        ACC=tl_acc(acc_dtype(y.dtype)), BM=BM, B1=B1, B2=B2, **num_warps_and_stages(warps, 1),
    )  # fmt: skip
    return to_nchw(out)


@thin_add.register_fake
def _(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return empty_map_like(y, weight.shape[0])


@direct_operator("moesaic::thin_add_backward")
def thin_add_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; that of y is ``grad`` itself."""
    O, C = weight.shape[:2]
    grad, x = to_nhwc(grad), to_nhwc(x)
    B, H, W, _ = grad.shape
    positions = B * H * W
    BM, warps, stages, programs = tile("thin_add_backward", (128 if O <= 192 else 64, 8, 3, 264), positions, C, O)
    B1, B2 = two_tiles(O, O)
    chunk, splits = split_rows(positions, programs, BM)
    grad_x = torch.empty(B, H, W, C, dtype=x.dtype, device=x.device)
    sums = torch.empty(splits, O, C, dtype=acc_dtype(x.dtype), device=x.device)
    backward_kernel[(splits,)](
        grad, x, weight.reshape(O, C).contiguous(), grad_x, sums, positions, chunk, C=C, O=O, K=power_of_2(C, 16),
        ACC=tl_acc(sums.dtype), BM=BM, B1=B1, B2=B2, **num_warps_and_stages(warps, stages),
    )  # fmt: skip
    return to_nchw(grad_x), sum_splits(sums, weight.dtype).as_strided(weight.shape, _strides(weight))


@thin_add_backward.register_fake
def _(grad, x, weight):
    return empty_map_like(x, x.shape[1]), weight.new_empty_strided(weight.shape, _strides(weight))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> Any:
    if grad is None:
        return None, None, None
    need_y, need_map, need_weight = ctx.needs_input_grad
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_y = grad if need_y else None
    if not need_map and not need_weight:
        return grad_y, None, None
    grad_x, grad_weight = thin_add_backward(grad, *ctx.saved_tensors)
    return grad_y, grad_x if need_map else None, grad_weight if need_weight else None


thin_add.register_autograd(_backward, setup_context=_setup)


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Strides of the gradient of kernels (O, C, 1, 1): exactly theirs, because fused optimizers compare them."""
    return weight.stride() if weight.is_contiguous() else (weight.shape[1], 1, 1, 1)
