"""Gated convolutions inside any network, which calls them with a map and passes no gates.

The gates of the current batch are in one `ActiveGates`, which the network's layers share: `DeepMoE` sets them before it
calls the network and resets them afterwards. So the network's own ``forward`` runs unchanged, with its training and
eval modes, which a traced copy would have fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.layers import ChannelMoE
from moesaic.ops import autocast_dtype, kernels_available
from moesaic.ops.channel.bn_folding import batch_norm_tensors
from moesaic.ops.channel.joint_routing import JointRouting
from moesaic.ops.channel.masked import closed_gradients
from moesaic.ops.dispatch import run_channels
from moesaic.ops.eager_conditions import is_plain_eager
from moesaic.ops.hook_detection import has_hooks
from moesaic.ops.triton_backend import norm_relu
from moesaic.routing_record import Routing

__all__ = ["ActiveGates", "ConsumerConv", "GatedConv", "GatedReLU", "unsupported_conv", "unsupported_norm"]


class ActiveGates:
    """The gates of the batch that the current thread runs, by the name of the layer whose channels they gate.

    A forward pass begins and ends in one thread without yielding to an asyncio task, so a value per thread is a value
    per call. A context variable would be one too, but `torch.compile` cannot set it.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def replace(self, routing: Mapping[str, Routing] | None) -> Mapping[str, Routing] | None:
        """Sets the gates and returns those that were set before; None for none."""
        before = self.current()
        self._thread.routing = routing
        return before

    def current(self) -> Mapping[str, Routing] | None:
        """The gates that are set; None for none."""
        return getattr(self._thread, "routing", None)

    def of(self, name: str) -> Routing:
        """The gates of a layer, while a batch runs."""
        routing = self.current()
        if routing is None:
            raise RuntimeError(
                f"DeepMoE: {name} has no gates outside of its DeepMoE; call the DeepMoE, not its backbone"
            )
        return routing[name]

    def set_rectified(self, y: Tensor) -> None:
        """Stores a map to which ReLU was applied already."""
        self._thread.rectified = y

    def take_rectified(self) -> Tensor | None:
        """The last such map, once."""
        y = getattr(self._thread, "rectified", None)
        if y is not None:
            self._thread.rectified = None
        return y

    def __reduce__(self) -> tuple[type[ActiveGates], tuple[()]]:
        return ActiveGates, ()  # copies start without gates, and layers that share one share its copy


class GatedConv(ChannelMoE):
    """A `ChannelMoE` that reads its gates from `ActiveGates`; it takes over a convolution and its BatchNorm.

    Args:
        conv: the convolution.
        norm: the BatchNorm right after it, if any.
        active: the gates of the current batch.
        name: the name of its own gates in ``active``.
        producer: the name of the gates of its input channels; None where these are not gated.
        block: consecutive output channels that share a gate.
        block_in: consecutive input channels that share a gate.
        before_relu: whether nothing but a `GatedReLU` reads its output. Where GPU kernels run what follows the
            convolution, they apply ReLU as well. So it is on every device where closed gates have gradients, which a
            ReLU behind the gates would stop; a hook on the convolution then sees the map after ReLU.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        norm: nn.BatchNorm2d | None,
        active: ActiveGates,
        name: str,
        *,
        producer: str | None = None,
        block: int = 1,
        block_in: int = 1,
        before_relu: bool = False,
    ) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size[0],
            stride=conv.stride[0],
            padding=cast("tuple[int, int]", conv.padding)[0],
            norm=norm is not None,
            activation="identity",  # the network's own activation follows
            block=block,
            block_in=block_in,
            bias=conv.bias is not None,
            device="meta",
        )
        self.conv = conv
        self.norm = norm
        self.name = name
        self.producer = producer
        self.before_relu = before_relu
        self._active = active
        self.train(conv.training)

    @property
    def active(self) -> ActiveGates:
        """The gates of the current batch."""
        return self._active

    def gates(self) -> tuple[Routing, Routing | None]:
        """The gates of its output and of its input channels, while a batch runs."""
        return self._active.of(self.name), None if self.producer is None else self._active.of(self.producer)

    def forward(self, x: Tensor, gate_out: Routing | None = None, gate_in: Routing | None = None) -> Tensor:
        if gate_out is None:
            y = self._rectified(x)
            if y is not None:
                return y
            gate_out, gate_in = self.gates()
        return super().forward(x, gate_out, gate_in)

    def _run(self, x: Tensor, gate_out: Routing, gate_in: Routing | None) -> Tensor:
        if not self.before_relu or not closed_gradients(gate_out):
            return super()._run(x, gate_out, gate_in)
        y = run_channels(x, gate_out, gate_in, self.weights("relu"))
        self._active.set_rectified(y)
        return y

    def _rectified(self, x: Tensor) -> Tensor | None:
        """The output after ReLU, by torch's convolution and GPU kernels for the rest; None where these do not run."""
        if not self.before_relu or not is_plain_eager(x) or not kernels_available(x):
            return None
        norm = self._modules["norm"]
        if has_hooks(self) or self.has_routing_hooks:  # a hook sees what it sees elsewhere
            return None
        gates, conv = self._active.of(self.name), cast("Any", self._modules["conv"])  # found faster than as attributes
        weight = conv._parameters.get("weight")
        fits = x.ndim == 4 and gates.batch == x.shape[0] and isinstance(gates, JointRouting)
        if not fits or norm is None or weight is None or (x.dtype != weight.dtype and autocast_dtype(x) is None):
            return None  # which is for the plain way to say
        if closed_gradients(gates):  # the kernel skips what closed gates hide
            return None
        y = F.conv2d(x, weight, conv._parameters.get("bias"), self.stride, self.padding)  # casts under autocast
        y = norm_relu(y, batch_norm_tensors(cast("nn.BatchNorm2d", norm)), gates.weights, self.block)
        self._active.set_rectified(y)
        return y


