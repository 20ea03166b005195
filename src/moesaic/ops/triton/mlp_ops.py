"""MLP experts over selected patches as torch operators, with fake implementations for tracing and with gradients.

    patch_mlp          y = Σ_e G_e ⊙ mlp_e(f_e(M_e ⊙ x)), or mlp_e(f_e(G_e ⊙ x));  mlp_e: C → J → O at each pixel
    patch_route_mlp    `patch_route` and patch_mlp in one, in eager code

Arguments, layouts and the gradient of the gates are as in `moesaic.ops.triton.patch_ops`; the matmuls and activations
are in `moesaic.ops.triton.mlp`.
"""

# Type checkers do not know Triton's language, and Triton is installed on GPU machines alone.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.direct_operator import direct_operator, joint_operator
from moesaic.ops.triton import expert_choice, mlp
from moesaic.ops.triton.activation import ACTIVATIONS
from moesaic.ops.triton.expert_background import background_gradients
from moesaic.ops.triton.expert_choice import router_by_pixel
from moesaic.ops.triton.gather import gather, sum_over_experts
from moesaic.ops.triton.launch import contiguous_or_none, empty_map_like, placeholder, to_nchw, to_nhwc
from moesaic.ops.triton.operands import (
    Constants,
    MLPInputs,
    PatchOptions,
    RoutedMap,
    choice_operands,
    needed_gradients,
    needs_input,
)
from moesaic.ops.triton.patch_backward import (
    InputBackward,
    contiguous_like,
    fake_input_gradients,
    no_input_gradients,
)
from moesaic.ops.triton.patch_ops import patch_route
from moesaic.ops.triton.scatter import ScatterSpec, output_gate_backward, scatter, scatter_backward

__all__ = ["patch_mlp", "patch_route_mlp"]


