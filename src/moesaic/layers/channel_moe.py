"""``ChannelMoE``: a convolution whose experts are its channels.

Wang et al. 2019 (DeepMoE): the gates of layer l cut its outputs and the inputs of layer l + 1. The
gate stands behind BatchNorm: in front of it, BatchNorm's shift would make closed channels other
than zero, and skipping them would change the network.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from moesaic.checks import check_choice, check_feature_map, check_positive
from moesaic.layers.recording import RoutedLayer
from moesaic.ops import Norm, autocast_dtype
from moesaic.ops.channel.gated_conv import channel_macs, open_channels
from moesaic.ops.channel.open_channels import opened_of, run_opened
from moesaic.ops.dispatch import ChannelActivation, ChannelConv, run_channels
from moesaic.routing_record import Routing

__all__ = ["ChannelMoE"]


class ChannelMoE(RoutedLayer):
    """y = g ⊙ activation(BatchNorm(conv(x))), with a gate g ≥ 0 for each sample and block of channels.

    The gates come from outside, as the ``Routing`` of a ``ChannelGate``: those of this layer's channels, and
    those of the layer that made its input, whose closed channels are zero and need not be read. Closed
    channels of the result are exactly zero.

    In eval mode and without gradients (``torch.no_grad()``), open channels alone are computed: active_in ×
    active_out of the dense multiply-adds, wherever that is faster than the dense convolution. Otherwise
    the convolution is dense and its result masked: gradients are exact, and BatchNorm's statistics are
    those of all samples, whether the channel is open for them or not.

    Args:
        in_channels: channels of the map.
        out_channels: channels of the result.
        kernel_size: of the convolution.
        stride: of the convolution.
        padding: zeros around the map; ``"same"``: (kernel_size − 1) / 2, for odd kernels.
        norm: whether BatchNorm follows the convolution.
        activation: ``"relu"`` or ``"identity"``.
        block: how many neighbouring channels of the result share a gate; that of its ``ChannelGate``.
        block_in: the same of the map's channels; ``block`` unless said otherwise.
        bias: whether the convolution has one.

    >>> import torch
    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> gate = ChannelGate(8, channels=32, block=16, mode="topk", keep=1)
    >>> layer = ChannelMoE(3, 32, 3, block=16).eval()
    >>> with torch.no_grad():
    ...     y = layer(torch.randn(2, 3, 8, 8), gate(torch.randn(2, 8)))
    >>> y.shape, y.flatten(2).any(2).sum(1).tolist()
    (torch.Size([2, 32, 8, 8]), [16, 16])

    Its arguments are readable as attributes; ``conv`` and ``norm`` are the modules that hold the weights.
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
        check_positive(
            "ChannelMoE",
            in_channels=in_channels,
            out_channels=out_channels,
            kernel_size=kernel_size,
            stride=stride,
            block=block,
            block_in=block_in,
        )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = _padding(padding, kernel_size)
        self.activation: ChannelActivation = check_choice(
            "ChannelMoE", "activation", activation, get_args(ChannelActivation)
        )
        self.block = block
        self.block_in = block_in
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, self.padding, bias=bias, device=device, dtype=dtype
        )
        self.norm = nn.BatchNorm2d(out_channels, device=device, dtype=dtype) if norm else None
        self._weights: ChannelConv | None = None

    @property
    def bias(self) -> bool:
        return self.conv.bias is not None

    def forward(self, x: Tensor, gate_out: Routing, gate_in: Routing | None = None) -> Tensor:
        opened = opened_of(gate_out)
        if opened is not None:  # looked at together with the gates of other layers, of which this has been checked
            self._call_routing_hooks(gate_out)
            return run_opened(x, opened, opened_of(gate_in))
        check_feature_map("ChannelMoE", x, self.in_channels, 1)
        self._check_size(x)
        self._check_dtype(x)
        self._check_gates("gate_out", gate_out, x.shape[0], self.out_channels, self.block)
        if gate_in is not None:
            self._check_gates("gate_in", gate_in, x.shape[0], self.in_channels, self.block_in)
        if self.norm is not None and self.norm.training and self.norm.num_batches_tracked is not None:
            self.norm.num_batches_tracked.add_(1)
        return run_channels(x, self._call_routing_hooks(gate_out), gate_in, self.weights())

    def weights(self) -> ChannelConv:
        """Its convolution and BatchNorm, as backends take them."""
        # Layers that skip channels take less time than to ask a dozen modules for their parts, so what was made
        # last is looked at first.
        norm, last, parts = self.norm, self._weights, vars(self.conv)["_parameters"]
        if last is not None and last.weight is parts["weight"] and last.bias is parts["bias"]:
            if norm is None or last.norm is None:
                same = norm is last.norm
            else:
                parts, held = vars(norm)["_parameters"], vars(norm)["_buffers"]
                same = (
                    last.norm.training == norm.training
                    and last.norm.weight is parts["weight"]
                    and last.norm.bias is parts["bias"]
                    and last.norm.running_mean is held["running_mean"]
                    and last.norm.running_var is held["running_var"]
                )
            if same:
                return last
        self._weights = ChannelConv(
            self.conv.weight,
            self.conv.bias,
            self._norm(),
            self.stride,
            self.padding,
            self.activation,
            self.block,
            self.block_in,
        )
        return self._weights

    def map_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result for a map of that size."""
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
        macs = channel_macs(active_in, active_out, self.kernel_size, self.map_size(height, width))
        assert isinstance(macs, Tensor)
        return macs

    def extra_repr(self) -> str:
        blocks = (
            f"block={self.block}" if self.block == self.block_in else f"block={self.block}, block_in={self.block_in}"
        )
        return f"{self.in_channels}, {self.out_channels}, activation={self.activation!r}, {blocks}"

    def _norm(self) -> Norm | None:
        norm = self.norm
        if norm is None:
            return None
        assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
        return Norm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps, norm.training)

    def _check_size(self, x: Tensor) -> None:
        (H, W), ks = x.shape[2:], self.kernel_size
        if min(self.map_size(H, W)) < 1:
            raise ValueError(
                f"ChannelMoE: a {H}×{W} map with padding={self.padding} is smaller than kernel_size={ks}; "
                f"use padding={math.ceil((ks - min(H, W)) / 2)} or more, or larger maps"
            )

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype != self.conv.weight.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"ChannelMoE: the map is {x.dtype}, the weights are {self.conv.weight.dtype}; convert one of them with "
                ".to(dtype), or run under torch.autocast"
            )

    def _check_gates(self, name: str, routing: Routing, batch: int, channels: int, block: int) -> None:
        if routing.unit != "channel":
            raise ValueError(
                f"ChannelMoE: {name} routes by {routing.unit}; give what a ChannelGate returns, which routes by channel"
            )
        if routing.batch != batch:
            raise ValueError(f"ChannelMoE: {name} has gates for {routing.batch} samples, the map has {batch}")
        blocks = math.ceil(channels / block)
        if routing.experts != blocks:
            option = "block" if name == "gate_out" else "block_in"
            raise ValueError(
                f"ChannelMoE: {name} has {routing.experts} gates, but {channels} channels in blocks of {block} need "
                f"{blocks}; build its ChannelGate for {channels} channels, and give both the same block "
                f"({option}={block} here)"
            )


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
