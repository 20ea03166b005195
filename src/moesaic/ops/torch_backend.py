"""Sparse execution in plain torch: gather the chosen pixels, multiply, add into the map.

A convolution is linear, so it may be run from its inputs: one GEMM gives, for each chosen pixel,
what it contributes to the output at every tap of the kernel, and ``index_add`` lands each
contribution at its shift. That costs l/n of the dense multiply-adds and never copies a
neighbourhood (im2col would copy ks² times the input; here the copy is of the expert's output,
which is E times narrower under ``concat``).

Where unchosen pixels are not zero for the expert (``expert_norm`` sends them to one constant
vector c per expert, FIDELITY "exact sparse form"), its answer is split in two:

    expert(c everywhere)  — the same for all images: ``null``, computed once per expert
  + conv(value − c)       — zero outside the chosen patches: the sparse part

Expert choice gives every expert equally many pixels: one batched GEMM, static shapes. Where units
choose, groups are ragged: pixels are sorted by expert for ``F.grouped_mm``. No host sync in either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.backends import ConvWeights, MLPWeights, Norm, PatchSpec, register_backend
from moesaic.record import NOBODY, Routing

__all__ = ["TorchBackend"]


class TorchBackend:
    """Gather, batched or grouped GEMM, index_add; any device, any float dtype."""

    name = "torch"

    def refusal(self, x: Tensor, routing: Routing) -> str | None:
        return "a soft routing has no patches to gather" if routing.index is None else None

    def conv(self, x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        weight = experts.weight
        pixels = _Pixels.chosen(routing, x, spec)
        values, constant = _expert_inputs(x, pixels, norm, spec)
        null = experts.bias
        if constant is not None:
            values = values - pixels.per_expert(constant)
            null = _answer_to_constant(constant.to(weight.dtype), experts, pixels, spec)
        taps_ERC = weight.permute(0, 3, 4, 1, 2).flatten(1, 3)
        contributions = pixels.matmul(values.to(weight.dtype), taps_ERC)
        return _combine(contributions.reshape(-1, weight.shape[3] * weight.shape[4], weight.shape[1]), null, pixels, x, spec)

    def mlp(self, x: Tensor, routing: Routing, experts: MLPWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
        pixels = _Pixels.chosen(routing, x, spec)
        values, constant = _expert_inputs(x, pixels, norm, spec)
        y = _perceptron(values.to(experts.weight_in.dtype), experts, pixels)
        null = None
        if spec.gate_on == "input":
            resting = x.new_zeros(routing.experts, x.shape[1]) if constant is None else constant
            null = _perceptron(resting.to(experts.weight_in.dtype).unsqueeze(1), experts, None).squeeze(1)
            y = y - pixels.per_expert(null)
        return _combine(y.reshape(-1, 1, y.shape[-1]), null, pixels, x, spec)


@dataclass(frozen=True)
class _Pixels:
    """The chosen pixels of a batch, expert by expert: P patches of p×p pixels each.

    Values of pixels are (E, M, ·) where all experts have equally many (``ends`` is None), and
    (P·p·p, ·) where they do not; then ``ends`` says where each expert's pixels end.
    """

    image_P: Tensor
    expert_P: Tensor
    gate_P: Tensor
    used_P: Tensor | None
    """None where every patch is used; what is not used reads patch 0 and is written nowhere."""
    y_Pp: Tensor
    x_Pp: Tensor
    ends: Tensor | None
    routing: Routing
    patch_size: int
    map_size: tuple[int, int]

    @staticmethod
    def chosen(routing: Routing, x: Tensor, spec: PatchSpec) -> _Pixels:
        assert routing.index is not None, "refusal() keeps soft routings away"
        E, p = routing.experts, spec.patch_size
        H, W = x.shape[2], x.shape[3]
        if routing.chooser == "expert":
            patch_P = routing.index.transpose(0, 1).flatten()
            gate_P = routing.gate.transpose(0, 1).flatten()
            B, _, L = routing.index.shape
            expert_P = torch.arange(E, device=x.device).view(E, 1, 1).expand(E, B, L).flatten()
            image_P = torch.arange(B, device=x.device).view(1, B, 1).expand(E, B, L).flatten()
            used_P = patch_P != NOBODY if routing.may_drop else None
            ends = None
        else:
            _, N, K = routing.index.shape
            asked = routing.index.flatten()
            # who was dropped sits with the last expert and is written nowhere
            expert_P, order = torch.where(asked == NOBODY, E - 1, asked).sort(stable=True)
            image_P, patch_P = order // (N * K), order // K % N
            gate_P = routing.gate.flatten()[order]
            used_P = (asked != NOBODY)[order] if routing.may_drop else None
            ends = torch.searchsorted(expert_P, torch.arange(E, device=x.device), right=True) * p * p
        if used_P is not None:
            patch_P = patch_P.clamp_min(0)
        within = torch.arange(p, device=x.device)
        columns = W // p
        return _Pixels(
            image_P=image_P,
            expert_P=expert_P,
            gate_P=gate_P,
            used_P=used_P,
            y_Pp=(patch_P // columns * p).unsqueeze(1) + within,
            x_Pp=(patch_P % columns * p).unsqueeze(1) + within,
            ends=ends,
            routing=routing,
            patch_size=p,
            map_size=(H, W),
        )

    @property
    def place(self) -> Tensor:
        """(P, p, p): where each pixel stands in the batch of maps laid out as (B, H, W)."""
        H, W = self.map_size
        return (self.image_P.view(-1, 1, 1) * H + self.y_Pp.unsqueeze(2)) * W + self.x_Pp.unsqueeze(1)

    def per_pixel(self, values_P: Tensor) -> Tensor:
        """A value per patch, in the leading shape of pixel values, to broadcast over channels."""
        return self.grouped(self._repeated(values_P).unsqueeze(1))

    def grouped(self, rows: Tensor) -> Tensor:
        """(P·p·p, ·) in the leading shape of pixel values."""
        E = self.routing.experts
        return rows if self.ends is not None else rows.unflatten(0, (E, rows.shape[0] // E))

    def per_expert(self, values_EC: Tensor) -> Tensor:
        """A vector per expert, to broadcast over its pixels."""
        return values_EC.unsqueeze(1) if self.ends is None else values_EC[self._expert_of_row]

    def sum(self, values: Tensor) -> Tensor:
        """Pixel values summed by expert, (E, C)."""
        if self.ends is None:
            return values.sum(1)
        return values.new_zeros(self.routing.experts, values.shape[1]).index_add(0, self._expert_of_row, values)

    def matmul(self, values: Tensor, weight_EOC: Tensor) -> Tensor:
        """Each expert's pixels times its matrix."""
        if self.ends is None:
            return torch.bmm(values, weight_EOC.transpose(1, 2))
        return _grouped_matmul(values, weight_EOC.transpose(1, 2), self.ends)

    def null_at_own(self, null: Tensor) -> Tensor:
        """What each pixel's expert answers to nothing, at the pixel: (P·p·p, O) of (E, O) or (E, H, W, O)."""
        if null.ndim == 2:
            return null[self._expert_of_row]
        H, W = self.map_size
        at = (self.expert_P.view(-1, 1, 1) * H + self.y_Pp.unsqueeze(2)) * W + self.x_Pp.unsqueeze(1)
        return null.flatten(0, 2).index_select(0, at.flatten())

    @property
    def _expert_of_row(self) -> Tensor:
        return self._repeated(self.expert_P)

    def _repeated(self, values_P: Tensor) -> Tensor:
        """A value per patch, once for each of its pixels."""
        return values_P.unsqueeze(1).expand(-1, self.patch_size**2).flatten()


