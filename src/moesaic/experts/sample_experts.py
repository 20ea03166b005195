"""Stacked experts for whole samples: linear maps of feature vectors, and two-layer networks on patches.

``LinearExperts`` are the experts of Chen et al. 2022 on sentence embeddings (Appendix A.4), ``PatchNetExperts`` their
two-layer convolutional experts (eq. 3.1):

    f_m(x) = Σ_j Σ_p σ(⟨w_mj, x_p⟩ + b_mj)

Experts are small and samples are many: the E matmuls of unequal size run as one grouped GEMM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive
from moesaic.ops import Samples, autocast_dtype, run_stacked
from moesaic.ops.expert_parallel import ExpertDispatcher
from moesaic.routing_record import Routing

__all__ = ["LinearExperts", "PatchNetExperts", "SampleActivation", "SampleExperts", "check_samples"]

SampleActivation = Literal["identity", "cubic", "relu", "celu", "gelu", "tanh"]


_ACTIVATIONS: dict[SampleActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "cubic": lambda z: z.pow(3),
    "relu": F.relu,
    "celu": F.celu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


class SampleExperts(nn.Module):
    """Base class of E experts for samples (B, …) with stacked weights; ``len(experts)`` is E.

    Subclasses implement ``expert_forward`` with ``samples.linear`` in place of ``F.linear``.
    """

    dispatcher: ExpertDispatcher | None = None
    """Set by `shard_experts`, which makes ranks share the experts."""

    def __init__(self, experts: int, activation: SampleActivation) -> None:
        super().__init__()
        owner = type(self).__name__
        check_positive(owner, experts=experts)
        self.activation: SampleActivation = check_choice(owner, "activation", activation, get_args(SampleActivation))
        self._experts = experts

    def __len__(self) -> int:
        return self._experts

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Returns the gated sum of the experts' outputs for each sample."""
        return run_stacked(x, routing, self.expert_forward, self.dispatcher)

    def expert_forward(self, values: Tensor, samples: Samples) -> Tensor:
        """Returns the experts' outputs for values (…, C), laid out and assigned to experts by the backend."""
        raise TypeError(f"{type(self).__name__} does not implement expert_forward(values, samples)")

    def _activate(self, z: Tensor) -> Tensor:
        return _ACTIVATIONS[self.activation](z)


class LinearExperts(SampleExperts):
    """E linear maps C → O and an activation: ``weight`` (E, O, C), ``bias`` (E, O).

    >>> import torch, moesaic
    >>> experts = LinearExperts(4, 768, 2, activation="cubic")
    >>> layer = moesaic.SampleMoE(torch.nn.Linear(768, 4), experts)
    >>> layer(torch.randn(6, 768)).shape
    torch.Size([6, 2])
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        activation: SampleActivation = "identity",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(experts, activation)
        check_positive("LinearExperts", in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialises each expert as ``nn.Linear`` does: uniform in ±1/√C."""
        bound = 1 / math.sqrt(self.in_features)
        for tensor in self.parameters():
            nn.init.uniform_(tensor, -bound, bound, generator=generator)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        check_samples("LinearExperts", x, self.weight, f"(B, {self.in_features})", axes=2)
        return super().forward(x, routing)

    def expert_forward(self, values: Tensor, samples: Samples) -> Tensor:
        return self._activate(samples.linear(values, self.weight, self.bias))

    def extra_repr(self) -> str:
        return (
            f"{len(self)} × ({self.in_features} → {self.out_features}), activation={self.activation!r}, "
            f"bias={self.bias is not None}"
        )


class PatchNetExperts(SampleExperts):
    """E two-layer networks on patches (B, P, D) with J filters each: ``weight`` (E, J, D), ``bias`` (E, J).

    The activations of every filter on every patch are summed. With ``outputs=1`` all J filters make one logit (print);
    with ``outputs=2`` half of them make each of two logits (the released code).

    With the identity as activation, weights are summed over filters and inputs over patches before the matmul, which
    then costs P·J times less.

    Args:
        experts: number of experts E.
        dim: length D of a patch.
        filters: number of filters J of each expert.
        outputs: number of logits; each is a sum over filters / outputs filters.
        activation: ``"identity"``, ``"cubic"``, ``"relu"``, ``"celu"``, ``"gelu"`` or ``"tanh"``.
        bias: whether filters have a bias; the paper's have none.
        init_std: σ0, the standard deviation of the initial weights. A small one lets experts specialise.
        device: device of the weights.
        dtype: dtype of the weights.

    >>> import torch, moesaic
    >>> experts = PatchNetExperts(8, dim=50, filters=16)
    >>> layer = moesaic.SampleMoE(moesaic.routing.SampleRouter(50, experts=8), experts)
    >>> layer(torch.randn(6, 4, 50)).shape
    torch.Size([6, 1])
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        filters: int,
        outputs: int = 1,
        *,
        activation: SampleActivation = "cubic",
        bias: bool = False,
        init_std: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(experts, activation)
        check_positive("PatchNetExperts", dim=dim, filters=filters, outputs=outputs)
        if filters % outputs:
            lower, upper = filters // outputs * outputs, (filters // outputs + 1) * outputs
            fits = f"{lower} or {upper}" if lower else f"{upper}"
            raise ValueError(
                f"PatchNetExperts: filters={filters} cannot be shared by outputs={outputs}; use filters={fits}"
            )
        if not 0 <= init_std < math.inf:
            raise ValueError(f"PatchNetExperts: init_std={init_std}; it must be 0 or more")
        self.dim = dim
        self.filters = filters
        self.outputs = outputs
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(experts, filters, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, filters, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights and biases from N(0, init_std²)."""
        for tensor in self.parameters():
            nn.init.normal_(tensor, std=self.init_std, generator=generator)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        check_samples("PatchNetExperts", x, self.weight, f"(B, P, {self.dim})", axes=3)
        if self.activation != "identity":
            return super().forward(x, routing)
        bias_EO = None if self.bias is None else x.shape[1] * self._by_output(self.bias).sum(2)
        weight_EOD = self._by_output(self.weight).sum(2)

        def expert_forward(values: Tensor, samples: Samples) -> Tensor:
            return samples.linear(values, weight_EOD, bias_EO)

        return run_stacked(x.sum(1), routing, expert_forward, self.dispatcher)

    def expert_forward(self, values: Tensor, samples: Samples) -> Tensor:
        hidden = self._activate(samples.linear(values, self.weight, self.bias)).sum(-2)
        return hidden.view(*hidden.shape[:-1], self.outputs, self.filters // self.outputs).sum(-1)

    def extra_repr(self) -> str:
        return (
            f"{len(self)} × ({self.dim} → {self.filters} → {self.outputs}), activation={self.activation!r}, "
            f"bias={self.bias is not None}"
        )

    def _by_output(self, per_filter: Tensor) -> Tensor:
        """Reshapes (E, J, …) to (E, O, J / O, …)."""
        return per_filter.view(len(self), self.outputs, self.filters // self.outputs, *per_filter.shape[2:])


def check_samples(owner: str, x: Tensor, weight: Tensor, takes: str, axes: int) -> None:
    """Raises an error if samples do not match stacked weights in number of axes, last axis or dtype."""
    if x.ndim != axes or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"{owner}: takes samples {takes}, got {tuple(x.shape)}")
    if x.dtype != weight.dtype and autocast_dtype(x) is None:
        raise TypeError(
            f"{owner}: the samples are {x.dtype}, the weights are {weight.dtype}; convert one of them with "
            ".to(dtype), or run under torch.autocast"
        )
