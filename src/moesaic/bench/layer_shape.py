"""Shape and options of a benchmarked layer, its dense peers, and the minimum work of both for a roofline.

The minimum work is that of the definition: multiply-adds of the selected patches, and each tensor read or written as
few times as possible, with all intermediate results on chip. Real kernels move more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_positive
from moesaic.layers import PatchMoE
from moesaic.ops import Combine, Context, GateOn
from moesaic.routing.expert_choice import ExpertGate

__all__ = [
    "LayerOptions",
    "LayerShape",
    "PixelLinear",
    "Work",
    "dense_peers",
    "dense_work",
    "random_inputs",
    "routed_layer",
    "routed_work",
]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of input and layer; the dense peer has the same channels and kernel size.

    >>> shape = LayerShape(128, 640, 640, 16, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)
    >>> shape.patches, shape.share
    (16, 0.125)
    """

    batch: int
    channels: int
    out_channels: int
    size: int
    """Height and width of the input."""
    experts: int
    patches_per_expert: int
    patch_size: int
    kernel_size: int

    @property
    def patches(self) -> int:
        """N: patches per image."""
        return (self.size // self.patch_size) ** 2

    @property
    def share(self) -> float:
        """L/N: the share of patches that an expert selects, and of the dense multiply-adds."""
        return self.patches_per_expert / self.patches

    def __str__(self) -> str:
        channels = str(self.channels) if self.channels == self.out_channels else f"{self.channels}→{self.out_channels}"
        return (
            f"input {self.batch}×{channels}×{self.size}×{self.size}, {self.kernel_size}×{self.kernel_size} kernel, "
            f"{self.experts} experts with {self.patches_per_expert} of {self.patches} patches each"
        )


@dataclass(frozen=True)
class LayerOptions:
    """Options of ``PatchMoE``."""

    bias: bool = True
    gate: ExpertGate = "softmax_selected"
    gate_on: GateOn = "output"
    expert_norm: bool = False
    context: Context = "map"
    combine: Combine = "concat"


@dataclass(frozen=True)
class Work:
    """Minimum work of a layer."""

    flops: float
    """A multiply-add counts as two."""
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


class PixelLinear(nn.Module):
    """A 1×1 convolution as a linear layer over pixels; channels_last inputs are not copied."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.permute(0, 2, 3, 1), self.conv.weight.flatten(1), self.conv.bias)
        return y.permute(0, 3, 1, 2)


def routed_layer(shape: LayerShape, options: LayerOptions) -> PatchMoE:
    """The routed layer, in float32 on the CPU."""
    return PatchMoE(
        shape.channels,
        shape.out_channels,
        experts=shape.experts,
        patches_per_expert=shape.patches_per_expert,
        patch_size=shape.patch_size,
        kernel_size=shape.kernel_size,
        **asdict(options),
    )


def dense_peers(shape: LayerShape, options: LayerOptions) -> dict[str, nn.Module]:
    """Dense layers that the routed layer replaces: a convolution, after BatchNorm and ReLU if its experts have them.

    For 1×1 kernels there is also a linear layer over pixels.

    >>> shape = LayerShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=1)
    >>> list(dense_peers(shape, LayerOptions(expert_norm=True)))
    ['dense convolution', 'dense, linear over pixels']
    """
    check_positive("dense_peers", channels=shape.channels, out_channels=shape.out_channels)

    def conv() -> nn.Conv2d:
        pad = shape.kernel_size // 2
        return nn.Conv2d(shape.channels, shape.out_channels, shape.kernel_size, padding=pad, bias=options.bias)

    def with_norm(layer: nn.Module) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(shape.channels), nn.ReLU(), layer) if options.expert_norm else layer

    peers: dict[str, nn.Module] = {"dense convolution": with_norm(conv())}
    if shape.kernel_size == 1:
        peers["dense, linear over pixels"] = with_norm(PixelLinear(conv()))
    return peers


def random_inputs(
    shape: LayerShape, device: str, dtype: torch.dtype, memory_format: torch.memory_format, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A random input, and a random gradient of the output."""
    # a separate generator: a failed graph capture may leave the default one unusable
    generator = torch.Generator(device).manual_seed(seed)

    def random(channels: int) -> Tensor:
        size = (shape.batch, channels, shape.size, shape.size)
        values = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return values.contiguous(memory_format=memory_format)

    return random(shape.channels), random(shape.out_channels)


def dense_work(shape: LayerShape, dtype: torch.dtype, *, step: bool) -> Work:
    """Minimum work of the dense convolution: forward pass, or training step.

    >>> shape = LayerShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> dense_work(shape, torch.float32, step=False)
    Work(flops=18432.0, bytes=3328.0)
    """
    maps_in, maps_out, weights = _sizes(shape, shape.out_channels)
    flops = 2.0 * shape.batch * shape.size**2 * shape.kernel_size**2 * shape.channels * shape.out_channels
    moved = maps_in + weights + maps_out
    if step:  # reads the output gradient, the input and the weights; writes two gradients
        flops, moved = 3 * flops, moved + maps_out + 2 * maps_in + 2 * weights
    return Work(flops, moved * dtype.itemsize)


def routed_work(shape: LayerShape, options: LayerOptions, dtype: torch.dtype, *, step: bool) -> Work:
    """Minimum work of the routed layer with its router: forward pass, or training step.

    >>> shape = LayerShape(1, 8, 8, 4, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3)
    >>> routed_work(shape, LayerOptions(), torch.float32, step=False).flops  # 1/4 of dense, plus scores
    5120.0
    """
    width = shape.out_channels // shape.experts if options.combine == "concat" else shape.out_channels
    maps_in, maps_out, weights = _sizes(shape, width * shape.experts)
    selected = shape.batch * shape.experts * shape.patches_per_expert * shape.patch_size**2  # pixels
    flops = 2.0 * selected * shape.kernel_size**2 * shape.channels * width
    scores = 2.0 * maps_in * shape.experts
    moved = maps_in + weights + maps_out
    if step:
        flops = 3 * flops
        scores += 2 * 2.0 * selected * shape.channels  # only gates of selected patches have a gradient
        again = min(1.0, shape.experts * shape.share)  # share of the input read for the weight gradient
        moved += _gradient_read(shape, options) * maps_out + again * maps_in + maps_in + 2 * weights
    return Work(flops + scores, moved * dtype.itemsize)


def _sizes(shape: LayerShape, filters: int) -> tuple[float, float, float]:
    """Elements of the input, the output and the weights."""
    pixels = float(shape.batch * shape.size**2)
    return pixels * shape.channels, pixels * shape.out_channels, float(filters * shape.channels * shape.kernel_size**2)


def _gradient_read(shape: LayerShape, options: LayerOptions) -> float:
    """The share of the output gradient that a layer must read."""
    if options.combine == "sum":
        return min(1.0, shape.experts * shape.share)
    if options.gate_on == "output":
        return shape.share  # the output is zero elsewhere
    if options.bias or options.expert_norm:
        return 1.0  # the background output is nonzero everywhere
    halo = (1 + (shape.kernel_size - 1) / shape.patch_size) ** 2 if options.context == "map" else 1.0
    return min(1.0, shape.share * halo)
