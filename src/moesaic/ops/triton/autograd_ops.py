"""Experts over chosen patches as torch operations, with shapes for tracing and gradients.

    patch_route        x → scores, the best patches, gates, slots
    patch_slots        an index → slots
    patch_statistics   statistics of masked maps; moves the running ones on
    patch_conv         convolutions over chosen patches
    patch_mlp          perceptrons over chosen patches

Maps are (B, H, W, C) here. Every operation has a ``_backward`` operation where it has a gradient, so that a compiled
graph sees opaque nodes and no Python in between.

``patch_conv`` and ``patch_mlp`` take the router's kernels where gates are theirs: then the gradient of gates goes on
to the router and the map inside, where it costs next to nothing, and none is returned for the gates. Who has use for
scores and gates elsewhere, in a loss for instance, gets their gradient by ``patch_route``; both add up.
"""

# Kernels are written in Triton's language, which a checker of Python does not know; nor is Triton there without a GPU.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from moesaic.ops.triton import expert_choice, mlp, pointwise
from moesaic.ops.triton.background import resting_gradients
from moesaic.ops.triton.expert_choice import by_pixel
from moesaic.ops.triton.gather import gather, sum_of_owners
from moesaic.ops.triton.launch import INTERPRETED, Aside, as_map, by_row, dense, map_like, wide
from moesaic.ops.triton.norm import statistics
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
from moesaic.ops.triton.scatter import Landing, combine, gated_gradients, spread, taps_of, weight_of
from moesaic.ops.weight_layout import laid_out

__all__ = ["patch_conv", "patch_mlp", "patch_route", "patch_slots", "patch_statistics"]

# choice --------------------------------------------------------------------------------------------------------------


