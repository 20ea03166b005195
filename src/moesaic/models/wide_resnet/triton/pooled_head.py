"""Convolutions over chosen patches with the BatchNorm, ReLU and mean over the map that follow, as one torch operation.

    patch_conv_pooled     x → the mean of each image and channel, and the statistics of what was normalised

The map in between is never written: see `pooled_kernels`, and `pooled_line_kernels` for patches of several pixels.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from moesaic.models.wide_resnet.triton import pooled_kernels, pooled_line_kernels
from moesaic.ops.tile_sizes import tile
from moesaic.ops.triton.launch import Sizes, acc, ceil, dense, fill, parts, power_of_2, warps, wide
from moesaic.ops.triton.patch_backward import (
    Back,
    Chosen,
    ProductGradients,
    chosen,
    contributions_of,
    like,
    map_shapes,
    nothing,
)
from moesaic.ops.triton.scatter import Landing, landed_patches, whole_blocks
from moesaic.ops.weight_layout import laid_out

__all__ = ["patch_conv_pooled"]

MOST_TAPS = 50
"""Lines of a patch times taps of a kernel, up to which kernels are compiled with each of them written out.

Compiling takes seconds for as many."""
PARTS = 256
"""So many parts of a sum are read at a time."""


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
    contributions: Tensor, of: Chosen, reach: _Reach, bias: Tensor | None, resting: Tensor | None, *, stats: bool
) -> tuple[_Found, Tensor | None]:
    """Rows, and sums (2, S, E, O) for the statistics of y."""
    base, steps = bias if resting is None else resting, reach.steps(resting)
    shape, device = reach.shape(), contributions.device
    rows = contributions if reach.small else torch.empty(shape, dtype=contributions.dtype, device=device)
    place = torch.empty(reach.sizes.E, reach.number, dtype=torch.int32, device=device)
    found = _Found(rows, place, None if reach.whole else base, steps)
    return found, (_land if reach.by_lines else _gathered)(contributions, of, reach, base, found, stats=stats)


def _land(
    contributions: Tensor, of: Chosen, reach: _Reach, base: Tensor | None, found: _Found, *, stats: bool
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
        contributions, of.index, of.slots, of.gate_out, base, found.rows, found.place, sums, patches,
        contributions.shape[1], chunk, S, reach.pivot, O=O, KS=landing.kernel, N=sizes.N, H=sizes.H, HALO=reach.halo,
        NEAR=reach.near, BSTEP=found.steps[0], QSTEP=found.steps[1], HAS_BASE=base is not None,
        HAS_GATE=of.gate_out is not None, STATS=stats, ACC=acc(full), BK=BK, BH=power_of_2(side), BO=BO, **constants,
        **warps(wide_by),
    )  # fmt: skip
    return sums


def _gathered(
    contributions: Tensor, of: Chosen, reach: _Reach, base: Tensor | None, found: _Found, *, stats: bool
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
        landed, of.index, of.slots, of.gate_out, base, found.rows, found.place, sums, number, landed.stride(0), chunk,
        splits, *found.steps, reach.pivot, O=O, KS=ks, N=sizes.N, H=sizes.H, HALO=reach.halo, NEAR=reach.near,
        FLIP=ks > 1 and sizes.p == 1, HAS_BASE=base is not None, HAS_GATE=of.gate_out is not None, STATS=stats,
        ACC=acc(full), BM=BM, BO=BO, **sizes.constants(), **warps(wide_by),
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


def _pool(of: Chosen, reach: _Reach, found: _Found, table: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Means (B, E·O) and, with ``keep``, active positions and their sum (2, B, E·O)."""
    sizes, O, rows = reach.sizes, reach.O, found.rows
    pooled = torch.empty(sizes.B, sizes.E * O, dtype=rows.dtype, device=rows.device)
    counts = torch.empty(2, *pooled.shape, dtype=table.dtype, device=rows.device) if keep else nothing(table)
    BO = whole_blocks(O, 32)
    rule = (power_of_2(sizes.L * reach.each, most=max(128 // BO, 1)), BO, 1)
    BM, BO, wide_by = tile("pool", rule, sizes.L * reach.each, O, sizes.E, rows.element_size())
    pooled_kernels.pool_kernel[(sizes.B, sizes.E, ceil(O, BO))](
        rows, found.place, of.gate_out, found.base, table, pooled, counts, reach.number, rows.stride(0), *found.steps,
        sizes.B, E=sizes.E, O=O, L=sizes.L, RS=reach.each, HW=sizes.H * sizes.W, HAS_BASE=found.base is not None,
        HAS_GATE=of.gate_out is not None, KEEP=keep, ACC=acc(table.dtype), BM=BM, BO=BO, **warps(wide_by),
    )  # fmt: skip
    return pooled, counts


def _slopes(
    grad: Tensor, counts: Tensor, table: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, eps: float,
    training: bool, positions: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Terms of y's gradient (6, E·O), gradients of weight and bias."""
    B, X = grad.shape
    slopes = torch.empty(6, X, dtype=table.dtype, device=grad.device)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    BX, BB = power_of_2(X, most=16), power_of_2(B, most=64)
    pooled_kernels.slope_kernel[(ceil(X, BX),)](
        grad, counts, table, moments, slopes, grad_weight, grad_bias, eps, B, X=X, HW=positions, TRAINING=training,
        ACC=acc(table.dtype), BB=BB, BX=BX, **warps(4),
    )  # fmt: skip
    return slopes, grad_weight, grad_bias


def _row_gradients(
    grad: Tensor, of: Chosen, reach: _Reach, found: _Found, slopes: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of rows; with ``sums`` their part (S, E, ks², O) in that of what experts answer at rest."""
    if reach.by_lines:
        return _line_gradients(grad, of, reach, found, slopes, sums=sums)
    sizes, O, number = reach.sizes, reach.O, reach.number
    ks = reach.landing.kernel if reach.normed else 1
    out = torch.empty(reach.shape(), dtype=found.rows.dtype, device=grad.device)
    rows = out.shape[1]
    rule = (*_tile_of(number, O), 1)
    BM, BO, wide_by = tile("pooled_back", rule, number, O, ks, sizes.E, out.element_size())
    chunk, splits = parts(rows, fill(ceil(O, BO) * sizes.E, 64) * 4, BM)
    joint = torch.empty(splits, sizes.E, ks**2, O, dtype=slopes.dtype, device=grad.device) if sums else None
    pooled_kernels.back_kernel[(splits, sizes.E, ceil(O, BO))](
        grad, found.rows, found.base, found.place, of.gate_out, slopes, out, joint, number, rows,
        found.rows.stride(0), *found.steps, chunk, O=O, KS=ks, RS=reach.each, H=sizes.H, ALONE=reach.landing.alone,
        HAS_BASE=found.base is not None, HAS_GATE=of.gate_out is not None, SUMS=sums, ACC=acc(slopes.dtype), BM=BM,
        BT=power_of_2(ks**2), BO=BO, **sizes.constants(), **warps(wide_by),
    )  # fmt: skip
    return out, joint


def _line_gradients(
    grad: Tensor, of: Chosen, reach: _Reach, found: _Found, slopes: Tensor, *, sums: bool
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
        grad, found.rows, found.base, of.index, found.place, of.gate_out, slopes, out, joint, patches, chunk, O=O,
        H=sizes.H, HALO=reach.halo, ALONE=reach.landing.alone, BSTEP=found.steps[0], QSTEP=found.steps[1],
        HAS_BASE=found.base is not None, HAS_GATE=of.gate_out is not None, SUMS=sums, TAPS=ks, ACC=acc(slopes.dtype),
        BH=BH, BO=BO, **sizes.constants(), **warps(wide_by),
    )  # fmt: skip
    return out, joint


def _spread(grad: Tensor, of: Chosen, reach: _Reach, answers: Tensor | None, experts: range) -> Tensor:
    """Gradient of some experts' contributions (…, M1, ks²·O) from that of rows, and from that of answers at rest."""
    sizes, O, ks, rows = reach.sizes, reach.O, reach.landing.kernel, reach.sizes.rows(reach.normed)
    out = torch.empty(len(experts), rows, ks**2 * O, dtype=grad.dtype, device=grad.device)
    rule = (32, power_of_2(O, most=128), 8)
    BM, BO, wide_by = tile("pooled_spread", rule, sizes.M, O, ks, sizes.p, out.element_size())
    constants = sizes.constants()
    del constants["HW"]
    pooled_kernels.spread_kernel[(ceil(rows, BM), len(experts), ceil(O, BO))](
        grad, of.index, of.slots, answers, out, sizes.M, rows, experts.start, grad.stride(0), O=O, KS=ks, N=sizes.N,
        H=sizes.H, HALO=reach.halo, ALONE=reach.landing.alone, HAS_GATE=of.gate_out is not None,
        HAS_ANSWERS=answers is not None, BM=BM, BO=BO, **constants, **warps(wide_by),
    )  # fmt: skip
    return out


def _dots(grad: Tensor, of: Chosen, reach: _Reach, found: _Found, slopes: Tensor) -> Tensor | None:
    """Gradient of gates on the output (B, E, L, p²), place by place."""
    if of.gate_out is None:
        return None
    sizes, O = reach.sizes, reach.O
    dots = torch.empty(*of.index.shape, sizes.p**2, dtype=slopes.dtype, device=grad.device)
    BM, BO = 32, whole_blocks(O, 64)
    pooled_kernels.dots_kernel[(ceil(sizes.M, BM), sizes.E)](
        grad, found.rows, found.base, found.place, of.gate_out, slopes, dots, sizes.M, found.rows.stride(0),
        *found.steps, E=sizes.E, O=O, L=sizes.L, P=sizes.p, HW=sizes.H * sizes.W, HAS_BASE=found.base is not None,
        ACC=acc(slopes.dtype), BM=BM, BO=BO, **warps(4),
    )  # fmt: skip
    return dots


def _answers(
    sums: Tensor, of: Chosen, reach: _Reach, base: Tensor | None, steps: tuple[int, int], slopes: Tensor
) -> Tensor:
    """Gradient (E, ks², O) of what experts answer to a constant at each tap, or (E, 1, O) of a bias."""
    sizes, (splits, E, taps, O) = reach.sizes, sums.shape
    HW, constants = sizes.H * sizes.W, sizes.constants()
    del constants["L"]
    out = torch.empty(E, taps, O, dtype=slopes.dtype, device=sums.device)
    BO = whole_blocks(O, 32)
    pooled_kernels.answers_kernel[(E, taps, ceil(O, BO))](
        sums, base, slopes, out, splits, sizes.B, *steps, O=O, KS=reach.landing.kernel if reach.normed else 1,
        H=sizes.H, ALONE=reach.landing.alone, HAS_GATE=of.gate_out is not None, ACC=acc(slopes.dtype),
        BS=power_of_2(splits, most=PARTS), BQ=power_of_2(HW, most=64), BO=BO, **constants, **warps(4),
    )  # fmt: skip
    return out


@custom_op("moesaic::patch_conv_pooled", mutates_args=())
def patch_conv_pooled(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, slots: Tensor, gate: Tensor,
    scores: Tensor | None, router: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    mean: Tensor | None, var: Tensor | None, after_weight: Tensor, after_bias: Tensor, after_mean: Tensor | None,
    after_var: Tensor | None, eps: float, training: bool, patch: int, kind: int, on_input: bool, alone: bool,
    after_eps: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Means (B, E·O) over the map of ReLU(BatchNorm(y)), and mean and variance (2, E·O) of y, a `patch_conv`.

    Without ``after_mean`` and ``after_var`` BatchNorm takes y's own. The other results are for the gradient, if
    ``keep``: values, rows, their places, the resting map, the table of channels, and each image's counts.
    """
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    _, O, _, ks, _ = weight.shape
    normed = of.norm is not None
    landing, bias = Landing(ks, alone, False), dense(bias)
    reach = _Reach(of.sizes, landing, O, on_input, normed)
    values, contributions, resting = contributions_of(of, weight, bias, landing)
    found, sums = _reach(contributions, of, reach, bias, resting, stats=after_mean is None)
    after = after_weight.contiguous(), after_bias.contiguous(), dense(after_mean), dense(after_var)
    table, moments = _table(reach, found, sums, after, after_eps)
    pooled, counts = _pool(of, reach, found, table, keep=keep)
    if not keep:
        return pooled, moments, *(nothing(x) for _ in range(6))
    return pooled, moments, values, found.rows, found.place, nothing(x) if resting is None else resting, table, counts


@patch_conv_pooled.register_fake
def _(
    x, weight, bias, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, after_weight, after_bias,
    after_mean, after_var, eps, training, patch, kind, on_input, alone, after_eps, keep,
):  # fmt: skip
    E, O, C, ks, _ = weight.shape
    sizes, normed = Sizes.of(x.permute(0, 2, 3, 1), index, patch), norm_weight is not None
    reach = _Reach(sizes, Landing(ks, alone, False), O, on_input, normed)
    full = wide(weight.dtype)
    pooled = weight.new_empty(sizes.B, E * O)
    moments = weight.new_empty(2, E * O, dtype=full)
    if not keep:
        return pooled, moments, *(x.new_empty(0) for _ in range(6))
    return (
        pooled,
        moments,
        weight.new_empty(E, sizes.rows(normed), C),
        weight.new_empty(reach.shape()),
        weight.new_empty(E, reach.number, dtype=torch.int32),
        weight.new_empty(E, sizes.H * sizes.W, O, dtype=full) if normed else x.new_empty(0),
        weight.new_empty(5, E * O, dtype=full),
        weight.new_empty(2, sizes.B, E * O, dtype=full),
    )


@custom_op("moesaic::patch_conv_pooled_backward", mutates_args=())
def patch_conv_pooled_backward(
    grad: Tensor, moments: Tensor, values: Tensor, rows: Tensor, place: Tensor, resting: Tensor, table: Tensor,
    counts: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, slots: Tensor, gate: Tensor,
    scores: Tensor | None, router: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    mean: Tensor | None, var: Tensor | None, after_weight: Tensor, after_bias: Tensor, eps: float, training: bool,
    patch: int, kind: int, on_input: bool, alone: bool, after_eps: float, after_training: bool, need_map: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias, gate, router, norm's weight and bias, and those of BatchNorm; empty if none."""
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    _, O, _, ks, _ = weight.shape
    sizes, norm, bias, grad = of.sizes, of.norm is not None, dense(bias), grad.contiguous()
    reach = _Reach(sizes, Landing(ks, alone, False), O, on_input, norm)
    products = ProductGradients(of, weight, values, need_map=need_map, need_weight=need_weight)
    base = resting if norm else bias
    found = _Found(rows, place, None if reach.whole else base, reach.steps(resting if norm else None))
    slopes, *of_after = _slopes(
        grad, counts, table, moments, after_weight, after_bias, after_eps, after_training, sizes.H * sizes.W
    )
    dots = _dots(grad, of, reach, found, slopes) if need_map else None
    of_rows, sums = _row_gradients(grad, of, reach, found, slopes, sums=norm or bias is not None)
    answers = None if sums is None else _answers(sums, of, reach, base, found.steps, slopes)
    back = Back(of, dots, centre=True) if need_map else None

    def part_of(group: range) -> Tensor:
        return _spread(of_rows, of, reach, answers if norm else None, group)

    if reach.small:
        products.run(lambda _: of_rows, answers, back)
    else:
        products.run(part_of, None, back)
    grad_bias = nothing(grad)
    if bias is not None and answers is not None:
        grad_bias = answers[:, answers.shape[1] // 2].to(bias.dtype, copy=True)
    of_map = tuple(nothing(grad) for _ in range(5)) if back is None else back.finish(products.aside)
    grad_weight = products.finish()
    return of_map[0], nothing(grad) if grad_weight is None else grad_weight, grad_bias, *of_map[1:], *of_after


@patch_conv_pooled_backward.register_fake
def _(
    grad, moments, values, rows, place, resting, table, counts, x, weight, bias, index, slots, gate, scores, router,
    norm_weight, norm_bias, mean, var, after_weight, after_bias, eps, training, patch, kind, on_input, alone,
    after_eps, after_training, need_map, need_weight,
):  # fmt: skip
    grad_x, *others = map_shapes(grad, x, gate, router, norm_weight, norm_bias, need_map)
    grad_weight = laid_out(weight) if need_weight else grad.new_empty(0)
    grad_bias = grad.new_empty(0) if bias is None else like(bias)
    return grad_x, grad_weight, grad_bias, *others, like(after_weight), like(after_bias)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, (*ctx.settings, _keep) = inputs[:14], inputs[16:]
    ctx.after_training = inputs[14] is None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *tensors)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    wanted = ctx.needs_input_grad
    if grad is None:
        return (None,) * 24
    need_map = any(wanted[each] for each in (0, 5, 7, 8, 9))
    gx, gw, gb, gg, gr, gnw, gnb, gaw, gab = patch_conv_pooled_backward(
        grad, *ctx.saved_tensors, *ctx.settings, ctx.after_training, need_map, wanted[1]
    )
    found = {0: gx, 1: gw, 2: gb, 5: gg, 7: gr, 8: gnw, 9: gnb, 12: gaw, 13: gab}
    return tuple(found[each] if wanted[each] and each in found and found[each].numel() else None for each in range(24))


patch_conv_pooled.register_autograd(_backward, setup_context=_setup)
