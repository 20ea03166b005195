"""Explains which backend runs a routed map, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.ops import dispatch
from moesaic.routing_record import Routing

__all__ = ["BackendChoice", "explain_backend"]


@dataclass(frozen=True)
class BackendChoice:
    """The selected backend and the reason."""

    name: str
    why: str
    refused: dict[str, str]
    """Why each of the other backends cannot run this, by name."""


def explain_backend(x: Tensor, routing: Routing) -> BackendChoice:
    """Returns the backend that runs a routed map, and why.

    >>> import torch, moesaic
    >>> layer, x = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=3), torch.randn(1, 4, 5, 5)
    >>> choice = explain_backend(x, layer.route(x))
    >>> choice.name, "torch" in choice.refused
    ('torch', False)
    """
    registered = dispatch._registered  # pyright: ignore[reportPrivateUsage]
    reasons = {name: known.refusal(x, routing) for name, known in registered.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    name = dispatch.select_backend(x, routing).name
    if dispatch.requested_backend() is not None:
        return BackendChoice(name, f"moesaic.backend({name!r}) asks for it", refused)
    better = list(registered)[list(registered).index(name) + 1 :]
    rejected = [f"{other} cannot run this: {refused[other]}" for other in better if other in refused]
    return BackendChoice(name, "; ".join(["the preferred backend of those that fit", *rejected]), refused)
