"""Stacked two-layer MLPs, the experts of vision transformers.

They run on each pixel of the routed patches, or on whole samples: feature vectors (B, C), and tokens (B, N, C) of
which all of an image go to the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.experts.sample_experts import check_samples
from moesaic.experts.stacked_experts import Experts
from moesaic.ops import (
    MLPWeights,
    PatchChoice,
    PatchSelection,
    PatchSpec,
    Samples,
    run_chosen_mlp,
    run_mlp,
    run_stacked,
)
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Routing

__all__ = ["ACTIVATIONS", "ActivationName", "MLPExperts"]

ActivationName = Literal["gelu", "relu", "silu", "gelu_tanh", "quick_gelu"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    """GELU as CLIP's networks have it."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}


class MLPExperts(Experts):
    """E two-layer MLPs C → J → O: ``weight_in`` (E, J, C), ``weight_out`` (E, O, J) and their biases.

    ``dropout`` is that of the hidden neurons, in training.

    >>> import torch, moesaic
    >>> experts = MLPExperts(16, 768, 3072, 768)
    >>> layer = moesaic.PatchMoE(768, 768, experts=experts, patches_per_expert=12, combine="sum")
    >>> layer(torch.randn(2, 768, 14, 14)).shape
    torch.Size([2, 768, 14, 14])
    >>> moesaic.SampleMoE(torch.nn.Linear(768, 16), experts)(torch.randn(2, 768)).shape
    torch.Size([2, 768])
    """

    global_batch: GlobalBatch | None = None
    """The batch of which the input is a part, in training on several processes."""

    def __init__(
        self,
        experts: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        activation: ActivationName = "gelu",
        bias: bool = True,
        norm: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(experts, in_channels, out_channels, norm=norm, device=device, dtype=dtype)
        check_positive("MLPExperts", hidden_channels=hidden_channels)
        self.hidden_channels = hidden_channels
        self.has_bias = bias
        check_numbers("MLPExperts", "from 0 to below 1", lambda value: 0 <= value < 1, {"dropout": dropout})
        self.dropout = dropout
        self.activation: ActivationName = check_choice("MLPExperts", "activation", activation, get_args(ActivationName))
        E, C, J, O = experts, in_channels, hidden_channels, out_channels

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight_in = stacked(E, J, C)
        self.bias_in = stacked(E, J) if bias else None
        self.weight_out = stacked(E, O, J)
        self.bias_out = stacked(E, O) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises each layer as ``nn.Linear`` does: uniform in ±1/√fan_in."""
        layers = ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out))
        for weight, bias in layers:
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound, generator=generator)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound, generator=generator)

    def forward(
        self, x: Tensor, routing: Routing, spec: PatchSpec | None = None, selection: PatchSelection | None = None
    ) -> Tensor:
        """Runs the experts on the routed patches of a map, or without a ``spec`` on samples (B, …, C)."""
        if spec is None:
            return self._forward_samples(x, routing)
        return run_mlp(x, routing, self._weights(), self.norm_tensors(x), spec, selection, self.dispatcher)

    def run_chosen(self, x: Tensor, choice: PatchChoice, spec: PatchSpec) -> Tensor | None:
        return run_chosen_mlp(x, choice, self._weights(), spec) if self.norm is None else None

    @property
    def first_weight(self) -> Tensor:
        return self.weight_in  # found faster than the first of all parameters

    def _weights(self) -> MLPWeights:
        return MLPWeights(self.weight_in, self.bias_in, self.weight_out, self.bias_out, self._activation())

    def _activation(self) -> Callable[[Tensor], Tensor]:
        """The activation, with dropout behind it in training."""
        function = ACTIVATIONS[self.activation]
        if not self.dropout or not self.training:
            return function
        if self.global_batch is not None:
            raise ValueError(
                f"MLPExperts: dropout={self.dropout} of hidden neurons would depend on how processes share a batch; "
                "use dropout=0, or train in one process"
            )
        return lambda hidden: F.dropout(function(hidden), self.dropout)

    def _forward_samples(self, x: Tensor, routing: Routing) -> Tensor:
        check_samples("MLPExperts", x, self.weight_in, f"(B, …, {self.in_channels})", axes=max(x.ndim, 2))
        if self.norm is not None:
            raise ValueError(
                "MLPExperts: norm=True normalises masked maps and does not apply to samples; "
                "build the experts with norm=False"
            )

        def expert_forward(values: Tensor, samples: Samples) -> Tensor:
            hidden = self._activation()(samples.linear(values, self.weight_in, self.bias_in))
            return samples.linear(hidden, self.weight_out, self.bias_out)

        return run_stacked(x, routing, expert_forward, self.dispatcher)

    def extra_repr(self) -> str:
        return (
            f"{len(self)} × ({self.in_channels} → {self.hidden_channels} → {self.out_channels}), "
            f"activation={self.activation!r}, bias={self.has_bias}"
        )
