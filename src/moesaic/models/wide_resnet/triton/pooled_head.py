"""Convolutions over chosen patches with the BatchNorm, ReLU and mean over the map that follow, as one torch operation.

    patch_conv_pooled     x → the mean of each image and channel, and the statistics of what was normalised

The map in between is never written: see `pooled_kernels`, and `pooled_line_kernels` for patches of several pixels.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from moesaic.models.wide_resnet.triton import pooled_kernels, pooled_line_kernels
from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.launch import Sizes, acc, ceil, dense, fill, parts, placeholder, power_of_2, warps, wide
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
from moesaic.ops.triton.scatter import Landing, landed_patches, whole_blocks
from moesaic.ops.weight_layout import laid_out

__all__ = ["patch_conv_pooled"]

MOST_TAPS = 50
"""Lines of a patch times taps of a kernel, up to which kernels are compiled with each of them written out.

Compiling takes seconds for as many."""
PARTS = 256
"""So many parts of a sum are read at a time."""


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
    resting: Tensor
    """(E, H·W, O)"""
    table: Tensor
    """(5, E·O)"""
    counts: Tensor
    """(2, B, E·O)"""


@dataclass(frozen=True)
class _Reach:
    """The rows that chosen patches reach, and how kernels find them."""

    sizes: Sizes
    landing: Landing
    O: int
    on_input: bool
    normed: bool
    """Whether experts answer to positions that they did not choose."""

    @property
    def halo(self) -> int:
        """How far a patch reaches over its border; with gates on the output nothing is there."""
        return self.landing.kernel // 2 if self.on_input and not self.landing.alone else 0

    @property
    def side(self) -> int:
        """Of the square that a patch reaches."""
        return self.sizes.p + 2 * self.halo

    @property
    def each(self) -> int:
        """Rows of a patch."""
        return self.side**2

    @property
    def by_lines(self) -> bool:
        """Whether kernels take a patch line by line, with every line written out: that is for few and long ones."""
        return self.sizes.p > 1 and not self.small and self.sizes.p * self.landing.kernel**2 <= MOST_TAPS

    @property
    def number(self) -> int:
        """Rows of an expert."""
        return self.sizes.B * self.sizes.L * self.each

    @property
    def near(self) -> int:
        """How many patches away another one may give something to a row."""
        return 0 if self.landing.alone else ceil(self.landing.kernel // 2 + self.halo, self.sizes.p)

    @property
    def small(self) -> bool:
        """Rows are contributions as they stand."""
        return self.landing.kernel == 1

    def shape(self) -> tuple[int, int, int]:
        """Of rows."""
        return self.sizes.E, self.sizes.rows(self.normed) if self.small else self.number, self.O

    @property
    def whole(self) -> bool:
        """Whether rows hold what experts answer at rest already."""
        return not self.on_input and not self.small

    def steps(self, resting: Tensor | None) -> tuple[int, int]:
        """From expert to expert and from position to position of what is there at rest."""
        positions = self.sizes.H * self.sizes.W
        return (self.O, 0) if resting is None else (positions * self.O, self.O)

    @property
    def pivot(self) -> int:
        """A position far from borders, in the order of patches."""
        p, y, x = self.sizes.p, self.sizes.H // 2, self.sizes.W // 2
        return ((y // p) * (self.sizes.W // p) + x // p) * p * p + (y % p) * p + x % p


def _tile_of(rows: int, O: int) -> tuple[int, int]:
    """Sides of a tile for a single warp, within which sums and lookups need not wait for others."""
    BO = whole_blocks(O, 32)
    return power_of_2(rows, most=max(512 // BO, 1)), BO


def _line_tile(O: int, line: int, numbers: int) -> int:
    """Channels for a single warp that takes a line of positions, each of its threads so many numbers at a time."""
    return whole_blocks(O, max(32 * numbers // line, 8))


@dataclass(frozen=True)
class _Found:
    """What the forward pass leaves to the backward pass."""

    rows: Tensor
    """(E, MR, O)"""
    place: Tensor
    """(E, MR)"""
    base: Tensor | None
    """(E, H·W, O) or (E, O): what is there at rest, unless ``rows`` has it."""
    steps: tuple[int, int]


def _reach(
    contributions: Tensor, routed: RoutedMap, reach: _Reach, bias: Tensor | None, resting: Tensor | None, *, stats: bool
) -> tuple[_Found, Tensor | None]:
    """Rows, and sums (2, S, E, O) for the statistics of y."""
    base, steps = bias if resting is None else resting, reach.steps(resting)
    shape, device = reach.shape(), contributions.device
    rows = contributions if reach.small else torch.empty(shape, dtype=contributions.dtype, device=device)
    place = torch.empty(reach.sizes.E, reach.number, dtype=torch.int32, device=device)
    found = _Found(rows, place, None if reach.whole else base, steps)
    return found, (_land if reach.by_lines else _gathered)(contributions, routed, reach, base, found, stats=stats)


def _land(
    contributions: Tensor, routed: RoutedMap, reach: _Reach, base: Tensor | None, found: _Found, *, stats: bool
) -> Tensor | None:
    """Fills in rows and places of patches that have several pixels a side."""
    sizes, landing, O = reach.sizes, reach.landing, reach.O
    patches, full = sizes.B * sizes.L, wide(contributions.dtype)
    BO = power_of_2(O, most=32)
    rule = (power_of_2(patches, most=128 // BO), BO, 1, 8)
    BK, BO, wide_by, share = tile(
        "land", rule, patches, O, landing.kernel, sizes.p, sizes.E, contributions.element_size()
    )
    blocks, side = ceil(O, BO), reach.side
    chunk, splits = parts(patches, fill(blocks * side * sizes.E, ceil(patches, BK)) * share, BK)
    S = splits * side
    sums = torch.empty(2, S, sizes.E, O, dtype=full, device=contributions.device) if stats else None
    constants = sizes.constants()
    del constants["HW"]
    pooled_line_kernels.land_kernel[(blocks, S, sizes.E)](
        contributions, routed.index, routed.slots, routed.output_gate, base, found.rows, found.place, sums, patches,
        contributions.shape[1], chunk, S, reach.pivot, O=O, KS=landing.kernel, N=sizes.N, H=sizes.H, HALO=reach.halo,
        NEAR=reach.near, BSTEP=found.steps[0], QSTEP=found.steps[1], HAS_BASE=base is not None,
        HAS_GATE=routed.output_gate is not None, STATS=stats, ACC=acc(full), BK=BK, BH=power_of_2(side), BO=BO,
        **constants, **warps(wide_by),
    )  # fmt: skip
    return sums


def _gathered(
    contributions: Tensor, routed: RoutedMap, reach: _Reach, base: Tensor | None, found: _Found, *, stats: bool
) -> Tensor | None:
    """The same for 1×1 kernels, whose rows are there already, for single pixels and for patches with long lines."""
    sizes, O, ks, number = reach.sizes, reach.O, reach.landing.kernel, reach.number
    full = wide(contributions.dtype)
    landed = landed_patches(contributions, sizes, ks, O) if ks > 1 and sizes.p > 1 else contributions
    rule = (*_tile_of(number, O), 1)
    BM, BO, wide_by = tile("reach", rule, number, O, ks, sizes.p, sizes.E, contributions.element_size())
    blocks = ceil(O, BO) if stats or not reach.small else 1
    chunk, splits = parts(number, fill(blocks * sizes.E, 64) * 4, BM)
    sums = torch.empty(2, splits, sizes.E, O, dtype=full, device=landed.device) if stats else None
    pooled_kernels.reach_kernel[(splits, sizes.E, blocks)](
        landed, routed.index, routed.slots, routed.output_gate, base, found.rows, found.place, sums, number,
        landed.stride(0), chunk, splits, *found.steps, reach.pivot, O=O, KS=ks, N=sizes.N, H=sizes.H, HALO=reach.halo,
        NEAR=reach.near, FLIP=ks > 1 and sizes.p == 1, HAS_BASE=base is not None,
        HAS_GATE=routed.output_gate is not None, STATS=stats, ACC=acc(full), BM=BM, BO=BO, **sizes.constants(),
        **warps(wide_by),
    )  # fmt: skip
    return sums


def _table(
    reach: _Reach, found: _Found, sums: Tensor | None, after: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean, scale and shift of channels, sums of a map at rest (5, E·O); mean and variance (2, E·O)."""
    sizes, O = reach.sizes, reach.O
    full, device = wide(found.rows.dtype), found.rows.device
    table = torch.empty(5, sizes.E * O, dtype=full, device=device)
    moments = torch.empty(2, sizes.E * O, dtype=full, device=device)
    base = found.base if reach.on_input else None
    splits = 1 if sums is None else sums.shape[1]
    BO, HW = power_of_2(O, most=16), sizes.H * sizes.W
    pooled_kernels.table_kernel[(ceil(O, BO), sizes.E)](
        sums, base, *after, table, moments, eps, splits, sizes.B, *found.steps, reach.pivot, E=sizes.E, O=O, HW=HW,
        HAS_BASE=base is not None, TRAINING=sums is not None, ACC=acc(full), BS=power_of_2(splits, most=PARTS),
        BQ=power_of_2(HW, most=128), BO=BO, **warps(4),
    )  # fmt: skip
    return table, moments


