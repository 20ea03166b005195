"""Shared parts of layers on tokens (B, N, C): checks of the input, and the grid of tokens on the image."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice, check_positive
from moesaic.ops import autocast_dtype
from moesaic.tensor_checks import check_tensor

__all__ = ["TokenGrid", "attention_bias", "check_grid", "check_tokens", "token_grid"]

TokenGrid = tuple[int, int] | Literal["square"] | None
"""Rows and columns of the tokens behind the prefix; a square, if their number is one; or none."""


def check_grid(owner: str, grid: TokenGrid, prefix_tokens: int) -> None:
    """Raises unless a layer's options ``grid`` and ``prefix_tokens`` are valid."""
    if prefix_tokens:
        check_positive(owner, prefix_tokens=prefix_tokens)
    if isinstance(grid, str):
        check_choice(owner, "grid", grid, ("square",))
    elif grid is not None:
        check_positive(owner, **dict(zip(("grid[0]", "grid[1]"), grid, strict=True)))


def check_tokens(
    owner: str, x: Tensor, mask: Tensor | None, dim: int, prefix_tokens: int, weight: Tensor, *, maps: bool = False
) -> None:
    """Raises unless ``x`` are floating-point tokens of ``dim`` features behind a prefix, and ``mask`` is theirs.

    Tokens are (B, N, C), or if ``maps`` are allowed (B, H, W, C) without prefix, on the device and in the dtype of
    ``weight``.
    """
    check_tensor(owner, x, "tokens (B, N, C)", weight)
    if x.ndim not in ((3, 4) if maps else (3,)):
        takes = "tokens (B, N, C) or maps (B, H, W, C)" if maps else "tokens (B, N, C)"
        flat = "" if maps or x.ndim != 4 else ", and flatten a map (B, H, W, C) with x.flatten(1, 2)"
        raise ValueError(
            f"{owner}: takes {takes}, got {x.ndim} axes {tuple(x.shape)}; give a single image a batch axis with "
            f"x[None]{flat}"
        )
    if x.shape[-1] != dim:
        raise ValueError(
            f"{owner}: dim={dim}, got tokens of {x.shape[-1]} features {tuple(x.shape)}; features are the "
            "last axis: x.movedim(1, -1) of a map (B, C, H, W)"
        )
    if not x.is_floating_point():
        raise TypeError(f"{owner}: takes floating-point tokens, got {x.dtype}; convert with x.float()")
    tokens = math.prod(x.shape[1:-1])
    if x.ndim == 4 and prefix_tokens:
        raise ValueError(
            f"{owner}: prefix_tokens={prefix_tokens}, but a map {tuple(x.shape)} has none; give tokens (B, N, C)"
        )
    if tokens <= prefix_tokens:
        raise ValueError(
            f"{owner}: {tokens} tokens, of which prefix_tokens={prefix_tokens}; at least one must follow them"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        raise ValueError(
            f"{owner}: mask is {mask.dtype} {tuple(mask.shape)}; it must be torch.bool {tuple(x.shape[:-1])}, "
            "False for padding"
        )
    if x.dtype != weight.dtype and autocast_dtype(x) is None:
        raise TypeError(
            f"{owner}: the tokens are {x.dtype}, the weights are {weight.dtype}; convert one of them with "
            ".to(dtype), or run under torch.autocast"
        )


def token_grid(owner: str, given: TokenGrid, tokens: int, prefix_tokens: int) -> tuple[int, int] | None:
    """Returns rows and columns of the tokens behind the prefix, or None if they have none.

    >>> token_grid("TokenMoE", "square", 197, prefix_tokens=1)
    (14, 14)
    """
    left = tokens - prefix_tokens
    if given is None:
        return None
    if given != "square":
        if math.prod(given) != left:
            raise ValueError(
                f"{owner}: {tokens} tokens, of which {left} follow the prefix, are no grid of "
                f"{given[0]}×{given[1]}; set grid to their rows and columns, or to None"
            )
        return given
    side = math.isqrt(left)
    return (side, side) if side * side == left else None


def attention_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what is added to the logits of attention (B, heads, N, N) so that none reads tokens outside of a mask.

    It is finite, so that attention of padding alone is not NaN.

    >>> attention_bias(torch.tensor([[True, False]]), torch.float32).shape
    torch.Size([1, 1, 1, 2])
    """
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return bias[:, None, None]