class GatedReLU(nn.ReLU):
    """The ReLU of a gated network; maps that its convolution has rectified already pass unchanged.

    >>> import torch
    >>> GatedReLU(ActiveGates())(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    def __init__(self, active: ActiveGates, *, inplace: bool = False) -> None:
        super().__init__(inplace)
        self._active = active

    def forward(self, input: Tensor) -> Tensor:
        if self._active.take_rectified() is input:
            return input
        return super().forward(input)

    def plain(self) -> nn.ReLU:
        """Returns torch's ReLU, with the same mode."""
        return nn.ReLU(self.inplace).train(self.training)


class ConsumerConv(nn.Conv2d):
    """A convolution without gates of its own that reads gated channels, whose closed ones a frozen network skips.

    It takes over the weights of ``conv``. ``producer`` is the name of the gates of its input channels.
    """

    def __init__(self, conv: nn.Conv2d, active: ActiveGates, producer: str, *, block_in: int = 1) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            cast("tuple[int, int]", conv.kernel_size),
            cast("tuple[int, int]", conv.stride),
            cast("tuple[int, int]", conv.padding),
            bias=conv.bias is not None,
            device="meta",
        )
        self.weight = conv.weight
        self.bias = conv.bias
        self.producer = producer
        self.block_in = block_in
        self._active = active
        self.train(conv.training)

    @property
    def active(self) -> ActiveGates:
        """The gates of the current batch."""
        return self._active

    def gate_in(self) -> Routing:
        """The gates of its input channels, while a batch runs."""
        return self._active.of(self.producer)


def unsupported_conv(conv: nn.Conv2d) -> str | None:
    """Why a convolution cannot be gated, as the end of a sentence that begins with its name, or None.

    >>> unsupported_conv(nn.Conv2d(3, 8, (1, 3)))
    'has kernel_size=(1, 3), which is not square'
    """
    if conv.groups > 1:
        return f"is grouped (groups={conv.groups})"
    for name in ("kernel_size", "stride", "padding"):
        sides = getattr(conv, name)
        if isinstance(sides, str):
            return f"has {name}={sides!r}; it must be a number"
        if sides[0] != sides[1]:
            return f"has {name}={sides}, which is not square"
    if conv.dilation != (1, 1):
        return f"has dilation={conv.dilation}; it must be 1"
    if conv.padding_mode != "zeros":
        return f"has padding_mode={conv.padding_mode!r}; it must be 'zeros'"
    return None


def unsupported_norm(norm: nn.BatchNorm2d) -> str | None:
    """Why a BatchNorm cannot be part of a gated layer, as the end of a sentence, or None."""
    if not norm.affine or not norm.track_running_stats:
        return "has a BatchNorm without weights or running statistics"
    return "has a BatchNorm with momentum=None, which averages over all batches" if norm.momentum is None else None
