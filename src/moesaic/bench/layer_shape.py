"""What a routed convolution is to be measured on: its shape, its form, its dense peers, and the work that each must do.

The work is the least that the definition asks for: multiply-adds of the chosen patches, each tensor read or written as
few times as a layer can, with everything in between kept on the chip. Real layers move more; the share of this floor
that they reach says how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.checks import check_positive
from moesaic.layers import PatchMoE
from moesaic.ops import Combine, Context, GateOn
from moesaic.routing.expert_choice import ExpertGate

__all__ = [
    "Form",
    "RoutedShape",
    "RowsOfPixels",
    "Work",
    "dense_peers",
    "dense_work",
    "random_maps",
    "routed_layer",
    "routed_work",
]


@dataclass(frozen=True)
class RoutedShape:
    """Maps and routing; a dense peer has the same channels and kernel.

    >>> shape = RoutedShape(128, 640, 640, 16, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
    >>> shape.patches, shape.share
    (16, 0.125)
    """

    batch: int
    channels: int
    out_channels: int
    size: int
    """Pixels along an edge of the map."""
    experts: int
    patches_per_expert: int
    patch_size: int
    kernel_size: int

    @property
    def patches(self) -> int:
        """N, patches of a map."""
        return (self.size // self.patch_size) ** 2

    @property
    def share(self) -> float:
        """L/N, the share of the map that an expert works on, and of multiply-adds that are left."""
        return self.patches_per_expert / self.patches

    def __str__(self) -> str:
        channels = str(self.channels) if self.channels == self.out_channels else f"{self.channels}→{self.out_channels}"
        return (
            f"maps {self.batch}×{channels}×{self.size}×{self.size}, {self.kernel_size}×{self.kernel_size} kernel, "
            f"{self.experts} experts, each {self.patches_per_expert} of {self.patches} patches"
        )


@dataclass(frozen=True)
class Form:
    """How the layer is meant; the meaning of each option is ``PatchMoE``'s."""

    bias: bool = True
    gate: ExpertGate = "softmax_selected"
    gate_on: GateOn = "output"
    expert_norm: bool = False
    context: Context = "map"
    combine: Combine = "concat"


@dataclass(frozen=True)
class Work:
    """The least a layer has to do."""

    flops: float
    """A multiply-add is two."""
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


class RowsOfPixels(nn.Module):
    """A 1×1 convolution as a linear layer over rows of pixels; of channels_last maps nothing is copied."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        rows = F.linear(x.permute(0, 2, 3, 1), self.conv.weight.flatten(1), self.conv.bias)
        return rows.permute(0, 3, 1, 2)


def routed_layer(shape: RoutedShape, form: Form) -> PatchMoE:
    """The layer itself, in float32 on the CPU."""
    return PatchMoE(
        shape.channels,
        shape.out_channels,
        experts=shape.experts,
        patches_per_expert=shape.patches_per_expert,
        patch_size=shape.patch_size,
        kernel_size=shape.kernel_size,
        gate=form.gate,
        gate_on=form.gate_on,
        expert_norm=form.expert_norm,
        context=form.context,
        combine=form.combine,
        bias=form.bias,
    )


def dense_peers(shape: RoutedShape, form: Form) -> dict[str, nn.Module]:
    """What the layer takes the place of: the convolution, behind BatchNorm and ReLU where its experts have them.

    For 1×1 kernels it is there a second time, as a linear layer over rows of pixels.

    >>> shape = RoutedShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> list(dense_peers(shape, Form(expert_norm=True)))
    ['dense convolution', 'dense, rows of pixels']
    """
    check_positive("dense_peers", channels=shape.channels, out_channels=shape.out_channels)

    def conv() -> nn.Conv2d:
        pad = shape.kernel_size // 2
        return nn.Conv2d(shape.channels, shape.out_channels, shape.kernel_size, padding=pad, bias=form.bias)

    def behind_norm(layer: nn.Module) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(shape.channels), nn.ReLU(), layer) if form.expert_norm else layer

    peers: dict[str, nn.Module] = {"dense convolution": behind_norm(conv())}
    if shape.kernel_size == 1:
        peers["dense, rows of pixels"] = behind_norm(RowsOfPixels(conv()))
    return peers


def random_maps(
    shape: RoutedShape, device: str, dtype: torch.dtype, memory_format: torch.memory_format, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A map to go in, and a gradient for what comes out; their numbers depend on the device, as torch's do."""
    # a generator of their own: a capture that failed may leave the device's default one unusable
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(channels: int) -> Tensor:
        size = (shape.batch, channels, shape.size, shape.size)
        values = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return values.contiguous(memory_format=memory_format)

    return drawn(shape.channels), drawn(shape.out_channels)


def dense_work(shape: RoutedShape, dtype: torch.dtype, *, step: bool) -> Work:
    """Of the dense convolution: its forward pass, or a training step.

    >>> shape = RoutedShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> dense_work(shape, torch.float32, step=False)
    Work(flops=18432.0, bytes=3328.0)
    """
    maps_in, maps_out, weights = _sizes(shape, shape.out_channels)
    flops = 2.0 * shape.batch * shape.size**2 * shape.kernel_size**2 * shape.channels * shape.out_channels
    moved = maps_in + weights + maps_out
    if step:  # the gradient of the result, the map and the weights are read, two gradients written
        flops, moved = 3 * flops, moved + maps_out + 2 * maps_in + 2 * weights
    return Work(flops, moved * dtype.itemsize)


def routed_work(shape: RoutedShape, form: Form, dtype: torch.dtype, *, step: bool) -> Work:
    """Of the routed layer, its router included: its forward pass, or a training step.

    >>> shape = RoutedShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> routed_work(shape, Form(), torch.float32, step=False).flops  # a quarter of the dense layer's, and the scores
    5120.0
    """
    width = shape.out_channels // shape.experts if form.combine == "concat" else shape.out_channels
    maps_in, maps_out, weights = _sizes(shape, width * shape.experts)
    chosen = shape.batch * shape.experts * shape.patches_per_expert * shape.patch_size**2  # pixels
    flops = 2.0 * chosen * shape.kernel_size**2 * shape.channels * width
    scores = 2.0 * maps_in * shape.experts
    moved = maps_in + weights + maps_out
    if step:
        flops = 3 * flops
        scores += 2 * 2.0 * chosen * shape.channels  # gates of chosen patches alone have a gradient
        again = min(1.0, shape.experts * shape.share)  # of the map, for the weights' gradient
        moved += _gradient_read(shape, form) * maps_out + again * maps_in + maps_in + 2 * weights
    return Work(flops + scores, moved * dtype.itemsize)


def _sizes(shape: RoutedShape, filters: int) -> tuple[float, float, float]:
    """Numbers in the map, in the result and in the weights."""
    pixels = shape.batch * shape.size**2
    return (
        float(pixels * shape.channels),
        float(pixels * shape.out_channels),
        float(filters * shape.channels * shape.kernel_size**2),
    )


def _gradient_read(shape: RoutedShape, form: Form) -> float:
    """The share of the result's gradient that a layer has to read."""
    if form.combine == "sum":
        return min(1.0, shape.experts * shape.share)
    if form.gate_on == "output":
        return shape.share  # elsewhere the result is zero
    if form.bias or form.expert_norm:
        return 1.0  # what is answered to nothing stands everywhere
    halo = (1 + (shape.kernel_size - 1) / shape.patch_size) ** 2 if form.context == "map" else 1.0
    return min(1.0, shape.share * halo)
