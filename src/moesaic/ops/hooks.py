"""Whoever listens to a module by a hook must hear it: shortcuts that call no modules look here first."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules import module as nn_module

__all__ = ["Listeners", "has_hooks"]

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


_KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook, or all modules have one: then it has to be called as a module.

    >>> layer = nn.ReLU()
    >>> has_hooks(layer)
    False
    >>> hook = layer.register_forward_hook(print)
    >>> has_hooks(layer)
    True
    """
    return any(getattr(module, f"_{kind}") or getattr(nn_module, f"_global_{kind}") for kind in _KINDS)
