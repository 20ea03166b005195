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
choose, groups are ragged, and pixels are sorted by expert for ``F.grouped_mm``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ConvWeights, MLPWeights, Norm, PatchSpec
from moesaic.ops.pixels import Pixels
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
        taps_EkOC = weight.permute(0, 3, 4, 1, 2).flatten(1, 3)
        null = experts.bias
        if constant is not None:
            values = values - pixels.per_expert(constant)
            taps_EkO = torch.bmm(taps_EkOC, constant.to(weight.dtype).unsqueeze(2)).view(-1, ks, ks, O)
            null = _answer_to_constant(taps_EkO, experts.bias, pixels)
        contributions = pixels.matmul(values.to(weight.dtype), taps_EkOC)
        return _combine(contributions.view(-1, ks * ks, O), null, pixels, x)

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
        return _combine(y.reshape(-1, 1, y.shape[-1]), null, pixels, x)


def _expert_inputs(x: Tensor, pixels: Pixels, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """What the experts see at their pixels, and the vector (E, C) they see everywhere else, None for zero."""
    B, C, H, W = x.shape
    values = pixels.take(x.permute(0, 2, 3, 1).reshape(B * H * W, C))
    if pixels.spec.gate_on == "input":
        values = values * pixels.per_patch(pixels.gate_P)
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
    return F.relu(values * pixels.per_expert(scale) + pixels.per_expert(shift)), F.relu(shift)


def _masked_statistics(values: Tensor, pixels: Pixels, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C) over the whole masked map: the chosen pixels' values, zeros everywhere else."""
    n = max(count, 1)
    used = None if pixels.used_P is None else pixels.per_patch(pixels.used_P)

    def total(of: Tensor) -> Tensor:
        return pixels.sum(of if used is None else of.where(used, 0))

    mean = total(values) / n
    squares = total((values - pixels.per_expert(mean)).square())
    zeros = count - total(torch.ones_like(values[..., :1]))
    var = (squares + zeros * mean.square()) / n
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


def _combine(taps_RkO: Tensor, null: Tensor | None, pixels: Pixels, x: Tensor) -> Tensor:
    """Add every pixel's contributions into the map, each at its tap's shift; (B, O', H, W) in x's memory format.

    ``null`` is what an expert answers where it was given nothing, (E, O) or (E, H, W, O): under
    ``gate_on="input"`` it stands everywhere, under ``"output"`` on the expert's own patches, gated.
    Sums are taken in float32 at least.
    """
    B, _, H, W = x.shape
    taps, width = taps_RkO.shape[1:]
    dtype, wide = taps_RkO.dtype, torch.promote_types(taps_RkO.dtype, torch.float32)
    landing_Rk, gate_Rk = pixels.landings(math.isqrt(taps))
    taps_RkO = taps_RkO.to(wide) if gate_Rk is None else taps_RkO * gate_Rk.unsqueeze(-1)
    y = taps_RkO.new_zeros((B * H * W + B) * pixels.lanes, width)
    y.index_add_(0, landing_Rk.flatten(), taps_RkO.flatten(0, 1))
    if null is not None and gate_Rk is not None:
        own_R1, _ = pixels.landings(1)
        at_own = pixels.per_expert(null) if null.ndim == 2 else pixels.take_by_expert(null)
        gated = at_own * pixels.per_patch(pixels.gate_P)
        y.index_add_(0, own_R1.flatten(), gated.reshape(-1, width))
    y = y[: B * H * W * pixels.lanes].view(B, H, W, pixels.lanes * width)
    if null is not None and gate_Rk is None:
        everywhere = null.movedim(0, -2)
        y = y + (everywhere.flatten(-2) if pixels.spec.combine == "concat" else everywhere.sum(-2))
    y = y.to(dtype).permute(0, 3, 1, 2)
    return y if _is_channels_last(x) else y.contiguous()


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
