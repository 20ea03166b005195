"""The end of WRN-pMoE in one: the routed convolution, BatchNorm, ReLU and the mean over the map.

    pooled[b, o] = 1/(H·W) Σ_q ReLU(BatchNorm(conv(x)))[b, o, q]

On a GPU by kernels that never write the map (`moesaic.models.wide_resnet.triton.pooled_head`, imported when the first
map needs them). In ONNX BatchNorm is folded into the experts. Elsewhere by the four modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.experts import ConvExperts
from moesaic.layers import PatchMoE
from moesaic.layers.map_routing import choice_for_experts
from moesaic.ops import (
    ConvWeights,
    Norm,
    PatchSelection,
    PatchSpec,
    autocast_dtype,
    autocast_off,
    kernels_available,
    select_backend,
)
from moesaic.ops.channel.bn_folding import batch_norm_tensors
from moesaic.ops.eager_conditions import is_plain_eager
from moesaic.ops.triton_backend import TritonBackend, patch_operands, patch_options
from moesaic.routing import SoftRouter
from moesaic.routing_record import Routing

__all__ = ["pooled_conv", "pooled_head"]

MAX_COVERAGE = 1.0
"""Positions that an expert's patches cover, each with its halo, as a share of the map's, up to which the kernels run.

Beyond it they would compute more positions than the map has."""


def pooled_head(layer: PatchMoE, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """``norm(layer(x)).relu().mean((2, 3))``, without the map in between where kernels can do so.

    The layer, its experts and the norm are then not called as modules, so their hooks do not run; the layer's routing
    hooks do.

    >>> import torch, moesaic
    >>> layer = moesaic.PatchMoE(4, 6, experts=2, patches_per_expert=3, gate_on="input")
    >>> pooled_head(layer, torch.randn(5, 4, 8, 8), torch.nn.BatchNorm2d(6)).shape
    torch.Size([5, 6])
    """
    experts, output_norm = layer.experts, _norm_tensors(norm)
    unfit = layer.pads(x) or isinstance(layer.router, SoftRouter) or experts.dispatcher is not None
    if output_norm is None or unfit or not isinstance(experts, ConvExperts):
        return norm(layer(x)).relu().mean((2, 3))
    y = _trained_at_once(layer, x, output_norm)
    if y is not None:
        return y
    x, routing, selection = layer.prepare(x)
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    weights = experts.weights.to(autocast_dtype(x) or x.dtype)
    expert_norm = experts.norm_tensors(x)
    with autocast_off(x):
        backend = select_backend(x, routing)
        if isinstance(backend, TritonBackend) and kernels_fit(x, routing, weights, layer.spec):
            return pooled_conv(x, routing, weights, expert_norm, layer.spec, output_norm, selection)
        if torch.onnx.is_in_onnx_export() and _can_fold(layer, norm):
            # scaled weights are constants, and channels stay innermost in memory
            y = backend.conv(x, routing, _folded(weights, output_norm), expert_norm, layer.spec, selection)
            area = y.shape[2] * y.shape[3]
            # the mean as a matmul, which ONNX Runtime computes ten times as fast over the outer axes
            return (y.new_full((1, area), 1 / area) @ F.relu(y.permute(0, 2, 3, 1).flatten(1, 2))).squeeze(1)
        y = backend.conv(x, routing, weights, expert_norm, layer.spec, selection)
        return F.relu(output_norm.apply(y)).mean((2, 3))


def _trained_at_once(layer: PatchMoE, x: Tensor, output_norm: Norm) -> Tensor | None:
    """The means by one operator with expert choice and statistics; None where the kernels do not support that."""
    experts, spec = layer.experts, layer.spec
    assert isinstance(experts, ConvExperts)
    if not (output_norm.training and torch.is_grad_enabled() and is_plain_eager(x) and kernels_available(x)):
        return None
    x = layer.expert_input(x)
    choice, norm = choice_for_experts(layer, layer.router, experts, x, spec), experts.norm_tensors(x)
    if (
        choice is None
        or not TritonBackend.can_choose(x, choice)
        or not _covers(x, choice.patches, experts.weights, spec)
    ):
        return None
    if norm is not None and (not norm.training or norm.batch is not None):
        return None
    from moesaic.models.wide_resnet.triton.pooled_head_training import Factors, Running, routed_pooled

    weights = experts.weights.to(autocast_dtype(x) or x.dtype)
    after = Running(None, None, output_norm.running_mean, output_norm.running_var, output_norm.batches)
    factors = Factors(0.0, 0.0, output_norm.momentum, output_norm.eps)
    if norm is not None:
        after = after._replace(expert_mean=norm.running_mean, expert_var=norm.running_var)
        factors = factors._replace(expert_momentum=norm.momentum, expert_eps=norm.eps)
    of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
    options = choice.patches, *patch_options(spec, choice.gate, save=True, batch_stats=norm is not None)
    with autocast_off(x):
        return routed_pooled(
            x, weights.weight, weights.bias, choice.router, *of_norm, output_norm.weight, output_norm.bias, list(after),
            options, list(factors),
        )[0]  # fmt: skip


def kernels_fit(x: Tensor, routing: Routing, weights: ConvWeights, spec: PatchSpec) -> bool:
    """Whether `pooled_conv` computes this, and less than the map would cost."""
    assert routing.index is not None
    return _covers(x, routing.index.shape[2], weights, spec)


def _covers(x: Tensor, patches: int, weights: ConvWeights, spec: PatchSpec) -> bool:
    """Whether the patches of an expert, with their halo, cover no more than the map, and kernels compute the rest."""
    B, _, H, W = x.shape
    if spec.combine == "sum" or B * H * W == 1:
        return False
    halo = 2 * (weights.weight.shape[3] // 2) if spec.gate_on == "input" and spec.context == "map" else 0
    return patches * (spec.patch_size + halo) ** 2 / (H * W) <= MAX_COVERAGE


def pooled_conv(
    x: Tensor,
    routing: Routing,
    weights: ConvWeights,
    expert_norm: Norm | None,
    spec: PatchSpec,
    output_norm: Norm,
    selection: PatchSelection | None = None,
) -> Tensor:
    """Means (B, E·O) by kernels; moves the running statistics of ``output_norm``, tensors (E·O), in training."""
    from moesaic.models.wide_resnet.triton.pooled_head import patch_conv_pooled

    of_experts, of_norm = (weights.weight, weights.bias), (output_norm.weight, output_norm.bias)
    operands = patch_operands(x, routing, expert_norm, spec, selection, (*of_experts, *of_norm))
    if output_norm.training:
        statistics = None, None
    else:
        statistics = output_norm.running_mean, output_norm.running_var
    constants = operands.constants._replace(output_mean=statistics[0], output_var=statistics[1])
    pooled, moments, *_ = patch_conv_pooled(
        x, *of_experts, *operands[:4], *of_norm, list(constants), operands.options.flatten(),
        [operands.eps, output_norm.eps],
    )  # fmt: skip
    if output_norm.training:
        positions = x.shape[0] * x.shape[2] * x.shape[3]
        with torch.no_grad():
            mean, var = moments.detach().to(output_norm.running_mean.dtype).unbind()
            output_norm.running_mean.lerp_(mean, output_norm.momentum)
            output_norm.running_var.lerp_(var * (positions / (positions - 1)), output_norm.momentum)
    return pooled


def _can_fold(layer: PatchMoE, norm: nn.BatchNorm2d) -> bool:
    """Whether the norm is a scale and a shift that the experts' weights and biases can have in them."""
    return layer.gate_on == "input" and layer.combine == "concat" and not norm.training


def _folded(weights: ConvWeights, norm: Norm) -> ConvWeights:
    """Experts whose output is that of the given ones after the norm, whose tensors are (E·O,)."""
    E, O = weights.weight.shape[:2]
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    shift = (norm.bias - norm.running_mean * scale).view(E, O)
    scale = scale.view(E, O)
    bias = shift if weights.bias is None else weights.bias * scale + shift
    return ConvWeights(weights.weight * scale[:, :, None, None, None], bias)


def _norm_tensors(norm: nn.BatchNorm2d) -> Norm | None:
    """Tensors of a BatchNorm that has weights and running statistics; None of others."""
    if type(norm) is not nn.BatchNorm2d or not norm.affine or norm.momentum is None:
        return None
    return None if norm.running_mean is None else batch_norm_tensors(norm)
