"""Registry of routers by name, so that networks, commands and files can name them.

A name is ``"expert-choice"``, ``"token-choice"``, ``"soft"``, one that `register_router` added, or ``"module:Class"``.
Only `import_router` imports a module, and only a user's own words reach it: names in checkpoint files are looked up by
`registered_router`, so that an untrusted file runs nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

from torch import nn

from moesaic.routing.expert_choice import ExpertChoice
from moesaic.routing.soft import SoftRouter
from moesaic.routing.token_choice import TokenChoice

__all__ = [
    "DEFAULT_ROUTER",
    "RouterLike",
    "build_router",
    "has_patch_count",
    "import_router",
    "is_built_in",
    "is_default",
    "join_router_names",
    "list_routers",
    "register_router",
    "registered_router",
    "router_name",
]

RouterFactory = Callable[..., nn.Module]
RouterLike = str | RouterFactory
"""A name, a router class, or a factory ``(in_channels, experts, patch_size) -> Router``."""

DEFAULT_ROUTER = "expert-choice"

_BUILT_IN: dict[str, RouterFactory] = {DEFAULT_ROUTER: ExpertChoice, "token-choice": TokenChoice, "soft": SoftRouter}
_REGISTERED: dict[str, RouterFactory] = dict(_BUILT_IN)
_ARGUMENTS = ("in_channels", "experts", "patch_size")
_COUNT_PARAMETERS = ("patches_per_expert", "slots_per_expert")


def list_routers() -> list[str]:
    """Returns the names of the registered routers.

    >>> list_routers()[:3]
    ['expert-choice', 'token-choice', 'soft']
    """
    return list(_REGISTERED)


def register_router(name: str, router: RouterFactory) -> None:
    """Registers a router class or factory under a name that networks, commands and checkpoints can then use.

    Checkpoints store only the name. A checkpoint of a network with a router of your own loads once that router is
    registered under the name in the file, ``"module:Class"`` unless it had another when the network was made.

    >>> from functools import partial
    >>> from moesaic.models import create_model
    >>> register_router("top-2", partial(TokenChoice, top_k=2))
    >>> create_model("wrn10_1_pmoe", num_classes=2, router="top-2").moe.router.top_k
    2
    """
    if not callable(router) or isinstance(router, nn.Module):
        raise TypeError(
            f"register_router: router={router!r} is a {type(router).__name__}; give a router class or a factory "
            "(in_channels, experts, patch_size) -> Router"
        )
    if name in _BUILT_IN and _BUILT_IN[name] is not router:
        raise ValueError(f"register_router: {name!r} is one of moesaic's own routers; choose another name")
    _REGISTERED[name] = router


def is_built_in(name: str) -> bool:
    """Whether a name is that of one of moesaic's own routers."""
    return name in _BUILT_IN


def is_default(router: RouterLike) -> bool:
    """Whether a router is expert choice, by its name or as the class itself."""
    return router in (DEFAULT_ROUTER, ExpertChoice)


