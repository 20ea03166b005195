"""``TokenSkip``: a block of a transformer that processes the best tokens of each image; the others pass by unchanged.

Raposo et al. 2024 (mixture of depths). The number of tokens is the same for every image, so that shapes are static and
nothing waits for the device; attention among fewer tokens costs quadratically less.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive
from moesaic.layers.recording import RoutedLayer
from moesaic.layers.token_inputs import TokenGrid, attention_bias, check_grid, check_tokens, token_grid
from moesaic.layers.token_moe import TokenMoE
from moesaic.ops import autocast_off
from moesaic.routing.keep_choice import KeepChoice, KeepGate
from moesaic.routing_record import Routing

__all__ = ["SkipPrefix", "TokenSkip"]

SkipPrefix = Literal["always", "join"]


class TokenSkip(RoutedLayer):
    """Runs ``block`` on the ``ceil(keep · N)`` tokens of each image that its router scores highest.

    With S the selected tokens, x_S their input and g_n the gate of token n:

        y_n = x_n + g_n · (block(x_S)_n − x_n)  for n in S,   y_n = x_n  otherwise

    For a residual block, block(x) = x + f(x), this is x + g · f(x_S). Gates are 2 · sigmoid(score): they carry the
    gradient to the router, and begin near 1, so that a trained block computes what it did. With ``gate="one"`` and
    ``keep=1`` the layer is the block, bit by bit. The router reads tokens after a LayerNorm without parameters, as the
    residual stream of a transformer grows with depth.

    Args:
        block: Maps tokens (B, L, C) to (B, L, C) for every L, without using their positions on the grid. If its
            ``forward`` has a parameter ``mask`` (B, L), or ``attn_mask`` as timm's blocks, it gets that of padding.
        dim: C, features of a token.
        keep: Share of the tokens that are processed: above 0, at most 1.
        gate: ``"sigmoid"``, or ``"one"``; the router then gets no gradient.
        prefix_tokens: Leading tokens that have no place on the grid: class and register tokens.
        prefix: Whether prefix tokens are ``"always"`` processed, besides the share of the others and with a gate of 1;
            or ``"join"`` the others.
        grid: Rows and columns of the tokens behind the prefix, for overlays; ``"square"``: a square if there is one;
            None: they have no grid.

    >>> import torch, moesaic
    >>> from moesaic.layers import TokenSkip
    >>> mlp = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    >>> layer = TokenSkip(mlp, 8, keep=0.25)
    >>> x = torch.randn(2, 16, 8)
    >>> with moesaic.record_routing(layer) as routing:
    ...     y = layer(x)
    >>> (y != x).any(-1).sum(1).tolist(), routing[""].grid
    ([4, 4], (4, 4))
    """

    def __init__(
        self,
        block: nn.Module,
        dim: int,
        *,
        keep: float = 0.5,
        gate: KeepGate = "sigmoid",
        prefix_tokens: int = 0,
        prefix: SkipPrefix = "always",
        grid: TokenGrid = "square",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("TokenSkip", dim=dim)
        check_grid("TokenSkip", grid, prefix_tokens)
        self.dim = dim
        self.prefix_tokens = prefix_tokens
        self.prefix: SkipPrefix = check_choice("TokenSkip", "prefix", prefix, get_args(SkipPrefix))
        self.grid: TokenGrid = grid
        always = prefix_tokens if prefix == "always" else 0
        self.router = KeepChoice(dim, keep, gate=gate, prefix_tokens=always, device=device, dtype=dtype)
        mixtures = [inner for inner in block.modules() if isinstance(inner, TokenMoE)]
        for inner in mixtures:
            _check_mixture(inner, prefix_tokens, self.prefix)
        for inner in mixtures if keep < 1 else ():
            inner.grid = None  # selected tokens have none
        self.block = block
        self._mask_name = _mask_parameter(block)

    @property
    def selects_units(self) -> bool:
        return self.keep < 1

    @property
    def keep(self) -> float:
        """Share of the tokens that are processed."""
        return self.router.keep

    @property
    def gate(self) -> KeepGate:
        return self.router.gate

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Runs the block on selected tokens; those where ``mask`` (B, N) is False are padding and pass by.

        Where an image has fewer tokens than places, a block without a parameter for masks sees zeros in their stead.
        """
        routing = self.route(x, mask)
        self._call_routing_hooks(routing)
        assert routing.index is not None
        index_BL, gate_BL = routing.index[:, 0], routing.gate[:, 0]
        if mask is not None:
            return self._run_masked(x, index_BL, gate_BL)
        if index_BL.shape[1] == x.shape[1]:
            return self._gated(x, self.block(x), gate_BL)
        place = index_BL.unsqueeze(-1).expand(-1, -1, self.dim)
        chosen = x.gather(1, place)
        y = self._gated(chosen, self.block(chosen), gate_BL)
        return x.to(y.dtype).scatter(1, place, y)

    def route(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """The routing of tokens, without running the block."""
        check_tokens("TokenSkip", x, mask, self.dim, self.prefix_tokens, self.router.weight)
        grid = token_grid("TokenSkip", self.grid, x.shape[1], self.prefix_tokens)
        with autocast_off(x):
            normed = F.layer_norm(x.to(torch.promote_types(x.dtype, torch.float32)), (self.dim,))
        x_map = normed.transpose(1, 2).unsqueeze(2)  # channels_last
        routing = self.router(x_map) if mask is None else self.router(x_map, mask=mask)
        return replace(routing, unit="token", grid=grid, prefix=self.prefix_tokens)

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}, prefix={self.prefix!r}" if self.prefix_tokens else ""
        return f"{self.dim}, keep={self.keep}, gate={self.gate!r}{prefix}"

    def _gated(self, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        if self.gate == "one":  # x + (y - x) is not y to the bit
            return y.to(torch.promote_types(x.dtype, y.dtype))
        return x + gate.unsqueeze(-1).to(y.dtype) * (y - x)

    def _run_masked(self, x: Tensor, index: Tensor, gate: Tensor) -> Tensor:
        """Empty places read and write a row of zeros behind the tokens, which is dropped."""
        used = index >= 0
        place = index.where(used, x.shape[1]).unsqueeze(-1).expand(-1, -1, self.dim)
        padded = F.pad(x, (0, 0, 0, 1))
        chosen = padded.gather(1, place)
        y = self._gated(chosen, self.block(chosen, **self._block_mask(used, x.dtype)), gate)
        return padded.to(y.dtype).scatter(1, place, y)[:, :-1]

    def _block_mask(self, used: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """The argument of the block that leaves empty places out of attention."""
        if self._mask_name == "attn_mask":
            return {"attn_mask": attention_bias(used, dtype)}
        return {} if self._mask_name is None else {self._mask_name: used}


def _check_mixture(inner: TokenMoE, prefix_tokens: int, prefix: SkipPrefix) -> None:
    """Refuses a mixture of experts in the block that would take other tokens for its prefix."""
    if inner.prefix_tokens and (inner.prefix_tokens != prefix_tokens or prefix == "join"):
        raise ValueError(
            f"TokenSkip: prefix_tokens={prefix_tokens}, prefix={prefix!r}, but a TokenMoE in the block has "
            f"prefix_tokens={inner.prefix_tokens}, which must come first among the selected tokens; use "
            f"prefix_tokens={inner.prefix_tokens}, prefix='always'"
        )


def _mask_parameter(block: nn.Module) -> str | None:
    parameters = inspect.signature(block.forward).parameters
    return next((name for name in ("mask", "attn_mask") if name in parameters), None)
