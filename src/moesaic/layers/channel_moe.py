"""``ChannelMoE``: a convolution whose experts are its channels, and its frozen form for inference.

Wang et al. 2019 (DeepMoE): the gates of layer l select its output channels and the input channels of layer l + 1. The
gate follows BatchNorm: before it, BatchNorm's shift would make closed channels nonzero, and dropping them would change
the network.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers.frozen_module import FrozenModule, check_freezable
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import autocast_dtype
from moesaic.ops.channel.bn_folding import batch_norm_tensors, fold_norm
from moesaic.ops.channel.costs import ConvCosts, pieces_per_filter
from moesaic.ops.channel.gathered_conv import BlockLayout, group_samples, memory_format, open_conv
from moesaic.ops.channel.masked import open_channels
from moesaic.ops.dispatch import ChannelActivation, ChannelConv, run_channels
from moesaic.routing_record import Routing
from moesaic.tensor_checks import check_feature_map

__all__ = ["ChannelMoE", "FrozenChannelMoE"]


class _ChannelLayer(RoutedLayer):
    """The geometry of a convolution with gated channels, and the checks of its input."""

    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int
    padding: int
    activation: ChannelActivation
    block: int
    block_in: int

    def map_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for a map of that size."""
        rows, columns = ((size + 2 * self.padding - self.kernel_size) // self.stride + 1 for size in (height, width))
        return rows, columns

    def macs(self, height: int, width: int, gate_out: Routing, gate_in: Routing | None = None) -> Tensor:
        """(B,): the multiply-adds of each sample, active_in × active_out × ks² × pixels, for a map of that size.

        >>> from moesaic.routing.channel_gate import ChannelGate
        >>> routing = ChannelGate(1, channels=4).choose(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
        >>> ChannelMoE(4, 4, 3).macs(8, 8, routing, routing).tolist()        # 2 · 2 · 9 · 64
        [2304]
        """
        active_out = open_channels(gate_out, self.out_channels, self.block).sum(1)
        active_in: int | Tensor = self.in_channels
        if gate_in is not None:
            active_in = open_channels(gate_in, self.in_channels, self.block_in).sum(1)
        return active_in * active_out * (self.kernel_size**2 * math.prod(self.map_size(height, width)))

    def extra_repr(self) -> str:
        block_in = "" if self.block_in == self.block else f", block_in={self.block_in}"
        return f"{self.in_channels}, {self.out_channels}, activation={self.activation!r}, block={self.block}{block_in}"

    def _check(self, x: Tensor, gate_out: Routing, gate_in: Routing | None, weight: Tensor) -> None:
        check_feature_map("ChannelMoE", x, self.in_channels, 1, weight)
        (B, _, H, W), ks = x.shape, self.kernel_size
        if min(self.map_size(H, W)) < 1:
            raise ValueError(
                f"ChannelMoE: a {H}×{W} map with padding={self.padding} is smaller than kernel_size={ks}; "
                f"use padding={math.ceil((ks - min(H, W)) / 2)} or more, or larger maps"
            )
        self._check_gates("gate_out", gate_out, B, x.device, self.out_channels, self.block)
        if gate_in is not None:
            self._check_gates("gate_in", gate_in, B, x.device, self.in_channels, self.block_in)

    def _check_gates(
        self, name: str, routing: Routing, batch: int, device: torch.device, channels: int, block: int
    ) -> None:
        if not isinstance(routing, Routing):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"ChannelMoE: {name} is a {type(routing).__name__}; give what a ChannelGate returns, a Routing"
            )
        if routing.unit != "channel":
            raise ValueError(
                f"ChannelMoE: {name} routes by {routing.unit}; give what a ChannelGate returns, which routes by channel"
            )
        if routing.batch != batch:
            raise ValueError(f"ChannelMoE: {name} has gates for {routing.batch} samples, the map has {batch}")
        if routing.gate.device != device:
            raise ValueError(
                f"ChannelMoE: {name} is on {routing.gate.device}, the map is on {device}; move the ChannelGate that "
                f"computes it with .to('{device}')"
            )
        blocks = math.ceil(channels / block)
        if routing.experts != blocks:
            option = "block" if name == "gate_out" else "block_in"
            raise ValueError(
                f"ChannelMoE: {name} has {routing.experts} gates, but {channels} channels in blocks of {block} need "
                f"{blocks}; build its ChannelGate for {channels} channels, and give both the same block "
                f"({option}={block} here)"
            )


