"""Base class of the experts for patches, E networks with weights stacked along the first axis; and their norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.ops import Norm, PatchChoice, PatchSelection, PatchSpec
from moesaic.ops.eager_conditions import check_vmap
from moesaic.ops.expert_parallel import ExpertDispatcher
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Routing

__all__ = ["ExpertNorm", "Experts"]


class ExpertNorm(nn.Module):
    """BatchNorm and ReLU of each expert's masked map (the released pMoE block); all tensors are (E, C).

    Statistics are taken over the *whole* masked map, zeros included. ``momentum`` and ``eps``
    have torch's meaning and defaults, and may be set after construction (Keras: 0.01 and 1e-3).
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    global_batch: GlobalBatch | None = None
    """The batch of which the maps are a part, in training on several processes."""

    def __init__(
        self,
        experts: int,
        channels: int,
        *,
        momentum: float = 0.1,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        shape = (experts, channels)
        self.weight = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Resets weights to 1, biases to 0, and the statistics to mean 0 and variance 1."""
        for tensor, value in ((self.weight, 1), (self.bias, 0), (self.running_mean, 0), (self.running_var, 1)):
            nn.init.constant_(tensor, value)

    def tensors(self, values_per_channel: int) -> Norm:
        """Returns the tensors for a backend; raises an error if there are too few values for a variance."""
        if self.training and values_per_channel == 1 and self.global_batch is None:
            raise ValueError(
                "ExpertNorm: one value per channel has no variance to train on; use a larger batch or map, or eval mode"
            )
        check_vmap("ExpertNorm", self)
        statistics = (self.running_mean, self.running_var)
        settings = (self.momentum, self.eps, self.training, self.global_batch)
        return Norm(self.weight, self.bias, *statistics, *settings)

    def extra_repr(self) -> str:
        experts, channels = self.weight.shape
        return f"experts={experts}, channels={channels}, momentum={self.momentum}, eps={self.eps}"


class Experts(nn.Module):
    """E experts that map C channels to O on the patches routed to them; ``len(experts)`` is E."""

    norm: ExpertNorm | None
    kernel_size: int = 1
    has_bias: bool
    dispatcher: ExpertDispatcher | None = None
    """Set by `shard_experts`, which makes ranks share the experts; for the ``run_`` functions of `moesaic.ops`."""

    def __init__(
        self,
        experts: int,
        in_channels: int,
        out_channels: int,
        *,
        norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, experts=experts, in_channels=in_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.norm = ExpertNorm(experts, in_channels, device=device, dtype=dtype) if norm else None
        self._experts = experts

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.first_weight.dtype

    @property
    def first_weight(self) -> Tensor:
        """A weight, which has the device and the dtype of the others."""
        return next(self.parameters())

    def __len__(self) -> int:
        return self._experts

    def forward(self, x: Tensor, routing: Routing, spec: PatchSpec, selection: PatchSelection | None = None) -> Tensor:
        """Runs the experts on the routed patches of a map (B, C, H, W).

        ``selection`` is the state of an expert choice by kernels; implementations pass it and ``self.dispatcher`` on to
        the ``run_`` functions of `moesaic.ops`.
        """
        raise TypeError(f"{type(self).__name__} does not implement forward(x, routing, spec, selection)")

    def run_chosen(self, x: Tensor, choice: PatchChoice, spec: PatchSpec) -> Tensor | None:
        """Makes an expert choice and runs the experts on it, as one operator; None where no backend has one."""
        return None

    def norm_tensors(self, x: Tensor) -> Norm | None:
        """The experts' norm as backends take it, or None."""
        if self.norm is None:
            return None
        ranks = 1 if self.dispatcher is None else self.dispatcher.ranks * self.dispatcher.replica_count
        return self.norm.tensors(ranks * x.shape[0] * x.shape[2] * x.shape[3])
