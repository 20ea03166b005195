"""Routed convolution, BatchNorm, ReLU and mean over the map as one torch operator, which never writes the map.

    pooled[b, o] = 1/(H·W) Σ_q max(s·(y[b, q, o] - μ) + β, 0), y = conv over the selected patches

    patch_conv_pooled     x (B, C, H, W) → means (B, E·O), and the statistics (2, E·O) of y

The kernels and the layouts of their tensors are in `pooled_kernels`, and in `pooled_line_kernels` for patches of
several pixels a side.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.models.wide_resnet.triton import pooled_kernels, pooled_line_kernels
from moesaic.ops.direct_operator import direct_operator
from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.launch import (
    PatchDims,
    acc_dtype,
    ceil_div,
    contiguous_or_none,
    num_warps,
    placeholder,
    power_of_2,
    split_rows,
    splits_to_fill,
    tl_acc,
)
from moesaic.ops.triton.operands import (
    Constants,
    PatchOptions,
    RoutedMap,
    needed_gradients,
    needs_input,
)
from moesaic.ops.triton.patch_backward import (
    InputBackward,
    MatmulBackward,
    contiguous_like,
    expert_contributions,
    fake_input_gradients,
    no_input_gradients,
)
from moesaic.ops.triton.scatter import ScatterSpec, dividing_tile, fold_patches
from moesaic.ops.weight_layout import empty_weight_like

__all__ = ["PooledInputs", "patch_conv_pooled", "patch_conv_pooled_backward", "pooled_forward"]

MAX_TAPS = 50
"""Lines of a patch times taps of a kernel up to which kernels unroll them; compiling takes seconds for that many."""
MAX_LOADED_SPLITS = 256
"""Splits of a sum that are loaded at a time."""


class PooledInputs(NamedTuple):
    """Differentiable inputs of `patch_conv_pooled`; also their gradients, or which of them are needed."""

    x: Any
    """(B, C, H, W)"""
    weight: Any
    """(E, O, C, ks, ks)"""
    bias: Any
    """(E, O), or None"""
    gate: Any
    """(B, E, L)"""
    router: Any
    """(E, C, p, p), or None"""
    norm_weight: Any
    """(E, C), or None: of the experts' norm, and ``norm_bias`` likewise."""
    norm_bias: Any
    output_weight: Any
    """(E·O): of the norm behind the experts, and ``output_bias`` likewise."""
    output_bias: Any


class Saved(NamedTuple):
    """What `patch_conv_pooled` returns for the backward pass, besides the means."""

    moments: Tensor
    """(2, E·O)"""
    values: Tensor
    """(E, M1, C)"""
    rows: Tensor
    """(E, MR, O)"""
    place: Tensor
    """(E, MR)"""
    background: Tensor
    """(E, H·W, O)"""
    table: Tensor
    """(5, E·O)"""
    counts: Tensor
    """(2, B, E·O)"""


