"""What networks for images have in common: a vector for each image, and a linear layer that reads it."""

from __future__ import annotations

from torch import Tensor, nn

from moesaic.checks import at_least_one

__all__ = ["GlobalMean", "VectorNetwork"]


class VectorNetwork(nn.Module):
    """An image becomes a vector, and the vector the scores of the classes."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        at_least_one(type(self).__name__, classes=classes)
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, width)."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class GlobalMean(nn.Module):
    """The mean over the map, (B, C, H, W) to (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
