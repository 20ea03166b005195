"""Gated channels in training as torch operators, with fake implementations for tracing and with gradients.

    map_statistics   mean and variance of a map; updates the running ones
    gated_norm       y = activation(gate ⊙ BatchNorm(x)), with given statistics
    gated_map_norm   both in one: with the statistics of the map
    topk_gates       scores of all heads → the open blocks of all layers, and their gates

Maps are (B, C, H, W) in channels_last. Every gradient is an operator too.
"""

# Triton is installed on GPU machines alone, so a type checker does not know what its callers return.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.direct_operator import direct_operator, joint_operator
from moesaic.ops.triton import channel_topk_gates as gate_kernels
from moesaic.ops.triton import gated_norm as kernels
from moesaic.ops.triton.launch import acc_dtype, placeholder, to_nchw, to_nhwc

__all__ = ["gated_map_norm", "gated_norm", "map_statistics", "topk_gates"]


@direct_operator("moesaic::map_statistics", mutates=("running_mean", "running_var", "batches"))
def map_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of a map; updates the running ones, and counts the batch."""
    return kernels.map_statistics(to_nhwc(x), running_mean, running_var, batches, momentum)


@map_statistics.register_fake
def _(x, running_mean, running_var, batches, momentum):
    mean = x.new_empty(x.shape[1], dtype=acc_dtype(x.dtype))
    return mean, torch.empty_like(mean)


# BatchNorm, gate and activation ------------------------------------------------------------------------------------


@direct_operator("moesaic::gated_norm")
def gated_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None, mean: Tensor, var: Tensor, options: Sequence[int],
    eps: float,
) -> Tensor:  # fmt: skip
    """The map; ``gate`` is (B, E) or (B, 1, E), ``options`` are `_norm`'s."""
    return to_nchw(kernels.gated_norm(to_nhwc(x), _norm(weight, bias, gate, mean, var, options, eps)))


@gated_norm.register_fake
def _(x, weight, bias, gate, mean, var, options, eps):
    return torch.empty_like(x, memory_format=torch.channels_last)


@direct_operator("moesaic::gated_norm_backward")
def gated_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None, mean: Tensor, var: Tensor,
    options: Sequence[int], eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and gate; empty where there is no gate."""
    norm = _norm(weight, bias, gate, mean, var, options, eps)
    found = kernels.gated_norm_backward(to_nhwc(grad), to_nhwc(x), norm)
    of_gate = placeholder(x) if found.gate is None or gate is None else found.gate.view(gate.shape)
    return to_nchw(found.x), found.weight, found.bias, of_gate


@gated_norm_backward.register_fake
def _(grad, x, weight, bias, gate, mean, var, options, eps):
    of_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    of_x = torch.empty_like(x, memory_format=torch.channels_last)
    return of_x, torch.empty_like(weight), torch.empty_like(bias), of_gate


def _norm(
    weight: Tensor, bias: Tensor, gate: Tensor | None, mean: Tensor, var: Tensor, options: Sequence[int], eps: float
) -> kernels.GatedNorm:
    """Options: channels of a gate, whether ReLU follows, whether the statistics are those of the map."""
    block, relu, batch_stats = options
    if gate is not None:
        gate = gate.squeeze(1) if gate.dim() == 3 else gate
        gate = gate.contiguous() if gate.stride(1) != 1 and gate.shape[1] > 1 else gate
    return kernels.GatedNorm(weight, bias, gate, mean, var, eps, block, bool(relu), bool(batch_stats))


def _gated_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.options, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gated_norm_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight, bias, gate, mean, var = ctx.saved_tensors
    of_x, of_weight, of_bias, of_gate = gated_norm_backward(
        grad, x, weight, bias, gate, mean, var, ctx.options, ctx.eps
    )
    return of_x, of_weight, of_bias, None if gate is None else of_gate, None, None, None, None


gated_norm.register_autograd(_gated_norm_backward, setup_context=_gated_norm_setup)


def _map_norm_apart(
    x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None, running_mean: Tensor, running_var: Tensor,
    batches: Tensor, options: Sequence[int], momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        mean, var = map_statistics(x, running_mean, running_var, batches, momentum)
    return gated_norm(x, weight, bias, gate, mean, var, options, eps), mean, var


@joint_operator(_map_norm_apart, mutates=("running_mean", "running_var", "batches"))
def gated_map_norm(
    x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor | None, running_mean: Tensor, running_var: Tensor,
    batches: Tensor, options: Sequence[int], momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`gated_norm` with `map_statistics`, which are returned as well."""
    maps = to_nhwc(x)
    mean, var = kernels.map_statistics(maps, running_mean, running_var, batches, momentum)
    return to_nchw(kernels.gated_norm(maps, _norm(weight, bias, gate, mean, var, options, eps))), mean, var


def _gated_map_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, gate, _, _, _, ctx.options, _, ctx.eps = inputs
    _, mean, var = output
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, gate, mean, var)


def _gated_map_norm_backward(ctx: Any, grad: Tensor | None, _mean: None, _var: None) -> Any:
    if grad is None:
        return (None,) * 10
    return *_gated_norm_backward(ctx, grad)[:4], None, None, None, None, None, None


gated_map_norm.register_autograd(_gated_map_norm_backward, setup_context=_gated_map_norm_setup)


# top-k gates ---------------------------------------------------------------------------------------------------------


@direct_operator("moesaic::topk_gates")
def topk_gates(scores: Tensor, layers: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Index and gate of the open blocks and the gates of all; ``sizes``: blocks, most of a layer, open ones."""
    return gate_kernels.topk_gates(scores.contiguous(), layers, *sizes)


@topk_gates.register_fake
def _(scores, layers, sizes):
    B, (blocks, _, opened) = scores.shape[0], sizes
    gate = scores.new_empty(B, opened)
    return torch.empty_like(gate, dtype=torch.int64), gate, scores.new_empty(B, blocks)


@direct_operator("moesaic::topk_gates_backward")
def topk_gates_backward(
    grad_gate: Tensor | None, grad_dense: Tensor | None, scores: Tensor, layers: Tensor, sizes: Sequence[int]
) -> Tensor:
    """The gradient of scores."""
    grad_gate, grad_dense = (None if each is None else each.contiguous() for each in (grad_gate, grad_dense))
    return gate_kernels.topk_gates_backward(grad_gate, grad_dense, scores.contiguous(), layers, *sizes)


@topk_gates_backward.register_fake
def _(grad_gate, grad_dense, scores, layers, sizes):
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _topk_setup(ctx: Any, inputs: Any, output: Any) -> None:
    scores, ctx.layers, ctx.sizes = (
        inputs  # the table of layers is cached, perhaps since inference mode: not to be saved
    )
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores)


def _topk_backward(ctx: Any, _: None, grad_gate: Tensor | None, grad_dense: Tensor | None) -> Any:
    if grad_gate is None and grad_dense is None:
        return None, None, None
    (scores,) = ctx.saved_tensors
    return topk_gates_backward(grad_gate, grad_dense, scores, ctx.layers, ctx.sizes), None, None


topk_gates.register_autograd(_topk_backward, setup_context=_topk_setup)