def _pool(routed: RoutedMap, reach: _Reach, found: _Found, table: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Means (B, E·O) and, with ``keep``, active positions and their sum (2, B, E·O)."""
    sizes, O, rows = reach.sizes, reach.O, found.rows
    pooled = torch.empty(sizes.B, sizes.E * O, dtype=rows.dtype, device=rows.device)
    counts = torch.empty(2, *pooled.shape, dtype=table.dtype, device=rows.device) if keep else placeholder(table)
    BO = whole_blocks(O, 32)
    rule = (power_of_2(sizes.L * reach.each, most=max(128 // BO, 1)), BO, 1)
    BM, BO, wide_by = tile("pool", rule, sizes.L * reach.each, O, sizes.E, rows.element_size())
    pooled_kernels.pool_kernel[(sizes.B, sizes.E, ceil(O, BO))](
        rows, found.place, routed.output_gate, found.base, table, pooled, counts, reach.number, rows.stride(0),
        *found.steps, sizes.B, E=sizes.E, O=O, L=sizes.L, RS=reach.each, HW=sizes.H * sizes.W,
        HAS_BASE=found.base is not None, HAS_GATE=routed.output_gate is not None, KEEP=keep, ACC=acc(table.dtype),
        BM=BM, BO=BO, **warps(wide_by),
    )  # fmt: skip
    return pooled, counts


def _slopes(
    grad: Tensor, saved: Saved, after: tuple[Tensor, Tensor], eps: float, *, training: bool, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of y's gradient (6, E·O), gradients of the weight and bias ``after``."""
    B, X = grad.shape
    slopes = torch.empty(6, X, dtype=saved.table.dtype, device=grad.device)
    grad_weight, grad_bias = (torch.empty_like(each) for each in after)
    BX, BB = power_of_2(X, most=16), power_of_2(B, most=64)
    pooled_kernels.slope_kernel[(ceil(X, BX),)](
        grad, saved.counts, saved.table, saved.moments, slopes, grad_weight, grad_bias, eps, B, X=X, HW=positions,
        TRAINING=training, ACC=acc(slopes.dtype), BB=BB, BX=BX, **warps(4),
    )  # fmt: skip
    return slopes, grad_weight, grad_bias


def _row_gradients(
    grad: Tensor, routed: RoutedMap, reach: _Reach, found: _Found, slopes: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of rows; with ``sums`` their part (S, E, ks², O) in that of what experts answer at rest."""
    if reach.by_lines:
        return _line_gradients(grad, routed, reach, found, slopes, sums=sums)
    sizes, O, number = reach.sizes, reach.O, reach.number
    ks = reach.landing.kernel if reach.normed else 1
    out = torch.empty(reach.shape(), dtype=found.rows.dtype, device=grad.device)
    rows = out.shape[1]
    rule = (*_tile_of(number, O), 1)
    BM, BO, wide_by = tile("pooled_back", rule, number, O, ks, sizes.E, out.element_size())
    chunk, splits = parts(rows, fill(ceil(O, BO) * sizes.E, 64) * 4, BM)
    joint = torch.empty(splits, sizes.E, ks**2, O, dtype=slopes.dtype, device=grad.device) if sums else None
    pooled_kernels.back_kernel[(splits, sizes.E, ceil(O, BO))](
        grad, found.rows, found.base, found.place, routed.output_gate, slopes, out, joint, number, rows,
        found.rows.stride(0), *found.steps, chunk, O=O, KS=ks, RS=reach.each, H=sizes.H, ALONE=reach.landing.alone,
        HAS_BASE=found.base is not None, HAS_GATE=routed.output_gate is not None, SUMS=sums, ACC=acc(slopes.dtype),
        BM=BM, BT=power_of_2(ks**2), BO=BO, **sizes.constants(), **warps(wide_by),
    )  # fmt: skip
    return out, joint


def _line_gradients(
    grad: Tensor, routed: RoutedMap, reach: _Reach, found: _Found, slopes: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The same for patches that have several pixels a side."""
    sizes, O = reach.sizes, reach.O
    ks, patches = reach.landing.kernel if reach.normed else 1, sizes.B * sizes.L
    out = torch.empty_like(found.rows)
    BH = power_of_2(reach.side)
    # a thread keeps ks² sums of each number: of wider kernels fewer
    rule = (_line_tile(O, BH, 4 if ks <= 3 else 2), 1, 4)
    BO, wide_by, share = tile("pooled_lines", rule, sizes.M, O, ks, sizes.p, sizes.E, out.element_size())
    blocks = ceil(O, BO)
    chunk, splits = parts(patches, fill(blocks * sizes.E, patches) * share, 1)
    joint = torch.empty(splits, sizes.E, ks**2, O, dtype=slopes.dtype, device=grad.device) if sums else None
    pooled_line_kernels.line_kernel[(blocks, splits, sizes.E)](
        grad, found.rows, found.base, routed.index, found.place, routed.output_gate, slopes, out, joint, patches, chunk,
        O=O, H=sizes.H, HALO=reach.halo, ALONE=reach.landing.alone, BSTEP=found.steps[0], QSTEP=found.steps[1],
        HAS_BASE=found.base is not None, HAS_GATE=routed.output_gate is not None, SUMS=sums, TAPS=ks,
        ACC=acc(slopes.dtype), BH=BH, BO=BO, **sizes.constants(), **warps(wide_by),
    )  # fmt: skip
    return out, joint


def _spread(grad: Tensor, routed: RoutedMap, reach: _Reach, answers: Tensor | None, experts: range) -> Tensor:
    """Gradient of some experts' contributions (…, M1, ks²·O) from that of rows, and from that of answers at rest."""
    sizes, O, ks, rows = reach.sizes, reach.O, reach.landing.kernel, reach.sizes.rows(reach.normed)
    out = torch.empty(len(experts), rows, ks**2 * O, dtype=grad.dtype, device=grad.device)
    rule = (32, power_of_2(O, most=128), 8)
    BM, BO, wide_by = tile("pooled_spread", rule, sizes.M, O, ks, sizes.p, out.element_size())
    constants = sizes.constants()
    del constants["HW"]
    pooled_kernels.spread_kernel[(ceil(rows, BM), len(experts), ceil(O, BO))](
        grad, routed.index, routed.slots, answers, out, sizes.M, rows, experts.start, grad.stride(0), O=O, KS=ks,
        N=sizes.N, H=sizes.H, HALO=reach.halo, ALONE=reach.landing.alone, HAS_GATE=routed.output_gate is not None,
        HAS_ANSWERS=answers is not None, BM=BM, BO=BO, **constants, **warps(wide_by),
    )  # fmt: skip
    return out


def _dots(grad: Tensor, routed: RoutedMap, reach: _Reach, found: _Found, slopes: Tensor) -> Tensor | None:
    """Gradient of gates on the output (B, E, L, p²), place by place."""
    if routed.output_gate is None:
        return None
    sizes, O = reach.sizes, reach.O
    dots = torch.empty(*routed.index.shape, sizes.p**2, dtype=slopes.dtype, device=grad.device)
    BM, BO = 32, whole_blocks(O, 64)
    pooled_kernels.dots_kernel[(ceil(sizes.M, BM), sizes.E)](
        grad, found.rows, found.base, found.place, routed.output_gate, slopes, dots, sizes.M, found.rows.stride(0),
        *found.steps, E=sizes.E, O=O, L=sizes.L, P=sizes.p, HW=sizes.H * sizes.W, HAS_BASE=found.base is not None,
        ACC=acc(slopes.dtype), BM=BM, BO=BO, **warps(4),
    )  # fmt: skip
    return dots


def _answers(
    sums: Tensor, routed: RoutedMap, reach: _Reach, base: Tensor | None, steps: tuple[int, int], slopes: Tensor
) -> Tensor:
    """Gradient (E, ks², O) of what experts answer to a constant at each tap, or (E, 1, O) of a bias."""
    sizes, (splits, E, taps, O) = reach.sizes, sums.shape
    HW, constants = sizes.H * sizes.W, sizes.constants()
    del constants["L"]
    out = torch.empty(E, taps, O, dtype=slopes.dtype, device=sums.device)
    BO = whole_blocks(O, 32)
    pooled_kernels.answers_kernel[(E, taps, ceil(O, BO))](
        sums, base, slopes, out, splits, sizes.B, *steps, O=O, KS=reach.landing.kernel if reach.normed else 1,
        H=sizes.H, ALONE=reach.landing.alone, HAS_GATE=routed.output_gate is not None, ACC=acc(slopes.dtype),
        BS=power_of_2(splits, most=PARTS), BQ=power_of_2(HW, most=64), BO=BO, **constants, **warps(4),
    )  # fmt: skip
    return out


@custom_op("moesaic::patch_conv_pooled", mutates_args=())
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
    fixed, chosen = Constants(*constants), PatchOptions.unflatten(options)
    routed = RoutedMap.of(inputs, fixed, chosen, eps[0])
    bias, reach = dense(bias), _reach_of(routed.sizes, weight, chosen, normed=routed.norm is not None)
    values, contributions, resting = expert_contributions(routed, weight, bias, reach.landing)
    found, sums = _reach(contributions, routed, reach, bias, resting, stats=fixed.output_mean is None)
    after = output_weight.contiguous(), output_bias.contiguous(), dense(fixed.output_mean), dense(fixed.output_var)
    table, moments = _table(reach, found, sums, after, eps[1])
    pooled, counts = _pool(routed, reach, found, table, keep=chosen.save)
    if not chosen.save:
        return pooled, moments, *(placeholder(x) for _ in range(6))
    resting = placeholder(x) if resting is None else resting
    return pooled, *Saved(moments, values, found.rows, found.place, resting, table, counts)


@patch_conv_pooled.register_fake
def _(
    x, weight, bias, gate, router, norm_weight, norm_bias, output_weight, output_bias, constants, options, eps,
):  # fmt: skip
    E, O, C, _, _ = weight.shape
    chosen, normed = PatchOptions.unflatten(options), norm_weight is not None
    sizes = Sizes.of(x.permute(0, 2, 3, 1), constants[0], chosen.patch_size)
    reach = _reach_of(sizes, weight, chosen, normed=normed)
    full = wide(weight.dtype)
    pooled = weight.new_empty(sizes.B, E * O)
    moments = weight.new_empty(2, E * O, dtype=full)
    if not chosen.save:
        return pooled, moments, *(x.new_empty(0) for _ in range(6))
    return pooled, *Saved(
        moments,
        values=weight.new_empty(E, sizes.rows(normed), C),
        rows=weight.new_empty(reach.shape()),
        place=weight.new_empty(E, reach.number, dtype=torch.int32),
        resting=weight.new_empty(E, sizes.H * sizes.W, O, dtype=full) if normed else x.new_empty(0),
        table=weight.new_empty(5, E * O, dtype=full),
        counts=weight.new_empty(2, sizes.B, E * O, dtype=full),
    )


@custom_op("moesaic::patch_conv_pooled_backward", mutates_args=())
def patch_conv_pooled_backward(
    grad: Tensor, saved: Sequence[Tensor], inputs: Sequence[Tensor | None], constants: Sequence[Tensor | None],
    options: Sequence[int], eps: Sequence[float], need_input: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `PooledInputs`, empty where there is none, from that of the means."""
    given, fixed, left = PooledInputs(*inputs), Constants(*constants), Saved(*saved)
    chosen = PatchOptions.unflatten(options)
    routed = RoutedMap.of(given, fixed, chosen, eps[0])
    sizes, norm, grad = routed.sizes, routed.norm is not None, grad.contiguous()
    weight, bias = given.weight, dense(given.bias)
    reach = _reach_of(sizes, weight, chosen, normed=norm)
    matmuls = MatmulBackward(routed, weight, left.values, need_input=need_input, need_weight=need_weight)
    base = left.resting if norm else bias
    found = _Found(left.rows, left.place, None if reach.whole else base, reach.steps(left.resting if norm else None))
    slopes, grad_output_weight, grad_output_bias = _slopes(
        grad, left, (given.output_weight, given.output_bias), eps[1], training=fixed.output_mean is None,
        positions=sizes.H * sizes.W,
    )  # fmt: skip
    dots = _dots(grad, routed, reach, found, slopes) if need_input else None
    of_rows, sums = _row_gradients(grad, routed, reach, found, slopes, sums=norm or bias is not None)
    answers = None if sums is None else _answers(sums, routed, reach, base, found.steps, slopes)
    back = InputBackward(routed, dots, centre=True) if need_input else None

    def part_of(group: range) -> Tensor:
        return _spread(of_rows, routed, reach, answers if norm else None, group)

    if reach.small:
        matmuls.run(lambda _: of_rows, answers, back)
    else:
        matmuls.run(part_of, None, back)
    grad_bias = placeholder(grad)
    if bias is not None and answers is not None:
        grad_bias = answers[:, answers.shape[1] // 2].to(bias.dtype, copy=True)
    of_input = no_input_gradients(grad) if back is None else back.finish(matmuls.aside)
    grad_weight = matmuls.finish()
    grad_weight = placeholder(grad) if grad_weight is None else grad_weight
    return PooledInputs(of_input.x, grad_weight, grad_bias, *of_input[1:], grad_output_weight, grad_output_bias)


@patch_conv_pooled_backward.register_fake
def _(grad, saved, inputs, constants, options, eps, need_input, need_weight):
    given = PooledInputs(*inputs)
    of_input = fake_input_gradients(grad, given, need_input)
    grad_weight = laid_out(given.weight) if need_weight else grad.new_empty(0)
    grad_bias = grad.new_empty(0) if given.bias is None else contiguous_like(given.bias)
    of_norm = contiguous_like(given.output_weight), contiguous_like(given.output_bias)
    return of_input.x, grad_weight, grad_bias, *of_input[1:], *of_norm


def _reach_of(sizes: Sizes, weight: Tensor, options: PatchOptions, *, normed: bool) -> _Reach:
    landing = Landing(weight.shape[3], options.isolated, False)
    return _Reach(sizes, landing, weight.shape[1], options.gate_on_input, normed)


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
