"""BatchNorm and ReLU of each expert's masked map, before the expert (the released pMoE block)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.ops import Norm

__all__ = ["ExpertNorm"]


class ExpertNorm(nn.Module):
    """One BatchNorm per expert; parameters and running statistics are (E, C).

    Statistics are taken over the *whole* masked map, zeros included. ``momentum`` and ``eps``
    have torch's meaning and defaults, and may be set after construction (Keras: 0.01 and 1e-3).
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

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
        if self.training and values_per_channel == 1:
            raise ValueError(
                "ExpertNorm: one value per channel has no variance to train on; use a larger batch or map, or eval mode"
            )
        return Norm(self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps, self.training)

    def extra_repr(self) -> str:
        experts, channels = self.weight.shape
        return f"experts={experts}, channels={channels}, momentum={self.momentum}, eps={self.eps}"
