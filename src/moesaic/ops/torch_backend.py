"""Sparse execution in plain torch: gather the chosen pixels, multiply, add into the map.

A convolution is linear, so it may be run from its inputs: one GEMM gives, for each chosen pixel,
what it contributes to the output at every tap of the kernel, and ``index_add`` lands each
contribution at its shift. That costs L/N of the dense multiply-adds and never copies a
neighbourhood: im2col would copy the input ks² times, this copies the expert's output ks² times,
which under ``concat`` is E times narrower.

Where unchosen pixels are not zero for the expert (``expert_norm`` sends them all to one constant
vector c per expert) its answer is split in two:

    expert(c everywhere)    the same for all images: ``null``, computed once per expert
    + conv(value − c)       zero outside the chosen patches: the sparse part

Expert choice gives every expert equally many pixels: one batched GEMM, static shapes. Where units
choose, groups are ragged, and pixels and samples are sorted by expert for a grouped GEMM. Gated
channels have modules of their own, ``channels`` and ``skipping``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.gated_conv import masked_dense, may_skip
from moesaic.ops.channel.open_channels import open_channels_alone
from moesaic.ops.dispatch import ChannelConv, ConvWeights, MLPWeights, Norm, PatchSpec, Samples
from moesaic.ops.patch.gather import Pixels
from moesaic.ops.patch.inference import conv_unlearned, may_run_unlearned
from moesaic.ops.patch.scatter_conv import (
    Landing,
    answer_to_constant,
    by_hand,
    deviations,
    land,
    land_with_rest,
    landed,
    nobody_learns,
    tap_products,
)
from moesaic.ops.sample_dispatch import SortedSamples, run_each
from moesaic.routing_record import Routing

__all__ = ["TorchBackend"]


class TorchBackend:
    """Gather, batched or grouped GEMM, index_add; any device, any float dtype."""

    name = "torch"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        return "a soft routing has no patches to gather" if routing.index is None else None

    def conv(self, x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        if may_run_unlearned(x, routing, experts, norm):
            return conv_unlearned(x, routing, experts, norm, spec)
        return _conv(x, routing, experts, norm, spec)

    def mlp(self, x: Tensor, routing: Routing, experts: MLPWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        dtype = experts.weight_in.dtype
        pixels = Pixels.chosen(routing, x, spec)
        values, constant = _expert_inputs(x, pixels), None
        if norm is not None:
            values, constant = _normed(values, *_scale_and_shift(values, pixels, x, norm), pixels)
        y = _perceptron(values.to(dtype), experts, pixels)
        null = None
        if spec.gate_on == "input":
            resting = x.new_zeros(routing.experts, x.shape[1]) if constant is None else constant
            null = _perceptron(resting.to(dtype).unsqueeze(1), experts, None).squeeze(1)
            y = y - pixels.per_expert(null)
        y = y.reshape(-1, y.shape[-1])
        if spec.gate_on == "input":
            y = landed(y.unsqueeze(1), pixels.landing_on_map(1))
        return _as_map(y, null, pixels, dtype)

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor:
        samples = SortedSamples.chosen(routing)
        return samples.combine(run(samples.take(x), samples))

    def each(self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
        return run_each(x, routing, call)

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        if may_skip(x, [gate_out.gate], [conv]):
            return open_channels_alone(x, gate_out, gate_in, conv)
        return masked_dense(x, gate_out, conv)


def _conv(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
    weight, bias = experts.weight, experts.bias
    ks = weight.shape[3]
    pixels = Pixels.chosen(routing, x, spec)
    values = _expert_inputs(x, pixels)
    on_pixels = spec.gate_on == "output"
    if norm is None:
        values, null = values.to(weight.dtype), bias
        if pixels.ends is None:
            landing = pixels.landing_on_pixels(ks) if on_pixels else pixels.landing_on_map(ks)
            sums = land(values, weight, landing)
        else:
            sums = _land_ragged(values, weight, pixels)
    else:
        scale, shift = _scale_and_shift(values, pixels, x, norm)
        if pixels.ends is None:
            values = deviations(values.to(scale.dtype), scale, shift).to(weight.dtype)
            if by_hand(values, weight):
                landing = pixels.landing_on_pixels(ks, rest=True) if on_pixels else pixels.landing_on_map(ks, rest=True)
                sums, answers = land_with_rest(values, weight, landing)
                if on_pixels:  # but for the rest, which is none of them
                    sums = pixels.grouped(sums)[:, :-1].flatten(0, 1)
            else:
                products = tap_products(values, weight)
                landing = pixels.landing_on_pixels(ks) if on_pixels else pixels.landing_on_map(ks)
                sums, answers = landed(products[:, :-1].flatten(0, 1), landing), products[:, -1]
        else:
            normed, resting = _normed(values, scale, shift, pixels)
            deviating = (normed - pixels.per_expert(resting)).to(weight.dtype)
            sums = _land_ragged(deviating, weight, pixels)
            answers = tap_products(resting.to(weight.dtype).unsqueeze(1), weight).squeeze(1)
        null = answer_to_constant(answers.view(-1, ks, ks, weight.shape[1]), bias, pixels.map_size, spec)
    return _as_map(sums, null, pixels, weight.dtype)


def _land_ragged(values: Tensor, weight: Tensor, pixels: Pixels) -> Tensor:
    O, ks = weight.shape[1], weight.shape[3]
    products = pixels.matmul(values, weight.permute(0, 3, 4, 1, 2).flatten(1, 3)).view(-1, ks * ks, O)
    on_pixels = pixels.spec.gate_on == "output"
    return landed(products, pixels.landing_on_pixels(ks) if on_pixels else pixels.landing_on_map(ks))


def _expert_inputs(x: Tensor, pixels: Pixels) -> Tensor:
    """The map at the experts' pixels, gated where the gate is on the input."""
    B, C, H, W = x.shape
    values = pixels.take(x.permute(0, 2, 3, 1).reshape(B * H * W, C))
    if pixels.used_R is not None:
        values = values.where(pixels.grouped(pixels.used_R.unsqueeze(1)), 0)
    if pixels.spec.gate_on == "input":
        gates = pixels.grouped(pixels.gate_R.unsqueeze(1))
        if by_hand(x, gates) and nobody_learns(values, gates):
            return values.mul_(gates)
        return values * gates
    return values


