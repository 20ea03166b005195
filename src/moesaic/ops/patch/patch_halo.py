"""Frames: the positions around a patch to which its pixels contribute.

A pixel of a k×k convolution contributes to positions up to k // 2 away. Under ``context="map"`` the frame of a p×p
patch is therefore F×F with F = p + 2 (k // 2), under ``context="patch"`` the patch itself. A rank that gets a patch of
another rank's image does not know where on the map it is and sums into frames; the rank that has the image adds them:

    frame[P, i + shift_k] += W_e[k] · patch[P, i]        y[origin_P + f] += frame[P, f]
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.ops.collectives import all_reduce_sum
from moesaic.ops.dispatch import PatchSpec
from moesaic.ops.patch.gather import RoutedPixels
from moesaic.ops.patch.scatter_conv import ScatterIndex

__all__ = ["ReceivedPixels", "frame_side", "frames_to_map"]


def frame_side(spec: PatchSpec, kernel: int) -> int:
    """Side F of a frame.

    >>> frame_side(PatchSpec(4, "input", "map", "concat"), 3), frame_side(PatchSpec(4, "input", "patch", "concat"), 3)
    (6, 4)
    """
    return spec.patch_size + (2 * (kernel // 2) if spec.context == "map" else 0)


def frames_to_map(pixels: RoutedPixels, kernel: int) -> ScatterIndex:
    """Index of the output row to which each of the P·F·F positions of the routed patches' frames contributes."""
    (H, W), p, side = pixels.map_size, pixels.spec.patch_size, frame_side(pixels.spec, kernel)
    first = slice(None, None, p * p)  # the first pixel of each patch
    offset = torch.arange(side, device=pixels.position_R.device) - (side - p) // 2
    origin_P = pixels.position_R[first]
    y_PF = (origin_P // W).unsqueeze(1) + offset
    x_PF = (origin_P % W).unsqueeze(1) + offset
    inside_PFF = ((y_PF >= 0) & (y_PF < H)).unsqueeze(2) & ((x_PF >= 0) & (x_PF < W)).unsqueeze(1)
    if pixels.used_R is not None:
        inside_PFF = inside_PFF & pixels.used_R[first].view(-1, 1, 1)
    position_PFF = y_PF.unsqueeze(2) * W + x_PF.unsqueeze(1)
    row_PFF = position_PFF * pixels.groups + pixels.map_start_R[first].view(-1, 1, 1)
    row_PFF = torch.where(inside_PFF, row_PFF, pixels.dummy_row_R[first].view(-1, 1, 1))
    return ScatterIndex(row_PFF.view(-1, 1), pixels.rows, pixels.dummy_rows, within_pixels=False)


@dataclass(frozen=True)
class ReceivedPixels(RoutedPixels):
    """Pixels that a rank received for its experts from the images of several ranks."""

    replicas: tuple[dist.ProcessGroup, ...]
    """Groups of ranks that have the same experts and other images, over which statistics are summed too."""

    @staticmethod
    def of(pixels: RoutedPixels, replicas: tuple[dist.ProcessGroup, ...]) -> ReceivedPixels:
        """Returns pixels as received ones."""
        return ReceivedPixels(**{each.name: getattr(pixels, each.name) for each in fields(pixels)}, replicas=replicas)

    def sum_per_expert(self, terms: Tensor) -> Tensor:
        total = super().sum_per_expert(terms)
        for group in self.replicas:
            total = all_reduce_sum(total, group)
        return total

    def scatter_to_map(self, kernel: int, *, background: bool = False) -> ScatterIndex:
        """Index of the row of the frames (P·F·F) to which each tap of each pixel contributes."""
        p, side = self.spec.patch_size, frame_side(self.spec, kernel)
        device, margin = self.position_R.device, (side - p) // 2
        tap, pixel = torch.arange(kernel * kernel, device=device), torch.arange(p * p, device=device).unsqueeze(1)
        y = pixel // p + (margin + kernel // 2 - tap // kernel)
        x = pixel % p + (margin + kernel // 2 - tap % kernel)
        patches = self.patch_id_P.shape[0]
        rows = patches * side * side
        inside = (y >= 0) & (y < side) & (x >= 0) & (x < side)
        start_P = torch.arange(patches, device=device).view(-1, 1, 1) * (side * side)
        row_Rk = torch.where(inside, y * side + x + start_P, rows).view(-1, kernel * kernel)
        if background:
            row_Rk = self._append_background(row_Rk, rows)
        return ScatterIndex(row_Rk, rows, 1, within_pixels=False)
