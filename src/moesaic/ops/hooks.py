"""Detection of hooks on modules, for code that executes or replaces a module without calling it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn
from torch.nn.modules import module as nn_module

__all__ = ["find_hooked_module", "has_hooks"]

_KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def has_hooks(module: nn.Module, *, include_global: bool = True) -> bool:
    """Whether a hook is registered on the module itself, or with ``include_global`` on all modules.

    >>> layer = nn.ReLU()
    >>> has_hooks(layer)
    False
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks(layer)
    True
    """
    if any(getattr(module, f"_{kind}") for kind in _KINDS):
        return True
    return include_global and any(getattr(nn_module, f"_global_{kind}") for kind in _KINDS)


def find_hooked_module(model: nn.Module) -> str | None:
    """Returns the name of the first module of a model that has a hook of its own, "" for the model itself, or None.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> find_hooked_module(model)
    >>> handle = model[1].register_forward_hook(print)
    >>> find_hooked_module(model)
    '1'
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # torch types it in part
    return next((name for name, module in modules if has_hooks(module, include_global=False)), None)
