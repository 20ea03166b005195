"""The end of WRN-pMoE in training as one operator: expert choice, statistics, and `patch_conv_pooled`.

Eager code runs it as one call, one plan and one node of autograd; running statistics move inside of it. Where the
dispatcher is needed its operators are called one after the other.
"""

# Triton is installed on GPU machines alone, so a type checker does not know what its callers return.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.models.wide_resnet.triton.pooled_head import (
    PooledInputs,
    patch_conv_pooled,
    patch_conv_pooled_backward,
    pooled_forward,
)
from moesaic.ops.direct_operator import joint_operator
from moesaic.ops.triton import expert_choice
from moesaic.ops.triton.launch import to_nhwc
from moesaic.ops.triton.norm import masked_statistics
from moesaic.ops.triton.operands import Constants, PatchOptions, choice_operands, needed_gradients, needs_input
from moesaic.ops.triton.patch_ops import patch_route, patch_statistics

__all__ = ["Factors", "Running", "routed_pooled"]


class Running(NamedTuple):
    """Running statistics, which change in place."""

    expert_mean: Tensor | None
    """(E, C), or None without an experts' norm, and ``expert_var`` likewise."""
    expert_var: Tensor | None
    mean: Tensor
    """(E·O): of the norm behind the experts, and ``var`` likewise."""
    var: Tensor
    batches: Tensor | None


class Factors(NamedTuple):
    """Settings of the experts' norm and of the one behind them."""

    expert_momentum: float
    expert_eps: float
    momentum: float
    eps: float


def _pooled_after_choice(
    tensors: Sequence[Tensor | None], choice: Sequence[Tensor], moments: tuple[Tensor | None, Tensor | None],
    opts: PatchOptions,
) -> tuple[PooledInputs, Constants]:  # fmt: skip
    """Arguments of `patch_conv_pooled` after such a choice, from map, weights, router and norms."""
    x, weight, bias, router, *norms = tensors
    gate, router, constants = choice_operands(router, choice, opts.gate_kind, moments)
    return PooledInputs(x, weight, bias, gate, router, *norms), constants


def _move(running: Running, moments: Tensor, momentum: float, positions: int) -> None:
    """Moves the running statistics of the norm behind the experts."""
    mean, var = moments.to(running.mean.dtype).unbind()
    running.mean.lerp_(mean, momentum)
    running.var.lerp_(var * (positions / (positions - 1)), momentum)
    if running.batches is not None:
        running.batches.add_(1)


def _decomposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, router: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor, running: Sequence[Tensor | None],
    options: Sequence[int], factors: Sequence[float],
) -> tuple[Tensor, ...]:  # fmt: skip
    (patches, *rest), now, factor = options, Running(*running), Factors(*factors)
    opts, moments = PatchOptions.unflatten(rest), (None, None)
    with torch.no_grad():
        choice = patch_route(x, router, patches, opts.gate_kind)
        if now.expert_mean is not None and now.expert_var is not None:
            gate = choice[2] if opts.gate_on_input else None
            moments = patch_statistics(
                x, choice[1], gate, now.expert_mean, now.expert_var, factor.expert_momentum, opts.patch_size
            )
    tensors = x, weight, bias, router, norm_weight, norm_bias, output_weight, output_bias
    given, constants = _pooled_after_choice(tensors, choice, moments, opts)
    pooled, *saved = patch_conv_pooled(*given, list(constants), rest, [factor.expert_eps, factor.eps])
    with torch.no_grad():
        _move(now, saved[0], factor.momentum, x.shape[0] * x.shape[2] * x.shape[3])
    return pooled, *saved


@joint_operator(_decomposed, mutates=("running",))
def routed_pooled(
    x: Tensor, weight: Tensor, bias: Tensor | None, router: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, output_weight: Tensor, output_bias: Tensor, running: Sequence[Tensor | None],
    options: Sequence[int], factors: Sequence[float],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Means (B, E·O) over the map, and what the gradient needs.

    Args:
        x: maps (B, C, H, W).
        weight: (E, O, C, ks, ks).
        bias: (E, O).
        router: (E, C, p, p).
        norm_weight: (E, C): of the experts' norm.
        norm_bias: the same.
        output_weight: (E·O): of the norm behind the experts.
        output_bias: the same.
        running: `Running`.
        options: patches that an expert selects, and `PatchOptions`.
        factors: `Factors`.
    """
    (patches, *rest), now, factor = options, Running(*running), Factors(*factors)
    opts, maps, moments = PatchOptions.unflatten(rest), to_nhwc(x), (None, None)
    kernels = expert_choice.router_by_pixel(router)
    choice = expert_choice.choose_patches(maps, kernels, patches, router.shape[2], opts.gate_kind)
    _, index, gate, _ = choice
    if now.expert_mean is not None and now.expert_var is not None:
        moments = masked_statistics(
            maps, index, gate if opts.gate_on_input else None, now.expert_mean, now.expert_var,
            factor.expert_momentum, opts.patch_size,
        )  # fmt: skip
    tensors = x, weight, bias, router, norm_weight, norm_bias, output_weight, output_bias
    given, constants = _pooled_after_choice(tensors, choice, moments, opts)
    pooled, *saved = pooled_forward(given, constants, opts, (factor.expert_eps, factor.eps))
    _move(now, saved[0], factor.momentum, x.shape[0] * x.shape[2] * x.shape[3])
    return pooled, *saved, *choice, *(each for each in moments if each is not None)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.options, ctx.factors = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    if grad is None:
        return (None,) * 11
    needs_x, needs_weight, needs_bias, needs_router, *needs_norms = ctx.needs_input_grad[:8]
    tensors, saved = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
    (_, *rest), factor = ctx.options, Factors(*ctx.factors)
    moments = saved[11:] or (None, None)
    given, constants = _pooled_after_choice(tensors, saved[7:11], moments, PatchOptions.unflatten(rest))
    needs = PooledInputs(needs_x, needs_weight, needs_bias, False, needs_router, *needs_norms)
    found = patch_conv_pooled_backward(
        grad, list(saved[:7]), list(given), list(constants), rest, [factor.expert_eps, factor.eps], needs_input(needs),
        needs.weight,
    )  # fmt: skip
    of = PooledInputs(*needed_gradients(found, needs))
    return of.x, of.weight, of.bias, of.router, *of[5:], None, None, None


routed_pooled.register_autograd(_backward, setup_context=_setup)
