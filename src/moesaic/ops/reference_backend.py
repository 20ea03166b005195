"""The definition of a routed layer, computed as it stands: every expert runs densely over a masked input.

    gate_on="output":  y_e = G_e ⊙ expert_e(f_e(M_e ⊙ x))
    gate_on="input":   y_e = expert_e(f_e(G_e ⊙ x))

M_e is 1 on the expert's patches, G_e the gate there, both 0 elsewhere; f_e is the identity, or
ReLU ∘ BatchNorm_e over the whole masked map. Of whole samples

    y_b = Σ_e g_be · expert_e(x_b)

where stacked experts answer to every sample, and experts of any other kind see theirs alone: what
they do may depend on who else is there. Of a convolution with gated channels

    y = g ⊙ activation(norm(conv(x)))

over all of x, of which it checks that channels said to be closed are zero. It saves nothing and is
what every other backend is tested against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.channel.gated_conv import check_closed, masked_dense
from moesaic.ops.dispatch import ChannelConv, ConvWeights, MLPWeights, Norm, PatchSelection, PatchSpec, Samples
from moesaic.ops.sample_dispatch import check_answers, gated_sum
from moesaic.routing_record import Routing

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """Masked and dense; runs anywhere."""

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
            weight = experts.weight[e].contiguous()  # torch's float64 convolution knows no other format
            if spec.context == "map":
                return F.conv2d(masked, weight, bias, padding=weight.shape[-1] // 2)
            alone = F.conv2d(_cut(masked, spec.patch_size), weight, bias, padding=weight.shape[-1] // 2)
            return _join(alone, masked.shape, spec.patch_size)

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
        values = torch.where(_wide_as(mask_EB, x.ndim + 1), x, 0)
        answers = run(values, DenseSamples())
        answers = torch.where(_wide_as(mask_EB, answers.ndim), answers, 0)
        return gated_sum(answers.movedim(0, 1), routing.weights[:, 0])

    def each(self, x: Tensor, routing: Routing, call: Callable[[int, Tensor], Tensor]) -> Tensor:
        chosen = {e: routing.mask[:, 0, e].nonzero().flatten() for e in range(routing.experts)}
        chosen = {e: rows for e, rows in chosen.items() if len(rows)} or {0: chosen[0]}
        answers = {e: call(e, x[rows]) for e, rows in chosen.items()}
        check_answers(answers)
        first = next(iter(answers.values()))
        wide = torch.promote_types(first.dtype, torch.float32)
        y = torch.zeros(x.shape[0], *first.shape[1:], dtype=wide, device=x.device)
        for e, rows in chosen.items():
            gate = _wide_as(routing.weights[rows, 0, e].to(wide), first.ndim)
            y = y.index_add(0, rows, gate * answers[e].to(wide))
        return y.to(first.dtype)

    def channels(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, conv: ChannelConv) -> Tensor:
        if gate_in is not None:
            check_closed(x, gate_in, conv)
        return masked_dense(x, gate_out, conv)


class DenseSamples:
    """Every expert has every sample: values are (E, B, …), zero where the sample does not go."""

    def linear(self, values: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        dtype = values.dtype
        y = torch.einsum("e...c,eoc->e...o", values, weight_EOC.to(dtype))
        return y if bias_EO is None else y + bias_EO.to(dtype).view(-1, *[1] * (y.ndim - 2), y.shape[-1])


def _wide_as(values: Tensor, ndim: int) -> Tensor:
    """Axes of length 1 behind, to broadcast over."""
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
        # where, not a product: what is not routed must not matter, not even as NaN · 0
        masked = torch.where(mask_e, x * gate_e if spec.gate_on == "input" else x, 0)
        if norm is not None:
            masked = _norm_relu(masked, e, norm)
        y = expert(e, masked.to(dtype))
        outputs.append((y * gate_e).to(dtype) if spec.gate_on == "output" else y)
    return torch.cat(outputs, 1) if spec.combine == "concat" else torch.stack(outputs).sum(0)


def _norm_relu(masked: Tensor, e: int, norm: Norm) -> Tensor:
    # statistics in float32 at least, into buffers of whatever dtype the module has
    wide = torch.promote_types(masked.dtype, torch.float32)
    mean, var = norm.running_mean[e].to(wide, copy=True), norm.running_var[e].to(wide, copy=True)
    normed = F.batch_norm(
        masked.to(wide),
        mean,
        var,
        norm.weight[e].to(wide),
        norm.bias[e].to(wide),
        training=norm.training,
        momentum=norm.momentum,
        eps=norm.eps,
    )
    if norm.training:
        norm.running_mean[e].copy_(mean)
        norm.running_var[e].copy_(var)
    return F.relu(normed)


def _over_pixels(values_BNE: Tensor, x: Tensor, p: int) -> Tensor:
    """A value per patch and expert, as maps over pixels (B, E, H, W)."""
    grid = (x.shape[2] // p, x.shape[3] // p)
    values = values_BNE.transpose(1, 2).reshape(x.shape[0], values_BNE.shape[2], *grid)
    return values.repeat_interleave(p, 2).repeat_interleave(p, 3)


def _cut(x: Tensor, p: int) -> Tensor:
    """A map into its patches: (B, C, H, W) → (B·N, C, p, p)."""
    B, C, H, W = x.shape
    return x.reshape(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def _join(patches: Tensor, shape: torch.Size, p: int) -> Tensor:
    """Patches back into a map: (B·N, O, p, p) → (B, O, H, W)."""
    B, _, H, W = shape
    return patches.view(B, H // p, W // p, patches.shape[1], p, p).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
