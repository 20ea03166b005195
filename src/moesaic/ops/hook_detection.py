"""Detection of hooks on modules, for code that executes or replaces a module without calling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

__all__ = ["has_global_hooks", "has_hooks", "hook_tables"]

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_every: Any = nn_module
_GLOBAL = tuple(f"_global{kind}" for kind in _KINDS)


def has_hooks(module: nn.Module, *, include_global: bool = True) -> bool:
    """Whether a hook is registered on the module itself, or with ``include_global`` on all modules.

    >>> layer = nn.ReLU()
    >>> has_hooks(layer)
    False
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks(layer)
    True
    """
    own: Any = module  # one by one: a loop over names takes three times as long
    if own._forward_hooks or own._forward_pre_hooks or own._backward_hooks or own._backward_pre_hooks:
        return True
    return include_global and has_global_hooks()


def has_global_hooks() -> bool:
    """Whether a hook is registered on all modules."""
    return bool(
        _every._global_forward_hooks
        or _every._global_forward_pre_hooks
        or _every._global_backward_hooks
        or _every._global_backward_pre_hooks
    )


def hook_tables(module: nn.Module) -> list[Mapping[int, Any]]:
    """Returns what `has_hooks` looks at, for code that asks often: tables that stay the same objects.

    >>> layer = nn.ReLU()
    >>> tables = hook_tables(layer)
    >>> handle = layer.register_forward_hook(print)
    >>> any(tables)
    True
    """
    return [getattr(module, kind) for kind in _KINDS] + [getattr(nn_module, kind) for kind in _GLOBAL]
