"""The state of autocast on a tensor's device; the meta device has no autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "autocast_off"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the autocast dtype on the device of ``x``; None if autocast is off or ``x`` is float64."""
    device_type = x.device.type
    if device_type == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context manager that disables autocast on the device of ``x``."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # the context takes as long as an operator
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
