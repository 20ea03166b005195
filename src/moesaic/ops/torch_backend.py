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

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channels import masked_dense, may_skip
from moesaic.ops.dispatch import ChannelConv, ConvWeights, MLPWeights, Norm, PatchSpec, Samples
from moesaic.ops.pixels import Pixels
from moesaic.ops.samples import SortedSamples, run_each
from moesaic.ops.skipping import open_channels_alone
from moesaic.record import Routing

__all__ = ["TorchBackend"]


class TorchBackend:
    """Gather, batched or grouped GEMM, index_add; any device, any float dtype."""

    name = "torch"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        return "a soft routing has no patches to gather" if routing.index is None else None

    def conv(self, x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        weight = experts.weight
        pixels = Pixels.chosen(routing, x, spec)
        values, constant = _expert_inputs(x, pixels, norm)
        O, ks = weight.shape[1], weight.shape[3]
        if constant is None:
            contributions, null = pixels.tap_products(values.to(weight.dtype), weight), experts.bias
        else:
            deviations = (values - pixels.per_expert(constant)).to(weight.dtype)
            contributions, answers = pixels.tap_products_with(deviations, constant.to(weight.dtype), weight)
            null = _answer_to_constant(answers.view(-1, ks, ks, O), experts.bias, pixels)
        return _combine(contributions, null, pixels)

    def mlp(self, x: Tensor, routing: Routing, experts: MLPWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        dtype = experts.weight_in.dtype
        pixels = Pixels.chosen(routing, x, spec)
        values, constant = _expert_inputs(x, pixels, norm)
        y = _perceptron(values.to(dtype), experts, pixels)
        null = None
        if spec.gate_on == "input":
            resting = x.new_zeros(routing.experts, x.shape[1]) if constant is None else constant
            null = _perceptron(resting.to(dtype).unsqueeze(1), experts, None).squeeze(1)
            y = y - pixels.per_expert(null)
        return _combine(y.reshape(-1, 1, y.shape[-1]), null, pixels)

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor:
        samples = SortedSamples.chosen(routing)
        return samples.combine(run(samples.take(x), samples))

    def each(self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
        return run_each(x, routing, call)

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        if may_skip(x, [gate_out.gate], [conv]):
            return open_channels_alone(x, gate_out, gate_in, conv)
        return masked_dense(x, gate_out, conv)


def _expert_inputs(x: Tensor, pixels: Pixels, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """What the experts see at their pixels, and the vector (E, C) they see everywhere else, None for zero."""
    B, C, H, W = x.shape
    values = pixels.take(x.permute(0, 2, 3, 1).reshape(B * H * W, C))
    if pixels.used_R is not None:
        values = values.where(pixels.grouped(pixels.used_R.unsqueeze(1)), 0)
    if pixels.spec.gate_on == "input":
        values = values * pixels.grouped(pixels.gate_R.unsqueeze(1))
    if norm is None:
        return values, None
    wide = torch.promote_types(values.dtype, torch.float32)
    values = values.to(wide)
    if norm.training:
        mean, var = _masked_statistics(values, pixels, B * H * W, norm)
    else:
        mean, var = norm.running_mean.to(wide), norm.running_var.to(wide)
    scale = norm.weight.to(wide) * torch.rsqrt(var + norm.eps)
    shift = norm.bias.to(wide) - mean * scale
    normed = torch.addcmul(pixels.per_expert(shift), values, pixels.per_expert(scale))
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


def _answer_to_constant(taps_EkkO: Tensor, bias: Tensor | None, pixels: Pixels) -> Tensor:
    """What each convolution answers to a constant map, given each tap's answer to the constant.

    (E, O), or (E, H, W, O) for kernels that see the zero padding.
    """
    ks = taps_EkkO.shape[1]
    if ks == 1:
        null = taps_EkkO[:, 0, 0]
        return null if bias is None else null + bias
    (H, W), p = pixels.map_size, pixels.spec.patch_size
    height, width = (H, W) if pixels.spec.context == "map" else (p, p)
    inside = (_taps_inside(height, ks, taps_EkkO), _taps_inside(width, ks, taps_EkkO))
    null = torch.einsum("hi,wj,eijo->ehwo", *inside, taps_EkkO).repeat(1, H // height, W // width, 1)
    return null if bias is None else null + bias[:, None, None]


def _taps_inside(size: int, kernel: int, like: Tensor) -> Tensor:
    """(size, kernel): 1 where a tap of a kernel centred there falls inside, 0 where on the zero padding."""
    at = torch.arange(size, device=like.device).unsqueeze(1) + torch.arange(kernel, device=like.device) - kernel // 2
    return ((at >= 0) & (at < size)).to(like.dtype)


def _perceptron(values: Tensor, experts: MLPWeights, pixels: Pixels | None) -> Tensor:
    """C → J → O on each expert's pixels; without ``pixels`` on values (E, M, C)."""

    def layer(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = pixels.matmul(values, weight) if pixels else torch.bmm(values, weight.transpose(1, 2))
        if bias is None:
            return y
        return y + (pixels.per_expert(bias) if pixels else bias.unsqueeze(1))

    hidden = experts.activation(layer(values, experts.weight_in, experts.bias_in))
    return layer(hidden, experts.weight_out, experts.bias_out)


def _combine(taps_RkO: Tensor, null: Tensor | None, pixels: Pixels) -> Tensor:
    """Add every pixel's contributions into the map, each at its tap's shift: (B, O', H, W).

    ``null`` is what an expert answers where it was given nothing, (E, O) or (E, H, W, O). Sums are taken in float32
    at least.
    """
    dtype, wide = taps_RkO.dtype, torch.promote_types(taps_RkO.dtype, torch.float32)
    put = _answers_of_own_patches if pixels.spec.gate_on == "output" else _answers_everywhere
    y = put(taps_RkO.to(wide), None if null is None else null.to(wide), pixels)
    B, (H, W) = pixels.routing.batch, pixels.map_size
    return y.view(B, H, W, pixels.lanes * taps_RkO.shape[2]).to(dtype).permute(0, 3, 1, 2)


def _answers_of_own_patches(taps_RkO: Tensor, null: Tensor | None, pixels: Pixels) -> Tensor:
    """Under ``gate_on="output"`` an expert answers on its own patches and nowhere else: sum there, gate, write once."""
    R, taps, O = taps_RkO.shape
    if taps == 1:
        own_RO = taps_RkO.squeeze(1)
    else:
        own_RO = taps_RkO.new_zeros(R + pixels.area, O)
        own_RO = own_RO.index_add_(0, pixels.landings_within(math.isqrt(taps)).flatten(), taps_RkO.flatten(0, 1))[:R]
    if null is not None:
        own_RO = own_RO + (pixels.rows_of_expert(null) if null.ndim == 2 else pixels.take_by_expert(null))
    own_RO = own_RO * pixels.gate_R.to(own_RO.dtype).unsqueeze(1)
    rows = pixels.rows
    y = own_RO.new_zeros(rows + (0 if pixels.used_R is None else pixels.rows_beyond), O)
    return y.index_add_(0, pixels.own_rows(), own_RO)[:rows]


def _answers_everywhere(taps_RkO: Tensor, null: Tensor | None, pixels: Pixels) -> Tensor:
    """Under ``gate_on="input"`` contributions land where they do, on top of what the expert answers to nothing."""
    rows, beyond, O = pixels.rows, pixels.rows_beyond, taps_RkO.shape[2]
    if null is None:
        y = taps_RkO.new_zeros(rows + beyond, O)
    else:
        (H, W), lanes = pixels.map_size, pixels.lanes
        everywhere = null.movedim(0, -2)
        everywhere = everywhere.flatten(-2) if pixels.spec.combine == "concat" else everywhere.sum(-2)
        y = everywhere.expand(pixels.routing.batch, H, W, lanes * O).reshape(rows, O)
        y = torch.cat([y, taps_RkO.new_zeros(beyond, O)])
    landing_Rk = pixels.landings(math.isqrt(taps_RkO.shape[1]))
    return y.index_add_(0, landing_Rk.flatten(), taps_RkO.flatten(0, 1))[:rows]
