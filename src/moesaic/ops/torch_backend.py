"""Sparse execution in plain torch: gather the routed pixels, matmul, scatter-add into the map.

A convolution is linear, so it can run in scatter form:

    y[r + shift_k] += W_e[k] · x[r]        for every routed pixel r of expert e and tap k

One GEMM computes the contributions of all pixels at all taps, and ``index_add`` adds them to the map. That costs L/N of
the dense multiply-adds. im2col would copy the input ks² times; the scatter form writes the expert's output ks² times,
which under ``concat`` is E times narrower.

With ``expert_norm``, pixels outside an expert's patches are not zero but one constant vector c, the background. The
output is then split in two:

    conv(c everywhere)       the background output: the same for all images, computed once per expert
    + conv(value − c)        zero outside the routed patches: the sparse part

Expert choice gives every expert the same number of pixels: batched GEMMs with static shapes. Where units choose, groups
are ragged: pixels and samples are sorted by expert for a grouped GEMM. Gated channels are in `moesaic.ops.channel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.masked import masked_conv
from moesaic.ops.dispatch import ChannelConv, ConvWeights, MLPWeights, Norm, PatchSelection, PatchSpec, Samples
from moesaic.ops.eager_conditions import in_vmap, is_eager_cpu, no_grad_needed
from moesaic.ops.expert_linear import expert_linear
from moesaic.ops.global_batch import global_moments
from moesaic.ops.patch.cpu_inference import can_run_inference, conv_inference
from moesaic.ops.patch.gather import RoutedPixels
from moesaic.ops.patch.onnx_conv import can_run_onnx_conv, onnx_conv
from moesaic.ops.patch.scatter_conv import (
    ScatterIndex,
    background_output,
    bn_relu_minus_background,
    scatter_add,
    scatter_conv,
    scatter_conv_with_background,
    tap_matmul,
    tap_matrix,
)
from moesaic.ops.sample_dispatch import SortedSamples, run_each
from moesaic.routing_record import Routing

__all__ = [
    "TorchBackend",
    "add_background",
    "combine_as_map",
    "conv_background",
    "conv_pixels",
    "expert_inputs",
    "masked_statistics",
    "mlp_pixels",
]


class TorchBackend:
    """Gather, batched or grouped GEMM, scatter-add; any device, any float dtype."""

    name = "torch"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        return "a soft routing has no patches to gather" if routing.index is None else None

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        if can_run_inference(x, routing, experts, norm):
            return conv_inference(x, routing, experts, norm, spec)
        if can_run_onnx_conv(routing, norm, spec):
            return onnx_conv(x, routing, experts, norm, spec)
        return _conv(x, routing, experts, norm, spec)

    def mlp(
        self,
        x: Tensor,
        routing: Routing,
        experts: MLPWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        pixels = RoutedPixels.from_routing(routing, x, spec)
        y, background = mlp_pixels(x, expert_inputs(x, pixels), pixels, experts, norm)
        if spec.gate_on == "input":
            y = scatter_add(y.unsqueeze(1), pixels.scatter_to_map(1))
        return combine_as_map(y, background, pixels, experts.weight_in.dtype)

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor:
        samples = SortedSamples.from_routing(routing)
        return samples.combine(run(samples.gather(x), samples))

    def each(
        self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor], also: Collection[int] = ()
    ) -> Tensor:
        return run_each(x, routing, call, also)

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        return masked_conv(x, gate_out, conv)


def _conv(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
    pixels = RoutedPixels.from_routing(routing, x, spec)
    sums, taps = conv_pixels(x, expert_inputs(x, pixels), pixels, experts, norm)
    background = conv_background(taps, experts.bias, pixels)
    return combine_as_map(sums, background, pixels, experts.weight.dtype)


def conv_pixels(
    x: Tensor, values: Tensor, pixels: RoutedPixels, experts: ConvWeights, norm: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """Convolves the values of the routed pixels of a map; ``x`` counts for the number of its positions only.

    Returns:
        The sums of contributions in the rows of ``pixels.scatter_index``, without bias and background; and with a norm
        the contribution (E, ks·ks, O) of each expert's background at each tap.
    """
    weight = experts.weight
    ks = weight.shape[3]
    if norm is None:
        values = values.to(weight.dtype)
        if pixels.ends_E is None:
            return scatter_conv(values, weight, pixels.scatter_index(ks)), None
        return _scatter_conv_ragged(values, weight, pixels), None
    scale, shift = _scale_and_shift(values, pixels, x, norm)
    if torch.compiler.is_exporting() and pixels.ends_E is None:
        # a background apart from the values depends on weights alone: whoever runs the graph computes it once
        background_input = shift.relu().unsqueeze(1)
        values = (values.to(scale.dtype) * scale.unsqueeze(1) + shift.unsqueeze(1)).relu() - background_input
        sums = scatter_conv(values.to(weight.dtype), weight, pixels.scatter_index(ks))
        taps = tap_matmul(background_input.to(weight.dtype), weight).squeeze(1)
    elif pixels.ends_E is None:
        values = bn_relu_minus_background(values.to(scale.dtype), scale, shift).to(weight.dtype)
        if is_eager_cpu(values, weight):
            index = pixels.scatter_index(ks, background=True)
            sums, taps = scatter_conv_with_background(values, weight, index)
            if pixels.spec.gate_on == "output":  # without the background pixels
                sums = pixels.by_expert(sums)[:, :-1].flatten(0, 1)
        else:
            contributions = tap_matmul(values, weight)
            sums = scatter_add(contributions[:, :-1].flatten(0, 1), pixels.scatter_index(ks))
            taps = contributions[:, -1]
    else:
        normed, background_input = _normed(values, scale, shift, pixels)
        deviation = (normed - pixels.broadcast_per_expert(background_input)).to(weight.dtype)
        sums = _scatter_conv_ragged(deviation, weight, pixels)
        taps = tap_matmul(background_input.to(weight.dtype).unsqueeze(1), weight).squeeze(1)
    return sums, taps


def conv_background(taps: Tensor | None, bias: Tensor | None, pixels: RoutedPixels) -> Tensor | None:
    """The experts' output on zero input, (E, O) or (E, H, W, O): the bias, and with a norm the background's taps."""
    if taps is None:
        return bias
    ks = math.isqrt(taps.shape[1])
    return background_output(taps.view(-1, ks, ks, taps.shape[2]), bias, pixels.map_size, pixels.spec)


def mlp_pixels(
    x: Tensor, values: Tensor, pixels: RoutedPixels, experts: MLPWeights, norm: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """Runs MLPs on the values of the routed pixels of a map: outputs (R, O) and the background (E, O).

    Under ``gate_on="input"`` outputs are those beyond the background, the output on zero input; else it is None.
    """
    dtype, background_input = experts.weight_in.dtype, None
    if norm is not None:
        values, background_input = _normed(values, *_scale_and_shift(values, pixels, x, norm), pixels)
    y = _mlp(values.to(dtype), experts, pixels)
    background = None
    if pixels.spec.gate_on == "input":
        if background_input is None:
            background_input = x.new_zeros(pixels.routing.experts, x.shape[1])
        background = _mlp(background_input.to(dtype).unsqueeze(1), experts, None).squeeze(1)
        y = y - pixels.broadcast_per_expert(background)
    return y.reshape(-1, y.shape[-1]), background


def _scatter_conv_ragged(values: Tensor, weight: Tensor, pixels: RoutedPixels) -> Tensor:
    O, ks = weight.shape[1], weight.shape[3]
    contributions = pixels.matmul(values, tap_matrix(weight)).view(-1, ks * ks, O)
    return scatter_add(contributions, pixels.scatter_index(ks))


def expert_inputs(x: Tensor, pixels: RoutedPixels) -> Tensor:
    """Gathers the map at the routed pixels, gated under ``gate_on="input"``."""
    B, C, H, W = x.shape
    values = pixels.gather(x.permute(0, 2, 3, 1).reshape(B * H * W, C))
    if pixels.used_R is not None:
        values = values.where(pixels.by_expert(pixels.used_R.unsqueeze(1)), 0)
    if pixels.spec.gate_on == "input":
        gates = pixels.by_expert(pixels.gate_R.unsqueeze(1))
        if is_eager_cpu(x, gates) and no_grad_needed(values, gates):
            return values.mul_(gates)
        return values * gates
    return values


def _scale_and_shift(values: Tensor, pixels: RoutedPixels, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """BatchNorm of each expert's masked map as scale · value + shift, both (E, C) and in float32 at least."""
    acc_dtype = torch.promote_types(values.dtype, torch.float32)
    if norm.training:
        mean, var = masked_statistics(values.to(acc_dtype), pixels, x.shape[0] * x.shape[2] * x.shape[3], norm)
    else:
        mean, var = norm.running_mean.to(acc_dtype), norm.running_var.to(acc_dtype)
    scale = norm.weight.to(acc_dtype) * torch.rsqrt(var + norm.eps)
    return scale, norm.bias.to(acc_dtype) - mean * scale


