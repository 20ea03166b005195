"""The routing of a layer's channels that was computed together with those of other layers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from moesaic.routing_record import Routing

__all__ = ["JointRouting"]


@dataclass(frozen=True, eq=False)
class JointRouting(Routing):
    """A routing by channel whose dense gates exist already, as parts of tensors that layers share."""

    block_gates: Tensor | None = None
    """(B, 1, E): ``weights``."""
    channel_gates: Tensor | None = None
    """(B, C): the gate of every channel, in the dtype of the map."""
    closed_gradients: bool = False
    """Whether the dense gates have gradients where they are closed."""

    @property
    def weights(self) -> Tensor:
        return super().weights if self.block_gates is None else self.block_gates

    def detach(self) -> Routing:
        plain = Routing(**{field.name: getattr(self, field.name) for field in fields(Routing)})
        return plain.detach()