def _scale_and_shift(values: Tensor, pixels: Pixels, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """BatchNorm of each expert's masked map as scale · value + shift, both (E, C) and in float32 at least."""
    wide = torch.promote_types(values.dtype, torch.float32)
    if norm.training:
        mean, var = _masked_statistics(values.to(wide), pixels, x.shape[0] * x.shape[2] * x.shape[3], norm)
    else:
        mean, var = norm.running_mean.to(wide), norm.running_var.to(wide)
    scale = norm.weight.to(wide) * torch.rsqrt(var + norm.eps)
    return scale, norm.bias.to(wide) - mean * scale


def _normed(values: Tensor, scale: Tensor, shift: Tensor, pixels: Pixels) -> tuple[Tensor, Tensor]:
    """What experts see at their pixels behind BatchNorm and ReLU, and the vector (E, C) they see everywhere else."""
    normed = torch.addcmul(pixels.per_expert(shift), values.to(scale.dtype), pixels.per_expert(scale))
    return F.relu(normed), F.relu(shift)


def _masked_statistics(values: Tensor, pixels: Pixels, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C) over the whole masked map of ``count`` positions: chosen values, and zeros elsewhere."""
    chosen, mean_chosen, var_chosen = pixels.moments(values)
    share = chosen / max(count, 1)
    mean = share * mean_chosen
    # the variance within the chosen, and between them and the zeros
    var = share * var_chosen + share * (1 - share) * mean_chosen.square()
    if count > 0:
        with torch.no_grad():
            unbiased = var * (count / max(count - 1, 1))
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    return mean, var


def _perceptron(values: Tensor, experts: MLPWeights, pixels: Pixels | None) -> Tensor:
    """C → J → O on each expert's pixels; without ``pixels`` on values (E, M, C)."""

    def layer(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = pixels.matmul(values, weight) if pixels else torch.bmm(values, weight.transpose(1, 2))
        if bias is None:
            return y
        return y + (pixels.per_expert(bias) if pixels else bias.unsqueeze(1))

    hidden = experts.activation(layer(values, experts.weight_in, experts.bias_in))
    return layer(hidden, experts.weight_out, experts.bias_out)


def _as_map(sums: Tensor, null: Tensor | None, pixels: Pixels, dtype: torch.dtype) -> Tensor:
    """The result (B, O', H, W) of what was summed: on pixels under ``gate_on="output"``, on rows of the map otherwise.

    ``null`` is what an expert answers where it was given nothing, (E, O) or (E, H, W, O). Under ``gate_on="output"`` an
    expert answers on its own patches and nowhere else: what it gives is gated there and written once.
    """
    B, (H, W), lanes, O = pixels.routing.batch, pixels.map_size, pixels.lanes, sums.shape[1]
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    null = None if null is None else null.to(sums.dtype)
    if pixels.spec.gate_on == "output":
        if null is not None:
            sums = sums + (pixels.rows_of_expert(null) if null.ndim == 2 else pixels.take_by_expert(null))
        sums = sums * pixels.gate_R.to(sums.dtype).unsqueeze(1)
        landing = Landing(pixels.own_rows().unsqueeze(1), pixels.rows, pixels.rows_beyond, among_pixels=False)
        y = landed(sums.unsqueeze(1), landing).view(B, H, W, lanes * O)
    else:
        y = sums.view(B, H, W, lanes * O)
        if null is not None:
            everywhere = null.movedim(0, -2)
            everywhere = everywhere.flatten(-2) if pixels.spec.combine == "concat" else everywhere.sum(-2)
            y = y.add_(everywhere) if by_hand(y, everywhere) and nobody_learns(y, everywhere) else y + everywhere
    return y.to(dtype).permute(0, 3, 1, 2)