def _grouped_matmul(rows: Tensor, weight_ECO: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert times their expert's matrix."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight_ECO.shape[1:])
    if aligned and rows.dtype != torch.float64 and rows.shape[0] > 0:
        return F.grouped_mm(rows, weight_ECO, offs=ends.int())
    # grouped_mm takes neither float64 nor odd widths: one GEMM an expert, and one host sync
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight_ECO, strict=False)])


def _expert_inputs(x: Tensor, pixels: _Pixels, norm: Norm | None, spec: PatchSpec) -> tuple[Tensor, Tensor | None]:
    """What the experts see at their pixels, and the constant vector (E, C) they see elsewhere, if not zero."""
    rows = x.permute(0, 2, 3, 1).reshape(x.shape[0] * x.shape[2] * x.shape[3], x.shape[1])
    values = pixels.grouped(rows.index_select(0, pixels.place.flatten()))
    if spec.gate_on == "input":
        values = values * pixels.per_pixel(pixels.gate_P)
    if norm is None:
        return values, None
    wide = torch.promote_types(values.dtype, torch.float32)
    values = values.to(wide)
    if norm.training:
        mean, var = _masked_statistics(values, pixels, rows.shape[0], norm)
    else:
        mean, var = norm.running_mean.to(wide), norm.running_var.to(wide)
    scale = norm.weight.to(wide) * torch.rsqrt(var + norm.eps)
    shift = norm.bias.to(wide) - mean * scale
    return F.relu(values * pixels.per_expert(scale) + pixels.per_expert(shift)), F.relu(shift)


