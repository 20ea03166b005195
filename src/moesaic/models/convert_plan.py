"""What the parts of `convert` share: a planned replacement, seeds of new weights, words of errors."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Init", "Replacement", "either", "nearest_divisors", "new_weights"]

Init = Literal["scratch", "upcycle", "split"]


@dataclass(frozen=True)
class Replacement:
    """New modules for a layer, and the arguments of `convert` that repeat it."""

    modules: Mapping[str, nn.Module]
    """By their names in the network."""
    record: Mapping[str, Any]


@contextmanager
def new_weights(name: str, seed: int) -> Generator[torch.Generator]:
    """New weights of the layer ``name`` come from generators of their own, in the block also torch's default one."""
    key = zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)
        yield torch.Generator().manual_seed(key)


def nearest_divisors(number: int, near: int) -> str:
    """The two divisors of a number that are closest to another number, as words."""
    divisors = (each for each in range(1, number + 1) if number % each == 0)
    return either(sorted(sorted(divisors, key=lambda each: abs(each - near))[:2]))


def either(numbers: Sequence[int]) -> str:
    """Numbers as words: ``1, 2 or 4``."""
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