@direct_operator("moesaic::patch_mlp")
def patch_mlp(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None, gate: Tensor,
    router: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, constants: Sequence[Tensor | None],
    options: Sequence[int], eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The map (B, O', H, W), and with ``options.save`` inputs, hidden values before and after activation, outputs."""
    inputs = MLPInputs(x, weight_in, bias_in, weight_out, bias_out, gate, router, norm_weight, norm_bias)
    return _mlp_forward(inputs, Constants(*constants), PatchOptions.unflatten(options), eps)


@patch_mlp.register_fake
def _(
    x, weight_in, bias_in, weight_out, bias_out, gate, router, norm_weight, norm_bias, constants, options, eps,
):  # fmt: skip
    opts = PatchOptions.unflatten(options)
    E, J, C = weight_in.shape
    O = weight_out.shape[1]
    M = x.shape[0] * constants[0].shape[2] * opts.patch_size**2 + (8 if opts.gate_on_input else 0)
    y = empty_map_like(x, O if opts.sum_experts else E * O, weight_in.dtype)
    if not opts.save:
        return y, *(x.new_empty(0) for _ in range(4))
    outputs = x.new_empty(0) if opts.gate_on_input else weight_in.new_empty(E, M, O)
    return y, weight_in.new_empty(E, M, C), weight_in.new_empty(E, M, J), weight_in.new_empty(E, M, J), outputs


def _mlp_forward(
    inputs: MLPInputs, constants: Constants, opts: PatchOptions, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `patch_mlp` returns."""
    routed = RoutedMap.of(inputs, constants, opts, eps)
    dims, bias_out, on_input = routed.dims, contiguous_or_none(inputs.bias_out), opts.gate_on_input
    values = gather(routed, inputs.weight_in.dtype, centre=False, background_row=on_input)
    activation = ACTIVATIONS[opts.activation]
    outputs, before, after = mlp.forward(
        values, inputs.weight_in, inputs.bias_in, inputs.weight_out, activation, opts.save
    )
    unselected = None
    if on_input:  # an expert's output where it selected nothing
        unselected = outputs[:, dims.M] if bias_out is None else outputs[:, dims.M] + bias_out
        unselected = unselected.contiguous()
    if opts.sum_experts:
        owners = expert_choice.patch_owners(routed.slots, dims.L)
        y = sum_over_experts(outputs, dims, owners, routed.output_gate, bias_out, unselected)
    else:
        y, _ = scatter(
            outputs,
            dims,
            routed.slots,
            routed.output_gate,
            bias_out,
            ScatterSpec(1, False, False),
            unselected=unselected,
        )
    y = to_nchw(y)
    if not opts.save:
        return y, *(placeholder(inputs.x) for _ in range(4))
    return y, values, before, after, placeholder(inputs.x) if on_input else outputs


@direct_operator("moesaic::patch_mlp_backward")
def patch_mlp_backward(
    grad: Tensor, saved: Sequence[Tensor], inputs: Sequence[Tensor | None], constants: Sequence[Tensor | None],
    options: Sequence[int], eps: float, need_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `MLPInputs`, empty where there is none, from that of the map; ``saved`` as `patch_mlp` returns."""
    given, opts = MLPInputs(*inputs), PatchOptions.unflatten(options)
    routed = RoutedMap.of(given, Constants(*constants), opts, eps)
    values, before, after, outputs = saved
    grad, bias_out = to_nhwc(grad), contiguous_or_none(given.bias_out)
    dims, spec = routed.dims, ScatterSpec(1, False, opts.sum_experts)
    rows = values.shape[1]
    gate_dots = None
    if routed.output_gate is not None:
        gate_dots, part, grad_bias_sums = output_gate_backward(
            grad, outputs if need_input else None, dims, routed.index, routed.output_gate, bias_out, spec,
            background_row=False, rows=rows, sums=bias_out is not None,
        )  # fmt: skip
        assert part is not None
    else:
        part = scatter_backward(grad, dims, routed.index, routed.slots, None, spec, rows, range(dims.E))
        elsewhere = background_gradients(grad, dims, routed.slots, None, spec, by_tap=False, elsewhere=True)
        part[:, dims.M] = elsewhere[:, 0]
        grad_bias_sums = None
        if bias_out is not None:
            grad_bias_sums = background_gradients(grad, dims, routed.slots, None, spec, by_tap=False)[:, 0]
    hidden = mlp.Hidden(values, before, after)
    of_weights = mlp.backward(
        part, hidden, given.weight_in, given.bias_in, given.weight_out, ACTIVATIONS[opts.activation]
    )
    grad_bias_out = (
        placeholder(grad)
        if bias_out is None or grad_bias_sums is None
        else grad_bias_sums.to(bias_out.dtype).contiguous()
    )
    grad_bias_in = placeholder(grad) if of_weights.bias_in is None else of_weights.bias_in
    if need_input:
        back = InputBackward(routed, gate_dots, centre=False)
        back.add(of_weights.values, range(dims.E))
        of_input = back.finish()
    else:
        of_input = no_input_gradients(grad)
    return MLPInputs(
        of_input.x, of_weights.weight_in, grad_bias_in, of_weights.weight_out, grad_bias_out, *of_input[1:]
    )


@patch_mlp_backward.register_fake
def _(grad, saved, inputs, constants, options, eps, need_input):
    given = MLPInputs(*inputs)
    of_input = fake_input_gradients(grad, given, need_input)
    of_weights = [
        grad.new_empty(0) if each is None else contiguous_like(each)
        for each in (given.weight_in, given.bias_in, given.weight_out, given.bias_out)
    ]
    return of_input.x, *of_weights, *of_input[1:]


def _mlp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *differentiable, constants, ctx.options, ctx.eps = inputs
    _, *saved = output
    ctx.no_constants = Constants(*constants).no_gradients()
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved, *differentiable, *constants)


def _mlp_backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    count = len(MLPInputs._fields)
    needs = MLPInputs(*ctx.needs_input_grad[:count])
    if grad is None:
        return *(None for _ in needs), ctx.no_constants, None, None
    saved, tensors = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    grad = grad.contiguous(memory_format=torch.channels_last)
    gradients = patch_mlp_backward(
        grad, saved, tensors[:count], tensors[count:], ctx.options, ctx.eps, needs_input(needs)
    )
    return *needed_gradients(gradients, needs), ctx.no_constants, None, None


patch_mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)


def _mlp_after_choice(
    tensors: Sequence[Tensor | None], choice: Sequence[Tensor], opts: PatchOptions
) -> tuple[MLPInputs, Constants]:
    """Arguments of `patch_mlp` after such a choice, from map, weights and router."""
    *first, router = tensors
    gate, router, constants = choice_operands(router, choice, opts.gate_kind)
    return MLPInputs(*first, gate, router, None, None), constants


def _route_mlp_decomposed(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None, router: Tensor,
    patches: int, options: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    opts = PatchOptions.unflatten(options)
    choice = patch_route.without_gradient(x, router, patches, opts.gate_kind)
    given, constants = _mlp_after_choice((x, weight_in, bias_in, weight_out, bias_out, router), choice, opts)
    return patch_mlp(*given, list(constants), options, 0.0)


@joint_operator(_route_mlp_decomposed)
def patch_route_mlp(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None, router: Tensor,
    patches: int, options: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """`patch_route` and `patch_mlp` in one, where only the experts need the routing: the map and what both save."""
    opts = PatchOptions.unflatten(options)
    kernels = router_by_pixel(router)
    choice = expert_choice.choose_patches(to_nhwc(x), kernels, patches, router.shape[2], opts.gate_kind)
    given, constants = _mlp_after_choice((x, weight_in, bias_in, weight_out, bias_out, router), choice, opts)
    y, *saved = _mlp_forward(given, constants, opts, 0.0)
    return (y, *saved, *choice) if opts.save else (y,)


def _route_mlp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.options = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved, *tensors)


def _route_mlp_backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    if grad is None:
        return (None,) * 8
    *needs_weights, needs_router = ctx.needs_input_grad[:6]
    saved, choice, tensors = ctx.saved_tensors[:4], ctx.saved_tensors[4:8], ctx.saved_tensors[8:]
    given, constants = _mlp_after_choice(tensors, choice, PatchOptions.unflatten(ctx.options))
    needs = MLPInputs(*needs_weights, False, needs_router, False, False)
    grad = grad.contiguous(memory_format=torch.channels_last)
    found = patch_mlp_backward(grad, saved, list(given), list(constants), ctx.options, 0.0, needs_input(needs))
    of = MLPInputs(*needed_gradients(found, needs))
    return *of[:5], of.router, None, None


patch_route_mlp.register_autograd(_route_mlp_backward, setup_context=_route_mlp_setup)
