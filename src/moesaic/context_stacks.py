"""Stacks that belong to the current context: the requested backends and the active routing hooks.

A context is that of `contextvars`: every thread has its own, and so has every asyncio task. A new thread starts with
empty stacks, as it starts without `torch.no_grad`; a function run by ``contextvars.copy_context().run`` or
`asyncio.to_thread` has those of the context that was copied.

A stack is read as an attribute of this module. `torch.compile` cannot trace ``ContextVar.get``, but it reads attributes
of modules and guards on their values, so that a compiled model runs on the backend that its caller requested.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

__all__ = ["pop", "push"]

if TYPE_CHECKING:
    backends: tuple[str, ...]
    """Names of the requested backends, the innermost last."""
    routing_hooks: tuple[Any, ...]
    """The routing hooks, in the order in which they were registered."""

StackName = Literal["backends", "routing_hooks"]

_STACKS: dict[str, ContextVar[tuple[Any, ...]]] = {
    name: ContextVar(f"moesaic.{name}", default=()) for name in ("backends", "routing_hooks")
}


def __getattr__(name: str) -> tuple[Any, ...]:
    stack = _STACKS.get(name)
    if stack is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stack.get()


def push(name: StackName, entry: object) -> None:
    """Adds an entry to a stack of the current context.

    >>> from moesaic import context_stacks
    >>> push("backends", "reference")
    >>> context_stacks.backends
    ('reference',)
    >>> pop("backends", "reference")
    >>> context_stacks.backends
    ()
    """
    _STACKS[name].set((*_STACKS[name].get(), entry))


def pop(name: StackName, entry: object) -> None:
    """Removes an entry, the innermost one of equals; blocks may overlap, so it need not be the last.

    Nothing happens in a context that does not have it.
    """
    entries = _STACKS[name].get()
    for place in reversed(range(len(entries))):
        if entries[place] == entry:
            _STACKS[name].set((*entries[:place], *entries[place + 1 :]))
            return
