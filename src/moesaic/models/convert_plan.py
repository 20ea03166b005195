"""Replacements that `convert` and `skip` plan: modules and their record, and random numbers of new weights."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Init", "Replacement", "new_weights", "refuse_ddp"]

Init = Literal["scratch", "upcycle", "split"]


@dataclass(frozen=True)
class Replacement:
    """New modules for a layer, and the arguments of `convert` that repeat it."""

    modules: Mapping[str, nn.Module]
    """By their names in the network."""
    record: Mapping[str, Any]


def refuse_ddp(owner: str, model: nn.Module) -> None:
    """Refuses a network in DistributedDataParallel, whose list of parameters is fixed when it is made."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{owner}: the network is in DistributedDataParallel, which would not synchronise new weights; "
            f"{owner} the network first, and wrap it then"
        )


@contextmanager
def new_weights(name: str, seed: int, device: torch.device) -> Generator[torch.Generator]:
    """New weights of the layer ``name`` come from generators of their own, in the block also torch's default one.

    They are created on the CPU, whatever the default device, and moved to ``device`` after the block; those for the
    meta device are created there.
    """
    key = zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.default_generator.manual_seed(key)
        yield torch.Generator().manual_seed(key)
