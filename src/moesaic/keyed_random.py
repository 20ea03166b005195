"""Counter-based random numbers: each number is a hash of a key, a stream and a position.

Networks that train in one batch each need their own random numbers, and the same ones whether a network trains alone,
among hundreds, in another chunk or on another device. A stateful generator would need a loop over the networks. Here
every trial has a 64-bit key and every purpose a stream, so that the numbers of all trials are computed at once.

>>> alone, together = keys(0, [7]), keys(0, range(100))
>>> torch.equal(normal(alone, "init", 3, 4)[0], normal(together, "init", 3, 4)[7])
True

The hash is the finalizer of splitmix64 (Steele, Lea and Flood 2014), applied to key and counter in
turn. It is not cryptographically secure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["bits", "coarse_uniform", "integers", "keys", "normal", "permutations", "uniform"]

# As signed 64-bit integers, whose arithmetic wraps around in torch.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_FNV_START, _FNV_STEP = 0xCBF29CE484222325, 0x100000001B3


def keys(seed: int, trials: Iterable[int] | Tensor, device: torch.device | str | None = None) -> Tensor:
    """Returns one key (T,) int64 per trial number."""
    if not 0 <= _whole("seed", seed) < 1 << 63:
        raise ValueError(f"keys: seed={seed}; it must be from 0 to 2⁶³ − 1")
    if not isinstance(trials, Tensor):
        trials = torch.tensor([_whole("trial", trial) for trial in trials], dtype=torch.int64)
    if trials.dtype != torch.int64 or trials.ndim != 1:
        raise TypeError(f"keys: trials are {tuple(trials.shape)} {trials.dtype}; they must be (T,) torch.int64")
    return _mix(_mix(torch.full_like(trials, seed)) + (trials + 1) * _GOLDEN).to(device)


def bits(keys: Tensor, stream: str | int | Tensor, *shape: int) -> Tensor:
    """Returns (T, *shape) int64 with 64 random bits each.

    The stream is a name, a number, or a scalar or (T,) tensor of numbers, such as an epoch counter on the device.
    """
    number = _name(stream) if isinstance(stream, str) else stream
    stem = _mix(keys + _mix(torch.as_tensor(number, dtype=torch.int64, device=keys.device)))
    count = torch.arange(1, math.prod(shape) + 1, device=keys.device)
    return _mix(stem[:, None] + count * _GOLDEN).view(len(keys), *shape)


def uniform(keys: Tensor, stream: str | int | Tensor, *shape: int) -> Tensor:
    """Returns (T, *shape) float64, uniform in (0, 1]."""
    return (_shift(bits(keys, stream, *shape), 11).double() + 0.5) * 2.0**-53


def coarse_uniform(keys: Tensor, stream: str | int | Tensor, *shape: int) -> Tensor:
    """Returns (T, *shape) float32, uniform in (0, 1) with a resolution of 2⁻²¹: three numbers from every 64 bits.

    It is faster than `uniform`, for noise of every sample in every training step.
    """
    size = math.prod(shape)
    drawn = bits(keys, stream, -(-size // 3))
    thirds = torch.empty(len(keys), 3, drawn.shape[1], device=keys.device)
    for i, place in enumerate((43, 22, 1)):
        thirds[:, i] = (drawn >> place).bitwise_and_(0x1FFFFF)
    return thirds.view(len(keys), -1)[:, :size].add_(0.5).mul_(2.0**-21).view(len(keys), *shape)


def normal(keys: Tensor, stream: str | int | Tensor, *shape: int) -> Tensor:
    """Returns (T, *shape) float64 from N(0, 1), by the Box–Muller transform."""
    pairs = uniform(keys, stream, 2, *shape)
    return (-2 * pairs[:, 0].log()).sqrt() * (2 * math.pi * pairs[:, 1]).cos()


def integers(keys: Tensor, stream: str | int | Tensor, high: int, *shape: int) -> Tensor:
    """Returns (T, *shape) int64, uniform from 0 to ``high`` − 1."""
    if high < 1:
        raise ValueError(f"integers: high={high} leaves no number to draw; it must be at least 1")
    return (uniform(keys, stream, *shape) * high).long().clamp_(max=high - 1)


def permutations(keys: Tensor, stream: str | int | Tensor, size: int) -> Tensor:
    """Returns a random permutation of 0 … size − 1 for each key, (T, size) int64."""
    return bits(keys, stream, size).argsort(dim=1, stable=True)


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"keys: {name}={value!r} is a {type(value).__name__}; it must be a whole number")
    return value.__index__()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shifts right logically; torch's own shift is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _name(stream: str) -> int:
    """Returns the FNV-1a hash of a stream's name as a signed 64-bit integer."""
    number = _FNV_START
    for byte in stream.encode():
        number = ((number ^ byte) * _FNV_STEP) % (1 << 64)
    return number - (1 << 64) if number >> 63 else number