def _normed(values: Tensor, scale: Tensor, shift: Tensor, pixels: RoutedPixels) -> tuple[Tensor, Tensor]:
    """Returns ReLU(BatchNorm(value)) of the pixels, and the background (E, C), its value for zeros."""
    values = values.to(scale.dtype)
    normed = torch.addcmul(pixels.broadcast_per_expert(shift), values, pixels.broadcast_per_expert(scale))
    return F.relu(normed), F.relu(shift)


def masked_statistics(values: Tensor, pixels: RoutedPixels, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C) over the whole masked map of ``count`` positions: routed values, zeros elsewhere."""
    routed, mean_routed, var_routed = pixels.moments(values)
    unbiasing: float | Tensor
    if norm.batch is None:
        share, unbiasing = routed / max(count, 1), count / max(count - 1, 1)
    else:
        squares = routed * var_routed
        routed, mean_routed, squares, positions = global_moments(routed, mean_routed, squares, count, norm.batch)
        var_routed = squares / routed.clamp_min(1)
        share, unbiasing = routed / positions.clamp_min(1), positions / (positions - 1).clamp_min(1)
    mean = share * mean_routed
    # variance within the routed values, plus variance between them and the zeros
    var = share * var_routed + share * (1 - share) * mean_routed.square()
    if count > 0 or norm.batch is not None:
        with torch.no_grad():
            unbiased = var * unbiasing
            _move(norm.running_mean, mean, norm.momentum)
            _move(norm.running_var, unbiased, norm.momentum)
    return mean, var


def _move(running: Tensor, value: Tensor, momentum: float) -> None:
    value = value.to(running.dtype)
    if in_vmap():  # which has no rule for lerp_
        running.add_(momentum * (value - running))
    else:
        running.lerp_(value, momentum)


def _mlp(values: Tensor, experts: MLPWeights, pixels: RoutedPixels | None) -> Tensor:
    """Two-layer MLP C → J → O of each expert on its pixels; without ``pixels`` on values (E, M, C)."""

    def layer(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = pixels.matmul(values, weight) if pixels else expert_linear(values, weight)
        if bias is None:
            return y
        return y + (pixels.broadcast_per_expert(bias) if pixels else bias.unsqueeze(1))

    hidden = experts.activation(layer(values, experts.weight_in, experts.bias_in))
    return layer(hidden, experts.weight_out, experts.bias_out)


def combine_as_map(sums: Tensor, background: Tensor | None, pixels: RoutedPixels, dtype: torch.dtype) -> Tensor:
    """Returns the output map (B, O', H, W).

    Args:
        sums: of contributions, at the routed pixels (R, O) under ``gate_on="output"``, otherwise at all output rows.
        background: output of each expert on zero input, (E, O) or (E, H, W, O). Under ``gate_on="output"`` it counts
            on the expert's own patches only, and the gated sums are written there once.
        pixels: the routed pixels.
        dtype: of the output.
    """
    B, (H, W), groups, O = pixels.routing.batch, pixels.map_size, pixels.groups, sums.shape[1]
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    background = None if background is None else background.to(sums.dtype)
    if pixels.spec.gate_on == "output":
        sums = add_background(sums, background, pixels)
        sums = sums * pixels.gate_R.to(sums.dtype).unsqueeze(1)
        dummy_rows = 0 if pixels.used_R is None else pixels.dummy_rows
        index = ScatterIndex(pixels.output_index().unsqueeze(1), pixels.rows, dummy_rows, within_pixels=False)
        y = scatter_add(sums.unsqueeze(1), index).view(B, H, W, groups * O)
    else:
        y = sums.view(B, H, W, groups * O)
        if background is not None:
            everywhere = background.movedim(0, -2)
            everywhere = everywhere.flatten(-2) if pixels.spec.combine == "concat" else everywhere.sum(-2)
            y = y.add_(everywhere) if is_eager_cpu(y, everywhere) and no_grad_needed(y, everywhere) else y + everywhere
    return y.to(dtype).permute(0, 3, 1, 2)


def add_background(sums: Tensor, background: Tensor | None, pixels: RoutedPixels) -> Tensor:
    """Adds the experts' background, (E, O) or (E, H, W, O), to the sums (R, O) at their pixels."""
    if background is None:
        return sums
    return sums + (pixels.expand_per_expert if background.ndim == 2 else pixels.gather_by_expert)(background)
