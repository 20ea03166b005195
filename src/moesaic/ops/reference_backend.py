"""The definition of routed layers, computed densely: every expert runs over a masked input.

    gate_on="output":  y_e = G_e ⊙ expert_e(f_e(M_e ⊙ x))
    gate_on="input":   y_e = expert_e(f_e(G_e ⊙ x))

M_e is 1 on the expert's patches and G_e the gate there, both 0 elsewhere; f_e is the identity, or ReLU ∘ BatchNorm_e
over the whole masked map. For whole samples

    y_b = Σ_e g_be · expert_e(x_b)

where stacked experts run on every sample, and experts of any other kind on their own samples, because an output may
depend on the rest of the batch. For a convolution with gated channels

    y = g ⊙ activation(norm(conv(x)))

over all of x, after a check that closed channels are zero. It saves nothing; every other backend is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.masked import check_closed, masked_conv
from moesaic.ops.dispatch import ChannelConv, ConvWeights, MLPWeights, Norm, PatchSelection, PatchSpec, Samples
from moesaic.ops.eager_conditions import in_vmap
from moesaic.ops.sample_dispatch import check_outputs, gated_sum, run_all
from moesaic.routing_record import Routing

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """Masked and dense; runs on every device."""

    name = "reference"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        return "a soft routing has no masks" if routing.index is None else None

    def conv(
        self,
        x: Tensor,
        routing: Routing,
        experts: ConvWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        def expert(e: int, masked: Tensor) -> Tensor:
            bias = None if experts.bias is None else experts.bias[e]
            weight = experts.weight[e].contiguous()  # torch's float64 convolution takes no other memory format
            if spec.context == "map":
                return F.conv2d(masked, weight, bias, padding=weight.shape[-1] // 2)
            patches = F.conv2d(_to_patches(masked, spec.patch_size), weight, bias, padding=weight.shape[-1] // 2)
            return _from_patches(patches, masked.shape, spec.patch_size)

        return _masked(expert, experts.weight.dtype, x, routing, norm, spec)

    def mlp(
        self,
        x: Tensor,
        routing: Routing,
        experts: MLPWeights,
        norm: Norm | None,
        spec: PatchSpec,
        selection: PatchSelection | None = None,
    ) -> Tensor:
        def expert(e: int, masked: Tensor) -> Tensor:
            bias_in = None if experts.bias_in is None else experts.bias_in[e]
            bias_out = None if experts.bias_out is None else experts.bias_out[e]
            hidden = experts.activation(F.linear(masked.movedim(1, -1), experts.weight_in[e], bias_in))
            return F.linear(hidden, experts.weight_out[e], bias_out).movedim(-1, 1)

        return _masked(expert, experts.weight_in.dtype, x, routing, norm, spec)

    def stacked(self, x: Tensor, routing: Routing, run: Callable[[Tensor, Samples], Tensor]) -> Tensor:
        mask_EB = routing.mask[:, 0].T
        values = torch.where(_append_axes(mask_EB, x.ndim + 1), x, 0)
        outputs = run(values, DenseSamples())
        outputs = torch.where(_append_axes(mask_EB, outputs.ndim), outputs, 0)
        return gated_sum(outputs.movedim(0, 1), routing.weights[:, 0])

    def each(
        self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor], also: Collection[int] = ()
    ) -> Tensor:
        if in_vmap():
            return run_all(x, routing, call)
        samples_of = {e: routing.mask[:, 0, e].nonzero().flatten() for e in range(routing.experts)}
        samples_of = {e: samples for e, samples in samples_of.items() if len(samples) or e in also} or {
            0: samples_of[0]
        }
        outputs = {e: call(e, x[samples]) for e, samples in samples_of.items()}
        check_outputs(outputs)
        first = next(iter(outputs.values()))
        acc_dtype = torch.promote_types(first.dtype, torch.float32)
        y = torch.zeros(x.shape[0], *first.shape[1:], dtype=acc_dtype, device=x.device)
        for e, samples in samples_of.items():
            gate = _append_axes(routing.weights[samples, 0, e].to(acc_dtype), first.ndim)
            y = y.index_add(0, samples, gate * outputs[e].to(acc_dtype))
        return y.to(first.dtype)

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        if gate_in is not None:
            check_closed(x, gate_in, conv)
        return masked_conv(x, gate_out, conv)


class DenseSamples:
    """Every sample for every expert: values are (E, B, …), zero where a sample is not routed to the expert."""

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        dtype = values.dtype
        y = torch.einsum("e...c,eoc->e...o", values, weight_EOC.to(dtype))
        return y if bias_EO is None else y + bias_EO.to(dtype).view(-1, *[1] * (y.ndim - 2), y.shape[-1])


def _append_axes(values: Tensor, ndim: int) -> Tensor:
    """Appends axes of length 1 for broadcasting."""
    return values.view(*values.shape, *[1] * (ndim - values.ndim))


def _masked(
    expert: Callable[[int, Tensor], Tensor],
    dtype: torch.dtype,
    x: Tensor,
    routing: Routing,
    norm: Norm | None,
    spec: PatchSpec,
) -> Tensor:
    mask = _over_pixels(routing.mask, x, spec.patch_size)
    gates = _over_pixels(routing.weights, x, spec.patch_size)
    outputs: list[Tensor] = []
    for e in range(routing.experts):
        mask_e, gate_e = mask[:, e : e + 1], gates[:, e : e + 1]
        # where rather than a product, because NaN · 0 is NaN
        masked = torch.where(mask_e, x * gate_e if spec.gate_on == "input" else x, 0)
        if norm is not None:
            masked = _norm_relu(masked, e, norm)
        y = expert(e, masked.to(dtype))
        outputs.append((y * gate_e).to(dtype) if spec.gate_on == "output" else y)
    return torch.cat(outputs, 1) if spec.combine == "concat" else torch.stack(outputs).sum(0)


def _norm_relu(masked: Tensor, e: int, norm: Norm) -> Tensor:
    # statistics in float32 at least, whatever the dtype of the buffers
    acc_dtype = torch.promote_types(masked.dtype, torch.float32)
    mean, var = norm.running_mean[e].to(acc_dtype, copy=True), norm.running_var[e].to(acc_dtype, copy=True)
    weight, bias = norm.weight[e].to(acc_dtype), norm.bias[e].to(acc_dtype)
    stacked = replace(norm, weight=weight, bias=bias, running_mean=mean, running_var=var)
    normed = stacked.apply(masked.to(acc_dtype))
    if norm.training:
        norm.running_mean[e].copy_(mean)
        norm.running_var[e].copy_(var)
    return F.relu(normed)


def _over_pixels(values_BNE: Tensor, x: Tensor, p: int) -> Tensor:
    """Expands a value per patch and expert to maps (B, E, H, W)."""
    grid = (x.shape[2] // p, x.shape[3] // p)
    values = values_BNE.transpose(1, 2).reshape(x.shape[0], values_BNE.shape[2], *grid)
    return values.repeat_interleave(p, 2).repeat_interleave(p, 3)


def _to_patches(x: Tensor, p: int) -> Tensor:
    """(B, C, H, W) → (B·N, C, p, p)."""
    B, C, H, W = x.shape
    return x.reshape(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def _from_patches(patches: Tensor, shape: torch.Size, p: int) -> Tensor:
    """(B·N, O, p, p) → (B, O, H, W)."""
    B, _, H, W = shape
    return patches.view(B, H // p, W // p, patches.shape[1], p, p).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