def _masked_statistics(values: Tensor, pixels: _Pixels, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and variance (E, C) over the whole masked map: the chosen pixels' values, and zeros everywhere else."""
    n = max(count, 1)
    if pixels.used_P is None:
        kept = pixels.sum(torch.ones_like(values[..., :1]))
        mean = pixels.sum(values) / n
        scatter = pixels.sum((values - pixels.per_expert(mean)).square())
    else:
        used = pixels.per_pixel(pixels.used_P)
        kept = pixels.sum(used.to(values.dtype))
        mean = pixels.sum(values.where(used, 0)) / n
        scatter = pixels.sum((values - pixels.per_expert(mean)).square().where(used, 0))
    var = (scatter + (count - kept) * mean.square()) / n
    if count > 0:
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            unbiased = var * (count / max(count - 1, 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    return mean, var


def _answer_to_constant(constant_EC: Tensor, experts: ConvWeights, pixels: _Pixels, spec: PatchSpec) -> Tensor:
    """What each convolution answers to a map that is constant: (E, O), or (E, H, W, O) where borders differ."""
    H, W = pixels.map_size
    weight = experts.weight
    taps_EkkO = torch.einsum("ec,eocij->eijo", constant_EC, weight)
    if weight.shape[-1] == 1:
        null = taps_EkkO[:, 0, 0]
        return null if experts.bias is None else null + experts.bias
    height, width = (H, W) if spec.context == "map" else (spec.patch_size, spec.patch_size)
    inside_h = _taps_inside(height, weight.shape[3], constant_EC)
    inside_w = _taps_inside(width, weight.shape[4], constant_EC)
    null = torch.einsum("hi,wj,eijo->ehwo", inside_h, inside_w, taps_EkkO)
    if spec.context == "patch":
        null = null.repeat(1, H // height, W // width, 1)
    return null if experts.bias is None else null + experts.bias[:, None, None]


def _taps_inside(size: int, kernel: int, like: Tensor) -> Tensor:
    """(size, kernel): 1 where a tap of the kernel centred there falls inside, 0 where on the zero padding."""
    at = torch.arange(size, device=like.device).unsqueeze(1) + torch.arange(kernel, device=like.device) - kernel // 2
    return ((at >= 0) & (at < size)).to(like.dtype)


def _perceptron(values: Tensor, experts: MLPWeights, pixels: _Pixels | None) -> Tensor:
    """C → J → O on each expert's pixels; without ``pixels`` on values (E, M, C)."""

    def layer(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = pixels.matmul(values, weight) if pixels else torch.bmm(values, weight.transpose(1, 2))
        if bias is None:
            return y
        return y + (pixels.per_expert(bias) if pixels else bias.unsqueeze(1))

    hidden = experts.activation(layer(values, experts.weight_in, experts.bias_in))
    return layer(hidden, experts.weight_out, experts.bias_out)


def _combine(taps_RkO: Tensor, null: Tensor | None, pixels: _Pixels, x: Tensor, spec: PatchSpec) -> Tensor:
    """Add every pixel's contributions into the map, each at its tap's shift; (B, O', H, W) in x's memory format.

    ``null`` is what the expert answers where it was given nothing, (E, O) or (E, H, W, O): under
    ``gate_on="input"`` it stands everywhere, under ``"output"`` on the expert's own patches, gated.
    """
    B, _, H, W = x.shape
    taps, width = taps_RkO.shape[1:]
    dtype, wide = taps_RkO.dtype, torch.promote_types(taps_RkO.dtype, torch.float32)
    lanes = pixels.routing.experts if spec.combine == "concat" else 1
    landing_Rk, gate_Rk = _landings(math.isqrt(taps), pixels, lanes, spec)
    taps_RkO = taps_RkO.to(wide) if gate_Rk is None else taps_RkO * gate_Rk.unsqueeze(-1)
    # rows past the map take what falls off it: one an image and lane, lest threads queue for a single one
    y = taps_RkO.new_zeros((B * H * W + B) * lanes, width)
    y.index_add_(0, landing_Rk.flatten(), taps_RkO.flatten(0, 1))
    if null is not None and spec.gate_on == "output":
        own_R1, gate_R1 = _landings(1, pixels, lanes, spec)
        assert gate_R1 is not None
        y.index_add_(0, own_R1.flatten(), pixels.null_at_own(null).to(wide) * gate_R1)
    y = y[: B * H * W * lanes].view(B, H, W, lanes * width)
    if null is not None and spec.gate_on == "input":
        everywhere = null.movedim(0, -2)
        y = y + (everywhere.flatten(-2) if spec.combine == "concat" else everywhere.sum(-2))
    y = y.to(dtype).permute(0, 3, 1, 2)
    return y if _is_channels_last(x) else y.contiguous()


def _landings(kernel: int, pixels: _Pixels, lanes: int, spec: PatchSpec) -> tuple[Tensor, Tensor | None]:
    """Where each tap of each pixel lands among the rows of the output, and the expert's gate there.

    Both (P·p·p, kernel·kernel); no gate under ``gate_on="input"``. Under ``context="patch"`` what
    leaves the pixel's own patch falls off, under ``"map"`` what leaves the map.
    """
    H, W = pixels.map_size
    p, routing = pixels.patch_size, pixels.routing
    shift = kernel // 2 - torch.arange(kernel, device=pixels.y_Pp.device)
    y = (pixels.y_Pp.unsqueeze(2) + shift)[:, :, None, :, None]
    x = (pixels.x_Pp.unsqueeze(2) + shift)[:, None, :, None, :]
    image, expert = pixels.image_P.view(-1, 1, 1, 1, 1), pixels.expert_P.view(-1, 1, 1, 1, 1)
    lane = expert if lanes > 1 else 0
    landing = ((image * H + y) * W + x) * lanes + lane
    inside = None if pixels.used_P is None else pixels.used_P.view(-1, 1, 1, 1, 1)
    if kernel > 1:
        if spec.context == "map":
            stays = ((y >= 0) & (y < H)) & ((x >= 0) & (x < W))
        else:
            top, left = pixels.y_Pp[:, 0].view(-1, 1, 1, 1, 1), pixels.x_Pp[:, 0].view(-1, 1, 1, 1, 1)
            stays = ((y >= top) & (y < top + p)) & ((x >= left) & (x < left + p))
        inside = stays if inside is None else stays & inside
    if inside is not None:
        landing = torch.where(inside, landing, (routing.batch * H * W + image) * lanes + lane)
    landing_Rk = landing.reshape(-1, kernel * kernel)
    if spec.gate_on == "input":
        return landing_Rk, None
    if kernel == 1 or spec.context == "patch":
        gate = pixels.gate_P.view(-1, 1, 1, 1, 1).expand(landing.shape)
    else:
        patch = (image * routing.units + y // p * (W // p) + x // p) * routing.experts + expert
        gate = routing.weights.flatten()[torch.where(stays, patch, 0)]
    return landing_Rk, gate.reshape(-1, kernel * kernel)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


register_backend(TorchBackend())
