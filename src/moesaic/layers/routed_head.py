"""``RoutedHead``: logits from the few positions of a map that its experts choose, in place of mean pooling.

A mean over all positions dilutes what only few of them show; here every linear expert reads the positions it scores
highest (expert choice of 1×1 patches, as in `PatchMoE`), and the logits are the mean over experts.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_positive
from moesaic.layers.patch_moe import PatchMoE
from moesaic.routing.expert_choice import ExpertChoice, ExpertGate
from moesaic.tensor_checks import check_tensor

__all__ = ["RoutedHead", "as_map"]


class RoutedHead(nn.Module):
    """Routes the positions of a map (B, C, H, W), or tokens (B, N, C), to linear experts; returns logits (B, classes).

    With S_e the positions that expert e selects and g_en their gates:

        logits = 1/E Σₑ Σ_{n ∈ S_e} g_en (W_e xₙ + b_e)

    The routing is that of ``moe``, a `PatchMoE`, so that `record_routing`, overlays and backends work as for any
    routed layer.

    Args:
        in_channels: channels of the map, or features of a token.
        num_classes: number of logits.
        experts: number of linear experts.
        patches_per_expert: positions of each image that an expert selects.
        gate: as in `PatchMoE`.

    >>> import torch, moesaic
    >>> head = moesaic.RoutedHead(1280, 4, experts=8, patches_per_expert=2)
    >>> head(torch.randn(2, 1280, 7, 7)).shape, head(torch.randn(2, 49, 1280)).shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    >>> with moesaic.record_routing(head) as routing:
    ...     logits = head(torch.randn(2, 1280, 7, 7))
    >>> routing["moe"].index.shape, routing["moe"].grid
    (torch.Size([2, 8, 2]), (7, 7))
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        experts: int = 8,
        patches_per_expert: int = 8,
        gate: ExpertGate = "softmax_selected",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("RoutedHead", in_channels=in_channels, num_classes=num_classes, experts=experts)
        self.moe = PatchMoE(
            in_channels,
            num_classes,
            experts=experts,
            patches_per_expert=patches_per_expert,
            gate=gate,
            combine="sum",
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = as_map("RoutedHead", x, self.moe.in_channels)
        if torch.compiler.is_exporting() and isinstance(self.moe.router, ExpertChoice):
            return self._pooled(x) / len(self.moe.experts)
        return self.moe(x).sum((2, 3)) / len(self.moe.experts)

    def _pooled(self, x: Tensor) -> Tensor:
        """The sum over the map without the map: experts are linear, so positions are summed before two matmuls."""
        x, routing, _ = self.moe.prepare(x)
        weight, bias = cast(Tensor, self.moe.experts.weight), cast("Tensor | None", self.moe.experts.bias)
        gates_BEN = routing.weights.transpose(1, 2).to(x.dtype)
        values_BEC = gates_BEN @ x.flatten(2).transpose(1, 2)
        logits = values_BEC.flatten(1) @ weight.flatten(2).transpose(1, 2).flatten(0, 1)
        return logits if bias is None else logits + gates_BEN.sum(2) @ bias


def as_map(owner: str, x: Tensor, channels: int, weight: Tensor | None = None) -> Tensor:
    """Returns a map (B, C, H, W) as it is, and tokens (B, N, C) as a map: a square one where N is a square.

    Raises unless it has that number of channels, and is on the device of ``weight``.
    """
    check_tensor(owner, x, "a map (B, C, H, W) or tokens (B, N, C)", weight)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{owner}: takes a map (B, C, H, W) or tokens (B, N, C), got {x.ndim} axes {tuple(x.shape)}; give it the "
            "output of a backbone before pooling"
        )
    found = x.shape[1 if x.ndim == 4 else 2]
    if found != channels:
        raise ValueError(
            f"{owner}: in_channels={channels}, got {found} channels {tuple(x.shape)}; axes are (B, C, H, W), or "
            "(B, N, C) for tokens"
        )
    if not x.is_floating_point():
        raise TypeError(f"{owner}: takes floating-point features, got {x.dtype}; convert with x.float()")
    if x.ndim == 4:
        return x
    side = math.isqrt(x.shape[1])
    grid = (side, side) if side * side == x.shape[1] else (1, x.shape[1])
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *grid)