def registered_router(name: str) -> RouterFactory:
    """Returns the router of a name, importing nothing; an error says how to register it."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        raise ValueError(
            f"the router {name!r} is not registered, and names from a specification or a file are never imported; if "
            f"you trust it, import it and call moesaic.routing.register_router({name!r}, {attribute}) with your "
            f"{attribute} of {module}, pass it as router={attribute}, or give a command --router {name}"
        )
    near = get_close_matches(name, _REGISTERED, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"router={name!r} is unknown{hint}; use {', '.join(map(repr, _REGISTERED))}, 'module:Class', or a name that "
        "you give to moesaic.routing.register_router"
    )


def import_router(name: str) -> RouterFactory:
    """Returns the router of a name that a user wrote: a registered one, or ``"module:Class"``, which is imported.

    An imported router is registered under its name. Modules of the working directory are found too.

    >>> import_router("moesaic.routing.token_choice:TokenChoice").__name__
    'TokenChoice'
    """
    module_name, colon, attribute = name.partition(":")
    if name in _REGISTERED or not colon:
        return registered_router(name)
    try:
        module = _import(module_name)
    except ImportError as error:
        raise ImportError(
            f"router={name!r}: the module {module_name!r} cannot be imported ({error}); run from its directory, or add "
            "that to PYTHONPATH"
        ) from error
    try:
        found = cast("RouterFactory | None", attrgetter(attribute)(module))
    except AttributeError:
        found = None
    if not callable(found):
        raise ValueError(
            f"router={name!r}: {module_name} has no class or function {attribute!r}; name a subclass of "
            "moesaic.routing.Router in it"
        )
    register_router(name, found)
    return _REGISTERED[name]


def router_name(router: RouterLike) -> str:
    """Returns the name of a router for a file: the registered one, or ``"module:Class"``.

    >>> router_name(TokenChoice), router_name("soft")
    ('token-choice', 'soft')
    """
    if isinstance(router, str):
        return router
    registered = next((name for name, each in _REGISTERED.items() if each is router), None)
    if registered is not None:
        return registered
    module, place = getattr(router, "__module__", None), getattr(router, "__qualname__", "<")
    if module is None or "<" in place:  # a lambda, a local function or class, or an object without a name
        raise ValueError(
            f"router={router!r} has no name to store; call moesaic.routing.register_router(name, router) first"
        )
    return f"{module}:{place}"


def build_router(
    router: RouterLike,
    in_channels: int,
    experts: int,
    patch_size: int,
    patches_per_expert: int | None = None,
    **options: Any,
) -> nn.Module:
    """Builds a router from a name, a class or a factory.

    ``patches_per_expert`` is passed to routers that have such a parameter, as slots per expert to a `SoftRouter`;
    ``options`` to `ExpertChoice` and its subclasses.

    >>> build_router("soft", 16, experts=4, patch_size=2, patches_per_expert=3).slots_per_expert
    3
    """
    make = _factory(router)
    values = (in_channels, experts, patch_size)
    if _is_expert_choice(make):
        made = make(**dict(zip(_ARGUMENTS, values, strict=True)), patches_per_expert=patches_per_expert, **options)
    else:
        count = {} if patches_per_expert is None else dict.fromkeys(_count_parameters(make), patches_per_expert)
        # by name where possible, as the third parameter of our own routers is not the patch size
        by_name = inspect.signature(make).parameters.keys() >= set(_ARGUMENTS)
        made = make(**dict(zip(_ARGUMENTS, values, strict=True)), **count) if by_name else make(*values, **count)
    if not isinstance(made, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"router={router!r} made a {type(made).__name__}; it must make a module, such as a moesaic.routing.Router"
        )
    return made


def has_patch_count(router: RouterLike) -> bool:
    """Whether a router takes a number of patches, or of slots, for each expert."""
    make = _factory(router)
    return _is_expert_choice(make) or bool(_count_parameters(make))


def join_router_names(parts: Sequence[str]) -> list[str]:
    """Joins ``"router=module"`` and ``"Class"``, parts of a model string that was split at its colons.

    >>> join_router_names(["experts=4", "router=my_routers", "Nearest", "patch_size=2"])
    ['experts=4', 'router=my_routers:Nearest', 'patch_size=2']
    >>> join_router_names(["router=soft", "pretrained"])
    ['router=soft', 'pretrained']
    """
    joined: list[str] = []
    for part in parts:
        before = joined[-1] if joined else ""
        module = before.removeprefix("router=")
        if before != module and ":" not in module and module not in _REGISTERED and part.isidentifier():
            joined[-1] = f"{before}:{part}"
        else:
            joined.append(part)
    return joined


def _factory(router: RouterLike) -> RouterFactory:
    make = import_router(router) if isinstance(router, str) else router
    if not callable(make) or isinstance(make, nn.Module):  # a router itself is callable, and fits one layer alone
        raise TypeError(
            f"router={router!r} is a {type(router).__name__}; give a name, a router class, or a factory (in_channels, "
            "experts, patch_size) -> Router"
        )
    return make


def _is_expert_choice(make: RouterFactory) -> bool:
    return isinstance(make, type) and issubclass(make, ExpertChoice)


def _count_parameters(make: RouterFactory) -> list[str]:
    """Parameters of a router for patches or slots per expert, unless ``functools.partial`` has set them."""
    bound: Mapping[str, Any] = getattr(make, "keywords", {})
    return [name for name in inspect.signature(make).parameters if name in _COUNT_PARAMETERS and name not in bound]


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
        # an installed command does not search the working directory, `python -m moesaic` does
        sys.path.append(here)
        try:
            return import_module(name)
        finally:
            sys.path.remove(here)
