"""A convolution with gated channels that reads and computes the open blocks alone (implicit GEMM).

    z[b, q, o] = gate[b, o] · (Σ_{t, c of open blocks} weight[o, c, t] · x[b, q · stride + t - padding, c] + bias[o])
    y = maxpool(relu(z + residual)), where residual, ReLU and 2×2 pooling are optional

Layouts: x (B, H, W, C) by its strides; residual and y (B, H', W', O), y after pooling; weight and bias as in
`moesaic.ops.channel.gpu_conv_operands`; order, gates and counts (`OpenBlockLists`) say which blocks an image opens.

A program computes a tile of pixels of one image and of its open output channels, numbered without gaps: column n is
channel n mod block of the image's open block n div block, and likewise for the rows of the weights. Neither closed
input nor, where the consumer does not read them (CLOSED_OUT false), closed output is touched: their memory may hold
anything. Otherwise closed output is zero, or the residual.

Images never share a program, on small maps either. Those in one tile would have to loop over the blocks that any of
them opens: with a quarter open, four images open two thirds, and the loop, which is what a small map waits for, is 2.7
times as long. A 2×2 map fills 4 of the 16 rows that tensor cores take, but it is bound by reading weights, not by them.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.ops import tile_sizes
from moesaic.ops.channel.gpu_conv_operands import (
    BlockedConv,
    ConvGeometry,
    Epilogue,
    Gating,
    LayerBlocks,
    OpenBlockLists,
)
from moesaic.ops.tile_sizes import Tile, tile
from moesaic.ops.triton.cached_launch import cached_launch
from moesaic.ops.triton.launch import INTERPRETED, TARGET_PROGRAMS, ceil_div, num_warps_and_stages, power_of_2, tl_acc

__all__ = ["channel_conv"]


@cached_launch
@triton.jit(do_not_specialize=["in_layer", "in_start", "out_layer", "out_start"])
def channel_conv_kernel(
    x, weight, bias, residual, order, gates, counts, y,
    xb, xh, xw, xc, H, W, C, O, OH, OW, ROW_TILES, COLUMN_TILES, BLOCKS, LAYERS,
    in_layer, in_start, out_layer, out_start,
    KS: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    GATED_IN: tl.constexpr, GATED_OUT: tl.constexpr, CLOSED_OUT: tl.constexpr, RESIDUAL: tl.constexpr,
    RELU: tl.constexpr, POOL: tl.constexpr, RUN_IN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of pixels of an image and of its open output channels."""
    TAPS: tl.constexpr = KS * KS
    WINDOW: tl.constexpr = 4 if POOL else 1
    program = tl.program_id(0)
    row_tile = program % ROW_TILES
    column_tile = program // ROW_TILES % COLUMN_TILES
    b = (program // ROW_TILES // COLUMN_TILES).to(tl.int64)
    in_blocks = tl.cdiv(C, BI)
    out_blocks = tl.cdiv(O, BO)
    if GATED_IN:
        open_in = tl.load(counts + b * LAYERS + in_layer)
    else:
        open_in = in_blocks
    if GATED_OUT:
        open_out = tl.load(counts + b * LAYERS + out_layer)
        if not CLOSED_OUT and column_tile * BN >= open_out * BO:
            return
    else:
        open_out = out_blocks
    n = column_tile * BN + tl.arange(0, BN)
    slot_out = n // BO
    is_open = slot_out < open_out
    if GATED_OUT:
        block_out = tl.load(order + b * BLOCKS + out_start + slot_out, mask=slot_out < out_blocks, other=0)
    else:
        block_out = slot_out
    o = block_out * BO + n % BO
    # the places of a pooling window are next to each other in a tile
    r = row_tile * BM + tl.arange(0, BM)
    if POOL:
        place = r % WINDOW
        oy = r // WINDOW // (OW // 2) * 2 + place // 2
        ox = r // WINDOW % (OW // 2) * 2 + place % 2
        results = (OH // 2) * (OW // 2)
    else:
        oy = r // OW
        ox = r % OW
        results = OH * OW
    rm = r < results * WINDOW
    top = oy * STRIDE - PADDING
    left = ox * STRIDE - PADDING
    from_image = x + b * xb
    from_filter = weight + (block_out * in_blocks).to(tl.int64) * (TAPS * BO * BI) + n % BO * BI
    steps = tl.cdiv(open_in * BI, BK) * TAPS
    if column_tile * BN >= open_out * BO:
        steps = 0
    acc = tl.zeros((BM, BN), ACC)
    # one loop over tiles of input channels and taps, so that loads of all steps are pipelined
    for step in range(steps):
        tap = step % TAPS
        first = step // TAPS * BK
        if BI % BK == 0:  # a tile is in one block, whose number is loaded once
            block_in = first // BI
            if GATED_IN:
                block_in = tl.load(order + b * BLOCKS + in_start + block_in)
            k = first % BI + tl.arange(0, BK)
            km = tl.full((BK,), True, tl.int1)
        else:
            block_in = (first + tl.arange(0, BK)) // BI
            k = (first + tl.arange(0, BK)) % BI
            km = block_in < open_in
            if GATED_IN:
                block_in = tl.load(order + b * BLOCKS + in_start + block_in, mask=km, other=0)
        c = tl.max_contiguous(tl.multiple_of(block_in * BI + k, RUN_IN), RUN_IN)
        py = top + tap // KS
        px = left + tap % KS
        inside = rm & (py >= 0) & (py < H) & (px >= 0) & (px < W)
        v = tl.load(from_image + (py * xh + px * xw)[:, None] + (c * xc)[None, :],
                    mask=inside[:, None] & (km & (c < C))[None, :], other=0)  # fmt: skip
        piece = tl.max_contiguous(tl.multiple_of((block_in * TAPS + tap) * (BO * BI) + k, RUN_IN), RUN_IN)
        w = tl.load(from_filter[None, :] + piece[:, None], mask=km[:, None] & is_open[None, :], other=0)
        if UPCAST:  # the interpreter's numpy knows no bfloat16
            v, w = v.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(v, w, acc, input_precision=PRECISION, out_dtype=ACC)
    om = (slot_out < out_blocks) & (o < O)
    acc += tl.load(bias + o, mask=om, other=0).to(ACC)[None, :]
    if GATED_OUT:
        gate = tl.load(gates + b * BLOCKS + out_start + slot_out, mask=is_open, other=0).to(ACC)
        acc = tl.where(is_open[None, :], acc * gate[None, :], 0.0)
        if not CLOSED_OUT:
            om = om & is_open
    if RESIDUAL:
        at = (b * OH * OW + oy * OW + ox) * O
        acc += tl.load(residual + at[:, None] + o[None, :], mask=rm[:, None] & om[None, :], other=0).to(ACC)
    if RELU:
        acc = tl.where(acc < 0, 0.0, acc)  # NaN stays
    if POOL:
        windows = tl.reshape(acc, (BM // WINDOW, WINDOW, BN))
        any_nan = tl.max((windows != windows).to(tl.int32), 1) > 0  # which tl.max leaves out
        acc = tl.where(any_nan, float("nan"), tl.max(windows, 1))
    q = row_tile * (BM // WINDOW) + tl.arange(0, BM // WINDOW)
    to = (b * results + q) * O
    tl.store(y + to[:, None] + o[None, :], acc.to(y.dtype.element_ty), mask=(q < results)[:, None] & om[None, :])


def channel_conv(
    x: Tensor,
    conv: BlockedConv,
    gating: Gating,
    lists: OpenBlockLists | None,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Maps (B, O, H', W') in channels_last, of maps (B, C, H, W) in any memory format.

    Args:
        x: the map; closed channels may hold anything.
        conv: the convolution.
        gating: which of its channels are gated.
        lists: the open blocks of all layers; None where nothing is gated.
        epilogue: what follows.
        residual: maps (B, O, H', W') in channels_last, before pooling, that are added before the ReLU.
    """
    tiles = tile_sizes.version()
    plan = _plan if tiles is not None else _plan.__wrapped__  # tiles that are being timed change all the time
    launch = plan(
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        tiles,
        conv.geometry,
        gating,
        epilogue,
        residual is not None,
        _precision(),
    )
    y = torch.empty(launch.size, dtype=x.dtype, device=x.device)
    if launch.programs:
        if lists is None:
            order = gates = counts = y  # not read
        else:
            order, gates, counts = lists
        channel_conv_kernel[(launch.programs,)](
            x, conv.weight, conv.bias, None if residual is None else residual.permute(0, 2, 3, 1),
            order, gates, counts, y, *launch.sizes, order.stride(0), counts.stride(0), *launch.layers,
            **launch.constants,
        )  # fmt: skip
    return y.permute(0, 3, 1, 2)


class _Launch(NamedTuple):
    """A launch of the kernel but for its tensors."""

    programs: int
    size: tuple[int, ...]
    """Of the output, in NHWC."""
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tiles: int | None,
    conv: ConvGeometry,
    gating: Gating,
    epilogue: Epilogue,
    adds: bool,
    precision: str,
) -> _Launch:
    """The launch for maps of a layout; working it out takes the host longer than the kernel takes the GPU.

    Args:
        shape: of the maps.
        strides: of the maps.
        dtype: of the maps.
        device: of the maps, whose tiles were measured.
        tiles: the version of the measured tiles.
        conv: the convolution.
        gating: which of its channels are gated.
        epilogue: what follows.
        adds: whether a residual is added.
        precision: of products of float32.
    """
    B, C, H, W = shape
    OH, OW = conv.output_size(H, W)
    PH, PW = (OH // 2, OW // 2) if epilogue.pool else (OH, OW)
    size = (B, PH, PW, conv.out_channels)
    if not math.prod(size):
        return _Launch(0, size, (), (), {})
    rows = PH * PW * (4 if epilogue.pool else 1)
    ins, outs = gating.ins or _NOT_GATED, gating.outs or _NOT_GATED
    BO, BI = conv.block_out, conv.block_in
    columns = conv.out_channels if gating.outs is None or gating.write_closed else outs.most * BO
    depth = C if gating.ins is None else ins.most * BI
    BM, BN, BK, warps, stages = _tile(B, rows, columns, depth, BI, dtype.itemsize)
    row_tiles, column_tiles = ceil_div(rows, BM), ceil_div(columns, BN)
    xb, xc, xh, xw = strides
    constants = {
        "KS": conv.kernel_size, "STRIDE": conv.stride, "PADDING": conv.padding, "BO": BO, "BI": BI,
        "GATED_IN": gating.ins is not None, "GATED_OUT": gating.outs is not None, "CLOSED_OUT": gating.write_closed,
        "RESIDUAL": adds, "RELU": epilogue.relu, "POOL": epilogue.pool, "RUN_IN": min(_power_of_2_in(BI), BK),
        "PRECISION": precision, "UPCAST": INTERPRETED and dtype.itemsize == 2, "ACC": tl_acc(dtype),
        "BM": BM, "BN": BN, "BK": BK, **num_warps_and_stages(warps, stages),
    }  # fmt: skip
    return _Launch(
        B * row_tiles * column_tiles,
        size,
        (xb, xh, xw, xc, H, W, C, conv.out_channels, OH, OW, row_tiles, column_tiles),
        (ins.layer, ins.start, outs.layer, outs.start),
        constants,
    )


_NOT_GATED = LayerBlocks(0, 0, 0, 0)


def _power_of_2_in(size: int) -> int:
    """The largest power of 2 that divides a size."""
    return size & -size


def _precision() -> str:
    """Of float32: TF32 where torch's own convolutions use it."""
    # torch.backends.cudnn.conv.fp32_precision, in a tenth of the time
    setting = torch._C._get_fp32_precision_getter("cuda", "conv")
    return "tf32" if setting == "tf32" else "ieee"


def _tile(batch: int, rows: int, columns: int, depth: int, block: int, itemsize: int) -> Tile:
    """Sides of a tile in pixels, output and input channels; warps, pipeline stages."""
    BM, BN = power_of_2(rows, least=16, most=128), power_of_2(columns, least=16, most=64)
    # few images: smaller tiles, until every multiprocessor has one
    while batch * ceil_div(rows, BM) * ceil_div(columns, BN) < TARGET_PROGRAMS // 4 and max(BM, BN) > 16:
        BM, BN = (BM // 2, BN) if BM >= BN else (BM, BN // 2)
    most = 64 if itemsize <= 2 else 32
    # part of a block where that is enough for tensor cores, else several blocks
    within = _power_of_2_in(block)
    BK = min(within, most) if within >= 16 else power_of_2(depth, least=16, most=most)
    rule = (BM, BN, BK, 8 if BM * BN > 4096 else 4, 4 if itemsize <= 2 else 3)
    return tile("channel_conv", rule, batch, rows, columns, depth, block, itemsize)
