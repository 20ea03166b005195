"""Where the chosen pixels of a batch are, expert by expert, and where their contributions land.

Integer arithmetic on the device only: no host sync, and static shapes where experts choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.ops.dispatch import Context, PatchSpec
from moesaic.ops.grouped_gemm import grouped_matmul
from moesaic.ops.patch.scatter_conv import Landing
from moesaic.routing_record import UNASSIGNED, Routing

__all__ = ["Pixels", "pixels_of_patches", "taps_of_pixels"]


@dataclass(frozen=True)
class Pixels:
    """R chosen pixels, those of expert 0 first; each patch's p·p pixels lie together.

    Values of pixels are (E, M, ·) where all experts have equally many (``ends`` is None), and
    (R, ·) where they do not; then ``ends`` (E,) says after which row each expert's pixels end.
    """

    routing: Routing
    spec: PatchSpec
    map_size: tuple[int, int]
    image_R: Tensor
    expert_R: Tensor
    at_R: Tensor
    """Where on its map a pixel is: y · W + x."""
    gate_R: Tensor
    used_R: Tensor | None
    """None where every pixel is used. What is not used reads patch 0 and is written nowhere."""
    ends: Tensor | None
    place_P: Tensor
    """Of each chosen patch: its image, its place on the grid and its expert as one number below B·N·E, or B·N·E."""

    @staticmethod
    def chosen(routing: Routing, x: Tensor, spec: PatchSpec) -> Pixels:
        """The pixels of a map (B, C, H, W) that a routing by choice sends to experts."""
        if routing.index is None:
            raise ValueError("Pixels: a soft routing chooses no pixels")
        E, area = routing.experts, spec.patch_size**2
        each_expert = torch.arange(E, device=x.device)
        if routing.chooser == "expert":
            B, _, L = routing.index.shape
            patch_P = routing.index.transpose(0, 1).flatten()
            gate_P = routing.gate.transpose(0, 1).flatten()
            expert_P = each_expert.view(E, 1, 1).expand(E, B, L).flatten()
            image_P = torch.arange(B, device=x.device).view(1, B, 1).expand(E, B, L).flatten()
            used_P = patch_P != UNASSIGNED if routing.may_drop else None
            ends = None
        else:
            _, N, K = routing.index.shape
            asked = routing.index.flatten()
            # whoever was dropped sits with the last expert
            expert_P, order = torch.where(asked == UNASSIGNED, E - 1, asked).sort(stable=True)
            image_P, patch_P = order // (N * K), order // K % N
            gate_P = routing.gate.flatten().index_select(0, order)
            used_P = (asked != UNASSIGNED).index_select(0, order) if routing.may_drop else None
            ends = torch.searchsorted(expert_P, each_expert, right=True) * area
        if used_P is not None:
            patch_P = patch_P.clamp_min(0)
        place_P = (image_P * routing.units + patch_P) * E + expert_P
        if used_P is not None:
            place_P = place_P.where(used_P, routing.batch * routing.units * E)

        def per_pixel(of_P: Tensor) -> Tensor:
            return of_P.unsqueeze(1).expand(-1, area).flatten()

        H, W = x.shape[2], x.shape[3]
        return Pixels(
            routing=routing,
            spec=spec,
            map_size=(H, W),
            image_R=per_pixel(image_P),
            expert_R=per_pixel(expert_P),
            at_R=pixels_of_patches(patch_P, W, spec.patch_size).flatten(),
            gate_R=per_pixel(gate_P),
            used_R=None if used_P is None else per_pixel(used_P),
            ends=ends,
            place_P=place_P,
        )

    @property
    def area(self) -> int:
        """Pixels of a map."""
        return self.map_size[0] * self.map_size[1]

    @property
    def lanes(self) -> int:
        """How many rows of the output a pixel has: one, or one per expert under ``concat``."""
        return self.routing.experts if self.spec.combine == "concat" else 1

    @property
    def rows(self) -> int:
        """Rows of the output: (B, H, W), times E under ``concat``."""
        return self.routing.batch * self.area * self.lanes

    @property
    def rows_beyond(self) -> int:
        """Rows past the output's, for what lands nowhere: one per image and lane, lest threads queue for one.

        And one more: experts' rest lands nowhere even where there is no image.
        """
        return self.routing.batch * self.lanes + 1

    def take(self, rows: Tensor) -> Tensor:
        """The pixels' values out of a batch of maps laid out as rows (B·H·W, C)."""
        return self.grouped(rows.index_select(0, self.image_R * self.area + self.at_R))

    def take_by_expert(self, maps_EHWO: Tensor) -> Tensor:
        """(R, ·): the pixels' values out of one map per expert."""
        return maps_EHWO.flatten(0, 2).index_select(0, self.expert_R * self.area + self.at_R)

    def grouped(self, rows: Tensor) -> Tensor:
        """(R, ·) in the leading shape of pixel values."""
        E = self.routing.experts
        return rows if self.ends is not None else rows.view(E, rows.shape[0] // E, rows.shape[1])

    def per_expert(self, values_EC: Tensor) -> Tensor:
        """A vector per expert, to broadcast over its pixels."""
        return values_EC.unsqueeze(1) if self.ends is None else values_EC.index_select(0, self.expert_R)

    def rows_of_expert(self, values_EO: Tensor) -> Tensor:
        """(R, ·): each pixel's value out of a vector per expert."""
        if self.ends is not None:
            return values_EO.index_select(0, self.expert_R)
        E, O = values_EO.shape
        return values_EO.unsqueeze(1).expand(E, self.at_R.shape[0] // E, O).reshape(-1, O)

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many used pixels each expert has, (E, 1), and the mean and variance (E, C) of their values."""
        used = None if self.used_R is None else self.grouped(self.used_R.unsqueeze(1))

        def total(of: Tensor) -> Tensor:
            of = of if used is None else of.where(used, 0)
            if self.ends is None:
                return of.sum(1)
            return of.new_zeros(self.routing.experts, of.shape[1]).index_add(0, self.expert_R, of)

        count = total(torch.ones_like(values[..., :1]))
        mean = total(values) / count.clamp_min(1)
        return count, mean, total((values - self.per_expert(mean)).square()) / count.clamp_min(1)

    def matmul(self, values: Tensor, weight_EOC: Tensor) -> Tensor:
        """Each expert's pixels times its matrix."""
        weight_ECO = weight_EOC.transpose(1, 2)
        return torch.bmm(values, weight_ECO) if self.ends is None else grouped_matmul(values, weight_ECO, self.ends)

    def own_rows(self) -> Tensor:
        """(R,): which row of the output a pixel itself is; what is not used is on a row past those."""
        own_R = self._map_R + self.at_R * self.lanes
        return own_R if self.used_R is None else torch.where(self.used_R, own_R, self._beyond_R)

    def landing_on_map(self, kernel: int, *, rest: bool = False) -> Landing:
        """On which row of the output each tap of each pixel lands.

        What leaves the map, or its patch under ``context="patch"``, lands past the rows. With ``rest`` a pixel more of
        each expert, its last, lands nowhere.
        """
        there, inside, _, of_pixels = self._taps(kernel)
        inside_Rk = of_pixels(inside)
        if self.used_R is not None:
            inside_Rk = inside_Rk & self.used_R.unsqueeze(1)
        at_Rk = of_pixels(there * self.lanes) + self._map_R.unsqueeze(1)
        at_Rk = torch.where(inside_Rk, at_Rk, self._beyond_R.unsqueeze(1))
        if rest:
            at_Rk = self._with_rest(at_Rk, self.rows)
        return Landing(at_Rk, self.rows, self.rows_beyond, among_pixels=False)

    def landing_on_pixels(self, kernel: int, *, rest: bool = False) -> Landing:
        """On which of its expert's own pixels each tap of each pixel lands; what lands elsewhere counts nowhere."""
        routing, p, (_, W) = self.routing, self.spec.patch_size, self.map_size
        places = routing.batch * routing.units * routing.experts
        rows = self.at_R.shape[0] + (routing.experts if rest else 0)
        number_P = torch.arange(self.place_P.shape[0], device=self.at_R.device)
        there, inside, patch, of_pixels = self._taps(kernel)
        within_Rk = of_pixels(there // W % p * p + there % W % p)
        lands_Rk = of_pixels(inside)
        if self.spec.context == "patch":
            number_Rk = number_P.unsqueeze(1).expand(-1, p * p).reshape(-1, 1)
        else:
            number_of = number_P.new_full((places + 1,), -1).scatter(0, self.place_P, number_P)
            first_R = self.image_R * (routing.units * routing.experts) + self.expert_R
            place_Rk = of_pixels(patch * routing.experts) + first_R.unsqueeze(1)
            number_Rk = number_of.index_select(0, place_Rk.flatten()).view(place_Rk.shape)
            lands_Rk = lands_Rk & (number_Rk >= 0)
        if self.used_R is not None:
            lands_Rk = lands_Rk & self.used_R.unsqueeze(1)
        at_Rk = number_Rk * (p * p) + within_Rk
        if rest:
            at_Rk = at_Rk + at_Rk // max(self._each, 1)  # behind each expert's pixels there is one more
        at_Rk = torch.where(lands_Rk, at_Rk, (self.at_R + rows).unsqueeze(1))
        if rest:
            at_Rk = self._with_rest(at_Rk, rows)
        return Landing(at_Rk, rows, self.area, among_pixels=True)

    def _with_rest(self, at_Rk: Tensor, nowhere: int) -> Tensor:
        by_expert = at_Rk.view(self.routing.experts, self._each, at_Rk.shape[1])
        return F.pad(by_expert, (0, 0, 0, 1), value=nowhere).flatten(0, 1)

    @property
    def _each(self) -> int:
        """M, pixels of an expert where all have equally many."""
        return self.at_R.shape[0] // self.routing.experts

    @property
    def _map_R(self) -> Tensor:
        """The row of the output at which a pixel's map begins, for its expert."""
        lane_R = self.expert_R if self.lanes > 1 else 0
        return self.image_R * (self.area * self.lanes) + lane_R

    @property
    def _beyond_R(self) -> Tensor:
        lane_R = self.expert_R if self.lanes > 1 else 0
        return self.image_R * self.lanes + (lane_R + self.routing.batch * self.area * self.lanes)

    def _taps(self, kernel: int) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Where taps land, whether they stay, and on which patch; and how to get from such a table to pixels (R, …).

        Tables are of the whole map, which is small. A compiler computes them for each pixel just as well, and
        Inductor fails on the index arithmetic of looking them up.
        """
        per_pixel = torch.compiler.is_compiling()
        at = self.at_R if per_pixel else torch.arange(self.area, device=self.at_R.device)
        tables = taps_of_pixels(at, self.map_size, kernel, self.spec.patch_size, self.spec.context)

        def of_pixels(table: Tensor) -> Tensor:
            return table if per_pixel else table.index_select(0, self.at_R)

        return *tables, of_pixels


def taps_of_pixels(
    at_Q: Tensor, map_size: tuple[int, int], kernel: int, patch_size: int, context: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of some pixels of a map and each tap, (Q, kernel·kernel): where it lands, whether it stays, which patch.

    >>> there, inside, _ = taps_of_pixels(torch.tensor([3]), (2, 2), 3, 1, "map")
    >>> there[inside].tolist()  # the last pixel of a 2×2 map gives to all four
    [3, 2, 1, 0]
    """
    (H, W), p = map_size, patch_size
    tap = torch.arange(kernel * kernel, device=at_Q.device)
    y, inside_y = _shifted(at_Q // W, kernel // 2 - tap // kernel, H, H if context == "map" else p)
    x, inside_x = _shifted(at_Q % W, kernel // 2 - tap % kernel, W, W if context == "map" else p)
    return y * W + x, inside_y & inside_x, y // p * (W // p) + x // p


def _shifted(here_Q: Tensor, shift_k: Tensor, size: int, room: int) -> tuple[Tensor, Tensor]:
    """Where taps land along one axis, and whether they stay in the same stretch of ``room``."""
    here = here_Q.unsqueeze(1)
    there = here + shift_k
    stays = there.div(room, rounding_mode="floor") == here // room
    return there.clamp(0, size - 1), stays


def pixels_of_patches(patch_P: Tensor, W: int, p: int) -> Tensor:
    """(P, p·p): where the pixels of some patches are on maps that are W wide.

    >>> pixels_of_patches(torch.tensor([0, 3]), 4, 2).tolist()
    [[0, 1, 4, 5], [10, 11, 14, 15]]
    """
    first = patch_P // (W // p) * (p * W) + patch_P % (W // p) * p
    side = torch.arange(p, device=patch_P.device)
    return first.unsqueeze(1) + (side.unsqueeze(1) * W + side).flatten()
