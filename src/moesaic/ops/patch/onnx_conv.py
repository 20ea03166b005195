"""The routed convolution in the operations that ONNX Runtime runs fastest, for gates on the input.

`moesaic.ops.patch.scatter_conv` computes the same:

    y[row_Rk[r, k]] += W_e[k] · values[r]        pixel r of expert e, tap k of the kernel

Here the matmuls of all experts are one grouped 1×1 convolution over pixels laid out as a map (1, E·C, 1, M), so that
ONNX Runtime runs them in the blocked layout of its convolutions. The background is subtracted after the convolution, as
its bias, and contributions are added to the background rather than to zeros. Values that depend on weights or on the
size of the map alone are constants, which runtimes compute once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import ConvWeights, Norm, PatchSpec
from moesaic.ops.patch.gather import patch_pixels, tap_targets
from moesaic.ops.patch.scatter_conv import background_output, tap_matrix
from moesaic.routing_record import Routing

__all__ = ["can_run_onnx_conv", "onnx_conv"]


def can_run_onnx_conv(routing: Routing, norm: Norm | None, spec: PatchSpec) -> bool:
    """Whether a graph for ONNX is being traced, and `onnx_conv` computes this."""
    if not torch.onnx.is_in_onnx_export() or routing.chooser != "expert" or routing.may_drop:
        return False
    return spec.gate_on == "input" and (norm is None or not norm.training)


def onnx_conv(x: Tensor, routing: Routing, experts: ConvWeights, norm: Norm | None, spec: PatchSpec) -> Tensor:
    """Returns the output map (B, O', H, W) of experts that choose patches of maps (B, C, H, W)."""
    assert routing.index is not None
    (B, C, H, W), (E, O, _, ks, _) = x.shape, experts.weight.shape
    L, area, patch_area = routing.index.shape[2], H * W, spec.patch_size**2
    image = torch.arange(B, device=x.device).view(B, 1, 1, 1)
    index_BLE = routing.index.transpose(1, 2)
    pixels_NP = patch_pixels(torch.arange(routing.units, device=x.device), W, spec.patch_size)

    position = pixels_NP.index_select(0, index_BLE.flatten()).view(B, L, E, patch_area).transpose(2, 3)
    values = x.permute(0, 2, 3, 1).reshape(B * area, C).index_select(0, (position + image * area).flatten())
    values, gate = values.view(B, L, patch_area, E, C), routing.gate.transpose(1, 2).to(x.dtype).view(B, L, 1, E, 1)

    matrices = tap_matrix(experts.weight)
    background, taps_bias = experts.bias, None
    if norm is None:
        values = values * gate
    else:
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        values = (values * (gate * scale) + shift).relu()
        taps = torch.bmm(matrices, shift.relu().unsqueeze(2))
        taps_bias = -taps.flatten()
        background = background_output(taps.view(E, ks, ks, O), experts.bias, (H, W), spec)
    pixels = values.view(1, 1, B * L * patch_area, E * C).permute(0, 3, 1, 2)
    contributions = F.conv2d(pixels, matrices.reshape(-1, C, 1, 1), taps_bias, groups=E)
    contributions = contributions.permute(0, 2, 3, 1).reshape(-1, O)

    groups = E if spec.combine == "concat" else 1
    positions = area if ks == 1 else area + 1  # the last one takes contributions from outside the map
    target, inside, _ = tap_targets(pixels_NP.flatten(), (H, W), ks, spec.patch_size, spec.context)
    rows_Nk = torch.where(inside, target, area).view(routing.units, patch_area * ks * ks) * groups
    row = rows_Nk.index_select(0, index_BLE.flatten()).view(B, L, E, patch_area, ks * ks).transpose(2, 3)
    first_row = (image * (positions * groups)).unsqueeze(4)
    if groups > 1:
        first_row = first_row + torch.arange(E, device=x.device).view(E, 1)
    y = _initial_map(background, x, (positions, groups * O), spec).expand(B, positions, groups * O)
    y = y.reshape(-1, O).index_add(0, (row + first_row).flatten(), contributions)
    return y.view(B, positions, groups * O)[:, :area].reshape(B, H, W, groups * O).permute(0, 3, 1, 2)


def _initial_map(background: Tensor | None, x: Tensor, shape: tuple[int, int], spec: PatchSpec) -> Tensor:
    """The output without contributions: the background (E, O) or (E, H, W, O) of each expert, or zeros."""
    positions, channels = shape
    if background is None:
        return x.new_zeros(positions, channels)
    everywhere = background.movedim(0, -2)
    everywhere = everywhere.flatten(-2) if spec.combine == "concat" else everywhere.sum(-2)
    if everywhere.ndim == 1:
        return everywhere.expand(positions, channels)
    everywhere = everywhere.flatten(0, 1)
    return F.pad(everywhere, (0, 0, 0, positions - everywhere.shape[0]))
