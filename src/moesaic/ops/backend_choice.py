"""Why a backend runs here: in words, for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.ops import dispatch
from moesaic.routing_record import Routing

__all__ = ["Choice", "explain_choice"]


@dataclass(frozen=True)
class Choice:
    """The backend that runs here, and why it and no other."""

    name: str
    why: str
    refused: dict[str, str]
    """By name: why a backend cannot run this."""


def explain_choice(x: Tensor, routing: Routing) -> Choice:
    """What moesaic runs a routed map on, and why.

    >>> import torch, moesaic
    >>> layer, x = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=3), torch.randn(1, 4, 5, 5)
    >>> choice = explain_choice(x, layer.route(x))
    >>> choice.name, "torch" in choice.refused
    ('torch', False)
    """
    registered = dispatch._registered  # pyright: ignore[reportPrivateUsage]
    reasons = {name: known.refusal(x, routing) for name, known in registered.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    name = dispatch.select_backend(x, routing).name
    if dispatch._asked_for is not None:  # pyright: ignore[reportPrivateUsage]
        return Choice(name, f"moesaic.backend({name!r}) asks for it", refused)
    better = list(registered)[list(registered).index(name) + 1 :]
    turned_down = [f"{other} cannot run this: {refused[other]}" for other in better if other in refused]
    return Choice(name, "; ".join(["the preferred backend of those that fit", *turned_down]), refused)
