"""Expert choice and convolutions of selected patches as torch operators, with shapes for tracing and with gradients.

    patch_route        x → scores, each expert's top patches, gates, slots
    patch_slots        index → slots
    patch_statistics   mean and variance of masked maps; updates the running ones
    patch_conv         y = Σ_e G_e ⊙ conv_e(f_e(M_e ⊙ x)), or conv_e(f_e(G_e ⊙ x))
    patch_route_conv   patch_route and patch_conv in one

Maps are (B, C, H, W) in channels_last. An operator's arguments are the structures of `moesaic.ops.triton.operands`, its
differentiable inputs first. Every operator with a gradient has a ``_backward`` operator, so that a compiled graph has
opaque nodes and no Python in between.

``patch_conv``, like ``patch_mlp`` of `moesaic.ops.triton.mlp_ops`, takes the router's kernels where the gates are that
router's softmax: the gradient of the gates then goes on to the router and the map inside, where it costs next to
nothing, and none is returned for the gates. Scores and gates used elsewhere, in a loss for instance, get their gradient
from ``patch_route``; both add up.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.direct_operator import direct_operator
from moesaic.ops.triton import expert_choice, pointwise_experts
from moesaic.ops.triton.expert_background import background_gradients
from moesaic.ops.triton.expert_choice import router_by_pixel
from moesaic.ops.triton.gather import sum_over_experts
from moesaic.ops.triton.launch import (
    INTERPRETED,
    SideStream,
    acc_dtype,
    contiguous_or_none,
    empty_map_like,
    placeholder,
    to_nchw,
    to_nhwc,
)
from moesaic.ops.triton.norm import masked_statistics
from moesaic.ops.triton.operands import (
    Constants,
    ConvInputs,
    PatchOptions,
    RoutedMap,
    choice_operands,
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
from moesaic.ops.triton.scatter import (
    ScatterSpec,
    output_gate_backward,
    scatter,
    scatter_backward,
    taps_to_weight,
    weight_to_taps,
)
from moesaic.ops.weight_layout import empty_weight_like

__all__ = [
    "patch_conv",
    "patch_route",
    "patch_route_conv",
    "patch_slots",
    "patch_statistics",
]

# expert choice -------------------------------------------------------------------------------------------------------


@direct_operator("moesaic::patch_route")
def patch_route(x: Tensor, router: Tensor, patches: int, gate_kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (B, N, E) of x under kernels (E, C, p, p), each expert's top patches (B, E, L), gates and slots."""
    return expert_choice.choose_patches(to_nhwc(x), router_by_pixel(router), patches, router.shape[2], gate_kind)