class ChannelMoE(_ChannelLayer):
    """y = g ⊙ activation(BatchNorm(conv(x))), with a gate g ≥ 0 for each sample and block of channels.

    The gates are passed in as the ``Routing`` of a ``ChannelGate``: those of this layer's channels, and those of the
    layer that produced its input, whose closed channels are zero. Closed channels of the output are exactly zero.

    The convolution is dense and its output masked: gradients are exact, and BatchNorm's statistics are those of all
    samples, open or closed. `moesaic.freeze` returns an inference module that computes only open channels: active_in ×
    active_out of the dense multiply-adds.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        kernel_size: side of the convolution kernel.
        stride: of the convolution.
        padding: zeros around the map; ``"same"``: (kernel_size − 1) / 2, for odd kernels.
        norm: whether BatchNorm follows the convolution.
        activation: ``"relu"`` or ``"identity"``.
        block: consecutive output channels that share a gate; as in its ``ChannelGate``.
        block_in: the same for input channels; default: ``block``.
        bias: whether the convolution has a bias.

    >>> import torch
    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> gate = ChannelGate(8, channels=32, block=16, mode="topk", keep=1)
    >>> layer = ChannelMoE(3, 32, 3, block=16).eval()
    >>> with torch.no_grad():
    ...     y = layer(torch.randn(2, 3, 8, 8), gate(torch.randn(2, 8)))
    >>> y.shape, y.flatten(2).any(2).sum(1).tolist()
    (torch.Size([2, 32, 8, 8]), [16, 16])

    Its arguments are readable as attributes; ``conv`` and ``norm`` are the modules with the weights.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int | Literal["same"] = "same",
        norm: bool = True,
        activation: ChannelActivation = "relu",
        block: int = 1,
        block_in: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        block_in = block if block_in is None else block_in
        check_positive("ChannelMoE", in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size)
        check_positive("ChannelMoE", stride=stride, block=block, block_in=block_in)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = _padding(padding, kernel_size)
        self.activation = check_choice("ChannelMoE", "activation", activation, get_args(ChannelActivation))
        self.block = block
        self.block_in = block_in
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, self.padding, bias=bias, device=device, dtype=dtype
        )
        self.norm = nn.BatchNorm2d(out_channels, device=device, dtype=dtype) if norm else None

    @property
    def bias(self) -> bool:
        return self.conv.bias is not None

    def forward(self, x: Tensor, gate_out: Routing, gate_in: Routing | None = None) -> Tensor:
        weight = self.conv.weight
        self._check(x, gate_out, gate_in, weight)
        if x.dtype != weight.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"ChannelMoE: the map is {x.dtype}, the weights are {weight.dtype}; convert one of them with "
                ".to(dtype), or run under torch.autocast"
            )
        return self._run(x, self._call_routing_hooks(gate_out), gate_in)

    def _run(self, x: Tensor, gate_out: Routing, gate_in: Routing | None) -> Tensor:
        return run_channels(x, gate_out, gate_in, self.weights())

    def weights(self, activation: ChannelActivation | None = None) -> ChannelConv:
        """The convolution and BatchNorm in the form that backends take; with another activation, if one is given."""
        conv, norm = self.conv, None if self.norm is None else batch_norm_tensors(self.norm)
        activation = activation or self.activation
        return ChannelConv(
            conv.weight, conv.bias, norm, self.stride, self.padding, activation, self.block, self.block_in
        )


class FrozenChannelMoE(FrozenModule, _ChannelLayer):
    """A `ChannelMoE` for inference on the CPU that computes only open channels; `moesaic.freeze` makes one.

    BatchNorm is folded into the weights, which are copies: later changes to the layer do not affect it. It is called as
    the layer is, and its input must be zero in the channels that ``gate_in`` closes, which it does not read. Samples
    that open the same channels run together where that is cheaper than all samples at once.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> gate = ChannelGate(8, channels=32, block=16, mode="topk", keep=1)
    >>> layer, x, routing = ChannelMoE(3, 32, 3, block=16).eval(), torch.randn(2, 3, 8, 8), gate(torch.randn(2, 8))
    >>> torch.allclose(FrozenChannelMoE(layer)(x, routing), layer(x, routing), atol=1e-5)
    True
    """

    def __init__(self, layer: ChannelMoE) -> None:
        super().__init__(*check_freezable(layer))
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.padding = layer.kernel_size, layer.stride, layer.padding
        self.activation, self.block, self.block_in = layer.activation, layer.block, layer.block_in
        self._conv = fold_norm(layer.weights())
        assert self._conv.bias is not None
        ins, outs = (self.in_channels, self.block_in, 1), (self.out_channels, self.block, pieces_per_filter(self._conv))
        self._layout = BlockLayout([ins, outs], torch.cat([self._conv.bias.new_zeros(ins[0]), self._conv.bias]))

    def forward(self, x: Tensor, gate_out: Routing, gate_in: Routing | None = None) -> Tensor:
        self._check_input(x, self.in_channels)
        self._check(x, gate_out, gate_in, self._conv.weight)
        self._call_routing_hooks(gate_out)
        with torch.inference_mode():
            y = self._run(x, gate_out, gate_in)
        return y.clone()  # a normal tensor, that autograd may save

    def _run(self, x: Tensor, gate_out: Routing, gate_in: Routing | None) -> Tensor:
        outs = gate_out.weights[:, 0].to(x.dtype)
        ins = outs.new_ones(len(x), self._layout.blocks[0]) if gate_in is None else gate_in.weights[:, 0].to(x.dtype)
        gates = torch.cat([ins, outs], 1)
        size = (len(x), self.out_channels, *self.map_size(*x.shape[2:]))
        y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x)).zero_()
        for samples in self._groups(gates, size[2] * size[3]):
            ins, outs = self._layout.open(gates[samples], at_least_one=False)
            if len(outs):
                place = torch.tensor(samples, device=x.device)[:, None], outs.index
                y[place] = open_conv(x[samples], self._conv, ins, outs)
        return y

    def _groups(self, gates: Tensor, pixels: int) -> list[list[int]]:
        def cost(batch_size: int, is_open: NDArray[np.bool_]) -> float:
            ins, outs = self._layout.count_open(is_open)
            costs = ConvCosts.of(self._conv, batch_size * pixels)
            return costs.cheapest(ins, outs)[1] + costs.call

        return group_samples((gates != 0).numpy(), cost)


def _padding(padding: int | str, kernel_size: int) -> int:
    if isinstance(padding, str):
        check_choice("ChannelMoE", "padding", padding, ("same",))
        if kernel_size % 2 == 0:
            raise ValueError(
                f"ChannelMoE: padding='same' cannot centre kernel_size={kernel_size}; use an odd kernel or a number"
            )
        return kernel_size // 2
    if isinstance(padding, bool) or padding < 0:
        raise ValueError(f"ChannelMoE: padding={padding!r}; it must be 'same' or a whole number from 0 on")
    return padding
