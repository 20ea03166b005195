"""Gather and scatter indices of the routed pixels of a batch.

    gather:   values[r] = x[image_R[r], position_R[r]]      R pixels, sorted by expert
    scatter:  y[row_Rk[r, k]] += contribution[r, k]       tap k of pixel r, for `scatter_conv`

Maps are read as rows (B·H·W, C) and written as rows (B·H·W·G, O), G = E under ``combine="concat"`` and 1 under
``"sum"``. Indices are computed on the device, without a host sync; under expert choice all shapes are static.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import Context, PatchSpec
from moesaic.ops.expert_linear import expert_linear
from moesaic.ops.grouped_gemm import group_ends
from moesaic.ops.patch.scatter_conv import ScatterIndex
from moesaic.routing_record import UNASSIGNED, Routing

__all__ = ["RoutedPixels", "patch_pixels", "tap_targets"]


@dataclass(frozen=True)
class RoutedPixels:
    """Indices of the R routed pixels, sorted by expert; the p·p pixels of a patch are consecutive.

    Values of pixels are (E, M, ·) under expert choice, where all experts have M pixels and ``ends_E`` is None, and
    (R, ·) where units choose; the pixels of expert e then end before row ``ends_E[e]``.
    """

    routing: Routing
    spec: PatchSpec
    map_size: tuple[int, int]
    image_R: Tensor
    expert_R: Tensor
    position_R: Tensor
    """Position of a pixel on its map: y · W + x."""
    gate_R: Tensor
    used_R: Tensor | None
    """False for pixels of unassigned patch_ids: they read patch 0 and are not written. None if all pixels are used."""
    ends_E: Tensor | None
    patch_id_P: Tensor
    """(image · N + patch) · E + expert of each routed patch; B·N·E for an unassigned place."""

    @staticmethod
    def from_routing(routing: Routing, x: Tensor, spec: PatchSpec) -> RoutedPixels:
        """Returns the pixels of a map (B, C, H, W) that the routing sends to experts."""
        if routing.index is None:
            raise ValueError("RoutedPixels: a soft routing has no index of pixels")
        E, area = routing.experts, spec.patch_size**2
        each_expert = torch.arange(E, device=x.device)
        if routing.chooser == "expert":
            B, _, L = routing.index.shape
            patch_P = routing.index.transpose(0, 1).flatten()
            gate_P = routing.gate.transpose(0, 1).flatten()
            expert_P = each_expert.view(E, 1, 1).expand(E, B, L).flatten()
            image_P = torch.arange(B, device=x.device).view(1, B, 1).expand(E, B, L).flatten()
            used_P = patch_P != UNASSIGNED if routing.may_drop else None
            ends_E = None
        else:
            _, N, K = routing.index.shape
            choice = routing.index.flatten()
            # dropped units are sorted to the last expert, with gate 0
            expert_P, order = torch.where(choice == UNASSIGNED, E - 1, choice).sort(stable=True)
            image_P, patch_P = order // (N * K), order // K % N
            gate_P = routing.gate.flatten().index_select(0, order)
            used_P = (choice != UNASSIGNED).index_select(0, order) if routing.may_drop else None
            ends_E = group_ends(expert_P, E) * area
        if used_P is not None:
            patch_P = patch_P.clamp_min(0)
        patch_id_P = (image_P * routing.units + patch_P) * E + expert_P
        if used_P is not None:
            patch_id_P = patch_id_P.where(used_P, routing.batch * routing.units * E)

        def per_pixel(value_P: Tensor) -> Tensor:
            return value_P.unsqueeze(1).expand(-1, area).flatten()

        H, W = x.shape[2], x.shape[3]
        return RoutedPixels(
            routing=routing,
            spec=spec,
            map_size=(H, W),
            image_R=per_pixel(image_P),
            expert_R=per_pixel(expert_P),
            position_R=_pixels(patch_P, (H, W), spec.patch_size).flatten(),
            gate_R=per_pixel(gate_P),
            used_R=None if used_P is None else per_pixel(used_P),
            ends_E=ends_E,
            patch_id_P=patch_id_P,
        )

    @property
    def area(self) -> int:
        """Pixels per map."""
        return self.map_size[0] * self.map_size[1]

    @property
    def groups(self) -> int:
        """Rows of the output per pixel: E under ``combine="concat"``, otherwise 1."""
        return self.routing.experts if self.spec.combine == "concat" else 1

    @property
    def rows(self) -> int:
        """Rows of the output: B · H · W · groups."""
        return self.routing.batch * self.area * self.groups

    @property
    def dummy_rows(self) -> int:
        """Rows after the output that receive contributions outside the map; they are dropped.

        One per image and group, because threads that add to one row would wait for each other; and one more, for the
        experts' background in an empty batch.
        """
        return self.routing.batch * self.groups + 1

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers the pixels' values from maps laid out as rows (B·H·W, C)."""
        return self.by_expert(rows.index_select(0, self.image_R * self.area + self.position_R))

    def gather_by_expert(self, maps_EHWO: Tensor) -> Tensor:
        """Gathers the pixels' values (R, O) from one map per expert."""
        return maps_EHWO.flatten(0, 2).index_select(0, self.expert_R * self.area + self.position_R)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Reshapes (R, ·) to the layout of pixel values: (E, M, ·), or (R, ·) where units choose."""
        E = self.routing.experts
        return rows if self.ends_E is not None else rows.view(E, rows.shape[0] // E, rows.shape[1])

    def broadcast_per_expert(self, values_EC: Tensor) -> Tensor:
        """Makes one vector per expert broadcastable to pixel values."""
        return values_EC.unsqueeze(1) if self.ends_E is None else values_EC.index_select(0, self.expert_R)

    def expand_per_expert(self, values_EO: Tensor) -> Tensor:
        """Expands one vector per expert to its pixels: (R, O)."""
        if self.ends_E is not None:
            return values_EO.index_select(0, self.expert_R)
        E, O = values_EO.shape
        return values_EO.unsqueeze(1).expand(E, self.position_R.shape[0] // E, O).reshape(-1, O)

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of used pixels (E, 1) of each expert, and the mean and variance (E, C) of their values."""
        count = self.sum_per_expert(torch.ones_like(values[..., :1]))
        mean = self.sum_per_expert(values) / count.clamp_min(1)
        squares = (values - self.broadcast_per_expert(mean)).square()
        return count, mean, self.sum_per_expert(squares) / count.clamp_min(1)

    def sum_per_expert(self, terms: Tensor) -> Tensor:
        """Returns the sum (E, C) of each expert's used pixels."""
        if self.used_R is not None:
            terms = terms.where(self.by_expert(self.used_R.unsqueeze(1)), 0)
        if self.ends_E is None:
            return terms.sum(1)
        return terms.new_zeros(self.routing.experts, terms.shape[1]).index_add(0, self.expert_R, terms)

    def matmul(self, values: Tensor, weight_EOC: Tensor) -> Tensor:
        """Multiplies each expert's pixels by its matrix."""
        return expert_linear(values, weight_EOC, self.ends_E)

    def output_index(self) -> Tensor:
        """Returns the output row (R,) of each pixel itself; a dummy row for unused pixels."""
        own_R = self.map_start_R + self.position_R * self.groups
        return own_R if self.used_R is None else torch.where(self.used_R, own_R, self.dummy_row_R)

    def scatter_index(self, kernel: int, *, background: bool = False) -> ScatterIndex:
        """`scatter_to_pixels` under ``gate_on="output"``, where all other pixels have gate 0; else `scatter_to_map`."""
        scatter = self.scatter_to_pixels if self.spec.gate_on == "output" else self.scatter_to_map
        return scatter(kernel, background=background)

    def scatter_to_map(self, kernel: int, *, background: bool = False) -> ScatterIndex:
        """Index of the output row to which each tap of each pixel contributes.

        Contributions outside the map, or outside the patch under ``context="patch"``, go to dummy rows. With
        ``background`` every expert has one more pixel, its last, which contributes to dummy rows only.
        """
        target, inside, _, per_pixel = self._tap_tables(kernel)
        inside_Rk = per_pixel(inside)
        if self.used_R is not None:
            inside_Rk = inside_Rk & self.used_R.unsqueeze(1)
        row_Rk = per_pixel(target * self.groups) + self.map_start_R.unsqueeze(1)
        row_Rk = torch.where(inside_Rk, row_Rk, self.dummy_row_R.unsqueeze(1))
        if background:
            row_Rk = self._append_background(row_Rk, self.rows)
        return ScatterIndex(row_Rk, self.rows, self.dummy_rows, within_pixels=False)

    def scatter_to_pixels(self, kernel: int, *, background: bool = False) -> ScatterIndex:
        """Index of the expert's own pixel to which each tap of each pixel contributes; others go to dummy rows."""
        routing, p, (_, W) = self.routing, self.spec.patch_size, self.map_size
        patch_ids = routing.batch * routing.units * routing.experts
        rows = self.position_R.shape[0] + (routing.experts if background else 0)
        number_P = torch.arange(self.patch_id_P.shape[0], device=self.position_R.device)
        target, inside, patch, per_pixel = self._tap_tables(kernel)
        within_Rk = per_pixel(target // W % p * p + target % W % p)
        valid_Rk = per_pixel(inside)
        if self.spec.context == "patch":
            number_Rk = number_P.unsqueeze(1).expand(-1, p * p).reshape(-1, 1)
        else:
            number_of_id = number_P.new_full((patch_ids + 1,), -1).scatter(0, self.patch_id_P, number_P)
            first_id_R = self.image_R * (routing.units * routing.experts) + self.expert_R
            patch_id_Rk = per_pixel(patch * routing.experts) + first_id_R.unsqueeze(1)
            number_Rk = number_of_id.index_select(0, patch_id_Rk.flatten()).view(patch_id_Rk.shape)
            valid_Rk = valid_Rk & (number_Rk >= 0)
        if self.used_R is not None:
            valid_Rk = valid_Rk & self.used_R.unsqueeze(1)
        row_Rk = number_Rk * (p * p) + within_Rk
        if background:
            # each expert's background pixel follows its others
            row_Rk = row_Rk + row_Rk // max(self._pixels_per_expert, 1)
        row_Rk = torch.where(valid_Rk, row_Rk, (self.position_R + rows).unsqueeze(1))
        if background:
            row_Rk = self._append_background(row_Rk, rows)
        return ScatterIndex(row_Rk, rows, self.area, within_pixels=True)

    def _append_background(self, row_Rk: Tensor, dummy_row: int) -> Tensor:
        by_expert = row_Rk.view(self.routing.experts, self._pixels_per_expert, row_Rk.shape[1])
        return F.pad(by_expert, (0, 0, 0, 1), value=dummy_row).flatten(0, 1)

    @property
    def _pixels_per_expert(self) -> int:
        """M, under expert choice."""
        return self.position_R.shape[0] // self.routing.experts

    @property
    def map_start_R(self) -> Tensor:
        """Output row (R,) of position 0 of each pixel's map, in the group of its expert."""
        group_R = self.expert_R if self.groups > 1 else 0
        return self.image_R * (self.area * self.groups) + group_R

    @property
    def dummy_row_R(self) -> Tensor:
        """Row (R,) after the output for contributions of each pixel that are dropped."""
        group_R = self.expert_R if self.groups > 1 else 0
        return self.image_R * self.groups + (group_R + self.routing.batch * self.area * self.groups)

    def _tap_tables(self, kernel: int) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Returns the tables of `tap_targets`, and a function that looks a table up for the R pixels.

        Tables cover all positions of one map, which are few. Under torch.compile they are computed for the R pixels
        themselves, because Inductor fails on the index arithmetic of the lookup. ONNX runtimes compute tables once.
        """
        compiling = torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export()
        positions = self.position_R if compiling else torch.arange(self.area, device=self.position_R.device)
        tables = tap_targets(positions, self.map_size, kernel, self.spec.patch_size, self.spec.context)

        def per_pixel(table: Tensor) -> Tensor:
            return table if compiling else table.index_select(0, self.position_R)

        return *tables, per_pixel


def tap_targets(
    position_Q: Tensor, map_size: tuple[int, int], kernel: int, patch_size: int, context: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for positions on a map and the taps of a kernel, three tables (Q, kernel·kernel).

    Tables: the position to which the tap contributes, whether it is inside the map (or the patch, under
    ``context="patch"``), and the patch it is in.

    >>> target, inside, _ = tap_targets(torch.tensor([3]), (2, 2), 3, 1, "map")
    >>> target[inside].tolist()  # the last pixel of a 2×2 map contributes to all four
    [3, 2, 1, 0]
    """
    (H, W), p = map_size, patch_size
    tap = torch.arange(kernel * kernel, device=position_Q.device)
    y, inside_y = _shift(position_Q // W, kernel // 2 - tap // kernel, H, H if context == "map" else p)
    x, inside_x = _shift(position_Q % W, kernel // 2 - tap % kernel, W, W if context == "map" else p)
    return y * W + x, inside_y & inside_x, y // p * (W // p) + x // p


def _shift(coordinate_Q: Tensor, offset_k: Tensor, size: int, extent: int) -> tuple[Tensor, Tensor]:
    """Returns coordinates plus offsets along one axis, and whether both are in the same interval of ``extent``."""
    coordinate = coordinate_Q.unsqueeze(1)
    shifted = coordinate + offset_k
    inside = shifted.div(extent, rounding_mode="floor") == coordinate // extent
    return shifted.clamp(0, size - 1), inside


def _pixels(patch_P: Tensor, map_size: tuple[int, int], p: int) -> Tensor:
    """`patch_pixels`, looked up in ONNX, where an integer division is seven operations."""
    H, W = map_size
    if not torch.onnx.is_in_onnx_export():
        return patch_pixels(patch_P, W, p)
    return patch_pixels(torch.arange((H // p) * (W // p), device=patch_P.device), W, p).index_select(0, patch_P)


def patch_pixels(patch_P: Tensor, W: int, p: int) -> Tensor:
    """Returns the positions (P, p·p) of the pixels of some patches, on maps of width W.

    >>> patch_pixels(torch.tensor([0, 3]), 4, 2).tolist()
    [[0, 1, 4, 5], [10, 11, 14, 15]]
    """
    first = patch_P // (W // p) * (p * W) + patch_P % (W // p) * p
    side = torch.arange(p, device=patch_P.device)
    return first.unsqueeze(1) + (side.unsqueeze(1) * W + side).flatten()
