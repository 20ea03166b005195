"""What autocast asks for on a tensor's device; the meta device has no autocast and asks for nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_off"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast computes in where ``x`` lives, or None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """A block in which operations on ``x`` keep the dtypes they are given."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext()
