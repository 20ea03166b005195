"""Gradient checkpointing whose second forward pass computes gradients and changes nothing else.

``torch.utils.checkpoint`` runs a part of a network again in the backward pass instead of storing its intermediate
results. What the part does besides, it then does twice: BatchNorm moves its running statistics twice a step, as in
timm, so that they follow a momentum of 1 − (1 − m)²; a router with a generator of its own draws other noise than in
the first pass, which gives wrong gradients. Here the second pass works on copies of all buffers, with the generators as
they were, and with the channel gates of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from moesaic.models.deepmoe.gated_conv import ActiveGates, ConsumerConv, GatedConv
from moesaic.routing_record import Routing

__all__ = ["checkpoint_segment"]

_checkpoint: Any = cast("Any", checkpoint).checkpoint  # torch types it in part


def checkpoint_segment(modules: Sequence[nn.Module], run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``run(x)``; its intermediate results are computed again in the backward pass.

    Args:
        modules: the modules that ``run`` calls.
        run: a part of a network.
        x: its input.

    >>> norm = nn.BatchNorm1d(2)
    >>> y = checkpoint_segment([norm], norm, torch.randn(8, 2, requires_grad=True))
    >>> y.sum().backward()
    >>> int(norm.num_batches_tracked)
    1
    """
    if torch.compiler.is_compiling():  # the compiler computes again without side effects
        return _checkpoint(run, x, use_reentrant=False)
    inside = [each for module in modules for each in cast("Iterable[nn.Module]", module.modules())]
    generators = {
        id(made): (made, made.get_state())
        for each in inside
        if isinstance(made := getattr(each, "generator", None), torch.Generator)
    }
    gates = {
        id(active): (active, active.current())
        for each in inside
        if isinstance(each, (GatedConv, ConsumerConv))
        for active in [each.active]
    }

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _second_pass(inside, list(generators.values()), list(gates.values()))

    return _checkpoint(run, x, use_reentrant=False, context_fn=contexts)


@contextmanager
def _second_pass(
    modules: Sequence[nn.Module],
    generators: Sequence[tuple[torch.Generator, Tensor]],
    gates: Sequence[tuple[ActiveGates, Mapping[str, Routing] | None]],
) -> Generator[None]:
    """Inside, the modules have copies of their buffers, and the generators and gates of the first pass."""
    # the buffers themselves stay as they are, as autograd refuses saved tensors that have changed
    buffers = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        if buffer is not None
    ]
    states = [(generator, generator.get_state()) for generator, _ in generators]
    current = [(active, active.current()) for active, _ in gates]
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.clone()  # pyright: ignore[reportPrivateUsage]
        for generator, state in generators:
            generator.set_state(state)
        for active, routing in gates:
            active.replace(routing)
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]
        for generator, state in states:
            generator.set_state(state)
        for active, routing in current:
            active.replace(routing)