@patch_route.register_fake
def _(x: Tensor, router: Tensor, patches: int, gate_kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_choice(x, router, patches)


def _fake_choice(x: Tensor, router: Tensor, patches: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of what `patch_route` returns, for tracing."""
    B, _, H, W = x.shape
    E, _, p, _ = router.shape
    N = (H // p) * (W // p)
    acc_type = acc_dtype(x.dtype)
    index = x.new_empty(B, E, patches, dtype=torch.int64)
    gate = x.new_empty(B, E, patches, dtype=acc_type)
    return x.new_empty(B, N, E, dtype=acc_type), index, gate, x.new_empty(B, E, N, dtype=torch.int32)


@direct_operator("moesaic::patch_route_backward")
def patch_route_backward(
    grad_scores: Tensor, grad_gate: Tensor, x: Tensor, router: Tensor, scores: Tensor, gate: Tensor, slots: Tensor,
    gate_kind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and router."""
    grad, p, x = grad_scores, router.shape[2], to_nhwc(x)
    if gate_kind != expert_choice.GATE_KINDS["one"]:
        grad = grad + expert_choice.score_gradient(
            grad_gate.contiguous(), gate.contiguous(), scores.contiguous(), slots.contiguous(), gate_kind, True
        )
    grad = grad.contiguous()
    grad_x = expert_choice.scores_to_map_gradient(grad, router_by_pixel(router), None, x, p)
    return to_nchw(grad_x), expert_choice.router_gradient(grad, x, router)


@patch_route_backward.register_fake
def _(grad_scores, grad_gate, x, router, scores, gate, slots, gate_kind):
    return empty_map_like(x, x.shape[1]), empty_weight_like(router)


def _route_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, router, _, ctx.gate_kind = inputs
    scores, index, gate, slots = output
    ctx.mark_non_differentiable(index, slots)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, router, scores, gate, slots)


def _route_backward(ctx: Any, grad_scores: Tensor | None, _index: None, grad_gate: Tensor | None, _slots: None) -> Any:
    x, router, scores, gate, slots = ctx.saved_tensors
    grad_scores = torch.zeros_like(scores) if grad_scores is None else grad_scores
    grad_gate = torch.zeros_like(gate) if grad_gate is None else grad_gate
    grad_x, grad_router = patch_route_backward(grad_scores, grad_gate, x, router, scores, gate, slots, ctx.gate_kind)
    return grad_x, grad_router, None, None


patch_route.register_autograd(_route_backward, setup_context=_route_setup)


@direct_operator("moesaic::patch_slots")
def patch_slots(index: Tensor, patches: int) -> Tensor:
    """Slots (B, E, N) of an index (B, E, L)."""
    return expert_choice.slots_from_index(index.contiguous(), patches)


@patch_slots.register_fake
def _(index: Tensor, patches: int) -> Tensor:
    return index.new_empty(index.shape[0], index.shape[1], patches, dtype=torch.int32)


@direct_operator("moesaic::patch_statistics", mutates=("running_mean", "running_var"))
def patch_statistics(
    x: Tensor, index: Tensor, gate: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    patch_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean and variance (E, C) of each expert's masked map; updates the running ones."""
    return masked_statistics(
        to_nhwc(x), index.contiguous(), contiguous_or_none(gate), running_mean, running_var, momentum, patch_size
    )


@patch_statistics.register_fake
def _(x, index, gate, running_mean, running_var, momentum, patch_size):
    mean = x.new_empty(index.shape[1], x.shape[1], dtype=acc_dtype(x.dtype))
    return mean, torch.empty_like(mean)


# convolutions --------------------------------------------------------------------------------------------------------


@direct_operator("moesaic::patch_conv")
def patch_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, router: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, constants: Sequence[Tensor | None], options: Sequence[int], eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The map (B, O', H, W), and with ``options.save`` what the gradient needs.

    That is the experts' inputs (E, M1, C) of 1×1 kernels, and the outputs (E, …, O) before the gate multiplies them.
    """
    inputs = ConvInputs(x, weight, bias, gate, router, norm_weight, norm_bias)
    return _conv_forward(inputs, Constants(*constants), PatchOptions.unflatten(options), eps)


@patch_conv.register_fake
def _(x, weight, bias, gate, router, norm_weight, norm_bias, constants, options, eps):
    inputs = ConvInputs(x, weight, bias, gate, router, norm_weight, norm_bias)
    return _fake_conv(inputs, Constants(*constants), PatchOptions.unflatten(options))


def _fake_conv(inputs: ConvInputs, constants: Constants, opts: PatchOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of what `_conv_forward` returns, for tracing."""
    x, weight = inputs.x, inputs.weight
    E, O, C, ks, _ = weight.shape
    M = x.shape[0] * constants.index.shape[2] * opts.patch_size**2
    M1 = M if inputs.norm_weight is None else M + 8
    y = empty_map_like(x, O if opts.sum_experts else E * O, weight.dtype)
    save_values = opts.save and ks == 1 and not _uses_pointwise(inputs, opts)
    values = weight.new_empty(E, M1, C) if save_values else x.new_empty(0)
    save_ungated = opts.save and not opts.gate_on_input
    ungated = weight.new_empty(E, M1 if ks == 1 else M, O) if save_ungated else x.new_empty(0)
    return y, values, ungated


@direct_operator("moesaic::patch_conv_backward")
def patch_conv_backward(
    grad: Tensor, saved: Sequence[Tensor], inputs: Sequence[Tensor | None], constants: Sequence[Tensor | None],
    options: Sequence[int], eps: float, need_input: bool, need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `ConvInputs`, empty where there is none, from that of the map; ``saved`` as `patch_conv` returns."""
    given, opts = ConvInputs(*inputs), PatchOptions.unflatten(options)
    routed = RoutedMap.of(given, Constants(*constants), opts, eps)
    (values, ungated), weight, bias, grad = saved, given.weight, contiguous_or_none(given.bias), to_nhwc(grad)
    ks, norm = weight.shape[3], routed.norm is not None
    dims, spec = routed.dims, ScatterSpec(ks, opts.isolated, opts.sum_experts)
    if _uses_pointwise(given, opts):
        return _pointwise_backward(routed, grad, ungated, given, spec, need_input, need_weight)
    pointwise_kernel, rows = ks == 1, dims.padded_rows(norm)
    matmuls = MatmulBackward(routed, weight, values, need_input=need_input, need_weight=need_weight)
    gate_dots = gated = tap_grad = grad_bias_sums = None
    if routed.output_gate is not None:
        gate_dots, gated, grad_bias_sums = output_gate_backward(
            grad, ungated if need_input else None, dims, routed.index, routed.output_gate,
            bias if pointwise_kernel else None, spec, background_row=norm and pointwise_kernel,
            rows=rows if pointwise_kernel else None, sums=bias is not None and not norm,
        )  # fmt: skip
    if norm or (bias is not None and grad_bias_sums is None):
        tap_grad = background_gradients(grad, dims, routed.slots, routed.output_gate, spec, by_tap=norm)
        grad_bias_sums = tap_grad[:, tap_grad.shape[1] // 2]  # the bias is added as often as the centre tap
    del ungated, saved
    back = InputBackward(routed, gate_dots, centre=True) if need_input else None
    ready = [] if gated is None else [gated]
    del gated  # the list holds the last reference

    def contribution_grad(group: range) -> Tensor:
        if ready:
            return ready.pop()
        return scatter_backward(grad, dims, routed.index, routed.slots, routed.output_gate, spec, rows, group)

    matmuls.run(contribution_grad, tap_grad, back)
    grad_bias = placeholder(grad)
    if bias is not None and grad_bias_sums is not None:
        grad_bias = grad_bias_sums.to(bias.dtype).contiguous()
    of_input = no_input_gradients(grad) if back is None else back.finish(matmuls.side)
    grad_weight = matmuls.finish()
    grad_weight = placeholder(grad) if grad_weight is None else grad_weight
    return ConvInputs(of_input.x, grad_weight, grad_bias, *of_input[1:])


def _conv_forward(
    inputs: ConvInputs, constants: Constants, opts: PatchOptions, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `patch_conv` returns."""
    x, weight, bias = inputs.x, inputs.weight, contiguous_or_none(inputs.bias)
    routed = RoutedMap.of(inputs, constants, opts, eps)
    save, on_input = opts.save, opts.gate_on_input
    dims = routed.dims
    spec = ScatterSpec(weight.shape[3], opts.isolated, opts.sum_experts)
    if _uses_pointwise(inputs, opts):
        y, ungated = pointwise_experts.forward(routed, weight_to_taps(weight), bias, save)
        return to_nchw(y), placeholder(x), placeholder(x) if ungated is None else ungated
    values, contributions, background = expert_contributions(routed, weight, bias, spec)
    pointwise_kernel = spec.kernel_size == 1
    if not (save and pointwise_kernel):  # of larger kernels the backward pass gathers values again, which costs little
        values = placeholder(x)
    if pointwise_kernel and spec.sum_experts and not on_input and background is None:
        owners = expert_choice.patch_owners(routed.slots, dims.L)
        y, ungated = sum_over_experts(contributions, dims, owners, routed.output_gate, bias, None), None
    else:
        y, ungated = scatter(
            contributions, dims, routed.slots, routed.output_gate, bias, spec, background=background,
            save=save and not pointwise_kernel and not on_input,
        )  # fmt: skip
    if ungated is None:
        ungated = contributions if save and pointwise_kernel and not on_input else placeholder(x)
    return to_nchw(y), values, ungated


def _uses_pointwise(inputs: ConvInputs, options: PatchOptions) -> bool:
    """Whether the kernels of `pointwise_experts` run: 1×1 experts side by side with gates on their outputs.

    Not in float32, where cuBLAS multiplies faster.
    """
    x, weight = inputs.x, inputs.weight
    _, O, _, ks, _ = weight.shape
    other = options.sum_experts or options.gate_on_input or inputs.norm_weight is not None
    fits = ks == 1 and O <= pointwise_experts.MAX_CHANNELS and not other
    return fits and x.dtype == weight.dtype and (weight.dtype.itemsize == 2 or INTERPRETED)


def _pointwise_backward(
    routed: RoutedMap, grad: Tensor, ungated: Tensor, inputs: ConvInputs, spec: ScatterSpec, need_input: bool,
    need_weight: bool,
) -> ConvInputs:  # fmt: skip
    """What `patch_conv_backward` returns where `_uses_pointwise` holds.

    Where gates are a softmax over the selected patches, the gradient of scores is in extra columns of the rows
    (see `pointwise_experts`).
    """
    weight, bias = inputs.weight, contiguous_or_none(inputs.bias)
    dims, taps, gate_dots, grad_scores = routed.dims, weight_to_taps(weight), None, None
    has_router = need_input and routed.router is not None and routed.scores is not None
    router_columns = pointwise_experts.count_router_columns(dims.p**2) if has_router and not routed.dense_scores else 0
    gated = None
    if router_columns:
        gated = pointwise_experts.gate_gradients(grad, ungated, dims, routed.index, routed.gate, sums=bias is not None)
    if gated is not None:
        rows, grad_scores, grad_bias_sums = gated
    else:
        gate_dots, rows, grad_bias_sums = output_gate_backward(
            grad, ungated if need_input else None, dims, routed.index, routed.gate, None, spec, background_row=False,
            rows=dims.M, sums=bias is not None, router_columns=router_columns,
        )  # fmt: skip
    assert rows is not None
    back = None
    if need_input:
        back = InputBackward(routed, gate_dots, centre=True, rows=rows, router_columns=router_columns)
    if back is not None and grad_scores is not None:
        back.grad_scores = grad_scores
    side = SideStream()  # gradients of the map and of the weights are computed concurrently
    if back is not None:
        back.grad_x = pointwise_experts.input_gradients(
            rows, taps, dims, routed.index, routed.slots, back.selected_scores, side
        )
    grad_weight, grad_router = placeholder(grad), None
    if need_weight or router_columns:
        router = routed.router.dtype if router_columns and routed.router is not None else None
        grad_taps, grad_router = pointwise_experts.weight_gradients(rows, routed.x, taps, dims, routed.index, router)
        grad_weight = taps_to_weight(grad_taps, weight) if need_weight else grad_weight
    side.join()
    grad_bias = placeholder(grad) if bias is None or grad_bias_sums is None else grad_bias_sums.to(bias.dtype)
    if back is None:
        of_input = no_input_gradients(grad)
    else:
        if grad_router is not None:
            back.grad_router = expert_choice.router_by_channel(grad_router, routed.router)
        of_input = back.finish()
    return ConvInputs(of_input.x, grad_weight, grad_bias, *of_input[1:])


@patch_conv_backward.register_fake
def _(grad, saved, inputs, constants, options, eps, need_input, need_weight):
    given = ConvInputs(*inputs)
    of_input = fake_input_gradients(grad, given, need_input)
    grad_weight = empty_weight_like(given.weight) if need_weight else grad.new_empty(0)
    grad_bias = grad.new_empty(0) if given.bias is None else contiguous_like(given.bias)
    return of_input.x, grad_weight, grad_bias, *of_input[1:]


def _conv_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *differentiable, constants, ctx.options, ctx.eps = inputs
    _, values, ungated = output
    ctx.no_constants = Constants(*constants).no_gradients()
    ctx.mark_non_differentiable(values, ungated)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(values, ungated, *differentiable, *constants)


def _conv_backward(ctx: Any, grad: Tensor | None, _values: None, _own: None) -> Any:
    count = len(ConvInputs._fields)
    needs = ConvInputs(*ctx.needs_input_grad[:count])
    if grad is None:
        return *(None for _ in needs), ctx.no_constants, None, None
    values, ungated, *tensors = ctx.saved_tensors
    grad = grad.contiguous(memory_format=torch.channels_last)
    gradients = patch_conv_backward(
        grad,
        [values, ungated],
        tensors[:count],
        tensors[count:],
        ctx.options,
        ctx.eps,
        needs_input(needs),
        needs.weight,
    )
    return *needed_gradients(gradients, needs), ctx.no_constants, None, None


patch_conv.register_autograd(_conv_backward, setup_context=_conv_setup)


@direct_operator("moesaic::patch_route_conv")
def patch_route_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, router: Tensor, patches: int, options: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`patch_route` and `patch_conv` in one, where only the experts need the routing: the map and what both save.

    Only the map has a gradient; all else is empty without ``options.save``.
    """
    opts = PatchOptions.unflatten(options)
    kernels = router_by_pixel(router)
    choice = expert_choice.choose_patches(to_nhwc(x), kernels, patches, router.shape[2], opts.gate_kind)
    given, constants = _conv_after_choice((x, weight, bias, router), choice, opts)
    y, values, ungated = _conv_forward(given, constants, opts, 0.0)
    return y, values, ungated, *(choice if opts.save else map(placeholder, choice))


def _conv_after_choice(
    tensors: Sequence[Tensor | None], choice: Sequence[Tensor], opts: PatchOptions
) -> tuple[ConvInputs, Constants]:
    """Arguments of `patch_conv` after such a choice, from map, weights and router."""
    *first, router = tensors
    gate, router, constants = choice_operands(router, choice, opts.gate_kind)
    return ConvInputs(*first, gate, router, None, None), constants


@patch_route_conv.register_fake
def _(x, weight, bias, router, patches, options):
    opts = PatchOptions.unflatten(options)
    choice = _fake_choice(x, router, patches)
    given, constants = _conv_after_choice((x, weight, bias, router), choice, opts)
    y, values, ungated = _fake_conv(given, constants, opts)
    return y, values, ungated, *(each if opts.save else each.new_empty(0) for each in choice)


def _route_conv_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.options = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved, *tensors)


def _route_conv_backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    if grad is None:
        return (None,) * 6
    *needs_weights, needs_router = ctx.needs_input_grad[:4]
    saved, choice, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:6], ctx.saved_tensors[6:]
    given, constants = _conv_after_choice(tensors, choice, PatchOptions.unflatten(ctx.options))
    needs = ConvInputs(*needs_weights, False, needs_router, False, False)
    grad = grad.contiguous(memory_format=torch.channels_last)
    found = patch_conv_backward(
        grad, saved, list(given), list(constants), ctx.options, 0.0, needs_input(needs), needs.weight
    )
    of = ConvInputs(*needed_gradients(found, needs))
    return *of[:3], of.router, None, None


patch_route_conv.register_autograd(_route_conv_backward, setup_context=_route_conv_setup)
