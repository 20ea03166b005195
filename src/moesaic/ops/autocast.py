"""What autocast asks for on a tensor's device; the meta device has no autocast and asks for nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_off"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast computes in where ``x`` lives, or None where it is off; it leaves float64 alone."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """A block in which operations on ``x`` keep the dtypes they are given."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext()
