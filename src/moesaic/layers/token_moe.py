"""``TokenMoE``: an MLP whose experts each process the tokens routed to them, for transformers and their like.

Riquelme et al. 2021 (token choice), Zhou et al. 2022 (expert choice), Puigcerver et al. 2024 (soft slots). Tokens
(B, N, C) are a channels_last map (B, C, 1, N) without a copy, so that routers, experts and kernels are those of
`PatchMoE`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_numbers, check_positive
from moesaic.experts import Experts, MLPExperts
from moesaic.experts.mlp_experts import ActivationName
from moesaic.layers.map_routing import check_agreement, route_map, routing_is_internal, run_fused, run_slots
from moesaic.layers.recording import RoutedLayer
from moesaic.layers.token_inputs import TokenGrid, check_grid, check_tokens, token_grid
from moesaic.ops import PatchSpec
from moesaic.routing import ExpertChoice, Router
from moesaic.routing.expert_choice import ExpertGate
from moesaic.routing_record import Routing

__all__ = ["Prefix", "TokenGrid", "TokenMoE"]

Prefix = Literal["join", "bypass"]

_SPEC = PatchSpec(patch_size=1, gate_on="output", context="patch", combine="sum")


class TokenMoE(RoutedLayer):
    """Routes tokens (B, N, C), or maps (B, H, W, C), to experts; it replaces the MLP of a transformer.

    With S_n the experts that process token n, and g_en their gates:

        y_n = Σ_{e ∈ S_n} g_en · expert_e(x_n)

    A token that no expert processes has the output 0: the residual connection around the layer carries it.

    Args:
        dim: C, features of a token.
        experts: Number of MLPs, or an ``Experts`` object such as ``MLPExperts``, which has its own sizes and options.
        hidden_dim: J, hidden neurons of an expert; None: 4 · dim.
        out_dim: Features of an output; None: dim.
        tokens_per_expert: L, tokens of each image that an expert selects; or give ``capacity``.
        capacity: Tokens per expert as a multiple of N / E, so that ``capacity`` experts process a token on average:
            L = ceil(capacity · N / E).
        activation: Of the hidden neurons.
        bias: Whether the experts have biases.
        gate: Of expert choice: ``"softmax_experts"``, ``"softmax_selected"``, ``"softmax_all"`` or ``"one"``; see
            ``ExpertChoice``. Gates of the first kind do not shrink as L grows.
        dropout: Dropout of the hidden neurons and of the output, in training.
        prefix_tokens: Leading tokens that have no place on the grid: class and register tokens.
        prefix: Whether prefix tokens ``"join"`` the others, or ``"bypass"`` the layer; then their output is 0.
        grid: Rows and columns of the tokens after the prefix, for overlays; ``"square"``: those of a map (B, H, W, C),
            and of N tokens a square if there is one; None: N tokens have no grid.
        router: Another router in place of expert choice: ``TokenChoice(dim, experts)``, ``SoftRouter(dim, experts)``.

    >>> import torch, moesaic
    >>> layer = moesaic.TokenMoE(192, experts=8, hidden_dim=384, capacity=2.0, prefix_tokens=1)
    >>> with moesaic.record_routing(layer) as routing:
    ...     y = layer(torch.randn(2, 197, 192))
    >>> y.shape, routing[""].index.shape, routing[""].grid
    (torch.Size([2, 197, 192]), torch.Size([2, 8, 50]), (14, 14))
    """

    def __init__(
        self,
        dim: int,
        *,
        experts: int | Experts,
        hidden_dim: int | None = None,
        out_dim: int | None = None,
        tokens_per_expert: int | None = None,
        capacity: float | None = None,
        activation: ActivationName = "gelu",
        bias: bool = True,
        gate: ExpertGate = "softmax_experts",
        dropout: float = 0.0,
        prefix_tokens: int = 0,
        prefix: Prefix = "join",
        grid: TokenGrid = "square",
        router: Router | nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("TokenMoE", dim=dim)
        check_numbers("TokenMoE", "from 0 to below 1", lambda value: 0 <= value < 1, {"dropout": dropout})
        check_grid("TokenMoE", grid, prefix_tokens)
        self.dim = dim
        self.prefix_tokens = prefix_tokens
        self.prefix: Prefix = check_choice("TokenMoE", "prefix", prefix, get_args(Prefix))
        self.grid: TokenGrid = grid
        if isinstance(experts, Experts):
            self.experts = experts
            _check_experts(experts, dim, hidden_dim, out_dim, bias)
        else:
            check_positive("TokenMoE", experts=experts)
            self.experts = MLPExperts(
                experts,
                dim,
                4 * dim if hidden_dim is None else hidden_dim,
                dim if out_dim is None else out_dim,
                activation=activation,
                bias=bias,
                dropout=dropout,
                device=device,
                dtype=dtype,
            )
        self.out_dim = self.experts.out_channels
        self.drop = nn.Dropout(dropout)
        if router is None:
            if (tokens_per_expert is None) == (capacity is None):
                given = "both are given" if capacity is not None else "both are missing"
                raise TypeError(f"TokenMoE: tokens_per_expert and capacity: {given}; give one of them, or a router")
            if tokens_per_expert is not None:
                check_positive("TokenMoE", tokens_per_expert=tokens_per_expert)
            count = {"patches_per_expert": tokens_per_expert, "capacity": capacity}
            router = ExpertChoice(dim, len(self.experts), **count, gate=gate, device=device, dtype=dtype)  # pyright: ignore[reportArgumentType]
        elif not isinstance(router, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"TokenMoE: router={router!r} is a {type(router).__name__}; give a router object such as "
                f"moesaic.TokenChoice({dim}, {len(self.experts)})"
            )
        self.router = router
        check_agreement(
            "TokenMoE",
            "its router has",
            tokens_per_expert=(tokens_per_expert, None, self.tokens_per_expert),
            capacity=(capacity, None, self.capacity),
            gate=(gate, "softmax_experts", self.gate),
        )
        if getattr(router, "patch_size", 1) != 1:
            raise ValueError(f"TokenMoE: the router has patch_size={router.patch_size}; a token is one position: use 1")

    @property
    def tokens_per_expert(self) -> int | None:
        """L, or None if the router has no such number."""
        return getattr(self.router, "patches_per_expert", None)

    @property
    def capacity(self) -> float | None:
        """The capacity of expert choice, or None if the router has none."""
        found = getattr(self.router, "capacity", None)
        return found if isinstance(found, int | float) else None  # TokenChoice has a method of that name

    @property
    def gate(self) -> str | None:
        return getattr(self.router, "gate", None)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Runs the experts on tokens; those where ``mask`` (B, N) is False are padding and have the output 0."""
        x_map, mask, grid = self._map_of(x, mask)
        y = run_fused(self, self.router, self.experts, x_map, _SPEC) if mask is None else None
        if y is None:
            y = self._run(x_map, mask, grid)
        y = self.drop(y.squeeze(2).transpose(1, 2))
        if self._bypassed:
            y = F.pad(y, (0, 0, self._bypassed, 0))
        return y.reshape(*x.shape[:-1], self.out_dim)

    def route(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """The routing of tokens, without running the experts."""
        x_map, mask, grid = self._map_of(x, mask)
        routing, _ = route_map("TokenMoE", self.router, x_map, len(self.experts), 1, mask)
        return self._record(routing, grid)

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}, prefix={self.prefix!r}" if self.prefix_tokens else ""
        return f"{self.dim}, {self.out_dim}{prefix}"

    @property
    def _bypassed(self) -> int:
        return self.prefix_tokens if self.prefix == "bypass" else 0

    def _map_of(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, int] | None]:
        """Checks tokens: those that are routed as a map, their mask, their grid."""
        self._check_input(x, mask)
        tokens = x.flatten(1, -2)
        grid = self._grid_of(x, tokens.shape[1])
        mask = None if mask is None else mask.flatten(1)
        if self._bypassed:
            tokens = tokens[:, self._bypassed :]
            mask = None if mask is None else mask[:, self._bypassed :]
        return tokens.contiguous().transpose(1, 2).unsqueeze(2), mask, grid  # channels_last

    def _run(self, x_map: Tensor, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
        """Routes the map, calls the routing hooks, and runs the experts."""
        detached = routing_is_internal(self, self.experts)
        routing, selection = route_map("TokenMoE", self.router, x_map, len(self.experts), 1, mask, detached=detached)
        self._call_routing_hooks(self._record(routing, grid))
        if routing.chooser == "soft":
            return run_slots(self.experts, x_map, routing, 1, "sum")
        return self.experts(x_map, routing, _SPEC, selection)

    def _record(self, routing: Routing, grid: tuple[int, int] | None) -> Routing:
        """The routing as one of tokens: experts run on that of a map of one row."""
        return replace(routing, unit="token", grid=grid, prefix=self.prefix_tokens - self._bypassed)

    def _grid_of(self, x: Tensor, tokens: int) -> tuple[int, int] | None:
        if x.ndim == 4:
            return (x.shape[1], x.shape[2])
        return token_grid("TokenMoE", self.grid, tokens, self.prefix_tokens)

    def _check_input(self, x: Tensor, mask: Tensor | None) -> None:
        weight = self.experts.first_weight
        check_tokens("TokenMoE", x, mask, self.dim, self.prefix_tokens, weight, maps=True)


def _check_experts(experts: Experts, dim: int, hidden_dim: int | None, out_dim: int | None, bias: bool) -> None:
    check_agreement(
        "TokenMoE",
        "its experts have",
        hidden_dim=(hidden_dim, None, getattr(experts, "hidden_channels", None)),
        out_dim=(out_dim, None, experts.out_channels),
        bias=(bias, True, experts.has_bias),
    )
    if experts.in_channels != dim or experts.kernel_size != 1 or experts.norm is not None:
        raise ValueError(
            f"TokenMoE: the experts take {experts.in_channels} features with kernel_size={experts.kernel_size}"
            f"{' and a norm' * (experts.norm is not None)}; dim={dim} needs {dim} features, kernel_size=1 and no norm"
        )
