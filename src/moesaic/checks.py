"""Argument checks whose errors contain the value, the limit and a way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # commands import this module, and print their help without waiting for torch
    import torch
    from torch import Tensor

__all__ = ["check_choice", "check_device", "check_feature_map", "check_numbers", "check_positive", "printable"]

T = TypeVar("T")


def check_choice(owner: str, option: str, value: T, allowed: Collection[T]) -> T:
    """Returns ``value`` if it is allowed; the error lists the allowed values.

    >>> check_choice("PatchMoE", "context", "patches", ("map", "patch"))
    Traceback (most recent call last):
    ValueError: PatchMoE: context='patches' is unknown; use 'map' or 'patch' (did you mean 'patch'?)
    """
    if value in allowed:
        return value
    *most, last = [repr(choice) for choice in allowed]
    listed = f"{', '.join(most)} or {last}" if most else last
    near = get_close_matches(str(value), [choice for choice in allowed if isinstance(choice, str)], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{owner}: {option}={value!r} is unknown; use {listed}{hint}")


def check_positive(owner: str, **counts: int) -> None:
    """Raises unless all counts are integers of at least 1.

    >>> check_positive("PatchMoE", experts=0)
    Traceback (most recent call last):
    ValueError: PatchMoE: experts=0; it must be at least 1
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a whole number")
        if value < 1:
            raise ValueError(f"{owner}: {name}={value}; it must be at least 1")


def check_numbers(owner: str, limit: str, fits: Callable[[float], bool], values: Mapping[str, float]) -> None:
    """Raises unless all values are numbers that satisfy ``fits``; ``limit`` describes the condition.

    >>> check_numbers("Recipe", "0 or more", lambda value: value >= 0, {"clip": -1.0})
    Traceback (most recent call last):
    ValueError: Recipe: clip=-1.0; it must be 0 or more
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{owner}: {name}={value!r} is a {type(value).__name__}; it must be a number")
        if not fits(value):
            raise ValueError(f"{owner}: {name}={value}; it must be {limit}")


def check_device(owner: str, device: torch.device | str) -> torch.device:
    """Returns the device; refuses one that is not available."""
    import torch

    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{owner}: device={str(found)!r}, but torch finds no GPU here; use device='cpu'")
    return found


def check_feature_map(owner: str, x: Tensor, channels: int, patch_size: int) -> None:
    """Raises unless ``x`` is a floating-point feature map (B, C, H, W) that divides into patches.

    >>> import torch
    >>> check_feature_map("PatchMoE", torch.zeros(1, 3, 15, 15), channels=3, patch_size=4)
    Traceback (most recent call last):
    ValueError: PatchMoE: a 15×15 map is not divisible into 4×4 patches; pad it to 16×16 or use patch_size=3 or 5
    """
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
    if H % p or W % p or not H or not W:
        raise ValueError(f"{owner}: a {H}×{W} map is not divisible into {p}×{p} patches; {_way_out(H, W, p)}")


def printable(name: str) -> str:
    """Returns ``name`` with every character that cannot be printed replaced by �.

    >>> printable("Äpfel & Birnen"), printable("two" + chr(10) + "lines")
    ('Äpfel & Birnen', 'two�lines')
    """
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name)


def _way_out(H: int, W: int, p: int) -> str:
    pad = f"pad it to {max(math.ceil(H / p), 1) * p}×{max(math.ceil(W / p), 1) * p}"
    common = math.gcd(H, W)
    divisors = [d for d in range(1, common + 1) if common % d == 0]
    near = [max((d for d in divisors if d < p), default=0), min((d for d in divisors if d > p), default=0)]
    fits = " or ".join(str(d) for d in near if d)
    return f"{pad} or use patch_size={fits}" if fits else pad
