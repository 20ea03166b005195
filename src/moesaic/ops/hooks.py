"""Whoever listens to a module by a hook must hear it: shortcuts that call no modules look here first."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["Listeners"]

_NAMES = ("_forward_hooks", "_forward_pre_hooks", "_routing_hooks")
# of those that hear every module, such as torch's counter of multiply-adds
_EVERYWHERE = [vars(torch.nn.modules.module)[f"_global{name}"] for name in _NAMES[:2]]


class Listeners:
    """True while a module of these has a hook, or a routed layer an observer.

    >>> layer = nn.ReLU()
    >>> heard = Listeners([layer])
    >>> bool(heard)
    False
    >>> hook = layer.register_forward_hook(print)
    >>> bool(heard)
    True
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = [vars(module)[name] for module in modules for name in _NAMES if name in vars(module)]

    def __bool__(self) -> bool:
        return any(self._hooks) or any(_EVERYWHERE)