@custom_op("moesaic::patch_route", mutates_args=())
def patch_route(x: Tensor, router: Tensor, patches: int, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (B, N, E) of x under kernels (E, C, p, p), each expert's best patches (B, E, L), gates and slots."""
    return expert_choice.choose(by_row(x), by_pixel(router), patches, router.shape[2], kind)


@patch_route.register_fake
def _(x: Tensor, router: Tensor, patches: int, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, _, H, W = x.shape
    E, _, p, _ = router.shape
    N = (H // p) * (W // p)
    full = wide(x.dtype)
    index = x.new_empty(B, E, patches, dtype=torch.int64)
    gate = x.new_empty(B, E, patches, dtype=full)
    return x.new_empty(B, N, E, dtype=full), index, gate, x.new_empty(B, E, N, dtype=torch.int32)


@custom_op("moesaic::patch_route_backward", mutates_args=())
def patch_route_backward(
    grad_scores: Tensor, grad_gate: Tensor, x: Tensor, router: Tensor, scores: Tensor, gate: Tensor, slots: Tensor,
    kind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad, p, x = grad_scores, router.shape[2], by_row(x)
    if kind != expert_choice.GATE_KINDS["one"]:
        grad = grad + expert_choice.gradient_of_choice(
            grad_gate.contiguous(), gate.contiguous(), scores.contiguous(), slots.contiguous(), kind, True
        )
    grad = grad.contiguous()
    return as_map(expert_choice.map_back(grad, by_pixel(router), None, x, p)), expert_choice.router_gradient(
        grad, x, router
    )


@patch_route_backward.register_fake
def _(grad_scores, grad_gate, x, router, scores, gate, slots, kind):
    return map_like(x, x.shape[1]), laid_out(router)


def _route_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, router, _, ctx.kind = inputs
    scores, index, gate, slots = output
    ctx.mark_non_differentiable(index, slots)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, router, scores, gate, slots)


def _route_backward(ctx: Any, grad_scores: Tensor | None, _index: None, grad_gate: Tensor | None, _slots: None) -> Any:
    x, router, scores, gate, slots = ctx.saved_tensors
    grad_scores = torch.zeros_like(scores) if grad_scores is None else grad_scores
    grad_gate = torch.zeros_like(gate) if grad_gate is None else grad_gate
    grad_x, grad_router = patch_route_backward(grad_scores, grad_gate, x, router, scores, gate, slots, ctx.kind)
    return grad_x, grad_router, None, None


patch_route.register_autograd(_route_backward, setup_context=_route_setup)


@custom_op("moesaic::patch_slots", mutates_args=())
def patch_slots(index: Tensor, patches: int) -> Tensor:
    """Slots (B, E, N) of an index (B, E, L)."""
    return expert_choice.places(index.contiguous(), patches)


@patch_slots.register_fake
def _(index: Tensor, patches: int) -> Tensor:
    return index.new_empty(index.shape[0], index.shape[1], patches, dtype=torch.int32)


@custom_op("moesaic::patch_statistics", mutates_args={"running_mean", "running_var"})
def patch_statistics(
    x: Tensor, index: Tensor, gate: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    patch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean and variance (E, C) of each expert's masked map; the running ones are moved on."""
    return statistics(by_row(x), index.contiguous(), dense(gate), running_mean, running_var, momentum, patch)


@patch_statistics.register_fake
def _(x, index, gate, running_mean, running_var, momentum, patch):
    mean = x.new_empty(index.shape[1], x.shape[1], dtype=wide(x.dtype))
    return mean, torch.empty_like(mean)


# convolutions --------------------------------------------------------------------------------------------------------


@custom_op("moesaic::patch_conv", mutates_args=())
def patch_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, slots: Tensor, gate: Tensor,
    scores: Tensor | None, router: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    mean: Tensor | None, var: Tensor | None, eps: float, training: bool, patch: int, kind: int, on_input: bool,
    alone: bool, summed: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The map (B, O', H, W), and with ``keep`` what the gradient needs: values, and what gates are multiplied with."""
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    sizes, landing, bias = of.sizes, Landing(weight.shape[3], alone, summed), dense(bias)
    if _in_place(x, weight, summed, on_input, of.norm is not None):
        y, own = pointwise.answers(of.x, taps_of(weight), bias, sizes, of.index, of.slots, of.gate, keep)
        return as_map(y), nothing(x), nothing(x) if own is None else own
    values, contributions, resting = contributions_of(of, weight, bias, landing)
    small = landing.kernel == 1  # then values are most of the work, and kept
    if not (keep and small):
        values = nothing(x)
    if small and summed and not on_input and resting is None:
        owners = expert_choice.owners_of(of.slots, sizes.L)
        y, own = sum_of_owners(contributions, sizes, owners, of.gate_out, bias, None), None
    else:
        y, own = combine(
            contributions, sizes, of.slots, of.gate_out, bias, landing, resting=resting,
            keep=keep and not small and not on_input,
        )  # fmt: skip
    if own is None:
        own = contributions if keep and small and not on_input else nothing(x)
    return as_map(y), values, own


@patch_conv.register_fake
def _(
    x, weight, bias, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind,
    on_input, alone, summed, keep,
):  # fmt: skip
    E, O, C, ks, _ = weight.shape
    M = x.shape[0] * index.shape[2] * patch * patch
    M1 = M if norm_weight is None else M + 8
    y = map_like(x, O if summed else E * O, weight.dtype)
    in_place = _in_place(x, weight, summed, on_input, norm_weight is not None)
    values = weight.new_empty(E, M1, C) if keep and ks == 1 and not in_place else x.new_empty(0)
    own = weight.new_empty(E, M1 if ks == 1 else M, O) if keep and not on_input else x.new_empty(0)
    return y, values, own


@custom_op("moesaic::patch_conv_backward", mutates_args=())
def patch_conv_backward(
    grad: Tensor, values: Tensor, own: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, slots: Tensor, gate: Tensor,
    scores: Tensor | None, router: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    mean: Tensor | None, var: Tensor | None, eps: float, training: bool, patch: int, kind: int, on_input: bool,
    alone: bool, summed: bool, need_map: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias, gate, router, norm's weight and bias; empty where there is none."""
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    ks = weight.shape[3]
    grad, bias = by_row(grad), dense(bias)
    sizes, landing = of.sizes, Landing(ks, alone, summed)
    if _in_place(x, weight, summed, on_input, of.norm is not None):
        return _in_place_backward(of, grad, own, weight, bias, landing, need_map, need_weight)
    norm, small = of.norm is not None, ks == 1
    rows = sizes.rows(norm)
    products = ProductGradients(of, weight, values, need_map=need_map, need_weight=need_weight)
    dots = gated = answers = sums = None
    if of.gate_out is not None:
        dots, gated, sums = gated_gradients(
            grad, own if need_map else None, sizes, of.index, of.gate_out, bias if small else None, landing,
            rest=norm and small, rows=rows if small else None, sums=bias is not None and not norm,
        )  # fmt: skip
    if norm or (bias is not None and sums is None):
        answers = resting_gradients(grad, sizes, of.slots, of.gate_out, landing, by_tap=norm)
        sums = answers[:, answers.shape[1] // 2]
    del own
    back = Back(of, dots, centre=True) if need_map else None
    ready = [] if gated is None else [gated]
    del gated  # whoever takes it from the list is the last to have it

    def part_of(group: range) -> Tensor:
        if ready:
            return ready.pop()
        return spread(grad, sizes, of.index, of.slots, of.gate_out, landing, rows, group)

    products.run(part_of, answers, back)
    grad_bias = nothing(grad) if bias is None or sums is None else sums.to(bias.dtype).contiguous()
    of_map = tuple(nothing(grad) for _ in range(5)) if back is None else back.finish(products.aside)
    grad_weight = products.finish()
    return of_map[0], nothing(grad) if grad_weight is None else grad_weight, grad_bias, *of_map[1:]


def _in_place(x: Tensor, weight: Tensor, summed: bool, on_input: bool, norm: bool) -> bool:
    """Whether pixels are read and answers written where they are: see `pointwise`.

    Not in float32: cuBLAS knows better how that is to be multiplied.
    """
    _, O, _, ks, _ = weight.shape
    plain = ks == 1 and O <= pointwise.MOST_CHANNELS and not (summed or on_input or norm)
    return plain and x.dtype == weight.dtype and (weight.dtype.itemsize == 2 or INTERPRETED)


def _in_place_backward(
    of: Chosen, grad: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, landing: Landing, need_map: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same where `_in_place` holds. Gates over chosen patches have their router's gradient beside the rows."""
    sizes, taps, dots, grad_scores = of.sizes, taps_of(weight), None, None
    routed = need_map and of.router is not None and of.scores is not None and not of.every
    beside = pointwise.columns(sizes.p**2) if routed else 0
    gated = pointwise.gate_gradients(grad, own, sizes, of.index, of.gate, sums=bias is not None) if beside else None
    if gated is not None:
        rows, grad_scores, sums = gated
    else:
        dots, rows, sums = gated_gradients(
            grad, own if need_map else None, sizes, of.index, of.gate, None, landing, rest=False, rows=sizes.M,
            sums=bias is not None, beside=beside,
        )  # fmt: skip
    assert rows is not None
    back = Back(of, dots, centre=True, rows=rows, beside=beside) if need_map else None
    if back is not None and grad_scores is not None:
        back.grad_scores = grad_scores
    aside = Aside()  # the map's gradient and the weights' are computed beside each other
    if back is not None:
        back.grad_x = pointwise.pixel_gradients(rows, taps, sizes, of.index, of.slots, back.beside, aside)
    grad_weight, grad_router = nothing(grad), None
    if need_weight or beside:
        router = of.router.dtype if beside and of.router is not None else None
        grad_taps, grad_router = pointwise.weight_gradients(rows, of.x, taps, sizes, of.index, router)
        grad_weight = weight_of(grad_taps, weight) if need_weight else grad_weight
    aside.join()
    grad_bias = nothing(grad) if bias is None or sums is None else sums.to(bias.dtype)
    if back is None:
        return nothing(grad), grad_weight, grad_bias, *(nothing(grad) for _ in range(4))
    if grad_router is not None:
        back.grad_router = expert_choice.by_channel(grad_router, of.router)
    grad_x, *others = back.finish()
    return grad_x, grad_weight, grad_bias, *others


@patch_conv_backward.register_fake
def _(
    grad, values, own, x, weight, bias, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps,
    training, patch, kind, on_input, alone, summed, need_map, need_weight,
):  # fmt: skip
    grad_x, *others = map_shapes(grad, x, gate, router, norm_weight, norm_bias, need_map)
    grad_weight = laid_out(weight) if need_weight else grad.new_empty(0)
    return grad_x, grad_weight, grad.new_empty(0) if bias is None else like(bias), *others


def _conv_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, index, slots, gate, scores, router, *norm = inputs[:12]
    *ctx.settings, ctx.keep = inputs[12:]
    _, values, own = output
    ctx.mark_non_differentiable(values, own)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(values, own, x, weight, bias, index, slots, gate, scores, router, *norm)


def _conv_backward(ctx: Any, grad: Tensor | None, _values: None, _own: None) -> Any:
    wanted = ctx.needs_input_grad
    if grad is None:
        return (None,) * 20
    need_map = any(wanted[each] for each in (0, 5, 7, 8, 9))
    saved, grad = ctx.saved_tensors, grad.contiguous(memory_format=torch.channels_last)
    gx, gw, gb, gg, gr, gnw, gnb = patch_conv_backward(grad, *saved, *ctx.settings, need_map, wanted[1])
    found = {0: gx, 1: gw, 2: gb, 5: gg, 7: gr, 8: gnw, 9: gnb}
    return tuple(found[each] if wanted[each] and each in found and found[each].numel() else None for each in range(20))


patch_conv.register_autograd(_conv_backward, setup_context=_conv_setup)


# perceptrons ---------------------------------------------------------------------------------------------------------


@custom_op("moesaic::patch_mlp", mutates_args=())
def patch_mlp(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None,
    index: Tensor, slots: Tensor, gate: Tensor, scores: Tensor | None, router: Tensor | None,
    norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    eps: float, training: bool, patch: int, kind: int, on_input: bool, summed: bool, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The map (B, O', H, W), and with ``keep`` values, hidden values before and after activation, and answers."""
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    sizes, bias_out = of.sizes, dense(bias_out)
    values = gather(of.x, of.index, of.gate_in, of.norm, patch, weight_in.dtype, centre=False, rest=on_input)
    answers, before, after = mlp.forward(values, weight_in, bias_in, weight_out, activation, keep)
    null = None
    if on_input:
        null = answers[:, sizes.M] if bias_out is None else answers[:, sizes.M] + bias_out
        null = null.contiguous()
    if summed:
        owners = expert_choice.owners_of(of.slots, sizes.L)
        y = sum_of_owners(answers, sizes, owners, of.gate_out, bias_out, null)
    else:
        y, _ = combine(answers, sizes, of.slots, of.gate_out, bias_out, Landing(1, False, False), null=null)
    y = as_map(y)
    if not keep:
        return y, *(nothing(x) for _ in range(4))
    return y, values, before, after, nothing(x) if on_input else answers


@patch_mlp.register_fake
def _(
    x, weight_in, bias_in, weight_out, bias_out, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var,
    eps, training, patch, kind, on_input, summed, activation, keep,
):  # fmt: skip
    E, J, C = weight_in.shape
    O = weight_out.shape[1]
    M = x.shape[0] * index.shape[2] * patch * patch + (8 if on_input else 0)
    y = map_like(x, O if summed else E * O, weight_in.dtype)
    if not keep:
        return y, *(x.new_empty(0) for _ in range(4))
    answers = x.new_empty(0) if on_input else weight_in.new_empty(E, M, O)
    return y, weight_in.new_empty(E, M, C), weight_in.new_empty(E, M, J), weight_in.new_empty(E, M, J), answers


@custom_op("moesaic::patch_mlp_backward", mutates_args=())
def patch_mlp_backward(
    grad: Tensor, values: Tensor, before: Tensor, after: Tensor, answers: Tensor,
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None,
    index: Tensor, slots: Tensor, gate: Tensor, scores: Tensor | None, router: Tensor | None,
    norm_weight: Tensor | None, norm_bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    eps: float, training: bool, patch: int, kind: int, on_input: bool, summed: bool, activation: str, need_map: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight_in, bias_in, weight_out, bias_out, gate, router, norm's weight and bias."""
    of = chosen(
        x, index, slots, gate, scores, router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input
    )
    grad, bias_out = by_row(grad), dense(bias_out)
    sizes, landing = of.sizes, Landing(1, False, summed)
    rows = values.shape[1]
    dots = None
    if of.gate_out is not None:
        dots, part, sums = gated_gradients(
            grad, answers if need_map else None, sizes, of.index, of.gate_out, bias_out, landing,
            rest=False, rows=rows, sums=bias_out is not None,
        )  # fmt: skip
        assert part is not None
    else:
        part = spread(grad, sizes, of.index, of.slots, None, landing, rows, range(sizes.E))
        elsewhere = resting_gradients(grad, sizes, of.slots, None, landing, by_tap=False, elsewhere=True)
        part[:, sizes.M] = elsewhere[:, 0]
        sums = None
        if bias_out is not None:
            sums = resting_gradients(grad, sizes, of.slots, None, landing, by_tap=False)[:, 0]
    grad_rows, grad_in, grad_bias_in, grad_out = mlp.backward(
        part, values, before, after, weight_in, bias_in, weight_out, activation
    )
    grad_bias_out = nothing(grad) if bias_out is None or sums is None else sums.to(bias_out.dtype).contiguous()
    grad_bias_in = nothing(grad) if grad_bias_in is None else grad_bias_in
    of_weights = grad_in, grad_bias_in, grad_out, grad_bias_out
    if not need_map:
        return nothing(grad), *of_weights, *(nothing(grad) for _ in range(4))
    back = Back(of, dots, centre=False)
    back.add(grad_rows, range(sizes.E))
    grad_x, *others = back.finish()
    return grad_x, *of_weights, *others


@patch_mlp_backward.register_fake
def _(
    grad, values, before, after, answers, x, weight_in, bias_in, weight_out, bias_out, index, slots, gate, scores,
    router, norm_weight, norm_bias, mean, var, eps, training, patch, kind, on_input, summed, activation, need_map,
):  # fmt: skip
    grad_x, *others = map_shapes(grad, x, gate, router, norm_weight, norm_bias, need_map)
    of_weights = [
        grad.new_empty(0) if each is None else like(each) for each in (weight_in, bias_in, weight_out, bias_out)
    ]
    return grad_x, *of_weights, *others


def _mlp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, (*ctx.settings, _) = inputs[:14], inputs[14:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *tensors)


def _mlp_backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    wanted = ctx.needs_input_grad
    if grad is None:
        return (None,) * 22
    need_map = any(wanted[each] for each in (0, 7, 9, 10, 11))
    grad = grad.contiguous(memory_format=torch.channels_last)
    gx, gwi, gbi, gwo, gbo, gg, gr, gnw, gnb = patch_mlp_backward(grad, *ctx.saved_tensors, *ctx.settings, need_map)
    found = {0: gx, 1: gwi, 2: gbi, 3: gwo, 4: gbo, 7: gg, 9: gr, 10: gnw, 11: gnb}
    return tuple(found[each] if wanted[each] and each in found and found[each].numel() else None for each in range(22))


patch_mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)