@dataclass(frozen=True)
class Coverage:
    """The positions that selected patches cover with their halo, which kernels store as rows."""

    dims: PatchDims
    spec: ScatterSpec
    O: int
    on_input: bool
    normed: bool
    """Whether a norm makes unselected positions nonzero for an expert."""

    @property
    def halo(self) -> int:
        """Positions around a patch that its convolution changes; with gates on the output they stay zero."""
        return self.spec.kernel_size // 2 if self.on_input and not self.spec.isolated else 0

    @property
    def side(self) -> int:
        """Side of the square that a patch covers."""
        return self.dims.p + 2 * self.halo

    @property
    def rows_per_patch(self) -> int:
        """Rows of a patch."""
        return self.side**2

    @property
    def by_lines(self) -> bool:
        """Whether kernels process a patch line by line, with every line unrolled: for few and long lines."""
        return self.dims.p > 1 and not self.pointwise and self.dims.p * self.spec.kernel_size**2 <= MAX_TAPS

    @property
    def row_count(self) -> int:
        """Rows of an expert."""
        return self.dims.B * self.dims.L * self.rows_per_patch

    @property
    def neighbours(self) -> int:
        """How many patches away another selected patch may contribute to a row."""
        return 0 if self.spec.isolated else ceil_div(self.spec.kernel_size // 2 + self.halo, self.dims.p)

    @property
    def pointwise(self) -> bool:
        """1×1 kernels, whose contributions are the rows."""
        return self.spec.kernel_size == 1

    def shape(self) -> tuple[int, int, int]:
        """Shape of rows."""
        return self.dims.E, self.dims.padded_rows(self.normed) if self.pointwise else self.row_count, self.O

    @property
    def holds_background(self) -> bool:
        """Whether rows include the background."""
        return not self.on_input and not self.pointwise

    def background_strides(self, background: Tensor | None) -> tuple[int, int]:
        """Strides of the background, or of the bias: from expert to expert and from position to position."""
        positions = self.dims.H * self.dims.W
        return (self.O, 0) if background is None else (positions * self.O, self.O)

    @property
    def pivot(self) -> int:
        """A position far from the borders, in the order of patches: its background is near that of most positions."""
        p, y, x = self.dims.p, self.dims.H // 2, self.dims.W // 2
        return ((y // p) * (self.dims.W // p) + x // p) * p * p + (y % p) * p + x % p


def _one_warp_tile(rows: int, O: int) -> tuple[int, int]:
    """Sides of a tile for a single warp, whose sums and loads need no synchronisation."""
    BO = dividing_tile(O, 32)
    return power_of_2(rows, most=max(512 // BO, 1)), BO


def _one_warp_line_tile(O: int, line: int, numbers: int) -> int:
    """Channels for a single warp that processes a line of positions with ``numbers`` values per thread."""
    return dividing_tile(O, max(32 * numbers // line, 8))


@dataclass(frozen=True)
class CoveredRows:
    """Outputs at covered positions, before the BatchNorm."""

    rows: Tensor
    """(E, MR, O)"""
    place: Tensor
    """(E, MR)"""
    base: Tensor | None
    """(E, H·W, O) or (E, O): background or bias, unless ``rows`` includes it."""
    strides: tuple[int, int]
    """Of ``base``: from expert to expert and from position to position."""


def _covered_rows(
    contributions: Tensor,
    routed: RoutedMap,
    coverage: Coverage,
    bias: Tensor | None,
    background: Tensor | None,
    *,
    stats: bool,
) -> tuple[CoveredRows, Tensor | None]:
    """Rows, and sums (2, S, E, O) for the statistics of y."""
    base, steps = bias if background is None else background, coverage.background_strides(background)
    shape, device = coverage.shape(), contributions.device
    rows = contributions if coverage.pointwise else torch.empty(shape, dtype=contributions.dtype, device=device)
    place = torch.empty(coverage.dims.E, coverage.row_count, dtype=torch.int32, device=device)
    covered = CoveredRows(rows, place, None if coverage.holds_background else base, steps)
    return covered, (_rows_by_line if coverage.by_lines else _rows_by_position)(
        contributions, routed, coverage, base, covered, stats=stats
    )


def _rows_by_line(
    contributions: Tensor,
    routed: RoutedMap,
    coverage: Coverage,
    base: Tensor | None,
    covered: CoveredRows,
    *,
    stats: bool,
) -> Tensor | None:
    """Fills in rows and positions of patches that have several pixels a side."""
    dims, spec, O = coverage.dims, coverage.spec, coverage.O
    patches, acc_type = dims.B * dims.L, acc_dtype(contributions.dtype)
    BO = power_of_2(O, most=32)
    rule = (power_of_2(patches, most=128 // BO), BO, 1, 8)
    BK, BO, warps, share = tile(
        "pooled_line_rows", rule, patches, O, spec.kernel_size, dims.p, dims.E, contributions.element_size()
    )
    blocks, side = ceil_div(O, BO), coverage.side
    chunk, splits = split_rows(patches, splits_to_fill(blocks * side * dims.E, ceil_div(patches, BK)) * share, BK)
    S = splits * side
    sums = torch.empty(2, S, dims.E, O, dtype=acc_type, device=contributions.device) if stats else None
    constexprs = dims.constexprs()
    del constexprs["HW"]
    pooled_line_kernels.line_rows_kernel[(blocks, S, dims.E)](
        contributions, routed.index, routed.slots, routed.output_gate, base, covered.rows, covered.place, sums, patches,
        contributions.shape[1], chunk, S, coverage.pivot, O=O, KS=spec.kernel_size, N=dims.N, H=dims.H,
        HALO=coverage.halo, NEIGHBOURS=coverage.neighbours, BSTEP=covered.strides[0], QSTEP=covered.strides[1],
        HAS_BASE=base is not None, HAS_GATE=routed.output_gate is not None, STATS=stats, ACC=tl_acc(acc_type), BK=BK,
        BH=power_of_2(side), BO=BO, **constexprs, **num_warps(warps),
    )  # fmt: skip
    return sums


def _rows_by_position(
    contributions: Tensor,
    routed: RoutedMap,
    coverage: Coverage,
    base: Tensor | None,
    covered: CoveredRows,
    *,
    stats: bool,
) -> Tensor | None:
    """The same for 1×1 kernels, whose rows are the contributions, for single pixels and for patches with long lines."""
    dims, O, ks, row_count = coverage.dims, coverage.O, coverage.spec.kernel_size, coverage.row_count
    acc_type = acc_dtype(contributions.dtype)
    folded = fold_patches(contributions, dims, ks, O) if ks > 1 and dims.p > 1 else contributions
    rule = (*_one_warp_tile(row_count, O), 1)
    BM, BO, warps = tile("pooled_rows", rule, row_count, O, ks, dims.p, dims.E, contributions.element_size())
    blocks = ceil_div(O, BO) if stats or not coverage.pointwise else 1
    chunk, splits = split_rows(row_count, splits_to_fill(blocks * dims.E, 64) * 4, BM)
    sums = torch.empty(2, splits, dims.E, O, dtype=acc_type, device=folded.device) if stats else None
    pooled_kernels.covered_rows_kernel[(splits, dims.E, blocks)](
        folded, routed.index, routed.slots, routed.output_gate, base, covered.rows, covered.place, sums, row_count,
        folded.stride(0), chunk, splits, *covered.strides, coverage.pivot, O=O, KS=ks, N=dims.N, H=dims.H,
        HALO=coverage.halo, NEIGHBOURS=coverage.neighbours, FLIP=ks > 1 and dims.p == 1, HAS_BASE=base is not None,
        HAS_GATE=routed.output_gate is not None, STATS=stats, ACC=tl_acc(acc_type), BM=BM, BO=BO, **dims.constexprs(),
        **num_warps(warps),
    )  # fmt: skip
    return sums


def _channel_table(
    coverage: Coverage, covered: CoveredRows, sums: Tensor | None,
    after: tuple[Tensor, Tensor, Tensor | None, Tensor | None], eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean, scale and shift of channels, sums of the background (5, E·O); mean and variance (2, E·O)."""
    dims, O = coverage.dims, coverage.O
    acc_type, device = acc_dtype(covered.rows.dtype), covered.rows.device
    table = torch.empty(5, dims.E * O, dtype=acc_type, device=device)
    moments = torch.empty(2, dims.E * O, dtype=acc_type, device=device)
    base = covered.base if coverage.on_input else None
    splits = 1 if sums is None else sums.shape[1]
    BO, HW = power_of_2(O, most=16), dims.H * dims.W
    pooled_kernels.channel_table_kernel[(ceil_div(O, BO), dims.E)](
        sums, base, *after, table, moments, eps, splits, dims.B, *covered.strides, coverage.pivot, E=dims.E, O=O, HW=HW,
        HAS_BASE=base is not None, TRAINING=sums is not None, ACC=tl_acc(acc_type),
        BS=power_of_2(splits, most=MAX_LOADED_SPLITS), BQ=power_of_2(HW, most=128), BO=BO, **num_warps(4),
    )  # fmt: skip
    return table, moments


def _means(
    routed: RoutedMap, coverage: Coverage, covered: CoveredRows, table: Tensor, *, save: bool
) -> tuple[Tensor, Tensor]:
    """Means (B, E·O) and, with ``save``, number and sum of active positions (2, B, E·O)."""
    dims, O, rows = coverage.dims, coverage.O, covered.rows
    pooled = torch.empty(dims.B, dims.E * O, dtype=rows.dtype, device=rows.device)
    counts = torch.empty(2, *pooled.shape, dtype=table.dtype, device=rows.device) if save else placeholder(table)
    BO = dividing_tile(O, 32)
    rule = (power_of_2(dims.L * coverage.rows_per_patch, most=max(128 // BO, 1)), BO, 1)
    BM, BO, warps = tile("pooled_mean", rule, dims.L * coverage.rows_per_patch, O, dims.E, rows.element_size())
    pooled_kernels.mean_kernel[(dims.B, dims.E, ceil_div(O, BO))](
        rows, covered.place, routed.output_gate, covered.base, table, pooled, counts, coverage.row_count,
        rows.stride(0), *covered.strides, dims.B, E=dims.E, O=O, L=dims.L, RS=coverage.rows_per_patch, HW=dims.H *
        dims.W, HAS_BASE=covered.base is not None, HAS_GATE=routed.output_gate is not None, SAVE=save,
        ACC=tl_acc(table.dtype), BM=BM, BO=BO, **num_warps(warps),
    )  # fmt: skip
    return pooled, counts


def _grad_terms(
    grad: Tensor, saved: Saved, after: tuple[Tensor, Tensor], eps: float, *, training: bool, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of y's gradient (6, E·O), gradients of the weight and bias ``after``."""
    B, X = grad.shape
    grad_terms = torch.empty(6, X, dtype=saved.table.dtype, device=grad.device)
    grad_weight, grad_bias = (torch.empty_like(each) for each in after)
    BX, BB = power_of_2(X, most=16), power_of_2(B, most=64)
    pooled_kernels.grad_terms_kernel[(ceil_div(X, BX),)](
        grad, saved.counts, saved.table, saved.moments, grad_terms, grad_weight, grad_bias, eps, B, X=X, HW=positions,
        TRAINING=training, ACC=tl_acc(grad_terms.dtype), BB=BB, BX=BX, **num_warps(4),
    )  # fmt: skip
    return grad_terms, grad_weight, grad_bias


def _row_gradients(
    grad: Tensor, routed: RoutedMap, coverage: Coverage, covered: CoveredRows, grad_terms: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of rows; with ``sums`` their part (S, E, ks², O) in that of background taps."""
    if coverage.by_lines:
        return _row_gradients_by_line(grad, routed, coverage, covered, grad_terms, sums=sums)
    dims, O, row_count = coverage.dims, coverage.O, coverage.row_count
    ks = coverage.spec.kernel_size if coverage.normed else 1
    out = torch.empty(coverage.shape(), dtype=covered.rows.dtype, device=grad.device)
    rows = out.shape[1]
    rule = (*_one_warp_tile(row_count, O), 1)
    BM, BO, warps = tile("pooled_rows_backward", rule, row_count, O, ks, dims.E, out.element_size())
    chunk, splits = split_rows(rows, splits_to_fill(ceil_div(O, BO) * dims.E, 64) * 4, BM)
    tap_sums = torch.empty(splits, dims.E, ks**2, O, dtype=grad_terms.dtype, device=grad.device) if sums else None
    pooled_kernels.row_backward_kernel[(splits, dims.E, ceil_div(O, BO))](
        grad, covered.rows, covered.base, covered.place, routed.output_gate, grad_terms, out, tap_sums, row_count, rows,
        covered.rows.stride(0), *covered.strides, chunk, O=O, KS=ks, RS=coverage.rows_per_patch, H=dims.H,
        ISOLATED=coverage.spec.isolated, HAS_BASE=covered.base is not None, HAS_GATE=routed.output_gate is not None,
        SUMS=sums, ACC=tl_acc(grad_terms.dtype), BM=BM, BT=power_of_2(ks**2), BO=BO, **dims.constexprs(),
        **num_warps(warps),
    )  # fmt: skip
    return out, tap_sums


def _row_gradients_by_line(
    grad: Tensor, routed: RoutedMap, coverage: Coverage, covered: CoveredRows, grad_terms: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The same for patches that have several pixels a side."""
    dims, O = coverage.dims, coverage.O
    ks, patches = coverage.spec.kernel_size if coverage.normed else 1, dims.B * dims.L
    out = torch.empty_like(covered.rows)
    BH = power_of_2(coverage.side)
    # a thread has ks² accumulators for each number, so that larger kernels get fewer numbers
    rule = (_one_warp_line_tile(O, BH, 4 if ks <= 3 else 2), 1, 4)
    BO, warps, share = tile("pooled_line_backward", rule, dims.M, O, ks, dims.p, dims.E, out.element_size())
    blocks = ceil_div(O, BO)
    chunk, splits = split_rows(patches, splits_to_fill(blocks * dims.E, patches) * share, 1)
    tap_sums = torch.empty(splits, dims.E, ks**2, O, dtype=grad_terms.dtype, device=grad.device) if sums else None
    pooled_line_kernels.line_backward_kernel[(blocks, splits, dims.E)](
        grad, covered.rows, covered.base, routed.index, covered.place, routed.output_gate, grad_terms, out, tap_sums,
        patches, chunk, O=O, H=dims.H, HALO=coverage.halo, ISOLATED=coverage.spec.isolated, BSTEP=covered.strides[0],
        QSTEP=covered.strides[1], HAS_BASE=covered.base is not None, HAS_GATE=routed.output_gate is not None, SUMS=sums,
        TAPS=ks, ACC=tl_acc(grad_terms.dtype), BH=BH, BO=BO, **dims.constexprs(), **num_warps(warps),
    )  # fmt: skip
    return out, tap_sums


def _scatter_backward(
    grad: Tensor, routed: RoutedMap, coverage: Coverage, tap_grad: Tensor | None, experts: range
) -> Tensor:
    """Gradient of some experts' contributions (…, M1, ks²·O) from that of rows and of background taps."""
    dims, O, ks, rows = coverage.dims, coverage.O, coverage.spec.kernel_size, coverage.dims.padded_rows(coverage.normed)
    out = torch.empty(len(experts), rows, ks**2 * O, dtype=grad.dtype, device=grad.device)
    rule = (32, power_of_2(O, most=128), 8)
    BM, BO, warps = tile("pooled_scatter_backward", rule, dims.M, O, ks, dims.p, out.element_size())
    constexprs = dims.constexprs()
    del constexprs["HW"]
    pooled_kernels.scatter_backward_kernel[(ceil_div(rows, BM), len(experts), ceil_div(O, BO))](
        grad, routed.index, routed.slots, tap_grad, out, dims.M, rows, experts.start, grad.stride(0), O=O, KS=ks,
        N=dims.N, H=dims.H, HALO=coverage.halo, ISOLATED=coverage.spec.isolated,
        HAS_GATE=routed.output_gate is not None, HAS_TAP_GRAD=tap_grad is not None, BM=BM, BO=BO, **constexprs,
        **num_warps(warps),
    )  # fmt: skip
    return out


def _gate_dots(
    grad: Tensor, routed: RoutedMap, coverage: Coverage, covered: CoveredRows, grad_terms: Tensor
) -> Tensor | None:
    """Gradient of gates on the output (B, E, L, p²), pixel by pixel."""
    if routed.output_gate is None:
        return None
    dims, O = coverage.dims, coverage.O
    gate_dots = torch.empty(*routed.index.shape, dims.p**2, dtype=grad_terms.dtype, device=grad.device)
    BM, BO = 32, dividing_tile(O, 64)
    pooled_kernels.gate_dots_kernel[(ceil_div(dims.M, BM), dims.E)](
        grad, covered.rows, covered.base, covered.place, routed.output_gate, grad_terms, gate_dots, dims.M,
        covered.rows.stride(0), *covered.strides, E=dims.E, O=O, L=dims.L, P=dims.p, HW=dims.H * dims.W,
        HAS_BASE=covered.base is not None, ACC=tl_acc(grad_terms.dtype), BM=BM, BO=BO, **num_warps(4),
    )  # fmt: skip
    return gate_dots


def _tap_gradient(
    sums: Tensor, routed: RoutedMap, coverage: Coverage, base: Tensor | None, steps: tuple[int, int], grad_terms: Tensor
) -> Tensor:
    """Gradient (E, ks², O) of background taps, or (E, 1, O) of a bias."""
    dims, (splits, E, taps, O) = coverage.dims, sums.shape
    HW, constexprs = dims.H * dims.W, dims.constexprs()
    del constexprs["L"]
    out = torch.empty(E, taps, O, dtype=grad_terms.dtype, device=sums.device)
    BO = dividing_tile(O, 32)
    pooled_kernels.tap_gradient_kernel[(E, taps, ceil_div(O, BO))](
        sums, base, grad_terms, out, splits, dims.B, *steps, O=O,
        KS=coverage.spec.kernel_size if coverage.normed else 1, H=dims.H, ISOLATED=coverage.spec.isolated,
        HAS_GATE=routed.output_gate is not None, ACC=tl_acc(grad_terms.dtype),
        BS=power_of_2(splits, most=MAX_LOADED_SPLITS), BQ=power_of_2(HW, most=64), BO=BO, **constexprs, **num_warps(4),
    )  # fmt: skip
    return out


def pooled_forward(
    inputs: PooledInputs, fixed: Constants, opts: PatchOptions, eps: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `patch_conv_pooled` returns."""
    routed = RoutedMap.of(inputs, fixed, opts, eps[0])
    bias = contiguous_or_none(inputs.bias)
    coverage = _coverage(routed.dims, inputs.weight, opts, normed=routed.norm is not None)
    values, contributions, background = expert_contributions(routed, inputs.weight, bias, coverage.spec)
    covered, sums = _covered_rows(contributions, routed, coverage, bias, background, stats=fixed.output_mean is None)
    after = (
        inputs.output_weight.contiguous(),
        inputs.output_bias.contiguous(),
        contiguous_or_none(fixed.output_mean),
        contiguous_or_none(fixed.output_var),
    )
    table, moments = _channel_table(coverage, covered, sums, after, eps[1])
    pooled, counts = _means(routed, coverage, covered, table, save=opts.save)
    if not opts.save:
        return pooled, moments, *(placeholder(inputs.x) for _ in range(6))
    background = placeholder(inputs.x) if background is None else background
    return pooled, *Saved(moments, values, covered.rows, covered.place, background, table, counts)


@direct_operator("moesaic::patch_conv_pooled")
def patch_conv_pooled(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, router: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor, constants: Sequence[Tensor | None],
    options: Sequence[int], eps: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Means (B, E·O) over the map of ReLU(BatchNorm(y)), y a `patch_conv`, and `Saved`, whose moments are those of y.

    Without ``constants.output_mean`` and ``output_var`` BatchNorm takes y's own statistics. ``eps`` is that of the
    experts' norm and of the BatchNorm behind them. Without ``options.save`` all but the moments is empty.
    """
    inputs = PooledInputs(x, weight, bias, gate, router, norm_weight, norm_bias, output_weight, output_bias)
    return pooled_forward(inputs, Constants(*constants), PatchOptions.unflatten(options), eps)


@patch_conv_pooled.register_fake
def _(
    x, weight, bias, gate, router, norm_weight, norm_bias, output_weight, output_bias, constants, options, eps,
):  # fmt: skip
    E, O, C, _, _ = weight.shape
    opts, normed = PatchOptions.unflatten(options), norm_weight is not None
    dims = PatchDims.of(x.permute(0, 2, 3, 1), constants[0], opts.patch_size)
    coverage = _coverage(dims, weight, opts, normed=normed)
    acc_type = acc_dtype(weight.dtype)
    pooled = weight.new_empty(dims.B, E * O)
    moments = weight.new_empty(2, E * O, dtype=acc_type)
    if not opts.save:
        return pooled, moments, *(x.new_empty(0) for _ in range(6))
    return pooled, *Saved(
        moments,
        values=weight.new_empty(E, dims.padded_rows(normed), C),
        rows=weight.new_empty(coverage.shape()),
        place=weight.new_empty(E, coverage.row_count, dtype=torch.int32),
        background=weight.new_empty(E, dims.H * dims.W, O, dtype=acc_type) if normed else x.new_empty(0),
        table=weight.new_empty(5, E * O, dtype=acc_type),
        counts=weight.new_empty(2, dims.B, E * O, dtype=acc_type),
    )


@direct_operator("moesaic::patch_conv_pooled_backward")
def patch_conv_pooled_backward(
    grad: Tensor, saved: Sequence[Tensor], inputs: Sequence[Tensor | None], constants: Sequence[Tensor | None],
    options: Sequence[int], eps: Sequence[float], need_input: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `PooledInputs`, empty where there is none, from that of the means."""
    given, fixed, saved_tensors = PooledInputs(*inputs), Constants(*constants), Saved(*saved)
    opts = PatchOptions.unflatten(options)
    routed = RoutedMap.of(given, fixed, opts, eps[0])
    dims, norm, grad = routed.dims, routed.norm is not None, grad.contiguous()
    weight, bias = given.weight, contiguous_or_none(given.bias)
    coverage = _coverage(dims, weight, opts, normed=norm)
    matmuls = MatmulBackward(routed, weight, saved_tensors.values, need_input=need_input, need_weight=need_weight)
    base = saved_tensors.background if norm else bias
    covered = CoveredRows(
        saved_tensors.rows,
        saved_tensors.place,
        None if coverage.holds_background else base,
        coverage.background_strides(saved_tensors.background if norm else None),
    )
    grad_terms, grad_output_weight, grad_output_bias = _grad_terms(
        grad, saved_tensors, (given.output_weight, given.output_bias), eps[1], training=fixed.output_mean is None,
        positions=dims.H * dims.W,
    )  # fmt: skip
    gate_dots = _gate_dots(grad, routed, coverage, covered, grad_terms) if need_input else None
    of_rows, sums = _row_gradients(grad, routed, coverage, covered, grad_terms, sums=norm or bias is not None)
    tap_grad = None if sums is None else _tap_gradient(sums, routed, coverage, base, covered.strides, grad_terms)
    back = InputBackward(routed, gate_dots, centre=True) if need_input else None

    def contribution_grad(group: range) -> Tensor:
        return _scatter_backward(of_rows, routed, coverage, tap_grad if norm else None, group)

    if coverage.pointwise:
        matmuls.run(lambda _: of_rows, tap_grad, back)
    else:
        matmuls.run(contribution_grad, None, back)
    grad_bias = placeholder(grad)
    if bias is not None and tap_grad is not None:
        grad_bias = tap_grad[:, tap_grad.shape[1] // 2].to(bias.dtype, copy=True)
    of_input = no_input_gradients(grad) if back is None else back.finish(matmuls.side)
    grad_weight = matmuls.finish()
    grad_weight = placeholder(grad) if grad_weight is None else grad_weight
    return PooledInputs(of_input.x, grad_weight, grad_bias, *of_input[1:], grad_output_weight, grad_output_bias)


@patch_conv_pooled_backward.register_fake
def _(grad, saved, inputs, constants, options, eps, need_input, need_weight):
    given = PooledInputs(*inputs)
    of_input = fake_input_gradients(grad, given, need_input)
    grad_weight = empty_weight_like(given.weight) if need_weight else grad.new_empty(0)
    grad_bias = grad.new_empty(0) if given.bias is None else contiguous_like(given.bias)
    of_norm = contiguous_like(given.output_weight), contiguous_like(given.output_bias)
    return of_input.x, grad_weight, grad_bias, *of_input[1:], *of_norm


def _coverage(dims: PatchDims, weight: Tensor, options: PatchOptions, *, normed: bool) -> Coverage:
    spec = ScatterSpec(weight.shape[3], options.isolated, False)
    return Coverage(dims, spec, weight.shape[1], options.gate_on_input, normed)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *differentiable, constants, ctx.options, ctx.eps = inputs
    _, *saved = output
    ctx.no_constants = Constants(*constants).no_gradients()
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved, *differentiable, *constants)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    first, last = len(Saved._fields), len(Saved._fields) + len(PooledInputs._fields)
    needs = PooledInputs(*ctx.needs_input_grad[: len(PooledInputs._fields)])
    if grad is None:
        return *(None for _ in needs), ctx.no_constants, None, None
    tensors = ctx.saved_tensors
    gradients = patch_conv_pooled_backward(
        grad, tensors[:first], tensors[first:last], tensors[last:], ctx.options, ctx.eps, needs_input(needs),
        needs.weight,
    )  # fmt: skip
    return *needed_gradients(gradients, needs), ctx.no_constants, None, None


patch_conv_pooled.register_autograd(_backward, setup_context=_setup)
