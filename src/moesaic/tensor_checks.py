"""Checks of what layers and routers are called with; their errors contain the value, the limit and a way out."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

__all__ = ["check_feature_map", "check_tensor"]


def check_tensor(owner: str, x: object, shape: str, weight: Tensor | None = None) -> None:
    """Raises unless ``x`` is a tensor on the device of ``weight``; ``shape`` describes what is expected.

    >>> check_tensor("PatchMoE", [0.5], "maps (B, C, H, W)")
    Traceback (most recent call last):
    TypeError: PatchMoE: takes maps (B, C, H, W) as a tensor, got a list; join tensors with torch.stack(x)
    """
    if not isinstance(x, Tensor):
        if not hasattr(x, "__torch_function__"):  # which proxies have that stand for a tensor
            raise TypeError(f"{owner}: takes {shape} as a tensor, got {_described(x)}")
    elif weight is not None and x.device != weight.device:
        raise ValueError(
            f"{owner}: the input is on {x.device}, the weights are on {weight.device}; move one of them: "
            f"x.to('{weight.device}'), or .to('{x.device}') of the model"
        )


def check_feature_map(
    owner: str, x: Tensor, channels: int, patch_size: int, weight: Tensor | None = None, *, pad: bool | None = None
) -> None:
    """Raises unless ``x`` is a floating-point feature map (B, C, H, W) that divides into patches.

    It must be on the device of ``weight``. ``pad`` is the owner's option of that name: if it is true, a map of any
    size is accepted; None: it has none.

    >>> import torch
    >>> check_feature_map("PatchMoE", torch.zeros(1, 3, 15, 15), channels=3, patch_size=4)
    Traceback (most recent call last):
    ValueError: PatchMoE: a 15×15 map is not divisible into 4×4 patches; pad it to 16×16 or use patch_size=3 or 5
    """
    check_tensor(owner, x, "maps (B, C, H, W)", weight)
    if x.ndim != 4:
        raise ValueError(
            f"{owner}: takes maps (B, C, H, W), got {x.ndim} axes {tuple(x.shape)}; "
            "give a single image a batch axis with x[None], and tokens (B, N, C) a grid with "
            "x.transpose(1, 2).unflatten(2, (H, W))"
        )
    if x.shape[1] != channels:
        raise ValueError(
            f"{owner}: in_channels={channels}, got a map of {x.shape[1]} channels {tuple(x.shape)}; "
            "axes are (B, C, H, W)"
        )
    if not x.is_floating_point():
        raise TypeError(f"{owner}: takes floating-point maps, got {x.dtype}; convert with x.float() / 255 or so")
    H, W, p = x.shape[2], x.shape[3], patch_size
    if not H or not W or (not pad and (H % p or W % p)):
        raise ValueError(
            f"{owner}: a {H}×{W} map is not divisible into {p}×{p} patches; {_way_out(H, W, p, pad is not None)}"
        )


def _described(x: object) -> str:
    """Describes a value that is no tensor, and how to convert it to one."""
    if x is None:
        return "None; return a tensor from the layer before"
    kind: Any = type(x)
    if kind.__module__ == "numpy":
        return "a numpy array; convert it with torch.from_numpy(x)"
    if isinstance(x, (list, tuple)):
        return f"a {kind.__name__}; join tensors with torch.stack(x)"
    return f"a {kind.__name__}; convert it to a tensor first"


def _way_out(H: int, W: int, p: int, has_pad: bool) -> str:
    pad = f"pad it to {max(math.ceil(H / p), 1) * p}×{max(math.ceil(W / p), 1) * p}{' with pad=True' * has_pad}"
    common = math.gcd(H, W)
    divisors = [d for d in range(1, common + 1) if common % d == 0]
    near = [max((d for d in divisors if d < p), default=0), min((d for d in divisors if d > p), default=0)]
    fits = " or ".join(str(d) for d in near if d)
    return f"{pad} or use patch_size={fits}" if fits else pad
